"""Tells whose forward a class or a module of transformers has: its own, ours, or another library's or the user's, which is kept."""

import functools
import inspect
import sys
import warnings
from collections import Counter
from types import CellType, FunctionType, MethodType

from torch import nn

from ..parts.binding import BoundForward
from ..parts.lookups import ROTARY, function_in, is_by, name_of
from ..parts.modules import (
    FSDP2,
    LAYER,
    OFF,
    SAVED,
    WITHOUT_GRAPHS,
    for_class,
    is_called_as_usual,
    is_defined_by,
    is_marked,
    is_transformers_own,
    marked,
    own_class,
    without_fsdp2,
)
from ..parts.wrapped import inside
from .arguments import forward_like
from .families import Families, Targets

__all__ = [
    "CALL_BEFORE", "WRAPPED", "all_are_seen", "bind", "calls_ours", "claim", "claim_layers", "class_for", "class_of", "class_stranger",
    "copy_with", "current", "defines_forward", "describe", "forward_for", "forward_on", "hands_on", "holder", "is_wrapper", "original",
    "other_owner", "other_package", "runs_ours", "slot_of", "stranger", "unbind", "warn_of_others",
]  # fmt: skip

WRAPPED = "_original_forward"  # where accelerate keeps the forward that it wrapped for mixed precision

DESCRIBED = SAVED + "described"  # on a forward of ours: the one whose annotations it has
SERVED = SAVED + "served"  # on a forward of ours: the families that its package serves
WRAPPERS = ("peft.", "torch.distributed.", "torch._dynamo.")  # whose modules call the one inside them with what they are called with
PLANS = "transformers.distributed."  # how the modules begin whose functions a plan of transformers' puts around forwards
HOOKS = (*FSDP2, "deepspeed.", "peft.")  # whose hooks leave what is no tensor as it is
_handing_on: set = set()  # what `hands_on` found to do so: (class, function)

CALL_BEFORE = (
    "Call apply() or kernelize() before that: before Accelerator.prepare(), before Trainer.train() and before creating a TRL trainer; "
    "apply() before from_pretrained() with a tp_plan"
)


def current(owner, attribute):
    """The value of an attribute of a class or module, inside transformers' wrappers for gradient checkpointing."""
    return inside(vars(owner)[attribute])


def original(owner, attribute):
    """The value that an attribute of a class or module had before ours replaced it, inside transformers' wrappers."""
    return vars(owner)[SAVED + attribute] if SAVED + attribute in vars(owner) else current(owner, attribute)


def describe(function, original):
    """Gives a forward of ours the annotations and the docstring of the one that it replaces: transformers reads them. Where a release has
    fewer arguments than ours, or ours are named by a signature alone, it gives that too: the Hub compares their numbers, and a trainer the
    names."""
    if vars(function).get(DESCRIBED) is original:
        return
    setattr(function, DESCRIBED, original)
    function.__annotations__, function.__doc__ = dict(original.__annotations__), original.__doc__
    signature = inspect.signature(original)
    if "__signature__" in vars(function) or len(inspect.signature(function).parameters) > len(signature.parameters):
        function.__signature__ = signature


def forward_for(original, run, around=lambda forward: forward):
    """Makes a forward of ours for a module of any class: run(module, arguments by name), with the arguments of another one. around: what
    stands around it, as `checkpointed` does."""
    forward = around(forward_like(inspect.signature(original), run))
    describe(forward, original)
    return marked(forward)


def copy_with(original, replaced):
    """A copy of a forward and of transformers' decorators around it, marked as ours, that finds other functions under global names.
    replaced: these, by their names."""
    names, closure = original.__globals__, original.__closure__
    inner = getattr(original, "__wrapped__", None)
    if inner is None:
        # torch.compile would look __name__ up there
        names = {**{name: value for name, value in names.items() if name != "__name__"}, **replaced}
    else:
        copied = copy_with(inner, replaced)
        closure = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in closure)
    copy = _copied(original, names, closure)
    describe(copy, original)
    return copy


def _copied(function, names, closure):
    """A copy of a function with other global names and another closure, marked as ours."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__module__, copy.__qualname__ = function.__kwdefaults__, function.__module__, function.__qualname__
    return marked(copy)


def class_of(targets: Targets, name: str):
    """The class that transformers defines as `name` in a family, even if another one has been put there since; None if it is gone, or its
    module is not imported."""
    modeling = sys.modules.get(targets.module_of(name))
    return None if modeling is None else own_class(modeling, name)


def class_for(targets: Targets, operation: str):
    """`class_of` for the class that an operation has a layer for; None, too, for a family without that operation."""
    return class_of(targets, targets.classes[operation][0]) if operation in targets.classes else None


def claim(function, families: Families):
    """Notes on a forward of a package which families that package serves, and returns it. Builds of one package note the same."""
    setattr(function, SERVED, frozenset(targets.model for targets in families))
    return function


def claim_layers(families: Families) -> None:
    """Does so on each layer of a package."""
    layers = [layer for targets in families for layer in (targets.rotary, *(layer for _, layer in targets.classes.values()))]
    for layer in layers:
        for function in (layer.forward, for_class(layer.forward)):
            claim(function, families)


def other_package(function, families: Families) -> str:
    """The name under which another package was loaded whose forward a function is; "" for one of this package, of another build of it, and
    for any other function."""
    served = getattr(_function(function), SERVED, None)
    own = served is None or served == frozenset(targets.model for targets in families)
    return "" if own else _function(function).__module__.partition(".")[0]


def holder(targets: Targets, families: Families) -> str:
    """The name under which another package was loaded that serves a family's classes; "" where none does."""
    classes = (class_for(targets, operation) for operation in targets.classes)
    found = (other_package(current(cls, "forward"), families) for cls in classes if cls is not None and "forward" in vars(cls))
    return next(filter(None, found), "")


