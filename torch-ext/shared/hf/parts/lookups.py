"""Tells whether functions of a library still find what they look up by name when they are called. A user or another library may put a
loss, an activation or half of a rotary embedding of their own there, which has to run where a forward of ours has taken the function's
place."""

import dis
import functools
import sys
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as _function_modes

from ...ops.operators import constant_when_traced
from .wrapped import inside, is_wrapped

__all__ = [
    "LAYER", "ROTARY", "SAVED", "Lookups", "function_in", "is_by", "mode_in_force", "name_of", "original_forward_of", "original_in",
    "overridden", "own_rotary", "replaced_below", "rotary_replaced",
]  # fmt: skip

SAVED = "_bastile_"  # prefix of the attribute that keeps what `patching` replaced, on the class or module where it stood
LAYER = SAVED + "layer"  # on a forward of ours: the forward itself, so a wrapper to which functools copies it is told apart
ROTARY = "apply_rotary_pos_emb"
LIBRARIES = ("torch", "transformers", "bitsandbytes")
EQUAL = ("deepspeed.runtime.zero.linear",)  # zero.Init leaves its linear in PyTorch's place for good: the same product in less memory
VALUES = (*LIBRARIES, "builtins", "logging")  # where the types of other values are defined, such as torch.float32 and a logger
Space = Mapping[str, Any]  # of a module or a class
_count_of_modes = torch._C._len_torch_function_stack
_CACHED = type(functools.lru_cache(None)(id))
_lookups: Dict[Any, "Lookups"] = {}  # by function
_methods: Dict[type, List[Tuple[Space, str]]] = {}  # by class: those that its forward calls


class Lookups:
    """What functions of a library look up by name, and what those of transformers among these look up in turn.

    To look whether all of it is the library's own costs 0.1 us for each module in which there is some of it. but: names that the caller
    looks up itself. read: modules of a user's that have been read, which count as a library's.
    """

    def __init__(self, functions: Sequence[Any], but: Sequence[str] = (), read: Sequence[str] = ()):
        self.functions, self.but, self.read = functions, but, read
        self.last = self._look()

    def _look(self) -> Tuple[list, list, str]:
        """(where to look for which names, what stands there, what `replaced` says of it)."""
        found: Dict[int, Tuple[Space, Dict[str, None]]] = {}
        pending, seen, text = list(self.functions), set(), ""
        while pending:
            function = pending.pop()
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if type(function) is not FunctionType or function in seen:
                continue
            seen.add(function)
            for space, name in (*_names_in(function), *_methods_in(function)):
                if name not in self.but:
                    found.setdefault(id(space), (space, {}))[1][name] = None
                    text = text or _stranger(space, name, self.read)
                    value = original_in(space.get(SAVED + name, space[name]))
                    home = value.__globals__.get("__name__", "") if type(value) is FunctionType else ""
                    if home.startswith("transformers.") or home in self.read:
                        pending.append(value)
        places = [(itemgetter(*names), space) for space, names in found.values()]
        return places, [values(space) for values, space in places], text

    def replaced(self) -> str:
        """Says which name stands for something that is not the library's own, or which mode of a user's changes what all names stand for;
        "" for none."""
        mode = mode_in_force()
        if mode:
            return mode
        places, seen, text = self.last
        try:
            if [values(space) for values, space in places] == seen:
                return text
        except KeyError:
            pass  # a name is gone
        self.last = self._look()
        return self.last[2]


@constant_when_traced
def mode_in_force() -> str:
    """Says which `TorchFunctionMode` of a user's is in force; "" for none, or for those of PyTorch, such as `torch.device`. It may change
    what any function of PyTorch returns, and does not see what a kernel of ours computes. A `TorchDispatchMode`, with which people count
    and trace, sees the operators that run, as it does around any other kernel."""
    if not _count_of_modes():
        return ""
    kinds = (type(mode) for mode in _function_modes())
    kind = next((kind for kind in kinds if kind.__module__.partition(".")[0] not in LIBRARIES), None)
    return "" if kind is None else f"the mode {name_of(kind)} is in force"


def is_by(libraries, thing) -> bool:
    """Tells whether a function or a class, such as one that is a hook, is a library's. libraries: how the names of their modules begin."""
    return (getattr(thing, "__module__", None) or "").startswith(libraries)


def own_rotary(modeling) -> Any:
    """The rotary embedding of transformers' module that ours replaces: a function, or the module that `kernels` makes of one; None where it
    is gone."""
    found = (getattr(modeling, name, None) for name in (SAVED + "rotary", SAVED + ROTARY, ROTARY))
    return next((each for each in found if each is not None), None)


@constant_when_traced
def rotary_replaced(modeling: str) -> str:
    """Says what `replaced_below` does of the rotary embedding of a module of transformers."""
    return replaced_below(original_in(own_rotary(sys.modules[modeling])))


