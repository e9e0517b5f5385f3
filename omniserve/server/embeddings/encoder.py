"""The second model: an encoder, or a cross-encoder, in a process of its own, as an engine that only reads texts.

It runs on the CPU beside the served model, not between its steps: a step would wait for a whole batch of texts. The
process has two lanes, a thread with threads of torch each, on half of the cores. The lane of best-effort texts has
the lowest priority that the system gives (nice 19): it gets the time that steps and latency-sensitive texts leave, so
that neither waits for it; where they leave none, it nearly stands still. The lane of latency-sensitive texts has the
usual priority, as these are LS work like any other, and never waits for a batch of the other lane. Both use the same
weights. A batch is bounded in texts and in tokens, so that a text waits for one short batch of its kind at most.

It is what ``engines.process`` takes for an engine: its process is started again like the served model's.

Legend: B texts of a batch, T tokens of the longest, D hidden.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniserve.core.config import EngineConfig
from omniserve.core.load import EngineLoad
from omniserve.core.lora import LoRA, LoRAError
from omniserve.core.request import (
    SLO,
    ClassSpec,
    FinishReason,
    Request,
    RequestLimits,
    RequestOutput,
    RequestTimes,
    ServiceClass,
)
from omniserve.core.stats import EngineStats, FreedKV, SchedulerStats
from omniserve.core.upkeep import Upkeep
from omniserve.server.embeddings.model_files import PoolingOfModel, find_pooling

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_MOST_TEXTS, _MOST_TOKENS = 32, 1024
"""The largest batch: texts, and tokens with those that pad the shorter ones (or one longer text)."""
_LOWEST_PRIORITY = 19
# New texts are looked for so often while batches run.
_LOOK_S = 0.004


@dataclass(frozen=True, slots=True)
class EncoderMaker:
    """Makes the engine of the second model in its process."""

    model: str
    """Folder or hub id."""
    classes: tuple[ClassSpec, ...]

    def __call__(self, progress: Any) -> EncoderEngine:
        progress(f"loading {self.model}")
        return EncoderEngine(Encoder(self.model), EngineConfig(classes=self.classes))


class Encoder:
    """A model of ``transformers`` that reads whole texts; safetensors only, and no code of the model's own.

    Args:
        model: Folder or hub id.

    Raises:
        ValueError: It has no way to an embedding that is known here, or more than one score for a pair.
        OSError: It cannot be read.
    """

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModel, AutoModelForSequenceClassification

        self.pooling: PoolingOfModel = find_pooling(model, is_encoder=True)
        if self.pooling.why_not is not None:
            raise ValueError(f"--embedding-model {model}: {self.pooling.why_not}")
        kind = AutoModelForSequenceClassification if self.pooling.scores_pairs else AutoModel
        loaded: PreTrainedModel = kind.from_pretrained(model, use_safetensors=True, dtype=torch.float32)
        if self.pooling.scores_pairs and loaded.config.num_labels != 1:
            raise ValueError(
                f"--embedding-model {model} has {loaded.config.num_labels} labels; a model that scores pairs has one"
            )
        self._model = loaded.eval()
        self.vocab_size = int(loaded.config.vocab_size)
        self.max_tokens = _max_tokens(loaded, self.pooling)
        self._has_types = self.pooling.separator >= 0 and getattr(loaded.config, "type_vocab_size", 0) > 1

    def read(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return what the model says of each text: an embedding that is not normalised, or the score of a pair."""
        import torch

        lengths_B = torch.tensor([len(ids) for ids in texts])
        shape = len(texts), int(lengths_B.max())
        ids_BT = torch.zeros(shape, dtype=torch.int64)
        for row, ids in enumerate(texts):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT = (torch.arange(shape[1]) < lengths_B[:, None]).long()
        # RoBERTa's positions count tokens that are not padding by their id.
        pad = self._model.config.pad_token_id
        ids_BT = ids_BT if pad is None else ids_BT.masked_fill(mask_BT == 0, pad)
        more: dict[str, Tensor] = {}
        if self._has_types:
            is_end_BT = ids_BT == self.pooling.separator
            more["token_type_ids"] = ((is_end_BT.cumsum(1) - is_end_BT.long()) > 0).long() * mask_BT
        with torch.inference_mode():
            output = self._model(input_ids=ids_BT, attention_mask=mask_BT, **more)
            if self.pooling.scores_pairs:
                found_BD = output.logits
            else:
                hidden_BTD = output.last_hidden_state
                if self.pooling.how == "mean":
                    found_BD = (hidden_BTD * mask_BT[..., None]).sum(1) / lengths_B[:, None]
                else:
                    rows_B = lengths_B - 1 if self.pooling.how == "last" else torch.zeros_like(lengths_B)
                    found_BD = hidden_BTD[torch.arange(shape[0]), rows_B]
            return [tuple(row) for row in found_BD.float().tolist()]


