"""Quantised checkpoints of the hub: GPTQ, AWQ and compressed-tensors, whose codes are served as they are on a CPU.

transformers reads these with the modules of packages that want a GPU. Here dense weights are made of the codes, the
model is loaded with them, and the codes are noted for ``patch``. A method that is not read here is left to
transformers; a weight that its method does not describe as it is read here is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from omniserve.layers.weights.int8_modules import form_of_inputs, round_inputs
from omniserve.layers.weights.quantized import QuantizedWeight, affine_weight, dense_of, remember, symmetric_weight

Read = Callable[[str], Tensor]
"""Returns a tensor of a checkpoint by its name."""


class NotRead(ValueError):
    """A quantised checkpoint has a form that is not read here; the message says which."""


class QuantizedCheckpoint:
    """A folder of safetensors whose config says how it is quantised.

    Raises:
        NotRead: It is quantised in a way that is not read here.
        OSError: It has no safetensors.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                self._files |= dict.fromkeys(file.keys(), path)
        if not self._files:
            raise OSError(f"{folder} has no safetensors")
        self._method: _Method = method_of(config)
        marker = self._method.marker
        self.weights = {name.removesuffix(marker) + ".weight" for name in self._files if name.endswith(marker)}
        """Names of the dense weights that are made of codes."""

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors under the names of an unquantised checkpoint, those of codes dense in ``dtype``."""
        of_codes = tuple(name.removesuffix("weight") for name in self.weights)
        plain = {
            name: self._read(name)
            for name in self._files
            if not (name.startswith(of_codes) and name.rpartition(".")[2] in self._method.tensors)
        }
        return plain | {name: dense_of(self.weight(name)).to(dtype) for name in sorted(self.weights)}

    def weight(self, name: str) -> QuantizedWeight:
        """Return the codes of a dense weight.

        Raises:
            NotRead: They have groups or a type that are not read here.
        """
        stem = name.removesuffix("weight")
        return self._method.weight(stem, self._read, self._files.keys())

    @property
    def rounds_inputs(self) -> bool:
        """Linears with weights of codes round their rows, too."""
        return self._method.rounds_inputs

    def remember(self, model: nn.Module) -> list[str]:
        """Note the codes of the weights of a model that was loaded from ``state_dict``; return those it has not.

        Linears that the checkpoint has round their rows become such.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found = self.weights & parameters.keys()
        if self.rounds_inputs:
            linears = {name: model.get_submodule(name.removesuffix(".weight")) for name in found}
            found = {name for name, linear in linears.items() if type(linear) is nn.Linear}
        for name in found:
            codes, read = self.weight(name), functools.partial(self.weight, name)
            remember(parameters[name], codes.form, read, order=codes.order)
            if self.rounds_inputs:
                scale = self._method.input_scale(name.removesuffix("weight"), self._read)
                round_inputs(cast(nn.Linear, linears[name]), scale)
        return sorted(self.weights - found)

    def _read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


class _Method:
    """How codes are stored.

    Args:
        config: The checkpoint's ``quantization_config``.
    """

    marker: str
    """The end of the name of the tensor that has a weight's codes, behind the name of its module."""
    tensors: tuple[str, ...]
    """Last parts of the names of all tensors that a weight of codes has."""
    rounds_inputs = False
    """Rows are rounded, too."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def weight(self, stem: str, read: Read, names: Any) -> QuantizedWeight:
        """Return the codes of the module whose tensors begin with ``stem``."""
        raise NotImplementedError

    def input_scale(self, stem: str, read: Read) -> Tensor | None:
        """Return the fixed scale of a module's rows, ``[1]`` fp32, if they have no scales of their own."""
        raise NotImplementedError


class _GPTQ(_Method):
    """GPTQ: ``qweight [I / n, O]`` int32, n codes along the inputs in each; zero points less one in version 1."""

    marker, tensors = ".qweight", ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._bits = int(config["bits"])
        if self._bits not in (4, 8):
            raise NotRead(f"GPTQ with {self._bits} bits: 4 and 8 are read")
        self._first = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weight(self, stem: str, read: Read, names: Any) -> QuantizedWeight:
        codes = _unpacked(read(stem + "qweight"), self._bits, 0).T.contiguous()
        scale = read(stem + "scales").T.contiguous()
        zeros = _unpacked(read(stem + "qzeros"), self._bits, 1).T + self._first
        group = _group_of(stem, codes, scale)
        order = _order_of(stem + "g_idx", read, group, scale.shape[1]) if stem + "g_idx" in names else None
        return _in_groups(affine_weight(self._bits, group, codes, scale, zeros), order)


