"""Compile the halves of decoder layers: one graph per half, for all layers of one structure and any number of tokens.

The result of ``torch.compile(...).aot_compile`` is called directly. The ``torch.compile`` wrapper would evaluate guards
and swap the interpreter's frame evaluator, which takes 40 us a call, where a half of a small model takes 80. Without
guards a layer that changes later goes unnoticed: layers are compared by ``structure`` before, and adapters must be
added to a model before it is patched. Each layer is bound to the compiled code at its first call: later calls hand its
own parameters to the kernels' wrapper, without the layers of Python around it.

The first call of a half compiles it (10 to 15 s in all if nothing is cached), unless an earlier process did and kept
it (``compile_cache.py``). Compiled code is in ``TORCHINDUCTOR_CACHE_DIR``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.aot_compile import AOTCompiledFunction
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental import _config as fx_config

from omniserve.layers.bound_half import BoundHalf
from omniserve.layers.compile_cache import NUM_THREADS, Argument, CachedHalf, CompileCache, cacheable_half
from omniserve.ops.isa import instruction_sets

logger = logging.getLogger(__name__)

GROUP_PRODUCTS: set[Any] = set()
"""Operators of which the product of a group of linears consists (``weights/groups.py``)."""

Half = Callable[..., Any]

# The number of tokens for which the compiler optimises. Without one it compiles a norm to two kernels
# (tests/layers/cuda_launches.py counts them); with a small one it splits the sums of wide rows as well.
USUAL_TOKENS = 512
# The first torch that takes this number as a hint; 2.11 does not, 2.12 was not tried. Earlier ones need an example on a
# GPU.
_HEEDS_HINTS = (2, 13)

# Attributes that differ between layers and that no half may read.
_PER_LAYER_ATTRIBUTES = frozenset({"layer_idx", "layer_type", "attention_type", "sliding_window"})
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)

_SOURCES = ("layers", "ops")
"""Folders of this package with the operators that halves call."""


def structure(layer: nn.Module) -> tuple[Any, ...]:
    """Describe everything about a layer that a graph may depend on, except the values of its tensors."""
    parts: list[Any] = []
    numbers: dict[int, int] = {}  # of tensors by identity: members of a packed group share one handle, for instance
    for name, module in layer.named_modules():
        tensors = {**module._parameters, **module._buffers}
        tensors.update({key: value for key, value in module.__dict__.items() if isinstance(value, Tensor)})
        parts.append(
            (
                name,
                type(module),
                module.training,
                tuple(
                    (key, numbers.setdefault(id(value), len(numbers)), _layout(value))
                    for key, value in sorted(tensors.items())
                    if value is not None
                ),
                tuple(map(id, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])),
                tuple(
                    (key, repr(value))
                    for key, value in sorted(module.__dict__.items())
                    if key not in _PER_LAYER_ATTRIBUTES | _OF_EVERY_MODULE and _is_plain(value)
                ),
            )
        )
    return tuple(parts)


def _is_plain(value: Any) -> bool:
    """Tell whether an attribute is a number or a string, or consists of such; an adapter has its scaling in a dict."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def needs_example(on_gpu: bool) -> bool:
    """Tell whether the compiler needs an example with a usual number of tokens, because it ignores a hint.

    It then assumes nothing of that number that does not hold for all others (``backed_size_oblivious``).
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return on_gpu and version < _HEEDS_HINTS


class Recognised(CustomGraphPass):
    """Has torch's cache know a graph again in another process.

    A graph that is compiled ahead of time has a random name, which torch makes part of the cache's key. In its place
    comes what compiled code depends on beside the graph: this package's operators and the CPU's instruction set.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        graph.owning_module._backend_id = self.uuid()  # type: ignore[union-attr]

    def uuid(self) -> Any:
        return source_digest()


@functools.cache
def source_digest() -> str:
    files = sorted(str(path) for folder in _SOURCES for path in (Path(__file__).parents[1] / folder).rglob("*.py"))
    with torch._inductor.config.patch("cpp.vec_isa_ok", _knows_instruction_sets()):
        return get_hash_for_files(tuple(files), extra=str(pick_vec_isa())).hex()


def _knows_instruction_sets() -> bool | None:
    """Return True if torch need not find out by trial whether the compiler knows the CPU's vectors (5 s); else None.

    It does if this package's extension, which that compiler has built, has kernels for more than the portable set.
    """
    return True if sum(each.supported for each in instruction_sets()) > 1 else None


