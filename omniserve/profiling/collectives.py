"""Measures how long ranks take to reach each other, by rows: the latency model's gamma_T and gamma_P. Paper: omniserve
3.3.1.

gamma_T is of the collectives of a layer, which are found by running it: how many, of which kind, and how wide a row is
in each. Then all ranks run those of all their layers, for a few numbers of rows. gamma_P is of rows that pass all
stages of a model, with the message that tells the ranks of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from omniserve.latency.features import AlphaBeta
from omniserve.latency.fitting import fit_terms
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops import collectives
from omniserve.ops.collectives import CollectiveCall
from omniserve.parallel.group import RankGroup
from omniserve.profiling.timer import Progress, Timer

_ROWS = (1, 4, 16, 64, 256, 1024)
_ROUNDS = 7


def calls_of_layers(model: PatchedModel) -> list[CollectiveCall]:
    """Return the collectives of all layers that are here, in their order."""

    def attend(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        return q_TNH.flatten(1).contiguous()

    with torch.inference_mode(), collectives.alone():
        ids_T = torch.zeros(1, dtype=torch.int64, device=model.device)
        hidden_TD = model.embed(ids_T, ids_T)
        rotary = repeat(model.rotary(ids_T) or (None, None))
        with collectives.recorded() as calls:
            model.run_layers(model.layers, hidden_TD, rotary, attend)
    return calls


def measure_collectives(
    model: PatchedModel, group: RankGroup, timer: Timer, progress: Progress, *, max_rows: int
) -> AlphaBeta:
    """Return seconds of a layer's collectives by rows, the mean over the layers."""
    calls = calls_of_layers(model)
    points: list[tuple[float, float]] = []
    for rows in sorted({min(rows, max_rows) for rows in _ROWS}):
        progress("collectives", timer.spent)
        seconds = sorted(time_collectives(model, group, calls, rows) for _ in range(_ROUNDS))
        points.append((rows, seconds[len(seconds) // 4] / len(model.layers)))
    return _fitted(points)


def measure_hand_overs(group: RankGroup, timer: Timer, progress: Progress, *, max_rows: int) -> AlphaBeta:
    """Return seconds in which rows pass all stages, by their number."""
    points: list[tuple[float, float]] = []
    for rows in sorted({min(rows, max_rows) for rows in _ROWS}):
        progress("hand-overs", timer.spent)
        seconds = []
        for _ in range(_ROUNDS):
            began_s = time.perf_counter()
            group.pass_rows(rows)
            seconds.append(time.perf_counter() - began_s)
        points.append((rows, sorted(seconds)[len(seconds) // 4]))
    return _fitted(points)


def _fitted(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    alpha_s, beta_s = fit_terms([(1.0, rows) for rows, _ in points], [seconds for _, seconds in points])
    return AlphaBeta(alpha_s=alpha_s, beta_s=beta_s)


def time_collectives(model: PatchedModel, group: RankGroup, calls: Sequence[CollectiveCall], rows: int) -> float:
    """Return the seconds in which all ranks call these, after they have met."""
    group.run_collectives(calls, 1, model.dtype, model.device)  # the ranks begin together
    began_s = time.perf_counter()
    group.run_collectives(calls, rows, model.dtype, model.device)
    return time.perf_counter() - began_s
