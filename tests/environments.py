"""Runs tests with other releases of transformers, kernels and torch than the pinned ones: `python -m tests.environments [NAME ...]`.

Each environment is a virtual environment in .cache/environments, made once: what is asked for, what that needs in other releases than the
pinned ones, and behind these the packages of the interpreter that runs this.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache/environments"
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "newest": ("transformers==5.24.0",),
    "oldest": ("transformers==5.17.0", "kernels==0.16.2"),
    "newest-torch": ("transformers==5.24.0", "torch==2.15.0"),
    "gpu-torch": ("transformers==5.22.2", "torch==2.11.0"),  # what the measurements on GPUs were made with
    "oldest-torch": ("transformers==5.17.0", "kernels==0.16.2", "torch==2.6.0"),
}
FEWER = ("patching", "hub_mapping", "forwards_of_others", "recomputation", "layers", "model_losses", "keeping", "saving", "versions")  # CI
TESTS = (*FEWER, "checkpointing", "recompute_mlp", "training", "texts", "compiled_numbers", "families", "qwen3_5", "rows", "lookups",
         "recognised", "eight_bit_weights", "expert_adapters", "four_bits")
OF_TORCH = {"gpu-torch": ("compile", "sequence_parallel", "parallel")}  # more, of what differs between releases of torch
SEEN = "import kernels, torch, transformers; print(*(f'{m.__name__}=={m.__version__}' for m in (kernels, torch, transformers)))"


def path_of(test: str) -> Path:
    """The file of tests, or the folder of several, that has a name."""
    folder = ROOT / "tests/cpu" / test
    return folder if folder.is_dir() else folder.with_name(f"test_{test}.py")


def interpreter_of(name: str) -> str:
    """The interpreter of an environment, which is made where it is not there yet."""
    folder, packages = FOLDER / name, ENVIRONMENTS[name]
    ready, interpreter = folder / ".ready", str(folder / "bin/python")
    made = ready.is_file() and ready.read_text() == " ".join(packages)
    if not made:
        venv.create(folder, clear=True)
    packages_here = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pinned = Path(sysconfig.get_path("purelib")).resolve()  # which may have moved since the environment was made
    (packages_here / "pinned.pth").write_text(f"import site; site.addsitedir({str(pinned)!r})\n", encoding="utf-8")
    if made:
        return interpreter
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *packages], check=True)
    ready.write_text(" ".join(packages))
    return interpreter


def run(name: str, tests: Sequence[str], options: Sequence[str]) -> int:
    """Runs tests in an environment, and returns pytest's status. Raises RuntimeError when other releases are found there than asked for."""
    interpreter, environment = interpreter_of(name), {**os.environ, "OMP_NUM_THREADS": "1"}
    if any(package.startswith("kernels==") for package in ENVIRONMENTS[name]):
        environment["BASTILE_TESTS_TOOLS"] = sys.executable
    command = [interpreter, "-c", SEEN]
    seen = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    found = {package.partition("+")[0] for package in seen}
    if not found >= set(ENVIRONMENTS[name]):
        raise RuntimeError(f"{name} has {' '.join(seen)}, expected {' '.join(ENVIRONMENTS[name])}")
    print(f"--- {name}: {' '.join(seen)}", flush=True)
    paths = map(str, map(path_of, tests))
    command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal", *paths, *options]
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
        status = run(name, FEWER if options.fewer else (*TESTS, *OF_TORCH.get(name, ())), options.pytest)
        results[name] = f"{'passed' if status == 0 else f'pytest ended with {status}'}, {time.monotonic() - begin:.0f} s"
    print("\n".join(f"{name}: {result}" for name, result in results.items()))
    return int(any("passed" not in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