class ShareProducts(CustomGraphPass):
    """Computes once the product of a group of linears, which each of its members asks for."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        found: dict[str, torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in GROUP_PRODUCTS:
                key = repr((node.target, node.args, node.kwargs))  # nodes have names of their own
                if (first := found.setdefault(key, node)) is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)

    def uuid(self) -> Any:
        return source_digest()


class CompiledHalf:
    """A half of layers, ``half(*layers, *tensors)``, compiled at its first call.

    Every tensor has the packed tokens as its first dimension, and the function checks with ``torch._check`` that their
    numbers agree; None is passed on. ``name`` is for the log, ``structure`` that of the layers, and ``cache`` has the
    halves of earlier processes.
    """

    def __init__(
        self,
        half: Half,
        name: str,
        tracing: Callable[[], AbstractContextManager[None]],
        *,
        structure: tuple[Any, ...] = (),
        cache: CompileCache | None = None,
    ) -> None:
        self.uncompiled = half
        self._name, self._tracing, self._structure = name, tracing, structure
        self.cache = cache
        self._compiled: Half | None = None
        self._key: str | None = None
        self._found: tuple[CachedHalf, Half] | None = None

    @property
    def is_deferred(self) -> bool:
        """The half runs as eager code for now: no compiled one was found, and compiling is deferred."""
        if self.cache is None or not self.cache.deferred or self._compiled is not None:
            return False
        self.cache.missing.add(self._name)
        return True

    def find(self, layers: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> tuple[CachedHalf, Half] | None:
        """Return the half of an earlier process and its function, or None."""
        if self.cache is None or self._compiled is not None or self._found is not None:
            return self._found
        if self._name in self.cache.missing:
            return None  # looked for already
        started_s = time.perf_counter()
        if (found := self.cache.find(self._key_of(layers, tensors))) is not None:
            with torch._inductor.config.patch("cpp.vec_isa_ok", _knows_instruction_sets()):
                self._found = found, found.load()
            logger.info("found %s compiled, loaded in %.2f s", self._name, time.perf_counter() - started_s)
        return self._found

    def store(
        self,
        layers: Sequence[nn.Module],
        tensors: Sequence[Tensor | None],
        source: str,
        call: Half,
        arguments: Sequence[Argument],
        *,
        is_single: bool,
    ) -> None:
        """Store the half for other processes, if it can be."""
        if self.cache is None or self._found is not None or not (key := self._key_of(layers, tensors)):
            return
        if (half := cacheable_half(source, call, arguments, is_single=is_single)) is not None:
            self.cache.store(key, half)

    def _key_of(self, layers: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> str:
        if self._key is None:
            assert self.cache is not None
            self._key = self.cache.key(self._name, self._structure, layers, tensors)
        return self._key

    def __call__(self, *arguments: nn.Module | Tensor | None) -> Any:
        if self._compiled is None:
            self._compiled = self._compile(arguments)
        return self._compiled(*arguments)

    def _compile(self, arguments: Sequence[nn.Module | Tensor | None]) -> Half:
        started_s, num_threads = time.perf_counter(), torch.get_num_threads()
        on_gpu = any(isinstance(each, Tensor) and each.device.type == "cuda" for each in arguments)
        is_backed = needs_example(on_gpu)
        torch.set_num_threads(NUM_THREADS)
        try:
            compiled = self._compiled_for(arguments, on_gpu=on_gpu, is_backed=is_backed)
        except TorchDynamoException as error:
            if is_backed or "data-dependent" not in str(error):
                raise
            # The compiler asks something about the number of tokens, as for a batched product, and needs an example.
            compiled = self._compiled_for(arguments, on_gpu=on_gpu, is_backed=True)
        finally:
            torch.set_num_threads(num_threads)
        compiled.disable_guard_check()
        logger.info("compiled %s in %.1f s", self._name, time.perf_counter() - started_s)
        return compiled

    def _compiled_for(
        self, arguments: Sequence[nn.Module | Tensor | None], *, on_gpu: bool, is_backed: bool
    ) -> AOTCompiledFunction:
        # Floats of a module (a norm's epsilon) become constants; structure() has compared them. torch 2.11 has
        # aot_compile behind a setting, which is on in later versions.
        # What differs from a model that was compiled before is a constant, too.
        settings = {"specialize_float": True, "automatic_dynamic_shapes": False, "enable_aot_compile": True}
        with torch.inference_mode(), torch._dynamo.config.patch(settings):
            num_tokens = USUAL_TOKENS if is_backed else 3
            examples = [
                each.new_zeros((num_tokens, *each.shape[1:])) if isinstance(each, Tensor) else each
                for each in arguments
            ]
            for tensor in (each for each in examples if isinstance(each, Tensor)):
                # One graph for every count, 1 included, where dynamic=True makes two.
                if is_backed:
                    mark_dynamic(tensor, 0)
                else:
                    mark_unbacked(tensor, 0, hint_override=USUAL_TOKENS)
            # No half has 2^31 elements, but without a known size a GPU's kernels would index with 64 bits.
            options: dict[str, Any] = {
                "guard_filter_fn": _no_guards,
                "assume_32bit_indexing": on_gpu,
                # Checks of what operators return, at each call; the tests of each operator make them.
                "size_asserts": False,
                "alignment_asserts": False,
                "cpp.vec_isa_ok": _knows_instruction_sets(),
                "pre_grad_custom_pass": Recognised(),
                "post_grad_custom_pre_pass": ShareProducts(),
            }
            if hasattr(torch._inductor.config, "pre_grad_pass_timing"):
                options["pre_grad_pass_timing"] = "early"  # before the cache is asked; always so without this option
            lazy: Any = torch.compile(self.uncompiled, fullgraph=True, options=options)
            # The graph must hold for 1 token, too, although the example has 512.
            with self._tracing(), fx_config.patch(backed_size_oblivious=is_backed):  # type: ignore[attr-defined]
                return lazy.aot_compile((tuple(examples), {}))


def compile_halves(
    half: Half,
    entries: Sequence[tuple[nn.Module, ...]],
    name: str,
    tracing: Callable[[], AbstractContextManager[None]] = nullcontext,
    cache: CompileCache | None = None,
) -> list[Half]:
    """Return one callable per entry, a layer or a pair of layers, that takes the half's tensors.

    Entries of the same structure share one graph. ``tracing`` makes the context in which the halves are traced, and
    ``cache`` has those of earlier processes.
    """
    by_structure: dict[tuple[Any, ...], CompiledHalf] = {}
    halves: list[Half] = []
    for layers in entries:
        key = tuple(map(structure, layers))
        if key not in by_structure:
            number = len(by_structure)
            by_structure[key] = CompiledHalf(half, f"{name} (structure {number})", tracing, structure=key, cache=cache)
        halves.append(BoundHalf(by_structure[key], layers))
    return halves