def _max_tokens(model: PreTrainedModel, pooling: PoolingOfModel) -> int:
    """Return how many tokens a text may have."""
    positions = int(model.config.max_position_embeddings)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions -= module.padding_idx + 1  # where RoBERTa's begin
    return min(positions, pooling.max_tokens or positions)


@dataclass(slots=True)
class _Text:
    """A text that waits or is read."""

    request_id: str
    request: Request
    arrival_s: float
    key: tuple[int, int]
    """Rank of its class, and its number."""
    first_scheduled_s: float | None = None
    is_dropped: bool = False

    @property
    def last_s(self) -> float:
        """The time until which it waits to be read."""
        patience_s = self.request.max_queue_s
        return math.inf if patience_s is None else self.arrival_s + patience_s


@dataclass(slots=True)
class _Lane:
    """The texts of one kind, and the thread that reads them."""

    encoder: Encoder
    num_threads: int
    priority: int
    """The nice value of its threads."""
    waiting: list[_Text] = field(default_factory=list)
    running: tuple[list[_Text], Future[list[tuple[float, ...]]]] | None = None
    executor: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "texts", initializer=self._begin_thread)

    def _begin_thread(self) -> None:
        import torch

        if self.priority:
            # Of this thread alone; those that it has torch start get the same.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self.priority)
        torch.set_num_threads(self.num_threads)

    def start(self, now_s: float) -> None:
        """Begin to read a batch, the first texts in order, if none is read now."""
        if self.running is not None or not self.waiting:
            return
        self.waiting.sort(key=lambda text: text.key)
        batch: list[_Text] = []
        longest = 0
        while self.waiting and len(batch) < _MOST_TEXTS:
            longest = max(longest, len(self.waiting[0].request.prompt_token_ids))
            if batch and longest * (len(batch) + 1) > _MOST_TOKENS:
                break
            batch.append(self.waiting.pop(0))
        for text in batch:
            text.first_scheduled_s = now_s
        self.running = batch, self.executor.submit(self.encoder.read, [t.request.prompt_token_ids for t in batch])

    def take(self) -> list[tuple[_Text, tuple[float, ...]]]:
        """Return the texts of a batch that has been read, with what the model says of each."""
        if self.running is None or not self.running[1].done():
            return []
        (batch, read), self.running = self.running, None
        return [(text, found) for text, found in zip(batch, read.result(), strict=True) if not text.is_dropped]


class _NoLoRAs:
    """The adapters of a model that takes none."""

    def read(self, name: str, folder: str) -> LoRA:
        raise LoRAError(f"--embedding-model takes no LoRA adapters, got {name!r}")

    def add(self, lora: LoRA) -> None:
        raise LoRAError(f"--embedding-model takes no LoRA adapters, got {lora.name!r}")

    def remove(self, name: str) -> None:
        raise LoRAError(f"--embedding-model takes no LoRA adapters, got {name!r}")

    def clear(self) -> None:
        pass


