"""Load the model and make the engine. Runs in the engine process; torch is imported here and not before."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniserve.core.config import EngineConfig
from omniserve.core.logs import take_over_loggers
from omniserve.launch.gguf_folder import file_in, folder_of, gguf_of, hub_file, one_reader
from omniserve.layers.model_classes import import_model_classes, import_torchao_for

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from omniserve.engine.engine import Engine
    from omniserve.latency import Profile
    from omniserve.parallel.group import RankGroup
    from omniserve.parallel.place import Place

logger = logging.getLogger(__name__)

BUILTIN_MODEL_NAME = "omniserve-builtin"
QUANTIZE = ("int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Of Hugging Face's hub: letters, digits, and single dots and hyphens between them.
_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
# Share of the time limit of measuring after which progress is told again.
_TELL_EACH = 0.1
# And after so many seconds: on a GPU compiling and capturing do not count against the limit.
_TELL_EACH_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoader:
    """Makes an engine in the process that calls it. Plain data, so it can be sent to another process.

    Args:
        model: Folder or hub id.
        dtype: One of DTYPES; ``auto`` is the checkpoint's own.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        config: The engine's settings.
        profile: Latency profile to read; None takes the cached one, or measures.
        profile_time_limit_s: Seconds of measuring; what a GPU compiles and captures first does not count.
        with_profile: False makes an engine without a latency model.
        serves: The engine's process does the engine's ``upkeep``: on a CPU nothing is compiled before it begins, and
            a coarse profile, measured in ``profile_start_s``, is refined later; with 0 s both are done before.
        quantize: One of QUANTIZE: quantise the weights when they are loaded; None leaves them.
    """

    model: str
    dtype: str
    device: str
    config: EngineConfig
    profile: Path | None = None
    profile_time_limit_s: float = 30.0
    with_profile: bool = True
    serves: bool = False
    profile_start_s: float = 4.0
    quantize: str | None = None

    def __post_init__(self) -> None:
        if self.quantize is not None and self.config.parallel.num_ranks > 1:
            raise ValueError(f"--quantize {self.quantize} does not work with several ranks; leave it out")

    def __call__(self, progress: Callable[[str], None]) -> Engine:
        """Load the model, find or make its latency profile, and make the engine; tell ``progress`` about it.

        Raises:
            OSError: There is no such model, or no such profile.
            UnsupportedModelError: No layer family fits the model.
            ValueError: The settings or the profile do not fit it or this machine.
        """
        if self.config.parallel.num_ranks > 1:
            return self._make_with_ranks(progress)
        model = self.load_model(progress)
        from omniserve.engine.engine import Engine

        if not self.serves or not self.profile_start_s or model.device.type != "cpu":
            profile = self._find_profile(model, progress)
            return Engine(model, self.config, profile=profile, tokenizer=self.load_tokenizer())
        from omniserve.engine.compiling import compile_beside
        from omniserve.launch.background_startup import BackgroundStartup

        compiling = compile_beside(model, self.config) if self.config.execution.compile else None
        try:
            profile = self._find_profile(model, progress, is_coarse=True)
            engine = Engine(model, self.config, profile=profile, tokenizer=self.load_tokenizer())
        except BaseException:
            if compiling is not None:
                compiling.stop()
            raise
        refines = profile is not None and profile.is_coarse
        if compiling is not None or refines:
            engine.upkeep = BackgroundStartup(
                engine, model, self.config, compiling=compiling, refines=refines, time_limit_s=self.profile_time_limit_s
            )
        return engine

    def _make_with_ranks(self, progress: Callable[[str], None]) -> Engine:
        """Load the parts of the model, and make the engine."""
        model, group = self.start_ranks(progress)
        from omniserve.engine.engine import Engine

        try:
            profile = self._find_profile(model, progress, group=group)
            group.keeps_ranks = False
            return Engine(model, self.config, profile=profile, tokenizer=self.load_tokenizer(), group=group)
        except BaseException:
            group.close()
            raise

    def start_ranks(self, progress: Callable[[str], None]) -> tuple[PreTrainedModel, RankGroup]:
        """Load rank 0's part of the model, while the other ranks load theirs; they are connected then.

        The ranks are kept when an engine ends: measuring has engines of its own.

        Raises:
            OSError, UnsupportedModelError, ValueError: As ``load_rank``.
            PeerLost: Another rank does not come, or cannot load its part.
        """
        progress("importing torch")
        import_model_classes()
        from omniserve.engine.fingerprint import has_constant_steps
        from omniserve.layers.patching import patched_model
        from omniserve.parallel.follow import summary_of
        from omniserve.parallel.group import RankGroup

        group = RankGroup(
            self.config,
            self.load_rank,
            progress=progress,
            keeps_ranks=True,
            on_lost=_end_process if self.serves or self.config.prefill.is_prefill_engine else None,
            shares_cores=self._device_of_rank(0) == "cpu" and self.config.parallel.rank_listen is None,
        )
        try:
            model = self.load_rank(group.place, progress)
            patched = patched_model(model, compile=self.config.execution.compile, keep=group.place.layers)
            progress("waiting for the other ranks' parts of the model")
            group.await_loaded(summary_of(patched))
            if self.config.execution.compile:
                progress("compiling the model's layers")
                fused = has_constant_steps(self.config, patched.device)
                patched.warm_up(fused=fused)
                group.compile(fused=fused)
            group.connect(patched)
            return model, group
        except BaseException:
            group.close()
            raise

    def _device_of_rank(self, rank: int) -> str:
        import torch

        if self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()):
            return "cpu"
        local = int(os.environ.get("LOCAL_RANK", rank))  # torchrun's
        return f"cuda:{local % max(1, torch.cuda.device_count())}"

    def load_rank(self, place: Place, progress: Callable[[str], None] = lambda what: None) -> PreTrainedModel:
        """Load a rank's part of the model, of which nothing else is read if the checkpoint can be read in parts.

        In a pipeline the weights of a stage's layers are read when the model is patched (``patched_model``).

        Raises:
            OSError: There is no such model.
            UnsupportedModelError: Its type cannot be split.
            ValueError: The device is not there, or the model has too few heads for its ranks.
        """
        import torch

        import_model_classes()
        from omniserve.layers.weights.checkpoint_files import NotInParts
        from omniserve.layers.weights.parts import read_weights, unread_weights
        from omniserve.layers.weights.sharding import shard

        device = self._device_of_rank(place.rank)
        if device != "cpu":
            _select_gpu(torch.device(device))
        on_cpu = dataclasses.replace(self, device="cpu")
        try:
            if gguf_of(self.model) is not None or quantization_of(self.model) is not None:
                raise NotInParts("its weights are codes, which are widened first")
            with unread_weights():
                model = on_cpu.load_model(progress)
        except NotInParts as why:
            logger.warning("rank %d loads the whole of %s and keeps its part: %s", place.rank, self.model, why)
            model = on_cpu.load_model(progress)
        model = shard(model, place.shard, place.num_shards)
        progress("reading this rank's part of the weights")
        read_weights(model, torch.device(device), traces_first=place.num_stages > 1)
        return model.to(torch.device(device))  # type: ignore[arg-type]

    def load_model(self, progress: Callable[[str], None]) -> PreTrainedModel:
        """Load the model alone.

        Raises:
            OSError: There is no such model.
            ValueError: The device is not there, or the model comes with code that is not trusted.
        """
        progress("importing torch")
        import torch
        from tqdm import tqdm

        import_model_classes()
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        from omniserve.host.cores import quota_note

        take_over_loggers()
        if note := quota_note():
            progress(note)
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device != "cpu":
            _select_gpu(torch.device(device))
        # tqdm's own lock is a named semaphore, of which the process's quick end would leave a trace.
        tqdm.set_lock(threading.RLock())
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        progress(f"loading {self.model}")
        dtype = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        if (file := gguf_of(self.model)) is not None:
            if self.quantize is not None:
                raise ValueError(f"--quantize {self.quantize}: {file.name} is quantised already; leave it out")
            widened: torch.dtype = torch.bfloat16 if self.dtype == "auto" else getattr(torch, self.dtype)
            model = _load_gguf(file, widened, device, progress)
            _take_generation_config(model, self.model)
        elif device == "cpu" and (how := quantization_of(self.model)) is not None:
            if self.quantize is not None:
                raise ValueError(f"--quantize {self.quantize}: {self.model} is quantised already; leave it out")
            model = _load_quantized(self.model, how, self.dtype, self.config.execution.trust_remote_code, progress)
            _take_generation_config(model, self.model)
        else:
            import_torchao_for(self.model)
            model = from_pretrained(
                AutoModelForCausalLM, self.model, self.config.execution.trust_remote_code, dtype=dtype,
                device_map=device,
            )  # fmt: skip
        model.eval()
        if self.quantize is not None:
            _quantize(model, self.quantize, progress)
        progress(f"{model.num_parameters() / 1e6:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}, {device}")
        return model

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer, which grammars need.

        Raises:
            OSError, ValueError, ImportError: There is none.
        """
        return load_tokenizer(self.model, self.config.execution.trust_remote_code)

    def _find_profile(
        self,
        model: PreTrainedModel,
        progress: Callable[[str], None],
        *,
        is_coarse: bool = False,
        group: RankGroup | None = None,
    ) -> Profile | None:
        from omniserve.sched import SCHEDULERS

        predicts = SCHEDULERS.get(self.config.scheduler).predicts
        if not self.with_profile or (self.profile is None and not predicts):
            return None
        from omniserve.profiling import find_or_make_profile

        told_at, told_s = -_TELL_EACH, time.monotonic()

        def tell(what: str, spent: float) -> None:
            nonlocal told_at, told_s
            now_s = time.monotonic()
            if min(spent, 1.0) >= told_at + _TELL_EACH or now_s >= told_s + _TELL_EACH_S:
                told_at, told_s = min(spent, 1.0), now_s
                progress(f"measuring latencies, {told_at:.0%} of the time limit: {what}")

        limit_s = min(self.profile_start_s, self.profile_time_limit_s) if is_coarse else self.profile_time_limit_s
        return find_or_make_profile(
            model, self.config, path=self.profile, time_limit_s=limit_s, progress=tell, is_coarse=is_coarse, group=group
        )


