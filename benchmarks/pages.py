"""Pages whose figures come from records: README.md and those of docs/ that quote a measurement.

    python -m benchmarks.pages            # writes the pages
    python -m benchmarks.pages --check    # says which pages are not what their templates and the records make of them

A page is made from a template, docs/pages/NAME.jinja, with jinja2. A template names a row of a record, and writes each
figure as an expression of it:

    {% set r = row("peers", case="bf16", kind="AMX") -%}
    OmniServe decodes {{ r.results.decode["1"].omniserve.tokens_per_s | n }} tokens/s ({{ r.source }}).

``r.source`` is the link to the record with its date and commit; it says so itself if more of the code has changed since
than the measurement allows (``benchmarks/measurements.py``). A page that quotes such a row and does not write its
``source`` is refused, and so is a figure with a unit (tokens/s, ms, %, times) that stands in a template as text. A
setting with such a unit is written as code, between backticks.
"""

from __future__ import annotations

import difflib
import os
import re
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.common.record import cpu_kind, read_row, read_rows
from benchmarks.common.sources import ROOT
from benchmarks.common.terminal import argument_parser
from benchmarks.measurements import RESULTS, state_of
from benchmarks.page_figures import FIGURES_AND_TABLES
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.report import Findings, names_of, number, span

TEMPLATES = ROOT / "docs" / "pages"
PAPERS = "reproduction.md.jinja"
"""The template of the papers' evaluation, which has names of its own (``benchmarks/paper/report.py``)."""
UNITS = r"%|tokens/s|requests/s|G[Bi]+/s|GFLOP/s|ms\b|us\b|times\b"
FIGURE = re.compile(rf"(?<![\w.{{-])(?<!attends )\d[\d,.]*(?: to \d[\d,.]*)?(?:x\b| ?(?:{UNITS}))")
"""A number with a unit that measurements have, as a reader sees it."""


class PageError(Exception):
    """A template that cannot be trusted; the message says where and why."""


class Row:
    """A row of a record, as a template sees it."""

    def __init__(self, record: str, row: dict[str, Any], page: Path) -> None:
        self.record, self.case, self.results, self.config = record, row["case"], row["results"], row["config"]
        environment = row["environment"]
        self.kind = cpu_kind(environment["hardware"])
        self.commit = (environment["git"]["commit"] or "")[:7]
        """Empty: the commit is not known, or is not in the project's history."""
        self.time, self.date = row["time"], row["time"][:10]
        self.versions = environment["versions"]
        self.state = state_of(record, row)
        self.is_said = False
        self.link = os.path.relpath(RESULTS / f"{record}.json", page.parent)

    @property
    def source(self) -> str:
        """The link to the record, with the date, the commit if there is one, and a word if that version is too old."""
        self.is_said = True
        old = ", an older version" if self.state.is_old else ""
        return f"[record]({self.link}) of {self.date}{f', {self.commit}' if self.commit else ''}{old}"

    def __str__(self) -> str:
        return f"{self.record}.json, case {self.case!r}, {self.kind}"


