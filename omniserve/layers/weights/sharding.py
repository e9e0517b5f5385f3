"""Tensor parallelism: a model becomes one rank's part of it, by the plan that transformers has for its type.

``config.base_model_tp_plan`` names a style for each linear: ``colwise`` keeps a part of the outputs, ``rowwise`` a part
of the inputs and sums the products of all ranks, ``colwise_gather_output`` puts the outputs of all ranks together
again, and so on. No family is sharded by hand. Done before ``patch``, which then finds a model with fewer heads.

transformers' own implementation keeps DTensors and replaces each module's ``forward``, which neither prepacked weights
nor ``torch.compile(fullgraph=True)`` take; so the plan is read, and weights are sliced here. Embeddings stay whole on
each rank: a lookup reads one row, and a sharded one would have to be summed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.weights.int8_modules import RoundedLinear, share_rows
from omniserve.layers.weights.quantized import remembered
from omniserve.layers.weights.quantized_parts import remember_inputs, remember_outputs
from omniserve.ops.collectives import shard_range

logger = logging.getLogger(__name__)

_all_reduce = torch.ops.omniserve.all_reduce.default
_all_gather = torch.ops.omniserve.all_gather.default

_KEEPS_ALL = frozenset(
    (
        "replicate",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "local_params",
        "embedding_rowwise",
        "embedding_colwise",
    )
)
"""Styles that change nothing at inference, or nothing but where an embedding lies."""
_LINEARS = ("colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
_KV_PROJECTIONS = ("k_proj", "v_proj")
_FUSED_PROJECTIONS = ("qkv_proj", "query_key_value")
_HEAD_PROJECTIONS = ("q_proj", *_KV_PROJECTIONS)


@dataclass(frozen=True, slots=True)
class LinearPart:
    """What a rank has of a linear."""

    num_inputs: int
    """Inputs of the whole linear."""
    num_outputs: int
    """Outputs of the whole linear."""
    inputs: tuple[int, int | None] = 0, None
    """Where they begin and end."""
    outputs: Tensor | None = None
    """Their indices; None: all."""


def part_of(linear: nn.Linear) -> LinearPart:
    """Return what this process has of a linear."""
    part: LinearPart = linear.__dict__.get("_omniserve_part", LinearPart(linear.in_features, linear.out_features))
    return part


def whole_names(model: nn.Module) -> dict[int, str]:
    """Return the names that modules have in the whole model, by their ids."""
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        name = names.setdefault(id(module), name)
        if isinstance(module, Around):
            names[id(module.inner)] = name
    return names


class Around(nn.Module):
    """A module with a collective behind it; its other attributes are the module's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class AllReduced(Around):
    """Sums a module's output over the ranks: each has computed a part of the experts' features, say."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _all_reduce(self.inner(*args, **kwargs))


class RowParallelLinear(Around):
    """A linear with a part of the inputs on each rank. ``part`` is this rank's, if it is given the whole input."""

    def __init__(self, linear: nn.Linear, part: tuple[int, int] | None) -> None:
        super().__init__(linear)
        self.added_bias = linear.bias
        linear.register_parameter("bias", None)
        self._part = part

    def forward(self, x: Tensor) -> Tensor:
        if self._part is not None:
            x = x[..., self._part[0] : self._part[1]]
        y = _all_reduce(self.inner(x))
        return y if self.added_bias is None else y + self.added_bias


class GatheredLinear(Around):
    """A linear with a part of the outputs on each rank, which returns all of them."""

    def __init__(self, linear: nn.Linear, num_outputs: int, num_ranks: int) -> None:
        super().__init__(linear)
        self._num_outputs, self._num_ranks = num_outputs, num_ranks

    def forward(self, x: Tensor) -> Tensor:
        return _all_gather(self.inner(x), self._num_outputs, self._num_ranks)


class IdentityOfAll(Around):
    """An expert that returns its input, among experts whose outputs are summed over the ranks."""

    def __init__(self, inner: nn.Module, num_ranks: int) -> None:
        super().__init__(inner)
        self._num_ranks = num_ranks

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x / self._num_ranks, *args, **kwargs)


def num_shards(model: nn.Module) -> int:
    """Return of how many ranks a model is one's part; 1: it is whole."""
    shards: tuple[int, int] | None = model.__dict__.get("_omniserve_shard")
    return 1 if shards is None else shards[1]


