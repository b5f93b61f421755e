"""Makes an unmodified Liger-Kernel run on the kernels of this package.

Liger knows two ways to its operations. Its dispatcher (`liger_kernel.backends`) takes back ends by a public call. Everything else, and
with it RMSNorm, the MLPs and the fused linear cross entropy of every patched model, holds its autograd functions by names bound at
import, so those names are set in every module of Liger that has them, and set back by `restore_liger`. The modules that define the
functions, `liger_kernel.ops.x`, and Liger's own back ends stay as they are: `impl="nvidia-triton"` still means Liger's. One function is
taken over where it is defined, too (`ASKED_AT_ITS_SOURCE`), and so are those of the chunked losses (chunked_back_end.py).

Liger's modules reach the dispatcher by a name of their own as well, which is set to a shorter way for operations that no other
implementation was chosen for: Liger's looks at the GPU on every call, and torch.compile cannot look into it.

LIGER_KERNEL_IMPL=bastile chooses this package where it is loaded before Liger's operations are imported: see `announce`. Liger looks for
implementations in its own folders only and reads the variable once, so the variable alone, without this package, is an error of Liger's.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import chunked_back_end, liger_pieces
from .liger_names import FUNCTIONS
from .shared.ops.operators import constant_when_traced
from .shared.runtime.device import kernels_run_on

TESTED = ("0.8.5",)
NAME = "nvidia-bastile"
SHORT_NAME = "bastile"  # as LIGER_KERNEL_IMPL may call it: the dispatcher takes the variable's words for a name
RANK = 0  # the lowest is chosen where the user named none; Liger's are 2 and up
ONLY_BY_NAME = 1000
TAKEN = "_bastile_takes"  # on `liger_kernel.ops`: name there -> Liger's own
STANDS_FOR = "_bastile_stands_for"  # on what stands for Liger's `dispatch`: that
NAMES = tuple(FUNCTIONS)
VARIABLE = "LIGER_KERNEL_IMPL"
REGISTRY = "liger_kernel.ops.backends.registry"
# By module: names that code of Liger's imports from there when it is called, and no back end of Liger's uses.
ASKED_AT_ITS_SOURCE = {"liger_kernel.ops.swiglu": ("LigerFusedGateUpSiLUMulFunction",)}
MEGATRONS_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"  # where apply_liger_kernel_to_megatron puts a class that closes over that name

# Of the dispatcher.
DISPATCHED = {
    "rms_norm": "LigerRMSNormFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "layer_norm": "LigerLayerNormFunction",
    "softmax": "LigerSoftmaxFunction",
    "swiglu": "LigerSiLUMulFunction",
    "geglu": "LigerGELUMulFunction",
    "rope": "LigerRopeFunction",
    "cross_entropy": "LigerCrossEntropyFunction",
    "kl_div": "LigerKLDivLossFunction",
    "jsd": "LigerJSDFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
}


# Of the dispatcher too, chosen only by name.
PIECES = ("cross_entropy_loss_and_grad", "jsd_loss_and_grad", "kl_loss_and_grad")


def use_in_liger() -> list:
    """Lets Liger-Kernel run on this package's kernels, prints what it took over, and returns the names.

    Before or after `apply_liger_kernel_to_*`, and before or after models were made. Calling it again changes nothing. On a GPU that this
    package has no kernels for, and where Liger is of another version than the tested ones and what it has under a name takes other
    arguments, Liger keeps its own, with one warning that names them. Another warning names the operations for which LIGER_KERNEL_IMPL,
    or `liger_kernel.backends.set_impl`, chooses another implementation. Raises ImportError when Liger is not installed.
    """
    version, ops = _liger()
    if torch.cuda.is_available() and not kernels_run_on(torch.empty(1, device="cuda")):
        warnings.warn("this package has no kernels that run on this GPU, so Liger keeps its own", RuntimeWarning, stacklevel=2)
        return []
    taken = dict(vars(ops).get(TAKEN, {}))
    missing = []
    for name in NAMES:
        ours, theirs = FUNCTIONS[name], taken.get(name, getattr(ops, name, None))
        if theirs is None or not _fits(theirs, ours):
            missing.append(name)
        else:
            taken[name] = theirs
    setattr(ops, TAKEN, taken)
    # What stands there is Liger's, or what another copy of this package put there.
    changed = _sweep({name: ((theirs, vars(ops)[name]), FUNCTIONS[name]) for name, theirs in taken.items()})
    chunked, more_missing, also_changed = chunked_back_end.take(_fits)
    changed, missing = changed or also_changed, missing + more_missing
    dispatched, elsewhere = _register(taken)
    if missing:
        warnings.warn(
            f"liger-kernel is {version}, expected {' or '.join(TESTED)}: it keeps its own {', '.join(missing)}", RuntimeWarning,
            stacklevel=2
        )
    if elsewhere:
        warnings.warn(
            f"{VARIABLE} or set_impl chooses another implementation of Liger's dispatcher for {', '.join(elsewhere)}: unset it, or make "
            f"it {SHORT_NAME}", RuntimeWarning, stacklevel=2
        )
    if changed:
        print(
            f"Liger {version} runs on the kernels of bastile/liger: {', '.join([*taken, *chunked])}; "
            f"by its dispatcher also {', '.join(dispatched) or 'nothing'}"
        )
    return [*taken, *chunked]


def announce() -> None:
    """Makes Liger understand LIGER_KERNEL_IMPL=bastile, where the environment says so and Liger has not read it yet.

    Liger's registry of implementations is put into `sys.modules` before the import of `liger_kernel.ops` looks into it, and `liger_impl`
    registered there. Liger then imports that itself. Does nothing where the environment says anything else, or Liger is not installed.
    """
    chosen = os.environ.get(VARIABLE, "").strip().lower()
    if chosen not in (SHORT_NAME, NAME) or "liger_kernel.ops" in sys.modules:
        return
    liger = importlib.util.find_spec("liger_kernel")
    if liger is None or liger.submodule_search_locations is None:
        return
    registry = sys.modules.get(REGISTRY)
    if registry is None:
        file = Path(liger.submodule_search_locations[0], *REGISTRY.split(".")[1:]).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(REGISTRY, file)
        if not file.is_file() or spec is None or spec.loader is None:
            warnings.warn(f"this Liger has no {REGISTRY}, so {VARIABLE}={chosen} means nothing to it", RuntimeWarning, stacklevel=2)
            return
        registry = importlib.util.module_from_spec(spec)
        sys.modules[REGISTRY] = registry
        spec.loader.exec_module(registry)
    registry.register_impl(registry.ImplInfo(chosen, devices=("cuda", "cpu"), module_path=f"{__package__}.liger_impl"))


def restore_liger() -> None:
    """Gives Liger its own operations back, also where modules of it were imported meanwhile. Does nothing where `use_in_liger` did
    nothing.

    Where LIGER_KERNEL_IMPL, or `liger_kernel.backends.set_impl`, still chooses this package, its name means Liger's own choice from now on,
    with a warning: Liger's dispatcher would find nothing under it.
    """
    chunked_back_end.give_back()
    ops = sys.modules.get("liger_kernel.ops")
    taken = vars(ops).pop(TAKEN, None) if ops is not None else None
    if not taken:
        return
    _sweep({name: ((vars(ops)[name],), theirs) for name, theirs in taken.items()})
    registry = sys.modules.get("liger_kernel.backends.registry")
    if registry is not None:
        _take_shortcut_out()
        # Liger has no public way to take a back end out.
        registered = getattr(registry, "_REGISTRY", {})
        for operation, name in list(registered):
            if _is_ours(name):
                del registered[operation, name]
        importlib.import_module("liger_kernel.backends").clear_available_cache()
        _mean_ligers_own_by_our_name()


def _mean_ligers_own_by_our_name():
    """Registers Liger's own choice under the name of this package, for operations for which the environment or `set_impl` asks for it."""
    backends = importlib.import_module("liger_kernel.backends")
    asked = {operation: _asked_for(operation) for operation in (*DISPATCHED, *PIECES)}
    asked = {operation: name for operation, name in asked.items() if _is_ours(name)}
    for operation, name in asked.items():

        def ligers_own(*args, operation=operation, **options):
            found = [name for name in backends.available_impls(operation) if not _is_ours(name)]
            if not found:
                raise backends.NoImplAvailableError(f"Liger has no implementation of '{operation}' that runs here")
            return backends.resolve_impl(operation, found[0]).call(*args, **options)

        backends.register_impl(operation, impl_name=name, preference_rank=ONLY_BY_NAME, notes="Liger's own choice")(ligers_own)
    if asked:
        warnings.warn(
            f"{VARIABLE} or set_impl chooses {next(iter(asked.values()))}, which restore_liger() took out of Liger's dispatcher: it means "
            "Liger's own choice from now on. Unset it", RuntimeWarning, stacklevel=3
        )


