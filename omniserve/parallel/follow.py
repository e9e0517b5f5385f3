"""Runs a rank other than rank 0: it loads its part of the model, and runs the steps that it is told."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from omniserve.core.config import PREFILL_SECRET_VARIABLE, EngineConfig
from omniserve.core.errors import OmniServeError, PeerLost
from omniserve.core.link import Link, read_secret
from omniserve.core.lora import LoadLoRA
from omniserve.core.setup import RunnerSetup
from omniserve.core.work import CancelPrefill, HostEvent, RemotePrefill, SideWork
from omniserve.host.arrived_results import ArrivedResults, StageEvents
from omniserve.host.tier import HostTier
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patched_model
from omniserve.ops import collectives
from omniserve.ops.stage_link import StageLink
from omniserve.parallel import messages
from omniserve.parallel.group import versions
from omniserve.parallel.meeting import connect_collectives, stage_link
from omniserve.parallel.shares import take_weights
from omniserve.remote.handshake import Hello, introduce
from omniserve.remote.network_hosts import HostUser, NetworkHosts
from omniserve.remote.prefill_ranks import RankReceiver, RankSender
from omniserve.runner.executors import Executor
from omniserve.runner.lora_loads import LoRALoads
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.runner import ModelRunner, RunnerParts
from omniserve.runner.staged_loop import loop_of_stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JoinOrDrop = messages.DropHost | messages.JoinPrefillEngine | messages.DropPrefillEngine

_LOOK_S = 0.05


def summary_of(model: PatchedModel) -> str:
    """Return what all ranks of a model have alike."""
    spec = model.spec
    return (
        f"{type(model.family.model).__name__} with {spec.num_layers} layers, {spec.num_heads} heads and "
        f"{spec.num_kv_heads} KV heads of {spec.head_size} on each rank, {model.dtype} on {model.device.type}"
    )


class FollowBroadcast(RankBroadcast):
    """Is told what rank 0 decides; CPU hosts and prefill engines may come and go meanwhile."""

    def __init__(
        self, link: Link, *, timeout_s: float, shares_tokens: bool, join_or_drop: Callable[[_JoinOrDrop], None]
    ) -> None:
        self._link, self._timeout_s, self._shares_tokens = link, timeout_s, shares_tokens
        self._join_or_drop = join_or_drop

    def agree(self, decide: Callable[[], T]) -> T:
        while isinstance(told := self._link.receive(self._timeout_s), _JoinOrDrop):
            self._join_or_drop(told)
        if not isinstance(told, messages.Decided):
            raise PeerLost(f"rank 0 sends {type(told).__name__} in the middle of a step")
        return told.value

    def share(self, tokens_R: Tensor) -> None:
        if self._shares_tokens:
            collectives.broadcast(tokens_R)


def follow(link: Link, rank: int | None = None) -> None:
    """Do what rank 0 says, until it closes.

    Raises:
        PeerLost: Rank 0 is gone, or refuses this one.
    """
    assignment = introduce(link, Hello(versions(), rank), None, refusal="rank 0 refuses this process: ")
    try:
        _Follower(link, assignment).run()
    except PeerLost:
        raise
    except Exception as error:
        logger.exception("rank %d failed", assignment.place.rank)
        expected = isinstance(error, (ValueError, OSError, OmniServeError))
        link.send(messages.Failure(str(error) if expected else f"{type(error).__name__}: {error}"))
        raise PeerLost(f"rank {assignment.place.rank} failed: {error}") from error


class _Follower:
    def __init__(self, link: Link, assignment: messages.Assignment) -> None:
        self._link, self._assignment, self._place = link, assignment, assignment.place
        self._stage = StageLink()
        self._model: PatchedModel | None = None
        self._config: EngineConfig | None = None
        self._runner: ModelRunner | None = None
        self._tier: HostTier | None = None
        self._network: NetworkHosts | None = None
        self._receiver: RankReceiver | None = None
        self._sender: RankSender | None = None
        self._loras: LoRALoads | None = None
        self._arrived = ArrivedResults()
        self._untold: list[HostEvent] = []
        """Events that a step came upon."""
        self._told_health = (True, False)
        self._poll_lock, self._tell_lock = threading.Lock(), threading.Lock()
        """The second one is taken before the first, so that events are told in their order."""
        self._teller: threading.Thread | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        place = self._place
        assignment = self._assignment
        model = assignment.load(place)
        patched = patched_model(model, compile=assignment.compile, keep=place.layers, lora=assignment.lora)
        take_weights(patched)
        logger.info("rank %d of %d has its part of the model", place.rank, place.num_shards * place.num_stages)
        self._link.send(messages.Loaded(summary_of(patched)))
        try:
            while not isinstance(message := self._link.receive(), messages.Close):
                self._obey(message, patched)
        finally:
            self._end_engine()
            collectives.disconnect()

    def _obey(self, message: Any, model: PatchedModel) -> None:
        match message:
            case messages.Compile(fused):
                model.warm_up(fused=fused)
                self._link.send(messages.Ready())
            case messages.Connect(files, store):
                group = connect_collectives(
                    model.device, self._place, files, store, self._link.own_address, self._assignment.timeout_s
                )
                self._stage = stage_link(model, self._place, group)
                self._link.send(messages.Ready())
            case messages.RunCollectives(calls, rows):
                collectives.run(calls, rows, model.dtype, model.device)
            case messages.PassRows(rows):
                self._stage.pass_on(rows)
            case messages.BeginEngine(setup):
                self._runner = self._make_runner(model, setup)
                if self._tier is not None:
                    self._teller = threading.Thread(target=self._tell_events, name="host-events", daemon=True)
                    self._teller.start()
                self._link.send(messages.Ready())
            case messages.Launch(plan):
                assert self._runner is not None
                self._runner.collect(self._runner.launch(plan))
                if self._untold:
                    self._tell_news()
            case messages.Forget(request_id):
                assert self._runner is not None
                self._runner.forget(request_id)
            case messages.DropHost() | messages.JoinPrefillEngine() | messages.DropPrefillEngine():
                self._join_or_drop(message)
            case messages.AllowHost(host):
                assert self._network is not None
                self._network.allow(host)
            case messages.ServePrefills():
                self._link.send(messages.Listens(self._serve_prefills(message)))
            case messages.SendBlocks(session, move_id, block_ids):
                assert self._sender is not None
                self._sender.send(session, move_id, block_ids)
            case messages.SendEnd(session, end):
                assert self._sender is not None
                self._sender.end(session, end)
            case messages.EndSession(session):
                assert self._sender is not None
                self._sender.end_session(session)
            case messages.Inject(faults):
                assert self._tier is not None
                self._tier.inject(**faults)
            case messages.EndEngine():
                self._end_engine()
                self._link.send(messages.Ready())
            case _:
                raise PeerLost(f"rank 0 sends {type(message).__name__} between steps")

    def _end_engine(self) -> None:
        self._is_over.set()
        if self._teller is not None:
            self._teller.join()
        for each in (self._network, self._receiver, self._sender, self._loras):
            if each is not None:
                each.close()
        if self._tier is not None:
            self._tier.close()
        self._runner = self._tier = self._network = self._receiver = self._sender = self._teller = self._loras = None
        self._arrived, self._untold, self._told_health = ArrivedResults(), [], (True, False)
        self._is_over.clear()

    def _join_or_drop(self, message: _JoinOrDrop) -> None:
        """Do what rank 0 says of a CPU host or a prefill engine, at once, in the middle of a step too."""
        match message:
            case messages.DropHost(host):
                assert self._network is not None
                self._network.drop(host)
            case messages.JoinPrefillEngine(number, session, address):
                assert self._receiver is not None
                self._receiver.join(number, session, address)
            case messages.DropPrefillEngine(number):
                assert self._receiver is not None
                self._receiver.drop(number)

    def _kv_fingerprint(self) -> str:
        assert self._model is not None and self._config is not None
        return kv_fingerprint(self._model.family.model, self._config)

    def _serve_prefills(self, message: messages.ServePrefills) -> tuple[str, int]:
        """Listen for ranks of engines, and return where, as ``messages.Listens`` tells it."""
        assert self._tier is not None
        host, port = message.address
        secret = read_secret(message.secret_file, PREFILL_SECRET_VARIABLE)
        self._sender = RankSender(
            self._tier.pool_LBK2SH,
            fingerprint=self._kv_fingerprint(),
            secret=secret,
            address=(host if message.is_local else self._link.own_address, port),
        )
        host, port = self._sender.address
        return "" if message.is_local else host, port

    def _make_runner(self, model: PatchedModel, setup: RunnerSetup) -> ModelRunner:
        self._model, self._config = model, setup.config
        if setup.host_tier is not None:
            self._tier = HostTier(
                setup.host_tier, spec=model.spec, dtype=model.dtype, device=model.device, layers=model.layers
            )
            if setup.config.hosts.cpu_hosts:
                user = HostUser(setup.engine_id, self._place.rank, setup.config.parallel.num_ranks)
                self._network = NetworkHosts(setup.config.hosts, self._tier, user=user)
            if setup.config.prefill.prefill_engines:
                self._receiver = RankReceiver(
                    setup.config.prefill,
                    self._place.rank,
                    self._tier.pool_LBK2SH,
                    fingerprint=self._kv_fingerprint(),
                    tell=lambda event: self._tell([event]),
                )
        broadcast = FollowBroadcast(
            self._link,
            timeout_s=self._assignment.timeout_s,
            shares_tokens=setup.overlaps,
            join_or_drop=self._join_or_drop,
        )
        executors: dict[type[SideWork], Executor] = {}
        if self._receiver is not None:
            executors = {RemotePrefill: self._receiver.start, CancelPrefill: self._receiver.cancel}
        if model.lora is not None:
            self._loras = LoRALoads(model.lora, model.device)
            executors[LoadLoRA] = self._loras.start
        in_stages = self._place.num_stages > 1
        parts = RunnerParts(
            model=model,
            tier=self._tier,
            executors=executors,
            broadcast=broadcast,
            make_loop=loop_of_stage(self._stage),
            stage_events=StageEvents(self._arrived, self._poll_in_step) if in_stages else None,
        )
        return ModelRunner(setup, parts)

    def _tell_events(self) -> None:
        """Tell rank 0 what the host tier does, as soon as it is done."""
        tier = self._tier
        assert tier is not None
        while not self._is_over.is_set():
            tier.wait(_LOOK_S)
            self._tell_news()

    def _poll_in_step(self) -> list[HostEvent]:
        """Poll the host tier in the middle of a step; what comes is told behind it, as rank 0 may wait for the step."""
        with self._poll_lock:
            self._untold += self._poll()
        return []

    def _poll(self) -> list[HostEvent]:
        assert self._tier is not None
        events = self._tier.poll()
        if self._network is not None:
            events = self._network.poll(events)
        if self._loras is not None:
            events += self._loras.poll()
        self._arrived.note(events)
        return events

    def _tell_news(self) -> None:
        """Tell rank 0 what the host tier has done since the last time, if it has, and how it is."""
        tier = self._tier
        assert tier is not None
        with self._tell_lock:
            with self._poll_lock:
                events, self._untold = self._untold + self._poll(), []
            now = (tier.healthy, tier.is_stalled)
            if events or now != self._told_health:
                self._told_health = now
                self._send_events(events, tier)

    def _tell(self, events: list[HostEvent]) -> None:
        tier = self._tier
        if tier is None:
            return  # the engine has ended
        with self._tell_lock:
            self._send_events(events, tier)

    def _send_events(self, events: list[HostEvent], tier: HostTier) -> None:
        with contextlib.suppress(PeerLost):  # the thread that receives finds that out, too
            self._link.send(messages.Events(events, tier.healthy, tier.is_stalled))