class Page:
    """One page, and the rows that it quotes."""

    def __init__(self, template: Path) -> None:
        self.template = template
        name = template.name.removesuffix(".jinja")
        self.path = ROOT / name if name == "README.md" else ROOT / "docs" / name
        self.rows: list[Row] = []

    def row(self, record: str, case: str = "", kind: str | None = None) -> Row:
        """Return a row of a record; the newest of all CPU kinds without ``kind``."""
        found = Row(record, read_row(RESULTS / f"{record}.json", case, kind), self.path)
        self.rows.append(found)
        return found

    def kinds(self, record: str, case: str = "") -> list[Row]:
        """Return the rows of a case, one of each CPU kind; none if it was not measured yet."""
        return self._rows_of(record, {case})

    def _rows_of(self, record: str, cases: Collection[str] | None = None) -> list[Row]:
        path = RESULTS / f"{record}.json"
        found = [row for row in (read_rows(path) if path.exists() else []) if cases is None or row["case"] in cases]
        rows = [Row(record, row, self.path) for row in found]
        self.rows += rows
        return rows

    def newest(self, record: str, case: str = "") -> list[Row]:
        """Return the newest row of a case, of whatever CPU kind; none if there is none yet."""
        path = RESULTS / f"{record}.json"
        found = path.exists() and any(row["case"] == case for row in read_rows(path))
        return [self.row(record, case)] if found else []

    def plots(self) -> str:
        """Return the papers' figures that were drawn from their record, each with its source."""
        parts = []
        for name, figure in FIGURES.items():
            picture = RESULTS / "figures" / f"{name}.png"
            if picture.exists():
                row = self.row("figures", name)
                place = os.path.relpath(picture, self.path.parent)
                runs = f"{row.config['seeds']} seeds of {row.config['minutes']:g} minutes"
                parts.append(f"![{figure.title}]({place})\n\n({row.source}, {runs})")
        return "\n\n".join(parts)

    def _findings(self) -> Findings:
        """Return the experiments of the papers' reproduction; all must be on the page."""
        rows = {row.case: row for row in self._rows_of("reproduction")}
        return Findings(
            {name: row.results for name, row in rows.items()}, {name: row.source for name, row in rows.items()}
        )

    def render(self) -> str:
        """Return the page's text.

        Raises:
            PageError: The template has a figure as text, asks for what no record has, or quotes an old row and does not
                say so.
        """
        source = self.template.read_text()
        if self.template.name != PAPERS:  # which also quotes the papers' own figures
            check_literals(source, str(self.template.relative_to(ROOT)))
        names: dict[str, Any] = {"row": self.row, "kinds": self.kinds, "newest": self.newest, "plots": self.plots}
        try:
            if self.template.name == PAPERS:
                names |= names_of(self._findings())
            text = environment(**names).from_string(source).render()
        except (jinja2.TemplateError, ValueError, OSError, KeyError, TypeError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise PageError(f"{self.template.relative_to(ROOT)}{line}: {type(error).__name__}: {error}") from error
        said = {str(row) for row in self.rows if row.is_said}
        for row in self.rows:
            if row.state.is_old and str(row) not in said:
                raise PageError(
                    f"{self.template.relative_to(ROOT)} quotes {row}, which is of an older version ({row.state.text}), "
                    "and does not write its `source`"
                )
        return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def environment(**names: Callable[..., Any]) -> jinja2.Environment:
    """Return the environment of templates: an unknown name is an error, not nothing."""
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    made.globals.update(FIGURES_AND_TABLES, measured=lambda record: (RESULTS / f"{record}.json").exists())
    made.globals.update(names)
    made.filters.update(
        n=number, span=span, mean=statistics.fmean,
        ms=lambda value_s, digits=0: f"{1e3 * value_s:,.{digits}f}",
        us=lambda value_s, digits=0: f"{1e6 * value_s:,.{digits}f}",
        short=lambda value: f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}",
        percent=lambda share, digits=0: f"{100 * share:.{digits}f} %",
      )  # fmt: skip
    return made


def check_literals(source: str, name: str) -> None:
    """Refuse a figure that stands in a template as text: it would stay when its record is measured again.

    Raises:
        PageError: There is one.
    """
    blank = re.sub(
        r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|```.*?```|`[^`\n]*`", lambda found: _blank(found[0]), source, flags=re.DOTALL
    )
    for count, line in enumerate(blank.splitlines(), 1):
        if found := FIGURE.search(line):
            raise PageError(
                f"{name}, line {count}: the figure {found[0]!r} stands there as text: take it from a record "
                "(benchmarks/pages.py says how), or, if it is a setting, put it between backticks"
            )


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", "\0", text)


def all_pages() -> list[Page]:
    """Return the pages that have a template."""
    return [Page(template) for template in sorted(TEMPLATES.glob("*.jinja"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 0 if all pages are right, 1 if one is not."""
    parser = argument_parser(__doc__, check=(False, "write nothing; exit with 1 if a page would change"))
    args = parser.parse_args(arguments)
    status = 0
    for page in all_pages():
        name = page.path.relative_to(ROOT)
        try:
            text = page.render()
        except PageError as error:
            print(f"pages: {error}", file=sys.stderr)
            status = 1
            continue
        there = page.path.read_text() if page.path.exists() else ""
        if text == there:
            continue
        if args.check:
            changes = difflib.unified_diff(
                there.splitlines(), text.splitlines(), str(name), "from its template", lineterm="", n=0
            )
            print("\n".join(changes))
            print(
                f"pages: {name} is not what {page.template.relative_to(ROOT)} makes of the records: make pages",
                file=sys.stderr,
            )
            status = 1
        else:
            page.path.write_text(text)
            print(f"wrote {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
