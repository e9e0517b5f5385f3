"""The device guard that lets fake tensors be on ``cuda`` in a torch that has none."""

from __future__ import annotations

import ctypes
import os

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.builds import built

_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


def register_guard() -> None:
    """Register a guard that does nothing for the device type CUDA, for the rest of the process.

    Operators on a device need its guard, also where only their shapes are computed. Nothing else in torch changes:
    ``torch.cuda.is_available()`` stays False.
    """
    if torch.version.cuda is not None:
        return  # it has the real one
    command = [
        os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-",
        *(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths()), "-lc10",
    ]  # fmt: skip
    ctypes.CDLL(str(built("guard.so", command, (), f"// torch {torch.__version__}\n{_SOURCE}")))
