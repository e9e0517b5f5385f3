"""Loads whose steps are measured: of both classes mixed, or over a grid of rows and contexts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from omniserve.core.request import Request, SamplingParams, ServiceClass

MEAN_ACTIVE = 12.0
"""Requests of each class that a mixed load has at a time, on average."""
_ROUNDS = 4
_DECODE_STEPS = 3
"""Number of steps that each batch of decodes has."""
_APART = 1 << 20
"""More steps than the requests of a point take: those of the next point come when they have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request and when it comes. Time is counted in steps, so that a load has one shape on any machine."""

    at_step: int
    request: Request


def mixed_load(
    seed: int, *, num_steps: int, vocab_size: int, max_prompt: int, max_output: int, mean_active: float = MEAN_ACTIVE
) -> list[Arrival]:
    """Draw a load of both classes.

    Lengths are log-normal. LS requests arrive at a rate that changes every 20 to 60 steps between little and much; BE
    requests come in batches.

    Args:
        num_steps: The last arrival comes before this step.
        max_prompt: Longest prompt, in tokens.
        max_output: Longest output.
        mean_active: Requests of each class that are there at a time, on average, if none waits.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []

    def draw(service_class: ServiceClass, at_step: int) -> int:
        prompt = min(max_prompt, max(1, round(rng.lognormvariate(0, 1.0) * max_prompt / 8)))
        output = min(max_output, max(1, round(rng.lognormvariate(0, 0.8) * max_output / 4)))
        tokens = rng.choices(range(vocab_size), k=prompt)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(prompt_token_ids=tokens, sampling=sampling, service_class=service_class)
        arrivals.append(Arrival(at_step=at_step, request=request))
        return output

    mean_output = max_output / 4 * 1.3
    level, until = 1.0, 0
    next_batch = 0
    for step in range(num_steps):
        if step >= until:
            level, until = rng.choice((0.1, 0.5, 1.0, 2.0)), step + rng.randint(20, 60)
        # At most a few at once: a Poisson draw's tail is of no use here.
        for _ in range(4):
            if rng.random() < level * mean_active / mean_output / 4:
                draw(ServiceClass.LS, step)
        if step >= next_batch:
            size = rng.randint(1, round(2 * mean_active))
            outputs = [draw(ServiceClass.BE, step) for _ in range(size)]
            next_batch = step + max(1, round(sum(outputs) / mean_active))
    return arrivals


def grid_load(seed: int, *, vocab_size: int, max_step: int, max_tokens: int, max_requests: int) -> list[Arrival]:
    """Return best-effort requests whose steps are the points of a grid, in an order drawn anew for each of four rounds.

    Prefill has P rows behind C tokens: P is a power of two up to ``max_step``, C is 0 or ``max_step`` times a power of
    two, as a step computes that many of a longer prompt's tokens. Decode has g requests with C tokens each, powers of
    two both. Points are apart: no step has rows of two of them.

    Paper: conserve 4.2 (a grid of P and C), bros 4.1 (powers of two, prefill and decode apart).

    Args:
        max_step: Token budget of a step.
        max_tokens: Most tokens of all requests that are there at a time.
        max_requests: Most requests at a time.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for _ in range(_ROUNDS):
        points = [*_prefills(max_step, max_tokens), *_decodes(max_requests, max_step, max_tokens)]
        rng.shuffle(points)
        for num_requests, prompt, output in points:
            at_step = len(arrivals) * _APART
            for _ in range(num_requests):
                tokens = rng.choices(range(vocab_size), k=prompt)
                sampling = SamplingParams(max_tokens=output, ignore_eos=True)
                request = Request(prompt_token_ids=tokens, sampling=sampling, service_class=ServiceClass.BE)
                arrivals.append(Arrival(at_step=at_step, request=request))
    return arrivals


def _powers(most: int) -> Iterator[int]:
    """Yield the powers of two up to ``most``."""
    return itertools.takewhile(lambda power: power <= most, (1 << i for i in itertools.count()))


def _prefills(max_step: int, max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (requests, prompt, output) of the grid's prefills."""
    for context in (0, *(max_step * power for power in _powers(max_tokens // max_step))):
        for rows in _powers(max_step):
            if context + rows < max_tokens:
                yield 1, context + rows, 1


def _decodes(max_requests: int, max_step: int, max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the same of its decodes: the requests of a point decode together in some steps, the last of its own."""
    for count in _powers(max_requests):
        for context in _powers(max_tokens):
            # The last prompt is computed at most so many steps after the first, whose request decodes meanwhile.
            output = 1 + _DECODE_STEPS + -(-count * context // max(1, max_step - count))
            if count * (context + output) <= max_tokens:
                yield count, context, output
