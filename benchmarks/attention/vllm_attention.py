"""vLLM's CPU paged attention as a candidate of the decode benchmark, called without importing vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.attention.bandwidth import Arena
from benchmarks.attention.decode_attention import Paging, Work, arena_layers
from benchmarks.common.record import ROOT


@dataclass(frozen=True, kw_only=True)
class Peer:
    """vLLM's CPU extension, loaded into this process."""

    version: str
    library: str
    """Its file name: there is one for each instruction set."""


def find_peer(wheel: Path | None, folder: Path | None) -> Peer | None:
    """Load vLLM's CPU operators from a wheel, a folder with an unpacked wheel, or an installed vLLM; None without any.

    Nothing of it is imported: its Python part has dependencies of its own, its operators only want torch.

    Raises:
        RuntimeError: There is one but its operators do not load; the message has the loader's.
    """
    if wheel is not None:
        folder = _unpack(wheel)
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(next(iter(spec.submodule_search_locations))).parent
    # The choice that vLLM itself makes (vllm/platforms/cpu.py).
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    path = folder / "vllm" / name
    try:
        torch.ops.load_library(path)
        torch.ops._C.cpu_attention_with_kv_cache  # noqa: B018  raises if the library does not have it
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"{path} does not give vLLM's CPU attention to torch {torch.__version__}: {error}. A wheel works with the "
            "torch version it was built for, which its METADATA names."
        ) from error
    versions = [d.version for d in importlib.metadata.distributions(path=[str(folder)]) if "vllm" in d.name]
    return Peer(version=versions[0] if versions else "of unknown version", library=name)


def _unpack(wheel: Path) -> Path:
    folder = ROOT / ".cache" / "benchmarks" / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            wanted = name.startswith("vllm/_C") or name.endswith(".dist-info/METADATA")
            if wanted and not (folder / name).exists():
                archive.extract(name, folder)
    return folder


class VLLM:
    """vLLM's CPU paged attention, called as its backend calls it (vllm/v1/attention/backends/cpu_attn.py).

    Its scheduler metadata is made once, outside of what is timed: an engine makes it once a step for all layers.
    """

    def __init__(self, work: Work, arena: Arena, peer: Peer, *, block_size: int, seed: int) -> None:
        self.name = f"vLLM {peer.version}"
        self._work = work
        self._paging = Paging(work.context_lens, block_size, seed)
        self.isa = self._isa(work, block_size)
        # Cache [B, K, S, 2H], which the backend views as [B, K, 2S, H] and halves.
        shape = (self._paging.num_blocks, work.kv_heads, 2 * block_size, work.head_size)
        self._caches = [tuple(layer.chunk(2, dim=2)) for layer in arena_layers(arena, work.dtype, shape)]
        self.num_layers = len(self._caches)
        self.layer_bytes = work.num_bytes
        self._queries = work.queries(seed)
        self._query_starts = torch.arange(len(work.context_lens) + 1, dtype=torch.int32)
        self._metadata = torch.ops._C.get_scheduler_metadata(
            len(work.context_lens), work.num_heads, work.kv_heads, work.head_size, self._paging.seq_lens_R, work.dtype,
            self._query_starts, True, -1, self.isa, True, None, "auto",
        )  # fmt: skip

    @staticmethod
    def _isa(work: Work, block_size: int) -> str:
        if work.head_size % 32 != 0:
            return "vec16"
        if work.dtype == torch.bfloat16 and block_size % 32 == 0 and torch.cpu._is_amx_tile_supported():
            return "amx"
        return "vec" if block_size % 32 == 0 else "vec16"

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        k_cache, v_cache = self._caches[0]
        slots = self._paging.slots(request)
        torch.ops._C.cpu_attn_reshape_and_cache(k_TKH, v_TKH, k_cache, v_cache, slots, self.isa, 1.0, 1.0, "auto")

    def run(self, layer: int) -> torch.Tensor:
        k_cache, v_cache = self._caches[layer]
        out = torch.empty_like(self._queries)
        torch.ops._C.cpu_attention_with_kv_cache(
            self._queries, k_cache, v_cache, out, self._query_starts, self._paging.seq_lens_R, self._work.scale, True,
            None, -1, self._paging.table_RM, 0.0, self._metadata, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out
