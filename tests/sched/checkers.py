"""What every history of requests must keep, a class for each property."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from omniserve.core.errors import RequestRejected
from omniserve.core.lora import LoadLoRA
from omniserve.core.plan import Bound, PiggybackEntry, StepPlan
from omniserve.core.request import SLO, FinishReason, Pooling, Request, RequestOutput, ServiceClass, Stay
from omniserve.core.work import MoveDirection
from omniserve.kv import Tier
from omniserve.kv.base import KVManager
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.kv.host_prefixes import PrefixPool
from omniserve.kv.two_tiers import TwoTierKVManager
from omniserve.latency import features_of
from omniserve.sched import SCHEDULERS
from omniserve.sched.admission import LARGEST_MARGIN
from omniserve.sched.state import RequestState
from tests.kv.free_blocks import free_block_ids
from tests.sched import hybrid, preemptible
from tests.sched.fake_device import expected_tokens
from tests.sched.histories import Checker, History
from tests.sched.limits import BLOCK

WITH_ADMISSION = ("omniserve", "omniserve-paper", "neo", "neo-paper", "apex", hybrid.NAME, preemptible.DEFERRING)


class Tokens(Checker):
    """Each request gets exactly its tokens, unless it was aborted or failed: then it gets the first of them."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.got: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.num_tokens = 0

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.got[output.request_id] += output.new_token_ids
            self.num_tokens += len(output.new_token_ids)
            assert output.num_output_tokens == len(self.got[output.request_id])
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def on_abort(self, request_id: str, output: RequestOutput) -> None:
        self.reasons[request_id] = FinishReason.ABORT
        assert output.num_output_tokens == len(self.got[request_id])

    def on_reuse(self, request_id: str) -> None:
        self._check(request_id)
        del self.got[request_id], self.reasons[request_id]

    def at_end(self) -> None:
        assert self.reasons.keys() == self.history.requests.keys()
        for request_id in self.history.requests:
            self._check(request_id)
        stats = self.sched.stats()
        assert sum(stats.output_tokens.values()) == self.num_tokens
        accounts = [account for of_class in self.sched.requests.accounts.values() for account in of_class]
        assert sum(account.output_tokens for account in accounts) == self.num_tokens
        assert not any(account.num_unfinished for account in accounts)
        self.reached["stopped"] += Counter(self.reasons.values())[FinishReason.STOP]
        self.reached["pending"] += self.device.num_pending
        self.reached["preemptions"] += stats.preemptions

    def _check(self, request_id: str) -> None:
        request, got, reason = self.history.requests[request_id], self.got[request_id], self.reasons[request_id]
        want = expected_tokens(tuple(request.prompt_token_ids), request.sampling.max_tokens)
        stops = [index for index, token in enumerate(want) if token in request.sampling.stop_token_ids]
        want = want[: stops[0] + 1] if stops else want
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            want = want[: len(got)]
        elif reason is FinishReason.TIMEOUT:
            assert request.max_queue_s is not None
            want = []
        else:
            assert reason is (FinishReason.STOP if stops else FinishReason.LENGTH), request_id
        assert got == want, request_id


