"""Decides which calls of an operator are replayed: done again by what an earlier call did, at the addresses of their own tensors.

An operator of this package is a function of its arguments: what it allocates, how it views its tensors and which variants it launches on
which grid follow from the arguments' dtypes, shapes, strides, alignment and numbers, and from nothing else. Working that out costs the
host several times what the launches themselves do. So a call whose signature, all of these together, has been recorded is replayed.

A signature is in one of these states (`Operator.signatures`):

| state   | kept as                    | what a call does                                                                    |
|---------|----------------------------|-------------------------------------------------------------------------------------|
| unknown | nothing                    | runs; then the signature is seen                                                    |
| seen    | `Unplanned`, < RECORD_AT   | runs, then it is due: lengths that never come again are not worth a plan            |
| due     | `Unplanned`, < ATTEMPTS    | runs and is recorded (recording.py): then planned (plan.py), or due with an obstacle |
| refused | `Unplanned`, >= ATTEMPTS   | runs                                                                                |
| planned | `Plan`                     | replays; runs where it does not match the plan after all                            |

Some calls have no signature, and run: those under a transform or a mode, and those with an argument that is more than an ordinary tensor or
a number. A planned call is found at a third of the cost where it is expected (`_Expected`): a few plans are tried first, by guards that
compare all tensors in C.

`print(report())` shows the state of every signature, with the plan's source or what stands in its way.
"""

import threading
from functools import reduce
from math import copysign
from operator import itemgetter, or_
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn
from torch.autograd import forward_ad

from . import launch
from .layouts import guards
from .plan import Plan, plan_of
from .recording import NotReplayable, Recorder, constant  # noqa: F401  (operators mark their constants with it)

__all__ = ["IDENTITIES", "replayed", "replayed_with_products"]

KEPT = 4096  # signatures that one operator remembers
RECORD_AT = 1  # the calls with a signature before the first that is recorded
ATTEMPTS = 4  # the calls with a signature after which it is not recorded any more
EXPECTED = 3  # plans that are tried first: a forward and a backward pass may be one operator
PLAIN_VALUES = frozenset((int, bool, type(None), str, torch.dtype))
IDENTITIES: set = set()  # types of arguments that never change, each of which is equal only to itself
operators: List["Operator"] = []
_recording = threading.Lock()  # the process records one call at a time
_transforms_are_active, _count_of_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_any_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_address = torch.Tensor.data_ptr


class Unplanned(NamedTuple):
    """A signature without a plan. calls: so far; obstacle: why the last one that was recorded has no plan."""

    calls: int = 0
    obstacle: str = ""

    def __str__(self) -> str:
        return f"no plan after {self.calls} calls" + (f": {self.obstacle}" if self.obstacle else "")


_UNKNOWN = Unplanned()


def replayed(function: Callable) -> Callable:
    """Makes an operator of a function that makes tensors and launches kernels: it is replayed where it can be.

    Args:
        function: takes tensors and numbers (`PLAIN_VALUES`, float), a tensor first; returns a tensor, or several and None.
    """
    return Operator(function, False).call


def replayed_with_products(function: Callable) -> Callable:
    """Makes an operator as `replayed` does, of a function that also computes with PyTorch (`recording.COMPUTATIONS`), under any autocast.

    Args:
        function: writes to none of its arguments and returns tensors that it made and None. Its arguments may also be tuples of
            `PLAIN_VALUES` and objects of `IDENTITIES`.
    """
    return Operator(function, True).call


def record(function: Callable, args: tuple, computes: bool = False) -> Tuple[Any, Union[Plan, Unplanned]]:
    """Calls a function. Returns what it returns, and the plan of the call, or `Unplanned` with what stands in its way."""
    recorder = Recorder(args, computes)
    launch.recorder = recorder
    try:
        with recorder:
            result = function(*args)
    finally:
        launch.recorder = None
    try:
        return result, plan_of(recorder.recording(result))
    except NotReplayable as obstacle:
        return result, Unplanned(0, str(obstacle))


