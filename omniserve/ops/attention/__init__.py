"""DEVICE_ATTENTION: implementations of attention on the device tier, chosen by name. None is a silent fallback.

``base`` has the interface and the choice, the other modules the implementations:

* ``cpu`` (in ``native``): the C++ operator.
* ``latent`` (in ``native``): the same, over the latents of a model with multi-head latent attention.
* ``triton`` (in ``native``): our kernel over the pages (``ops/kernels/attention.py``), CUDA; graph-safe.
* ``flex``: torch's FlexAttention over the pages, any device; graph-safe.
* ``xformers``: CUDA; decodes over the pages, gathers the rest.
* ``sdpa``: plain torch, any device; gathers each request's KV.
"""

from __future__ import annotations

from omniserve.ops.attention import flex, native, sdpa, xformers  # noqa: F401  they register implementations
from omniserve.ops.attention.base import (
    DEVICE_ATTENTION,
    AttentionMetadata,
    DeviceAttention,
    HostLengths,
    is_graph_safe,
    resolve_attention,
)

__all__ = [
    "DEVICE_ATTENTION",
    "AttentionMetadata",
    "DeviceAttention",
    "HostLengths",
    "is_graph_safe",
    "resolve_attention",
]
