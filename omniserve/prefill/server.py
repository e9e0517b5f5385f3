"""PrefillServer: an engine that computes prompts for others, and sends blocks of KV as soon as they are in host memory.

Its engine is like any other: the policy puts best-effort prompts beside latency-sensitive ones up to the same bounds,
and prompts that begin alike share what was computed. Blocks are copied to the host pool as they are full, beside the
steps (``PrefixesOnHost.save_all``). From there they are sent, in their order. Paper: omniserve 5.4.4.

Recurrent states come behind the KV (``Finished.states``). If an engine is lost or lacks memory, what has come is kept,
and the rest is computed by the engine that asked.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core import link
from omniserve.core.errors import PeerClosed, PeerLost, RequestRejected
from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request, SamplingParams, ServiceClass
from omniserve.core.version import __version__
from omniserve.core.work import RemotePrefill
from omniserve.engine.checks import require_shared_kv
from omniserve.engine.engine import Engine
from omniserve.engine.parts import NO_STATES_OF_RANKS
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.parallel import messages
from omniserve.remote.handshake import Hello, Welcome, refuse
from omniserve.remote.prefill_messages import Ask, AskingEngine, Blocks, Cancel, Failed, Finished, OpenedSession
from omniserve.remote.prefill_session import Listener, Session, bytes_of

logger = logging.getLogger(__name__)

_HELLO_S, _LOOK_S = 10.0, 0.2
_STEP_WAIT_S = 0.001
_HAND_OVER_S = 0.05
"""Seconds that the next step waits at most for copies of latency-sensitive prompts to the host."""
_PIECE_BYTES, _MOST_QUEUED_BYTES = 4 << 20, 64 << 20
_PATIENCE = 50
"""Steps in which the blocks of a prompt that is computed must come to the host."""


@dataclass(slots=True)
class _Export:
    """A prompt that is computed for a session."""

    session: Session
    move_id: int
    request_id: str
    keys: Sequence[bytes]
    num_sent: int
    """First blocks that were sent, or need not be."""
    kind: ServiceClass
    is_computed: bool = False
    states: bytes | None = None
    """The recurrent states behind its last token, once it is computed; None: the model has none."""
    num_waits: int = 0
    """Steps since then without a block to send."""


@dataclass(slots=True)
class _Counters:
    asked: int = 0
    done: int = 0
    failed: int = 0
    blocks_sent: int = 0


class PrefillServer:
    """Serves engines from ``run`` to ``close``; the engine's steps run in the thread that calls ``run``.

    Args:
        engine: Computes the prompts. ``close`` does not close it.
        fingerprint: ``kv_fingerprint`` of it.
        secret: What an engine must know.
        secret_file: The file with it, which the engine's other ranks read if it has any.
        address: Where to listen; port 0: any. Rank r listens r ports above.

    Raises:
        OSError: The address cannot be used.
        ValueError: The engine cannot give its KV to others.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        fingerprint: str,
        secret: bytes,
        secret_file: str = "",
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        if engine.spec.state_bytes and engine.group is not None:
            raise ValueError(NO_STATES_OF_RANKS)
        if engine.spec.state_bytes and engine.config.execution.async_steps is not False:
            raise ValueError("with async_steps a step launched ahead could overwrite recurrent states: set it to False")
        require_shared_kv(engine.config, engine.host_tier, engine.kv, "prefill engines")
        prefixes = engine.kv.prefixes
        assert engine.host_tier is not None and prefixes is not None and prefixes.host is not None
        self._engine, self._on_host, self._pool_LBK2SH = engine, prefixes.host, engine.host_tier.pool_LBK2SH
        engine.scheduler.requests.prefixes_on_host.save_all()
        if engine.spec.state_bytes:
            engine.on_step = self._keep_states
        self._fingerprint, self._secret = fingerprint, secret
        self._block_bytes = self._pool_LBK2SH[:, 0].nbytes
        self._inbox: queue.SimpleQueue[tuple[Session, object]] = queue.SimpleQueue()
        self._sessions: set[Session] = set()
        self._exports: dict[str, _Export] = {}
        self._num_requests = 0
        self.counters = _Counters()
        self._is_closed = threading.Event()
        self._group, self._ranks = engine.group, list[tuple[str, int]]()
        if self._group is not None:
            self._ranks = self._group.serve_prefills(address, secret_file)
        self._listener = Listener(address, self._greet)
        self.address = self._listener.address
        """The address at which the engine listens."""

    def run(self) -> None:
        """Compute prompts until ``close``.

        Raises:
            Stalled: The engine's host tier is.
        """
        try:
            while not self._is_closed.is_set():
                self._turn()
        finally:
            for session in self._sessions:
                session.close()

    def _tell_ranks(self, message: messages.SendBlocks | messages.SendEnd | messages.EndSession) -> None:
        if self._group is not None:
            self._group.tell(message)

    def _turn(self) -> None:
        """Take messages, run a step if there is something to do, and send what has come of it."""
        engine = self._engine
        for session in self._sessions:
            session.turned_s = time.monotonic()
        self._take_messages(blocks=not (self._exports or engine.has_unfinished))
        if not (self._exports or engine.has_unfinished):
            return
        for output in engine.step():
            if output.finished and (export := self._exports.get(output.request_id)) is not None:
                export.is_computed = True
        self._hand_over()
        for export in list(self._exports.values()):
            self._send_blocks(export)
            self._give_up_if_stuck(export)
        if engine.last_plan_was_empty:
            engine.wait(_STEP_WAIT_S)

    def _keep_states(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        """Copy the recurrent states of the prompts that end in a step, before another request has their slots."""
        for chunk in plan.chunks:
            if chunk.samples and (export := self._exports.get(chunk.request_id)) is not None:
                export.states = self._engine.runner.states.pool.save(chunk.state_slot)

    def _hand_over(self) -> None:
        """Copy latency-sensitive prompts that are computed to the host before the next step, which may be long."""
        until_s = time.monotonic() + _HAND_OVER_S
        while waiting := [e for e in self._exports.values() if e.is_computed and e.kind is ServiceClass.LS]:
            self._engine.start_moves()
            for export in waiting:
                self._send_blocks(export)
            if time.monotonic() > until_s or not self._engine.scheduler.requests.loads.is_saving:
                return
            self._engine.wait(_STEP_WAIT_S)

    def close(self) -> None:
        """Have ``run`` return. May be called from any thread, and from a signal's handler."""
        self._is_closed.set()
        self._listener.close()

    # -- connections -----------------------------------------------------------------------------------------------

    def _greet(self, connection: socket.socket, name: str) -> None:
        """Let a new connection prove itself, and see that its engine has the same model."""
        try:
            peer = link.accept(connection, self._secret, name)
            hello = peer.receive(_HELLO_S)
            if (why := self._why_refused(hello)) is not None:
                refuse(peer, why)
                logger.warning("%s is refused: %s", name, why)
                return
            session_id = secrets.token_hex(16)
            ranks = tuple((host or peer.own_address, port) for host, port in self._ranks)
            peer.send(Welcome(OpenedSession(session_id, ranks)))
        except PeerLost as error:
            logger.warning("a connection is refused: %s", error)
            return
        logger.info("%s has joined", name)
        session = Session(peer, session_id, lambda session, message: self._inbox.put((session, message)))
        self._inbox.put((session, None))
        session.start()

    def _why_refused(self, hello: object) -> str | None:
        caller = hello.caller if isinstance(hello, Hello) else hello
        if not isinstance(hello, Hello) or not isinstance(caller, AskingEngine):
            return f"it sends {type(caller).__name__}"
        if hello.version != __version__:
            return f"it runs OmniServe {hello.version}, and this one {__version__}"
        parallel = self._engine.config.parallel
        if caller.parallel != (parallel.tensor_parallel_size, parallel.pipeline_parallel_size):
            return "it has other sizes of tensor and pipeline parallel: give both the same"
        own = (self._block_bytes, self._engine.spec.state_bytes, self._fingerprint)
        if (caller.block_bytes, caller.state_bytes, caller.fingerprint) != own:
            return "it has another model, other weights, another dtype or block_size"
        known = {spec.name for spec in self._engine.config.classes}
        if unknown := [name for name in caller.classes if name not in known]:
            return f"it has classes that are not known here: {', '.join(unknown)}; give both the same"
        return None

    def _works_for(self, session: Session) -> bool:
        return any(export.session is session for export in self._exports.values())

    def _end(self, session: Session) -> None:
        """Forget an engine and what it has asked for."""
        self._sessions.discard(session)
        self._tell_ranks(messages.EndSession(session.id))
        for export in [export for export in self._exports.values() if export.session is session]:
            self._drop(export)
        session.close()

    # -- prompts ---------------------------------------------------------------------------------------------------

    def _take_messages(self, *, blocks: bool) -> None:
        """Take the messages that are there; without anything else to do, wait a moment for one."""
        with contextlib.suppress(queue.Empty):
            while True:
                session, message = self._inbox.get(timeout=_LOOK_S) if blocks else self._inbox.get_nowait()
                blocks = False
                match message:
                    case None:
                        session.turned_s = time.monotonic()
                        self._sessions.add(session)
                    case Ask(prefill):
                        self._begin(session, prefill)
                    case Cancel(move_id):
                        self._cancel(session, move_id)
                    case PeerClosed() if not self._works_for(session):
                        logger.info("%s has ended", session.peer.name)
                        self._end(session)
                    case _:
                        logger.warning("%s is lost: %s", session.peer.name, message)
                        self._end(session)

    def _begin(self, session: Session, prefill: RemotePrefill) -> None:
        self.counters.asked += 1
        self._num_requests += 1
        request_id = f"prefill-{self._num_requests}"
        request = Request(
            prompt_token_ids=list(prefill.token_ids),
            request_id=request_id,
            cache_salt=prefill.cache_salt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            service_class=prefill.service_class,
            slo=SLO(ttft_s=prefill.ttft_s),
        )
        block_size = self._engine.config.block_size
        keys = PrefixKeys(block_size, salt=prefill.cache_salt)
        count = len(prefill.token_ids) // block_size
        export = _Export(
            session,
            prefill.move_id,
            request_id,
            keys.up_to(prefill.token_ids, count)[:count],
            prefill.first_block,
            ServiceClass(self._engine.config.class_named(prefill.service_class).kind),
        )
        try:
            self._engine.add(request)
        except (ValueError, RequestRejected) as error:
            self._fail(export, str(error))
            return
        self._exports[request_id] = export

    def _cancel(self, session: Session, move_id: int) -> None:
        for export in list(self._exports.values()):
            if export.session is session and export.move_id == move_id:
                self._drop(export)
                self._fail(export, "")

    def _drop(self, export: _Export) -> None:
        del self._exports[export.request_id]
        self._engine.abort(export.request_id)

    def _fail(self, export: _Export, why: str) -> None:
        self.counters.failed += 1
        export.session.send(Failed(export.move_id, why))
        self._tell_ranks(messages.SendEnd(export.session.id, Failed(export.move_id, "")))

    def _send_blocks(self, export: _Export) -> None:
        """Send what has come to the host of a prompt, and its end."""
        if export.session.queued_bytes > _MOST_QUEUED_BYTES:
            return
        most, blocks = max(1, _PIECE_BYTES // self._block_bytes), list[int]()
        for key in export.keys[export.num_sent :]:
            if len(blocks) == most or (block := self._on_host.block_of(key)) is None:
                break
            blocks.append(block)
        if blocks:
            self._tell_ranks(messages.SendBlocks(export.session.id, export.move_id, tuple(blocks)))
            export.session.send(Blocks(export.move_id, bytes_of(self._pool_LBK2SH, blocks)))
            export.num_sent += len(blocks)
            self.counters.blocks_sent += len(blocks)
            export.num_waits = 0
        has_states = self._engine.spec.state_bytes > 0
        if export.num_sent == len(export.keys) and (export.is_computed or not has_states):
            del self._exports[export.request_id]
            self.counters.done += 1
            export.session.send(Finished(export.move_id, export.states))
            self._tell_ranks(messages.SendEnd(export.session.id, Finished(export.move_id)))

    def _give_up_if_stuck(self, export: _Export) -> None:
        """End a prompt that is computed, and of which no more comes to the host."""
        if (
            export.request_id in self._exports
            and export.is_computed
            and not self._engine.scheduler.requests.loads.is_saving
        ):
            export.num_waits += 1
            if export.num_waits > _PATIENCE:
                del self._exports[export.request_id]
                self._fail(export, "host memory is short: a prompt was computed, but its KV was not kept")