class EncoderEngine:
    """Reads the texts of requests; see the module. Their sampling parameters have no effect."""

    last_plan_was_empty = False
    preemption = None
    upkeep: Upkeep | None = None

    def __init__(self, encoder: Encoder, config: EngineConfig) -> None:
        self.config = config
        self.loras = _NoLoRAs()
        self.limits = RequestLimits(
            vocab_size=encoder.vocab_size,
            max_model_len=encoder.max_tokens,
            pool_tokens=encoder.max_tokens,
            has_tokenizer=False,
        )
        num_threads = max(1, len(os.sched_getaffinity(0)) // 2)
        self._lanes = {
            ServiceClass.LS: _Lane(encoder, num_threads, 0),
            ServiceClass.BE: _Lane(encoder, num_threads, _LOWEST_PRIORITY),
        }
        self._classes = {spec.name: (rank, ServiceClass(spec.kind)) for rank, spec in enumerate(config.classes)}
        self._texts: dict[str, _Text] = {}
        self._num_added = self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._texts)

    def add(self, request: Request, *, arrival_s: float | None = None, grammar: Any = None) -> str:
        """Take a text.

        Raises:
            ValueError: It is too long, or has ids that the model does not know.
        """
        num_tokens, most = len(request.prompt_token_ids), self.limits.max_model_len
        if num_tokens > most:
            raise ValueError(f"the text has {num_tokens} tokens, and the model takes {most}; shorten it")
        if (unknown := self.limits.unknown_token(request.prompt_token_ids)) is not None:
            raise ValueError(f"the token {unknown} is outside the vocabulary of {self.limits.vocab_size} tokens")
        self._num_added += 1
        request_id = request.request_id or f"text-{self._num_added}"
        rank, kind = self._classes[request.service_class]
        now_s = time.monotonic()
        text = _Text(request_id, request, now_s if arrival_s is None else arrival_s, (rank, self._num_added))
        self._texts[request_id] = text
        self._lanes[kind].waiting.append(text)
        return request_id

    def abort(self, request_id: str) -> bool:
        """Drop a text; one that is read already is read to its batch's end."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return False
        text.is_dropped = True
        lane = self._lanes[self._classes[text.request.service_class][1]]
        if text in lane.waiting:
            lane.waiting.remove(text)
        return True

    def step(self) -> list[RequestOutput]:
        """Have idle lanes begin their next batch, wait a moment for one to end, and return what has been read."""
        now_s = time.monotonic()
        late = [text for lane in self._lanes.values() for text in lane.waiting if text.last_s < now_s]
        for text in late:
            self.abort(text.request_id)
        for lane in self._lanes.values():
            lane.start(now_s)
        self._num_steps += 1
        wait([lane.running[1] for lane in self._lanes.values() if lane.running], _LOOK_S, FIRST_COMPLETED)
        read = [self._output(text, found) for lane in self._lanes.values() for text, found in lane.take()]
        return [*map(_timed_out, late), *read]

    def _output(self, text: _Text, found: tuple[float, ...]) -> RequestOutput:
        del self._texts[text.request_id]
        now_s = time.monotonic()
        is_finite = math.isfinite(sum(found))
        return RequestOutput(
            request_id=text.request_id,
            service_class=text.request.service_class,
            new_token_ids=(),
            embedding=found if is_finite else (),
            finish_reason=FinishReason.LENGTH if is_finite else FinishReason.ERROR,
            stop_reason=None if is_finite else "the model returned numbers that are not finite",
            num_prompt_tokens=len(text.request.prompt_token_ids),
            times=RequestTimes(
                arrival_s=text.arrival_s,
                first_scheduled_s=text.first_scheduled_s,
                first_token_s=now_s,
                finished_s=now_s,
            ),
        )

    def predicted_ttft_s(self, request_id: str) -> float | None:
        return None

    def scaled_slo(self, request_id: str) -> SLO | None:
        return None

    def compile_grammar(self, grammar: str) -> Future[Any]:
        refused: Future[Any] = Future()
        refused.set_exception(ValueError("an embedding has no grammar"))
        return refused

    def prepare_grammars(self) -> None:
        """Do nothing: there are none."""

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def stats(self) -> EngineStats:
        """Return how many texts wait and are read, by class."""
        counts = {name: [0, 0] for name in self._classes}
        for text in self._texts.values():
            counts[text.request.service_class][text.first_scheduled_s is not None] += 1
        return EngineStats(
            scheduler=SchedulerStats(
                waiting={name: waiting for name, (waiting, _) in counts.items()},
                running={name: running for name, (_, running) in counts.items()},
            ),
            steps=self._num_steps,
        )

    def load(self, num_taken: int = 0) -> EngineLoad:
        """Return that nothing is forecast: there is one such engine, and none is chosen."""
        return EngineLoad(num_taken=num_taken)

    def clear_prefixes(self, sessions: Iterable[str] | None = None) -> FreedKV:
        """Free nothing: there is no KV."""
        return FreedKV()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.executor.shutdown(cancel_futures=True)


def _timed_out(text: _Text) -> RequestOutput:
    return RequestOutput(
        request_id=text.request_id,
        service_class=text.request.service_class,
        new_token_ids=(),
        finish_reason=FinishReason.TIMEOUT,
        num_prompt_tokens=len(text.request.prompt_token_ids),
        times=RequestTimes(arrival_s=text.arrival_s, finished_s=time.monotonic()),
    )
