"""Counts: what a scheduler tells of its requests, in gauges and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from omniserve.core.stats import SchedulerStats, TenantStats
from omniserve.kv.base import Tier
from omniserve.sched.request_table import RequestTable


class Counts:
    """Counts tokens and refusals by class as they are told, and the requests and blocks of a table as it is asked."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._classes = [spec.name for spec in requests.limits.config.classes]
        self.output_tokens: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        """Tokens of prompts whose request has had its first token."""
        self.rejected: Counter[str] = Counter(dict.fromkeys(self._classes, 0))

    def num_tokens(self, service_classes: Iterable[str]) -> int:
        """Return the tokens of some classes, in and out."""
        return sum(self.prompt_tokens[name] + self.output_tokens[name] for name in service_classes)

    def stats(self) -> SchedulerStats:
        """Return gauges and counters."""
        requests = self._requests
        counters: dict[str, Any] = dict(requests.counters)
        for feature in requests.features.on:
            counters |= feature.stats()
        waiting, running = dict.fromkeys(self._classes, 0), dict.fromkeys(self._classes, 0)
        loras: dict[bool, set[str]] = {True: set(), False: set()}
        for state in requests.states.values():
            (running if state.has_kv else waiting)[state.service_class] += 1
            if state.lora is not None:
                loras[state.has_kv].add(state.lora.name)
        blocks = {tier: dict.fromkeys(self._classes, 0) for tier in Tier}
        for state in (*requests.states.values(), *requests.ended()):
            for tier, held in blocks.items():
                held[state.service_class] += requests.kv.num_held(state.request_id, tier)
        return SchedulerStats(
            waiting=waiting,
            running=running,
            device_blocks_by_class=blocks[Tier.DEVICE],
            host_blocks_by_class=blocks[Tier.HOST],
            host_requests=len(requests.residents.queue),
            host_token_steps=requests.residents.tokens.num_token_steps,
            output_tokens=dict(self.output_tokens),
            prompt_tokens=dict(self.prompt_tokens),
            checkpoints=requests.checkpoints.num_blocks_copied,
            cached_tokens={name: requests.prefixes.num_cached_tokens[name] for name in self._classes},
            restored_tokens={name: requests.prefixes_on_host.num_restored_tokens[name] for name in self._classes},
            loaded_tokens=requests.loads.num_tokens(),
            **counters,
            rejected=dict(self.rejected),
            running_loras=tuple(sorted(loras[True])),
            waiting_loras=tuple(sorted(loras[False])),
            tenants=self._tenant_stats(),
        )

    def _tenant_stats(self) -> dict[str, dict[str, TenantStats]]:
        accounts = {
            name: [each for each in of_class if each.tenant] for name, of_class in self._requests.accounts.items()
        }
        if not any(accounts.values()):
            return {}
        waiting = Counter(state.account for state in self._requests.states.values() if not state.has_kv)
        return {
            name: {
                each.tenant: TenantStats(
                    waiting=waiting[each],
                    running=each.num_unfinished - waiting[each],
                    prompt_tokens=each.prompt_tokens,
                    output_tokens=each.output_tokens,
                    virtual_time=each.virtual_time,
                )
                for each in of_class
            }
            for name, of_class in accounts.items()
        }
