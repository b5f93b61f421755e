"""Runs tests with other releases of transformers, kernels and torch than the pinned ones: `python -m tests.environments [NAME ...]`.

Each environment is a folder of packages in front of the pinned ones, made once, in .cache/environments. The oldest and the newest of each
library are among them; a release that transformers_texts records is added here.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache/environments"
# torch brings what it needs with it; the others find that among the pinned packages.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "newest": ("transformers==5.23.0",),
    "oldest": ("transformers==5.17.0", "kernels==0.16.2"),
    "newest-torch": ("transformers==5.23.0", "torch==2.15.0"),
    "oldest-torch": ("transformers==5.17.0", "kernels==0.16.2", "torch==2.6.0"),
}
TESTS = ("patching", "recomputation", "checkpointing", "layers", "keeping", "saving", "training", "versions", "texts")
FEWER = ("patching", "recomputation", "layers", "keeping", "saving", "versions")  # what CI runs in addition to the pinned releases
SEEN = "import kernels, torch, transformers; print(*(f'{m.__name__}=={m.__version__}' for m in (kernels, torch, transformers)))"


def folder_of(name: str) -> Path:
    """The folder of an environment, which is made where it is not there yet."""
    folder, packages = FOLDER / name, ENVIRONMENTS[name]
    ready = folder / ".ready"
    if ready.is_file() and ready.read_text() == " ".join(packages):
        return folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    for package in packages:
        alone = [] if package.startswith("torch==") else ["--no-deps"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *alone, "--target", str(folder), package], check=True)
    ready.write_text(" ".join(packages))
    return folder


def run(name: str, tests: Sequence[str], options: Sequence[str]) -> int:
    """Runs tests in an environment, and returns pytest's status. Raises RuntimeError when other releases are found there than asked for."""
    folder = folder_of(name)
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SEEN]
    seen = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    found = {package.partition("+")[0] for package in seen}
    if not found >= set(ENVIRONMENTS[name]):
        raise RuntimeError(f"{name} has {' '.join(seen)}, expected {' '.join(ENVIRONMENTS[name])}")
    print(f"--- {name}: {' '.join(seen)}", flush=True)
    files = [f"tests/cpu/test_{test}.py" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal", *files, *options]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; all by default")
    parser.add_argument("--fewer", action="store_true", help=f"only the tests of {', '.join(FEWER)}")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="options for pytest, at the end")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in ENVIRONMENTS:
            parser.error(f"no environment {name!r}, expected one of {', '.join(ENVIRONMENTS)}")
    results = {}
    for name in options.names or ENVIRONMENTS:
        begin = time.monotonic()
        status = run(name, FEWER if options.fewer else TESTS, options.pytest)
        results[name] = f"{'passed' if status == 0 else f'pytest ended with {status}'}, {time.monotonic() - begin:.0f} s"
    print("\n".join(f"{name}: {result}" for name, result in results.items()))
    return int(any("passed" not in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
