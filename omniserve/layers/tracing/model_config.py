"""Checks of what a model's config asks for, and of what its device can do."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError

# The frequencies of these rope types are the same for every sequence, so one table serves a packed batch.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "longrope", "proportional", "yarn")

USUAL_LENGTH = 2048
"""The longest prompt plus output for a model whose config names no number of positions, as those of Bloom."""

# Major compute capabilities on which torch's grouped product of bf16 does not make the host wait. On others, and in
# other dtypes, the host reads how many rows each expert has.
_GROUPED_ON_DEVICE = (9, 10)


def max_positions(config: Any) -> int | None:
    """Return how many positions a model has by its config; None if it names no number."""
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length", "n_positions")
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)


def rope_parameters(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the parameters of a model's rotary positions: one for all layers, or one for each type of layer."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]


def refuse_dynamic_rope(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if rotary frequencies depend on the length of the longest sequence of a batch.

    Those of longrope do, but not up to the length at which ``TracedFamily.limits`` ends.
    """
    for rope_type in (kind.get("rope_type", "default") for kind in rope_parameters(model)):
        if rope_type not in _STATIC_ROPE_TYPES:
            raise UnsupportedModelError(
                f"{type(model).__name__}: rope type {rope_type!r} changes its frequencies with the length of the "
                "longest sequence in the batch, which has no meaning for packed requests; supported: "
                f"{', '.join(_STATIC_ROPE_TYPES)}"
            )


def why_grouped_mm_waits(device: torch.device, dtype: torch.dtype) -> str:
    """Return why torch's grouped product of experts makes the host wait for a device, and what to do; empty if not."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if dtype is torch.bfloat16 and major in _GROUPED_ON_DEVICE:
        return ""
    capabilities = " or ".join(f"{one}.x" for one in _GROUPED_ON_DEVICE)
    return (
        f"experts implementation 'grouped_mm' waits for the device in {dtype} on compute capability {major}.{minor}; "
        f"load the model in bfloat16 on a GPU of capability {capabilities}, or set step_graphs='off' (for a small "
        "model, set_experts_implementation('batched_mm') does as well, which copies an expert's weights for every row)"
    )
