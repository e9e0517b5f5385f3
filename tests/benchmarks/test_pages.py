"""Pages come out of records: a wrong or loose figure anywhere is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.common.record import read_rows, write_rows
from benchmarks.common.sources import ROOT
from benchmarks.pages import Page, PageError, all_pages, check_literals

OTHERS = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    if path not in {page.path for page in all_pages()}
]


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.path.name)
def test_pages_are_what_their_templates_make_of_the_records(page: Page) -> None:
    assert page.render() == page.path.read_text(), "python -m benchmarks.pages writes it"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_pages_without_a_template_have_no_figures(path: Path) -> None:
    check_literals(path.read_text(), path.name)


def test_readme_and_performance_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "docs/performance.md").read_text().splitlines()) <= 410


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a page, its template and a record."""
    results, templates = tmp_path / "benchmarks" / "results", tmp_path / "docs" / "pages"
    results.mkdir(parents=True)
    templates.mkdir(parents=True)
    rows = [row for row in read_rows(ROOT / "benchmarks/results/decode_rate.json")]
    write_rows(results / "decode_rate.json", "decode_rate", [{**rows[0], "results": {"rate": 54.2}}])
    (templates / "README.md.jinja").write_text(
        '{% set r = row("decode_rate", "decode") %}\nIt decodes {{ r.results.rate | n }} tokens/s ({{ r.source }}).\n'
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", results)
    monkeypatch.setattr(pages, "TEMPLATES", templates)
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
    return tmp_path


def test_a_wrong_figure_in_a_page_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = copy / "README.md"
    text = page.read_text()
    assert "It decodes 54 tokens/s ([record](benchmarks/results/decode_rate.json) of " in text
    page.write_text(text.replace("54", "61"))
    assert pages.main(["--check"]) == 1
    out, err = capsys.readouterr()
    assert "-It decodes 61" in out and "+It decodes 54" in out and "README.md is not what" in err
    assert pages.main([]) == 0 and page.read_text() == text


def test_a_record_measured_again_changes_its_page(copy: Path) -> None:
    path = copy / "benchmarks/results/decode_rate.json"
    write_rows(path, "decode_rate", [{**row, "results": {"rate": 90.0}} for row in read_rows(path)])
    assert pages.main(["--check"]) == 1


def test_an_old_record_says_so_where_it_is_quoted(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "an older version" in (copy / "README.md").read_text()
    template = copy / "docs/pages/README.md.jinja"
    template.write_text(template.read_text().replace(" ({{ r.source }})", ""))
    assert pages.main(["--check"]) == 1
    assert "of an older version" in capsys.readouterr().err
    path = copy / "benchmarks/results/decode_rate.json"
    (row,) = read_rows(path)
    row["environment"]["sources"] = pages.Row("decode_rate", row, copy).state.change and _now()
    write_rows(path, "decode_rate", [row])
    assert pages.main([]) == 0, "a record of today's code needs no such word"


def _now() -> dict[str, tuple[str, int]]:
    from benchmarks.common.sources import sources_of

    return sources_of(["omniserve/engine/engine.py"])


@pytest.mark.parametrize(
    "text", ["61 tokens/s", "0.72 times", "85 % of them", "1.48x", "2.2 GB/s", "15.0 ms", "36 us", "4.0 to 5.1 times"]
)
def test_a_figure_in_a_template_is_refused(copy: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    template = copy / "docs/pages/README.md.jinja"
    template.write_text(template.read_text() + f"\nIt reaches {text}.\n")
    assert pages.main([]) == 1
    assert "README.md.jinja, line 4: the figure" in capsys.readouterr().err


def test_settings_and_code_are_no_figures() -> None:
    check_literals(
        "`--tpot 5 ms`, a TTFT of 0.3 s, 2 cores, {{ 4 | n }} ms, version 0.32\n```\n61 tokens/s\n```\n", "x"
    )


@pytest.mark.parametrize("name", ["rows", "r.results.nothing", 'row("nothing")', 'row("decode_rate", "nothing")'])
def test_what_no_record_has_is_an_error(copy: Path, name: str) -> None:
    template = copy / "docs/pages/README.md.jinja"
    template.write_text(template.read_text() + "\n{{ " + name + " }}\n")
    with pytest.raises(PageError, match=re.escape("README.md.jinja")):
        Page(template).render()
