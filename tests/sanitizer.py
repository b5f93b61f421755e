"""compute-sanitizer over the operations' GPU tests: `make test-sanitizer`, or `python -m tests.sanitizer --tools racecheck`.

Every test function runs in a process of its own, several at a time, so one that the sanitizer itself fails on takes no other along.
What PyTorch's kernels are reported for is left out. Exits with 1 when a kernel of this project has a finding or a test fails.
With --record, how each test ended is put into compute-sanitizer.json of the results, with the digests of the kernels that it launches;
`python -m tests.sanitizer --owed` says, without a GPU, which operations have changed since or were never checked, and notes it in the log.

racecheck itself fails on cuBLAS's kernels for Hopper in half precision (CUBLAS_STATUS_EXECUTION_FAILED), so it runs the cases in fp32 too:
the same kernels, from the same source. Where it failed, the table says "not checked".

initcheck does not see what TMA stores write: it reports reads of what such a store filled. Those are listed apart from others, by
the kernel that reads. What shows that nothing is read uninitialised is the fixture `poisoned` of tests/gpu: there PyTorch fills every
tensor that it allocates with NaN first.
"""

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmark.records import package_version
from tests.ops import collected, suite
from tools.kernel_package import package_folders
from tools.kernel_sources import source_digest
from tools.targets import operations

ROOT = Path(__file__).resolve().parents[1]
# The files, and the test functions of each that launch the operations' kernels in all their variants.
FILES = {
    "tests/gpu/test_ops.py": r"test_\w+",
    "tests/gpu/test_gpt_oss.py": r"test_\w+",
    "tests/gpu/test_attention.py": r"test_(?:attention|kernels_read_a_plan_of_the_pytorch_path|plans|packed_equals_apart)",
    "tests/gpu/test_operations.py": r"test_(?:operation|large_shapes)",
    "tests/gpu/test_qwen3_moe.py": r"test_the_node\w*",
    "tests/gpu/test_family_operations.py": r"test_\w+",
}
# Functions whose cases are many, each a process of its own by the first part of its name.
APART = {"tests/gpu/test_operations.py::test_operation": suite.names()}
TOOLS = ("memcheck", "racecheck", "initcheck")
DTYPES = ("torch.bfloat16", "torch.float32")  # that are checked
OURS = "bastile_"
# By operation of kernel_src: parts of the names of the tests that launch its kernels, or a case of one, which is a process of its own then.
# Where it is not here, test_operation of its name.
CHECKED_BY = collected("GPU_TESTS")
CASES = sorted({part for parts in CHECKED_BY.values() for part in parts if part.endswith("]")})
RECORD = ROOT / "benchmark/results/nvidia-h200/compute-sanitizer.json"
RECORDED = ("memcheck", "racecheck")  # initcheck does not see what TMA stores write
# The kernels that write with TMA stores what another kernel reads as partial sums.
AFTER_TMA = {"initcheck": {"bastile_column_sum", "bastile_column_sum_pair"}}


@dataclass
class Outcome:
    tool: str
    test: str
    summary: str
    findings: Counter
    status: str  # "clean", "findings", "failed", "not checked", or "" when there was nothing to run
    log: str


@functools.cache
def functions() -> tuple[str, ...]:
    """file::function of every test, and file::function[case] of those whose cases are apart."""
    found = []
    for file, names in FILES.items():
        for name in filter(re.compile(names).fullmatch, vars(importlib.import_module(file.removesuffix(".py").replace("/", ".")))):
            test = f"{file}::{name}"
            apart = [f"{test}[{part}-{dtype}]" for part in APART.get(test, ()) for dtype in DTYPES]
            found += apart or [f"{file}::{case}" for case in CASES if case.startswith(f"{name}[")] or [test]
    return tuple(found)


def tests_of(operation: str) -> list[str]:
    """The tests of `functions` that launch the kernels of an operation of kernel_src."""
    parts = CHECKED_BY.get(operation, (f"test_operation[{operation}-",))
    return [test for test in functions() if any(part in test for part in parts)]


def digests() -> dict[str, str]:
    """By operation whose kernels a package ships: the digest of their source."""
    shipped = sorted({operation for folder in package_folders(root=ROOT) for operation in operations(folder)})
    return {operation: source_digest(operation) for operation in shipped}


def owed(record: dict, sources: dict[str, str]) -> dict[str, list[str]]:
    """By tool: the operations that some test of theirs was not clean on, and why.

    "changed": their kernels have changed since. "never": a test has not run. "not checked": the tool itself failed in a test. "findings",
    "failed": what a test ended with.
    """
    found = {}
    for tool in RECORDED:
        known, found[tool] = record.get(tool, {}), []
        for name, source in sources.items():
            seen = [known.get(test, {}) for test in tests_of(name)]
            digests = {entry.get("operations", {}).get(name) for entry in seen}
            statuses = {entry.get("status") for entry in seen}
            if digests != {source}:
                found[tool].append(f"{name} ({'changed' if digests - {None, source} else 'never'})")
            elif "clean" not in statuses or statuses - {"clean", ""}:
                found[tool].append(f"{name} ({', '.join(sorted(statuses - {'clean', ''})) or 'never'})")
    return found


