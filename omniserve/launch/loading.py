"""Loads the model and makes the engine. Runs in the engine process; torch is imported here and not before."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omniserve.core.config import EngineConfig
from omniserve.core.logs import take_over_loggers
from omniserve.launch.models import is_of_codes, load_pretrained, load_tokenizer
from omniserve.launch.replica_share import keep_to_share
from omniserve.layers.model_classes import import_model_classes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from omniserve.engine.engine import Engine
    from omniserve.latency import Profile
    from omniserve.parallel.group import RankGroup
    from omniserve.parallel.place import Place

logger = logging.getLogger(__name__)

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
        replica: Number of the engine, and of engines that share the machine.
        replicas_since_s: Unix time at which a server began to make several engines; None: it has one.
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
    replica: tuple[int, int] = (0, 1)
    replicas_since_s: float | None = None

    def for_replica(self, number: int, count: int) -> EngineLoader:
        """Return the maker of one of several engines, which takes its share of the machine and has its own trace."""
        config = self.config
        if config.trace_steps is not None:
            path = Path(config.trace_steps)
            config = dataclasses.replace(config, trace_steps=str(path.with_name(f"{path.stem}-{number}{path.suffix}")))
        return dataclasses.replace(self, config=config, replica=(number, count), replicas_since_s=time.time())

    def __call__(self, progress: Callable[[str], None]) -> Engine:
        """Load the model, find or make its latency profile, and make the engine; tell ``progress`` about it.

        Raises:
            OSError: There is no such model, or no such profile.
            UnsupportedModelError: No layer family fits the model.
            ValueError: The settings or the profile do not fit it or this machine.
        """
        if self.replica[1] > 1:
            has_ranks = self.config.parallel.num_ranks > 1
            keep_to_share(*self.replica, self.config.execution.numa, has_ranks=has_ranks)
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
                engine, model, self.config, compiling=compiling, refines=refines,
                time_limit_s=self.profile_time_limit_s, shared_since_s=self.replicas_since_s,
            )  # fmt: skip
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
        from omniserve.parallel.shares import take_weights

        group = RankGroup(
            self.config,
            self.load_rank,
            progress=progress,
            keeps_ranks=True,
            on_lost=_end_process if self.serves or self.config.prefill.is_prefill_engine else None,
            shares_cores=self._device_of_rank(0) == "cpu" and self.config.parallel.rank_listen is None,
            num_engines=self.replica[1],
        )
        try:
            model = self.load_rank(group.place, progress)
            patched = patched_model(
                model, compile=self.config.execution.compile, keep=group.place.layers, lora=self.config.lora
            )
            take_weights(patched)
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
            if self.quantize is not None:
                raise ValueError("weights are quantised on the CPU alone; give --device cpu")
            _select_gpu(torch.device(device))
        on_cpu = dataclasses.replace(self, device="cpu")
        try:
            if is_of_codes(self.model):
                raise NotInParts("its weights are codes")
            if self.quantize is not None:
                raise NotInParts("its weights are quantised as a whole")
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
        model = load_pretrained(
            self.model, dtype=self.dtype, device=device, quantize=self.quantize,
            trusts_code=self.config.execution.trust_remote_code, progress=progress,
        )  # fmt: skip
        model.eval()
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
            model,
            self.config,
            path=self.profile,
            time_limit_s=limit_s,
            progress=tell,
            is_coarse=is_coarse,
            group=group,
            shared_since_s=self.replicas_since_s,
        )


def _end_process(why: str) -> None:
    """End the engine's process, which waits for requests while a rank is gone; a server starts it again."""
    logger.error("%s: the engine's process ends", why)
    logging.shutdown()
    os._exit(1)


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
