"""How an operation of Liger-Kernel is declared: beside PyTorch's formula and Liger's own function, at the sizes of `suites.LIGER`."""

from collections.abc import Callable

from . import providers
from .eager import EPS
from .operation import LigerConvention, Operation
from .suites import LIGER

X_LABELS = {"T": "sequence length", "BT": "B * T", "V": "vocab size"}  # of Liger's sweeps over tokens


def as_it_is(function: Callable) -> Callable:
    """Return a function that takes leaves and others as they are."""
    return function


def with_eps(function: Callable) -> Callable:
    """Return a norm with the epsilon of all models here."""
    return lambda *tensors: function(*tensors, EPS)


def implementations(name: str, theirs: str, call: Callable = as_it_is) -> dict[str, Callable]:
    """Return Liger's three implementations as peers, in Triton, CuTe DSL and cuTile. name: of the module and the function; theirs: the
    autograd function; call(function): any of them as a function of leaves and others."""
    return {
        "liger": lambda: call(providers.liger(f"ops.{name}", theirs).apply),
        "liger_cutedsl": lambda: call(providers.liger_cutedsl(name)),
        "liger_cutile": lambda: call(providers.liger_cutile(theirs).apply),
    }


def declare(
    name: str, title: str, position: int, theirs: str, *, x: str = "T", convention: dict | None = None, ours: str = "",
    call: Callable = as_it_is, call_theirs: Callable | None = None, peers: dict | None = None, **declared,
) -> Operation:
    """Return the operation.

    theirs: the autograd function in `liger_kernel.ops`; ours: the package's function, if not `name`. call(function): the package's function
    as one of leaves and others; call_theirs(function): the same of Liger's `apply`, where that is called otherwise. x, convention: the name
    of x and what else is not usual in Liger's script, see `LigerConvention`. peers: besides Liger. declared: of `Operation`.
    """

    def liger() -> Callable:
        return (call_theirs or call)(providers.liger("ops", theirs).apply)

    def bastile(package) -> Callable:
        return call(providers.operation(package, ours or name))

    return Operation(
        name=name,
        title=title,
        position=position,
        suite=LIGER,
        bastile=bastile,
        peers={"liger": liger, **(peers or {})},
        liger=LigerConvention(x_name=x, x_label=X_LABELS[x], **(convention or {})),
        **{"formula_provider": "torch", **declared},
    )
