"""Tests of what an installation holds, and of what `import omniserve` does and does not do."""

from __future__ import annotations

import ast
import contextlib
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import omniserve

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "omniserve"

# Which packages a package may import from. Below `engine`, everything may be used with its parts alone.
ALLOWED = {
    "core": set(),
    "ops": {"core"},
    "kv": {"core"},
    "latency": {"core"},
    "layers": {"core", "ops"},
    "host": {"core", "ops"},
    "sampling": {"core", "ops"},
    "sched": {"core", "kv", "latency"},
    "remote": {"core", "host"},
    "runner": {"core", "ops", "kv", "layers", "host", "remote", "sampling"},
    "parallel": {"core", "ops", "kv", "layers", "host", "remote", "runner"},
    "engine": {"core", "ops", "kv", "latency", "layers", "host", "remote", "sampling", "sched", "runner", "parallel"},
    "simulate": {"core", "kv", "latency", "sched", "engine", "routing"},
    "profiling": {"core", "ops", "kv", "latency", "layers", "host", "runner", "parallel", "engine"},
    "launch": {"core", "ops", "kv", "latency", "layers", "host", "parallel", "sched", "engine", "profiling"},
    "routing": {"core"},
    "server": {"core", "sampling", "launch", "routing"},
    "prefill": {"core", "kv", "remote", "engine", "launch", "layers", "parallel"},
    "cluster": {"core", "remote", "parallel", "prefill"},
    "bench": {"core"},
    "__main__": {"core"},  # the command, which runs the modules below by their names
}
"""Cluster, {server, prefill}, launch, {profiling, simulate}, engine, parallel, {sched, runner},
{latency, kv, layers, remote, host, sampling}, ops, core."""
ENTRY_MODULES = {
    "batch": "server",
    "explain": "latency",
    "perplexity": "launch",
    "host.__main__": "remote",
    "profile": "launch",
    "rank": "parallel",
}
"""Modules for ``python -m``, and the package of what each starts."""
MAX_ENTRY_LINES = 15

# What must stay free of torch, models and ops.
PLAIN = (
    "sched",
    "kv/base.py",
    "kv/bidirectional",
    "kv/block_pool.py",
    "kv/checkpoints.py",
    "kv/disk_prefix_index.py",
    "kv/disk_prefixes.py",
    "kv/host_copies.py",
    "kv/host_prefixes.py",
    "kv/incremental.py",
    "kv/network.py",
    "kv/paged.py",
    "kv/prefix_cache.py",
    "kv/prefix_index.py",
    "kv/retained.py",
    "kv/sessions.py",
    "kv/table.py",
    "kv/tables.py",
    "kv/tiered.py",
    "kv/tiers.py",
    "kv/two_tiers.py",
    "bench",
    "simulate",
    "core",
    "routing",
    "engine/capacity.py",
    "engine/step_log.py",
    "engine/stepping.py",
    "sampling/grammar.py",
)

IMPORTED_AS = {
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "prometheus-client": "prometheus_client",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}


def tree_of(path: Path) -> ast.Module:
    """Parse a module, again if need be: CPython 3.11 counts the depth of the trees of all threads together."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(path.read_text())
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names of all modules that a module imports.

    An import counts wherever it is. Under TYPE_CHECKING it says that a type is in the wrong file, and one in a function
    is only made later.
    """
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            names.update(name if name in NAMES else node.module for name in dotted)
    return frozenset(names)