def shard(model: PreTrainedModel, rank: int, num_ranks: int) -> PreTrainedModel:
    """Make of a whole model a rank's part of it, in place; return it.

    KV heads that are fewer than the ranks are on several of them. Codes that were noted of a weight are noted of its
    part, if a form of codes has that (``quantized_parts``).

    Raises:
        UnsupportedModelError: Its type has no plan, or an unknown style in it; a linear has no parts.
        ValueError: The model is patched or sharded, or its heads do not go into ``num_ranks`` parts.
    """
    name = type(model).__name__
    if not 0 <= rank < num_ranks:
        raise ValueError(f"there is no rank {rank} of {num_ranks}")
    if "_omniserve_patch" in model.__dict__ or num_shards(model) > 1:
        raise ValueError("shard a model before it is patched, and once")
    if num_ranks == 1:
        return model
    plan = {key: style for key, style in (model.tp_plan or {}).items() if style not in _KEEPS_ALL}
    if not any(_in_layer(key) for key in plan):
        raise UnsupportedModelError(
            f"{name} cannot be split over {num_ranks} ranks: transformers has no tensor-parallel plan for the layers "
            f"of the type {model.config.model_type!r}; serve it with tensor_parallel_size=1"
        )
    _untie_head(model, plan)
    with torch.inference_mode(False), torch.no_grad():
        for path, parameter in list(model.named_parameters()):
            if (style := plan.get(_generic(path))) is not None:
                _shard_parameter(model, path, parameter, style, rank, num_ranks)
        for path, module in list(model.named_modules()):
            if (style := plan.get(_generic(path))) is not None:
                _shard_module(model, path, module, style, rank, num_ranks)
    model.__dict__["_omniserve_shard"] = (rank, num_ranks)
    return model


def _generic(path: str) -> str:
    """Return a module's path with a star in the place of each number, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _in_layer(key: str) -> bool:
    return "*" in key


def _parent(model: nn.Module, path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _untie_head(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Give a head that is to be sharded a weight of its own, if it has the embedding's."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), "")
    if head is not None and path in plan and getattr(head, "weight", None) is embedding.weight:
        noted = remembered(embedding.weight)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        if noted is not None:
            remember_outputs(head.weight, noted, torch.arange(len(head.weight)))


def _shard_parameter(
    model: PreTrainedModel, path: str, parameter: nn.Parameter, style: str, rank: int, num_ranks: int
) -> None:
    """Keep a rank's part of a parameter that has an entry of its own: experts' weights, sinks of attention."""
    dim = parameter.ndim - 2 if parameter.ndim > 1 else 0
    parts = 1
    if style in ("rowwise", "packed_rowwise"):
        if parameter.ndim == 1:
            return
        dim = parameter.ndim - 1
    elif style not in ("colwise", "packed_colwise"):
        raise _unknown(model, path, style)
    if style.startswith("packed_") and parameter.ndim > 1:
        parts = 2
    module, name = _parent(model, path)
    kept = _part_of(parameter.data, dim, rank, num_ranks, parts, path)
    setattr(module, name, nn.Parameter(kept, requires_grad=False))


def _part_of(weight: Tensor, dim: int, rank: int, num_ranks: int, parts: int, path: str) -> Tensor:
    """Return a rank's part of each of the equal ``parts`` that lie side by side in a dimension."""
    size = weight.shape[dim] // parts
    begin, end = shard_range(size, rank, num_ranks)
    if begin == end:
        raise ValueError(f"{path} has {size} features, too few for {num_ranks} ranks: give fewer")
    pieces = [weight.narrow(dim, part * size + begin, end - begin) for part in range(parts)]
    return torch.cat(pieces, dim).contiguous() if parts > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def _shard_module(model: PreTrainedModel, path: str, module: nn.Module, style: str, rank: int, num_ranks: int) -> None:
    parent, name = _parent(model, path)
    if style in ("moe_tp_experts", "all_reduce"):
        setattr(parent, name, AllReduced(module))
    elif style == "moe_identity_expert":
        setattr(parent, name, IdentityOfAll(module, num_ranks))
    elif style == "packed_colwise" or style in _LINEARS:
        if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, RoundedLinear):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {path} is a {type(module).__name__}, of which no rank can keep a part; "
                "tensor_parallel_size needs linears that are plain, or round their rows to int8: no adapters of PEFT"
            )
        setattr(parent, name, _shard_linear(model, parent, path, module, style, rank, num_ranks))
    else:
        raise _unknown(model, path, style)


