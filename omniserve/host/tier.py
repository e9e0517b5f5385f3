"""HostTier: the CPU Attention Manager. A thin, typed front of the C++ threads in ``ops/csrc/host_tier.cpp``.

Paper: omniserve 3.2.3, 3.2.4 and 4. Legend: L layers, B blocks, K KV heads, S block size, H head size, N query heads,
P piggyback seats, R rows that a step sends; ``results_SD``, ``mailbox_SW`` and ``flags_S`` have S for slots, D for N*H
and W for (N + 2K)*H.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

import omniserve.ops  # noqa: F401 - loads the extension
from omniserve.core.config import EngineConfig
from omniserve.core.errors import Stalled
from omniserve.core.plan import HostEvent, HostEventKind, KVMove
from omniserve.core.spec import ModelSpec
from omniserve.host.memory import allocate_pool
from omniserve.host.moves import HostMoves
from omniserve.host.progress import Progress
from omniserve.host.stats import HostTierStats
from omniserve.ops.waiting import drain

logger = logging.getLogger(__name__)

_host = torch.ops.omniserve_host
# An overload called directly saves a third of the call's 3 us, 30 times a step.
_submit = _host.submit.default
_expect = _host.expect.default
_begin_token = _host.begin_token.default
_poll = _host.poll.default
_wait = _host.wait.default

# EventKind in host_tier.h, in its order. A cancelled task is reported as failed to no caller.
_KINDS = (
    HostEventKind.ATTENTION_DONE,
    HostEventKind.ATTENTION_FAILED,
    HostEventKind.MOVE_DONE,
    HostEventKind.MOVE_FAILED,
    HostEventKind.ATTENTION_FAILED,
)
_ATTENTION_FAILED = 1
_NO_MOVE = -1  # of an attention event
_MOVER_POLL_S = 0.0005
_CLOSE_S = 60.0  # a thread looks whether to end after each piece of work, of a few milliseconds


class HostTier:
    """Host KV pool, worker threads, and the queues between them and the step.

    Results come back as events: every task yields exactly one ATTENTION_DONE or ATTENTION_FAILED, every move exactly
    one MOVE_DONE or MOVE_FAILED. A slot's task is in flight from `submit` or `expect` until `poll` hands out its event.
    Methods may be called from any thread, but `poll` from one at a time, and in the process that made the tier only.

    With a mailbox, a task's rows need no copy by the step: the operator `piggyback_send` writes them there, on whatever
    device it runs, and a thread of the tier sees it.

    Args:
        spec: The model's sizes and, per layer, how it attends.
        dtype: Of the rows, the results and the device's cache.
        block_size: Tokens per block.
        kv_bytes: Memory for the pool, ``kv_bytes // spec.host_block_bytes(block_size, kv_dtype)`` blocks.
        num_slots: Most requests with a token on the tier at a time.
        num_threads: Worker threads.
        cores: Thread i is pinned to ``cores[i % len(cores)]``; None pins nothing.
        pin_memory: Page-locked memory, for a CUDA device tier.
        kv_dtype: ``auto``: the pool is in `dtype`, and results are exact. ``int8``: K and V are rounded to int8, with a
            scale per token and KV head; about twice the tokens fit, and are read in about half the time.
        mailbox: Have `mailbox_SW` and `flags_S`, and a thread that watches the flags of what is expected.
        mailbox_spin_s: So long after the last flag, or the last `expect`, this thread looks without a rest.
        mailbox_sleep_s: From then on it sleeps so long between two looks. While nothing is expected it sleeps.
        device: The device tier's, which uses the tier's memory: before the tier ends, its work is waited for. None: a
            GPU's current one with `pin_memory`, else the CPU.
        patience_s: If for so long `poll` finds that nothing got on, with work in hand, the tier is stalled.

    Raises:
        ValueError: A size is out of range, the dtype does not fit the spec, or a core does not exist here.
    Paper: omniserve 3.2.3 (input and output queue), 4 "The implementation of CPU Attention".
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        dtype: torch.dtype,
        block_size: int,
        kv_bytes: int,
        num_slots: int,
        num_threads: int,
        cores: tuple[int, ...] | None = None,
        pin_memory: bool = False,
        kv_dtype: str = "auto",
        mailbox: bool = False,
        mailbox_spin_s: float = 200e-6,
        mailbox_sleep_s: float = 20e-6,
        device: torch.device | None = None,
        patience_s: float = 10.0,
    ) -> None:
        for name, value in (("block_size", block_size), ("num_slots", num_slots), ("num_threads", num_threads)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if dtype.itemsize != spec.dtype_bytes:
            raise ValueError(f"dtype {dtype} has {dtype.itemsize} bytes, but the model's has {spec.dtype_bytes}")
        if len(spec.attention) != spec.num_layers:
            raise ValueError(f"spec.attention needs one entry per layer: {spec.num_layers}, got {len(spec.attention)}")
        block_bytes = spec.host_block_bytes(block_size, kv_dtype)
        self.num_blocks = kv_bytes // block_bytes
        """Blocks in the pool."""
        if self.num_blocks < 1:
            raise ValueError(
                f"kv_bytes={kv_bytes} is less than one block of {block_size} tokens: give at least {block_bytes}"
            )
        is_int8 = kv_dtype == "int8"
        shape = (spec.num_layers, self.num_blocks, spec.num_kv_heads, 2, block_size, spec.head_size)
        self.pool_LBK2SH = allocate_pool(shape, torch.int8 if is_int8 else dtype, pin_memory=pin_memory, cores=cores)
        """K and V of all blocks; `omniserve.ops.host_layout` reads and writes them."""
        self.scales_LBK2S = allocate_pool(shape[:-1], torch.float32, cores=cores) if is_int8 else None
        """What the int8 values are multiples of; None if they are none."""
        self.results_SD = torch.zeros(num_slots, spec.num_heads * spec.head_size, dtype=dtype, pin_memory=pin_memory)
        """Attention rows; row = slot, valid from the slot's ATTENTION_DONE event until its next task."""
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
        self.mailbox_SW = torch.empty(num_slots, width, dtype=dtype, pin_memory=pin_memory) if mailbox else None
        """For `piggyback_send`: q, then k, then v of each slot. A row is the sender's until its flag is written, then
        the tier's until `poll` has handed out the task's event. None without a mailbox."""
        self.flags_S = torch.zeros(num_slots, dtype=torch.int64, pin_memory=pin_memory) if mailbox else None
        """For `piggyback_send`: the step that sent each slot's row, 0 at the start. None without a mailbox."""
        layers = [[layer.scale, layer.window, layer.softcap] for layer in spec.attention]
        self._handle: int = _host.create(
            self.pool_LBK2SH,
            self.scales_LBK2S,
            self.results_SD,
            torch.tensor(layers, dtype=torch.float64),
            spec.num_heads,
            num_threads,
            torch.tensor(cores or (), dtype=torch.int64),
            not pin_memory,
            self.mailbox_SW,
            self.flags_S,
            mailbox_spin_s,
            mailbox_sleep_s,
        )
        self._process_id = os.getpid()
        self._device = device if device is not None else torch.device("cuda" if pin_memory else "cpu")
        # Also at interpreter exit: neither a thread nor the device may outlive the memory it works on.
        self._end = weakref.finalize(self, _end, self._handle, self._process_id, self._device)
        # A partial, not a method: a cycle through `self` would keep the threads until the next garbage collection.
        host_copy = functools.partial(_host.start_move, self._handle)
        self._moves = HostMoves(self.pool_LBK2SH, dtype, host_copy, pin_memory=pin_memory)
        self._logged: set[str] = set()
        self._progress = Progress(patience_s)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_threads: int,
        kv_bytes: int | None = None,
        mailbox: bool = False,
    ) -> Self:
        """Return the host tier of a device tier.

        Args:
            config: An engine's settings.
            spec: The model's sizes.
            dtype: The model's.
            device: The device tier's.
            num_threads: Worker threads.
            kv_bytes: Memory for the pool; None: as configured.
            mailbox: See the class.
        """
        on_cuda = device.type == "cuda"
        # Page-locking begins a context on the current device if it has none: it takes memory of a GPU that others use.
        with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
            return cls(
                spec=spec,
                dtype=dtype,
                block_size=config.block_size,
                kv_bytes=config.host_kv_bytes if kv_bytes is None else kv_bytes,
                num_slots=config.max_host_requests,
                num_threads=num_threads,
                cores=config.host_cores,
                pin_memory=on_cuda,
                kv_dtype=config.host_kv_dtype,
                mailbox=mailbox,
                device=device,
            )

    def begin_token(self, slot: int, epoch: int, position: int, block_ids: Sequence[int]) -> None:
        """Bind a slot to the token at `position`; its tasks then work for this token, layer after layer.

        Args:
            slot: In ``[0, num_slots)``, without a task in flight.
            epoch: Comes back in the token's events; >= 0.
            position: The token's position; its keys are ``[0, position]``.
            block_ids: Pool blocks that cover ``[0, position]``, in order.

        Raises:
            ValueError: An argument is out of range, the blocks do not cover the position, or a task is in flight.
        """
        _begin_token(self._handle, slot, epoch, position, block_ids)

    def submit(self, layer: int, slots: Tensor, q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor) -> None:
        """Queue one attention task per occupied seat, for the token that its slot is bound to.

        The rows are copied before this returns. A task appends its k and v to the pool and attends over
        ``[0, position]`` within the layer's window.

        Args:
            layer: In ``[0, num_layers)``.
            slots: ``[P]`` int64, CPU; -1 is an empty seat.
            q_PNH: ``[P, N, H]``, the model's dtype, CPU, contiguous in its last dimension.
            k_PKH: ``[P, K, H]``, likewise.
            v_PKH: ``[P, K, H]``, likewise.

        Raises:
            ValueError: A slot or the layer is out of range, a slot is not bound, has a task in flight or sits in two
                seats, or the tier is closed. Nothing was queued.
            RuntimeError: A tensor has the wrong shape, dtype, layout or device. Nothing was queued.
        """
        _submit(self._handle, layer, slots, q_PNH, k_PKH, v_PKH)

    def expect(self, step: int, layers_R: Tensor, slots_R: Tensor) -> None:
        """Begin one attention task per row that `piggyback_send` sends in this step, or has sent.

        A task is queued as by `submit` once ``flags_S[slot] == step``; any other flag counts for nothing. Its rows are
        read where they are, so the slot is not sent again before `poll` has handed out the task's event. All rows of a
        step may be named at once, in the order in which they will be sent (a hint where to look first, no promise).

        If all worker threads die, what is expected fails as its flags come, for until then the sender uses the mailbox.
        Only `close` fails it at once: keep the tier until no sender is at work on its mailbox.

        Args:
            step: The step's number, ``step_1`` of `piggyback_send`; >= 1, and higher than ever before for each slot.
            layers_R: ``[R]`` int64, CPU; in ``[0, num_layers)``.
            slots_R: ``[R]`` int64, CPU; -1 leaves a row out.

        Raises:
            ValueError: The step is too low, a slot or a layer is out of range, a slot is not bound, has a task in
                flight or is named twice, the tier has no mailbox or is closed. Nothing is expected.
            RuntimeError: A tensor has the wrong shape, dtype or layout. Nothing is expected.
        """
        _expect(self._handle, step, layers_R, slots_R)

    def cancel(self, slot: int) -> bool:
        """Drop the slot's task, if any, and unbind the slot.

        Returns:
            True if the task's event has not been handed out by `poll` yet. It will be, exactly once, as
            ATTENTION_FAILED with its old epoch, when no thread touches the slot or its blocks any more: until then,
            keep both. A task that is expected waits for its flag like any other, for its row is still written. False if
            there is nothing to wait for.

        Raises:
            ValueError: The slot is out of range.
        """
        return _host.cancel(self._handle, slot)

    def start_move(self, move: KVMove, device_k_LBKSH: Tensor, device_v_LBKSH: Tensor) -> None:
        """Start copying whole blocks, all layers, K and V, between a device cache and the pool.

        On their way blocks change between the device's layout and the pool's, and between its dtype and int8. CPU
        caches are copied by the worker threads, CUDA ones by a kernel on a side stream, which reads and writes the pool
        where it lies (an int8 pool: over a pinned staging buffer, by both). Work already queued on the current CUDA
        stream is waited for (by the side stream, not by this call).

        Args:
            move: Its ids are device blocks on the one side and pool blocks on the other.
            device_k_LBKSH: Device cache, contiguous, in the model's dtype; it may have any number of blocks.
            device_v_LBKSH: Likewise.

        Raises:
            ValueError: A block id is out of range, the counts differ, the move's id is negative or in use, or a cache
                does not fit the pool.
        Paper: omniserve 3.2.4 (swapping without interrupting the step).
        """
        self._moves.start(move, device_k_LBKSH, device_v_LBKSH)

    def poll(self) -> list[HostEvent]:
        """Return what has finished since the last call. Never blocks."""
        rows, messages = _poll(self._handle)
        events: list[HostEvent] = []
        moves = self._moves
        for (kind, slot, epoch, layer, position, move_id), message in zip(rows.tolist(), messages, strict=True):
            if kind == _ATTENTION_FAILED:
                self._log_failure(message)
            if move_id != _NO_MOVE and moves.mover.takes(move_id, message):
                continue
            events.append(
                HostEvent(
                    kind=_KINDS[kind],
                    slot=slot,
                    epoch=epoch,
                    layer=layer,
                    position=position,
                    move_id=move_id,
                    message=message,
                )
            )
        if moves.mover.busy:
            events += moves.mover.advance()
        for event in events:
            if event.move_id != _NO_MOVE:
                if event.kind is HostEventKind.MOVE_FAILED:
                    self._log_failure(event.message)
                moves.end(event)
        self._progress.look(self.stats, has_news=bool(events))
        return events

    def wait(self, timeout_s: float) -> None:
        """Sleep, without the GIL, until `poll` has something to do or the timeout is over."""
        if not self._moves.mover.busy:
            _wait(self._handle, timeout_s)
            return
        # Nothing wakes a thread when a CUDA event is done, short of a callback in the stream: look again and again.
        deadline_s = time.monotonic() + timeout_s
        while not _wait(self._handle, _MOVER_POLL_S) and not self._moves.mover.can_advance:
            if time.monotonic() >= deadline_s:
                return

    @property
    def busy(self) -> bool:
        """True while tasks or moves are expected, queued or running (events that wait for `poll` do not count)."""
        stats = self.stats()
        return stats.tasks_in_hand + stats.moves_in_hand > 0

    @property
    def attends(self) -> bool:
        """True while attention tasks are expected, queued or running; moves do not count."""
        return self.stats().tasks_in_hand > 0

    @property
    def healthy(self) -> bool:
        """True while at least one worker thread lives, and the tier is not stalled."""
        return not self.is_stalled and self.stats().threads_alive > 0

    @property
    def is_stalled(self) -> bool:
        """True once the tier has had work in hand and not got on with it for `patience_s`: a thread of it hangs."""
        return self._progress.is_stalled

    @property
    def num_tasks_done(self) -> int:
        """Attention tasks that gave a result, since the start."""
        return self.stats().tasks_done

    def stats(self) -> HostTierStats:
        """Return gauges and counters."""
        done, failures, alive, tasks, moves, busy_ns, bytes_read, bytes_moved, prefaulted = _host.stats(self._handle)
        return HostTierStats(
            tasks_done=done,
            failures=failures + self._moves.mover.num_failures,
            threads_alive=alive,
            tasks_in_hand=tasks,
            moves_in_hand=moves + self._moves.mover.num_moves,
            busy_seconds=busy_ns * 1e-9,
            kv_bytes_read=bytes_read,
            bytes_moved=bytes_moved + self._moves.mover.bytes_moved,
            bytes_prefaulted=prefaulted,
            pool_bytes=self.pool_LBK2SH.nbytes,
        )

    def inject(
        self, *, delay_s: float = 0.0, shuffle_seed: int | None = None, fail_next: int = 0, kill_threads: int = 0
    ) -> None:
        """Ask for faults, for tests. A call replaces what was asked for before; without arguments, nothing goes wrong.

        A delay that is under way ends.

        Args:
            delay_s: A thread sleeps so long before each attention task.
            shuffle_seed: Tasks are served, and events delivered, in an order drawn from this seed (>= 0).
            fail_next: So many attention tasks throw.
            kill_threads: So many threads exit with their next piece of work in hand, which is reported failed.

        Raises:
            ValueError: A value is negative.
        """
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed must be >= 0 or None, got {shuffle_seed}")
        _host.inject(self._handle, delay_s, -1 if shuffle_seed is None else shuffle_seed, fail_next, kill_threads)

    def close(self) -> None:
        """Wait for the device, then stop the threads, also with work expected or queued.

        Its failure can still be polled. A second call after one that succeeded does nothing, nor does one in a forked
        child, which has none of the threads.

        Raises:
            Stalled: The device does not end what it was given, or a thread does not end. The tier's memory stays for
                good, as it may still be used.
            RuntimeError: The device has failed. The threads were stopped.
        """
        if os.getpid() != self._process_id:
            return
        self._moves.mover.close()
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
        # Once per message: a dead thread must not fill the log with every task that it failed.
        if message not in self._logged:
            self._logged.add(message)
            logger.error("host tier: %s (counted from now on, not logged again)", message)


def _end(handle: int, process_id: int, device: torch.device) -> None:
    """Wait for the device, then stop a tier's threads, then let its memory go; in a forked child, do nothing.

    Memory that the device or a thread may still use is never freed. No caller could take an exception here.
    """
    if os.getpid() != process_id:
        return
    try:
        drain(device)
    except Stalled as error:
        logger.error("the host tier's memory stays: %s", error)
        _host.close(handle, _CLOSE_S)
        return
    except RuntimeError as error:  # it has failed, and with it all that it was given
        logger.error("a host tier ends after a failure of the device: %s", error)
    if num_left := _host.destroy(handle, _CLOSE_S):
        logger.error("the host tier's memory stays: %d of its threads did not end within %g s", num_left, _CLOSE_S)
