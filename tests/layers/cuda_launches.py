"""Print what the compiler would launch on an H200 between two attentions, a line for each model; needs no GPU.

python -m tests.layers.cuda_launches llama qwen3 llama/example llama/apart

Example: the compiler sees a usual number of tokens, as where torch is older than 2.13. Apart: each projection by
itself, and the two halves each by itself.

The layers are traced as ``omniserve.patching`` compiles them, with fake tensors; only the device is put in by hand, and
what torch would ask the driver. It changes torch for the whole process: nothing else belongs into it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers import AutoConfig, AutoModelForCausalLM

from omniserve.layers import family_of
from omniserve.layers.compiled import USUAL_TOKENS
from omniserve.layers.merged import merge

_H200 = {
    "major": 9, "multi_processor_count": 132, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "warp_size": 32,
}  # fmt: skip
_SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
_LAUNCH = re.compile(r"(triton_\w+)\.run\(|extern_kernels\.(\w+)\(")


def pretend_to_have_a_gpu() -> None:
    """Have the compiler believe in an H200."""
    from torch._dynamo.device_interface import CudaInterface
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


def launches(graph: torch.fx.GraphModule, inputs: list[Tensor], mode: FakeTensorMode) -> list[str]:
    """Return what a traced function would launch, if its inputs were on a GPU."""
    import torch._inductor.config as config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":  # weights become inputs too
            inputs.append(getattr(graph, node.target))
            with graph.graph.inserting_after(placeholders[-1]):
                placeholders.append(graph.graph.placeholder(f"weight{len(inputs)}"))
            node.replace_all_uses_with(placeholders[-1])
            graph.graph.erase_node(node)
    graph.recompile()
    with ExitStack() as stack:
        for context in (mode, torch.no_grad(), V.set_fake_mode(mode), config.patch({"assume_32bit_indexing": True})):
            stack.enter_context(context)
        stack.enter_context(fx_config.patch(backed_size_oblivious=True))  # nothing is said of sizes with an example
        on_gpu = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*on_gpu)
        lowering = GraphLowering(graph, example_inputs=on_gpu, shape_env=mode.shape_env, is_inference=True)
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        lowering.run(*on_gpu)
        code, _ = lowering.codegen()
    body = code.value[code.value.index("def call") :]
    return [found[1] or found[2] for found in _LAUNCH.finditer(body)]


def between_attentions(model_type: str, *, is_apart: bool, has_example: bool) -> list[str]:
    """Return the launches from one layer's attention to the next one's."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.set_default_dtype(torch.bfloat16)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        config = AutoConfig.for_model(model_type, **_SIZES)
        family = family_of(AutoModelForCausalLM.from_config(config))
        first, second = family.layers
        for layer in () if is_apart else family.layers:
            for group in family.linear_groups(layer):
                merge(*group)  # type: ignore[arg-type]
        num_tokens: Any
        if has_example:
            dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            num_tokens = mode.from_tensor(torch.empty(USUAL_TOKENS, device="cpu"), symbolic_context=dynamic).shape[0]
        else:
            with shapes.ignore_fresh_unbacked_symbols():
                num_tokens = shapes.create_unbacked_symint()
            torch._check(num_tokens >= 1)
            if not is_apart:
                shapes.var_to_hint_override[num_tokens.node.expr] = USUAL_TOKENS
        hidden, attn = torch.empty(num_tokens, 4096), torch.empty(num_tokens, 4096)
        cos, sin = torch.empty(num_tokens, 128), torch.empty(num_tokens, 128)

        def post(attn: Tensor, hidden: Tensor) -> Any:
            return family.post_attention(first, attn, hidden)

        def pre(hidden: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return family.pre_attention(second, hidden, cos, sin)

        def both(attn: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Any:
            hidden = post(attn, hidden)
            return hidden, *pre(hidden, cos, sin)

        parts: list[tuple[Callable[..., Any], list[Tensor]]] = [(both, [attn, hidden, cos, sin])]
        if is_apart:
            parts = [(post, [attn, hidden]), (pre, [hidden, cos, sin])]
        table = select_decomp_table()
        graphs = [(make_fx(half, decomposition_table=table)(*inputs), inputs) for half, inputs in parts]
    return [launch for graph, inputs in graphs for launch in launches(graph, inputs, mode)]


if __name__ == "__main__":
    pretend_to_have_a_gpu()
    for name in sys.argv[1:]:
        model_type, _, how = name.partition("/")
        print(name, *between_attentions(model_type, is_apart=how == "apart", has_example=how == "example"))
