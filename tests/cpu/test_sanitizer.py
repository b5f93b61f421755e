"""How `make test-sanitizer` reads what compute-sanitizer and pytest print."""

import json
import subprocess
import sys

import pytest

from tests import sanitizer

PASSED = "3 passed, 5 deselected in 1.20s"
FAILED = "1 failed, 2 passed in 3.00s"
HAZARD = "========= Error: Race reported between Write access at {0}+0x10 and Read access at {0}+0x20".format("bastile_rms_norm_forward")
READ = "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at {}+0x570"


@pytest.mark.parametrize(
    "tool, printed, status",
    [
        ("memcheck", PASSED, "clean"),
        ("memcheck", "=========     at some_kernel_of_pytorch+0x10\n" + PASSED, "clean"),
        ("memcheck", "=========     at bastile_swiglu+0x10\n" + PASSED, "findings"),
        ("memcheck", FAILED, "failed"),
        ("memcheck", "Segmentation fault", "failed"),
        ("memcheck", "8 deselected in 0.10s", ""),
        ("racecheck", HAZARD + "\n" + PASSED, "findings"),
        ("racecheck", "RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED\n" + FAILED, "not checked"),
        ("initcheck", READ.format("bastile_column_sum") + "\n" + PASSED, "clean"),
        ("initcheck", READ.format("bastile_swiglu") + "\n" + PASSED, "findings"),
    ],
)
def test_what_was_printed_decides(monkeypatch, tool, printed, status):
    monkeypatch.setattr(sanitizer.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, printed, ""))
    assert sanitizer.sanitize(tool, "tests/gpu/test_ops.py::test_swiglu", "bfloat16", 60).status == status


def test_a_test_that_does_not_end_fails(monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    outcome = sanitizer.sanitize("memcheck", "tests/gpu/test_ops.py::test_swiglu", "", 60)
    assert (outcome.status, outcome.summary) == ("failed", "did not end within 60 s")


def test_a_run_that_is_cut_short_records_what_ended(monkeypatch, tmp_path):
    """What the time did not suffice for stays as it was: neither clean nor failed."""
    record, log = tmp_path / "record.json", tmp_path / "record.txt"
    log.write_text("")
    monkeypatch.setattr(sanitizer, "RECORD", record)

    def run(command, **options):
        if any("test_swiglu" in part for part in command):
            assert options["timeout"] <= 50
            late = sanitizer.time.monotonic() + 60
            monkeypatch.setattr(sanitizer.time, "monotonic", lambda: late)
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, PASSED, "")

    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    tests = "test_ops.py::test_rms_norm,test_ops.py::test_swiglu,test_operation[softmax"
    ours = [name for name in sanitizer.functions() if any(part in name for part in tests.split(","))]
    assert sanitizer.main(["--tools", "memcheck", "-k", tests, "--processes", "1", "--budget-s", "50", "--record"]) == 0
    at = next(i for i, name in enumerate(ours) if "test_swiglu" in name)
    assert 0 < at < len(ours) - 1  # some before it and some after
    assert set(json.loads(record.read_text())["memcheck"]) == set(ours[:at])


def test_every_test_function_of_the_operations_is_run():
    names = sanitizer.functions()
    assert "tests/gpu/test_ops.py::test_swiglu" in names and "tests/gpu/test_gpt_oss.py::test_experts" in names
    assert "tests/gpu/test_attention.py::test_attention" in names and "tests/gpu/test_qwen3_moe.py::test_the_node" in names
    assert "tests/gpu/test_operations.py::test_operation[softmax-torch.float32]" in names
    assert not any(name.startswith("tests/gpu/test_operations.py::test_a_cuda_graph") for name in names)
    assert {name.split("::")[0] for name in names} == set(sanitizer.FILES)


def test_cases_that_are_apart_are_those_of_the_tests():
    """A name that no test has would pass as one that was left out."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    cases = {name for name in sanitizer.functions() if "[" in name}
    command += sorted({name.split("::")[0] for name in cases})
    known = subprocess.run(command, cwd=sanitizer.ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert cases <= set(known)


LOG = sanitizer.RECORD.with_suffix(".txt")


def test_every_operation_has_tests_that_launch_its_kernels():
    sources = sanitizer.digests()
    assert set(sanitizer.CHECKED_BY) <= set(sources)
    assert [name for name in sources if not sanitizer.tests_of(name)] == []


def test_the_log_says_which_kernels_are_not_those_that_were_checked():
    """By the digests of their sources: a kernel that changes makes this fail until the log names it, or it has been checked again."""
    record = json.loads(sanitizer.RECORD.read_text())
    assert all(len(entry["commit"]) >= 7 for tool in record.values() for entry in tool.values())
    shown = dict(line.removeprefix("owed: ").split(": ") for line in LOG.read_text().splitlines() if line.startswith("owed: "))
    wanted = {tool: ", ".join(names) or "nothing" for tool, names in sanitizer.owed(record, sanitizer.digests()).items()}
    assert shown == wanted, "run `python -m tests.sanitizer --owed`, which needs no GPU, and commit the log"


def test_what_was_clean_is_recorded_with_the_digests_of_its_sources():
    def outcome(test, status, tool="memcheck"):
        return sanitizer.Outcome(tool, test, "", {}, status, "")

    sources = {"swiglu": "a", "dyt": "b", "softmax": "c"}
    first, second = sanitizer.tests_of("dyt")
    record = sanitizer.recorded([outcome(test, "clean") for test in sanitizer.tests_of("swiglu")[:1]], {}, sources, "abc1234")
    assert sanitizer.owed(record, sources)["memcheck"] == ["swiglu (never)", "dyt (never)", "softmax (never)"]  # of its tests, one ran
    outcomes = [outcome(test, "clean") for test in sanitizer.tests_of("swiglu")[1:]]
    outcomes += [outcome(test, "clean", "racecheck") for test in (first, second)]
    outcomes += [outcome(first, "clean"), outcome(first, "findings"), outcome(second, "")]
    outcomes += [outcome(test, status) for test in sanitizer.tests_of("softmax") for status in ("not checked", "clean", "")]
    record = sanitizer.recorded(outcomes, record, sources, "def5678")  # the rest, in another run
    assert record["memcheck"][first] == {"commit": "def5678", "status": "findings", "operations": {"dyt": "b"}}
    assert sanitizer.owed(record, sources) == {"memcheck": ["dyt (findings)"], "racecheck": ["swiglu (never)", "softmax (never)"]}
    assert sanitizer.owed(record, {**sources, "softmax": "d"})["memcheck"] == ["dyt (findings)", "softmax (changed)"]
    again = sanitizer.recorded([outcome(first, "not checked")], record, sources, "0123456")
    assert sanitizer.owed(again, sources)["memcheck"] == ["dyt (not checked)"]
    assert sanitizer.owed(sanitizer.recorded([outcome(first, "")], record, sources, "0123456"), sources)["memcheck"] == ["dyt (never)"]


def test_the_tests_for_a_gpu_need_no_compiler():
    """They are collected where cuda-tile is not installed, as on a machine that only runs the kernels."""
    without = "import sys; sys.modules['cuda.tile'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", without, "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/gpu"]
    done = subprocess.run(command, cwd=sanitizer.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "error" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
