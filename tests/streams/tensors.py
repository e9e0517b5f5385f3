"""Tensors of a lazy device: their device says ``cuda:0``, their data lies in CPU memory, and operators are queued.

Views are made at once, as they are made of sizes and strides alone. What an operator makes has its shape at once (of
meta tensors), and its values when it has run; until then, and when nothing on the host refers to it any more, it is
full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.streams.device import LazyDevice, Pool, Stream
from tests.streams.pinned import PinnedBlock, PinnedMemory, poison

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_SAME = {_aten.lift_fresh.default, _aten.detach_.default}
_SCALAR = {_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default}
# Made of other operators, but results are never views of arguments: one piece of work.
_WHOLE = {
    _aten.linear.default,
    _aten.matmul.default,
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten.rms_norm.default,
    _aten.cumsum.default,
}


class DeviceMemory:
    """Device memory of one allocation. When nothing refers to it, its stream may use it for something else at once."""

    def __init__(self, root: Tensor, stream: Stream) -> None:
        self.root = root
        self.stream = stream
        self.pool: Pool | None = stream.graph.pool if stream.graph is not None else None
        self.is_shared = False
        """Another stream or a graph uses the tensor."""

    def __del__(self) -> None:
        root = self.root
        if self.pool is not None:
            self.pool.free.append(root)
        elif self.is_shared:  # else nothing could tell: what follows on the stream follows the last use
            self.stream.queue.append(lambda: poison(root))


class LazyTensor(torch.Tensor):
    """A tensor of a lazy device."""

    raw: Tensor
    """The data, in CPU memory: what works read and write."""
    memory: DeviceMemory

    @staticmethod
    def __new__(cls, raw: Tensor, memory: DeviceMemory) -> LazyTensor:
        with torch.inference_mode(False):  # or no view of it could be made in inference mode
            made: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=CUDA
            )
        made.raw, made.memory = raw, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a lazy tensor, outside of the mode that queues it")

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, key: Any) -> Any:
        # torch makes an index tensor of a list below the level at which a mode sees it.
        return super().__getitem__(torch.tensor(key) if isinstance(key, list) else key)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"


class HostWork:
    """Work that reads or writes page-locked memory without torch's knowledge.

    Args:
        run: The work.
        rows: Indices of the rows or blocks that it reads or writes there; -1 is none.
    """

    def __init__(self, run: Callable[[], object], rows: Tensor) -> None:
        self._run = run
        self._rows = rows

    def __call__(self) -> None:
        self._run()

    def uses_host_memory(self) -> bool:
        """Tell whether there was anything to do; known when it has run."""
        return bool((self._rows >= 0).any())


class LazyMode(TorchDispatchMode):
    """Queues operators of a lazy device's tensors; all others run as ever.

    Args:
        device: The device.
        pinned: Page-locked memory.
    """

    def __init__(self, device: LazyDevice, pinned: PinnedMemory) -> None:
        super().__init__()
        self.device = device
        self.pinned = pinned
        self._kinds: dict[Any, str] = {}
        self._specs: dict[Any, Any] = {}

    # -- tensors -------------------------------------------------------------------------------------------------------

    def new(self, raw: Tensor) -> LazyTensor:
        """Return a tensor of new device memory, allocated on the current stream."""
        return LazyTensor(raw, DeviceMemory(raw, self.device.current))

    def empty_like_spec(self, shape: Any, stride: Any, dtype: torch.dtype) -> LazyTensor:
        raw = torch.empty_strided(shape, stride, dtype=dtype)
        poison(raw)
        return self.new(raw)

    def of_host(self, tensor: Tensor) -> LazyTensor:
        """Return a copy that is on the device at once."""
        return self.new(tensor.clone(memory_format=torch.contiguous_format))

    def launch(self, work: Callable[[], object], uses: Iterable[Any]) -> None:
        """Queue work on the current stream.

        Args:
            work: It holds raw tensors only.
            uses: Lazy tensors that it reads or writes; others are left out.
        """
        stream = self.device.current
        for each in uses:
            if isinstance(each, LazyTensor) and (
                each.memory.stream is not stream or (stream.graph is not None and each.memory.pool is None)
            ):
                each.memory.is_shared = True
        stream.give(work)

    # -- dispatch ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_lazy = any(
            isinstance(each, LazyTensor)
            or (isinstance(each, (list, tuple)) and any(isinstance(item, LazyTensor) for item in each))
            for each in (*args, *kwargs.values())
        )
        device = kwargs.get("device")
        if not is_lazy:
            if device is not None and torch.device(device).type == "cuda":
                return self._to_device(func, args, kwargs)
            if kwargs.get("pin_memory"):
                made = func(*args, **{**kwargs, "pin_memory": False})
                locked = self.pinned.allocate(made.shape, made.dtype)
                if func is not _aten.empty.memory_format:
                    locked.copy_(made)
                return locked
            return func(*args, **kwargs)
        if func in _SAME:
            return args[0]
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._kind_of(func)
        if kind == "scalar":
            return func(self._read(args[0]), *args[1:], **kwargs)
        if kind == "view":
            return self._view(func, args, kwargs)
        if kind == "copy_":
            return self._copy(*args, **kwargs)
        if kind == "_to_copy":
            return self._to_copy(*args, **kwargs)
        if kind == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            assert result is not NotImplemented, func
            return result
        return self._operator(func, args, kwargs, kind)

    def _kind_of(self, func: Any) -> str:
        if func in _SCALAR:
            return "scalar"
        if func is _aten.copy_.default:
            return "copy_"
        if func is _aten._to_copy.default:
            return "_to_copy"
        if func is _aten.is_pinned.default:
            raise AssertionError("is_pinned of a device tensor")
        if (
            func.namespace == "aten"
            and func not in _WHOLE
            and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        ):
            return "composite"
        schema = func._schema
        if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
            return "mutation"
        if any(r.alias_info is not None for r in schema.returns):
            return "view"
        return "function"

    def _to_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor on the device, or bring one from the host."""
        kwargs = {**kwargs, "device": _CPU} | ({"pin_memory": False} if "pin_memory" in kwargs else {})
        if any(isinstance(each, Tensor) for each in args):
            is_async = kwargs.pop("non_blocking", False)
            kwargs.pop("device")
            kwargs.pop("copy", None)
            host = args[0].to(kwargs["dtype"]) if kwargs.get("dtype") is not None else args[0]
            made = self.empty_like_spec(host.shape, host.contiguous().stride(), host.dtype)
            return self._copy(made, host, is_async)
        if func in (_aten.empty.memory_format, _aten.empty_strided.default):
            made = func(*args, **kwargs)
            poison(made)
            return self.new(made)
        value = func(*args, **kwargs)
        made = self.empty_like_spec(value.shape, value.stride(), value.dtype)
        raw = made.raw
        self.launch(partial(raw.copy_, value), [made])
        return made

    def _read(self, tensor: LazyTensor) -> Tensor:
        """Let the host wait for the current stream and read a tensor."""
        self.device.synchronize(self.device.current)
        return tensor.raw

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        base = args[0]
        result = func(base.raw, *args[1:], **kwargs)
        if isinstance(result, Tensor):
            return LazyTensor(result, base.memory)
        return type(result)(LazyTensor(each, base.memory) for each in result)

    def _to_copy(self, source: LazyTensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cpu":
            assert not non_blocking, "a copy to pageable memory waits"
            return _aten._to_copy.default(self._read(source), **kwargs)
        kwargs.pop("pin_memory", None)
        return self._operator(_aten._to_copy.default, (source,), kwargs, "function")

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, LazyTensor) and isinstance(source, LazyTensor):
            into, of = target.raw, source.raw
            self.launch(partial(into.copy_, of), (target, source))
            return target
        host = source if isinstance(target, LazyTensor) else target
        block = self.pinned.block_of(host)
        assert self.device.current.graph is None, "a graph captures a copy of host memory"
        assert block is not None or not self.pinned.has(host), "torch copies registered memory: not expected here"
        if isinstance(target, LazyTensor):
            into = target.raw
            if block is None:  # copied aside as it is called; that nothing waits for the device is the hardest case
                of = source.clone()
                self.launch(partial(into.copy_, of), (target,))
                return target
            of = self.pinned.alias(source)
            self.launch(_tracked(block, into, of), (target,))
        else:
            assert isinstance(source, LazyTensor)
            if block is None:
                target.copy_(self._read(source))
                return target
            self.launch(_tracked(block, self.pinned.alias(target), source.raw), (source,))
        if not non_blocking:
            self.device.synchronize(self.device.current)
        return target

    # -- operators -----------------------------------------------------------------------------------------------------

    def _operator(self, func: Any, args: Any, kwargs: Any, kind: str) -> Any:
        uses = [each for each in tree_leaves((args, kwargs)) if isinstance(each, LazyTensor)]
        raw_args = tuple(self._raw(func, each) for each in args)
        raw_kwargs = {name: self._raw(func, each) for name, each in kwargs.items()}
        if "device" in raw_kwargs:
            raw_kwargs["device"] = _CPU
        if raw_kwargs.get("pin_memory"):
            raise AssertionError(f"{func} makes page-locked memory of a device tensor")
        if kind == "mutation":
            work: Callable[[], object] = partial(func, *raw_args, **raw_kwargs)
            if func is torch.ops.omniserve.piggyback_send.default:
                work = HostWork(work, raw_args[4])
            self.launch(work, uses)
            if not func._schema.returns:
                return None
            assert isinstance(args[0], LazyTensor) and len(func._schema.returns) == 1, func
            return kwargs.get("out", args[0])
        if _shape_follows_from_values(func, raw_args):
            self.device.synchronize(self.device.current)
            return tree_map(self.new, func(*raw_args, **raw_kwargs))
        if func in _EMPTIES:
            raw = func(*raw_args, **raw_kwargs)
            poison(raw)
            return self.new(raw)
        specs, is_tuple = self._spec(func, raw_args, raw_kwargs)
        outs = [self.empty_like_spec(*spec) for spec in specs]
        raws = [out.raw for out in outs]

        def work() -> None:
            result = func(*raw_args, **raw_kwargs)
            for raw, value in zip(raws, result if is_tuple else (result,), strict=True):
                raw.copy_(value)

        self.launch(work, (*uses, *outs))
        return tuple(outs) if is_tuple else outs[0]

    def _raw(self, func: Any, given: Any) -> Any:
        """Return an argument as work may hold it: nothing that the host refers to."""
        if isinstance(given, LazyTensor):
            return given.raw
        if isinstance(given, Tensor):
            if func.namespace == "omniserve":
                assert self.pinned.has(given), f"{func}: a kernel is given memory that is not page-locked"
                return self.pinned.alias(given)
            assert given.dim() == 0 or func in _TAKES_HOST_INDICES, f"{func} of tensors on two devices"
            return given.clone()
        return type(given)(self._raw(func, each) for each in given) if isinstance(given, (list, tuple)) else given

    def _spec(self, func: Any, args: Any, kwargs: Any) -> tuple[list[tuple[Any, Any, torch.dtype]], bool]:
        """Return shapes, strides and dtypes of what an operator makes."""
        key = func, _key_of(args), tuple((name, _key_of(each)) for name, each in kwargs.items())
        known = self._specs.get(key)
        if known is None:
            meta_kwargs = {name: _meta(each) for name, each in kwargs.items()}
            if "device" in meta_kwargs:
                meta_kwargs["device"] = torch.device("meta")
            made = func(*map(_meta, args), **meta_kwargs)
            is_tuple = not isinstance(made, Tensor)
            found = [(each.shape, each.stride(), each.dtype) for each in (made if is_tuple else (made,))]
            known = self._specs[key] = found, is_tuple
        return known


def _key_of(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.shape, given.stride(), given.dtype
    return tuple(map(_key_of, given)) if isinstance(given, (list, tuple)) else (type(given), given)


def _meta(given: Any) -> Any:
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    return type(given)(map(_meta, given)) if isinstance(given, (list, tuple)) else given


_EMPTIES = {_aten.new_empty.default, _aten.empty_like.default, _aten.new_empty_strided.default}
_TAKES_HOST_INDICES = {_aten.index.Tensor, _aten.index_put_.default}


def _shape_follows_from_values(func: Any, args: Any) -> bool:
    if func is _aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _tracked(block: PinnedBlock, into: Tensor, of: Tensor) -> Callable[[], object]:
    block.begin_copy()

    def work() -> None:
        into.copy_(of)
        block.end_copy()

    return work
