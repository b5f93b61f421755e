"""The processes that measure training steps: what each of them begins with, and what is reported of one that fails."""

import argparse
import subprocess
import sys

import pytest

from benchmark import preloaded, processes, records, stepping


def test_a_process_that_dies_says_why(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such device')\ntime.sleep(60)\n")
    group = processes.Group(str(script), [], 2)
    (report,) = group.reports(deadline=float("inf"))
    assert report == {"kind": "failed", "tokens": 0, "error": "process 1 ended with 1: no such device"}
    assert all(process.exitcode is not None for process in group.processes)


REPORTS = f"""
import json, os, sys
from types import ModuleType
found = dict(kind="found", forked="transformers" in sys.modules, arguments=sys.argv[1:], marked="marked" in sys.modules)
sys.modules["marked"] = ModuleType("marked")
print({stepping.MARK!r} + json.dumps(found | {{name: os.environ.get(name) for name in ("RANK", "GIVEN", "PYTORCH_CUDA_ALLOC_CONF")}}))
"""


def test_each_process_is_new_and_has_the_variables_of_its_own(tmp_path, monkeypatch):
    """A forked one has transformers and nothing that an earlier one did; a fresh one has imported nothing."""
    script = tmp_path / "reports.py"
    script.write_text(REPORTS)
    for fresh, value in ((False, "1"), (False, "2"), (True, "3")):
        monkeypatch.setenv("GIVEN", value)
        (found,) = processes.Group(str(script), ["--x", value], 1, fresh).reports(deadline=float("inf"))
        assert (found["forked"], found["marked"], found["arguments"]) == (not fresh, False, ["--x", value])
        assert (found["RANK"], found["GIVEN"], found["PYTORCH_CUDA_ALLOC_CONF"]) == ("0", value, "expandable_segments:True")


def test_a_process_that_is_killed_or_takes_too_long_is_reported(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import os, signal, sys, time\nif sys.argv[1:]: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n")
    (killed,) = processes.Group(str(script), ["now"], 1).reports(deadline=float("inf"))
    assert killed["error"].startswith("process 0 ended with -9")
    late = processes.Group(str(script), [], 1)
    assert list(late.reports(deadline=0.0)) == [{"kind": "late"}] and late.processes[0].exitcode == -9


def test_nothing_that_is_imported_before_the_fork_starts_cuda_or_chooses_for_all():
    """Liger-Kernel and bitsandbytes ask for the GPU, and transformers takes fla's delta rule, when they are imported."""
    code = "import sys, benchmark.preloaded; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=records.ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"liger_kernel", "bitsandbytes", "unsloth", "transformers.models.qwen3_5.modeling_qwen3_5", "bastile"} & loaded
    assert {f"transformers.models.{name}.modeling_{name}" for name in preloaded.FAMILIES} <= loaded


@pytest.mark.parametrize(("answer", "started"), ((0, True), (201, True), (3, False)))
def test_a_server_that_started_cuda_is_noticed(answer, started, monkeypatch):
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: argparse.Namespace(cuCtxGetCurrent=lambda pointer: answer))
    assert processes.cuda_was_started() == started