class Operator:
    """A function whose calls are replayed where they can be."""

    def __init__(self, function: Callable, computes: bool) -> None:
        self.function, self.computes = function, computes
        self.signatures: Dict[tuple, Union[Plan, Unplanned]] = {}
        self.unsigned: Dict[str, int] = {}  # calls that ran because they have no signature, by the reason
        self.expected = _Expected()
        operators.append(self)

    def call(self, *args):
        backend, first = launch.backend, args[0]
        if not (first.is_cuda or backend.runs_on_cpu):
            return self.function(*args)
        # A transform, forward-mode AD or a mode wants to see the operations of PyTorch. Inline: a call of a function counts here.
        if _transforms_are_active() or forward_ad._current_level >= 0 or _count_of_modes():
            return self._run_unsigned(args, "a transform, forward-mode AD or a mode sees the operations of PyTorch")
        state = backend, launch.generation, _autocast_of(first) if self.computes else None
        for one in self.expected.plans:
            found = one.run(args, state)
            if found is not None:
                return found
        parts: list = [*state]
        tensors, addresses, low_bits = [], [], 0
        for arg in args:
            kind = type(arg)
            if kind is torch.Tensor or kind is nn.Parameter:
                if arg.is_neg():
                    return self._run_unsigned(args, "a tensor holds its numbers with the sign turned")
                address = arg.data_ptr()
                tensors.append(arg)
                addresses.append(address)
                low_bits |= address
                parts += (arg.dtype, arg.device, arg.shape, arg.stride())
            elif kind in PLAIN_VALUES or kind in IDENTITIES or (self.computes and kind is tuple):
                parts.append(arg)
            elif kind is float:
                parts.append(arg or str(arg))  # 0.0 and -0.0 are equal
            else:
                return self._run_unsigned(args, f"an argument is a {kind.__name__}")
        if low_bits & 15:
            parts.append(tuple([address & 15 for address in addresses]))
        signature = tuple(parts)
        plan = self.signatures.get(signature, _UNKNOWN)
        if isinstance(plan, Plan):
            if not low_bits & 15:
                self.expected.looked_up(plan, args, state)
            found = plan.run(tensors, addresses)
            return self.function(*args) if found is None else found
        return self._run(signature, args, plan)

    def _run(self, signature: tuple, args: tuple, known: Unplanned):
        """Runs a call of a signature without a plan, and records it where that is due."""
        if len(self.signatures) >= KEPT:
            self.signatures.clear()
        self.signatures[signature] = Unplanned(known.calls + 1, known.obstacle)
        if not RECORD_AT <= known.calls < ATTEMPTS or not _recording.acquire(blocking=False):
            return self.function(*args)
        try:
            result, found = record(self.function, args, self.computes)
        finally:
            _recording.release()
        self.signatures[signature] = found if isinstance(found, Plan) else Unplanned(known.calls + 1, found.obstacle)
        return result

    def _run_unsigned(self, args: tuple, reason: str):
        self.unsigned[reason] = self.unsigned.get(reason, 0) + 1
        return self.function(*args)

    def __str__(self) -> str:
        lines = [f"{self.function.__module__}.{self.function.__qualname__}"]
        lines += [f"  {calls} calls ran: {reason}" for reason, calls in self.unsigned.items()]
        for (_, _, autocast, *parts), found in self.signatures.items():
            told = [f"autocast to {autocast}"] if autocast else []
            lines.append("  " + ", ".join(told + [str(list(part)) if isinstance(part, torch.Size) else str(part) for part in parts]))
            lines += [f"    {line}" for line in str(found).splitlines()]
        return "\n".join(lines)


def report(name: str = "") -> str:
    """Describes what is known of the operators' calls: of every signature its plan's source, or why it is not replayed.

    Args:
        name: of the function, or of its module, or a part of either; every operator without it.
    """
    found = (str(operator) for operator in operators if operator.signatures or operator.unsigned)
    return "\n".join(text for text in found if name in text.partition("\n")[0])


def _autocast_of(tensor: torch.Tensor) -> Optional[torch.dtype]:
    """The dtype of autocast where it is on."""
    if not _any_autocasts():
        return None
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_minus_zero(arg: Any) -> bool:
    """Tells -0.0 from 0.0, which is equal to it."""
    return type(arg) is float and not arg and copysign(1.0, arg) < 0


# ---------------------------------------------------------------- plans that are tried first
class _Expected:
    """The plans that an operator's next call is likely to match, newest first.

    A plan gets here when it is looked up a second time within few calls, and leaves when newer ones come. Guards compare more than a
    signature does (whether a gradient is needed, for one), so calls may be looked up though their plan is here. An operator for which that
    goes on keeps the guards that it has.
    """

    def __init__(self) -> None:
        self.plans: List[_GuardedPlan] = []
        self._recent: List[Plan] = []  # those of the last calls that were looked up
        self._missed = 0  # calls that were looked up though their plan was here

    def looked_up(self, plan: Plan, args: tuple, state: tuple) -> None:
        self._missed += any(one.plan is plan for one in self.plans)
        if plan in self._recent and self._missed < ATTEMPTS and not any(map(_is_minus_zero, args)):
            one = _GuardedPlan(args, state, plan)
            if one.guard is not None:
                self.plans = [one, *self.plans[: EXPECTED - 1]]
        self._recent = [plan, *self._recent[: EXPECTED - 1]]


class _GuardedPlan:
    """A plan with what tells in a single call of C whether arguments are like those that it was looked up with. None of those is -0.0."""

    def __init__(self, args: tuple, state: tuple, plan: Plan):
        places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        others = [i for i in range(len(args)) if i not in places]
        self.count, self.state, self.plan = len(args), state, plan
        self.tensors, self.values = _taker(tuple(places)), _taker(tuple(others))
        self.wanted = self.values(args)
        self.guard: Any = guards(self.tensors(args))
        self.zeros = [i for i in others if type(args[i]) is float and not args[i]]

    def run(self, args: tuple, state: tuple):
        """What the plan returns; None where the call does not match it."""
        if len(args) != self.count or state != self.state:
            return None
        tensors = self.tensors(args)
        if not self.guard(*tensors) or self.values(args) != self.wanted:
            return None
        for i in self.zeros:
            if copysign(1.0, args[i]) < 0:  # it equals 0.0
                return None
        addresses = list(map(_address, tensors))
        return None if reduce(or_, addresses) & 15 else self.plan.run(tensors, addresses)


def _taker(places: Tuple[int, ...]) -> Callable:
    """A function that takes the items at these places out of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)  # one call in C
    return lambda values: tuple([values[i] for i in places])
