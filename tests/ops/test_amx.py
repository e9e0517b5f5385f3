"""The AMX kernels against float64, with the tiles emulated in software and, where the machine has them, with its own.

Run as a program (``python -m tests.ops.test_amx LIBRARY``) it walks the same cases under a library that was built with
sanitizers, without torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builds import built

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "omniserve" / "ops" / "csrc"
CPU_FLAGS = frozenset(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else frozenset()
HEADS = ((1, 1), (2, 2), (3, 1), (2, 4), (1, 5), (1, 7), (2, 8), (1, 9), (1, 12), (1, 16), (1, 17), (1, 40))
"""KV heads and query heads of each."""
HEAD_SIZES = (32, 40, 64, 72, 80, 96, 128, 256, 488, 512, 576)
NAN = np.uint16(0x7FFF)

needs_vectors = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512_bf16" not in CPU_FLAGS, reason="this CPU has no avx512_bf16"
)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bf16, kept as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sequence: of its keys [low, high) in a paged cache, query tokens attend."""

    kv_heads: int
    group: int
    head_size: int
    block_size: int
    low: int
    high: int
    window: int
    softcap: float
    seed: int
    chunk: int = 0
    alibi: bool = False
    has_sinks: bool = False
    num_rows: int = 1
    """Query tokens of a decode; the last one stands at high - 1."""

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def slopes(self) -> np.ndarray | None:
        """ALiBi's, [N]."""
        return abs(self._per_head(0.3)) if self.alibi else None

    @property
    def sinks(self) -> np.ndarray | None:
        """Logits that join the softmax's sum, [N]."""
        return self._per_head(3) if self.has_sinks else None

    def _per_head(self, scale: float) -> np.ndarray:
        rng = np.random.default_rng((3, self.seed))
        return (scale * rng.standard_normal(self.kv_heads * self.group)).astype(np.float32)

    def first_key(self, position: int) -> int:
        """Return the lowest position that the window and the chunk let a query see."""
        in_chunk = position - position % self.chunk if self.chunk else 0
        return max(0, in_chunk, position + 1 - self.window if self.window else 0)

    def bits(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return to_bf16(rng.standard_normal(shape) * 2)


def attention(case: Case, q_NH: np.ndarray, k_TKH: np.ndarray, v_TKH: np.ndarray, first: int, position: int) -> Any:
    """Return one query token's result [N, H], maxima [N] and sums [N] over the keys from position `first` on."""
    keys = np.repeat(k_TKH, case.group, 1)
    scores = np.einsum("nh,tnh->nt", q_NH, keys) * case.scale
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    at = first + np.arange(len(k_TKH))
    if case.slopes is not None:
        scores = scores + case.slopes.astype(np.float64)[:, None] * (at - position)
    seen = (at <= position) & (at >= case.first_key(position))
    scores = np.where(seen, scores, -np.inf)
    highest = scores.max(1)
    weights = np.exp(scores - highest[:, None])
    acc = np.einsum("nt,tnh->nh", weights, np.repeat(v_TKH, case.group, 1))
    return acc, highest, weights.sum(1)


class Kernels:
    """The compiled driver."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("amx_granted", "amx_released"):
            if hasattr(self.lib, name):
                getattr(self.lib, name).restype = ctypes.c_bool
        self.emulated = hasattr(self.lib, "amx_products")

    def products(self) -> int:
        self.lib.amx_products.restype = ctypes.c_int64
        return int(self.lib.amx_products())

    def forbid(self, arrays: list[np.ndarray], free: list[np.ndarray]) -> Callable[[], None]:
        """Poison the True elements of boolean arrays `free` in their arrays; return what lifts it."""
        for array, mask in zip(arrays, free, strict=True):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.reshape(-1).astype(np.int8), [0]))))
            for begin, end in edges.reshape(-1, 2).tolist():
                self.lib.amx_forbid(ctypes.c_void_p(array.ctypes.data + 2 * begin), ctypes.c_int64(2 * (end - begin)))

        def lift() -> None:
            for array in arrays:
                self.lib.amx_allow(ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes))

        return lift

    def __call__(self, name: str, *args: Any) -> None:
        function = getattr(self.lib, name)
        function.restype = None
        function(
            *(
                ctypes.c_void_p(a.ctypes.data)
                if isinstance(a, np.ndarray)
                else ctypes.c_void_p(None)
                if a is None
                else ctypes.c_float(a)
                if isinstance(a, float)
                else ctypes.c_int64(a)
                for a in args
            )
        )
        assert not self.emulated or self.lib.amx_released(), "the thread keeps its tiles"


def paged(case: Case, rng: np.random.Generator, k: np.ndarray, v: np.ndarray, *, directed: bool = False) -> Any:
    """Scatter keys [low, high) into blocks [B, K, S, H]; what is no key of theirs is NaN, entries of no use are -1.

    If ``directed``, some blocks run from the right.
    """
    size = case.block_size
    first, last = case.low // size, -(-case.high // size)
    blocks = last - first + 2
    table = np.full(last + 1, -1, np.int32)
    table[first:last] = rng.permutation(blocks)[: last - first]
    caches = np.full((2, blocks, case.kv_heads, size, case.head_size), NAN)
    is_reversed = (rng.random(last + 1) < 0.5) & directed
    for position in range(case.low, case.high):
        row = size - 1 - position % size if is_reversed[position // size] else position % size
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[table[position // size], :, row] = rows[position - case.low]
    table = np.where(is_reversed, ~table, table)
    return table, caches[0].copy(), caches[1].copy()


def check_decode(kernels: Kernels, case: Case) -> float:
    """Compare one piece with float64; return the RMS error relative to the RMS result."""
    rng = np.random.default_rng(case.seed)
    num_heads, num_rows = case.kv_heads * case.group, case.num_rows
    q = case.bits(rng, num_rows, num_heads, case.head_size)
    k, v = (case.bits(rng, case.high - case.low, case.kv_heads, case.head_size) for _ in range(2))
    table, k_cache, v_cache = paged(case, rng, k, v)
    pairs = v_cache.reshape(*v_cache.shape[:2], -1, 2, case.head_size).swapaxes(-1, -2).reshape(v_cache.shape)
    pool = np.ascontiguousarray(np.stack((k_cache, pairs), 2))
    free = pool == NAN
    free[:, :, 1] = np.repeat(free[:, :, 1].reshape(*v_cache.shape, 1).reshape(-1, 2).all(1), 2).reshape(v_cache.shape)
    # A piece in the middle of a sequence, or one that asks for more than the query's position and window let it see.
    middle = case.window == case.chunk == 0 and case.seed % 3 == 0
    position = case.high - num_rows + 50 * middle
    end = case.high + (0 if middle else int(rng.integers(3)) * 7)
    begin = int(rng.integers(case.low + 1)) if case.window or case.chunk else case.low
    shape = (case.kv_heads, num_rows, case.group)
    acc = np.full((*shape, case.head_size), np.nan, np.float32)
    m, l = (np.full(shape, np.nan, np.float32) for _ in range(2))  # noqa: E741
    lift = kernels.forbid([pool], [free])
    kernels(
        "amx_decode",
        q,
        pool,
        np.array((*k_cache.shape,), np.int64),
        table,
        np.array((position, num_rows, begin, end), np.int64),
        num_heads,
        case.scale,
        case.window,
        case.softcap,
        case.chunk,
        case.slopes,
        acc,
        m,
        l,
    )
    lift()
    # From [K, rows, group] to [rows, N].
    acc, m, l = (x.swapaxes(0, 1).reshape(num_rows, num_heads, *x.shape[3:]) for x in (acc, m, l))  # noqa: E741
    errors = []
    for i in range(num_rows):
        wanted, highest, total = attention(case, to_float(q[i]), to_float(k), to_float(v), case.low, position + i)
        np.testing.assert_allclose(m[i], highest, rtol=2e-6, atol=2e-5)
        shift = np.exp(m[i].astype(np.float64) - highest)
        np.testing.assert_allclose(l[i] * shift, total, rtol=1e-5)
        got, wanted = acc[i].astype(np.float64) / l[i][:, None], wanted / total[:, None]
        errors.append(float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))))
    assert max(errors) <= 1e-5, errors
    return max(errors)


def run_prefill(kernels: Kernels, case: Case, q: np.ndarray, paged_kv: Any, cuts: list[int]) -> np.ndarray:
    table, k_cache, v_cache = paged_kv
    out = np.full(q.shape, NAN)
    for begin, end in pairwise(cuts):
        kernels(
            "amx_prefill",
            q,
            k_cache,
            v_cache,
            np.array((len(k_cache), case.kv_heads, case.block_size, case.head_size), np.int64),
            table,
            np.array((case.high - len(q), begin, end), np.int64),
            q.shape[1],
            case.scale,
            case.window,
            case.softcap,
            case.chunk,
            case.slopes,
            case.sinks,
            out,
            int(k_cache.dtype == np.int8),
        )
    return out


def in_int8(case: Case, paged_kv: Any) -> Any:
    """Return a table and caches of bf16 as caches of int8, ``[B, K, S * (H + 4)]`` bytes: codes, then their scales.

    And K and V ``[positions from low on, K, H]`` as these stand for them.
    """
    table, size, head_size = paged_kv[0], case.block_size, case.head_size
    caches, stand_for = [], []
    for cache in paged_kv[1:]:
        rows = to_float(cache)
        scales = (np.abs(rows).max(-1) / np.float32(127)).astype(np.float32)
        codes = np.rint(np.where(np.isnan(rows), -1, rows / scales[..., None])).astype(np.int8)
        parts = (codes.reshape(*codes.shape[:2], -1), scales.view(np.int8))
        caches.append(np.concatenate(parts, axis=2))
        positions = np.arange(case.low, case.high)
        entries = table[positions // size]
        blocks, in_block = np.where(entries < 0, ~entries, entries), positions % size
        at = np.where(entries < 0, size - 1 - in_block, in_block)
        assert caches[-1].shape[2] == size * (head_size + 4)
        stand_for.append(codes[blocks, :, at] * scales[blocks, :, at][..., None])
    return (table, *caches), stand_for


def check_prefill(kernels: Kernels, case: Case, q_len: int, *, int8: bool = False) -> None:
    """Compare a chunk, in one tile, with float64, and with itself in smaller tiles."""
    rng = np.random.default_rng(case.seed)
    q = case.bits(rng, q_len, case.kv_heads * case.group, case.head_size)
    k, v = (case.bits(rng, case.high - case.low, case.kv_heads, case.head_size) for _ in range(2))
    paged_kv = paged(case, rng, k, v, directed=case.seed % 2 == 1)
    k_values, v_values = to_float(k), to_float(v)
    if int8:
        paged_kv, (k_values, v_values) = in_int8(case, paged_kv)
        out = run_prefill(kernels, case, q, paged_kv, [0, q_len])
    else:
        lift = kernels.forbid(list(paged_kv[1:]), [cache == NAN for cache in paged_kv[1:]])
        out = run_prefill(kernels, case, q, paged_kv, [0, q_len])
        lift()
    for i in range(q_len):
        acc, top, total = attention(case, to_float(q[i]), k_values, v_values, case.low, case.high - q_len + i)
        if case.sinks is not None:
            total = total + np.exp(case.sinks - top)
        # Inside it is fp32: what differs is one rounding of the result to 8 bits, which may go the other way.
        np.testing.assert_allclose(to_float(out[i]), acc / total[:, None], rtol=2**-7, atol=1e-5)
    cuts = sorted({0, q_len, *rng.integers(q_len, size=2).tolist()})
    assert (run_prefill(kernels, case, q, paged_kv, cuts) == out).all()


def draw(rng: np.random.Generator, block_sizes: tuple[int, ...], seed: int, length: int) -> Case:
    kv_heads, group = HEADS[rng.integers(len(HEADS))]
    high = int(rng.integers(1, length))
    window = int(rng.choice((0, 0, 1, 40, 200)))
    case = Case(
        kv_heads=kv_heads,
        group=group,
        head_size=int(rng.choice(HEAD_SIZES)),
        block_size=int(rng.choice(block_sizes)),
        low=int(rng.integers(high)) * int(rng.integers(2)),
        high=high,
        window=window,
        softcap=float(rng.choice((0.0, 0.0, 5.0))),
        seed=seed,
        chunk=int(rng.choice((0, 0, 50, 64))),
        alibi=bool(rng.integers(2)),
        has_sinks=bool(rng.integers(2)),
    )
    return replace(case, low=case.first_key(high - 1)) if case.window or case.chunk else case


def decode_case(seed: int, most_rows: int = 1) -> Case:
    rng = np.random.default_rng((1, seed))
    case = draw(rng, (32, 64, 96, 128), seed, 400)
    num_rows = int(rng.integers(1, min(most_rows, case.high) + 1))
    low = case.first_key(case.high - num_rows) if case.window or case.chunk else min(case.low, case.high - num_rows)
    return replace(case, num_rows=num_rows, low=low)


def prefill_case(seed: int) -> tuple[Case, int]:
    rng = np.random.default_rng((2, seed))
    case = draw(rng, (16, 32, 48, 64, 128), seed, 300)
    q_len = int(rng.integers(1, min(40, case.high) + 1))
    return replace(case, low=case.first_key(case.high - q_len)), q_len


def compile_cpp(name: str, source: Path, *options: str | Path, objects: tuple[Path, ...] = ()) -> Path:
    # The tiles' functions are compiled for any x86 unless told otherwise; a product is 8,000 fused multiply-adds.
    common = ("-std=c++17", "-fPIC", "-Wno-unknown-pragmas", "-mavx512f", "-mfma", f"-I{CSRC}")
    command = (os.environ.get("CXX", "c++"), *common, *options, source, *objects)
    return built(name, command, [source, *CSRC.iterdir(), *objects])


def driver(name: str, *options: str) -> Path:
    """Compile the driver with further options; what the tiles do not serve is compiled once."""
    vectors = compile_cpp("vectors.o", CSRC / "attention_avx512_bf16.cpp", "-O1", "-c")
    return compile_cpp(name, HERE / "amx_driver.cpp", "-O2", "-shared", *options, objects=(vectors,))


def linear_driver(*options: str) -> Kernels:
    return Kernels(compile_cpp("linear.so", HERE / "amx_linear_driver.cpp", "-O2", "-shared", *options))


@pytest.fixture(scope="session")
def emulated_linear() -> Kernels:
    return linear_driver("-DOMNI_EMULATE_TILES")


@pytest.fixture(scope="session")
def real_linear() -> Kernels:
    from omniserve.ops.isa import instruction_sets  # here, for the program runs without torch

    instruction_sets()  # asks the operating system for the tiles, which it lends to a process once asked
    return linear_driver()


@pytest.fixture(scope="session")
def emulated() -> Kernels:
    return Kernels(driver("emulated.so", "-DOMNI_EMULATE_TILES"))


needs_amx = pytest.mark.skipif("amx_bf16" not in CPU_FLAGS, reason="this CPU has no AMX")


@pytest.fixture(scope="session", params=["emulated", pytest.param("real", marks=needs_amx)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "emulated":
        emulated: Kernels = request.getfixturevalue("emulated")
        return emulated
    real = Kernels(driver("real.so"))
    assert real.lib.amx_granted(), "the kernel does not let this process use the tiles"
    return real


@needs_vectors
@pytest.mark.parametrize("seed", range(24))
def test_decode_agrees_with_float64(kernels: Kernels, seed: int) -> None:
    check_decode(kernels, decode_case(seed))


@needs_vectors
@pytest.mark.parametrize("seed", range(24))
def test_decode_of_several_rows_agrees_with_float64(kernels: Kernels, seed: int) -> None:
    check_decode(kernels, decode_case(seed, most_rows=16))


@needs_vectors
def test_rows_of_a_small_group_take_the_products_of_one(emulated: Kernels) -> None:
    case = Case(kv_heads=2, group=2, head_size=64, block_size=32, low=0, high=77, window=0, softcap=0.0, seed=1)
    counts = []
    for num_rows in (1, 4):
        before = emulated.products()
        check_decode(emulated, replace(case, num_rows=num_rows))
        counts.append(emulated.products() - before)
    assert counts[0] == counts[1] > 0


@needs_vectors
def test_a_piece_that_the_window_does_not_see_is_empty(kernels: Kernels) -> None:
    q, pool, table = np.zeros((4, 64), np.uint16), np.full((1, 2, 2, 32, 64), NAN), np.full(4, -1, np.int32)
    acc, m, l = (np.full(shape, np.nan, np.float32) for shape in ((4, 64), 4, 4))  # noqa: E741
    shape, keys = np.array((1, 2, 32, 64), np.int64), np.array((100, 1, 0, 32), np.int64)
    kernels("amx_decode", q, pool, shape, table, keys, 4, 0.1, 10, 0.0, 0, None, acc, m, l)
    assert (acc == 0).all() and (m == -np.inf).all() and (l == 0).all()


@needs_vectors
@pytest.mark.parametrize("seed", range(20))
def test_prefill_agrees_with_float64_however_it_is_cut(kernels: Kernels, seed: int) -> None:
    check_prefill(kernels, *prefill_case(seed))


@needs_vectors
@pytest.mark.parametrize("seed", range(20, 40))
def test_prefill_over_codes_agrees_with_float64_however_it_is_cut(kernels: Kernels, seed: int) -> None:
    before = kernels.products() if kernels.emulated else 0
    case, q_len = prefill_case(seed)
    check_prefill(kernels, case, q_len, int8=True)
    assert not kernels.emulated or (kernels.products() > before) == (case.head_size >= 32)


@needs_vectors
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_is_served_by_tiles(emulated: Kernels, group: int) -> None:
    case = Case(kv_heads=2, group=group, head_size=64, block_size=32, low=0, high=77, window=0, softcap=0.0, seed=group)
    before = emulated.products()
    check_decode(emulated, case)
    middle = emulated.products()
    check_prefill(emulated, case, 5)
    assert before < middle < emulated.products()


@needs_vectors
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (2, 32), (32, 24), (32, 8)])
def test_what_tiles_cannot_serve_goes_to_vectors(emulated: Kernels, block_size: int, head_size: int) -> None:
    case = Case(
        kv_heads=2, group=4, head_size=head_size, block_size=block_size, low=0, high=70, window=0, softcap=0.0, seed=1
    )
    before = emulated.products()
    check_decode(emulated, case)
    assert emulated.products() == before


@needs_vectors
def test_nan_in_a_query_head_stays_there(kernels: Kernels) -> None:
    case = Case(kv_heads=1, group=4, head_size=64, block_size=32, low=0, high=70, window=0, softcap=0.0, seed=1)
    rng = np.random.default_rng(1)
    q = case.bits(rng, 3, 4, 64)
    paged_kv = paged(case, rng, *(case.bits(rng, 70, 1, 64) for _ in range(2)))
    clean = run_prefill(kernels, case, q, paged_kv, [0, 3])
    q[1, 2, 5] = NAN
    out = run_prefill(kernels, case, q, paged_kv, [0, 3])
    assert np.isnan(to_float(out[1, 2])).all()
    out[1, 2] = clean[1, 2]
    assert (out == clean).all()


@needs_vectors
def test_emulated_product_is_the_manuals(emulated: Kernels) -> None:
    rng = np.random.default_rng(3)
    m, k, n = 5, 16, 7
    a, b = to_bf16(rng.standard_normal((m, 2 * k))), to_bf16(rng.standard_normal((k, 2 * n)))
    c = rng.standard_normal((m, n)).astype(np.float32)
    wanted = c + to_float(a) @ to_float(b).reshape(k, n, 2).transpose(0, 2, 1).reshape(2 * k, n)
    emulated("amx_multiply", a, b, c, m, k, n)
    np.testing.assert_allclose(c, wanted, rtol=0, atol=1e-5)
    # Denormals count as zero, on the way in and on the way out.
    a[:], b[:] = to_bf16(np.array(1e-39)), to_bf16(np.array(1e30))
    c[:] = 1e-39
    emulated("amx_multiply", a, b, c, m, k, n)
    assert (c == 0).all()


@needs_vectors
def test_permission_is_asked_for_only_where_there_are_tiles(emulated: Kernels) -> None:
    assert not emulated.lib.amx_granted() or {"amx_tile", "amx_bf16"} <= CPU_FLAGS


@pytest.mark.slow
@needs_vectors
def test_under_sanitizers_nothing_but_the_sequences_rows_is_read() -> None:
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    library = driver("sanitized.so", "-DOMNI_EMULATE_TILES", "-g", *sanitizers)
    compiler = os.environ.get("CXX", "c++")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    env = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    command = (sys.executable, "-m", "tests.ops.test_amx", str(library))
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.stdout.strip() == "clean", done.stderr[-4000:]


def linear_cases() -> list[tuple[int, int, int, bool]]:
    """Return (rows, inputs, outputs, whether there is a bias): tails of tiles, several pieces, several blocks."""
    rng = np.random.default_rng(5)
    drawn = [(int(rng.integers(1, 70)), int(rng.integers(1, 1300)), int(rng.integers(1, 100))) for _ in range(12)]
    shapes = [(1, 32, 32), (1, 1, 1), (16, 31, 33), (17, 33, 64), (33, 512, 32), (32, 544, 70), (3, 0, 5), *drawn]
    return [(*shape, bool(number % 2)) for number, shape in enumerate(shapes)]


@needs_vectors
@pytest.mark.parametrize(("rows", "num_in", "num_out", "has_bias"), linear_cases())
def test_linear_on_emulated_tiles(
    emulated_linear: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    check_linear(emulated_linear, rows, num_in, num_out, has_bias)


@pytest.mark.skipif("amx_bf16" not in CPU_FLAGS, reason="this CPU has no AMX")
@pytest.mark.parametrize(("rows", "num_in", "num_out", "has_bias"), linear_cases())
def test_linear_on_the_machines_tiles(
    real_linear: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    check_linear(real_linear, rows, num_in, num_out, has_bias)


def aligned(values: np.ndarray) -> np.ndarray:
    """Return a flat copy that is aligned to 64 bytes."""
    memory = np.empty(values.nbytes + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :][: values.nbytes].view(values.dtype)
    copy[:] = values.reshape(-1)
    return copy


def packed_bf16(weight: np.ndarray) -> np.ndarray:
    num_out, num_in = weight.shape
    panels, steps = -(-num_out // 32), -(-num_in // 2)
    whole = np.zeros((panels * 32, steps * 2), np.uint16)
    whole[:num_out, :num_in] = weight
    return aligned(whole.reshape(panels, 32, steps, 2).transpose(0, 2, 1, 3))


def run_linear(
    kernels: Kernels,
    x: np.ndarray,
    packed: np.ndarray,
    bias: np.ndarray | None,
    num_in: int,
    num_out: int,
    group: int = 0,
) -> np.ndarray:
    """Return all features of some rows, in two calls; `group` inputs share a scale of 8-bit codes, -1: all is int8."""
    out = np.full((len(x), num_out), NAN)
    middle = -(-num_out // 32) // 2 * 32
    sizes = np.array([len(x), num_in, num_out, num_in + 3, group])
    for begin, end in ((0, middle), (middle, num_out)):
        if begin < end:
            kernels("amx_linear", x, packed, bias, out, sizes, begin, end)
    return out


def check_linear(kernels: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    rng = np.random.default_rng((rows, num_in, num_out))
    x = np.full((rows, num_in + 3), NAN)
    x[:, :num_in] = to_bf16(rng.standard_normal((rows, num_in)))
    weight = to_bf16(rng.standard_normal((num_out, num_in)) / max(1, num_in) ** 0.5)
    bias = to_bf16(rng.standard_normal(num_out)) if has_bias else None
    before = kernels.products() if kernels.emulated else 0
    packed = packed_bf16(weight)

    def run(first: int, last: int) -> np.ndarray:
        return run_linear(kernels, x[first:last], packed, bias, num_in, num_out)

    out = run(0, rows)
    exact = to_float(x[:, :num_in]) @ to_float(weight).T + (0 if bias is None else to_float(bias))
    np.testing.assert_allclose(to_float(out), exact, rtol=2**-8, atol=2e-5)
    assert np.array_equal(run(rows // 2, rows), out[rows // 2 :]), "a row depends on those beside it"
    if kernels.emulated and num_in:
        assert kernels.products() > before


@needs_vectors
@pytest.mark.parametrize(
    ("rows", "num_in", "num_out", "group"),
    [
        (1, 70, 33, 32),
        (4, 300, 64, 8),
        (5, 0, 5, 32),
        (5, 31, 33, 8),
        (16, 128, 64, 128),
        (17, 130, 32, 40),
        (33, 1000, 70, 520),
        (70, 333, 40, 32),
    ],
)
def test_linear_of_codes_on_emulated_tiles(
    emulated_linear: Kernels, rows: int, num_in: int, num_out: int, group: int
) -> None:
    check_codes(emulated_linear, rows, num_in, num_out, group)


def check_codes(kernels: Kernels, rows: int, num_in: int, num_out: int, group: int) -> None:
    rng = np.random.default_rng((rows, num_in, num_out, group))
    x = np.full((rows, num_in + 3), NAN)
    x[:, :num_in] = to_bf16(rng.standard_normal((rows, num_in)))
    panels, records = -(-num_out // 32), -(-num_in // group)
    codes = np.zeros((panels * 32, records * group), np.int8)
    codes[:num_out, :num_in] = rng.integers(-128, 128, (num_out, num_in))
    scales = (rng.random((panels * 32, records)) / 64).astype(np.float32)
    weight = (codes * np.repeat(scales, group, 1))[:num_out, :num_in]
    of_scales = np.ascontiguousarray(scales.reshape(panels, 32, records).transpose(0, 2, 1)).view(np.uint8)
    of_codes = codes.reshape(panels, 32, records, group).transpose(0, 2, 3, 1).reshape(panels, records, group * 32)
    packed = aligned(np.concatenate([of_scales, of_codes.view(np.uint8)], 2))
    before = kernels.products()
    out = run_linear(kernels, x, packed, None, num_in, num_out, group)
    if rows > 4:  # the codes become a weight in bf16
        dense = run_linear(kernels, x, packed_bf16(to_bf16(weight)), None, num_in, num_out)
        assert np.array_equal(out, dense)
        assert kernels.products() > before or not num_in
    else:
        exact = to_float(x[:, :num_in]) @ weight.astype(np.float64).T
        np.testing.assert_allclose(to_float(out), exact, rtol=2**-8, atol=2e-5)
        assert kernels.products() == before


INT8_CASES = (
    (1, 64, 32, True),
    (1, 1, 1, False),
    (5, 0, 5, True),
    (13, 100, 33, False),
    (16, 1000, 130, True),
    (17, 128, 64, False),
    (33, 1300, 70, True),
    (70, 333, 96, False),
)
"""Rows, inputs, outputs, whether there is a bias."""


@needs_vectors
@pytest.mark.parametrize(("rows", "num_in", "num_out", "has_bias"), INT8_CASES)
def test_int8_on_emulated_tiles(emulated_linear: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    check_int8(emulated_linear, rows, num_in, num_out, has_bias)


@pytest.mark.skipif("amx_int8" not in CPU_FLAGS, reason="this CPU has no AMX")
@pytest.mark.parametrize(("rows", "num_in", "num_out", "has_bias"), INT8_CASES)
def test_int8_on_the_machines_tiles(real_linear: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    check_int8(real_linear, rows, num_in, num_out, has_bias)


def check_int8(kernels: Kernels, rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    rng = np.random.default_rng((rows, num_in, num_out))
    x = np.full((rows, num_in + 3), NAN)
    x[:, :num_in] = to_bf16(rng.standard_normal((rows, num_in)))
    x[rows // 2, :num_in] = 0
    bias = to_bf16(rng.standard_normal(num_out)) if has_bias else None
    panels, inputs = -(-num_out // 32), -(-num_in // 64) * 64
    codes = np.zeros((panels * 32, inputs), np.int8)
    codes[:num_out, :num_in] = rng.integers(-128, 128, (num_out, num_in))
    scales = (rng.random(panels * 32) / 64).astype(np.float32)
    parts = (
        scales.reshape(panels, 32),
        codes.sum(1, dtype=np.int32).reshape(panels, 32),
        np.ascontiguousarray(codes.reshape(panels, 32, inputs // 4, 4).transpose(0, 2, 1, 3)).reshape(panels, -1),
    )
    packed = aligned(np.concatenate([part.view(np.uint8) for part in parts], 1))
    before = kernels.products() if kernels.emulated else 0
    out = run_linear(kernels, x, packed, bias, num_in, num_out, -1)
    values = to_float(x[:, :num_in]).astype(np.float32)
    x_scales = np.abs(values).max(1, initial=0)[:, None] / np.float32(127.5)
    rounded = np.rint(np.clip(values / np.where(x_scales == 0, np.float32(1), x_scales), -128, 127)).astype(np.int64)
    sums = (rounded @ codes[:num_out, :num_in].T.astype(np.int64)).astype(np.float32)
    exact = sums * x_scales * scales[:num_out]
    if bias is not None:
        exact = exact + to_float(bias).astype(np.float32)
    assert np.array_equal(out, to_bf16(exact))
    if kernels.emulated and num_in:
        assert kernels.products() > before


if __name__ == "__main__":
    sanitized = Kernels(Path(sys.argv[1]))
    for seed in range(25):
        check_decode(sanitized, decode_case(seed))
        check_decode(sanitized, decode_case(seed, most_rows=16))
        check_prefill(sanitized, *prefill_case(seed))
    print("clean")
