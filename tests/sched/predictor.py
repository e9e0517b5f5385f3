"""A latency model that tests can reckon with."""

from __future__ import annotations

from omniserve.latency import BatchFeatures, HostSpeed, ModelShape, Predictor
from omniserve.sched import Forecast


class LinearPredictor(Predictor):
    """Milliseconds: ``base``, ``row`` for each row of the halves, ``key`` for each key that is attended to.

    Args:
        shared: Everything takes so many times as long while the host tier works.
        wait: Milliseconds that the device waits for each row of a second sub-batch.
        sample: Milliseconds for each row that becomes logits.
    """

    term_names = ("base", "rows", "attention", "piggyback")
    layer_terms = slice(1, 4)
    attention_terms = (2,)

    def __init__(
        self, *, base: float = 5.0, row: float = 1.0, key: float = 0.01, shared: float = 1.0, wait: float = 0.0,
        sample: float = 0.01, num_layers: int = 2,
    ) -> None:  # fmt: skip
        self.base, self.row, self.key, self.shared, self.num_layers = base, row, key, shared, num_layers
        self.wait, self.sample = wait, sample
        self.slowdown = 1.0

    @property
    def pace(self) -> float:
        return self.slowdown

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        scale = 1e-3 * self.slowdown * (self.shared if features.host_works else 1.0)
        rows = features.rows * features.dense_layers / self.num_layers
        rows += features.second_rows * features.pipelined_layers / self.num_layers
        keys = features.prefill_load + features.decode_load + features.pipelined_load
        return (
            scale * self.base, scale * self.row * rows, scale * self.key * keys,
            scale * (0.01 * (features.piggyback_rows + features.piggyback_layers) + self.sample * features.sampled_rows)
            + scale * self.wait * features.pipelined_rows,
        )  # fmt: skip


def forecast(
    num_layers: int = 2, host_key: float = 0.01, host_draft_key: float = 0.0, **milliseconds: float
) -> Forecast:
    """Return a forecast for a model without windows.

    Args:
        host_key: Milliseconds that the host tier needs for a key in a layer.
        host_draft_key: The same for a key that a draft sees.
    """
    predictor = LinearPredictor(num_layers=num_layers, **milliseconds)
    shape = ModelShape(num_layers=num_layers, windows=((0, num_layers),))
    host = HostSpeed(
        per_key_s=host_key * 1e-3, per_request_s=0.0, per_call_s=1e-5, threads=1, per_draft_key_s=host_draft_key * 1e-3
    )
    return Forecast(predictor, shape, host_has_own_cores=predictor.shared == 1.0, host=host)