def recorded(outcomes: list["Outcome"], record: dict, sources: dict[str, str], commit: str) -> dict:
    """What `RECORD` says after a run, by tool and test: how the test ended, and the digests of the kernels that it launches.

    A run may be of some tests only: what `owed` asks for may come together from several. A test that runs once for each dtype is as the
    worst of them; "not checked" gives way to "clean", and "" says that a tool has none of its cases to run.
    """
    order, ends = ("", "not checked", "clean", "findings", "failed"), {}
    for outcome in outcomes:
        if outcome.tool in RECORDED:
            ends.setdefault((outcome.tool, outcome.test), []).append(outcome.status)
    for (tool, test), statuses in ends.items():
        digests = {name: source for name, source in sources.items() if test in tests_of(name)}
        record.setdefault(tool, {})[test] = {"commit": commit, "status": max(statuses, key=order.index), "operations": digests}
    return record


def write_owed(record: dict) -> None:
    """Put what is owed at the end of the log of the results, and print it."""
    lines = [f"owed: {tool}: {', '.join(names) or 'nothing'}" for tool, names in owed(record, digests()).items()]
    log = RECORD.with_suffix(".txt")
    kept = [line for line in log.read_text().splitlines() if not line.startswith("owed: ")]
    log.write_text("\n".join([*kept, *lines]) + "\n")
    print("\n".join(lines))


def sanitize(tool: str, test: str, keyword: str, limit: float, deadline: float = float("inf")) -> Outcome | None:
    """Run a test function under a tool. limit: its seconds. deadline: of time.monotonic; what has not ended by then is None."""
    limit = min(limit, deadline - time.monotonic())
    if limit <= 0:
        return None
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", "--show-backtrace", "no"]
    environment = {"OMP_NUM_THREADS": "2", **os.environ}  # else several wait for one another: it took ten times as long
    if tool == "racecheck":  # of our kernels alone: it takes PyTorch's minutes
        command += ["--kernel-name", f"kernel_substring={OURS}"]
    if tool == "initcheck":  # memory that is used again would count as initialised
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, *(["-k", keyword] if keyword else [])]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        log, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        if time.monotonic() >= deadline:
            return None
        log, code = (error.stdout or b"").decode(errors="replace"), None
    findings = Counter(re.findall(rf"\bat ({OURS}\w+)", log)) + Counter(re.findall(rf"hazard.*?({OURS}\w+)", log))
    summaries = re.findall(r"^(?:\d+ \w+.*) in [\d.]+s.*$", log, re.M)
    summary = summaries[-1] if summaries else f"did not end within {limit:.0f} s" if code is None else "crashed"
    if set(findings) - AFTER_TMA.get(tool, set()):
        status = "findings"
    elif "passed" in summary and "failed" not in summary:
        status = "clean"
    elif "CUBLAS_STATUS_EXECUTION_FAILED" in log or "Internal Sanitizer Error" in log:
        status = "not checked"
    else:
        status = "" if re.fullmatch(r"\d+ deselected.*", summary) else "failed"
    return Outcome(tool, test, summary, findings, status, log)


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(description="compute-sanitizer over the operations' GPU tests.")
    p.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    p.add_argument("-k", default="", help="parts of the names of test functions, comma-separated (default: all)")
    p.add_argument("--processes", type=int, default=4)
    p.add_argument("--limit-s", type=float, default=600.0, help="seconds for one test function")
    p.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which everything ends; the rest stays owed")
    p.add_argument("--record", action="store_true", help=f"note how each test ended in {RECORD.name} of the results")
    p.add_argument("--owed", action="store_true", help="put which operations are to be checked at the end of the log, print it, and end")
    p.add_argument("--log", type=Path, help="a file for what the sanitizer printed where it found something or a test failed")
    args = p.parse_args(arguments)
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if args.owed:
        write_owed(record)
        return 0
    tests = [test for test in functions() if any(part in test for part in args.k.split(","))]
    cases = {"racecheck": ("bfloat16 or not float", "float32")}
    jobs = [(tool, test, keyword) for tool in args.tools for test in tests for keyword in cases.get(tool, ("bfloat16 or not float",))]
    left, ended, deadline = Counter(job[:2] for job in jobs), {}, time.monotonic() + args.budget_s
    sources, commit = digests(), package_version().partition("+")[2] or "unknown"
    count, logs = Counter(), []
    with ThreadPoolExecutor(args.processes) as pool:
        for future in as_completed([pool.submit(sanitize, *job, args.limit_s, deadline) for job in jobs]):
            if (outcome := future.result()) is None:
                count["out of time"] += 1
                continue
            ended.setdefault((outcome.tool, outcome.test), []).append(outcome)
            # Each test as soon as all its dtypes ended: a run that is cut short keeps what it has found out.
            if args.record and len(outcomes := ended[outcome.tool, outcome.test]) == left[outcome.tool, outcome.test]:
                record = recorded(outcomes, record, sources, commit)
                RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            if not outcome.status:
                continue
            count[outcome.status] += 1
            found = ", ".join(f"{name} {times}" for name, times in outcome.findings.items())
            note = " (written by TMA stores)" if found and outcome.status == "clean" else ""
            line = f"{outcome.tool:<10} {outcome.status:<12} {outcome.test:<75} {outcome.summary}; {found}{note}".rstrip("; ")
            print(line, flush=True)
            if outcome.status != "clean":
                logs.append(f"{line}\n{outcome.log}\n")
    print(", ".join(f"{times} {status}" for status, times in count.items()))
    if args.record:
        write_owed(record)
    if args.log and logs:
        args.log.write_text("\n".join(logs))
    return int(bool(count["findings"] or count["failed"]))


if __name__ == "__main__":
    sys.exit(main())
