"""The local Hub with a repository, and its client."""

import pytest
from huggingface_hub import HfApi

from tests.hub_requests import REPO, TOKEN
from tools.hub_api import Handler
from tools.hub_http import MIB
from tools.hub_server import HubServer


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", token=TOKEN, max_body=40 * MIB, inline_limit=10 * MIB) as server:
        server.store.create_repo(REPO)
        server.store.create_branch(REPO, "v1")
        yield server


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=TOKEN)


@pytest.fixture
def seen(monkeypatch):
    """The requests that arrive, as (action, arguments)."""
    requests = []
    route = Handler._route

    def spy(self, path):
        requests.append(route(self, path))
        return requests[-1]

    monkeypatch.setattr(Handler, "_route", spy)
    return requests
