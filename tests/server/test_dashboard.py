"""The dashboard asks for nothing that the server does not tell."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import httpx
import pytest

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "omniserve.json").read_text())
QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? \S+")


@pytest.fixture(scope="module")
def labels(start_module_server):
    """Return the labels of each metric of a server that has served nothing yet, but for one call to a wrong path."""
    server = start_module_server().wait_until_ready()
    httpx.get(f"{server.url}/v1/nothing")
    names = defaultdict(set)
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if sample := _SAMPLE.fullmatch(line):
            names[sample[1]].update(re.findall(r'(\w+)="', sample[2] or ""))
    return names


@pytest.mark.parametrize(("title", "query", "legend"), QUERIES, ids=lambda value: value[:40])
def test_query_asks_for_what_there_is(labels, title, query, legend):
    names = re.findall(r"omniserve_\w+", query)
    assert names
    for name in names:
        assert name in labels, f"{title}: /metrics has no {name}"
    there = set().union(*(labels[name] for name in names))
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    chosen = set(re.findall(r"[{,](\w+)=", query))
    assert grouped | chosen <= there, f"{title}: {query}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= (grouped or there), f"{title}: {legend}"
    assert query.count("(") == query.count(")")


def test_panels_do_not_overlap_and_use_the_chosen_source():
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & places, panel["title"]
        places |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
