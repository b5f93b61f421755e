"""A pytest plugin that records the outcome of every test and, where it is told to, puts a package in force before the first one.

With a package and without, transformers' tiny models get what published ones have and the fused layers serve: SiLU where their tests say
GELU, which is a default that all share, and four taps of a short convolution where they say two.

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
layer_calls: Counter = Counter()  # by function, the calls that it did not leave to the forward of the class
left: Counter = Counter()  # by function, the others
reasons: Counter = Counter()  # by "function: reason", of those
entered: list = []  # the functions that are running
state: dict = {}
spawn = torch.multiprocessing.spawn


def pytest_sessionstart(session):
    put_in_force()
    torch.multiprocessing.spawn = spawn_in_force


def pytest_collection_finish(session):
    as_published()


def as_published():
    """Changes the sizes of models that are made from here on: of a table of defaults, wherever it was imported, and of configurations."""
    for module in list(sys.modules.values()):
        defaults = getattr(module, "__dict__", {}).get("_TEXT_MODEL_TESTER_DEFAULTS", {})
        if defaults.get("hidden_act") == "gelu":
            defaults["hidden_act"] = "silu"
    configurations = sys.modules.get("transformers.configuration_utils")
    waiting = [configurations.PreTrainedConfig] if configurations else []
    while waiting:
        config = waiting.pop()
        waiting += config.__subclasses__()
        if hasattr(config, "linear_conv_kernel_dim") and "__init__" in vars(config):
            config.__init__ = with_four_taps(config.__init__)


def with_four_taps(make):
    @functools.wraps(make)
    def wrapper(self, *args, **kwargs):
        if kwargs.get("linear_conv_kernel_dim") == 2:
            kwargs["linear_conv_kernel_dim"] = 4
        make(self, *args, **kwargs)

    return wrapper


def put_in_force():
    """Loads the package, if there is one, and calls it: models that this process makes from here on have its layers."""
    if not TASK["package"]:
        return
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
    as_published()
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
    """Counts the calls of the functions that the layers call, and those of them that went on to transformers' own forward: otherwise
    no result shows whether a test reached ours. The layers are in the package's own file and, where families share them, in what makes
    them of a family's row of the table."""
    for file in ("layers", "shared.hf.install.layers", "shared.hf.model.vision", "shared.hf.layer.delta_net"):
        layers = sys.modules.get(f"{package.__name__}.{file}")
        for name, function in list(vars(layers).items()) if layers else ():
            if callable(function) and name.endswith("_forward"):
                setattr(layers, name, counted(name, function))
    for file in ("layer.decoder_layer", "layer.delta_net", "family.experts"):  # not those of whole models, which always go on
        layers = sys.modules.get(f"{package.__name__}.shared.hf.{file}")
        for name, noticed in (("original_forward", leave), ("why_not_fusable", explain), ("why_not_ours", explain)):
            if hasattr(layers, name):
                setattr(layers, name, noticing(getattr(layers, name), noticed))


def counted(name, function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        layer_calls[name] += 1
        entered.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            entered.pop()

    return wrapper


def noticing(function, noticed):
    """Calls a function and tells `noticed` its result, where one that is counted called it."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        found = function(*args, **kwargs)
        if not torch.compiler.is_compiling() and entered:
            noticed(found)
        return found

    return wrapper


def leave(forward):
    layer_calls[entered[-1]] -= 1
    left[entered[-1]] += 1


def explain(reason):
    if reason:
        reasons[f"{entered[-1]}: {getattr(reason, 'text', reason)}"] += 1


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
        write(patched=[state["patched"], patched(state["package"])], layer_calls=layer_calls, left=left, reasons=reasons)
