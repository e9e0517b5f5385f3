"""Models: what ``--model`` names, and how its checkpoint is loaded. torch is imported when one is, not before."""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniserve.core.logs import take_over_loggers
from omniserve.launch.gguf_folder import file_in, folder_of, gguf_of, hub_file, one_reader
from omniserve.launch.hub import hub_folder
from omniserve.layers.model_classes import import_torchao_for

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BUILTIN_MODEL_NAME = "omniserve-builtin"
QUANTIZE = ("int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Of Hugging Face's hub: letters, digits, and single dots and hyphens between them.
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def checked_model(name: str, gguf_file: str | None = None, revision: str | None = None) -> str:
    """Return a model's folder or hub id, with ``~`` as the home folder; of a GGUF file the folder that stands for it.

    Args:
        name: Folder, GGUF file or hub id.
        gguf_file: The GGUF file's name in the folder or repository.
        revision: Branch, tag or commit of the repository, whose files are then fetched; None: the main branch.

    Raises:
        ValueError: It is none of these, or cannot be fetched; the message says what is missing.
    """
    path = Path(name).expanduser()
    if revision is not None and path.exists():
        raise ValueError(
            f"--revision {revision}: --model {name} is on this machine, which has no revisions; give a hub id, or "
            "leave --revision out"
        )
    if path.is_dir():
        has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
        if gguf_file is not None or (not has_weights and any(path.glob("*.gguf"))):
            return str(folder_of(file_in(path, gguf_file)))
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise ValueError(f"--model {name}: this folder has no config.json; give the one with the model's files")
        return str(path)
    if path.is_file() and path.suffix == ".gguf":
        if gguf_file is not None:
            raise ValueError(f"--gguf-file {gguf_file}: --model {name} is a GGUF file itself; leave one out")
        return str(folder_of(path))
    if path.exists():
        raise ValueError(
            f"--model {name} is a file; give the folder that holds config.json, weights and tokenizer, or a .gguf file"
        )
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"--model {name}: there is no such folder or file, and a hub id is NAME or OWNER/NAME")
    if gguf_file is not None:
        return str(folder_of(hub_file(name, gguf_file, revision)))
    return name if revision is None else hub_folder(name, revision)


def builtin_model_path() -> str:
    """Return the folder of the model that comes with OmniServe.

    Raises:
        ValueError: It is not installed.
    """
    folder = importlib.resources.files("omniserve") / "builtin_model"
    if not (folder / "config.json").is_file():
        raise ValueError(f"the built-in model is missing in {folder}; give --model PATH_OR_HUB_ID")
    return str(folder)


def is_of_codes(model: str) -> bool:
    """Tell whether the weights of a model are codes that are read here: of a GGUF file or a quantised checkpoint."""
    return gguf_of(model) is not None or quantization_of(model) is not None


def load_pretrained(
    name: str, *, dtype: str, device: str, quantize: str | None, trusts_code: bool, progress: Callable[[str], None]
) -> PreTrainedModel:
    """Load a model; of one whose weights are codes it is noted which, for ``patch``.

    Args:
        name: Folder or hub id, as ``checked_model`` returns it.
        dtype: One of DTYPES; ``auto`` is the checkpoint's own, of codes bfloat16 if it has none.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        quantize: One of QUANTIZE, or None.
        trusts_code: Python code that comes with the model may run.
        progress: Is told what is being done.

    Raises:
        OSError: There is no such model.
        ValueError: Its code is not trusted, its codes cannot be read, or it cannot be quantised.
    """
    import torch
    from transformers import AutoModelForCausalLM

    file = gguf_of(name)
    how = quantization_of(name) if file is None and device == "cpu" else None
    if quantize is not None and (file or how):
        raise ValueError(f"--quantize {quantize}: {file.name if file else name} is quantised already; leave it out")
    model: PreTrainedModel
    if file is not None:
        model = _load_gguf(file, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype), device, progress)
        _take_generation_config(model, name)
    elif how is not None:
        model = _load_quantized(name, how, dtype, trusts_code, progress)
        _take_generation_config(model, name)
    else:
        import_torchao_for(name)
        own = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = from_pretrained(AutoModelForCausalLM, name, trusts_code, dtype=own, device_map=device)
        if device == "cpu" and _is_torchaos(model):
            _take_torchao_codes(model, name, progress)
    if quantize is not None:
        _quantize(model, quantize, progress)
    return model


def _load_gguf(file: Path, dtype: torch.dtype, device: str, progress: Callable[[str], None]) -> PreTrainedModel:
    """Load the model of a GGUF file, and note which of its weights can be served as the codes that the file has."""
    from transformers import AutoModelForCausalLM

    from omniserve.layers.weights.gguf import remember_file

    with one_reader():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            # The name alone could be that of a file in the working directory, which transformers would take.
            file.parent,
            gguf_file=str(file),
            dtype=dtype,
            device_map=device,
        )
        # transformers has widened all weights, but still takes the model for a quantised one.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__.pop("hf_quantizer", None)
        if device != "cpu":
            logger.warning("%s is widened to %s: its codes are served on a CPU alone", file.name, dtype)
            return model
        progress("finding the codes of the weights")
        found = remember_file(model, file)
    if found.dense:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(found.dense.items()))
        logger.warning("%s: tensors that are served widened to %s: %s", file.name, dtype, kinds)
    return model


