"""LoRA adapters: what an engine knows of one, and the side work that loads it. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.core.work import SideWork

MOST_LORAS = 255
"""Adapters that can be loaded at a time: a row carries its adapter's slot in the model's dtype, exact in bf16."""


class LoRAError(ValueError):
    """An adapter that cannot be served, or is not there; the message says why, and what can be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA:
    """An adapter that requests can name."""

    name: str
    folder: str
    """The folder with its files, as PEFT saves them."""
    digest: str
    """A digest of its files. KV that was computed with it is found again by requests for the same one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLoRA(SideWork):
    """Read an adapter's weights into a slot that no row uses, beside the steps."""

    move_id: int
    """Number of the load, negative: of a series of its own."""
    lora: LoRA
    slot: int
    """From 1 on; 0 stands for no adapter."""