def stranger(targets: Targets, name):
    """Text for a warning that says what replaced a class's forward, which was transformers' or ours; "" where nothing did. name: of the
    class, or of the function for the rotary embedding."""
    current = vars(sys.modules[targets.module_of(name)])[name]
    if name == ROTARY:
        forward = type(current).forward if isinstance(current, nn.Module) else current
        own = is_marked(forward) or is_transformers_own(function_in(current), targets.modeling, ROTARY)
        return "" if own else f"{name} is {name_of(current)}"
    if current is not class_of(targets, name):
        return f"{name} is {name_of(current)}"
    return class_stranger(current)


def class_stranger(cls):
    """What `stranger` says of the forward of a class of transformers'."""
    owner = class_owner(cls)
    return owner and f"{cls.__name__}.forward is {owner}"


def class_owner(cls):
    """The name of what replaced the forward of a class of transformers'; "" where it is transformers' or ours."""
    forward = inside(vars(cls).get("forward"))
    own = is_marked(forward) or is_transformers_own(forward, cls.__module__, f"{cls.__qualname__}.forward")
    return "" if own else name_of(forward)


def slot_of(module):
    """The attribute that hides the class's forward on one module: accelerate's hooks stand in `forward` and call the other."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _place_of(state, slot):
    """The attribute in which the forward of a module is that has one in a slot: where `capture` put it, if its own is there instead."""
    return WITHOUT_GRAPHS if WITHOUT_GRAPHS in state and is_ours(state.get(slot)) else slot


def forward_on(module):
    """The forward that hides the class's on one module, other than that of `capture`; None where there is none."""
    return vars(module).get(_place_of(vars(module), slot_of(module)))


def other_owner(module):
    """Names who gave this one module its forward: accelerate, TRL, transformers' tensor parallelism, the user. "" if none did, or if
    that forward calls ours. One of ours in its place would drop what it does."""
    state = vars(module)
    if WRAPPED in state:
        return "" if calls_ours(state[WRAPPED]) else "accelerate (mixed precision)"
    function = inside(_function(forward_on(module)))
    cls = defines_forward(type(module))
    if function is None or function in (current(cls, "forward"), vars(cls).get(SAVED + "forward")):  # `kernels` binds it so
        return "" if SAVED + "forward" in vars(cls) and function is vars(cls)[SAVED + "forward"] else class_owner(cls)
    if calls_ours(function) or _cell_in_plan(module) is not None:
        return ""
    return getattr(function, "__globals__", {}).get("__name__") or repr(function)


def runs_ours(module) -> bool:
    """Tells whether a call of a module comes to a forward of ours, be it inside those that accelerate and TRL's head put around it."""
    state = vars(module)
    function, seen = _function(state.get(WRAPPED) or forward_on(module) or type(module).forward), set()
    while function is not None and not is_marked(inside(function)) and id(function) not in seen:
        seen.add(id(function))
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = next((_function(each) for each in held if getattr(each, "__self__", None) is module), None)
    return function is not None


def warn_of_others(modules, stacklevel):
    """Warns of modules that keep the forward that another library or the user gave them."""
    for (name, owner), count in Counter((type(module).__name__, other_owner(module)) for module in modules).items():
        what = f"{name} keeps the forward that {owner} gave it ({count} in this process)"
        warnings.warn(f"{what}. {CALL_BEFORE}", RuntimeWarning, stacklevel=stacklevel + 1)


def _cell_in_plan(module):
    """Where expert parallelism of transformers', whose exchanges stand in front of a module of experts, keeps the forward that it calls
    between them: the class's own or ours. None for any other module, and where that forward is another one."""
    state, cls = vars(module), type(module)
    around = state.get(slot_of(module))
    if not state.get("_is_expert_parallel") or type(around) is not FunctionType or not is_by(PLANS, around):
        return None
    called = [cell for cell in around.__closure__ or () if getattr(cell.cell_contents, "__self__", None) is module]
    if len(called) != 1:
        return None
    function, owner = _function(called[0].cell_contents), defines_forward(cls)
    return called[0] if is_marked(function) or inside(function) in (current(owner, "forward"), original(owner, "forward")) else None


