"""Machines that tests can reckon with."""

from __future__ import annotations

import dataclasses

from omniserve.latency import BatchFeatures, Predictor
from omniserve.latency.features import AlphaBeta
from omniserve.simulate import Copies, HostNode, Machine
from omniserve.simulate.models import ModelDims
from tests.sched.predictor import LinearPredictor

DIMS = ModelDims(
    name="tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=128,
    vocab_size=1000, max_model_len=4096,
)  # fmt: skip
BLOCK_BYTES = DIMS.spec.kv_block_bytes(16)


def machine(
    *, hosts: tuple[HostNode, ...] = (), copy_s: float = 0.0, by_host_threads: bool = False, **milliseconds: float
) -> Machine:
    """Return a machine whose steps are linear in their load; a move takes ``copy_s``."""
    device = LinearPredictor(num_layers=DIMS.num_layers, **milliseconds)
    link = AlphaBeta(copy_s, 0.0)
    return Machine(
        name="test", spec=DIMS.spec, device=device, forecast=device, hosts=hosts,
        copies=Copies(to_host=link, to_device=link, by_host_threads=by_host_threads),
    )  # fmt: skip


class Constant(Predictor):
    """Every step takes as long."""

    term_names = ("all",)
    attention_terms = ()
    layer_terms = slice(0, 1)
    num_layers = DIMS.num_layers

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return (self.seconds,)


def constant(seconds: float) -> Machine:
    """Return a machine each step of which takes as long."""
    device = Constant(seconds)
    return dataclasses.replace(machine(), device=device, forecast=device)
