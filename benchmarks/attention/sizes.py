"""The extent of a run of ``benchmarks.cpu_attention``: FULL for figures, TINY to try the program."""

from __future__ import annotations

from dataclasses import dataclass

RAGGED = "64x128..8192"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extent of a run: sizes, repeats and seconds."""

    arena_bytes: int
    repeats: int
    row_seconds: float
    rows: dict[str, tuple[str, ...]]
    """Names of the rows to measure, by section."""
    busy: tuple[int, int]
    """Requests and their context."""
    prefill: tuple[tuple[str, int, int], ...]
    """Model in HEADS, tokens of the chunk, tokens before it."""
    engine: tuple[int, int]
    """Requests and tokens of a prompt."""
    seconds: float
    """Seconds of a measurement of the last three kinds."""
    compiles: bool = True


FULL = Size(
    arena_bytes=int(4.25 * 2**30), repeats=3, row_seconds=10.0,
    rows={
        "rows": (
            "L8/32x2048", "L8/64x1024", f"L8/{RAGGED}", "L8/1x16384", "L8/8x4096", "L8/32x2048/1 thread",
            "Yi/32x2048", f"Yi/{RAGGED}", "L7/32x2048", f"L7/{RAGGED}",
        ),
        "head_sizes": tuple(f"L8/32x2048/H{size}" for size in (64, 80, 96, 256)),
        "small": ("L8/1x1", "L8/8x256", "L8/1x512", "L8/1x2048"),
    },
    busy=(64, 4096), engine=(32, 2000), seconds=3.0,
    prefill=tuple(
        (model, *shape) for model in ("L8", "SmolLM") for shape in ((128, 0), (512, 0), (512, 2048), (128, 4096))
    ),
)  # fmt: skip
TINY = Size(
    arena_bytes=4 << 20, repeats=1, row_seconds=0.0, compiles=False, busy=(4, 64), engine=(3, 40), seconds=0.02,
    rows={"rows": ("L8/2x65",), "head_sizes": ("L8/1x33/H80",), "small": ("L8/1x1",)}, prefill=(("L8", 16, 16),),
)  # fmt: skip
