"""CompileCache: compiled halves in a folder, from where the next process takes them without tracing or a compiler.

torch's own cache has a process import the compiler and trace each half again before it finds what was compiled: 3 s of
a start. What is stored here is the code that the compiler wrote for a half, and which of the layers' tensors it is
given. It is found by all that the graph depends on: the layers' structure, the model's configuration, the code of its
classes and of this package, the versions of torch and transformers, and the instruction set. Only halves on a CPU are
stored, and only those whose call needs nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

logger = logging.getLogger(__name__)

_FOLDER = "omniserve_halves"
# The names of a model's folder and of a config's author say nothing about its layers.
_NO_STRUCTURE = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
NUM_THREADS = torch.get_num_threads()
"""The number of threads that code is made for: the process's, as later fewer may be left to it for a while."""
_WHOLE_PACKAGES = ("torch", "transformers")
# It takes half a second to import, and of the code of a half without matrix products of its own no line needs it.
_LOWERING_IMPORT = "from torch._inductor.select_algorithm import extern_kernels\n"

Argument = tuple[str, int, str]
"""A graph's argument: ``("count", 0, "")`` is the number of tokens, ``("input", i, "")`` the half's i-th tensor, and
``("tensor", i, name)`` one of its i-th layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedHalf:
    """A compiled half without its layers."""

    source: str
    """Python code of the compiler, with a function ``call`` that takes the list of arguments."""
    arguments: tuple[Argument, ...]
    is_single: bool
    """The function returns one tensor instead of several."""

    def load(self) -> Callable[[list[Any]], Any]:
        """Return the function, with its kernels from torch's cache; one that is missing there is compiled."""
        call: Callable[[list[Any]], Any] = PyCodeCache.load(self.source).call
        return call


class CompileCache:
    """Finds and stores the compiled halves of a model.

    Args:
        model: The model that the layers belong to.
        digest: Returns a digest of the operators that halves call, and of the instruction set.
    """

    def __init__(self, model: nn.Module, digest: Callable[[], str]) -> None:
        self._model, self._digest = model, digest
        self.deferred = False
        """Halves that are not found run as they are, instead of being compiled at their first call."""
        self.missing: set[str] = set()
        """Names of halves that ran so."""

    def key(self, name: str, structure: Sequence[Any], layers: Sequence[nn.Module], tensors: Sequence[Any]) -> str:
        """Return the name under which a half is stored; empty if it cannot be.

        ``structure`` is that of its ``layers``, and ``tensors`` are what it is called with.
        """
        modules = [module for layer in layers for module in layer.modules()]
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors if tensor is not None)
        if not on_cpu or any(each._forward_hooks or each._forward_pre_hooks for each in modules):
            return ""
        inputs = [None if tensor is None else (tensor.dtype, tensor.shape[1:]) for tensor in tensors]
        parts = [
            name,
            _stable(structure),
            _stable(inputs),
            self._digest(),
            NUM_THREADS,
            platform.python_version(),
            torch.__version__,
            transformers.__version__,
            _config_text(self._model.config),
            _code_digest(modules),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def find(self, key: str) -> CachedHalf | None:
        """Return what was stored under a key. A file that cannot be read is logged and left out."""
        path = _folder() / f"{key}.json"
        if not key or not path.exists():
            return None
        try:
            data = json.loads(path.read_text())
            arguments = tuple((kind, number, name) for kind, number, name in data.pop("arguments"))
            return CachedHalf(arguments=arguments, **data)
        except (OSError, KeyError, TypeError, ValueError) as error:
            logger.warning("the compiled half %s is not used: %s", path, error)
            return None

    def store(self, key: str, half: CachedHalf) -> None:
        """Write a half; a folder that cannot be written to is logged."""
        path = _folder() / f"{key}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(dataclasses.asdict(half)))
            temporary.replace(path)
        except OSError as error:
            logger.warning("compiled halves are not kept, so the next start compiles again: %s", error)


@contextlib.contextmanager
def one_compiler(model: nn.Module) -> Iterator[None]:
    """Wait until no other process compiles halves of such a model: what it has stored is found then.

    Where the folder cannot be written to, each process compiles for itself, which is logged.
    """
    name = hashlib.sha256(_config_text(model.config).encode()).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        try:
            _folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((_folder() / f"{name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("the compile cache has no lock, so engines may compile the same layers at once: %s", error)
        yield


def cacheable_half(
    source: str, call: Callable[..., Any], arguments: Sequence[Argument], *, is_single: bool
) -> CachedHalf | None:
    """Return a half to be stored, or None if ``call`` is more than the code that the compiler wrote."""
    own_code = _code_of(PyCodeCache.load(source).call)
    if own_code is None or _code_of(call) != own_code:
        return None
    if source.count("extern_kernels") == 1:
        source = source.replace(_LOWERING_IMPORT, "")
    return CachedHalf(source=source, arguments=tuple(arguments), is_single=is_single)


def _code_of(call: Callable[..., Any]) -> Any:
    return getattr(getattr(call, "__func__", call), "__code__", None)


def tensors_of(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that a layer and its modules have as an attribute, with the path to it."""
    for prefix, module in layer.named_modules():
        for name, value in (*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()):
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", value


def _folder() -> Path:
    return Path(cache_dir()) / _FOLDER


def _stable(value: Any) -> str:
    """Return the text of nested tuples and lists of plain values and types, the same in every process."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_stable, value))}]"
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(value)


def _config_text(config: Any) -> str:
    """Return all fields of a configuration, the private ones too: they choose a model's implementations."""
    fields = {name: value for name, value in vars(config).items() if name not in _NO_STRUCTURE}
    return json.dumps(fields, sort_keys=True, default=lambda each: _nested_text(each))


def _nested_text(value: Any) -> str:
    return _config_text(value) if hasattr(value, "to_dict") else str(value)


def _code_digest(modules: Sequence[nn.Module]) -> str:
    """Return a hash of the files with the modules' classes, and of what lies beside those of no known version."""
    classes = {base for module in modules for base in type(module).__mro__}
    files: set[Path] = set()
    for name in {each.__module__ for each in classes}:
        spec = sys.modules[name].__spec__ if name in sys.modules else None
        if spec is None or spec.origin is None or not spec.has_location:
            continue
        path = Path(spec.origin)
        files |= {path} if name.split(".")[0] in _WHOLE_PACKAGES else {*path.parent.glob("*.py")}
    extension = importlib.util.find_spec("omniserve._C")
    if extension is not None and extension.origin is not None:
        files.add(Path(extension.origin))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()
