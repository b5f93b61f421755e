"""An operator that is run again by what it did the last time: the same results, and never for a call that differs."""

import importlib

import pytest

from tests.cpu.conftest import ALL_OPERATIONS, assemble_cpu, load
from tests.mutants import CHECKS, OPERATIONS
from tests.ops.common import runtime_of


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A build of its own whose kernels the interpreter runs."""
    from interpreter.backend import InterpreterBackend

    found = load(assemble_cpu(tmp_path_factory.mktemp("replayed"), "\n# replayed\n" + ALL_OPERATIONS))
    runtime = runtime_of(found)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return found


@pytest.fixture
def replay(package, monkeypatch):
    module = importlib.import_module(f"{package.__name__}.shared.runtime.replay")
    yield module
    module.forget()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_holds_for_results_of_a_replay(package, replay, monkeypatch, name):
    monkeypatch.setattr(replay, "AT_ONCE", True)
    CHECKS[name](package)
