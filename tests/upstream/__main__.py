"""Compares the results of transformers' tests, or of another library's, with a package in force with those without it.

    python -m tests.upstream CHECKOUT                                    # what every package has to leave as it is, in 9 hours
    python -m tests.upstream CHECKOUT --short                            # the same without parallel and compiled tests, in one
    python -m tests.upstream CHECKOUT --package . --tests tests/models/qwen3 --interpreted -- -k "not generate"
    python -m tests.upstream LIGER --package packages/liger --call use_in_liger --tests test/transformers/test_rms_norm.py

CHECKOUT: a clone of the library at the tag that is installed, or as much of it as its tests import. What stands after -- goes to
pytest. On a machine with a GPU the package comes from its build/ ("make build"), else it is assembled for the CPU. Tests that differ run
once more, both ways, before they count. Exits with 1 when a test's outcome differs, when what was patched was not at the end, when a suite
reached nothing of ours, and when one could not be run, which does not keep the others from it.

These tests compare a model with itself: they see what breaks, not whether numbers are right. Those are compared in tests/cpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools import family_table

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("bastile_in_force.py")
PARALLEL = ("test_tp_", "tensor_parallel", "expert_parallel", "fsdp", "hsdp")  # in the names of tests that start processes
SHORT = " and ".join(f"not {name}" for name in (*PARALLEL, "compil"))
# What a suite is to have run in ours where it calls it at all.
FUSED = ("decoder_layer_forward", "delta_net_forward")
# Of Granite 4 every layer of the tests' models has experts or Mamba, which are not fused.
NEVER_FUSED = {"granitemoehybrid"}


class NotRun(Exception):
    """A suite could not be collected, or has no test that was chosen."""


def transformers_tests() -> dict[str, tuple[str, ...]]:
    """transformers' tests of the models of each package: those of decoders and moe are of their rows."""
    dense, sparse = ([own.family for own in family_table.rows(served)] for served in ("dense", "moe"))
    towers = [tower.modeling for family in dense for tower in family.towers if tower.modeling]
    modules = tuple(dict.fromkeys(name.split(".")[2] for name in (*(family.modeling for family in dense), *towers)))
    named = {".": ("qwen3", "qwen3_moe"), "packages/gpt-oss": ("gpt_oss",), "packages/decoders": modules}
    named["packages/moe"] = tuple(family.modeling.split(".")[2] for family in sparse)
    named["packages/qwen3_5"] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    return {package: tuple(f"tests/models/{name}/test_modeling_{name}.py" for name in names) for package, names in named.items()}


@dataclass
class Run:
    """outcomes: by test, a text that names what differs between runs; layer_calls, left: by function, the calls that ran in ours, and those
    that went on to transformers' forward; reasons: of these; patched: what it was at the beginning and at the end, of each process."""

    outcomes: dict[str, str] = field(default_factory=dict)
    layer_calls: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    patched: list = field(default_factory=list)

    def counts(self) -> str:
        kinds = Counter(outcome.replace(";", " ").split()[0] for outcome in self.outcomes.values())
        return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) or "no tests"

    def blind(self, path: str = "") -> list[str]:
        """What makes the comparison say nothing: that no function of ours ran, or that one of `FUSED` left all its calls to transformers.
        path: of the suite."""
        if not sum(self.layer_calls.values()):
            return ["no function of the package ran"]
        names = () if NEVER_FUSED.intersection(path.split("/")) else FUSED
        return [
            f"each of {self.left[name]} calls of {name} was left to transformers"
            for name in names
            if self.left[name] and not self.layer_calls[name]
        ]

    def alone(self) -> bool:
        """Tells whether tests of parallel training passed and none of the processes that they started had the package in force."""
        passed = [test for test, outcome in self.outcomes.items() if outcome == "passed" and any(name in test for name in PARALLEL)]
        return bool(passed) and len(self.patched) < 2


