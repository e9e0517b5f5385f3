"""HostTier, the papers' CPU Attention Manager: the Python interface of the C++ threads in ``ops/csrc/host_tier.cpp``.

The mailbox is how a GPU hands rows over without a copy at the step's end. ``piggyback_send`` writes q, k and v into
page-locked memory, and then the step's number as a flag. ``expect`` names the tasks of a step; a thread of the tier,
which watches their flags, queues each task as ``submit`` would, once all of its rows are there. A row is the sender's
until its flag, then the tier's until its event was polled. A cancelled row is waited for, as it is still written.

With ``may_skip`` a device may say instead that a row was not sent. Behind each result the tier writes a flag that names
it (``result_flag``). ``piggyback_receive`` compares the flag at the layer with what the row waits for, and fetches the
result, or writes the step's number as a skip, upon which the tier drops what it expected. One tensor for each layer
tells which rows have joined: the concatenation, the residuals, the next layer's rows and, after the step, the scheduler
read it.

The rows of a task go and come as one: a seat for each row, one event. Their k and v are appended first, then each row
attends up to its own position. A later ``begin_token`` at a lower position takes tokens back. A row's result is that of
a task of its own, to the bit, but for AMX's tiles and where a cut into pieces has another length for it.

The paper has both queues in GPU memory, which a CPU process reaches by CUDA IPC (4). Here the threads are of the
engine's own process and read page-locked memory, so they need no such process.

A tier ends in one order: the device is drained, threads stop, memory goes; what may still be in use is kept.

Paper: omniserve 3.2.3, 3.2.4 and 4. Legend: L layers, B blocks, K KV heads, S block size, H head size, N query heads,
P piggyback seats, R tasks that a step sends, M rows that a task may have, D = N*H, W = (N + 2K)*H. In ``results_SMD``
and ``results_SD`` S are slots; in ``mailbox_SW`` and the flags S are the rows of all slots: row ``slot * M + i`` is
that of the slot's token i.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

import omniserve.ops  # noqa: F401 - loads the extension
from omniserve.core.errors import Stalled
from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import ModelSpec
from omniserve.core.stats import HostTierStats
from omniserve.core.work import AttentionResult, Done, HostEvent, HostLost, KVMove
from omniserve.host.memory import allocate_pool
from omniserve.host.moves import HostMoves
from omniserve.host.progress import HostLinkStats, Progress
from omniserve.ops.streams import drain

logger = logging.getLogger(__name__)

_host = torch.ops.omniserve_host
# An overload called directly saves a third of the call's 3 us, 30 times a step.
_submit = _host.submit.default
_expect = _host.expect.default
_begin_token = _host.begin_token.default
_poll = _host.poll.default
_wait = _host.wait.default

# EventKind in host_tier.h. Kind 4 is a cancelled task, which is reported as failed but not logged.
_ATTENTION_DONE, _ATTENTION_FAILED, _MOVE_DONE, _HOST_LOST = 0, 1, 2, 5
CANCELLED = "cancelled"
"""The message of the failed ``AttentionResult`` by which a cancelled slot is free."""
_HOST_IS_LOST = "the host is lost"
"""The message of what fails with a host on the network, which ``HostLost`` tells, too."""
_NO_MOVE = -1  # the move_id of an attention event
_MOVER_POLL_S = 0.0005
_MOST_POSITIONS = 1 << 24  # kMaxResultPosition
_CLOSE_S = 60.0  # a thread checks whether to end after each piece of work, which takes a few milliseconds


class HostTier:
    """The host KV pool, the worker threads, and the queues between them and the step.

    A task is a request's next token at one layer, or up to `max_rows` consecutive tokens of it, a row each, which share
    one reading of the request's K and V. Results come back as events: every task yields exactly one
    ``AttentionResult``, every move exactly one ``Done``. A slot's task is in flight from `submit` or
    `expect` until `poll` returns its event. Methods may be called from any thread, but only one thread may call `poll`
    at a time. They work only in the process that made the tier.

    With a mailbox, the step need not copy the rows of a task: the operator `piggyback_send` writes them into the
    mailbox from the device, and a thread of the tier notices the flag that it writes last.

    Args:
        setup: The tier's sizes.
        spec: The model's sizes and, per layer, how it attends.
        dtype: The dtype of the rows, the results and the device's cache.
        device: The device that uses the tier, whose work must end before the tier's memory is freed. None: the current
            GPU with ``setup.pin_memory``, else the CPU.
        layers: Layers of the model that the tier has, consecutive ones; None: all. They keep their numbers.

    Raises:
        ValueError: A size is out of range, the dtype does not fit the spec, or a core does not exist here.
    Paper: omniserve 3.2.3 (input and output queue), 4 "The implementation of CPU Attention".
    """

    def __init__(
        self,
        setup: HostTierSetup,
        *,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | None = None,
        layers: range | None = None,
    ) -> None:
        self.setup = setup
        """The tier's sizes."""
        self.spec = spec if layers is None else spec.part(layers)
        """The sizes of the layers that the tier has."""
        self.dtype = dtype
        """The dtype of the rows and of the results."""
        self._first_layer = layers.start if layers is not None else 0
        self._check()
        self.num_blocks = setup.kv_bytes // self.spec.host_block_bytes(setup.block_size, setup.kv_dtype)
        """The number of blocks in the pool."""
        self.max_rows = setup.max_rows
        """M."""
        self._process_id = os.getpid()
        self._device = device if device is not None else torch.device("cuda" if setup.pin_memory else "cpu")
        # Page-locking creates a CUDA context on the current device, which may be a GPU that other processes use.
        with torch.cuda.device(device) if setup.pin_memory and device is not None else contextlib.nullcontext():
            self._allocate()
            self._handle = self._start_threads()
            # This runs at interpreter exit, too: the memory must outlive the threads and the device work that use it.
            self._end = weakref.finalize(self, _end, self._handle, self._process_id, self._device)
            # With a method there would be a reference cycle through `self`, which would keep the threads alive until
            # the next garbage collection.
            host_copy = functools.partial(_host.start_move, self._handle)
            has_int8_caches = setup.cache_dtype == "int8"
            self._moves = HostMoves(
                self.pool_LBK2SH, dtype, host_copy, pin_memory=setup.pin_memory, has_int8_caches=has_int8_caches
            )
        self._logged: set[str] = set()
        self._progress = Progress(setup.patience_s)

    def _check(self) -> None:
        """Raise ValueError if the sizes do not fit the model."""
        setup, spec, dtype = self.setup, self.spec, self.dtype
        if dtype.itemsize != spec.dtype_bytes:
            raise ValueError(f"dtype {dtype} has {dtype.itemsize} bytes, but the model's has {spec.dtype_bytes}")
        if setup.mailbox and spec.max_model_len > _MOST_POSITIONS:
            raise ValueError(
                f"a mailbox takes positions below {_MOST_POSITIONS}, but the model's max_model_len is "
                f"{spec.max_model_len}"
            )
        if len(spec.attention) != spec.num_layers:
            raise ValueError(f"spec.attention needs one entry per layer: {spec.num_layers}, got {len(spec.attention)}")
        block_bytes = spec.host_block_bytes(setup.block_size, setup.kv_dtype)
        if setup.kv_bytes < block_bytes:
            raise ValueError(
                f"kv_bytes={setup.kv_bytes} is less than one block of {setup.block_size} tokens: give at least "
                f"{block_bytes}"
            )

    def _allocate(self) -> None:
        """Make the pool, and the rows and flags through which the tier and the device speak."""
        setup, spec, dtype, pin_memory = self.setup, self.spec, self.dtype, self.setup.pin_memory
        is_int8 = setup.kv_dtype == "int8"
        shape = (spec.num_layers, self.num_blocks, spec.num_kv_heads, 2, setup.block_size, spec.head_size)
        self.pool_LBK2SH = allocate_pool(
            shape, torch.int8 if is_int8 else dtype, pin_memory=pin_memory, cores=setup.cores
        )
        """K and V of all blocks, in the layout of ``host_layout`` in ``ops/csrc/attention.h``."""
        self.scales_LBK2S = allocate_pool(shape[:-1], torch.float32, cores=setup.cores) if is_int8 else None
        """The scales of the values in an int8 pool; None in any other pool."""
        row_size = spec.num_heads * spec.head_size
        self.results_SMD = torch.zeros(setup.num_slots, self.max_rows, row_size, dtype=dtype, pin_memory=pin_memory)
        """Attention rows by slot, in the order of their tokens. As many rows as the slot's task has are valid from its
        ``AttentionResult`` until the slot's next task."""
        self.results_SD = self.results_SMD[:, 0]
        """The first row of each slot in `results_SMD`: with `max_rows` of 1 all there is."""
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        num_rows = setup.num_slots * self.max_rows
        self.mailbox_SW = torch.empty(num_rows, width, dtype=dtype, pin_memory=pin_memory) if setup.mailbox else None
        """q, k and v of each row, side by side, as `piggyback_send` writes them. A row belongs to the sender until its
        flag is written, then to the tier until `poll` has returned the task's event. None without a mailbox."""
        self._flags_3S: Tensor | None = None
        if setup.mailbox:
            self._flags_3S = torch.zeros(3, num_rows, dtype=torch.int64, pin_memory=pin_memory)
        flags: Sequence[Tensor | None] = (None, None, None) if self._flags_3S is None else self._flags_3S.unbind()
        self.result_flags_S, self.flags_S, self.skips_S = flags
        """Flags of each row, int64, 0 at first; None without a mailbox.

        ``result_flags_S``: `result_flag` of the slot's last result, which the tier writes behind the result, for its
        first token. ``flags_S``: the step in which `piggyback_send` last sent the row. ``skips_S``: the step in which
        `piggyback_receive` last skipped it; the tier looks at that of the first token."""

    def _start_threads(self) -> int:
        """Start the tier's threads, and return the number by which they are called."""
        setup, spec = self.setup, self.spec
        kinds = [[layer.scale, layer.window, layer.softcap, layer.chunk] for layer in spec.attention]
        handle: int = _host.create(
            self.pool_LBK2SH,
            self.scales_LBK2S,
            self.results_SMD,
            torch.tensor(kinds, dtype=torch.float64),
            _per_head(spec),
            spec.num_heads,
            setup.num_threads,
            torch.tensor(setup.cores or (), dtype=torch.int64),
            not setup.pin_memory,
            setup.cache_dtype == "int8",
            self.mailbox_SW,
            self._flags_3S,
            setup.mailbox_spin_s,
            setup.mailbox_sleep_s,
        )
        return handle

    def begin_token(self, slot: int, epoch: int, position: int, block_ids: Sequence[int], num_rows: int = 1) -> None:
        """Bind a slot, which has no task in flight, to the `num_rows` tokens from `position` on, for all layers.

        `epoch`, which is >= 0, and `position` come back in the events. `block_ids` are the pool blocks that hold the
        keys ``[0, position + num_rows)``, in order. Each layer's task overwrites K and V of these tokens, and reads
        nothing behind them. So a call with a lower `position` than before takes tokens back.

        Raises:
            ValueError: An argument is out of range, the blocks do not cover the tokens, or a task is in flight.
        """
        _begin_token(self._handle, slot, epoch, position, block_ids, num_rows)

    def submit(self, layer: int, slots: Tensor, q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor) -> None:
        """Queue one attention task per slot, for the tokens that it is bound to.

        The rows are copied before this returns. A task appends its k and v to the pool, and each of its tokens attends
        over the keys up to its own position, within the layer's window and chunk. `slots` is ``[P]`` int64 with -1 for
        an empty seat; a slot has a seat for each of its tokens, side by side in their order, or for the first of them:
        the slot is then bound to these alone. All tensors are on the CPU, and q, k and v in the model's dtype are
        contiguous in their last dimension.

        Raises:
            ValueError: A slot or the layer is out of range, a slot is not bound, has a task in flight, has more seats
                than tokens or has them apart, or the tier is closed. Nothing was queued.
            RuntimeError: A tensor has the wrong shape, dtype, layout or device. Nothing was queued.
        """
        _submit(self._handle, layer - self._first_layer, slots, q_PNH, k_PKH, v_PKH)

    def expect(
        self, step: int, layers_R: Tensor, slots_R: Tensor, widths_R: Tensor | None = None, *, may_skip: bool = False
    ) -> None:
        """Begin attention tasks, each for the rows that `piggyback_send` sends of a slot in this step, or has sent.

        A task is queued, as by `submit`, once the flags of all its rows in ``flags_S`` are ``step``; any other value is
        ignored. The task reads its rows in the mailbox, so the slot may not be sent again before `poll` has returned
        the task's event. One call may name all tasks of a step; their order, in which their rows should arrive, only
        says which flags to check first.

        If all worker threads die, an expected task fails when its flag comes, because the sender uses the mailbox until
        then. Only `close` fails it at once: keep the tier until no sender writes to its mailbox.

        With `may_skip` the sender may skip a row, because the result that it waits for at the layer before is not
        there (`piggyback_receive`); then nothing is left of what was expected, and no event tells of it. So slots may
        have a task in flight, and several rows that are expected. When a row comes, its task takes the place of the
        slot's last one: no event tells of that any more if `poll` has not returned it.

        Args:
            step: The step's number, ``step_1`` of `piggyback_send`: >= 1, and higher than before for each slot.
            layers_R: The layer of each task, ``[R]`` int64 on the CPU.
            slots_R: The slot of each task, ``[R]`` int64 on the CPU; -1 leaves one out.
            widths_R: How many of the tokens that its slot is bound to each task has, ``[R]`` int64 on the CPU: the
                first ones, and the slot is then bound to these alone. None: one.
            may_skip: The step's rows may be skipped.

        Raises:
            ValueError: The step is too low, a slot, a layer or a width is out of range, a slot is not bound, has a task
                in flight or is named twice, the tier has no mailbox or is closed. Nothing is expected.
            RuntimeError: A tensor has the wrong shape, dtype or layout. Nothing is expected.
        """
        widths_R = torch.ones_like(slots_R) if widths_R is None else widths_R
        layers_R = layers_R - self._first_layer if self._first_layer else layers_R
        _expect(self._handle, step, layers_R, slots_R, widths_R, may_skip)

    def cancel(self, slot: int) -> bool:
        """Drop the slot's task, if any, and unbind the slot.

        Returns:
            True if `poll` still has to return the slot's event. It does so exactly once, as a failed
            ``AttentionResult`` with the old epoch, when no thread uses the slot or its blocks any more: keep both until
            then. What is expected is waited for, because the sender still writes its row. False if the slot was not
            bound: there is nothing to wait for.

        Raises:
            ValueError: The slot is out of range.
        """
        return _host.cancel(self._handle, slot)

    def start_move(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Start to copy whole blocks, K and V of all layers, between a device cache and the pool.

        The copy converts between the device's layout and the pool's, and between the model's dtype and int8; codes of
        an int8 cache are copied as they are. The worker
        threads copy from and to CPU caches; for CUDA caches a kernel on a side stream reads and writes the pool in
        place (with an int8 pool both take part, through a pinned staging buffer). The side stream, not this call, waits
        for the work that is already queued on the current CUDA stream.

        Raises:
            ValueError: A block id is out of range, the counts differ, the move's id is negative or in use, or a cache
                does not fit the pool.
        Paper: omniserve 3.2.4 (swapping without interrupting the step).
        """
        self._moves.start(move, device_k_LBKSH, device_v_LBKSH)

    def connect(self, host: int, rows_fd: int, blocks_fd: int, num_blocks: int, timeout_s: float) -> None:
        """Use a CPU host on the network from now on (``remote.network_hosts`` connects to them).

        Its blocks are ``[host * HOST_BLOCKS, host * HOST_BLOCKS + num_blocks)``: a token that begins in them is
        attended there, and moves copy to and from it. ``HostLost`` tells when it is lost, because a connection
        has ended, or the host was silent for `timeout_s` or has sent what it should not; all that it has in hand fails
        then. It can be connected again, as a host that holds nothing.

        Args:
            host: Its number, in [1, 127].
            rows_fd: A connection to it for rows and results; the tier closes it in the end.
            blocks_fd: Another one, for blocks of KV.

        Raises:
            ValueError: A number is out of range, the host is connected, or the tier is closed.
        Paper: omniserve 4 (distributed CPU attention).
        """
        self._moves.allow_network()
        _host.connect(self._handle, host, rows_fd, blocks_fd, num_blocks, timeout_s)

    def hosts(self) -> list[HostLinkStats]:
        """Return what there is to tell of each host on the network."""
        values = _host.link_stats(self._handle)
        size = len(dataclasses.fields(HostLinkStats))
        return [HostLinkStats(*values[i : i + size]) for i in range(0, len(values), size)]

    def serve(self, rows_fd: int, blocks_fd: int, timeout_s: float) -> str:
        """Be a CPU host on the network for an engine at the other end of two connections, until it is gone.

        All events go to the engine; nothing else may use the tier meanwhile. The connections are closed.

        Returns:
            Why it has ended.
        """
        (why,) = _host.serve(self._handle, rows_fd, blocks_fd, timeout_s)
        return str(why)

    def poll(self) -> list[HostEvent]:
        """Return the events of all that has finished since the last call. Never blocks."""
        rows, messages = _poll(self._handle)
        events: list[HostEvent] = []
        moves = self._moves
        for (kind, slot, epoch, layer, position, move_id, host), message in zip(rows.tolist(), messages, strict=True):
            if kind == _HOST_LOST:
                events.append(HostLost(host=host, message=message))
            elif move_id != _NO_MOVE:
                if not moves.takes(move_id, message):
                    events.append(Done(move_id=move_id, ok=kind == _MOVE_DONE, message=message))
            else:
                ok = kind == _ATTENTION_DONE
                if kind == _ATTENTION_FAILED:
                    self._log_failure(message)
                events.append(
                    AttentionResult(
                        slot=slot,
                        epoch=epoch,
                        layer=layer + self._first_layer,
                        position=position,
                        ok=ok,
                        message=message,
                    )
                )
        if moves.busy:
            events += moves.advance()
        for event in events:
            if isinstance(event, Done):
                if not event.ok:
                    self._log_failure(event.message)
                moves.end(event)
        self._progress.look(self.stats, has_news=bool(events))
        return events

    def wait(self, timeout_s: float) -> None:
        """Sleep, without the GIL, until `poll` has something to do or the timeout is over."""
        if not self._moves.busy:
            _wait(self._handle, timeout_s)
            return
        # Only a callback in the stream could wake a thread when a CUDA event is done, so this polls.
        deadline_s = time.monotonic() + timeout_s
        while not _wait(self._handle, _MOVER_POLL_S) and not self._moves.can_advance:
            if time.monotonic() >= deadline_s:
                return

    @property
    def busy(self) -> bool:
        """True while tasks or moves are expected, queued or running. Events that wait for `poll` do not count."""
        stats = self.stats()
        return stats.tasks_in_hand + stats.moves_in_hand > 0

    @property
    def attends(self) -> bool:
        """True while attention tasks are expected, queued or running. Moves do not count."""
        return self.stats().tasks_in_hand > 0

    @property
    def healthy(self) -> bool:
        """True while at least one worker thread is alive and the tier is not stalled."""
        return self.stats().healthy

    @property
    def is_stalled(self) -> bool:
        """True once the tier has made no progress with its work for `patience_s`: one of its threads hangs."""
        return self._progress.is_stalled

    def stats(self) -> HostTierStats:
        """Return the gauges and counters of the worker threads and of the moves together."""
        done, failures, alive, tasks, moves, busy_ns, bytes_read, bytes_moved, prefaulted = _host.stats(self._handle)
        return HostTierStats(
            tasks_done=done,
            failures=failures + self._moves.num_failures,
            threads_alive=alive,
            tasks_in_hand=tasks,
            moves_in_hand=moves + self._moves.num_moves,
            busy_seconds=busy_ns * 1e-9,
            kv_bytes_read=bytes_read,
            bytes_moved=bytes_moved + self._moves.bytes_moved,
            bytes_prefaulted=prefaulted,
            pool_bytes=self.pool_LBK2SH.nbytes,
            healthy=alive > 0 and not self.is_stalled,
        )

    def inject(
        self, *, delay_s: float = 0.0, shuffle_seed: int | None = None, fail_next: int = 0, kill_threads: int = 0
    ) -> None:
        """Inject faults, for tests. A call replaces the faults of the one before, and ends a delay that is under way.

        A thread sleeps for `delay_s` before each attention task. Tasks are served and events delivered in an order
        drawn from `shuffle_seed`. The next `fail_next` attention tasks throw. `kill_threads` threads exit with their
        next piece of work in hand, which is reported as failed.

        Raises:
            ValueError: A value is negative.
        """
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed must be >= 0 or None, got {shuffle_seed}")
        _host.inject(self._handle, delay_s, -1 if shuffle_seed is None else shuffle_seed, fail_next, kill_threads)

    def close(self) -> None:
        """Wait for the device, then stop the threads. Work that is expected or queued fails; `poll` still reports it.

        A second call does nothing after one that succeeded; neither does a call in a forked child, which has none of
        the threads.

        Raises:
            Stalled: The device does not finish its work, or a thread does not end. The tier's memory is never freed
                then, as it may still be in use.
            RuntimeError: The device has failed. The threads were stopped.
        """
        if os.getpid() != self._process_id:
            return
        self._moves.close()
        try:
            drain(self._device)
        except Stalled:
            self._end.detach()
            raise
        finally:
            num_left = _host.close(self._handle, _CLOSE_S)
        if num_left > 0:
            self._end.detach()
            raise Stalled(
                f"{num_left} threads of the host tier did not end within {_CLOSE_S:g} s: start the process again"
            )

    def _log_failure(self, message: str) -> None:
        # Each message is logged once: a dead thread must not fill the log with every task that it failed.
        if message not in self._logged and message != _HOST_IS_LOST:
            self._logged.add(message)
            logger.error("host tier: %s (counted from now on, not logged again)", message)


def result_flag(epoch: int, layer: int, position: int) -> int:
    """Return the number that names a result of a slot, as in ``ops/csrc/host_tier.h``: positive, below 2^63."""
    return (epoch % (1 << 27)) << 36 | position << 12 | (layer + 1)


def _per_head(spec: ModelSpec) -> torch.Tensor | None:
    """Return the sinks and the ALiBi slopes of each layer, ``[L, 2, N]``: -inf and 0 where it has none.

    None: no layer has any.
    """
    if all(layer.sinks is None and layer.alibi_slopes is None for layer in spec.attention):
        return None
    none = (-math.inf,) * spec.num_heads, (0.0,) * spec.num_heads
    return torch.tensor(
        [(layer.sinks or none[0], layer.alibi_slopes or none[1]) for layer in spec.attention], dtype=torch.float32
    )


def _end(handle: int, process_id: int, device: torch.device) -> None:
    """Wait for the device, stop a tier's threads and free its memory; in a forked child, do nothing.

    Memory that the device or a thread may still use is never freed. Errors are logged: a finalizer cannot raise them.
    """
    if os.getpid() != process_id:
        return
    try:
        drain(device)
    except Stalled as error:
        logger.error("the host tier's memory stays: %s", error)
        _host.close(handle, _CLOSE_S)
        return
    except RuntimeError as error:  # the device has failed, so none of its work can use the memory any more
        logger.error("a host tier ends after a failure of the device: %s", error)
    if num_left := _host.destroy(handle, _CLOSE_S):
        logger.error("the host tier's memory stays: %d of its threads did not end within %g s", num_left, _CLOSE_S)
