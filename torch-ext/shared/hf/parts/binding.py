"""A method of ours on one module, in a form that leaves the module free to go when its last user does."""

import copy
import inspect
import sys
import weakref
from types import MethodType

import torch

from .modules import WITHOUT_GRAPHS, is_marked, original_forward
from .wrapped import inside

__all__ = ["BoundForward", "BoundMethod", "begin_graphs_after", "bound_modules", "remember"]

BOUND = "_bastile_bound_modules"  # in every loaded copy of this file: the modules that hold a forward that it bound
_bastile_bound_modules: "weakref.WeakSet" = weakref.WeakSet()


class BoundMethod:
    # A bound method in a module's own __dict__ would be a cycle, module -> method -> module: after `del model` its memory would wait for
    # Python's cyclic garbage collector. This one refers to its module weakly, and looks like a bound method to whoever takes it apart:
    # `__func__`, `__self__`, the function's name, docstring, annotations, attributes and signature. 0.4 us a call slower than one.
    # The name of the function is the method's.
    __slots__ = ("__dict__", "__weakref__", "_module", "bound_function")

    def __init__(self, function, module):
        self.bound_function = function
        self._module = weakref.ref(module)
        self.__dict__.update(vars(function))  # functools.wraps copies it
        remember(module)

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def name(self) -> str:
        return self.bound_function.__name__

    @property
    def __func__(self):
        return self.bound_function

    @property
    def __self__(self):
        module = self._module()
        if module is None:
            name = self.name
            raise ReferenceError(f"this {name}'s module is gone, expected one that is alive: keep the model, not model.{name} alone")
        return module

    @property
    def __signature__(self):
        return inspect.signature(MethodType(self.bound_function, self))

    @property
    def __doc__(self):  # type: ignore[override]
        return self.bound_function.__doc__

    def __getattr__(self, name):
        if name == "bound_function":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.bound_function, name)

    def __deepcopy__(self, memo):
        return type(self)(self.bound_function, copy.deepcopy(self.__self__, memo))

    def __reduce__(self):  # as a bound method's: a process that lacks this package loads the module with its class's method
        return getattr, (self.__self__, self.name)


class BoundForward(BoundMethod):
    # A forward that is put on the module's class later is called instead, as it would be without this one.
    __slots__ = ("_class_forward",)
    __doc__ = vars(BoundMethod)["__doc__"]  # a class has one of its own otherwise
    name = "forward"

    def __init__(self, function, module):
        super().__init__(function, module)
        self._class_forward = original_forward(module)

    @property
    def __func__(self):
        module = self.__self__
        of_class = type(module).forward
        if of_class is self._class_forward or all(vars(module).get(name) is not self for name in ("forward", WITHOUT_GRAPHS)):
            return self.bound_function  # whoever else holds it has what the forward was when it was taken
        within = inside(of_class)
        return self.bound_function if within is self._class_forward or is_marked(within) else of_class

    def __deepcopy__(self, memo):
        made = super().__deepcopy__(memo)
        made._class_forward = self._class_forward
        return made


def begin_graphs_after(function) -> None:
    """Lets a graph of torch.compile begin after a function, where arguments have names: by **kwargs it would not learn which sizes vary."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # older torch
        frames.skip_code(function.__code__)
    elif hasattr(frames, "set_code_exec_strategy"):
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT))


for function in (BoundMethod.__call__, vars(BoundForward)["__func__"].fget, vars(BoundMethod)["__self__"].fget):
    begin_graphs_after(function)


def remember(module) -> None:
    """Adds a module to those that `bound_modules` lists."""
    _bastile_bound_modules.add(module)


def bound_modules() -> list:
    """Lists the modules that hold a forward which any loaded copy of this package bound, also those that gc.freeze() hides."""
    copies = [sys.modules.get(name) for name in list(sys.modules) if name.endswith(".binding")]  # the name of this file
    return list({id(module): module for copy in copies for module in getattr(copy, "__dict__", {}).get(BOUND, ())}.values())
