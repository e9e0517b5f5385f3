"""LoRANames: the adapters that requests can name."""

from __future__ import annotations

from pathlib import Path

from omniserve.core.lora import LoRA, LoRAError
from omniserve.layers.weights.lora import LoRAStacks
from omniserve.layers.weights.lora_files import read_lora


class LoRANames:
    """The adapters of an engine, by name. Their weights are read when a request needs them (``sched/lora_slots.py``).

    Args:
        stacks: Those of the model; None: it was made for no adapters.
    """

    def __init__(self, stacks: LoRAStacks | None) -> None:
        self._stacks = stacks
        self._by_name: dict[str, LoRA] = {}

    @property
    def known(self) -> tuple[LoRA, ...]:
        """All adapters, in the order in which they were named."""
        return tuple(self._by_name.values())

    def read(self, name: str, folder: str | Path) -> LoRA:
        """Read an adapter's files and see that it fits; ``add`` then names it. Any thread may call this.

        Raises:
            LoRAError: It does not fit, cannot be read, or is more than a LoRA adapter.
        """
        if self._stacks is None:
            raise LoRAError(f"{name}: this engine was made for no adapters; set lora.max_loras (--max-loras) above 0")
        files = read_lora(folder)
        self._stacks.check(files)
        return LoRA(name=name, folder=str(Path(folder).absolute()), digest=files.digest)

    def add(self, lora: LoRA) -> None:
        """Let requests name an adapter; one of the same name is replaced for new requests."""
        self._by_name[lora.name] = lora

    def remove(self, name: str) -> None:
        """Let no new request name an adapter; those that have go on.

        Raises:
            LoRAError: There is none of this name.
        """
        self.named(name)
        del self._by_name[name]

    def clear(self) -> None:
        """Let no new request name any adapter; those that have go on."""
        self._by_name.clear()

    def named(self, name: str) -> LoRA:
        """Return an adapter.

        Raises:
            LoRAError: There is none of this name.
        """
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise LoRAError(f"there is no LoRA adapter {name!r}; loaded are: {known}")
        return self._by_name[name]
