"""Outputs tell when a request was on the host tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from omniserve import Engine, Request, SamplingParams
from omniserve.core.request import RequestOutput, RequestTimes
from omniserve.engine.outputs import OutputCollector
from tests.server.tokenizers_for_tests import byte_level_tokenizer


def test_stays_on_the_host_tier_are_told_once_and_lie_within_the_decode(make_engine: Callable[..., Engine]) -> None:
    options = {"swap_in_delay_s": 0.0, "min_residence_s": 0.0}
    engine = make_engine(device_blocks=12, host_threads=1, scheduler_options=options)
    for i in range(8):
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.add(Request(prompt_token_ids=[3 + i] * 9, sampling=sampling, service_class="BE"))
    outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    num_stays = 0
    for of_one in outputs.values():
        *before, last = of_one
        stays = [stay for output in of_one for stay in output.host_stays]
        num_stays += len(stays)
        assert last.times is not None and last.times.first_token_s is not None and last.times.finished_s is not None
        moments = [last.times.first_token_s, *(moment for stay in stays for moment in stay), last.times.finished_s]
        assert moments == sorted(moments) and last.times.host_since_s is None
        assert stays or not last.num_host_tokens
        for output in before:
            assert output.times is not None
            since_s = output.times.host_since_s
            assert since_s is None or any(start == since_s for start, _ in stays), "a stay that was never told"
    assert num_stays > 0 and engine.stats().scheduler.swaps_out > 0


def test_a_stop_string_ends_the_stay_too() -> None:
    tokenizer = byte_level_tokenizer()
    collector = OutputCollector(tokenizer)
    collector.open("r", Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=9, stop=("x",))))
    output = RequestOutput(
        request_id="r",
        service_class="BE",
        new_token_ids=tuple(tokenizer.encode("x")),
        times=RequestTimes(arrival_s=1.0, host_since_s=4.0),
        host_stays=((2.0, 3.0),),
    )
    output = collector.push(output, 5.0)
    assert output.finished and output.host_stays == ((2.0, 3.0), (4.0, 5.0))
    assert output.times == RequestTimes(arrival_s=1.0, finished_s=5.0)