def _liger():
    """(version, liger_kernel.ops). Raises ImportError when it is absent."""
    announce()
    try:
        version = metadata.version("liger-kernel")
        return version, importlib.import_module("liger_kernel.ops")
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ImportError(f"liger-kernel cannot be imported ({error}). Run: pip install liger-kernel=={TESTED[-1]}") from error


def _parameters(function) -> list:
    """(name, default) of what callers pass: of `.apply`, or of an autograd function's forward without its context."""
    skipped = 0
    if isinstance(function, type):
        skipped = 1 if issubclass(function, torch.autograd.Function) else 0
        function = getattr(function, "forward" if skipped else "apply")
    return [(p.name, p.default) for p in list(inspect.signature(function).parameters.values())[skipped:]]


def _fits(theirs, ours) -> bool:
    """Whether ours takes whatever theirs takes, in the same places."""
    found, expected = _parameters(theirs), _parameters(ours)
    return found == expected[: len(found)] and all(default is not inspect.Parameter.empty for _, default in expected[len(found) :])


def _holds_names(module: str) -> bool:
    if module in ("liger_kernel", "liger_kernel.ops", "liger_kernel.functional"):
        return True
    return module.split(".")[:2] in (["liger_kernel", "transformers"], ["liger_kernel", "megatron"])


