"""The operations of the package for Liger's users, and those of heads. Their files here have `all_cases(ops, device, dtypes)` too, (name,
function) of every check."""

import contextlib
import functools
import importlib

from tests.op_cases import Operations
from tests.ops.common import launched

NAMES = (
    "general_rms_norm", "layer_norm", "group_norm", "poly_norm", "dyt", "softmax", "sparsemax", "gated_activation", "tiled_mlp",
    "llama4_rope",
    "mrope", "cross_entropy", "divergence", "linear_jsd", "linear_log_probs", "linear_divergence",
    "neighborhood_attention",
)  # fmt: skip
# Where an operation lies that has not the name of its module.
MODULES = {
    **dict.fromkeys(("swiglu", "swiglu_packed", "geglu", "geglu_packed"), "gated_activation"),
    **dict.fromkeys(("tiled_swiglu", "tiled_geglu"), "tiled_mlp"),
    "rotary_complex": "llama4_rope",
    **dict.fromkeys(("rotary_multimodal", "partial_rotary"), "mrope"),
    "cross_entropy": "cross_entropy_of_logits",
    **dict.fromkeys(("kl_div", "jsd", "tvd"), "divergence"),
}


ROUNDS = {"llama": "first", "gemma": "last", "none": "last"}  # of Liger's casting modes


def general_rms_norm(norms, x, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """As the package for Liger's users has it. norms: the module of the operation."""
    return norms.rms_norm(x, weight, eps, offset, ROUNDS[casting], x.dtype)


def general_add_rms_norm(norms, x, residual, weight=None, eps=1e-6, offset=0.0, casting="llama"):
    """As the package for Liger's users has it. norms: the module of the operation."""
    return norms.add_rms_norm(x, residual, weight, eps, offset, ROUNDS[casting], x.dtype)


WITH_LIGERS_ARGUMENTS = {"general_rms_norm": general_rms_norm, "general_add_rms_norm": general_add_rms_norm}


class SuiteOperations(Operations):
    """The operations of the suite as attributes, with the arguments that they have there, and `<module>_module` for what lies beside
    one."""

    def launched(self) -> int:
        """How many kernels the interpreter has run."""
        return len(launched(self.packages[0]))

    def __getattr__(self, name):
        if name in WITH_LIGERS_ARGUMENTS:
            return functools.partial(WITH_LIGERS_ARGUMENTS[name], self.rms_norm_module)
        module = name.removesuffix("_module")
        for package in self.packages:
            with contextlib.suppress(ModuleNotFoundError):
                found = importlib.import_module(f"{package.__name__}.shared.ops.{MODULES.get(name, module)}")
                return found if module != name else getattr(found, name)
        raise AttributeError(f"none of {self.packages} ships the operation {name}")


def suite(*packages) -> SuiteOperations:
    """The operations of loaded packages, each from the first that ships it."""
    return SuiteOperations(*packages)


def module_of(name: str):
    """The file of an operation here."""
    return importlib.import_module(f"tests.ops.{name}")


def of_suite(checks: dict) -> dict:
    """Checks of the suite's operations as `CHECKS` has them, functions of a package."""
    return {name: lambda package, check=check: check(suite(package)) for name, check in checks.items()}