def _is_torchaos(model: PreTrainedModel) -> bool:
    how = getattr(model.config, "quantization_config", None)
    method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
    return str(getattr(method, "value", method)) == "torchao"


def _take_torchao_codes(model: PreTrainedModel, name: str, progress: Callable[[str], None]) -> None:
    """Note the codes that torchao's tensors have, in whose place there are dense weights then."""
    from omniserve.layers.weights.torchao_codes import take_codes

    progress("taking the codes out of torchao's tensors")
    left = take_codes(model).left
    if left:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(left.items()))
        logger.warning("%s: weights with which torchao's own kernels compute: %s", name, kinds)
        return
    # Nothing is quantised as transformers understands it any more.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)


def quantization_of(model: str) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a model whose codes are read here; None if transformers is to load it."""
    from transformers import PreTrainedConfig
    from transformers.utils import find_adapter_config_file

    from omniserve.layers.weights.quantized_checkpoints import METHODS, NotRead, method_of

    if find_adapter_config_file(model) is not None:
        return None
    config, _ = PreTrainedConfig.get_config_dict(model)
    how: dict[str, Any] | None = config.get("quantization_config")
    if how is None or how.get("quant_method") not in METHODS:
        return None
    try:
        method_of(how)
    except NotRead as why:
        logger.warning("%s: transformers' own modules compute with its weights: %s", model, why)
        return None
    return how


def _take_generation_config(model: PreTrainedModel, name: str) -> None:
    """Give a model the generation config that stands beside it, if one does: it has the tokens that end an answer."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):  # there is none
        model.generation_config = GenerationConfig.from_pretrained(name)


def _load_quantized(
    name: str, how: dict[str, Any], dtype_name: str, trusts_code: bool, progress: Callable[[str], None]
) -> PreTrainedModel:
    """Load a model with dense weights that are made of a checkpoint's codes, which are noted."""
    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoModelForCausalLM

    from omniserve.layers.weights.quantized_checkpoints import QuantizedCheckpoint

    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns=["*.safetensors"]))
    config = from_pretrained(AutoConfig, name, trusts_code)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{name}: transformers has no causal language model of its type, {config.model_type}")
    del config.quantization_config
    dtype: torch.dtype = (config.dtype or torch.bfloat16) if dtype_name == "auto" else getattr(torch, dtype_name)
    progress(f"reading the codes of {how['quant_method']}")
    checkpoint = QuantizedCheckpoint(folder, how)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    # A dict of tensors is loaded as a checkpoint is: with the renaming and fusing of weights that the type asks for.
    model: PreTrainedModel = kind.from_pretrained(
        None, config=config, state_dict=checkpoint.state_dict(dtype), dtype=dtype
    )
    model.name_or_path = name
    if dense := checkpoint.remember(model):
        rows = ", and their rows are not rounded" if checkpoint.rounds_inputs else ""
        logger.warning("%s: %d weights are served widened to %s%s, such as %s", name, len(dense), dtype, rows, dense[0])
    return model


def _quantize(model: PreTrainedModel, how: str, progress: Callable[[str], None]) -> None:
    try:
        from omniserve.layers.weights.quantizing import quantize_weights

        progress(f"quantising the weights to {how}")
        done = quantize_weights(model, how)  # type: ignore[arg-type]
    except ImportError as error:
        raise ValueError(f"--quantize {how} needs torchao: pip install 'omniserve[quantize]' ({error})") from error
    if done.left:
        logger.warning("--quantize %s leaves %d weights as they are, such as %s", how, len(done.left), done.left[0])


def from_pretrained(auto: Any, model: str | Path, trusts_code: bool, **options: Any) -> Any:
    """Call ``from_pretrained`` of a class of transformers, which never asks at a terminal whether code may be run.

    Raises:
        OSError: There is no such model.
        ValueError: It comes with Python code of its own, and that is not trusted.
    """
    try:
        return auto.from_pretrained(model, trust_remote_code=trusts_code, **options)
    except ValueError as error:
        if trusts_code or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{model} comes with Python code of its own, which is not run: read it, and if you trust it, give "
            "--execution trust_remote_code=true"
        ) from error


def load_tokenizer(model: str, trusts_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer; see ``from_pretrained``."""
    from transformers import AutoTokenizer

    take_over_loggers()
    tokenizer: PreTrainedTokenizerBase = from_pretrained(AutoTokenizer, model, trusts_code)
    return tokenizer