def _sweep(changes) -> int:
    """changes: name -> (what may stand there, what is to stand there). Returns how many were changed."""
    count = 0
    for module_name, module in list(sys.modules.items()):
        if module is None or not _holds_names(module_name):
            continue
        for name, (olds, new) in changes.items():
            found = vars(module).get(name)
            if found is not new and any(found is old for old in olds):
                setattr(module, name, new)
                count += 1
    for module_name, names in ASKED_AT_ITS_SOURCE.items():
        for name in (name for name in names if name in changes and module_name in sys.modules):
            setattr(sys.modules[module_name], name, changes[name][1])
            _exchange_in_megatron(name, changes[name][1])
    return count


def _exchange_in_megatron(name, function) -> None:
    """Sets what the class that Liger has put into Megatron closes over by a name."""
    apply: Any = getattr(getattr(sys.modules.get(MEGATRONS_SWIGLU), "SwiGLUFunction", None), "apply", None)
    code = getattr(apply, "__code__", None)
    if code is not None and apply.__module__.startswith("liger_kernel."):
        for variable, cell in zip(code.co_freevars, apply.__closure__ or ()):
            if variable == name:
                cell.cell_contents = function


def _register(taken) -> tuple:
    """Makes the operations the dispatcher's first choice; returns their names there, and those for which the user has made another."""
    try:
        backends = importlib.import_module("liger_kernel.backends")
        functional = importlib.import_module("liger_kernel.functional")  # declares the operations
        register, dispatch = backends.register_impl, backends.dispatch
    except (ImportError, AttributeError):
        return [], []
    ours = {operation: _implementation(FUNCTIONS[name]) for operation, name in DISPATCHED.items() if name in taken}
    pieces = {operation: getattr(liger_pieces, operation) for operation in PIECES}
    for rank, functions in ((RANK, ours), (ONLY_BY_NAME, pieces)):
        for operation, function in functions.items():
            register(operation, impl_name=NAME, preference_rank=rank, notes="cuTile, prebuilt")(function)
            for name in {SHORT_NAME, _chosen(operation)}:  # as the environment spells it
                if _is_ours(name) and name != NAME:
                    register(operation, impl_name=name, preference_rank=rank + 1, notes=f"{NAME} by another name")(function)
    _sweep({"dispatch": ((dispatch, vars(functional).get("dispatch")), _shortcut(dispatch, ours))})
    elsewhere = [operation for operation in ours if not _chooses_ours(operation)]
    return [operation for operation in ours if operation not in elsewhere], elsewhere


def _shortcut(dispatch, ours):
    """Returns what stands for Liger's `dispatch` in its modules."""

    def shortcut(op_name, *args, impl=None, backend=None, **options):
        function = ours.get(op_name)
        if function is None or impl is not None or backend is not None or not _chooses_ours(op_name):
            return dispatch(op_name, *args, impl=impl, backend=backend, **options)
        return function(*args, **options)

    vars(shortcut)[STANDS_FOR] = dispatch
    return shortcut


def _take_shortcut_out():
    for name, module in list(sys.modules.items()):
        if module is not None and _holds_names(name):
            dispatch = getattr(vars(module).get("dispatch"), STANDS_FOR, None)
            if dispatch is not None:
                vars(module)["dispatch"] = dispatch


@constant_when_traced
def _chooses_ours(operation) -> bool:
    """Whether neither the environment nor `set_impl` chooses another implementation; under torch.compile, when it compiles."""
    chosen = _asked_for(operation)
    return not chosen or _is_ours(chosen)


def _is_ours(name: str) -> bool:
    """Tells whether a name, in any spelling that Liger takes for LIGER_KERNEL_IMPL, is this package's."""
    return name.strip().lower() in (NAME, SHORT_NAME)


@lru_cache(maxsize=None)
def _variables(operation) -> tuple:
    """Environment variables in which Liger's dispatcher looks for a choice, in its order."""
    suffix = operation.upper()
    return f"{VARIABLE}_{suffix}", f"LIGER_KERNEL_BACKEND_{suffix}", VARIABLE, "LIGER_KERNEL_BACKEND"


def _chosen(operation) -> str:
    """What the environment chooses for an operation of the dispatcher."""
    for name in _variables(operation):
        found = os.environ.get(name)
        if found:
            return found
    return ""


def _asked_for(operation) -> str:
    """Returns the implementation that the environment names; else that of `set_impl`, or of the variable that came before `set_impl`."""
    of_process = vars(sys.modules["liger_kernel.backends.dispatch"])
    return _chosen(operation) or sys.modules["liger_kernel.backends"].get_impl() or of_process.get("_GLOBAL_BACKEND") or ""


def _implementation(function):
    def implementation(*args, mode=None, **options):
        """mode: of the dispatcher; there is one."""
        return function.apply(*args, **options)

    return implementation
