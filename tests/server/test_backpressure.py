"""Slow readers, full queues, many connections, clients that leave: memory is bounded, and all is free afterwards."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import openai
import pytest
from fake_engine import SILENT, SLOW
from running import wait_until
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO, FinishReason, RequestOutput, SamplingParams, TokenLogprob
from omniserve.server.access.limits import Backlog, BodyReader
from omniserve.server.choice import Delta, TextForm, merge
from omniserve.server.completions.answers import CompletionShape
from omniserve.server.completions.protocol import CompletionRequest
from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening, ParsedCall
from omniserve.server.engines.client import Accepted
from omniserve.server.errors import ApiError
from omniserve.server.generate import EventStream
from omniserve.server.jobs import Fallback, Job
from omniserve.server.output_stream import OutputStream
from omniserve.server.telemetry.metrics import ServerMetrics
from omniserve.server.tokenizing.text import TextCodec
from tests.server.attack.sockets import connect, head, read_all, send

ABC = [byte_level_tokenizer()(letter).input_ids[0] for letter in "abc"]
# An answer of several megabytes, which no buffer between server and client holds.
BIG = {"model": "fake", "prompt": ABC, "max_tokens": 500, "n": 20, "logprobs": 20, "stream": True}


class RecordingClient:
    """Stands in for the engine: remembers what it was told."""

    def __init__(self):
        self.submitted, self.aborted = [], []

    def submit(self, request, arrival_s, events):
        self.submitted.append(request.request_id)

    def abort(self, request_id):
        self.aborted.append(request_id)


def alone(client):
    """Return the place of a call with a single engine."""
    return SimpleNamespace(
        client=client, note_sent=lambda: None, end=lambda: None, move_on=lambda error: False,
        last_error=lambda error: error,
    )  # fmt: skip


def started(num_choices=1, *, max_unread_tokens=None, stop=(), tools=(), at_once=False, interval_s=0.0):
    """Return a stream of outputs, its client and its backlog."""
    client, backlog = RecordingClient(), Backlog(["LS"], 100)
    parser = functools.partial(choose("", calls="hermes").parser, {name: {} for name in tools}, opening=Opening())
    job = Job(
        call_id="c",
        arrival_s=time.monotonic(),
        prompts=[[5]],
        samplings=[SamplingParams(max_tokens=10_000)] * num_choices,
        form=TextForm(stop=stop, parser=parser if tools else None, at_once=at_once),
        service_class="LS",
        slo=SLO(),
        max_unread_tokens=max_unread_tokens,
        interval_s=interval_s,
    )
    outputs = OutputStream(
        job,
        place=lambda job: alone(client),
        codec=TextCodec(byte_level_tokenizer()),
        metrics=ServerMetrics(["LS"]),
        backlog=backlog,
    )
    for i in range(num_choices):
        outputs.put_nowait((f"c-{i}", Accepted(None)))
    return outputs, client, backlog


def put(outputs, *token_ids, index=0, finish_reason=None):
    output = RequestOutput(
        request_id=f"c-{index}", service_class="LS", new_token_ids=token_ids, finish_reason=finish_reason
    )
    outputs.put_nowait((f"c-{index}", output))


async def read(outputs):
    return [delta async for deltas in outputs.deltas() for delta in deltas]


def test_what_is_unread_is_coalesced_and_not_lost():
    async def scenario():
        outputs, _, _ = started(num_choices=3)
        await outputs.start()
        for _ in range(400):
            for index in range(3):
                put(outputs, ABC[index], index=index)
        for index in range(3):
            put(outputs, ABC[0], index=index, finish_reason=FinishReason.LENGTH)
        return await read(outputs)

    deltas = asyncio.run(scenario())
    assert len(deltas) <= 64 + 3
    for index, letter in enumerate("abc"):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == letter * 400 + "a"
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]


def test_between_two_reads_of_a_stream_that_can_wait_is_its_interval():
    async def scenario(interval_s, pause_s):
        outputs, _, _ = started(num_choices=2, interval_s=interval_s)
        await outputs.start()
        reads = []

        async def reader():
            async for deltas in outputs.deltas():
                reads.append([(delta.index, delta.text) for delta in deltas])

        reading = asyncio.ensure_future(reader())
        for _ in range(20):
            for index in range(2):
                put(outputs, ABC[index], index=index)
            await asyncio.sleep(0.001)
        await asyncio.sleep(pause_s)
        num_before_end = len(reads)
        for index in range(2):
            put(outputs, ABC[2], index=index, finish_reason=FinishReason.LENGTH)
        await reading
        assert outputs._timer is None
        return reads, num_before_end

    reads, num_before_end = asyncio.run(scenario(3600.0, 0.1))
    assert reads == [[(0, "a"), (1, "b")], [(0, "a" * 19 + "c"), (1, "b" * 19 + "c")]]
    assert num_before_end == 1
    reads, num_before_end = asyncio.run(scenario(0.05, 0.3))
    assert 2 <= num_before_end == len(reads) - 1 <= 20, (
        "what is there is read after the interval, if nothing follows, too"
    )
    assert reads[0] == [(0, "a"), (1, "b")] and reads[-1] == [(0, "c"), (1, "c")]
    for index, letter in enumerate("ab"):
        assert "".join(text for read in reads for i, text in read if i == index) == letter * 20 + "c"


@pytest.mark.parametrize("ends", ["error", "closed"])
def test_stream_that_can_wait_ends_at_once(ends):
    async def scenario():
        outputs, client, _ = started(interval_s=3600.0)
        await outputs.start()
        put(outputs, ABC[0])
        deltas = outputs.deltas()
        assert [delta.text for delta in await anext(deltas)] == ["a"]
        put(outputs, ABC[1])
        if ends == "error":
            outputs.fail(ApiError("gone", status=503))
            assert [delta.text for delta in await anext(deltas)] == ["b"]
            with pytest.raises(ApiError, match="gone"):
                await anext(deltas)
        else:
            outputs.close()
        assert outputs._timer is None and client.aborted == ["c-0"]

    asyncio.run(asyncio.wait_for(scenario(), 30))


class CountedNews(asyncio.Event):
    """Counts how often the reader is woken."""

    num_set = 0

    def set(self):
        self.num_set += 1
        super().set()


@pytest.mark.parametrize("stop", [(), ("cb",)])
def test_an_answer_that_is_read_at_once_is_made_in_large_parts(stop):
    """The reader is not woken for each token, and its text is complete; a stop string is looked for in each."""

    async def scenario():
        outputs, client, _ = started(num_choices=2, at_once=True, stop=stop)
        await outputs.start()
        told, wakes = [], 0

        async def reader():
            nonlocal wakes
            async for deltas in outputs.deltas():
                wakes += 1
                told.extend(deltas)

        task = asyncio.create_task(reader())
        outputs._news = CountedNews()
        for i in range(3000):
            put(outputs, ABC[i % 3])
            put(outputs, ABC[0], index=1)
            await asyncio.sleep(0)
            if i == 1000:
                assert (outputs._news.num_set == 0) == (not stop)
        assert outputs.usage.num_output_tokens == 6000
        put(outputs, ABC[2], finish_reason=FinishReason.LENGTH)
        put(outputs, ABC[1], index=1, finish_reason=FinishReason.LENGTH)
        await task
        assert not client.aborted
        return ["".join(delta.text for delta in told if delta.index == i) for i in range(2)], wakes

    texts, wakes = asyncio.run(scenario())
    assert texts == ["abc" * 1000 + "c", "a" * 3000 + "b"]
    if not stop:
        assert 3 <= wakes <= 6, "1,024 tokens at a time, of either choice"


def test_reader_who_falls_too_far_behind_is_given_up():
    async def scenario():
        outputs, client, backlog = started(num_choices=2, max_unread_tokens=10)
        await outputs.start()
        put(outputs, *ABC * 6)
        assert not client.aborted
        put(outputs, *ABC)
        assert client.aborted == ["c-0", "c-1"], "at once, though nobody reads"
        assert backlog.num_waiting == {"LS": 0}
        put(outputs, *ABC)
        texts = []
        with pytest.raises(ApiError, match="21 tokens of the stream were not read") as caught:
            async for deltas in outputs.deltas():
                texts += [delta.text for delta in deltas]
        assert (caught.value.code, "".join(texts)) == ("slow_reader", "abc" * 7)

    asyncio.run(scenario())


def test_reading_makes_room_again():
    async def scenario():
        outputs, client, _ = started(max_unread_tokens=10)
        await outputs.start()
        deltas = outputs.deltas()
        for _ in range(5):
            put(outputs, *ABC * 3)
            assert await anext(deltas)
        put(outputs, finish_reason=FinishReason.LENGTH)
        assert [delta.finish_reason async for part in deltas for delta in part] == ["length"]
        assert not client.aborted

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_ends_a_request_that_nobody_reads(at_once):
    async def scenario():
        outputs, client, _ = started(at_once=at_once, stop=("ca",))
        await outputs.start()
        put(outputs, *ABC[:2])
        put(outputs, ABC[2])
        put(outputs, *ABC)  # more behind the stop string
        assert client.aborted == ["c-0"]
        return await read(outputs)

    assert "".join(delta.text for delta in asyncio.run(scenario())) == "ab"


def test_text_that_is_held_back_is_not_left_unread():
    async def scenario():
        outputs, client, _ = started(max_unread_tokens=10, tools=("f",))
        await outputs.start()
        reading = asyncio.create_task(read(outputs))
        for letter in '<tool_call>{"name": "f", "arguments": {"x": "' + "a" * 100:
            await asyncio.sleep(0)
            put(outputs, *byte_level_tokenizer()(letter).input_ids)
        put(outputs, *byte_level_tokenizer()('"}}').input_ids, finish_reason=FinishReason.LENGTH)
        (delta,) = await reading
        assert not client.aborted
        assert delta.tool_calls[0].arguments == '{"x": "' + "a" * 100 + '"}'

    asyncio.run(scenario())


def test_calls_and_their_text_are_coalesced_in_order():
    deltas = [
        Delta(0, "a", [TokenLogprob(token_id=1, logprob=-1.0)], None, tool_calls=[ParsedCall(0, "i", "f", "{}")]),
        Delta(0, "b", [TokenLogprob(token_id=2, logprob=-2.0)], "stop", tool_calls=[ParsedCall(1, "j", "g", "{}")]),
    ]
    whole = merge(deltas)
    assert (whole.text, whole.finish_reason) == ("ab", "stop")
    assert [entry.token_id for entry in whole.logprobs] == [1, 2]
    assert [call.name for call in whole.tool_calls] == ["f", "g"]


def test_backlog_counts_until_the_first_token():
    async def scenario():
        outputs, _, backlog = started(num_choices=3)
        assert backlog.num_waiting == {"LS": 3}
        put(outputs, ABC[0], index=1)
        put(outputs, ABC[0], index=1)
        assert backlog.num_waiting == {"LS": 2}
        outputs.close()
        outputs.close()
        assert backlog.num_waiting == {"LS": 0}

    asyncio.run(scenario())


def test_full_backlog_tells_how_long_others_waited():
    backlog = Backlog(["LS", "BE"], 3)
    backlog.enter("LS", 2)
    for _ in range(100):
        backlog.enter("LS", 1)
        backlog.leave("LS", 7.0)
    with pytest.raises(ApiError, match="2 requests of class 'LS' wait already, of at most 3") as caught:
        backlog.enter("LS", 2)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert caught.value.retry_after_s == pytest.approx(7, rel=0.01)
    backlog.enter("BE", 3)
    with pytest.raises(ApiError, match="the call is 4 requests") as caught:
        backlog.enter("BE", 4)
    assert caught.value.status == 400


def test_no_tenant_fills_the_queue_for_others():
    backlog = Backlog(["LS"], 12)
    backlog.enter("LS", 12, tenant="a")
    with pytest.raises(ApiError, match="12 requests of class 'LS' wait already"):
        backlog.enter("LS", 1, tenant="a")
    backlog.enter("LS", 6, tenant="b")  # half of it
    with pytest.raises(ApiError, match="18 requests"):
        backlog.enter("LS", 1, tenant="b")
    backlog.enter("LS", 6, tenant="c", weight=2.0)  # half of it, too, beside two of weight 1
    with pytest.raises(ApiError, match="24 requests"):
        backlog.enter("LS", 1, tenant="c", weight=2.0)
    for _ in range(13):
        backlog.leave("LS", 1.0, tenant="a" if backlog.num_waiting["LS"] > 12 else "b")
    backlog.enter("LS", 1, tenant="a")  # there is room
    assert backlog.num_waiting == {"LS": 12}


def test_a_call_that_falls_back_or_moves_on_keeps_to_its_tenants_share():
    async def scenario():
        clients, backlog = [RecordingClient() for _ in range(3)], Backlog(["LS", "BE"], 4)
        backlog.enter("BE", 4, tenant="b")  # all there is, and more than its half
        place = alone(clients[0])

        def move_on(error):
            has_next = place.client is clients[0]
            place.client = clients[1]
            return has_next

        place.move_on = move_on
        otherwise = Fallback(service_class="BE", tier="flex", slo=SLO(), interval_s=0.0)
        job = Job(
            call_id="c", arrival_s=time.monotonic(), prompts=[[5]], samplings=[SamplingParams(max_tokens=9)] * 2,
            service_class="LS", slo=SLO(), fallback=otherwise, tenant="a",
        )  # fmt: skip
        outputs = OutputStream(
            job, place=lambda job: place if job.service_class == "LS" else alone(clients[2]),
            codec=TextCodec(byte_level_tokenizer()), metrics=ServerMetrics(["LS", "BE"]), backlog=backlog,
        )  # fmt: skip
        outputs.put_nowait(("c-0", RequestRejected("too late")))
        assert clients[1].submitted == ["c-0", "c-1"] and backlog.num_waiting == {"LS": 2, "BE": 4}
        outputs.put_nowait(("c-0", RequestRejected("too late")))
        assert clients[2].submitted == ["c-0-flex", "c-1-flex"] and backlog.num_waiting == {"LS": 0, "BE": 6}
        with pytest.raises(ApiError, match="6 requests of class 'BE'"):
            backlog.enter("BE", 1, tenant="a")
        outputs.close()
        assert backlog.num_waiting == {"LS": 0, "BE": 4}
        backlog.enter("BE", 2, tenant="a")

    asyncio.run(scenario())


def test_bodies_are_bounded_together():
    class Upload:
        def __init__(self, *parts):
            self._parts = parts
            self.go_on = asyncio.Event()

        async def stream(self):
            for part in self._parts:
                yield part
            await self.go_on.wait()

    async def scenario():
        reader, parsed = BodyReader(10, timeout_s=60), asyncio.Event()

        async def handle(upload):
            async with reader.hold(upload) as body:
                await parsed.wait()
                return body

        async def is_full():
            with pytest.raises(ApiError, match="too many large requests") as caught:
                await handle(Upload(b"1"))
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)

        uploads = [Upload(b"12345", b"67890") for _ in range(8)]
        tasks = [asyncio.create_task(handle(upload)) for upload in uploads]
        await asyncio.sleep(0.01)
        await is_full()
        for upload in uploads:
            upload.go_on.set()
        await asyncio.sleep(0.01)
        await is_full()
        parsed.set()
        assert await asyncio.gather(*tasks) == [b"1234567890"] * 8
        last = Upload(b"1")
        last.go_on.set()
        assert await handle(last) == b"1"

    asyncio.run(scenario())


# -- over sockets ------------------------------------------------------------------------------------------------


def num_sockets(server):
    """Return how many sockets of its port the server has open; those of /metrics are closed by then or soon."""
    own = f":{urlsplit(server.url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(local.endswith(own) and inode != "0" for _, local, *_, inode in (row[:10] for row in rows))


def test_stream_that_is_read_too_slowly_ends_with_an_error(start_server):
    server = start_server("--limit", "max_unread_tokens=20").wait_until_ready()
    aborted = 'omniserve_requests_total{finish_reason="abort",service_class="LS"}'
    with send(server, BIG, receive_buffer=4096) as connection:
        server.wait_for_metric(aborted, BIG["n"])
        server.wait_until_free()
        text = b""
        while b'"code": "slow_reader"' not in text[-(1 << 17) :]:
            part = connection.recv(1 << 16)
            assert part, "it was cut without a word"
            text += part
    assert server.client().completions.create(model="fake", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_a_client_is_gone_that_takes_no_message_for_so_long():
    """A client that takes each message in time is not gone, nor one for whom there is none; without sockets, which have
    such a limit."""

    async def scenario(sending_s, silence_s):
        outputs, _, _ = started()
        await outputs.start()
        told, closed = b"", []

        async def send(message):
            nonlocal told
            if told:
                await asyncio.sleep(sending_s)
            told += message.get("body", b"") or b"head"

        service = SimpleNamespace(model_name="m", codec=SimpleNamespace(token_text=str))
        shape = CompletionShape(service, CompletionRequest(prompt="a"), "c")
        stream = EventStream(
            outputs, shape, headers={}, stall_timeout_s=0.8, comment_interval_s=0.0, on_close=lambda: closed.append(1)
        )
        began_s = time.monotonic()
        task = asyncio.create_task(stream({"type": "http"}, asyncio.Event().wait, send))
        for i in range(3):
            await asyncio.sleep(silence_s if i == 2 else 0.01)
            put(outputs, ABC[i])
        put(outputs, finish_reason=FinishReason.LENGTH)
        await asyncio.wait_for(task, 30)
        assert closed == [1]
        assert time.monotonic() - began_s >= 0.8
        return told.endswith(b"data: [DONE]\n\n")

    async def scenarios():
        return await asyncio.gather(scenario(3600, 0.0), scenario(0.3, 0.0), scenario(0.0, 1.2))

    assert asyncio.run(scenarios()) == [False, True, True], "is it whole?"


def test_stream_that_is_not_read_at_all_is_cut(start_server):
    server = start_server("--limit", "stall_timeout_s=0.3").wait_until_ready()
    with send(server, BIG | {"prompt": [SLOW, *ABC]}, receive_buffer=4096) as connection:
        server.wait_for_metric('omniserve_requests_total{finish_reason="abort",service_class="LS"}', BIG["n"])
        server.wait_until_free()
        assert b"[DONE]" not in read_all(connection)


@pytest.mark.parametrize("stream", [False, True])
def test_connection_of_an_answer_that_nobody_takes_is_closed(start_server, stream):
    server = start_server("--limit", "stall_timeout_s=0.3").wait_until_ready()
    before = num_sockets(server)
    with send(server, BIG | {"prompt": ABC, "stream": stream}, receive_buffer=4096):
        # They may run for less than the time between two looks at what runs.
        wait_until(lambda: server.metric('omniserve_output_tokens_total{service_class="LS"}') > 0)
        server.wait_until_free()
        wait_until(lambda: num_sockets(server) <= before, lambda: "the server still holds what it could not send")


def test_full_queue_is_told_with_retry_after(start_server):
    server = start_server("--limit", "max_queued_requests=2").wait_until_ready()
    client = server.client()
    silent = {"model": "fake", "prompt": [[SILENT], [SILENT]], "max_tokens": 5}
    with send(server, silent | {"stream": True}) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.metric('omniserve_requests_queued{service_class="LS"}') == 2
        with pytest.raises(openai.RateLimitError, match="2 requests of class 'LS' wait already") as caught:
            client.completions.create(model="fake", prompt="a")
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert server.metric('omniserve_requests_rejected_total{service_class="LS"}') == 1
        client.completions.create(model="fake", prompt="a", max_tokens=2, extra_body={"service_tier": "flex"})
    server.wait_until_free()
    client.completions.create(model="fake", prompt=["a", "b"], max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="send several calls"):
        client.completions.create(model="fake", prompt=["a", "b", "c"])


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_sockets_are_answered_or_closed(server, stream):
    with send(server, {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 300, "stream": stream}) as connection:
        server.wait_for_metric('omniserve_requests_running{service_class="LS"}', 1)
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    server.wait_until_free()


def leave_before_the_headers(server):
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")


def leave_in_the_body(server):
    with connect(server) as connection:
        connection.sendall(head(b"", length=1000) + b'{"model": "fake", ')


def leave_after_the_body(server):
    send(server, {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 400}).close()


def leave_while_queued(server):
    with send(server, {"model": "fake", "prompt": [SILENT], "max_tokens": 5}):
        server.wait_for_metric('omniserve_requests_queued{service_class="LS"}', 1)


def leave_while_queued_in_a_stream(server):
    with send(server, {"model": "fake", "prompt": [SILENT], "max_tokens": 5, "stream": True}):
        server.wait_for_metric('omniserve_requests_queued{service_class="LS"}', 1)


def leave_while_decoding(server):
    with send(server, {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 400, "n": 3, "stream": True}) as connection:
        while b"data:" not in connection.recv(1 << 16):
            pass


def leave_without_waiting_for_the_end(server):
    with send(server, {"model": "fake", "prompt": ABC, "max_tokens": 5, "stream": True}) as connection:
        connection.recv(1)


def leave_with_a_reset(server):
    with send(server, {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 400, "stream": True}) as connection:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("leave", [f for name, f in sorted(globals().items()) if name.startswith("leave_")])
def test_whoever_leaves_frees_what_they_held(server, leave):
    leave(server)
    server.wait_until_free()
    assert server.client().completions.create(model="fake", prompt="a", max_tokens=2).usage.completion_tokens == 2
