"""A device and a host tier made of dictionaries: they hold token ids where real ones hold keys and values.

What a token "attends" to is read back from the blocks of the plan, so a wrong block, a block reused too early or a
lost copy changes the tokens that come out. ``expected_tokens`` says what an undisturbed request yields.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set

from omniserve.core.lora import LoadLoRA
from omniserve.core.plan import (
    PENDING_TOKEN,
    DeviceChunk,
    PiggybackEntry,
    PiggybackJoin,
    SampledToken,
    StepOutput,
    StepPlan,
)
from omniserve.core.request import TokenLogprob
from omniserve.core.work import AttentionResult, CancelTask, DiskCopy, Done, HostEvent, KVMove, MoveDirection, SlotCopy
from tests.sched.fake_states import FakeStates

VOCAB = 1000


def next_token(context: tuple[int, ...]) -> int:
    """A 'model': the next token depends on every token and its place."""
    return hash(context) % VOCAB


def expected_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class FakeDevice:
    """Executes plans and, beside them, host attention and moves, in an order drawn from ``rng``.

    Args:
        failure_rate: Chance that a host task or a move fails.
        halt_rate: Chance that preemptible rows of a step leave it between two layers.
    """

    def __init__(
        self, *, block_size: int, num_layers: int, max_tokens: int, rng: random.Random, failure_rate: float = 0,
        halt_rate: float = 0, has_disk: bool = False,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        self.rng = rng
        self.failure_rate = failure_rate
        self.disk_rng = random.Random(rng.randrange(1 << 30) if has_disk else 0)
        self.halt_rate = halt_rate
        self.halted: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        """Request id -> layer, start and tokens of a chunk that left a step."""
        self.must_leave: Callable[[], Set[str]] | None = None
        """Asked then which requests' rows leave; None: those of all preemptible ones do."""
        self.num_halts = self.num_planned = 0
        self.is_down = False
        self.kv: dict[tuple[str, int], int] = {}
        """(tier, token slot) -> token id."""
        self.running: list[AttentionResult] = []
        self.cancelled: list[AttentionResult] = []
        """Events of slots that were cancelled when they had no task."""
        self.moves: dict[int, KVMove] = {}
        self._seen: dict[int, list[int | None]] = {}
        """Move id -> what its source held when it began."""
        self.disk_copies: dict[int, DiskCopy] = {}
        self.disk: dict[int, tuple[bytes, list[int | None]]] = {}
        """Slot of the file -> the key and the tokens that it holds."""
        self.num_read_blocks = 0
        self.num_failed_disk_copies = 0
        self.lora_rng = random.Random(0)
        self.loads: dict[int, LoadLoRA] = {}
        """Adapters that are being read."""
        self.adapters: dict[int, str] = {}
        """Slot -> digest of the adapter that has been read into it."""
        self.num_loads = 0
        self.pooled: dict[str, list[int]] = {}
        """Request id -> positions of the rows in the sum of its mean."""
        self.abandoned: Set[int] = frozenset()
        """The scheduler's abandoned moves: they read blocks that others write, and write blocks that nobody reads."""
        self.sharers: Mapping[int, tuple[str, str]] = {}
        """Device blocks that two requests hold, for a KV manager that shares blocks."""
        self.bound: dict[int, PiggybackEntry] = {}
        self.on_the_way: dict[int, tuple[int, ...]] = {}
        """Host slot -> its token, and the drafts that are still with it."""
        self.away: dict[int, int] = {}
        """Host slot -> layer its token is at."""
        self.done: set[int] = set()
        self.sampled: dict[str, tuple[SampledToken, ...]] = {}
        """Tokens of the last step that sampled any."""
        self.states = FakeStates(num_layers)
        self.num_pending = 0
        """Tokens that a plan waited for."""
        self.num_drafts = 0
        """Drafts in the chunks, and how many of them were right."""
        self.num_right_drafts = 0
        self.num_host_drafts = 0
        """Drafts that passed the layers on the host tier."""
        self.num_dropped_drafts = 0
        """Drafts that found no seat on the way."""
        self.num_joins = 0
        self.num_late_joins = 0
        """Joins whose result came in the course of their step."""
        self.num_missed = 0
        """Joins that did not join."""
        self.num_doomed = 0
        """Missed joins of tokens that had missed the step before, too."""
        self.num_pipelined = 0
        self.num_hybrid = 0
        """Pipelined rows of the first sub-batch."""
        self.num_restored = 0
        """Blocks that were copied to the device."""
        self.num_relocated = 0
        """Blocks that were copied on the device."""
        self.num_failed_returns = 0
        """Moves to the device that failed."""

    def _slot(self, block_ids: Sequence[int], position: int, *, is_reversed: bool = False) -> int:
        offset = position % self.block_size
        offset = self.block_size - 1 - offset if is_reversed else offset
        return block_ids[position // self.block_size] * self.block_size + offset

    def _slots(self, block_ids: Sequence[int], *, is_reversed: bool = False) -> list[int]:
        num_slots = len(block_ids) * self.block_size
        return [self._slot(block_ids, position, is_reversed=is_reversed) for position in range(num_slots)]

    def _context(
        self, tier: str, block_ids: tuple[int, ...], length: int, *, is_reversed: bool = False
    ) -> tuple[int, ...]:
        return tuple(self.kv[tier, self._slot(block_ids, p, is_reversed=is_reversed)] for p in range(length))

    def _busy_slots(self) -> dict[str, set[int]]:
        """Blocks that a running copy or host task still uses."""
        busy: dict[str, set[int]] = {"device": set(), "host": set()}
        for move in self.moves.values():
            out = move.direction is MoveDirection.TO_HOST
            if move.move_id not in self.abandoned and not move.is_checkpoint:
                # Of a shared block what counts is what is copied.
                busy["device" if out else "host"] |= set(move.src_block_ids) - (self.sharers.keys() if out else set())
            busy["host" if out else "device"] |= set(move.dst_block_ids)
        for copy in self.disk_copies.values():
            busy["host"] |= set(copy.host_block_ids)
        for event in self.running:
            busy["host"] |= set(self.bound[event.slot].block_ids)
        return busy

    def _written_on_host(self) -> set[int]:
        """Host blocks that a running copy or host task writes; others may be read by several at a time."""
        moves = (move for move in self.moves.values() if move.direction is MoveDirection.TO_HOST)
        written = {block for move in moves for block in move.dst_block_ids}
        copies = (copy for copy in self.disk_copies.values() if not copy.to_disk)
        written |= {block for copy in copies for block in copy.host_block_ids}
        for event in self.running:
            written |= self._written_by(self.bound[event.slot])
        return written

    def _written_by(self, entry: PiggybackEntry) -> set[int]:
        return set(entry.block_ids[entry.position // self.block_size :])

    def _check_host_blocks(self, entry: PiggybackEntry, busy: Set[int], written: Set[int]) -> None:
        assert not self._written_by(entry) & busy, "a host block is written while another one uses it"
        assert not set(entry.block_ids) & written, "a host block is read while another one writes it"

    def _with_pending_tokens(self, plan: StepPlan) -> StepPlan:
        """Fill in what the plan waits for: the last step that computed anything sampled it."""
        chunks = tuple(
            dataclasses.replace(c, token_ids=(*c.token_ids[:-1], self.sampled[c.request_id][-1].token_id))
            if c.token_ids[-1] == PENDING_TOKEN
            else c
            for c in plan.chunks
        )
        entries = tuple(
            dataclasses.replace(e, token_id=self.sampled[e.request_id][-1].token_id)
            if e.token_id == PENDING_TOKEN
            else e
            for e in plan.entries
        )
        self.num_pending += sum(
            new != old for new, old in zip((*chunks, *entries), (*plan.chunks, *plan.entries), strict=True)
        )
        return dataclasses.replace(plan, chunks=chunks, entries=entries)

    def _settle_late_joins(self, plan: StepPlan) -> set[str]:
        """Let some of the results that late joins wait for come now; return the requests whose joins miss the step."""
        missed: set[str] = set()
        for layer in {join.layer for join in plan.joins}:
            here = [join for join in plan.joins if join.layer == layer]
            came: list[AttentionResult] = []
            absent: set[str] = set()
            for join in here:
                if join.is_ready:
                    continue
                at = join.slot, join.epoch, layer, join.position
                event = next((e for e in self.running if (e.slot, e.epoch, e.layer, e.position) == at), None)
                if event is None and self._is_done(join):
                    continue  # the event came when the plan was made
                if event is None:  # it was assumed to join the step before, and did not
                    self.num_doomed += 1
                    absent.add(join.request_id)
                elif self.rng.random() < 0.6 and self.rng.random() >= self.failure_rate and not self.is_down:
                    came.append(event)
                else:
                    absent.add(join.request_id)
            if plan.joins_as_one and absent:
                absent, came = {join.request_id for join in here}, []
            missed |= absent
            for event in came:  # nobody is told of it
                self.running.remove(event)
                self._finish(event)
                self.num_late_joins += 1
        self.num_missed += len(missed)
        return missed

    def _is_done(self, join: PiggybackJoin) -> bool:
        entry = self.bound[join.slot]
        at = self.away.get(join.slot), entry.epoch, entry.position
        return join.slot in self.done and at == (join.layer, join.epoch, join.position)

    def execute(self, plan: StepPlan) -> StepOutput:
        plan = self._with_pending_tokens(plan)
        assert all(PENDING_TOKEN not in chunk.token_ids for chunk in plan.chunks)
        assert plan.num_device_tokens <= self.max_tokens
        per_layer: Counter[int] = Counter()
        for row in (*plan.entries, *plan.joins):
            per_layer[row.layer if isinstance(row, PiggybackJoin) else -1] += row.num_rows
        assert max(per_layer.values(), default=0) <= plan.num_piggyback_seats
        assert not any(row.draft_ids for row in plan.pipelined)
        for copy in plan.side_work(SlotCopy):
            self.num_relocated += 1
            for slot in range(copy.begin, copy.end):
                old, new = copy.source_block * self.block_size + slot, copy.target_block * self.block_size + slot
                self.kv.pop(("device", new), None)
                if (token := self.kv.get(("device", old))) is not None:
                    self.kv["device", new] = token
        for cancel in plan.side_work(CancelTask):
            self._cancel(cancel.slot)
        busy, written = self._busy_slots(), self._written_on_host()
        to_device = (m for m in self.moves.values() if m.direction is MoveDirection.TO_DEVICE)
        arriving = {block for move in to_device for block in move.dst_block_ids}
        for move in plan.side_work(KVMove):
            self.moves[move.move_id] = move
            self._seen[move.move_id] = self._source(move)
        for copy in plan.side_work(DiskCopy):
            slots = [
                slot for other in self.disk_copies.values() if other.to_disk or copy.to_disk for slot in other.slots
            ]
            assert not set(slots) & set(copy.slots), "a slot is written while another copy uses it"
            self.disk_copies[copy.move_id] = copy
            if copy.to_disk:
                self._seen[copy.move_id] = [self.kv.get(("host", slot)) for slot in self._slots(copy.host_block_ids)]
                for slot in copy.slots:
                    self.disk.pop(slot, None)
        for load in plan.side_work(LoadLoRA):
            assert all(other.slot != load.slot for other in self.loads.values()), "two loads write one slot"
            self.loads[load.move_id] = load
            self.adapters.pop(load.slot, None)
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        ids = [c.request_id for c in plan.chunks] + [e.request_id for e in (*plan.entries, *plan.pipelined)]
        assert len(ids) == len(set(ids)), "a request is scheduled twice"
        logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
        embeddings: dict[str, tuple[float, ...]] = {}
        halted: dict[str, int] = {}
        halt_at = self.rng.randrange(self.num_layers) if plan.preemptible and self.rng.random() < self.halt_rate else 0
        keeps = self.rng.random() < 0.7
        leaving = plan.preemptible & self.must_leave() if halt_at and self.must_leave else plan.preemptible
        for chunk in plan.chunks:
            before = self.halted.pop(chunk.request_id, None)
            if chunk.from_layer:
                assert before == (chunk.from_layer, chunk.start, chunk.token_ids), "it goes on with what did not leave"
            if chunk.leaves_at:
                assert chunk.from_layer < chunk.leaves_at < self.num_layers and not chunk.num_drafts, "it leaves later"
                assert not (plan.pipelined and plan.hybrid), "device rows of such a step stay"
            is_asked = halt_at > 0 and chunk.request_id in leaving
            if chunk.leaves_at and not (is_asked and halt_at < chunk.leaves_at):
                self.num_planned += 1
                halted[chunk.request_id] = chunk.leaves_at
                self.halted[chunk.request_id] = (chunk.leaves_at, chunk.start, chunk.token_ids)
                continue
            if is_asked:
                self.num_halts += 1
                layer = max(halt_at, chunk.from_layer)
                halted[chunk.request_id] = layer if keeps or chunk.from_layer else 0
                if halted[chunk.request_id]:
                    self.halted[chunk.request_id] = (layer, chunk.start, chunk.token_ids)
                continue
            moves = [m for m in self.moves.values() if not m.is_checkpoint]
            moving = {m.request_id for m in moves if m.move_id not in self.abandoned}
            assert chunk.request_id not in moving, "a moving request is scheduled"
            first = chunk.start // self.block_size  # those before are read, as a copy to the host may, too
            assert not busy["device"] & set(chunk.block_ids[first:]), "a block is written while a copy is under way"
            assert not arriving & set(chunk.block_ids), "a block is used before its copy has come"
            for offset, token in enumerate(chunk.token_ids):
                slot = self._slot(chunk.block_ids, chunk.start + offset, is_reversed=chunk.is_reversed)
                self.kv["device", slot] = token
            self.states.advance(chunk.state_slot, 0, None, chunk.start, chunk.token_ids)
            if chunk.scores is not None:
                first = chunk.start + chunk.scores.first_row
                told = enumerate(chunk.scores.token_ids, start=first)
                logprobs[chunk.request_id] = tuple(TokenLogprob(token_id=t, logprob=-float(row)) for row, t in told)
            embeddings |= self._pool(chunk)
            if chunk.samples:
                length = chunk.start + len(chunk.token_ids)
                context = self._context("device", chunk.block_ids, length, is_reversed=chunk.is_reversed)
                self.states.check(chunk.state_slot, context)
                tokens[chunk.request_id] = self._verified(chunk.drafts, context)
        missed = self._settle_late_joins(plan)
        for join in plan.joins:
            if join.request_id in missed:
                continue
            assert join.slot in self.done and self.away[join.slot] == join.layer, "a join of what is not ready"
            entry = self.bound[join.slot]
            assert (entry.request_id, entry.epoch, entry.position) == (join.request_id, join.epoch, join.position)
            self.done.discard(join.slot)
            self.num_joins += 1
            self.states.advance(join.state_slot, join.layer + 1, join.layer + 1, join.position, [entry.token_id])
            rows = self.on_the_way[join.slot]
            assert rows[: join.num_rows] == (entry.token_id, *join.draft_ids), "drafts join that did not enter"
            self.num_dropped_drafts += len(rows) - join.num_rows
            self.on_the_way[join.slot] = rows[: join.num_rows]
            if join.layer == self.num_layers - 1:
                context = self._context("host", entry.block_ids, entry.position + join.num_rows)
                self.states.check(join.state_slot, context)
                self.num_host_drafts += len(join.draft_ids)
                tokens[join.request_id] = self._verified(join.draft_ids, context)
                del self.away[join.slot]
            else:
                self._send(entry, join.layer + 1)
        for entry in plan.entries:
            self._check_host_blocks(entry, busy["host"], written)
            self.bound[entry.slot] = entry
            self.on_the_way[entry.slot] = (entry.token_id, *entry.draft_ids)
            self.states.advance(entry.state_slot, 0, 0, entry.position, [entry.token_id])
            self._send(entry, 0)
        if tokens:
            self.sampled = tokens
        begun = {row.request_id for row in plan.pipelined if isinstance(row, PiggybackEntry)}
        if plan.hybrid:
            assert plan.hybrid <= begun and plan.chunks and not (plan.entries or plan.joins or plan.preemptible)
        self.num_hybrid += len(plan.hybrid)
        lost = frozenset(
            row.request_id for row in plan.pipelined if not self._run_through(row, busy["host"], written, tokens)
        )
        return StepOutput(
            missed=frozenset(missed), tokens=tokens, prompt_logprobs=logprobs, embeddings=embeddings, halted=halted,
            lost=lost,
        )  # fmt: skip

    def _pool(self, chunk: DeviceChunk) -> dict[str, tuple[float, ...]]:
        """Add the rows of a chunk that are pooled; return the number of all and the last one, if these are the last."""
        if chunk.pooled is None:
            return {}
        rows = range(chunk.start + chunk.pooled.first_row, chunk.start + len(chunk.token_ids))
        summed = [*self.pooled.pop(chunk.request_id, ()), *rows] if rows.start else [*rows]
        assert rows and summed == sorted(set(summed)), "a row is pooled twice"
        if chunk.pooled.total is None:
            self.pooled[chunk.request_id] = summed
            return {}
        assert len(summed) == chunk.pooled.total, "a row is not pooled"
        return {chunk.request_id: (float(len(summed)), float(summed[-1]))}

    def _run_through(
        self, row: PiggybackEntry | PiggybackJoin, busy: set[int], written: set[int],
        tokens: dict[str, tuple[SampledToken, ...]],
    ) -> bool:  # fmt: skip
        """Compute a pipelined token through all its layers; False if its host attention fails."""
        if isinstance(row, PiggybackEntry):
            assert row.token_id != PENDING_TOKEN
            is_away = row.slot in self.away and self.bound[row.slot].epoch == row.epoch
            assert not is_away, "a token enters while another one of its request is away"
            self.away.pop(row.slot, None)  # what the slot's last owner left
            self.done.discard(row.slot)
            self._check_host_blocks(row, busy, written)
            self.bound[row.slot] = row
        else:
            assert row.slot in self.done and self.away[row.slot] == row.layer, "a join of what is not ready"
            self.done.discard(row.slot)
            del self.away[row.slot]
        self.num_pipelined += 1
        entry = self.bound[row.slot]
        assert (entry.request_id, entry.epoch, entry.position) == (row.request_id, row.epoch, row.position)
        first = 0 if isinstance(row, PiggybackEntry) else row.layer + 1
        self.states.advance(row.state_slot, first, None, row.position, [entry.token_id])
        if self.is_down or self.rng.random() < self.failure_rate:
            return False
        self.kv["host", self._slot(entry.block_ids, entry.position)] = entry.token_id
        context = self._context("host", entry.block_ids, entry.position + 1)
        self.states.check(row.state_slot, context)
        tokens[row.request_id] = (SampledToken(token_id=next_token(context)),)
        return True

    def _verified(self, drafts: tuple[int, ...], context: tuple[int, ...]) -> tuple[SampledToken, ...]:
        """Return the tokens of rows that sample: those of the drafts' rows as long as the drafts are right."""
        self.num_drafts += len(drafts)
        tokens: list[SampledToken] = []
        for index in range(len(drafts) + 1):
            tokens.append(SampledToken(token_id=next_token(context[: len(context) - len(drafts) + index])))
            if index < len(drafts) and tokens[-1].token_id != drafts[index]:
                break
        self.num_right_drafts += len(tokens) - 1
        return tuple(tokens)

    def _send(self, entry: PiggybackEntry, layer: int) -> None:
        self.away[entry.slot] = layer
        self.running.append(AttentionResult(slot=entry.slot, epoch=entry.epoch, layer=layer, position=entry.position))

    def _cancel(self, slot: int) -> None:
        """Let the slot's task end as one that has failed; also if its event is out already."""
        entry, task = self.bound[slot], next((event for event in self.running if event.slot == slot), None)
        layer = self.away.get(slot, 0)
        failed = AttentionResult(slot=slot, epoch=entry.epoch, layer=layer, position=entry.position, ok=False)
        if task is None:
            self.cancelled.append(failed)
        else:
            self.running[self.running.index(task)] = failed

    def _finish(self, event: AttentionResult) -> None:
        entry = self.bound[event.slot]
        for position, token in enumerate(self.on_the_way[event.slot], start=entry.position):
            self.kv["host", self._slot(entry.block_ids, position)] = token
        self.done.add(event.slot)

    def poll(self, chance: float) -> list[HostEvent]:
        """Let each running task and move end with this chance; return the events in any order."""
        events: list[HostEvent] = [*self.cancelled]
        self.cancelled = []
        for event in list(self.running):
            if self.rng.random() < chance or self.is_down:
                self.running.remove(event)
                failed = not event.ok or self.is_down or self.rng.random() < self.failure_rate
                if not failed:
                    self._finish(event)
                events.append(dataclasses.replace(event, ok=not failed))
        for move in list(self.moves.values()):
            if self.rng.random() < chance or self.is_down:
                del self.moves[move.move_id]
                failed = self.is_down or self.rng.random() < self.failure_rate
                if not failed:
                    self._copy(move)
                    self.num_restored += len(move.src_block_ids) * (move.direction is MoveDirection.TO_DEVICE)
                elif move.direction is MoveDirection.TO_DEVICE:
                    self.num_failed_returns += 1
                del self._seen[move.move_id]
                events.append(Done(move_id=move.move_id, ok=not failed))
        for copy in list(self.disk_copies.values()):
            if self.disk_rng.random() < chance:
                del self.disk_copies[copy.move_id]
                failed = self.disk_rng.random() < self.failure_rate
                self._copy_disk(copy, failed=failed)
                self.num_failed_disk_copies += failed
                seconds = self.disk_rng.choice([0.0, 0.001, 0.1])
                events.append(Done(move_id=copy.move_id, ok=not failed, seconds=seconds))
        for load in list(self.loads.values()):
            if self.lora_rng.random() < chance:
                del self.loads[load.move_id]
                failed = self.lora_rng.random() < self.failure_rate
                self.num_loads += 1
                if not failed:
                    self.adapters[load.slot] = load.lora.digest
                events.append(Done(move_id=load.move_id, ok=not failed, message="gone" if failed else ""))
        self.rng.shuffle(events)
        return events

    def _copy_disk(self, copy: DiskCopy, *, failed: bool) -> None:
        """Copy blocks to the file, or compare their keys and copy them back; a copy that fails does so in part."""
        now = [self.kv.get(("host", slot)) for slot in self._slots(copy.host_block_ids)]
        seen = self._seen.pop(copy.move_id, [])
        count = self.disk_rng.randrange(len(copy.slots)) if failed else len(copy.slots)
        for index, (key, slot) in enumerate(zip(copy.keys[:count], copy.slots, strict=False)):
            tokens = slice(index * self.block_size, (index + 1) * self.block_size)
            if copy.to_disk:
                assert seen[tokens] == now[tokens], "a block was written while it was copied"
                self.disk[slot] = key, now[tokens]
                continue
            written, values = self.disk[slot]
            assert written == key, "a slot holds another block"
            self.num_read_blocks += 1
            for at, token in zip(self._slots(copy.host_block_ids)[tokens], values, strict=True):
                self.kv.pop(("host", at), None)
                if token is not None:
                    self.kv["host", at] = token

    def _source(self, move: KVMove) -> list[int | None]:
        to_host = move.direction is MoveDirection.TO_HOST
        slots = self._slots(move.src_block_ids, is_reversed=to_host and move.is_reversed)
        return [self.kv.get(("device" if to_host else "host", slot)) for slot in slots]

    def _copy(self, move: KVMove) -> None:
        """Copy a token only if it stood there all the time: a real copy may read it early or late."""
        to_host = move.direction is MoveDirection.TO_HOST
        tier = "host" if to_host else "device"
        targets = self._slots(move.dst_block_ids, is_reversed=not to_host and move.is_reversed)
        for slot, before, now in zip(targets, self._seen[move.move_id], self._source(move), strict=True):
            self.kv.pop((tier, slot), None)
            if before is not None and before == now:
                self.kv[tier, slot] = before
