"""FakeCuda: tensors on ``cuda`` are fake, CPU tensors are real, and what a step on a GPU must not do is refused.

Fake tensors have shapes, strides, dtypes and a device, and no values. What is copied to the host is zeros. The host
tier, the sampler's books and the scheduler work on real CPU memory meanwhile, as beside a real GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniserve.ops.attention.base import per_head
from omniserve.ops.cuda import OPERATORS, kernels
from tests.fake_cuda.runtime import FakeRuntime

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_READS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default, _aten.equal.default)
_ALLOCATIONS = (
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OF_THE_COMPILER = {"num_warps", "num_stages", "maxnreg", "sanitize_overflow"}


def is_on_device(value: object) -> bool:
    """Tell whether a value is a fake tensor on the fake GPU."""
    return isinstance(value, FakeTensor) and value.device.type == "cuda"


class FakeCuda(TorchDispatchMode):
    """Runs operators on the device as fakes, others as they are, and reports broken rules to the runtime.

    Args:
        runtime: Knows the rules.
    """

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():
            with self:  # under inference_mode it comes here before it is taken apart
                return func.decompose(*args, **kwargs)
        runtime, device = self.runtime, kwargs.get("device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(map(is_on_device, tensors))
        if func.namespace.startswith("omniserve") and on_device:
            return self._own_operator(func, args)
        if not on_device and (device is None or torch.device(device).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func in _COPIES and (copied := self._between(func, args, kwargs)) is not None:
            return copied
        self._check(func, args, kwargs, tensors)
        is_view = any(result.alias_info for result in func._schema.returns) and not func._schema.is_mutable
        if func.namespace != "prim" and not is_view and func not in _ALLOCATIONS:
            runtime.launch(func._schema.name)
        return func(*args, **kwargs)  # under the FakeTensorMode below this one

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Report what an operator on the device must not do."""
        runtime = self.runtime
        if func in _INDEXING:
            if any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
                runtime.forbid(f"{func} by a mask: the host waits for the number of its elements")
        elif func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            pass
        elif func in _READS or _BY_VALUE & set(func.tags):
            runtime.forbid(f"{func}: the host waits for values")
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.dim():
                runtime.forbid(f"{func}: a CPU tensor {list(tensor.shape)} meets one on the device")
            elif tensor.device.type == "cpu":
                runtime.forbid_in_capture(f"{func}: a CPU scalar")

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        runtime = self.runtime
        if func in (_aten.pin_memory.default, _aten._pin_memory.default):
            with no_dispatch():
                return runtime.pin(args[0].clone())
        if func is _aten.is_pinned.default:
            return runtime.is_pinned(args[0])
        if is_pinned := kwargs.get("pin_memory"):
            runtime.forbid_in_capture("allocation of page-locked memory")
            kwargs = {**kwargs, "pin_memory": False}
        with no_dispatch():
            result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(result)):
            runtime.forbid_in_capture(f"{func}: a tensor on the CPU")
        return runtime.pin(result) if is_pinned else result

    def _between(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Copy between host and device; None: both sides are on the device."""
        runtime = self.runtime
        if func is _aten.copy_.default:
            target, source = args[:2]
            target_type, target_dtype = target.device.type, target.dtype
            is_async = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        else:
            target, source = None, args[0]
            target_type = torch.device(kwargs.get("device") or source.device).type
            target_dtype = kwargs.get("dtype") or source.dtype
            is_async = kwargs.get("non_blocking", False)
        if source.device.type == target_type:
            return None
        runtime.forbid_in_capture(f"{func}: a copy between host and device")
        host = source if source.device.type == "cpu" else target
        what = "upload" if target_type == "cuda" else "download"
        if source.numel() and not is_async:
            runtime.forbid(f"{func}: a blocking {what} of {list(source.shape)}")
        elif source.numel() and (host is None or not runtime.is_pinned(host)):
            runtime.forbid(f"{func}: an {what} of {list(source.shape)} from or to memory that is not page-locked")
        elif target_dtype != source.dtype:
            runtime.forbid(f"{func}: an {what} of {list(source.shape)} that changes the dtype, which torch does on the "
                           "host or in a copy of its own")  # fmt: skip
        runtime.launch(what)
        if target is None:
            made: Tensor
            if target_type == "cuda":
                made = torch.empty(source.shape, dtype=target_dtype, device="cuda")
            else:
                with no_dispatch():
                    made = torch.zeros(source.shape, dtype=target_dtype)
            return made
        if target.shape != source.shape:
            torch.broadcast_shapes(target.shape, source.shape)
        if target_type == "cpu":
            with no_dispatch():
                target.zero_()
        return target

    def _own_operator(self, func: Any, args: Any) -> Any:
        """Run what is registered for CUDA, up to its launch."""
        name = func._schema.name.removeprefix("omniserve::")
        if name not in OPERATORS:
            self.runtime.broken(f"{func} has no kernel for CUDA")
        with self:
            return getattr(kernels(OPERATORS[name]), name)(*args)


class _Functions(TorchFunctionMode):
    """Turns functions that torch runs in C++, unseen by a dispatch mode, into operators."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor):
            device, is_pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            with no_dispatch():
                made = func(*args, **kwargs)
            if is_pinned:
                made = self._runtime.pin(made)
            if made.dim():
                self._runtime.forbid_in_capture("torch.tensor")
            return made if device is None or torch.device(device).type == "cpu" else made.to(device)
        if func is Tensor.data_ptr and is_on_device(args[0]):
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
        return func(*args, **kwargs)


class Launcher:
    """Stands for one of Triton's kernels: checks what it is given, and launches nothing."""

    def __init__(self, kernel: Any, runtime: FakeRuntime) -> None:
        self._kernel = kernel
        self._runtime = runtime
        self._signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name, runtime = self._kernel.fn.__name__, self._runtime
            sizes = grid if isinstance(grid, tuple) else (grid,)
            if not all(isinstance(size, int) and 0 < size for size in sizes) or max(sizes[1:], default=1) > 65535:
                runtime.broken(f"{name} is launched on a grid of {grid}")
            given = {key: value for key, value in kwargs.items() if key not in _OF_THE_COMPILER}
            for parameter, value in self._signature.bind(*args, **given).arguments.items():
                if isinstance(value, Tensor):
                    if not is_on_device(value) and not runtime.is_pinned(value):
                        runtime.broken(f"{name} cannot read {parameter}, which is in pageable memory of the host")
                elif not isinstance(value, bool | int | float):
                    runtime.broken(f"{name} is given {value!r} as {parameter}")
            runtime.launch(name)

        return launch


def replace_kernels(module: ModuleType, runtime: FakeRuntime, patch: pytest.MonkeyPatch) -> None:
    """Put launchers in place of the Triton kernels of a module."""
    for name, value in vars(module).items():
        if callable(getattr(value, "fn", None)) and hasattr(value, "arg_names"):
            patch.setattr(module, name, Launcher(value, runtime))


@contextmanager
def fake_gpu() -> Iterator[FakeRuntime]:
    """Make ``cuda`` a device of fake tensors, in this thread; the guard must be registered."""
    runtime = FakeRuntime()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        runtime.install(patch)
        for name in ("rows", "mailbox", "blocks", "attention", "lora"):
            replace_kernels(kernels(name), runtime, patch)
        # torch's own reads the elements one by one.
        patch.setattr(FakeTensor, "tolist", lambda tensor: tensor.to("cpu").tolist())
        per_head.cache_clear()  # of tensors of another mode
        stack.callback(per_head.cache_clear)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(FakeCuda(runtime))
        stack.enter_context(_Functions(runtime))
        yield runtime
