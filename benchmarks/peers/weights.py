"""The forms in which a model's weights are served, and the files from which each engine reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers.gguf import write_gguf
from benchmarks.peers.model import ModelCost, SavedModel
from omniserve.launch.gguf_folder import import_gguf

OMNISERVE, VLLM, LLAMA_CPP = "OmniServe", "vLLM", "llama.cpp"
DENSE, W4A16 = "dense", "W4A16"
GGUF_BYTES = {"Q4_0": 18 / 32, "Q8_0": 34 / 32}
"""Bytes of a weight in the types of GGUF files that can be asked for: 32 codes and a scale in fp16."""
GROUP = 128
"""Weights that share a scale in W4A16."""
FORMS = (DENSE, *GGUF_BYTES, W4A16)
DENSE_LABELS = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a model in one form."""

    label: str
    """The form, or the name of a file."""
    files: Mapping[str, Path]
    """The path that each engine is given as its model; an engine that does not serve this form has none."""
    memory_bytes: int
    cost: ModelCost | None
    """The least that tokens cost; None: it is not known of this model."""


def weights_of(model: SavedModel, form: str, dtype: str, engines: Collection[str]) -> Weights:
    """Return a model's weights in one of FORMS; files that are missing are made of the bf16 ones.

    Args:
        model: Has bf16 weights.
        form: ``dense``: in the dtype that is served. ``Q4_0``, ``Q8_0``: a GGUF file with all matrices in that type.
            ``W4A16``: a folder whose linears, but for the head, are compressed-tensors' of 4 bits.
        dtype: bfloat16 or float32.
        engines: Names of the engines that serve them if they can: for the others no file is made.
    """
    if form == DENSE:
        files = {name: model.folder if name != LLAMA_CPP else _gguf(model, dtype) for name in engines}
        return Weights(
            label=DENSE_LABELS[dtype], files=files, memory_bytes=model.memory_bytes(dtype),
            cost=ModelCost.of(model.config),
        )  # fmt: skip
    if form == W4A16:
        folder = model.folder / W4A16
        if not (folder / "config.json").is_file():
            write_w4a16(model.folder, folder)
        size = (folder / "model.safetensors").stat().st_size
        cost = ModelCost.of(model.config, layer_weight_bytes=4 / 8 + torch.bfloat16.itemsize / GROUP)
        return Weights(label=form, files={OMNISERVE: folder, VLLM: folder}, memory_bytes=size, cost=cost)
    path = _gguf(model, form)
    cost = ModelCost.of(model.config, GGUF_BYTES[form], GGUF_BYTES[form])
    return Weights(label=form, files=dict.fromkeys((OMNISERVE, LLAMA_CPP), path), memory_bytes=path.stat().st_size,
                   cost=cost)  # fmt: skip


def weights_in(path: Path) -> tuple[Weights, int]:
    """Return the weights of a GGUF file, and the size of its vocabulary.

    Raises:
        ValueError: It is no such file.
    """
    fields = import_gguf().GGUFReader(path).fields
    size = path.stat().st_size
    weights = Weights(label=path.stem, files=dict.fromkeys((OMNISERVE, LLAMA_CPP), path), memory_bytes=size, cost=None)
    return weights, len(fields["tokenizer.ggml.tokens"].data)


def _gguf(model: SavedModel, kind: str) -> Path:
    path = model.folder / f"{kind}.gguf"
    if not path.is_file():
        write_gguf(model.folder, model.config, path, kind)
    return path


def write_w4a16(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint with linears of 4 bits, as compressed-tensors packs them; embedding and head stay as they are.

    Args:
        checkpoint: Folder with config, ``model.safetensors`` and tokenizer of a ``LlamaForCausalLM``.
        folder: Folder to write; its config comes last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1 or not name.startswith("model.layers."):
            tensors[name] = tensor
        else:
            packed = _packed(tensor)
            tensors |= {name.removesuffix("weight") + part: value for part, value in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for path in checkpoint.glob("*token*.json"):
        shutil.copy(path, folder)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    how: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _packed(weight: Tensor) -> dict[str, Tensor]:
    """Return a weight ``[O, I]`` as 8 codes of 4 bits a word, the first in the lowest bits, and scales in bf16.

    Raises:
        ValueError: Its inputs are no multiple of GROUP.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"W4A16 has groups of {GROUP} inputs; a weight has {weight.shape[1]}")
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / 7.5).to(torch.bfloat16)
    codes = (torch.round(groups / scales.float()).clamp(-8, 7) + 8).to(torch.int32).flatten(1).unflatten(1, (-1, 8))
    words = torch.zeros(codes.shape[:2], dtype=torch.int32)
    for place in range(8):
        words |= codes[:, :, place] << (4 * place)
    return {"weight_packed": words, "weight_scale": scales.squeeze(2), "weight_shape": torch.tensor(weight.shape)}
