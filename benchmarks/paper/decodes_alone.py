"""DecodesAlone: the decode instance of a prefill-decode pair, as far as the simulator can express it."""

from __future__ import annotations

import dataclasses

from omniserve.latency import BatchFeatures, Predictor


class DecodesAlone(Predictor):
    """Predicts steps of a device whose prompts another instance computes: chunks of prompts take no time.

    Each chunk is taken to end its prompt, whose first token comes with its KV. That KV needs memory on this device,
    even if it then moves to a host. Left out are the transfer between the instances and the wait for the other one.
    Paper: omniserve 5.4.4.
    """

    def __init__(self, device: Predictor) -> None:
        self._device = device
        self.term_names, self.num_layers = device.term_names, device.num_layers
        self.layer_terms, self.attention_terms = device.layer_terms, device.attention_terms

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return self._device.terms(
            dataclasses.replace(
                features, prefill_requests=0, prefill_tokens=0, prefill_context=0, prefill_load=0.0,
                sampled_rows=max(0, features.sampled_rows - features.prefill_requests),
            )
        )  # fmt: skip
