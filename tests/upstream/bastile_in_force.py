"""A pytest plugin that records the outcome of every test and, where it is told to, puts a package in force before the first one.

It is loaded with PYTEST_PLUGINS and this folder on PYTHONPATH, not as a module of `tests`: what it joins is often called that too.
Processes that a test starts with torch.multiprocessing.spawn have the package in force as well. BASTILE_UPSTREAM holds what it shall do,
in JSON: {"record": file of the outcomes, "package": folder with build/ or null, "backend": "cpu" or "cuda", "call": public function of
the package, "interpreted": bool, "repository": the root of this one}.
"""

import functools
import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.multiprocessing

TASK = json.loads(os.environ["BASTILE_UPSTREAM"])
layer_calls: Counter = Counter()
state: dict = {}
spawn = torch.multiprocessing.spawn


def pytest_sessionstart(session):
    if TASK["package"]:
        put_in_force()
        torch.multiprocessing.spawn = spawn_in_force


def put_in_force():
    """Loads the package and calls it: models that this process makes from here on have its layers."""
    from kernels import get_local_kernel

    package = get_local_kernel(Path(TASK["package"]), backend=TASK["backend"])
    if TASK["interpreted"]:
        interpret(package)
    getattr(package, TASK["call"])()
    count_layers(package)
    state.update(package=package, patched=patched(package))


@functools.wraps(spawn)
def spawn_in_force(fn, args=(), *others, **options):
    return spawn(run_in_force, (fn, args), *others, **options)


def run_in_force(index, function, args):
    """Runs a function in a spawned process."""
    put_in_force()
    function(index, *args)
    note_package()


def interpret(package):
    """Gives a package the interpreter in the place of a GPU."""
    sys.path.append(TASK["repository"])  # last, so that its `tests` is not what the tests import
    from interpreter.backend import InterpreterBackend

    runtime = type("Runtime", (), {name: module(package, f"shared.runtime.{name}") for name in ("artifacts", "launch", "device")})
    files = (Path(TASK["repository"]) / "kernel_src").glob("*.py")
    operations = sorted(path.stem for path in files if "\ndef variants(" in path.read_text(encoding="utf-8"))
    runtime.launch.backend = InterpreterBackend(runtime, operations)


def module(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


def patched(package):
    """What the package says that it has patched; None for one that cannot say."""
    listed = getattr(package, "get_patched_ops", None)
    return listed and sorted(listed())


def count_layers(package):
    """Counts the calls of the functions that the layers call: otherwise no result shows whether a test reached one. The layers are in the
    package's own file and, where families share them, in what makes them of a family's row of the table."""
    for file in ("layers", "shared.hf.layers", "shared.hf.vision", "shared.hf.delta_net"):
        layers = sys.modules.get(f"{package.__name__}.{file}")
        for name, function in list(vars(layers).items()) if layers else ():
            if callable(function) and name.endswith("_forward"):
                setattr(layers, name, counted(name, function))


def counted(name, function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if not torch.compiler.is_compiling():
            layer_calls[name] += 1
        return function(*args, **kwargs)

    return wrapper


def write(**line):
    with open(TASK["record"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report):
    """Records {test, when, outcome, error}; error: the first line of the exception's text, which begins with its type."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # its parent is told too
    crash = getattr(report.longrepr, "reprcrash", None)
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    message = crash.message.strip().splitlines() if crash else ()
    write(test=report.nodeid, when=report.when, outcome=outcome, error=message[0] if message else "")


def pytest_sessionfinish(session):
    note_package()


def note_package():
    """Records which of the package's functions ran in this process, and that what it had patched still is."""
    if state:
        write(patched=[state["patched"], patched(state["package"])], layer_calls=layer_calls)