class _AWQ(_Method):
    """AWQ's ``gemm``: ``qweight [I, O / 8]`` int32, 8 codes along the outputs in each, in an order of their own."""

    marker, tensors = ".qweight", ("qweight", "qzeros", "scales")
    _ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if config.get("bits", 4) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
            raise NotRead(f"AWQ with {config.get('bits')} bits, version {config.get('version')}: 4 bits, gemm are read")

    def weight(self, stem: str, read: Read, names: Any) -> QuantizedWeight:
        codes, zeros = (self._in_order(read(stem + name)).T.contiguous() for name in ("qweight", "qzeros"))
        scale = read(stem + "scales").T.contiguous()
        return affine_weight(4, _group_of(stem, codes, scale), codes, scale, zeros)

    def _in_order(self, packed: Tensor) -> Tensor:
        return _unpacked(packed, 4, 1).unflatten(1, (-1, 8))[:, :, list(self._ORDER)].flatten(1)


class _PackQuantized(_Method):
    """compressed-tensors' ``pack-quantized``: ``weight_packed [O, I / n]`` int32, n codes along the inputs in each."""

    marker = ".weight_packed"
    tensors = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits = {int(group["weights"]["num_bits"]) for group in config["config_groups"].values()}
        inputs = [group.get("input_activations") for group in config["config_groups"].values()]
        strategies = {group["weights"].get("strategy", "group") for group in config["config_groups"].values()}
        if not strategies <= {"group", "channel"}:
            raise NotRead(
                f"compressed-tensors with scales by {', '.join(sorted(strategies))}: group and channel are read"
            )
        if len(bits) != 1 or not bits <= {4, 8} or any(inputs):
            raise NotRead("compressed-tensors with quantised activations, or other than 4 or 8 bits, is not read")
        self._bits = bits.pop()

    def weight(self, stem: str, read: Read, names: Any) -> QuantizedWeight:
        num_out, num_in = read(stem + "weight_shape").tolist()
        codes = _unpacked(read(stem + "weight_packed"), self._bits, 1)[:, :num_in].contiguous()
        scale = read(stem + "weight_scale").reshape(num_out, -1)
        group = _group_of(stem, codes, scale)
        groups_of_inputs = stem + "weight_g_idx"
        order = _order_of(groups_of_inputs, read, group, scale.shape[1]) if groups_of_inputs in names else None
        if stem + "weight_zero_point" in names:
            zeros = _unpacked(read(stem + "weight_zero_point"), self._bits, 0)[:num_out]
            return _in_groups(affine_weight(self._bits, group, codes, scale, zeros), order)
        return _in_groups(symmetric_weight(self._bits, group, codes, scale), order)