class HostStays(Checker):
    """A request that ends has told all its stays on the host tier, one after the other."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.stays: dict[str, list[Stay]] = defaultdict(list)

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stays = self.stays[output.request_id]
            stays += output.host_stays
            if output.finish_reason is not None:
                self._check(output, stays)

    def on_reuse(self, request_id: str) -> None:
        self.stays.pop(request_id, None)

    def _check(self, output: RequestOutput, stays: list[Stay]) -> None:
        times, overlaps = output.times, self.history.options.overlaps
        assert times is not None and times.finished_s is not None and times.host_since_s is None
        assert stays or not output.num_host_tokens, f"{output.request_id} decoded on the host without having been there"
        if stays:
            # The first stay may begin as the first token is pending, if steps overlap.
            assert overlaps or times.first_token_s is not None, "it went there before it decoded"
            since_s = 0.0 if overlaps else times.first_token_s or 0.0
            moments = [since_s, *itertools.chain.from_iterable(stays), times.finished_s]
            assert moments == sorted(moments), (output.request_id, moments)

    def at_end(self) -> None:
        stats, device = self.sched.stats(), self.device
        self.reached.update(
            joins=device.num_joins, late_joins=device.num_late_joins, doomed=device.num_doomed,
            missed=device.num_missed, pipelined=device.num_pipelined, hybrid=device.num_hybrid,
            swaps_out=stats.swaps_out, swaps_in=stats.swaps_in, failed_returns=device.num_failed_returns,
        )  # fmt: skip
        if not self.history.options.has_prefixes:
            self.reached["returns_of_dead" if device.is_down else "failed_restores"] += device.num_failed_returns


class LSOnDevice(Checker):
    """No LS row leaves the device, unless the policy says that LS requests decode on the host (``offloads_ls``)."""

    def after_plan(self, plan: StepPlan) -> None:
        states = self.sched.requests.states
        rows = [*plan.entries, *plan.joins, *plan.pipelined]
        num_rows = sum(states[row.request_id].kind is ServiceClass.LS for row in rows)
        num_holders = sum(state.kind is ServiceClass.LS and state.slot >= 0 for state in states.values())
        if not SCHEDULERS.get(self.history.scheduler).offloads_ls:
            assert num_rows == num_holders == 0, "an LS request left the device"
        self.reached["ls_on_host"] += num_rows


class Places(Checker):
    """There are at most ``max_num_seqs`` requests of a kind on the device, and no BE request returns to a full one."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.most = self.sched.requests.limits.config.max_num_seqs
        for name in ("start", "start_restore"):
            setattr(self.sched.requests.moves, name, self._watched(getattr(self.sched.requests.moves, name)))

    def after_plan(self, plan: StepPlan) -> None:
        if self._may_check():
            assert max(self._holding().values()) <= self.most, self._holding()

    def _may_check(self) -> bool:
        # A request that fails to leave the device stays there, over any limit.
        return not self.history.options.failure_rate and not self.device.is_down

    def _holding(self) -> Counter[ServiceClass]:
        """Return how many requests of each kind are on the device or on their way to it."""
        holding = Counter({kind: len(self.sched.requests.device[kind]) for kind in ServiceClass})
        moving = self.sched.requests.moves.under_way.values()
        holding.update(state.kind for state, move in moving if move.direction is MoveDirection.TO_DEVICE)
        return holding

    def _watched(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_and_check(state: RequestState, *args: Any, **kwargs: Any) -> Any:
            begun = begin(state, *args, **kwargs)
            if begun and self._may_check() and state.kind is ServiceClass.BE:
                (move,) = (move for moved, move in self.sched.requests.moves.under_way.values() if moved is state)
                is_full = self._holding().total() > self.most
                assert not is_full or move.direction is MoveDirection.TO_HOST, self._holding()
            return begun

        return begin_and_check


class Blocks(Checker):
    """All blocks are accounted for after each step, no request holds more than it needs, and none keeps any."""

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        self.sched.check_integrity()
        requests = self.sched.requests
        for state in requests.states.values():
            held, needed = requests.kv.num_blocks(state.request_id), requests.memory.blocks_for(state)
            if state.away is not None:  # drafts that are dropped on the way keep their blocks
                needed = -(-(state.num_tokens + requests.limits.max_host_drafts) // BLOCK)
            assert held <= needed, f"{state.request_id} holds {held} blocks, {needed} would do"
        if step % 8 == 0:
            self._check_by_class()

    def _check_by_class(self) -> None:
        """Verify that the classes' blocks add up to those in use, but for shared ones and unneeded copies."""
        kv, stats, usage = self.sched.requests.kv, self.sched.stats(), self.sched.requests.kv.usage()
        sharers = kv._device.sharers.values() if isinstance(kv, BidirectionalKVManager) else ()
        in_use = usage.device_used + sum(kv.tier(be) is not None for _, be in sharers), usage.host_used - _given_up(kv)
        by_class = sum(stats.device_blocks_by_class.values()), sum(stats.host_blocks_by_class.values())
        if self.sched.requests.prefixes.is_on:
            assert by_class[0] >= in_use[0] and by_class[1] >= in_use[1]
        else:
            assert by_class == in_use

    def at_end(self) -> None:
        kv, stats = self.sched.requests.kv, self.sched.stats()
        usage = kv.usage()
        assert usage.device_used == usage.host_used == 0
        if not self.history.options.has_prefixes:
            assert len(free_block_ids(kv, Tier.DEVICE)) == usage.device_total, "a request that ended still keeps KV"
        assert not (self.history.options.has_states and stats.resumed_tokens), "no state stands where kept tokens end"
        shared = getattr(kv, "_device", None)
        self.reached.update(
            checkpoints=stats.checkpoints, resumed=stats.resumed_tokens, restored=self.device.num_restored,
            relocated=self.device.num_relocated, shared=getattr(shared, "num_shared_blocks", 0),
            overwritten=getattr(shared, "num_overwritten_tokens", 0),
        )  # fmt: skip


def _given_up(kv: KVManager) -> int:
    """Return the number of host blocks that unneeded copies go to."""
    if not isinstance(kv, TwoTierKVManager):
        return 0
    blocks = [move.dst_block_ids for move, _ in kv.moves._abandoned.values()]
    if isinstance(kv, BidirectionalKVManager):
        blocks += [tuple(flight.copies) for flight in kv._saved._flights.values() if not flight.is_wanted]
    checkpoints = kv._copies.checkpoints
    wanted = [checkpoint.flight for checkpoint in checkpoints._checkpoints.values()]
    blocks += [move.dst_block_ids for move in checkpoints._flights.values() if move not in wanted]
    return sum(map(len, blocks))


class Prefixes(Checker):
    """Counts what was found in the prefix cache: what is found there wrongly makes other tokens."""

    @classmethod
    def applies(cls, history: History) -> bool:
        return history.options.has_prefixes

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        kv = self.sched.requests.kv
        if isinstance(kv, TwoTierKVManager):
            pool = kv._tables.pools[Tier.HOST]
            assert isinstance(pool, PrefixPool)
            self.reached["shared_on_host"] += any(num_users > 1 for num_users in pool._num_users.values())

    def at_end(self) -> None:
        requests = self.sched.requests
        self.reached.update(
            cached=sum(requests.prefixes.num_cached_tokens.values()),
            came_back=sum(requests.prefixes_on_host.num_restored_tokens.values()),
            read=self.device.num_read_blocks, failed_disk_copies=self.device.num_failed_disk_copies,
        )  # fmt: skip


class Drafts(Checker):
    """Drafts are counted alike by device, scheduler and outputs; preemptible rows have none."""

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.num_accepted = self.num_rejected = 0

    def after_plan(self, plan: StepPlan) -> None:
        leaving = (chunk for chunk in plan.chunks if chunk.is_preemptible or chunk.leaves_at)
        assert not any(chunk.num_drafts for chunk in leaving)

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        self.num_accepted += sum(output.num_accepted_drafts for output in outputs)
        self.num_rejected += sum(output.num_rejected_drafts for output in outputs)

    def at_end(self) -> None:
        stats, device = self.sched.stats(), self.device
        assert stats.accepted_drafts + stats.rejected_drafts == device.num_drafts >= device.num_right_drafts
        assert stats.accepted_drafts <= device.num_right_drafts, "what came behind the end was output"
        assert (stats.accepted_drafts, stats.rejected_drafts) == (self.num_accepted, self.num_rejected)
        self.reached.update(
            right_drafts=device.num_right_drafts, wrong_drafts=device.num_drafts - device.num_right_drafts,
            host_drafts=device.num_host_drafts, dropped_drafts=device.num_dropped_drafts,
        )  # fmt: skip


class Halts(Checker):
    """Rows that leave a step between two layers are counted; those of higher classes defer others."""

    def after_plan(self, plan: StepPlan) -> None:
        if plan.decision is not None:
            self.reached["deferred"] += any(out.bound is Bound.DEFERRED for out in plan.decision.left_out)

    def at_end(self) -> None:
        assert self.sched.stats().layer_preemptions == self.device.num_halts + self.device.num_planned
        self.reached.update(halts=self.device.num_halts, planned=self.device.num_planned)


class Admission(Checker):
    """What is refused are LS requests which would miss their TTFT, and by policies with admission control alone."""

    def on_reject(self, request: Request, slo: SLO, error: RequestRejected) -> None:
        assert self.history.scheduler in WITH_ADMISSION, "it has no admission control"
        if error.required_s is not None:
            assert error.required_s == request.deadline_s and error.predicted_s is not None
            return
        assert self.history.kinds[request.service_class] is ServiceClass.LS and slo.ttft_s is not None
        assert error.predicted_ttft_s is not None
        assert error.predicted_ttft_s > (1 - LARGEST_MARGIN) * slo.ttft_s


class BoundedSteps(Checker):
    """Best-effort work and drafts keep a step's bound, and no LS prompt gives way to best-effort work."""

    @classmethod
    def applies(cls, history: History) -> bool:
        return history.oracle is not None and SCHEDULERS.get(history.scheduler).predicts

    def _seconds(self, plan: StepPlan) -> list[float]:
        """Return what a plan is predicted to take if the host tier was not at work before, and if it was."""
        oracle = self.sched.policy.forecast
        assert oracle is not None
        features = [features_of(plan, oracle.shape, host_works=works) for works in (False, True)]
        return [oracle.predictor.step_s(each) if not plan.is_empty else 0.0 for each in features]

    def after_plan(self, plan: StepPlan) -> None:
        decision, oracle = plan.decision, self.sched.policy.forecast
        assert decision is not None and oracle is not None
        assert decision.predicted_s is not None and decision.predicted_ls_s is not None
        kinds = {self.sched.requests.states[chunk.request_id].kind for chunk in plan.chunks}
        has_be = ServiceClass.BE in kinds or plan.entries or plan.joins
        # The prediction is of just this plan (what is unknown here is whether the tier was at work already).
        at_least = seconds = self._seconds(plan)
        if getattr(self.sched.policy.options, "defer_tokens", "off") != "off":
            # Decodes that pass some layers count for a part of what they take.
            chunks = plan.chunks
            whole = tuple(c for c in chunks if len(c.token_ids) > 1 or not (c.leaves_at or c.from_layer))
            at_least = self._seconds(dataclasses.replace(plan, chunks=whole))
        found = decision.predicted_s
        assert any(a - 1e-9 < found < b + 1e-9 for a, b in zip(at_least, seconds, strict=True)), (found, seconds)
        is_bounded = any(chunk.num_drafts for chunk in plan.chunks) or (ServiceClass.LS in kinds and has_be)
        if is_bounded and decision.bound_s is not None:
            assert decision.predicted_s <= decision.bound_s + 1e-9, "best-effort work or drafts beyond the bound"
        for left_out in decision.left_out if has_be else ():
            if left_out.work == "LS prefill":
                # Piggyback rows are no device rows: they take none of the token budget.
                tokens = {Bound.TOKENS} if ServiceClass.BE not in kinds else set()
                allowed = {Bound.MEMORY, Bound.REQUESTS, Bound.TIME} | tokens
                assert left_out.bound in allowed, "an LS prompt gave way to BE work"
                if left_out.bound is Bound.TIME:
                    assert decision.predicted_s <= (decision.bound_s or 0.0) + 1e-9
        self.reached["bounded"] += any(left_out.bound is Bound.TIME for left_out in decision.left_out)


class Kinds(Checker):
    """Prompts are read once for what they tell, and rows have the slot of their adapter, which has been read."""

    @classmethod
    def applies(cls, history: History) -> bool:
        return history.options.has_kinds

    def after_plan(self, plan: StepPlan) -> None:
        states = self.sched.requests.states
        begun = (row for row in plan.pipelined if isinstance(row, PiggybackEntry))
        for row in (*plan.chunks, *plan.entries, *begun):
            if (state := states.get(row.request_id)) is None:
                continue  # it has ended since the plan was made
            digest = None if state.lora is None else state.lora.digest
            assert self.device.adapters.get(row.lora_slot) == digest, (row.request_id, row.lora_slot)
        used = {state.lora_slot for state in states.values() if state.has_kv}
        assert not any(load.slot in used for load in plan.side_work(LoadLoRA)), "an adapter that is used is replaced"

    def after_results(self, step: int, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            request = self.history.requests[output.request_id]
            prompt, is_whole = request.prompt_token_ids, output.finish_reason is FinishReason.LENGTH
            if output.prompt_logprobs or (is_whole and request.sampling.max_tokens == 0):
                told = [] if request.sampling.prompt_logprobs is None else prompt[1:]
                assert [each.token_id for each in output.prompt_logprobs] == [*told], output.request_id
                assert [each.logprob for each in output.prompt_logprobs] == [-row for row in range(len(told))]
                self.reached["scored"] += bool(told)
            if is_whole and request.sampling.pooling is not None:
                num_rows = len(prompt) if request.sampling.pooling == Pooling.MEAN else 1
                assert output.embedding == (num_rows, len(prompt) - 1)
                self.reached["pooled"] += 1
            self.reached["impatient"] += output.finish_reason is FinishReason.TIMEOUT

    def at_end(self) -> None:
        self.reached["adapters"] += self.device.num_loads


CHECKERS = (Tokens, Kinds, HostStays, LSOnDevice, Places, Blocks, Prefixes, Drafts, Halts, Admission, BoundedSteps)