def _shard_linear(
    model: PreTrainedModel, parent: nn.Module, path: str, linear: nn.Linear, style: str, rank: int, num_ranks: int
) -> nn.Module:
    num_outputs, num_inputs = linear.out_features, linear.in_features
    if style.startswith("rowwise"):
        _keep_inputs(linear, rank, num_ranks, path)
        if isinstance(linear, RoundedLinear):
            share_rows(linear, num_ranks)
        return RowParallelLinear(linear, None if style == "rowwise" else shard_range(num_inputs, rank, num_ranks))
    head_size, name = getattr(parent, "head_dim", None), path.rpartition(".")[2]
    num_heads = model.config.get_text_config(decoder=True).num_attention_heads
    if style == "colwise" and name in _FUSED_PROJECTIONS and num_heads % num_ranks:
        raise _uneven(model, path, num_heads, "heads", num_ranks)
    parts = 2 if style == "packed_colwise" else 1
    if style == "colwise" and name in _HEAD_PROJECTIONS and head_size:
        cut = _heads_part(model, path, num_outputs // head_size, head_size, rank, num_ranks)
    else:

        def cut(weight: Tensor) -> Tensor:
            return _part_of(weight, 0, rank, num_ranks, parts, path)

    _keep_outputs(linear, cut)
    return linear if style in ("colwise", "packed_colwise") else GatheredLinear(linear, num_outputs, num_ranks)


def _heads_part(
    model: PreTrainedModel, path: str, num_heads: int, head_size: int, rank: int, num_ranks: int
) -> Callable[[Tensor], Tensor]:
    """Return what keeps a rank's heads of a projection."""
    kind = "KV heads" if path.endswith(_KV_PROJECTIONS) else "heads"
    if num_heads % num_ranks == 0:
        per_rank = num_heads // num_ranks
        first = rank * per_rank
    elif kind == "KV heads" and num_ranks % num_heads == 0:
        per_rank, first = 1, rank * num_heads // num_ranks
    else:
        raise _uneven(model, path, num_heads, kind, num_ranks)
    return lambda weight: weight.narrow(0, first * head_size, per_rank * head_size).clone()


def _keep_outputs(linear: nn.Linear, cut: Callable[[Tensor], Tensor]) -> None:
    noted, outputs = remembered(linear.weight), cut(torch.arange(linear.out_features))
    linear.__dict__["_omniserve_part"] = LinearPart(linear.in_features, linear.out_features, outputs=outputs)
    linear.weight = nn.Parameter(cut(linear.weight.data), requires_grad=False)
    if noted is not None:
        remember_outputs(linear.weight, noted, outputs)
    if linear.bias is not None:
        linear.bias = nn.Parameter(cut(linear.bias.data), requires_grad=False)
    linear.out_features = linear.weight.shape[0]


def _keep_inputs(linear: nn.Linear, rank: int, num_ranks: int, path: str) -> None:
    begin, end = shard_range(linear.in_features, rank, num_ranks)
    linear.__dict__["_omniserve_part"] = LinearPart(linear.in_features, linear.out_features, inputs=(begin, end))
    noted = remembered(linear.weight)
    linear.weight = nn.Parameter(_part_of(linear.weight.data, 1, rank, num_ranks, 1, path), requires_grad=False)
    if noted is not None and not remember_inputs(linear.weight, noted, linear.in_features, begin, end):
        logger.warning("%s is not held as codes: its inputs from %d to %d are no whole groups", path, begin, end)
    linear.in_features = end - begin


def _uneven(model: PreTrainedModel, path: str, num_heads: int, kind: str, num_ranks: int) -> ValueError:
    return ValueError(
        f"{type(model).__name__} has {num_heads} {kind} in {path}, which cannot be split over {num_ranks} ranks: give "
        "a tensor_parallel_size that divides its number of heads"
    )


def _unknown(model: PreTrainedModel, path: str, style: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be split: its plan has the style {style!r} for {path}, which is not known"
    )
