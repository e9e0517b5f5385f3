"""RowLayout: the columns of a row between two layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniserve.layers.tracing.batch_layout import RowLayout, WatchedPlace, write_left
from omniserve.layers.tracing.model_tracer import TracedRun
from omniserve.layers.tracing.placeholders import Carried, Place, TableForm, filled

HIDDEN, SHARED, OWN, LAYERS, TOKENS = 4, 2, 3, 3, 5


def model_run() -> tuple[RowLayout, list[Any], TracedRun]:
    """Return a model of three layers: each is given a tensor that all are given, and one of its own."""
    shared, own = TableForm(0, (1, SHARED), torch.float32), TableForm(0, (1, OWN), torch.float32)
    for_all = Carried(shared)
    arguments = [((for_all,), {"own": Carried(own)}) for _ in range(LAYERS)]
    layout = RowLayout(TableForm(0, (1, HIDDEN), torch.float32))
    layout.place_arguments(arguments)
    given = torch.randn(TOKENS, 1, SHARED)
    run = TracedRun(
        [torch.randn(TOKENS, 1, HIDDEN)], [((given,), {"own": torch.randn(TOKENS, 1, OWN)}) for _ in arguments]
    )
    return layout, arguments, run


def test_each_layer_finds_in_the_same_columns_what_it_was_given() -> None:
    layout, arguments, run = model_run()
    assert layout.width == HIDDEN + SHARED + LAYERS * OWN
    assert len({repr(each) for each in arguments}) == 1, "layers with other arguments share no graph"
    rows = layout.first(run, arguments)
    for index, (positional, named) in enumerate(run.arguments):
        args, kwargs = filled(arguments[index], [], rows)
        assert torch.equal(args[0], positional[0]) and torch.equal(kwargs["own"], named["own"])
        output = torch.randn(TOKENS, 1, HIDDEN)
        rows = layout.next(layout.turn(index), output, rows)
        assert torch.equal(layout.hidden(rows), output)


def test_what_a_layer_leaves_is_there_for_those_that_read_it_and_for_no_other() -> None:
    layout = RowLayout(TableForm(0, (1, HIDDEN), torch.float32))
    arguments = [((), {"place": Place(0, {}, {})}) for _ in range(LAYERS)]
    layout.place_arguments(arguments)
    left: dict[str, tuple[Tensor, Tensor]] = {}
    watched = []
    for index in range(LAYERS):
        place = WatchedPlace(left)
        if index == 0:
            place["kv"] = torch.randn(TOKENS, 2, 1, 3), torch.randn(TOKENS, 2, 1, 3)
            place["unread"] = torch.randn(TOKENS, 9), torch.randn(TOKENS, 9)
        if index == 2:
            assert place["kv"]
        watched.append({0: place})
        left = dict(place)
    layout.place_left(arguments, watched)
    assert layout.width == HIDDEN + 2 * 2 * 3
    rows = torch.zeros(TOKENS, layout.width)
    write_left(arguments[0], {0: left}, rows)
    rows = layout.next(layout.turn(1), torch.randn(TOKENS, 1, HIDDEN), rows)
    places: list[dict[int, Any]] = [{}, {}, {}]
    for each, found in zip(arguments, places, strict=True):
        filled(each, [], rows, found)
    assert places[0] == places[1] == {0: {}}
    assert all(map(torch.equal, places[2][0]["kv"], left["kv"]))


def test_a_layer_input_with_further_dimensions_lies_in_one_row() -> None:
    layout = RowLayout(TableForm(1, (2, 1, HIDDEN), torch.float32))
    hidden = torch.randn(2, TOKENS, 1, HIDDEN)
    rows = layout.next(0, hidden, torch.zeros(TOKENS, 2 * HIDDEN))
    assert rows.shape == (TOKENS, 2 * HIDDEN) and torch.equal(layout.hidden(rows), hidden)
    assert layout.plain(rows) is None
    assert torch.equal(layout.transposed(layout.transposed(hidden)), hidden)
