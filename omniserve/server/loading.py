"""Load the model and make the engine. Runs in the engine process; torch is imported here and not before."""

from __future__ import annotations

import importlib.resources
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omniserve.config import EngineConfig

if TYPE_CHECKING:
    from omniserve.engine import Engine

BUILTIN_MODEL_NAME = "omniserve-builtin"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoader:
    """Makes an engine in the process that calls it. Plain data, so it can be sent to another process.

    Args:
        model: Folder or hub id.
        dtype: One of DTYPES; ``auto`` takes the model's own.
        device: One of DEVICES; ``auto`` takes a GPU if there is one.
        config: The engine's settings.
    """

    model: str
    dtype: str
    device: str
    config: EngineConfig

    def __call__(self, progress: Callable[[str], None]) -> Engine:
        """Load and patch the model; tell ``progress`` about it.

        Raises:
            OSError: There is no such model.
            UnsupportedModelError: No layer family fits it.
            ValueError: The settings do not fit it or this machine.
        """
        progress("importing torch")
        import torch
        from tqdm import tqdm
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        from omniserve.engine import Engine

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
        # tqdm's own lock is a named semaphore, of which the process's quick end would leave a trace.
        tqdm.set_lock(threading.RLock())
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        progress(f"loading {self.model}")
        dtype = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, device_map=device)
        model.eval()
        progress(f"{model.num_parameters() / 1e6:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}, {device}")
        return Engine(model, self.config)


def builtin_model_path() -> str:
    """Return the folder of the model that comes with OmniServe.

    Raises:
        ValueError: It is not installed.
    """
    folder = importlib.resources.files("omniserve") / "builtin_model"
    if not (folder / "config.json").is_file():
        raise ValueError(f"the built-in model is missing in {folder}; give --model PATH_OR_HUB_ID")
    return str(folder)
