"""RankGroup: rank 0's side of the group: it starts the other ranks or lets them join, and tells them what to do.

On one machine rank 0 starts the others as processes of its own. On several each machine runs
``python -m omniserve.rank --join HOST:PORT`` for each of its ranks; torchrun, Ray or a shell loop may start them. Both
go the same way from there: a ``Link`` for messages, and a process group of torch.distributed for tensors (gloo on a
CPU, NCCL on a GPU), which meets at a store on the address of the link.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers

from omniserve.core import link, numa
from omniserve.core.config import EngineConfig
from omniserve.core.errors import PeerLost
from omniserve.core.link import Link
from omniserve.core.logs import log_flags
from omniserve.core.setup import RunnerSetup
from omniserve.core.version import __version__
from omniserve.core.work import HostEvent
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops import collectives
from omniserve.ops.collectives import CollectiveCall
from omniserve.ops.shared_memory import make_file
from omniserve.ops.stage_link import StageLink
from omniserve.parallel import messages
from omniserve.parallel.meeting import connect_collectives, stage_link
from omniserve.parallel.place import Place
from omniserve.parallel.shares import pin_to_share
from omniserve.remote.handshake import Hello, Welcome, refuse

logger = logging.getLogger(__name__)

SECRET_VARIABLE: Final = "OMNISERVE_RANK_SECRET"
"""Environment variable with the group's secret, for a rank that rank 0 has started."""
RANK_COMMAND: Final = (sys.executable, "-m", "omniserve.rank")
"""What starts a rank."""
_LOOPBACK = "127.0.0.1"
_START_S = 900.0
_LOOK_S = 0.2
_HELLO_S = 10.0
_END_S = 5.0
_SAYS_WHY_S = 2.0
_WATCH_S = 0.5
_GRACE_S = 3.0


def versions() -> str:
    """Return what all ranks must have alike."""
    return f"omniserve {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


