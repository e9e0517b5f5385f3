"""PaddedLayers: all layers of a step over static inputs.

Legend: T device rows, P piggyback seats, D hidden, N query heads, K KV heads, H head size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel, Rotary
from omniserve.ops.attention import AttentionMetadata, DeviceAttention
from omniserve.runner.cuda_graphs.capture import Attend
from omniserve.runner.cuda_graphs.inputs import StaticInputs
from omniserve.runner.piggyback_rows import PiggybackRows

_store_kv = torch.ops.omniserve.store_kv.default


@dataclass(frozen=True, slots=True)
class PaddedLayers:
    """Runs the layers of steps whose shapes do not depend on the requests in them.

    Every seat takes part in every layer, empty or not, and no branch depends on the values of tensors. So the work of
    one run can be replayed with other inputs at the same addresses.
    """

    model: PatchedModel
    storage: DeviceKVStorage
    attention: DeviceAttention
    rows: PiggybackRows

    def run_decodes(self, inputs: StaticInputs) -> Tensor:
        """Run the layers of a step in which every request has one device row; return ``[T + P, D]``."""
        return self.run(inputs, partial(self.attend, metadata=inputs.attention))

    def run(self, inputs: StaticInputs, attend: Attend) -> Tensor:
        """Run the layers with ``attend`` as the attention of the device rows; return ``[T + P, D]``."""
        model, num_rows, num_seats = self.model, inputs.shape.rows, inputs.shape.seats

        def attend_with_seats(layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            if num_seats:
                self.rows.post(inputs.slots_leaving(layer), hidden_TD, q_TNH, k_TKH, v_TKH)
            attn_TD = self.rows.no_results
            if num_rows:
                k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
                _store_kv(k_TKH[:num_rows], v_TKH[:num_rows], k_cache, v_cache, inputs.slot_mapping_T)
                attn_TD = attend(layer, q_TNH[:num_rows])
            if num_seats:
                attn_TD = self.rows.join(inputs.slots_joining(layer), attn_TD, hidden_TD)
            return attn_TD

        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T)
        rotary = self._rotary_per_layer(inputs)
        return model.run_layers(range(model.num_layers), hidden_TD, rotary, attend_with_seats, fused=True)

    def attend(self, layer: int, q_TNH: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return attention rows ``[T, N * H]``."""
        k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
        return self.attention(q_TNH, k_cache, v_cache, metadata, self.model.spec.attention[layer]).flatten(1)

    def attend_padded(self, layer: int, q_TNH: Tensor, metadata: AttentionMetadata, num_rows: int) -> Tensor:
        """Attend for the first ``num_rows`` of the T rows; the rows that only pad become zeros."""
        out_TD = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format).flatten(1)
        out_TD[:num_rows] = self.attend(layer, q_TNH[:num_rows], metadata)
        return out_TD

    def _rotary_per_layer(self, inputs: StaticInputs) -> Iterator[Rotary]:
        """Yield (cos, sin) ``[T + P, H]`` for each layer; in the seats each layer has other tokens."""
        rows, seats, num_layers = inputs.shape.rows, inputs.shape.seats, self.model.num_layers
        rotary = self.model.rotary(torch.cat([inputs.positions_T[:rows], inputs.seat_positions]))
        if rotary is None or not seats:
            yield from repeat(rotary or (None, None), num_layers)
            return
        device = inputs.positions_T.device
        of_seats = rows + torch.arange(num_layers * seats, device=device).view(num_layers, seats)
        index = torch.cat([torch.arange(rows, device=device).expand(num_layers, rows), of_seats], dim=1)
        cos_LTH, sin_LTH = (
            table.index_select(0, index.flatten()).view(num_layers, rows + seats, -1) for table in rotary
        )
        yield from zip(cos_LTH, sin_LTH, strict=True)
