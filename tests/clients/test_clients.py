"""Real clients on a served model: see ``python -m tests.clients``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.install import read_clients
from tests.clients.trials import scripted_server, try_client

pytestmark = pytest.mark.slow
CLIENTS = {name: client for name, client in read_clients().items() if not client.heavy and not client.left_out}
CACHE = Path(__file__).parents[2] / ".cache" / "clients"
# A machine that PyPI takes longer to reach skips a client; one that hangs fails.
TIMEOUTS = {"install_timeout_s": 300.0, "trial_timeout_s": 300.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("scripted")) as served:
        yield served


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_what_it_asks_for(name, served, tmp_path):
    server, model_folder = served
    outcome = try_client(CLIENTS[name], server, model_folder, cache=CACHE, folder=tmp_path, **TIMEOUTS)
    if outcome.not_installed:
        pytest.skip(f"{name}: {outcome.not_installed}")
    log = (tmp_path / f"{name}.log").read_text(errors="replace")
    assert outcome.is_as_expected, f"{outcome.row()}\n{log[-20000:]}\n{server.log_tail()}"
