"""Bytes and operations of kernels on a GPU: of eager code, and of a model's layers as they are compiled.

Nothing here needs a GPU: the layers are traced with fake tensors as ``omniserve.layers.patching`` compiles them; only
the device, an H200, is put in by hand, and what torch would ask the driver. ``pretend_to_have_a_gpu`` changes torch for
the whole process: nothing else belongs into it.

Legend: T packed tokens, D hidden, H head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from omniserve.layers.compiled import USUAL_TOKENS, ShareProducts
from omniserve.layers.tracing.traced import TracedFamily
from omniserve.layers.weights.merged import merge
from omniserve.simulate.analytic import Efficiency
from omniserve.simulate.hardware import DeviceSpec

Kind = Literal["product", "rows", "decode", "prefill"]
"""Matrix product; what goes through rows once; attention of decodes; attention of chunks."""

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A launch of a kernel."""

    kind: Kind
    name: str
    num_bytes: float
    """Read from and written to device memory, each element once."""
    flops: float = 0.0
    """Operations of matrix products and attention; what else a kernel computes does not count."""
    bus_bytes: float = 0.0
    """Read from or written to page-locked memory of the host."""


def bound_s(work: Work, device: DeviceSpec) -> float:
    """Return the least time of a launch: memory, arithmetic and bus at the peaks of the data sheet."""
    return max(
        work.num_bytes / device.bytes_per_s, work.flops / device.flops, work.bus_bytes / device.pcie_bytes_per_s
    )  # fmt: skip


def expected_s(work: Work, device: DeviceSpec, efficiency: Efficiency, gap_s: float) -> float:
    """Return the time of a launch at usual shares of the peaks, and the gap to the next one in a graph."""
    of_bytes = {
        "product": efficiency.gemm_bytes, "rows": efficiency.elementwise_bytes,
        "decode": efficiency.decode_bytes, "prefill": efficiency.decode_bytes,
    }[work.kind]  # fmt: skip
    of_flops = efficiency.prefill_flops if work.kind == "prefill" else efficiency.gemm_flops
    slower = replace(work, num_bytes=work.num_bytes / of_bytes, flops=work.flops / of_flops)
    return bound_s(slower, device) + gap_s


class _Noted(TorchDispatchMode):
    """Notes what operators that launch something read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or any(made.alias_info for made in func._schema.returns):
            return result  # a view, or a question
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if func in (_aten.embedding.default, _aten.index_select.default, _aten.index.Tensor):
            given = [*given[1:], *made]  # of the table only what is looked up
        is_product = func in (_aten.mm.default, _aten.addmm.default)
        self.works.append(
            Work(kind="product" if is_product else "rows", name=func._schema.name, num_bytes=_bytes([*given, *made]))
        )  # fmt: skip
        return result


def eager_work(run: Callable[[], object]) -> tuple[Work, ...]:
    """Return the launches of code that is not compiled; call in the FakeTensorMode of its tensors."""
    noted: list[Work] = []
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        with _Noted() as mode:
            run()
        noted = mode.works
    total = flops.get_total_flops()
    products = [work for work in noted if work.kind == "product"]
    assert len(products) <= 1, "the counter tells the sum of all products"
    return tuple(replace(work, flops=total) if work.kind == "product" else work for work in noted)


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


_H200 = {
    "major": 9, "multi_processor_count": 132, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "warp_size": 32,
}  # fmt: skip
_LAUNCH = re.compile(r"(triton_\w+)\.run\(|extern_kernels\.(\w+)\(")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled function of packed tokens."""

    launches: tuple[str, ...]
    """Kernels in the order of the generated code."""
    works: Mapping[int, tuple[Work, ...]]
    """Number of tokens -> what each of them does."""


def pretend_to_have_a_gpu() -> None:
    """Have the compiler believe in an H200."""
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = SimpleNamespace(**_H200, minor=0, name="H200")
    known = DeviceProperties(type="cuda", index=0, cc=90, max_threads_per_block=1024, **_H200)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )  # fmt: skip
    replaced: list[tuple[Any, str, Any]] = [
        (DeviceProperties, "create", staticmethod(lambda device: known)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.version, "cuda", "13.0"),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "is_triton_capable", staticmethod(lambda *_: True)),
        (CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *_: None)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        (driver, "_active", target),
        (driver, "_default", target),
    ]
    for place, name, value in replaced:
        setattr(place, name, value)
    has_triton.cache_clear()  # what is imported may have asked already


