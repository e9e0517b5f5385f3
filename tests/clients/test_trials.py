"""Tests of the outcomes of trials, without any client."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.clients.install import Client, NotInstalled, environment, read_clients, wait
from tests.clients.trials import Outcome

CLIENT = Client(name="some", packages=("some==1.0",))


def test_each_client_that_is_tried_has_a_script_and_a_version():
    for client in read_clients().values():
        if not client.left_out:
            assert client.scenario.exists() and client.version, client


@pytest.mark.parametrize(
    ("outcome", "result", "is_as_expected"),
    [
        (Outcome(CLIENT, errors={"chat": None}), "works", True),
        (Outcome(CLIENT, errors={"chat": None, "tools": "ValueError: no"}), "does not work", False),
        (Outcome(CLIENT, errors={"chat": None}, broken="it took more than 1 s"), "does not work", False),
        (Outcome(CLIENT, broken="it ended with status 1"), "does not work", False),
        (Outcome(CLIENT, not_installed="no such package"), "not installed", True),
    ],
)
def test_result_says_what_became_of_all_checks(outcome, result, is_as_expected):
    assert outcome.row()[2] == result and outcome.is_as_expected == is_as_expected


def test_what_takes_too_long_is_ended_with_what_it_started():
    reader, writer = os.pipe()
    process = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], process_group=0, pass_fds=[writer])
    os.close(writer)
    assert not wait(process, 0.2)
    assert os.read(reader, 1) == b""  # which comes when no process has the other end any more
    os.close(reader)


def test_an_installation_that_takes_too_long_is_told(tmp_path):
    with pytest.raises(NotInstalled, match="not installed in time"):
        environment(CLIENT, tmp_path, timeout_s=0.0)
