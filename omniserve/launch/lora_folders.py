"""What the settings of a LoRA adapter say, before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path


def rank_of(folder: Path) -> int:
    """Return the highest rank of an adapter, by its settings.

    Raises:
        ValueError: There are none.
    """
    file = folder / "adapter_config.json"
    try:
        settings = json.loads(file.read_bytes())
        return max(int(settings.get("r", 8)), *map(int, (settings.get("rank_pattern") or {}).values()), 1)
    except OSError as error:
        raise ValueError(f"--lora-modules: {file}: {error.strerror}; give a folder that PEFT has saved") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--lora-modules: {file} holds no settings of an adapter: {error}") from None