def read_record(path: Path) -> Run:
    """What the plugin wrote."""
    run, parts = Run(), {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        if "test" not in line:
            for name in ("layer_calls", "left", "reasons"):
                getattr(run, name).update(line.get(name, {}))
            run.patched.append(line["patched"])
        elif line["when"] == "call" or line["outcome"] != "passed":
            error = line["error"].partition(":")[0]
            parts.setdefault(line["test"], []).append(f"{line['outcome']} {error}".strip())
    run.outcomes = {test: "; ".join(sorted(set(found), key=found.index)) for test, found in parts.items()}
    return run


def run_tests(checkout: Path, tests, options, task) -> Run:
    """Runs pytest in the checkout. task: what the plugin shall do, less the names of files."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "outcomes")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},  # it is no worker of pytest-xdist
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN.parent), os.environ.get("PYTHONPATH")))),
            "PYTEST_PLUGINS": ",".join(filter(None, (PLUGIN.stem, os.environ.get("PYTEST_PLUGINS")))),
            "BASTILE_UPSTREAM": json.dumps({**task, "record": str(record), "repository": str(ROOT)}),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *options]
        done = subprocess.run(command, cwd=checkout, env=environment)
        if done.returncode not in (0, 1):  # all passed, some failed
            raise NotRun(f"pytest ended with {done.returncode} in {checkout}: {' '.join(tests)}")
        return read_record(record)


def differences(plain: Run, ours: Run) -> dict[str, tuple[str, str]]:
    """(without, with) of every test whose outcome differs."""
    tests = sorted(plain.outcomes.keys() | ours.outcomes.keys())
    pairs = ((test, (plain.outcomes.get(test, "did not run"), ours.outcomes.get(test, "did not run"))) for test in tests)
    return {test: pair for test, pair in pairs if pair[0] != pair[1]}


def compare(checkout: Path, tests, options, task) -> bool:
    """Runs tests without and with the package and prints what differs. Returns whether nothing does."""
    without = {**task, "package": None}
    plain, ours = run_tests(checkout, tests, options, without), run_tests(checkout, tests, options, task)
    found = differences(plain, ours)
    if found:
        once_more = differences(run_tests(checkout, found, (), without), run_tests(checkout, found, (), task))
        for test in found.keys() - once_more.keys():
            print(f"differed once: {test}: {found[test][0]} -> {found[test][1]}")
        found = once_more
    print(f"\n{' '.join(tests)}\n  without: {plain.counts()}\n  with:    {ours.counts()}")
    print(f"  calls:   {listed(ours.layer_calls)}, in {len(ours.patched)} processes")
    if ours.left:
        print(f"  left to transformers: {listed(ours.left)}")
    for reason, count in ours.reasons.most_common():
        print(f"           {count} x {reason}")
    if ours.alone():
        print("  ALONE    tests of parallel training passed, and no process that they started had the package in force")
    blind = ours.blind(tests[0]) if task["call"] == "apply" else []
    for why in blind:
        print(f"  BLIND    {why}")
    for test, (before, after) in found.items():
        print(f"  DIFFERS {test}: {before} -> {after}")
    for before, after in undone(ours):
        print(f"  UNDONE  what was patched at the beginning, {before}, was {after} at the end")
    return not (found or undone(ours) or blind)


def listed(counts: Counter) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count) or "none"


def undone(run: Run) -> list:
    """(at the beginning, at the end) of every process in which what was patched changed meanwhile."""
    return [pair for pair in run.patched if pair[0] != pair[1]]


def built(package: str, folder: str, interpreted: bool) -> tuple[str, str]:
    """(folder with build/, backend) of a package: its own on a GPU, else one that is assembled for the CPU in `folder`."""
    if torch.cuda.is_available() and not interpreted:
        return str(ROOT / package), "cuda"
    from tests.cpu.conftest import assemble_cpu

    return str(assemble_cpu(Path(folder), "\n# for the tests of others\n", package)), "cpu"


def main(arguments=None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, options = arguments[:end], arguments[end + 1 :]
    p = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__.partition("\n")[0])
    p.add_argument("checkout", type=Path, help="a clone of the library, at the tag that is installed")
    p.add_argument("--package", help="the folder of its build.toml in this repository; all that transformers has tests for by default")
    p.add_argument("--tests", nargs="+", metavar="PATH", help="in the checkout; by default transformers' of the package's models")
    p.add_argument("--call", default="apply", help="the package's function that puts it in force (%(default)s)")
    p.add_argument("--short", action="store_true", help="leave out tests of parallel training and compilation, which take most of the time")
    p.add_argument("--interpreted", action="store_true", help="run the kernels, in the interpreter, instead of the formulas in PyTorch")
    args = p.parse_args(own)
    if not args.checkout.is_dir():
        p.error(f"{args.checkout} is no folder; give a clone of the library at the tag that is installed")
    options = ["-k", SHORT, *options] if args.short else options  # a -k of the caller's takes its place
    if args.tests and not args.package:
        p.error("--tests needs --package")
    known = transformers_tests()
    if args.package and not args.tests and args.package not in known:
        p.error(f"--package {args.package} needs --tests; transformers has some for {', '.join(known)}")
    suites = {args.package: args.tests or known[args.package]} if args.package else known
    same, not_run = [], []
    for package, tests in suites.items():
        with tempfile.TemporaryDirectory() as folder:
            where, backend = built(package, folder, args.interpreted)
            task = {"package": where, "backend": backend, "call": args.call, "interpreted": args.interpreted}
            for path in tests:
                try:
                    same.append(compare(args.checkout, [path], options, task))
                except NotRun as why:
                    not_run.append(str(why))
                    print(f"\nNOT RUN  {why}")
    if not_run:
        raise SystemExit("\n".join(not_run))
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