class _IntQuantized(_Method):
    """compressed-tensors' ``int-quantized``, W8A8: ``weight [O, I]`` int8, a scale for each output, rows in int8."""

    marker = ".weight_scale"
    tensors = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
    rounds_inputs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        groups = config["config_groups"].values()
        weights, inputs = [group["weights"] for group in groups], [group.get("input_activations") for group in groups]
        if not all(map(_is_int8, weights)) or not {each.get("strategy", "tensor") for each in weights} <= {
            "channel",
            "tensor",
        }:
            raise NotRead("compressed-tensors in int8: symmetric weights of 8 bits by channel or tensor are read")
        kinds = {(bool(each.get("dynamic")), each.get("strategy", "tensor")) for each in inputs if each}
        if not all(map(_is_int8, inputs)) or len(kinds) != 1 or not kinds <= {(True, "token"), (False, "tensor")}:
            raise NotRead(
                "compressed-tensors in int8: symmetric activations of 8 bits, all dynamic by token or all static by "
                "tensor, are read"
            )
        if any(group.get("output_activations") for group in groups):
            raise NotRead("compressed-tensors in int8: quantised outputs are not read")
        self._has_scale = kinds == {(False, "tensor")}

    def weight(self, stem: str, read: Read, names: Any) -> QuantizedWeight:
        codes = read(stem + "weight")
        if codes.dtype is not torch.int8 or codes.dim() != 2:
            raise NotRead(f"{stem}weight is {codes.dtype} of {codes.dim()} dimensions; int8 of 2 is read")
        self._has_no_zero(stem + "weight_zero_point", read, names)
        self._has_no_zero(stem + "input_zero_point", read, names)
        scale = read(stem + "weight_scale").float().reshape(-1, 1).expand(codes.shape[0], 1).contiguous()
        return QuantizedWeight(form_of_inputs(codes.shape[1]), codes.view(torch.uint8) ^ 0x80, (scale,))

    def input_scale(self, stem: str, read: Read) -> Tensor | None:
        return read(stem + "input_scale").float().reshape(1) if self._has_scale else None

    @staticmethod
    def _has_no_zero(name: str, read: Read, names: Any) -> None:
        if name in names and bool(read(name).any()):
            raise NotRead(f"{name}: it is not zero; symmetric codes are read")


def _is_int8(args: Mapping[str, Any] | None) -> bool:
    """Tell whether a config's weights or activations are symmetric integers of 8 bits."""
    if args is None:
        return False
    return args.get("num_bits") == 8 and args.get("type", "int") == "int" and args.get("symmetric", True) is True


def _compressed_tensors(config: Mapping[str, Any]) -> _Method:
    kinds: dict[Any, type[_Method]] = {"pack-quantized": _PackQuantized, "int-quantized": _IntQuantized}
    formats = {group.get("format") or config.get("format") for group in config.get("config_groups", {}).values()}
    found = formats or {config.get("format")}
    if len(found) != 1 or not found <= kinds.keys():
        raise NotRead(f"compressed-tensors in the format {', '.join(map(str, found))}: {', '.join(kinds)} are read")
    return kinds[found.pop()](config)


METHODS: dict[str, Callable[[Mapping[str, Any]], _Method]] = {
    "gptq": _GPTQ,
    "awq": _AWQ,
    "compressed-tensors": _compressed_tensors,
}
"""Methods of which some forms are read here, by the names in a config."""


def method_of(config: Mapping[str, Any]) -> _Method:
    """Return how a checkpoint with this ``quantization_config`` stores its codes.

    Raises:
        NotRead: It is not read here.
    """
    name = str(config.get("quant_method"))
    if name not in METHODS:
        raise NotRead(f"the quantisation {name} is not read; {', '.join(METHODS)} are")
    return METHODS[name](config)


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the codes in words of 32 bits, the first in the lowest bits, along a dimension; uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & (2**bits - 1)
    return codes.flatten(dim, dim + 1).to(torch.uint8)


def _group_of(stem: str, codes: Tensor, scale: Tensor) -> int:
    """Return how many inputs share a scale.

    Raises:
        NotRead: Not all groups have as many, or it is no multiple of 8.
    """
    num_in, groups = codes.shape[1], scale.shape[1]
    if num_in % groups or num_in // groups % 8:
        raise NotRead(f"{stem}*: {num_in} inputs in {groups} groups; groups of one size, a multiple of 8, are read")
    return num_in // groups


def _order_of(name: str, read: Read, group: int, num_groups: int) -> Tensor | None:
    """Return the inputs sorted by the groups that a tensor says they are in; None if they are already, or it says none.

    Raises:
        NotRead: Not all groups have as many inputs.
    """
    groups = read(name).long()
    if bool((groups == -1).all()):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], torch.arange(num_groups).repeat_interleave(group)):
        raise NotRead(f"{name}: groups of {group} inputs each are read")
    return None if torch.equal(groups, groups[order]) else order.int()


def _in_groups(weight: QuantizedWeight, order: Tensor | None) -> QuantizedWeight:
    """Return a weight whose codes are in their inputs' own order with those of each group side by side."""
    if order is None:
        return weight
    return QuantizedWeight(weight.form, weight.codes[:, order.long()], weight.scales, order)
