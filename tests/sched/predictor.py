"""A latency model that tests can reckon with."""

from __future__ import annotations

from omniserve.latency import BatchFeatures, ModelShape, Predictor
from omniserve.sched import Forecast


class LinearPredictor(Predictor):
    """Milliseconds: ``base``, ``row`` for each row of the halves, ``key`` for each key that is attended to.

    Args:
        shared: Everything takes so many times as long while the host tier works.
    """

    term_names = ("base", "rows", "attention", "piggyback")
    layer_terms = slice(1, 4)

    def __init__(
        self, *, base: float = 5.0, row: float = 1.0, key: float = 0.01, shared: float = 1.0, num_layers: int = 2
    ) -> None:
        self.base, self.row, self.key, self.shared, self.num_layers = base, row, key, shared, num_layers

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        scale = 1e-3 * (self.shared if features.host_works else 1.0)
        rows = features.rows * features.dense_layers / self.num_layers
        keys = features.prefill_load + features.decode_load
        return (
            scale * self.base, scale * self.row * rows, scale * self.key * keys,
            scale * 0.01 * (features.piggyback_rows + features.piggyback_layers + features.sampled_rows),
        )  # fmt: skip


def forecast(num_layers: int = 2, **milliseconds: float) -> Forecast:
    """Return a forecast for a model without windows."""
    predictor = LinearPredictor(num_layers=num_layers, **milliseconds)
    shape = ModelShape(num_layers=num_layers, windows=((0, num_layers),))
    return Forecast(predictor, shape, host_has_own_cores=predictor.shared == 1.0)
