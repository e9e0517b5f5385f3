"""Install the layer halves on a Hugging Face model, in place, and remove them again.

The engine calls ``model.omniserve`` (``patched_model.py``). ``model.generate()`` still runs Hugging Face's own layers,
with prepacked weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from omniserve.core.config import LoRAConfig
from omniserve.core.errors import UnsupportedModelError
from omniserve.layers.patched_model import KeptLayers, PatchedModel
from omniserve.layers.tracing.traced import TracedFamily, family_of
from omniserve.layers.weights.groups import GroupLinear, is_plain
from omniserve.layers.weights.held import HeldWeights
from omniserve.layers.weights.latents import HeldLatents
from omniserve.layers.weights.loaded_model import IdleHooks, check_loaded, free_weights, in_adapters, language_model
from omniserve.layers.weights.lora import LoRAStacks
from omniserve.layers.weights.parts import read_rest
from omniserve.ops.collectives import alone

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

Prepack = bool | Literal["auto"]


def _keep_layers(family: TracedFamily, keep: Callable[[int], range] | None) -> KeptLayers:
    """Keep some of a model's layers, and free the weights of the others, which cannot be called any more.

    What runs between two attentions belongs to the second one, and what is behind the last to that.
    """
    num_layers = len(family.layers)
    layers = range(num_layers) if keep is None else keep(num_layers)
    numbered = [(number, layer) for number, layer in enumerate(family.layers)]
    numbered += [
        (min(number, num_layers - 1), between.part)
        for number, several in enumerate(family.between)
        for between in several
    ]
    gone = {id(module) for number, layer in numbered if number not in layers for module in layer.modules()}
    gone -= {id(module) for number, layer in numbered if number in layers for module in layer.modules()}
    free_weights(family.model, gone)
    read_rest(family.model, gone)
    return KeptLayers(layers, frozenset(gone))


def patch(model: Model, *, compile: bool = True, prepack: Prepack = "auto", latent_kv: bool = False) -> Model:
    """Split a model's decoder layers around their attention, in place, and install ``model.omniserve``.

    Add, switch and merge adapters and quantise before, not after: compiled code and prepacked weights stay as they are.
    Patching a patched model with the same options does nothing.

    Args:
        model: A causal language model in eval mode, whole on one device; or a PEFT model of one.
        compile: Compile the halves with ``torch.compile(fullgraph=True)``, at their first use.
        prepack: Hold the weights of linears in the form that is best for the device. On a CPU that is a packed
            layout instead of the dense one, or bf16 for fp32 weights whose every value is exact in bf16 (products and
            sums stay fp32). On a GPU the weights of projections with the same input are views of one tensor. ``"auto"``
            prepacks where it pays: on a CPU with AVX2, as measured; on a GPU, which is not measured yet. Quantised
            linears and those in adapters stay as they are.
        latent_kv: Have a model with multi-head latent attention keep the latents as its KV, one head for all query
            heads, instead of the K and V of each head that it makes from them. Only on a CPU, and for an engine with
            ``attention="latent"`` (docs/latents.md says when that is better).

    Returns:
        The same model.

    Raises:
        TypeError: Not a ``PreTrainedModel``, nor a PEFT model of one.
        UnsupportedModelError: The model's layers, a feature of its config or its adapters are not supported, or it is
            not whole on one device. Or it cannot keep latents.
        ValueError: A part of the model is in training mode, or the model is patched with other options, or has nothing
            that can be prepacked although ``prepack`` is True.
    """
    inner, options = language_model(model), _Options(compile, prepack, latent_kv)
    installed: _Patch | None = inner.__dict__.get("_omniserve_patch")
    if installed is not None:
        if installed.options != options:
            raise ValueError(
                f"the model is patched already, with compile={installed.options.compile}, "
                f"prepack={installed.options.prepack!r} and latent_kv={installed.options.latent_kv}; call "
                "omniserve.unpatch(model) first"
            )
        return model
    check_loaded(model)
    inner.__dict__["_omniserve_patch"] = _Patch(inner, options)
    return model


def unpatch(model: Model) -> Model:
    """Restore a patched model exactly: same objects, same forward, same weights bit for bit.

    Returns:
        The same model.

    Raises:
        ValueError: The model is not patched, or only some of its layers are left.
    """
    inner = language_model(model)
    installed: _Patch | None = inner.__dict__.get("_omniserve_patch")
    if installed is None:
        raise ValueError("the model is not patched")
    patched: PatchedModel = inner.__dict__["omniserve"]
    if len(patched.layers) < patched.num_layers:
        raise ValueError("layers were freed, as other stages have them, and cannot be restored: load the model again")
    del inner.__dict__["_omniserve_patch"]
    installed.remove()
    return model


def patched_model(
    model: nn.Module,
    *,
    compile: bool,
    prepack: Prepack = "auto",
    keep: Callable[[int], range] | None = None,
    lora: LoRAConfig | None = None,
    latent_kv: bool = False,
) -> PatchedModel:
    """Return what ``patch`` installs on a model, which is patched if it is not yet.

    Args:
        model: As for ``patch``.
        compile: As for ``patch``.
        prepack: As for ``patch``.
        keep: Given the number of layers with attention, returns those that this process has: the weights of the others
            are freed, or never read. None keeps all.
        lora: How many adapters rows can name; None, or no slots: none.
        latent_kv: As for ``patch``.

    Raises:
        ValueError: A patched model is to keep some of its layers, or has other adapters or other KV; or as ``patch``
            or ``keep``.
        TypeError, UnsupportedModelError: As ``patch``.
    """
    inner = language_model(model)
    lora = lora if lora is not None and lora.max_loras else None
    if keep is not None:
        if "_omniserve_patch" in inner.__dict__:
            raise ValueError("layers are chosen when a model is patched, and this one is")
        check_loaded(model)
        inner.__dict__["_omniserve_patch"] = _Patch(inner, _Options(compile, prepack, latent_kv), keep, lora=lora)
    elif "omniserve" not in inner.__dict__:
        check_loaded(model)
        inner.__dict__["_omniserve_patch"] = _Patch(inner, _Options(compile, prepack, latent_kv), lora=lora)
    patched: PatchedModel = inner.__dict__["omniserve"]
    if (patched.lora.sizes if patched.lora is not None else None) != (lora.sizes if lora is not None else None):
        raise ValueError("the model is patched with other adapters' slots; call omniserve.unpatch(model) first")
    if patched.family.latent_kv != latent_kv:
        raise ValueError(
            f"the model is patched with latent_kv={not latent_kv}, and attention='latent' goes with latent_kv=True "
            "alone; call omniserve.unpatch(model) first, or change attention"
        )
    return patched


class _Options(NamedTuple):
    """The options of ``patch``."""

    compile: bool
    prepack: Prepack
    latent_kv: bool


class _Patch:
    """The changes of a model, and the way back."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: _Options,
        keep: Callable[[int], range] | None = None,
        *,
        lora: LoRAConfig | None = None,
    ) -> None:
        self.options = options
        self._model = model
        self._held: HeldWeights | None = None
        self._latents: HeldLatents | None = None
        self._lora: LoRAStacks | None = None
        self._hooks = IdleHooks(model)
        try:
            with alone():  # halves of a rank's part are found and compiled without the other ranks
                family = family_of(model, latent_kv=options.latent_kv)
            kept = _keep_layers(family, keep)
            if options.prepack is not False:
                if options.latent_kv:
                    self._latents = HeldLatents(family.overridden, kept.freed)
                self._prepack(family, kept.freed, is_required=options.prepack is True)
            if lora is not None:
                self._lora = self._make_adaptable(family, kept.freed, lora)
        except BaseException:
            self._hooks.put_back()
            raise
        # __setattr__ would register it as a submodule.
        model.__dict__["omniserve"] = PatchedModel(family, compile=options.compile, kept=kept, lora=self._lora)
        logger.info("installed model.omniserve (%s, compile=%s)", type(family).__name__, options.compile)

    def _prepack(self, family: TracedFamily, freed: frozenset[int], *, is_required: bool) -> None:
        adapted = in_adapters(self._model)
        mixing = {module for each in family.mixers for mixer in each for module in mixer.part.modules()}
        modules = [module for layer in family.layers for module in layer.modules() if module not in mixing]
        modules += [linear for layers in family.between for layer in layers for linear in layer.linears]
        modules += family.embedding_and_head.lm_head.modules()  # a head may be sharded
        candidates = [module for module in modules if id(module) not in adapted | freed]
        of_one_input = [group for layer in family.layers for group in family.linear_groups(layer)]
        held = HeldWeights(self._model, candidates, of_one_input, head=family.embedding_and_head.lm_head)
        if held.is_empty:
            if is_required:
                raise ValueError(
                    "prepack=True, but the model has no plain linear on a CPU with AVX2, and no projections of one "
                    "input on a GPU; use 'auto'"
                )
            return
        self._held = held
        # Each such linear refuses a conversion, but only when half of the model has been converted.
        self._model.__dict__["_apply"] = _refuse_conversion
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the old weights leave free blocks whose sizes nothing else needs

    def _make_adaptable(self, family: TracedFamily, freed: frozenset[int], lora: LoRAConfig) -> LoRAStacks:
        adapted = in_adapters(self._model)
        linears = [each for each in family.row_linears if id(each) not in adapted]
        linears = [each for each in linears if isinstance(each, GroupLinear) or is_plain(each)]
        if not linears:
            raise UnsupportedModelError(f"{type(self._model).__name__} has no linear that adapters could be named for")
        return LoRAStacks(
            self._model,
            [each for each in linears if id(each) not in freed],
            num_slots=lora.max_loras,
            max_rank=lora.max_lora_rank,
            elsewhere=[each for each in linears if id(each) in freed],
        )

    def remove(self) -> None:
        """Undo everything, last change first."""
        del self._model.__dict__["omniserve"]
        self._model.__dict__.pop("_apply", None)
        if self._lora is not None:
            self._lora.remove()
        if self._held is not None:
            self._held.release()
        if self._latents is not None:
            self._latents.release()
        self._hooks.put_back()
        logger.info("restored %d linears", self._held.num_linears if self._held is not None else 0)


def _refuse_conversion(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("a prepacked model cannot change its device or dtype; call omniserve.unpatch(model) first")