def _between_exchanges(module, bound):
    """A copy of what a plan put around the forward of a module of experts, around another forward; that one where there is no plan."""
    cell = _cell_in_plan(module)
    if cell is None:
        return bound
    around = vars(module)[slot_of(module)]
    return _copied(around, around.__globals__, tuple(CellType(bound) if each is cell else each for each in around.__closure__))


def bind(module, function):
    """Gives one module a forward of ours, in front of its class's, and between the exchanges of expert parallelism."""
    state, slot = vars(module), slot_of(module)
    previous = state.get(slot)
    state.pop(OFF, None)
    if WRAPPED in state or (calls_ours(previous) and not is_ours(previous)):
        return  # what is wrapped is ours already
    place = _place_of(state, slot)
    if not is_ours(state.get(place)):
        state.setdefault(SAVED + "replaced", (slot, state.get(place)))
    state[place] = _between_exchanges(module, BoundForward(function, module))


def unbind(module):
    """Takes a forward of ours off one module, whether `bind` or `kernels` put it there, or accelerate wrapped it."""
    state = vars(module)
    bound = SAVED + "replaced" in state
    slot, previous = state.pop(SAVED + "replaced", (slot_of(module), None))
    slot = _place_of(state, slot)
    forward = state.get(slot)
    if not is_ours(forward):  # it was replaced meanwhile
        if bound or calls_ours(forward) or calls_ours(state.get(WRAPPED)):
            state[OFF] = True
        return
    if previous is not None:
        state[slot] = previous
    elif slot == "forward":
        del state[slot]
    elif slot == WITHOUT_GRAPHS:
        state[slot] = None
    else:
        state[slot] = MethodType(type(module).forward, module)


def _function(forward):
    return getattr(forward, "bound_function", None) or getattr(forward, "__func__", forward)


def is_ours(forward):
    """True for a bound forward of ours, also of another loaded copy of this package."""
    return is_marked(_function(forward))


def calls_ours(forward):
    """True for one of ours, and for a wrapper made with functools.wraps, which copies the mark: TRL's trainers put one on."""
    return getattr(_function(forward), LAYER, None) is not None


def defines_forward(cls):
    """The class whose forward a class has; transformers' wrapper around an inherited one does not count."""
    having = [c for c in cls.__mro__ if "forward" in vars(c)]
    pairs = zip(having, [*having[1:], None])
    return next(c for c, after in pairs if after is None or current(c, "forward") is not current(after, "forward"))


# ---------------------------------------------------------------- who sees the arguments of a call
def is_wrapper(module) -> bool:
    """Tells whether a module is a library's wrapper, which hands on what it is called with to a module inside."""
    return is_by(WRAPPERS, without_fsdp2(type(module)))


def all_are_seen() -> bool:
    """True while a hook on every module of the process sees all arguments. PyTorch keeps the numbers of those that were removed."""
    hooks = nn.modules.module
    return not hooks._global_forward_hooks_with_kwargs.keys().isdisjoint(hooks._global_forward_hooks)


def hands_on(module) -> bool:
    """True where nobody sees the arguments by name of a module's call but transformers, this package, and libraries that leave what is no
    tensor as it is. Asked of every layer in every pass, so it reads `__dict__` and remembers what it found."""
    state = module.__dict__
    if state["_forward_pre_hooks_with_kwargs"] or state["_forward_hooks_with_kwargs"]:
        if not _are_by_libraries(state["_forward_pre_hooks"], state["_forward_pre_hooks_with_kwargs"]):
            return False
        if not _are_by_libraries(state["_forward_hooks"], state["_forward_hooks_with_kwargs"]):
            return False
    cls, forward = type(module), state.get("forward")
    if forward is None:
        function = cls.forward
    elif type(forward) is functools.partial and "_hf_hook" in state:
        function = _inside_accelerates(state)
    else:
        function = getattr(forward, "__func__", forward)
    return type(function) is FunctionType and ((cls, function) in _handing_on or _hands_on(cls, function))


def _are_by_libraries(hooks, with_kwargs) -> bool:
    return all(is_by(HOOKS, hooks[number]) for number in with_kwargs if number in hooks)


def _inside_accelerates(state):
    """The function inside the forward that accelerate put on a module to move tensors; None where a hook or a forward is the user's."""
    hook, outer = state["_hf_hook"], state["forward"].func
    hooks = getattr(hook, "hooks", (hook,))
    own = getattr(outer, "__globals__", {}).get("__name__") == "accelerate.hooks"
    if not own or not all(type(each).__module__ == "accelerate.hooks" for each in hooks):
        return None
    return getattr(state.get("_old_forward"), "__func__", None)


def _hands_on(cls, function) -> bool:
    if not is_called_as_usual(cls, *WRAPPERS):
        return False
    if is_by(WRAPPERS, without_fsdp2(cls)):  # torch.compile's have a forward each, which is not to be kept alive here
        return getattr(function, "__globals__", {}).get("__name__", "").startswith(WRAPPERS)
    forward = inside(function)
    of_transformers = [each for each in cls.__mro__ if each.__module__.startswith("transformers.")]
    found = is_marked(forward) or is_defined_by(of_transformers, forward, "forward")
    if found:
        _handing_on.add((cls, function))
    return found