def _end_process(why: str) -> None:
    """End the engine's process, which waits for requests while a rank is gone; a server starts it again."""
    logger.error("%s: the engine's process ends", why)
    logging.shutdown()
    os._exit(1)


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
        logger.warning("%s: %d weights are served widened to %s, such as %s", name, len(dense), dtype, dense[0])
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


def _select_gpu(device: torch.device) -> None:
    """Make a GPU the current one of this process, which is the engine's alone: libraries may ask for it.

    Raises:
        ValueError: It is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"--device {device}: torch finds no CUDA device here; use --device cpu")
    if device.index is not None:
        if device.index >= count:
            raise ValueError(
                f"--device {device}: torch finds {count} CUDA devices here; use cuda:0 to cuda:{count - 1}"
            )
        torch.cuda.set_device(device)


def checked_model(name: str, gguf_file: str | None = None) -> str:
    """Return a model's folder or hub id, with ``~`` as the home folder; of a GGUF file the folder that stands for it.

    Args:
        name: Folder, GGUF file or hub id.
        gguf_file: The GGUF file's name in the folder or repository.

    Raises:
        ValueError: It is none of these, or cannot be fetched; the message says what is missing.
    """
    path = Path(name).expanduser()
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
    return name if gguf_file is None else str(folder_of(hub_file(name, gguf_file)))


def builtin_model_path() -> str:
    """Return the folder of the model that comes with OmniServe.

    Raises:
        ValueError: It is not installed.
    """
    folder = importlib.resources.files("omniserve") / "builtin_model"
    if not (folder / "config.json").is_file():
        raise ValueError(f"the built-in model is missing in {folder}; give --model PATH_OR_HUB_ID")
    return str(folder)
