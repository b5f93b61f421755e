"""compute-sanitizer over the operations' GPU tests: `make test-sanitizer`, or `python -m tests.sanitizer --tools racecheck`.

Every test function runs in a process of its own, several at a time, so one that the sanitizer itself fails on takes no other along.
What PyTorch's kernels are reported for is left out. Exits with 1 when a kernel of this project has a finding or a test fails.

initcheck does not see what TMA stores write: it reports reads of what such a store filled. Those are listed apart from others, by
the kernel that reads. What shows that nothing is read uninitialised is the fixture `poisoned` of tests/gpu: there PyTorch fills every
tensor that it allocates with NaN first.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("tests/gpu/test_ops.py", "tests/gpu/test_gpt_oss.py")
TOOLS = ("memcheck", "racecheck", "initcheck")
OURS = "bastile_"
# The kernels that write with TMA stores what another kernel reads as partial sums.
AFTER_TMA = {"initcheck": {"bastile_column_sum", "bastile_column_sum_pair"}}


@dataclass
class Outcome:
    tool: str
    test: str
    summary: str
    findings: Counter
    ok: bool
    log: str
    seconds: float


def functions() -> list[str]:
    """file::function of every test."""
    return [f"{file}::{name}" for file in FILES for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)]


def sanitize(tool: str, test: str, keyword: str, limit: float) -> Outcome:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", "--show-backtrace", "no"]
    environment = dict(os.environ)
    if tool == "racecheck":  # of our kernels alone: it takes PyTorch's minutes
        command += ["--kernel-name", f"kernel_substring={OURS}"]
    if tool == "initcheck":  # memory that is used again would count as initialised
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, *(["-k", keyword] if keyword else [])]
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        log, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        log, code = (error.stdout or b"").decode(errors="replace"), None
    findings = Counter(re.findall(rf"\bat ({OURS}\w+)", log)) + Counter(re.findall(rf"hazard.*?({OURS}\w+)", log))
    tests = re.findall(r"^(?:\d+ \w+.*) in [\d.]+s.*$", log, re.M)
    tests = tests[-1] if tests else f"did not end within {limit:.0f} s" if code is None else "crashed"
    expected = AFTER_TMA.get(tool, set())
    ok = not set(findings) - expected and "passed" in tests and "failed" not in tests
    return Outcome(tool, test, tests, findings, ok, log, time.monotonic() - start)


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(description="compute-sanitizer over the operations' GPU tests.")
    p.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    p.add_argument("-k", default="bfloat16 or not float", help="of pytest: which cases (default: bf16 and those without a dtype)")
    p.add_argument("--processes", type=int, default=4)
    p.add_argument("--limit-s", type=float, default=600.0, help="seconds for one test function")
    p.add_argument("--log", type=Path, help="a file for what the sanitizer printed where it found something or a test failed")
    args = p.parse_args(arguments)
    jobs = [(tool, test) for tool in args.tools for test in functions()]
    bad, logs = 0, []
    with ThreadPoolExecutor(args.processes) as pool:
        for outcome in pool.map(lambda job: sanitize(*job, args.k, args.limit_s), jobs):
            found = ", ".join(f"{name} {count}" for name, count in outcome.findings.items())
            after_tma = found and outcome.ok and " (written by TMA stores)"
            line = f"{outcome.tool:<10} {outcome.test:<75} {outcome.summary}; findings: {found or 'none'}{after_tma or ''}"
            print(line, flush=True)
            bad += not outcome.ok
            if not outcome.ok:
                logs.append(f"{line}\n{outcome.log}\n")
    print(f"{len(jobs) - bad} of {len(jobs)} without a finding")
    if args.log and logs:
        args.log.write_text("\n".join(logs))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
