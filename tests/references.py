"""What a model's own code computes, kept on disk: another process, or a later run, does not compute it again.

A file is named by a digest of all that the values depend on, and holds that and a digest of its own bytes.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.cache import FOLDER, digest_of, locked, put

_MOST_PARAMETERS = 10_000_000


def kept(about: Any, compute: Callable[[], Any], folder: Path | None = None) -> Any:
    """Return what ``compute`` returns, from its file if there is one; of several processes one computes it.

    Args:
        about: All that the values depend on beside versions and the processor, with a ``repr`` that says it.
        compute: Returns tensors, numbers and strings in dicts, lists and tuples.
        folder: Where the files are.
    """
    processor = torch.backends.cpu.get_cpu_capability()
    key = repr((torch.__version__, transformers.__version__, processor, about))
    path = (folder or FOLDER / "references") / f"{digest_of(key)}.pt"
    with locked(path):
        if path.exists():
            try:
                return _read(path, key)
            except ValueError as error:
                warnings.warn(f"{path} is made anew: {error}", stacklevel=2)
        values = compute()
        buffer = io.BytesIO()
        torch.save((key, values), buffer)
        payload = buffer.getvalue()
        put(path, lambda file: file.write_bytes(hashlib.sha256(payload).digest() + payload))
    return values


def _read(path: Path, key: str) -> Any:
    data = path.read_bytes()
    digest, payload = data[:32], data[32:]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("its bytes are not those that were written")
    found, values = torch.load(io.BytesIO(payload), weights_only=True)
    if found != key:
        raise ValueError("it is about something else")
    return values


def identity(model: nn.Module) -> str | None:
    """Return a digest of a model's modules, config and weights; None if other code or other state takes part in it.

    Such are modules of neither torch nor transformers, hooks, parametrisations and weights of tensor subclasses. None,
    too, if it is so large that what it computes would fill the disk.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        return None
    config = getattr(model, "config", None)
    about = config, getattr(config, "_attn_implementation", None), getattr(model, "generation_config", None)
    digest = hashlib.sha256(repr(about).encode())
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.split(".")[0] not in ("torch", "transformers") or "parametriz" in kind.__module__:
            return None
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return None
        digest.update(f"{name} {kind.__module__}.{kind.__qualname__}\n".encode())
    for name, tensor in model.state_dict().items():
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
            return None
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor).encode())
    return digest.hexdigest()
