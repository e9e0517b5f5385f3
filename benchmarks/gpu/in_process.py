"""A load of LS and BE requests on an engine in this process: what a client over HTTP would have seen, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.common.client import BE_TIER, LoadRequest, RequestRecord
from omniserve import SLO, Engine, Request, RequestOutput, RequestRejected, SamplingParams

_IDLE_WAIT_S = 0.002


class InProcessLoad:
    """Requests that are sent at their times, whatever becomes of those before.

    Args:
        engine: Without requests.
        requests: Of token ids, in any order.
    """

    def __init__(self, engine: Engine, requests: Sequence[LoadRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self.records = [
            RequestRecord(service_tier=r.service_tier, send_at_s=r.send_at_s, num_prompt_tokens=len(r.prompt))
            for r in requests
        ]
        """One a request, in their order."""
        self._due = sorted(range(len(requests)), key=lambda i: requests[i].send_at_s, reverse=True)
        self._running: dict[str, RequestRecord] = {}
        self._began_s = 0.0

    def run(self, *, least_s: float, cutoff_s: float) -> float:
        """Step until all LS requests have ended, but for so long at least; return when that was.

        What is unfinished then is aborted.

        Args:
            least_s: Shortest time, unless everything has ended.
            cutoff_s: Longest time.
        """
        self._began_s = time.monotonic()
        now_s = 0.0
        while now_s < cutoff_s and self._goes_on(now_s, least_s):
            while self._due and self._requests[self._due[-1]].send_at_s <= now_s:
                self._send(self._due.pop())
            outputs = self._engine.step()
            now_s = time.monotonic() - self._began_s
            for output in outputs:
                self._book(output, now_s)
            if self._engine.last_plan_was_empty:
                self._wait()
        for request_id in self._running:
            self._engine.abort(request_id)
        while self._engine.has_unfinished:
            self._engine.step()
            self._engine.wait(_IDLE_WAIT_S)
        return now_s

    def _goes_on(self, now_s: float, least_s: float) -> bool:
        if now_s < least_s:
            return bool(self._due or self._running)
        ls_runs = any(record.service_tier != BE_TIER for record in self._running.values())
        return ls_runs or any(self._requests[i].service_tier != BE_TIER for i in self._due)

    def _wait(self) -> None:
        if self._engine.host_tier is not None:
            self._engine.wait(_IDLE_WAIT_S)
        else:
            time.sleep(_IDLE_WAIT_S / 4)

    def _send(self, index: int) -> None:
        wanted, record = self._requests[index], self.records[index]
        slo = SLO(ttft_s=wanted.slo[0], tpot_s=wanted.slo[1]) if wanted.slo is not None else None
        request = Request(
            prompt_token_ids=[int(token) for token in wanted.prompt],
            sampling=SamplingParams(max_tokens=wanted.max_tokens, ignore_eos=True),
            service_class="BE" if wanted.service_tier == BE_TIER else "LS",
            slo=slo,
            request_id=f"load-{index}",
        )
        record.sent_s = time.monotonic() - self._began_s
        try:
            self._engine.add(request, arrival_s=self._began_s + wanted.send_at_s)
        except RequestRejected:
            record.rejected = True
            return
        self._running[f"load-{index}"] = record
        record.predicted_ttft_s = self._engine.predicted_ttft_s(f"load-{index}")

    def _book(self, output: RequestOutput, now_s: float) -> None:
        record = self._running[output.request_id]
        if output.new_token_ids:
            record.token_times_s.append(now_s)
            record.last_token_s = now_s
            if record.first_token_s is None:
                record.first_token_s = now_s
        if output.finished:
            record.finished = True
            record.num_output_tokens = output.num_output_tokens
            del self._running[output.request_id]
