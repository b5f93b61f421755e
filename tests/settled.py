"""Tests of what lies below hf/: their outcome follows from files alone, so they are left out while these are what they were when the tests
last passed. `python -m tests.settled` runs them all, and records the digest of the files. `make test-rest` has the first case of each
function in any case, which shows that the record also holds where a test runs: with another Python, or on another processor.

The files are those of the interpreter, the kernels, and the package's runtime, ops and decoder, the optimizer and the self check, the
names that the packages offer, the tests themselves, and whatever these import but what only selects tests; with the releases of PyTorch and
cuda-tile. Comments and docstrings do not count.
"""

import argparse
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.verdicts import ROOT, WHOLE, Sources, imported, releases

RECORD = ROOT / "tests/settled.txt"
# By file below tests/cpu: the functions without "test_", "" for all of them.
SETTLED = {
    "test_operations.py": "operation without_gradients_and_under_transforms a_second_derivative_is_refused torch_compile",
    **dict.fromkeys(
        ("test_kernels.py", "test_properties.py", "test_alignment.py", "test_slabs.py", "test_one_dimension.py", "test_sizes.py",
         "test_large_logits.py", "test_large_values.py", "test_wrong_input.py", "test_gated_delta.py", "test_delta_work.py",
         "test_short_conv.py", "test_attention_kernels.py", "test_attention.py", "test_log_probs.py", "test_chunked_losses.py",
         "test_ignored_tokens.py", "test_loss_options.py", "test_ops.py", "test_loss.py", "test_expert_ids.py", "test_turned_signs.py",
         "test_replay.py", "test_compiled_nodes.py", "test_tensor_kinds.py",
         "test_chunked_losses_inside_liger.py"),
        "",
    ),
    "test_mutants.py": "without_an_error_every_check_passes",
    "test_autograd.py": "autograd the_backward_pass_does_what_is_needed_and_no_more the_loss_multiplies_no_more_than_is_needed "
    "without_gradients_nothing_of_a_backward_pass_runs derivatives_are_those_of_finite_differences "
    "derivatives_of_the_kernels_are_those_of_finite_differences",
    "test_compiled_numbers.py": "operations_with_symbols_for_their_numbers numbers_of_the_suite_that_change",
    "test_compile.py": "operators operators_with_kernels operations_compile_whole_and_once_for_all_lengths the_loss_compiles_whole "
    "rows_that_nobody_counted a_compiled_loss_of_some_gradients",
    "test_eight_bits.py": "each_product_is_near_enough what_is_odd_in_a_product",
    "test_family_operations.py": "operation",
}  # fmt: skip
# What they run besides what they import: of the package, and what makes the fixtures and the builds that they load.
BELOW = ("interpreter/*.py", "kernel_src/*.py", *(f"torch-ext/shared/{part}/*.py" for part in ("runtime", "ops", "decoder")),
         "torch-ext/shared/hf/optimizer.py", "torch-ext/shared/hf/say/self_check.py", "torch-ext/qwen3/*.py",
         "packages/*/torch-ext/*/*.py", "tests/conftest.py", "tests/cpu/conftest.py")  # fmt: skip
NAMED = "kernels.toml", "packages/*/kernels.toml"  # no Python
SELECTS = {"tests/settled.py", "tests/whole.py"}  # which tests run, and not what they do


def parts(root: Path = ROOT) -> set[str]:
    """The files, as `Sources.digest` takes them."""
    tests = {path for name in SETTLED for path in imported(f"tests/cpu/{name}")}
    found = {str(path.relative_to(root)) for pattern in BELOW for path in root.glob(pattern)}
    return {f"{path}:{WHOLE}" for path in (tests | found) - SELECTS}


def digest(root: Path = ROOT) -> str:
    """Changes with whatever the outcome of the tests follows from."""
    named = {str(path.relative_to(root)): path for pattern in NAMED for path in root.glob(pattern)}
    contents = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named.items()}
    return Sources(root).digest(parts(root), releases() | contents)


@functools.cache
def is_current() -> bool:
    """Tells whether the files are those with which the tests were recorded as passed."""
    return RECORD.exists() and RECORD.read_text().strip() == digest()


def is_settled(name: str) -> bool:
    """Tells whether a test is among these. name: its node's, without parameters."""
    file, _, function = name.removeprefix("tests/cpu/").partition("::")
    functions = SETTLED.get(file)
    return functions is not None and (not functions or function.removeprefix("test_") in functions.split())


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the tests while nothing has changed: the first case of each function for `make test-rest`, the others as known."""
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if is_settled(name) and is_current():
            item.add_marker(pytest.mark.known if name in seen else pytest.mark.whole)
            seen.add(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests, and records that they passed: all of them, so there are no options by which pytest might leave some out."""
    argparse.ArgumentParser(prog="python -m tests.settled", description=__doc__).parse_args(arguments)
    before = digest()
    whole = [f"tests/cpu/{file}" for file, functions in SETTLED.items() if not functions]
    some = [f"tests/cpu/{file}::test_{name}" for file, functions in SETTLED.items() for name in functions.split()]
    command = [sys.executable, "-m", "pytest", *whole, *some, "-q", "-n", "auto", "--dist", "worksteal"]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    if status == 0:
        RECORD.write_text(f"{before}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
