"""The operators ``torch.ops.omniserve.*``; importing this loads the compiled extension and starts nothing.

Each operator has a schema and a CPU kernel in C++ (``csrc``), a fake (``fakes``), and a Triton kernel for CUDA where it
only moves rows (``cuda``, ``kernels``). Its slow reference and its samples are with the tests (``tests/ops/table.py``).
"""

from __future__ import annotations

from pathlib import Path

import torch

BUILD_COMMAND = "python setup.py build_ext --inplace"


def _load_extension(package: Path) -> None:
    """Load ``_C*.so`` from the package's folder.

    Raises:
        ImportError: It is not there, or does not load; the message has the command that builds it.
    """
    libraries = sorted(package.glob("_C*.so"))
    if not libraries:
        raise ImportError(f"omniserve's C++ extension is not built: no _C*.so in {package}. Run `{BUILD_COMMAND}`.")
    if len(libraries) > 1:
        raise ImportError(
            f"several C++ extensions in {package}: {[path.name for path in libraries]}; delete the stale."
        )
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        raise ImportError(f"{libraries[0]} does not load ({error}). Rebuild it: `{BUILD_COMMAND}`.") from error


_load_extension(Path(__file__).parent.parent)

from omniserve.ops import cuda, fakes  # noqa: E402, F401  they register for operators that must exist by now