def compiled_for_gpu(
    graph: torch.fx.GraphModule, inputs: list[Tensor], mode: FakeTensorMode, counts: tuple[int, ...] = ()
) -> Compiled:
    """Return what a traced function would launch, if its inputs were on a GPU; weights are added to ``inputs``.

    The kernels' work is counted for each of these numbers of tokens.
    """
    import torch._inductor.config as config
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    graph.graph.eliminate_dead_code()  # what only the other half needs
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    weights: dict[Any, torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":  # weights become inputs too
            if node.target not in weights:
                inputs.append(getattr(graph, node.target))
                with graph.graph.inserting_after(placeholders[-1]):
                    placeholders.append(graph.graph.placeholder(f"weight{len(inputs)}"))
                weights[node.target] = placeholders[-1]
            node.replace_all_uses_with(weights[node.target])
            graph.graph.erase_node(node)
    graph.graph = fx_graph_cse(graph.graph)
    ShareProducts()(graph.graph)
    graph.recompile()
    with ExitStack() as stack:
        for context in (mode, torch.no_grad(), V.set_fake_mode(mode)):
            stack.enter_context(context)
        stack.enter_context(config.patch({"assume_32bit_indexing": True}))
        # Nothing is said of sizes with an example.
        stack.enter_context(fx_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        on_gpu = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*on_gpu)
        lowering = GraphLowering(graph, example_inputs=on_gpu, shape_env=mode.shape_env, is_inference=True)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*on_gpu)
        code, _ = lowering.codegen()
        body = code.value[code.value.index("def call") :]
        names = tuple(found[1] or found[2] for found in _LAUNCH.finditer(body))
        nodes = [node for node in lowering.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        works = {
            count: tuple(_work(name, node, lowering, count) for name, node in zip(names, nodes, strict=True))
            for count in counts
        }
    return Compiled(launches=names, works=works)


def _work(name: str, node: Any, lowering: Any, num_tokens: int) -> Work:
    """Return what one launch, which is a node of the scheduler, does with so many tokens."""

    def with_tokens(size: Any, fallback: int | None = None) -> int:
        symbols = getattr(size, "free_symbols", ())
        return int(size.subs(dict.fromkeys(symbols, num_tokens)) if symbols else size)

    with patch.object(lowering.sizevars, "optimization_hint", with_tokens):
        num_bytes = node.get_read_write_buffers_sizes_impl(include_reads=True, include_writes=True)
    if not node.is_extern():
        return Work(kind="rows", name=name, num_bytes=num_bytes)
    x, weight = (each.get_size() for each in node.node.inputs[-2:])  # addmm has a bias before them
    flops = 2 * with_tokens(x[0]) * with_tokens(x[1]) * with_tokens(weight[1])
    return Work(kind="product", name=name, num_bytes=num_bytes, flops=flops)


def recorded(model_type: str, fields: Mapping[str, Any]) -> TracedFamily:
    """Return the layers of a model with two of them in bf16, as ``patch`` finds them, and a vocabulary that is small.

    Args:
        model_type: transformers' name of the architecture.
        fields: Fields of its configuration.
    """
    small = {"num_hidden_layers": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **{**fields, **small})
    with no_init_weights():  # drawing all of a large model's takes longer than all that follows
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            values = noise.repeat(-(-parameter.numel() // len(noise)))[: parameter.numel()].view_as(parameter)
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
    return TracedFamily(model)


def layers_on_gpu(
    family: TracedFamily, *, parts: Sequence[str] = ("between",), is_merged: bool = True, has_example: bool = False,
    counts: tuple[int, ...] = (),
) -> dict[str, Compiled]:  # fmt: skip
    """Return what is launched ``before`` a layer's attention, ``behind`` it, or ``between`` it and the next layer's.

    Args:
        family: The layers, as ``recorded`` returns them; their weights are fake afterwards.
        parts: Which of the three.
        is_merged: Projections of one input are one product, and the compiler hears of a usual number of tokens.
        has_example: The compiler sees a usual number of tokens, as where torch is older than 2.13.
        counts: See ``compiled_for_gpu``.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    spec = family.spec()
    for module in (module for layer in family.layers for module in layer.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with mode:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
    with mode, torch.no_grad(), family.compiling(), patch("torch.compiler.is_compiling", lambda: True):
        first, second = family.layers
        for layer in family.layers if is_merged else ():
            for group in family.linear_groups(layer):
                merge(*group)  # type: ignore[arg-type]
        num_tokens: Any
        if has_example:
            dynamic: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            num_tokens = mode.from_tensor(torch.empty(USUAL_TOKENS, device="cpu"), symbolic_context=dynamic).shape[0]
        else:
            with shapes.ignore_fresh_unbacked_symbols():
                num_tokens = shapes.create_unbacked_symint()
            torch._check(num_tokens >= 1)
            if is_merged:
                shapes.var_to_hint_override[num_tokens.node.expr] = USUAL_TOKENS

        def rows(width: int) -> Tensor:
            return torch.empty(num_tokens, width, dtype=torch.bfloat16)

        hidden, attn = rows(spec.hidden_size), rows(spec.num_heads * spec.head_size)
        cos, sin = rows(spec.head_size), rows(spec.head_size)

        def before(hidden: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return family.pre_attention(second, hidden, cos, sin)

        def behind(attn: Tensor, hidden: Tensor) -> Any:
            return family.post_attention(first, attn, hidden)

        def between(attn: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Any:
            hidden = behind(attn, hidden)
            return hidden, *before(hidden, cos, sin)

        known: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
            "before": (before, [hidden, cos, sin]),
            "behind": (behind, [attn, hidden]),
            "between": (between, [attn, hidden, cos, sin]),
        }
        table = select_decomp_table()
        graphs = {part: make_fx(known[part][0], decomposition_table=table)(*known[part][1]) for part in parts}
    return {part: compiled_for_gpu(graph, known[part][1], mode, counts) for part, graph in graphs.items()}
