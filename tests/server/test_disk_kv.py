"""KV on disk with a real engine: a server that was stopped, or killed, finds what it has computed before."""

from __future__ import annotations

import re
import sys
import time

import httpx
import pytest
from running import RunningServer
from test_real import cache_folder, flags_of, folders_of, model_folder, start  # noqa: F401  three of them are fixtures

PROMPT = list(range(5, 165))
"""Ten blocks."""
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, K and V, KV heads, head size, tokens, bytes of an element."""
FLAGS = ("--dtype", "float32", "--disk-kv-gib", "0.01", "--profile", "none")


def ask(server, last):
    answer = server.client().completions.create(
        model="tiny", prompt=[*PROMPT, last], max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details is not None else 0


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^omniserve_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture
def start_real(model_folder):  # noqa: F811
    """Start ``python -m omniserve.server``; what still runs at the end is killed."""
    started = []

    def start(cache_folder, *more):  # noqa: F811
        command = [sys.executable, "-m", "omniserve.server", *flags_of(model_folder, *more)]
        started.append(RunningServer(command, own_group=True, **folders_of(cache_folder)))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_that_starts_again_finds_its_prefixes(start, start_real, cache_folder, tmp_path, is_killed):  # noqa: F811
    flags = (*FLAGS, "--disk-kv-dir", str(tmp_path), "--disk-kv-keep")
    server = (start_real if is_killed else start)(cache_folder, *flags).wait_until_ready()
    texts = [ask(server, last) for last in (7, 8)]
    assert [cached for _, cached in texts] == [0, 160]
    deadline_s = time.monotonic() + 60
    while metric(server, "disk_written_bytes_total") < 10 * BLOCK_BYTES:  # written beside steps
        assert time.monotonic() < deadline_s
        ask(server, 9)
    if is_killed:
        server.kill_group()
    else:
        assert server.stop() == 0, "".join(server.log)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    server = start(cache_folder, *flags).wait_until_ready()
    assert ask(server, 7) == (texts[0][0], 160)
    assert ask(server, 8) == (texts[1][0], 160)
    assert metric(server, "disk_tokens_total") == 160
    assert metric(server, "disk_read_bytes_total") > 0 and metric(server, "disk_failures_total") == 0
    assert metric(server, "kv_blocks") > metric(server, "kv_blocks_used") > 0
    assert server.stop() == 0, "".join(server.log)


def test_a_first_start_measures_its_profile(start, tmp_path):  # noqa: F811
    flags = ("--dtype", "float32", "--disk-kv-gib", "0.01", "--limit", "profile_start_s=0.5")
    server = start(tmp_path, *flags).wait_until_ready()  # the cache folder has no profile yet
    assert [ask(server, last)[1] for last in (7, 8)] == [0, 160]
    assert any("measuring latencies" in line for line in server.log)
    assert server.stop() == 0, "".join(server.log)


def test_a_file_that_is_not_kept_goes_with_the_server(start, cache_folder, tmp_path):  # noqa: F811
    server = start(cache_folder, *FLAGS, "--disk-kv-dir", str(tmp_path)).wait_until_ready()
    ask(server, 7)
    assert list(tmp_path.iterdir()) == []
    assert server.stop() == 0, "".join(server.log)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disk-kv-gib", "1", "--kv", "paged"), "set kv to tiered"),
        (("--disk-kv-gib", "1e9"), "give it less, or another folder"),
    ],
)
def test_what_cannot_be_is_told_at_the_start(start, tmp_path, flags, message):  # noqa: F811
    server = start(tmp_path, *FLAGS, *flags)
    log = "".join(server.log)
    assert server.wait() == 1 and message in log and "Traceback" not in log, log