def name_of(path: Path) -> str:
    """Return a file's name as a module; a package's is that of its ``__init__.py``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(name: str) -> str:
    """Return the package, or the module beside the packages, that a module of ``omniserve`` or ``benchmarks`` is in.

    An entry module is a part of its own, wherever it is.
    """
    inner = name.partition(".")[2]
    return inner if inner in ENTRY_MODULES else [*name.split("."), "__init__"][1]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


NAMES = {name_of(path): path for path in [*modules(), *sorted((ROOT / "benchmarks").rglob("*.py"))]}


def require_no_circle(graph: Mapping[str, Iterable[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", sorted({part_of(name_of(path)) for path in modules()} - {"__init__"}))
def test_imports_go_one_way(package: str) -> None:
    paths = [path for path in modules() if part_of(name_of(path)) == package]
    names = [name for path in paths for name in imports(path) if name.split(".")[0] == "omniserve"]
    used = {part_of(name) for name in names} - {package}
    assert "__init__" not in used, f"{package} must not import omniserve itself, which stands above all packages"
    if package in ENTRY_MODULES:
        assert used == {ENTRY_MODULES[package]}
        assert len(paths[0].read_text().splitlines()) <= MAX_ENTRY_LINES
    else:
        assert package in ALLOWED, f"say in this test where omniserve.{package} stands"
        assert used <= ALLOWED[package], f"{package} must not import {sorted(used - ALLOWED[package])}"


def test_the_picture_has_no_cycle() -> None:
    require_no_circle(ALLOWED)


def test_files_import_in_no_circle() -> None:
    require_no_circle({name: imports(path) & NAMES.keys() - {name} for name, path in NAMES.items()})


def test_parts_of_the_benchmarks_import_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        if name.startswith("benchmarks."):
            used = {part_of(other) for other in imports(path) if other.split(".")[0] == "benchmarks"}
            graph.setdefault(part_of(name), set()).update(used - {part_of(name)})
    assert graph["common"] == set(), "benchmarks.common is below all other parts"
    require_no_circle(graph)


@pytest.mark.parametrize("name", PLAIN)
def test_policies_and_block_accounting_know_no_tensors(name: str) -> None:
    place = PACKAGE / name
    paths = [place] if place.suffix else sorted(place.rglob("*.py"))
    assert paths and all(path.exists() for path in paths)
    for path in paths:
        forbidden = {"torch", "transformers", "numpy"} & {imported.split(".")[0] for imported in imports(path)}
        assert not forbidden, f"{path} imports {forbidden}"


IMPORT = """
import sys
import torch, transformers, sklearn  # what they start is theirs
import os, threading
from pathlib import Path
proc = Path("/proc/self/task")
def tasks():
    return len(list(proc.iterdir())) if proc.exists() else threading.active_count()
def load():
    before = tasks()
    import omniserve
    for name in omniserve.__all__:
        getattr(omniserve, name)
    print(tasks() - before, torch.cuda.is_initialized(), omniserve.Engine.__name__, flush=True)
    os._exit(0)
there = {name: sys.modules[name] for name in sys.argv[1:] if name in sys.modules}
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing one raises ImportError
import torch._dynamo, torch._inductor.compile_fx, transformers.modeling_utils  # once for both
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    for name in sys.argv[1:]:
        del sys.modules[name]
    sys.modules.update(there)
load()
"""
"""A program that imports omniserve twice, without the modules that the command line names and with them."""


def test_import_starts_no_thread_and_no_cuda_and_works_without_the_server_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    names = [re.split(r"[^\w-]", name)[0] for name in extra]
    missing = [IMPORTED_AS.get(name, name) for name in names if name != "pyyaml"]  # transformers needs it, too
    command = [sys.executable, "-c", IMPORT, *missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 False Engine\n" * 2


def test_import_needs_no_dependency_that_is_not_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [*project["dependencies"], *extras["server"], *extras["otel"], *extras["cuda"], *extras["ray"],
             *extras["gguf"], *extras["quantize"]]  # fmt: skip
    declared = {"".join(c if c.isalnum() or c in "-_" else " " for c in name).split()[0] for name in names}
    declared = {IMPORTED_AS.get(name, name) for name in declared}
    # What these always bring along themselves and re-export: FastAPI its models, their core and base layer,
    # uvicorn its parser, transformers its hub, torch for CUDA its Triton.
    declared |= {
        "triton",
        "pydantic",
        "pydantic_core",
        "starlette",
        "h11",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
    }
    used = {name.split(".")[0] for path in modules() for name in imports(path)}
    assert used - declared - set(sys.stdlib_module_names) <= {"omniserve", "__future__"}


def test_public_names_are_documented() -> None:
    assert omniserve.__all__
    for name in omniserve.__all__:
        thing = getattr(omniserve, name)
        assert not callable(thing) or thing.__doc__, f"omniserve.{name} has no docstring"
