"""Makes an unmodified Liger-Kernel run on the kernels of this package.

Liger knows two ways to its operations. Its dispatcher (`liger_kernel.backends`) takes back ends by a public call. Everything else, and
with it RMSNorm, the MLPs and the fused linear cross entropy of every patched model, holds its autograd functions by names bound at
import, so those names are set in every module of Liger that has them, and set back by `restore_liger`. The modules that define the
functions, `liger_kernel.ops.x`, and Liger's own back ends stay as they are: `impl="nvidia-triton"` still means Liger's.
"""

import importlib
import inspect
import sys
import warnings
from importlib import metadata

import torch

from . import liger_names
from .shared.runtime.device import kernels_run_on

TESTED = ("0.8.5",)
NAME = "nvidia-bastile"
RANK = 0  # the lowest is chosen where the user named none; Liger's are 2 and up
TAKEN = "_bastile_takes"  # on `liger_kernel.ops`: name there -> Liger's own

NAMES = (
    "LigerRMSNormFunction",
    "LigerFusedAddRMSNormFunction",
    "LigerLayerNormFunction",
    "LigerGroupNormFunction",
    "LigerPolyNormFunction",
    "LigerDyTFunction",
    "LigerSoftmaxFunction",
    "LigerSparsemaxFunction",
    "LigerSiLUMulFunction",
    "LigerFusedGateUpSiLUMulFunction",
    "LigerGELUMulFunction",
    "LigerRopeFunction",
    "LigerLlama4RopeFunction",
    "LigerQwen2VLMRopeFunction",
    "LigerCrossEntropyFunction",
    "LigerKLDivLossFunction",
    "LigerJSDFunction",
    "LigerTVDLossFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearJSDFunction",
    "LigerFusedNeighborhoodAttentionFunction",
    "LigerTiledMLPFunction",
    "apply_tiled_mlp",
)
# Of the dispatcher. What it calls `*_loss_and_grad` are pieces of operations that are taken as a whole.
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


def use_in_liger() -> list:
    """Lets Liger-Kernel run on this package's kernels, prints what it took over, and returns the names.

    Before or after `apply_liger_kernel_to_*`, and before or after models were made. Calling it again changes nothing. On a GPU that this
    package has no kernels for, and where Liger is of another version than the tested ones and what it has under a name takes other
    arguments, Liger keeps its own, with one warning that names them. Raises ImportError when Liger is not installed.
    """
    version, ops = _liger()
    if torch.cuda.is_available() and not kernels_run_on(torch.empty(1, device="cuda")):
        warnings.warn("this package has no kernels that run on this GPU, so Liger keeps its own", RuntimeWarning, stacklevel=2)
        return []
    taken = dict(vars(ops).get(TAKEN, {}))
    missing = []
    for name in NAMES:
        ours, theirs = getattr(liger_names, name, None), taken.get(name, getattr(ops, name, None))
        if ours is None or theirs is None or not _fits(theirs, ours):
            missing.append(name)
        else:
            taken[name] = theirs
    setattr(ops, TAKEN, taken)
    # What stands there is Liger's, or what another copy of this package put there.
    _sweep({name: ((theirs, vars(ops)[name]), getattr(liger_names, name)) for name, theirs in taken.items()})
    dispatched = _register(taken)
    if missing:
        warnings.warn(
            f"liger-kernel is {version}, expected {' or '.join(TESTED)}: it keeps its own {', '.join(missing)}", RuntimeWarning,
            stacklevel=2
        )
    print(f"Liger {version} runs on the kernels of bastile/liger: {', '.join(taken)}; "
          f"by its dispatcher also {', '.join(dispatched) or 'nothing'}")
    return list(taken)


def restore_liger() -> None:
    """Gives Liger its own operations back, also where modules of it were imported meanwhile. Does nothing where `use_in_liger` did
    nothing."""
    ops = sys.modules.get("liger_kernel.ops")
    taken = vars(ops).pop(TAKEN, None) if ops is not None else None
    if not taken:
        return
    _sweep({name: ((vars(ops)[name],), theirs) for name, theirs in taken.items()})
    registry = sys.modules.get("liger_kernel.backends.registry")
    if registry is not None:  # Liger has no public way to take a back end out
        for operation in DISPATCHED:
            getattr(registry, "_REGISTRY", {}).pop((operation, NAME), None)
        importlib.import_module("liger_kernel.backends").clear_available_cache()


def _liger():
    """(version, liger_kernel.ops). Raises ImportError when it is absent."""
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
    parts = module.split(".")
    return module in ("liger_kernel", "liger_kernel.ops") or parts[:2] in (["liger_kernel", "transformers"], ["liger_kernel", "megatron"])


def _sweep(changes) -> None:
    """changes: name -> (what may stand there, what is to stand there)."""
    for module_name, module in list(sys.modules.items()):
        if module is None or not _holds_names(module_name):
            continue
        for name, (olds, new) in changes.items():
            if any(vars(module).get(name) is old for old in olds):
                setattr(module, name, new)


def _register(taken) -> list:
    """Makes the operations the dispatcher's first choice; returns their names there."""
    try:
        backends = importlib.import_module("liger_kernel.backends")
        importlib.import_module("liger_kernel.functional")  # declares the operations
        register = backends.register_impl
    except (ImportError, AttributeError):
        return []
    found = []
    for operation, name in DISPATCHED.items():
        if name in taken:
            register(operation, impl_name=NAME, preference_rank=RANK, notes="cuTile, prebuilt")(_implementation(getattr(liger_names, name)))
            found.append(operation)
    return found


def _implementation(function):
    def implementation(*args, mode=None, **options):
        """mode: of the dispatcher; there is one."""
        return function.apply(*args, **options)

    return implementation
