"""A small package, a Hub, and the upload of one to the other."""

import io

import pytest
from rich.console import Console

from tests.publishing import TOKEN, FakeApi, FakeHub, Mini
from tools import publish as publishing
from tools.hub import HubServer


@pytest.fixture
def package(tmp_path):
    return Mini(tmp_path / "package")


@pytest.fixture
def hub(monkeypatch):
    """Without HTTP; what loads from it, or is a process of its own, needs `served`."""
    found = FakeHub()
    monkeypatch.setattr(publishing, "HfApi", lambda endpoint, token: FakeApi(found, token))
    return found


@pytest.fixture
def served():
    with HubServer(token=TOKEN) as server:
        yield server


@pytest.fixture
def upload(request, package):
    """Publish the package to the test's Hub; the report, with what was printed as `report.text`."""
    hub = request.getfixturevalue("served" if "served" in request.fixturenames else "hub")

    def run(**options):
        console = Console(file=io.StringIO(), width=200)
        report = publishing.publish(package.folder, console=console, **{"endpoint": hub.endpoint, "token": TOKEN, **options})
        report.text = console.file.getvalue()
        return report

    return run
