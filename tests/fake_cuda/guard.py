"""The device guard that lets fake tensors be on ``cuda`` in a torch that has none."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


def register_guard(folder: Path) -> None:
    """Register a guard that does nothing for the device type CUDA, for the rest of the process.

    Operators on a device need its guard, also where only their shapes are computed. Nothing else in torch changes:
    ``torch.cuda.is_available()`` stays False.

    Args:
        folder: Keeps the compiled guard for the next time.
    """
    if torch.version.cuda is not None:
        return  # it has the real one
    command = [
        os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-",
        *(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths()), "-lc10",
    ]  # fmt: skip
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__} {command} {_SOURCE}".encode()).hexdigest()[:16]
    library = folder / f"guard-{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], input=_SOURCE, text=True, check=True)
        unfinished.replace(library)
    ctypes.CDLL(str(library))
