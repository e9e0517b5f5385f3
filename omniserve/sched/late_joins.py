"""Late joins: at which layers a step takes results that come while it runs, and which results are expected in time.

A seat is planned for a row before its result is there. A seat that stays empty costs a row of the dense halves; a
result without a seat waits for a whole step. Paper: omniserve 3.2.3 (results join when the device reaches the layer).

On a GPU only results that were there *before* the step was planned join the last layer, or any layer of a model with
layers between its attentions (``late_layers`` says why). A step without device rows runs only the layers that a
piggyback row is at, and no step begins for results that may not come.

With several stages a step is planned before those in flight have come to the layers behind their stage. Its late joins
are then of tokens that those steps are expected to bring to the layer before.
"""

from __future__ import annotations

_OLDEST = 8
"""Age in steps, since their row was sent, from which on results are one group."""
_RATE = 0.1
"""Weight of each new case in a share."""
_LIKELY = 0.5
"""The share of results in time from which on a seat is planned."""


def late_layers(num_layers: int, *, device_looks: bool, has_between: bool, has_stages: bool = False) -> int:
    """Return the number of layers, from the first one on, at which a step can take results that come while it runs.

    Args:
        num_layers: Layers of the model that attend.
        device_looks: The device itself looks for results, because it is given all layers of a step at once (a GPU). The
            scheduler learns the outcome after it has planned the next step. That is too late for the last layer, which
            yields tokens.
        has_between: Some layers do not attend or have recurrent states. The host plans their rows before the step runs.
        has_stages: The layers are in several stages. What a device has found would have to go to the next one.
    """
    if not device_looks:
        return num_layers
    return 0 if has_between or has_stages else num_layers - 1


class ResultOdds:
    """The share of results that came in time, by the number of steps since their row was sent.

    The host tier takes tasks in their order, so the age of a row says how far it has got in the queue. No speed has to
    be known: a host that keeps up with the steps has results in time at age 1, one that has n steps of work in its
    queue at age n. Steps without device rows are short, and are counted apart.
    """

    def __init__(self) -> None:
        self._shares = {has_device_rows: [1.0] * (_OLDEST + 1) for has_device_rows in (False, True)}

    def are_good(self, age: int, *, has_device_rows: bool) -> bool:
        """Return whether a result is expected in time in a step that runs ``age`` >= 1 steps after its row was sent."""
        return self._shares[has_device_rows][min(age, _OLDEST)] >= _LIKELY

    def note(self, age: int, *, has_device_rows: bool, in_time: bool) -> None:
        """Take note of one case."""
        shares, group = self._shares[has_device_rows], min(age, _OLDEST)
        shares[group] += _RATE * (in_time - shares[group])
