"""A small package, a local Hub, and the upload of one to the other."""

import io

import pytest
from rich.console import Console

from tests.publishing import TOKEN, Mini
from tools.hub_server import HubServer
from tools.publish import publish


@pytest.fixture
def package(tmp_path):
    return Mini(tmp_path / "package")


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", token=TOKEN) as server:
        yield server


@pytest.fixture
def upload(hub, package):
    """Publish the package; the report, with what was printed as `report.text`."""

    def run(**options):
        console = Console(file=io.StringIO(), width=200)
        options = {"endpoint": hub.endpoint, "token": TOKEN, **options}
        report = publish(package.folder, console=console, **options)
        report.text = console.file.getvalue()
        return report

    return run