class RankGroup:
    """The other ranks, as rank 0 sees them. Made before the model is loaded; ``close`` ends them.

    Args:
        config: How many ranks, and where they come from.
        load: Loads the model with a rank's part of each layer; it is sent to the other ranks.
        progress: Is told how the start gets on.
        shares_cores: All ranks compute on the cores that this process has: each gets its share of them.
        num_engines: Engines that share this machine's CPU quota.
        keeps_ranks: The attribute of this name.
        on_lost: Called from a thread if a rank is gone and no call has noticed for a few seconds, with the reason.

    Raises:
        PeerLost: A rank does not come, or is of another version.
        OSError: The address cannot be listened at.
    """

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[Place], Any],
        *,
        progress: Callable[[str], None],
        shares_cores: bool,
        num_engines: int = 1,
        keeps_ranks: bool = False,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config.parallel
        self._compile, self._numa, self._num_engines = config.execution.compile, config.execution.numa, num_engines
        self._lora = config.lora
        self.size = self._config.num_ranks
        """The number of ranks, rank 0 included."""
        self.place = Place.of(0, self._config)
        """Rank 0's."""
        self.stage = StageLink()
        """Rank 0's connection to the stage before its own."""
        self._load, self._on_lost = load, on_lost
        self.keeps_ranks = keeps_ranks
        """The ranks outlive the engine, and serve the next one."""
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: dist.Store | None = None
        self._lost: str | None = None
        self._is_closed = self._has_engine = False
        self._healthy: dict[str, bool] = {}
        self._stalled: dict[str, bool] = {}
        listen = self._config.rank_listen
        is_local = listen is None
        address = (_LOOPBACK, 0) if listen is None else link.host_and_port(listen)
        secret = secrets.token_hex(32).encode() if is_local else link.read_secret(str(self._config.rank_secret_file))
        self._listener = socket.create_server(address)
        self._address = self._listener.getsockname()[:2]
        try:
            if is_local:
                numa.release()  # the cores of an engine of before are not those of all ranks
                self._start(secret, shares_cores=shares_cores)
                if shares_cores:
                    pin_to_share(0, self.size, self._numa, num_engines=num_engines)
            else:
                progress(f"waiting for {self.size - 1} ranks to join at {self._address[0]}:{self._address[1]}")
            self._gather(secret)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self, secret: bytes, *, shares_cores: bool) -> None:
        for rank in range(1, self.size):
            command = [*RANK_COMMAND, "--join", f"{_LOOPBACK}:{self._address[1]}", "--rank", str(rank), "--once"]
            if shares_cores:
                command += ["--share-cores", str(self.size), "--engines", str(self._num_engines), "--numa", self._numa]
            else:
                command += ["--numa", "off"]
            command += log_flags()
            environment = {**os.environ, SECRET_VARIABLE: secret.decode()}
            self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def _gather(self, secret: bytes) -> None:
        """Wait for all ranks, and welcome them."""
        waiting: dict[int, Link] = {}
        deadline_s = time.monotonic() + _START_S
        self._listener.settimeout(_LOOK_S)
        while len(waiting) < self.size - 1:
            self._look_at_processes()
            if time.monotonic() > deadline_s:
                raise PeerLost(f"only {len(waiting)} of {self.size - 1} other ranks have come in {_START_S:g} s")
            try:
                connection, (host, port, *_) = self._listener.accept()
            except TimeoutError:
                continue
            try:
                self._welcome(link.accept(connection, secret, f"a rank at {host}:{port}"), waiting)
            except PeerLost as error:
                connection.close()
                logger.warning("%s", error)
        self._links = [waiting[rank] for rank in sorted(waiting)]

    def _welcome(self, new: Link, waiting: dict[int, Link]) -> None:
        hello: Hello = new.receive(_HELLO_S)
        free = [rank for rank in range(1, self.size) if rank not in waiting]
        rank = free[0] if hello.caller is None else hello.caller
        why = None
        if hello.version != versions():
            why = f"it has {hello.version}, and rank 0 has {versions()}"
        elif rank not in free:
            why = f"rank {rank} is taken, or not one of 1 to {self.size - 1}"
        if why is not None:
            refuse(new, why)
            raise PeerLost(f"{new.name} is refused: {why}")
        new.name = f"rank {rank}"
        place = Place.of(rank, self._config)
        assignment = messages.Assignment(place, self._load, self._compile, self._lora, self._config.rank_timeout_s)
        new.send(Welcome(assignment))
        waiting[rank] = new

    def _look_at_processes(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise PeerLost(f"rank {rank} ended at its start, with status {process.returncode} (see the log)")

    def await_loaded(self, summary: str) -> None:
        """Wait until all ranks have loaded their part, and see that it fits this one's.

        Raises:
            PeerLost: One has failed.
            ValueError: One has another model.
        """
        for each in self._links:
            loaded: messages.Loaded = self._answer(each)
            if loaded.summary != summary:
                raise ValueError(f"{each.name} has another model: {loaded.summary}, and rank 0 has {summary}")

    def compile(self, *, fused: bool) -> None:
        """Let the other ranks find or make their compiled halves."""
        self._ask(messages.Compile(fused))

    def connect(self, model: PatchedModel) -> None:
        """Have all ranks meet for their collectives, and for the rows from stage to stage; ``model`` is rank 0's."""
        place, shares_memory = self.place, self._shares_memory(model.device)
        files = None
        if shares_memory and place.num_shards > 1:
            files = [make_file(place.num_shards) for _ in range(place.num_stages)]
        address = None if shares_memory and place.num_stages == 1 else self._open_store()
        try:
            self.tell(messages.Connect(files, address))
            group = connect_collectives(
                model.device, place, files, self._store, self._address[0], self._config.rank_timeout_s
            )
            for each in self._links:
                self._answer(each)
        finally:
            for file in files or ():
                os.unlink(file)
        self.stage = stage_link(model, place, group)

    def _shares_memory(self, device: torch.device) -> bool:
        return self._config.rank_listen is None and device.type == "cpu"

    def _open_store(self) -> tuple[str, int]:
        server = socket.create_server((self._address[0], 0))
        host, port = server.getsockname()[:2]
        timeout = timedelta(seconds=self._config.rank_timeout_s)
        self._store = dist.TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
        )
        return host, port

    def run_collectives(
        self, calls: Sequence[CollectiveCall], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Have all ranks call collectives, to measure them."""
        self.tell(messages.RunCollectives(calls, rows))
        collectives.run(calls, rows, dtype, device)

    def pass_rows(self, rows: int) -> None:
        """Have rows pass all stages, to measure that; return when they are here."""
        self.tell(messages.PassRows(rows))
        self.stage.pass_on(rows)

    def serve_prefills(self, address: tuple[str, int], secret_file: str) -> list[tuple[str, int]]:
        """Have the other ranks of a prefill engine listen; return where they do, with an empty host if as this one.

        Args:
            address: Where this one will; rank r listens r ports above, or if the port is 0 at any.
            secret_file: With what engines must know; each rank reads it.
        """
        host, port = address
        is_local = self._config.rank_listen is None
        self.tell_each(
            messages.ServePrefills((host, port + rank if port else 0), is_local, secret_file)
            for rank in range(1, self.size)
        )
        return [self._answer(each).address for each in self._links]

    def begin_engine(self, setup: RunnerSetup) -> None:
        """Have the other ranks make their runners; meanwhile this one makes its own, and captures graphs with them."""
        self._has_engine = True
        self.tell(messages.BeginEngine(setup))

    def await_engine(self) -> None:
        """Wait until they have."""
        for each in self._links:
            self._answer(each)

    def _ask(self, message: Any, timeout_s: float = _START_S) -> None:
        self.tell(message)
        for each in self._links:
            self._answer(each, timeout_s)

    def _answer(self, other: Link, timeout_s: float = _START_S) -> Any:
        while isinstance(answer := other.receive(timeout_s), messages.Events):
            pass  # of an engine that ends
        if isinstance(answer, messages.Failure):
            raise PeerLost(f"{other.name}: {answer.why}")
        return answer

    # -- steps ---------------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """A rank is gone, so that no step can run any more."""
        return self._lost is not None

    def tell(self, message: Any) -> None:
        """Send a message to all other ranks.

        Raises:
            PeerLost: One is gone.
        """
        self.tell_each([message] * len(self._links))

    def tell_each(self, each: Iterable[Any]) -> None:
        """Send each other rank a message of its own, in their order.

        Raises:
            PeerLost: One is gone.
        """
        for peer, message in zip(self._links, each, strict=True):
            try:
                peer.send(message)
            except PeerLost as error:
                self._lost = str(error)
                raise

    def news(self) -> tuple[list[list[HostEvent]], bool, bool]:
        """Return the events of the others' host tiers, whether all are healthy, and whether one is stalled.

        Raises:
            PeerLost: One is gone.
        """
        told: list[list[HostEvent]] = []
        for each in self._links:
            while (message := each.receive_now()) is not None:
                if isinstance(message, messages.Failure):
                    raise PeerLost(f"{each.name}: {message.why}")
                assert isinstance(message, messages.Events)
                told.append(message.events)
                self._healthy[each.name], self._stalled[each.name] = message.is_healthy, message.is_stalled
        return told, all(self._healthy.values()), any(self._stalled.values())

    def why_lost(self, otherwise: str) -> str:
        """Return what a rank has said as it ended, or that it is gone, or, if nothing is known of it, ``otherwise``.

        The group is of no use then: ``end_engine`` ends the ranks.
        """
        deadline_s = time.monotonic() + _SAYS_WHY_S
        why: str | None = None
        while why is None and time.monotonic() < deadline_s:
            try:
                self.news()
            except PeerLost as error:
                why = str(error)
            time.sleep(0.01)
        self._lost = why or self._lost or otherwise
        return self._lost

    def _watch(self) -> None:
        """Notice a rank that goes while nothing is asked of it."""
        poller = select.poll()
        names = {}
        for each in self._links:
            poller.register(each.fileno(), select.POLLRDHUP)
            names[each.fileno()] = each.name
        while not self._is_closed:
            gone = [names[fd] for fd, _ in poller.poll(_WATCH_S * 1000)]
            if gone and not self._is_closed:
                self._lost = f"{gone[0]} is gone"
                time.sleep(_GRACE_S)  # a step that runs notices by itself, and knows more
                if not self._is_closed and self._on_lost is not None:
                    self._on_lost(self._lost)
                return

    def end_engine(self) -> None:
        """End the runners of the other ranks, or, unless they are kept, the ranks. A second call does nothing."""
        if not self.keeps_ranks or self._is_closed or self._lost is not None:
            self.close()
        elif self._has_engine:
            self._has_engine = False
            try:
                self._ask(messages.EndEngine(), _END_S)
            except PeerLost as error:
                logger.warning("%s: all ranks are ended", error)
                self.close()

    def close(self) -> None:
        """End the other ranks. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._lost is not None:
            for process in self._processes:
                process.kill()  # it may wait for a collective
        for each in self._links:
            try:
                each.send(messages.Close())
            except PeerLost:
                logger.debug("%s had gone before", each.name)
        collectives.disconnect()
        self.stage, self._store = StageLink(), None
        _end_all(self._processes)
        for each in self._links:
            each.close()
        self._listener.close()


def _end_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    deadline_s = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