@constant_when_traced
def replaced_below(function) -> str:
    """Says which name that a function of a library looks up stands for something that is not the library's own; "" for none."""
    found = _lookups.get(function)
    if getattr(function, LAYER, None) is function:
        return ""  # one of ours, on a layer of a package that replaces none
    if found is None:
        found = _lookups[function] = Lookups((function,))
    return found.replaced()


def original_in(value) -> Any:
    """The function in a module that `kernels` makes of one, whether a forward of ours is on that or not; any other value itself."""
    return function_in(value, getattr(type(value), SAVED + "forward", None))


def function_in(value, forward=None) -> Any:
    """The function in a module that `kernels` makes of one, which keeps it in a closure; any other value itself. forward: the module's, by
    default that of its class."""
    if not isinstance(value, nn.Module):
        return value
    forward = type(value).forward if forward is None else forward
    of_kernels = getattr(forward, "__globals__", {}).get("__name__", "").startswith("kernels.")
    cells = [cell.cell_contents for cell in (forward.__closure__ or ()) if of_kernels]
    return next((found for found in cells if type(found) is FunctionType), None)


def original_forward_of(cls: Any) -> Any:
    """The `forward` that a class has without us and without gradient checkpointing."""
    forward = getattr(cls, SAVED + "forward", None) or getattr(cls, "forward", None)  # a scripted module's class has none
    return inside(forward) if is_wrapped(forward) else forward


def _class_of(function: FunctionType) -> Any:
    """The class whose method a function of a library is; None for any other function."""
    found = function.__globals__.get(function.__qualname__.partition(".")[0])
    return found if isinstance(found, type) else None


def _methods_in(function: FunctionType) -> Iterator[Tuple[Space, str]]:
    """The other methods of its own class that a method calls: (the dictionary of the class, name)."""
    methods: Space = vars(_class_of(function) or object)
    return ((methods, name) for name in function.__code__.co_names if type(methods.get(name)) is FunctionType)


@constant_when_traced
def overridden(cls) -> bool:
    """Tells whether a user's subclass has a method of its own that the forward which it inherits calls."""
    if cls not in _methods:
        forward = original_forward_of(cls)
        _methods[cls] = list(_methods_in(forward)) if type(forward) is FunctionType else []
    return any(getattr(cls, name) is not methods[name] for methods, name in _methods[cls])


def _names_in(function: FunctionType) -> Iterator[Tuple[Space, str]]:
    """The functions that a function looks up, and the modules that it finds them in: (the dictionary in which it looks, name)."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        space: Optional[Space] = None
        for step in dis.get_instructions(code):
            if step.opname == "EXTENDED_ARG":
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                space = function.__globals__
            elif step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                space = None
            if space is None or step.argval not in space:
                space = None
                continue
            value = space[step.argval]
            is_module = type(value) is ModuleType  # torch.ops is of a class of its own, and makes what it is asked for
            if is_module or (callable(value) and not isinstance(value, type)):
                yield space, step.argval
            space = vars(value) if is_module else None


def _stranger(space: Space, name: str, read: Sequence[str] = ()) -> str:
    """Says what stands under a name where that is not a library's own; "" where it is."""
    value = space[name]
    if type(value) is ModuleType:
        named = value.__name__
        own = sys.modules.get(named) is value and (named == name or named.partition(".")[0] in LIBRARIES)
    elif type(value) is BuiltinFunctionType:
        own = value.__name__.endswith(name)
    elif isinstance(value, (FunctionType, nn.Module, _CACHED)):
        own = _is_librarys(original_in(value), name, read)
    else:
        own = type(value).__module__.partition(".")[0] in VALUES
    return "" if own else f"{space.get('__name__') or space.get('__module__')}.{name} is {name_of(value)}"


def _is_librarys(function, name: str, read: Sequence[str]) -> bool:
    """Tells whether a function and the decorators around it are written in a library's own files, or in ours, or in one that was read."""
    if getattr(function, LAYER, None) is function:
        return True
    of_equal = getattr(function, "__globals__", {}).get("__name__") in EQUAL
    while True:
        if type(function) is _CACHED:
            function = function.__wrapped__
        code, module = getattr(function, "__code__", None), getattr(function, "__globals__", {}).get("__name__", "")
        if code is None or not (of_equal or module.partition(".")[0] in LIBRARIES or module in read):
            return False
        file = "/".join(module.split(".")[-2:])
        if module not in read and not code.co_filename.replace("\\", "/").endswith((f"{file}.py", f"{file}/__init__.py")):
            return False  # made there by exec()
        if not hasattr(function, "__wrapped__"):
            return of_equal or code.co_name == name
        function = function.__wrapped__


def name_of(thing) -> str:
    """Returns the qualified name of a function or class, or of a module's class. functools.wraps copies names, but not the code."""
    if isinstance(thing, nn.Module):
        thing = type(thing)
    module = getattr(thing, "__globals__", {}).get("__name__") or getattr(thing, "__module__", None)
    code = getattr(thing, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", None) or getattr(thing, "__qualname__", None) or repr(thing)
    return f"{module}.{name}" if module else name
