"""Build of the C++ extension; everything else is in pyproject.toml.

The extension uses torch's stable ABI, so one binary serves torch 2.11 and later. It registers operators and is loaded
with ``torch.ops.load_library``; it is no Python module.
"""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = Path("omniserve/ops/csrc")

setup(
    ext_modules=[
        CppExtension(
            name="omniserve._C",
            sources=sorted(str(path) for path in CSRC.glob("*.cpp")),
            depends=sorted(str(path) for pattern in ("*.h", "*.inl") for path in CSRC.glob(pattern)),
            define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
            extra_compile_args=[
                "-O3",
                "-g0",
                "-fopenmp",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wno-unknown-pragmas",
                "-Wno-unused-parameter",  # torch's headers have some
            ],
            extra_link_args=["-fopenmp", "-s"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
