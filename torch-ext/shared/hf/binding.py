"""A forward of ours on one module, in a form that leaves the module free to go when its last user does."""

import copy
import inspect
import sys
import weakref
from types import MethodType

BOUND = "_bastile_bound_modules"  # in every loaded copy of this file: the modules that hold a forward that it bound
_bastile_bound_modules: "weakref.WeakSet" = weakref.WeakSet()


class BoundForward:
    # A bound method in a module's own __dict__ would be a cycle, module -> method -> module: after `del model` its memory would wait for
    # Python's cyclic garbage collector. This one refers to its module weakly, and looks like a bound method to whoever takes it apart:
    # `__func__`, `__self__`, the function's name, docstring, annotations, attributes and signature. 0.3 us a call slower than one.
    __slots__ = ("__dict__", "__func__", "__weakref__", "_module")

    def __init__(self, function, module):
        self.__func__ = function
        self._module = weakref.ref(module)
        self.__dict__.update(vars(function))  # functools.wraps copies it
        _bastile_bound_modules.add(module)

    def __call__(self, *args, **kwargs):
        module = self._module()
        return self.__func__(self.__self__ if module is None else module, *args, **kwargs)

    @property
    def __self__(self):
        module = self._module()
        if module is None:
            raise ReferenceError("this forward's module is gone, expected one that is alive: keep the model, not model.forward alone")
        return module

    @property
    def __signature__(self):
        return inspect.signature(MethodType(self.__func__, self))

    @property
    def __doc__(self):
        return self.__func__.__doc__

    def __getattr__(self, name):
        if name == "__func__":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __deepcopy__(self, memo):
        return BoundForward(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self):  # as a bound method's: a process that lacks this package loads the module with its class's forward
        return getattr, (self.__self__, "forward")


def remember(module) -> None:
    """Adds a module to those that `bound_modules` lists."""
    _bastile_bound_modules.add(module)


def bound_modules() -> list:
    """Lists the modules that hold a forward which any loaded copy of this package bound, also those that gc.freeze() hides."""
    found = {}
    for loaded in list(sys.modules.values()):
        for module in getattr(loaded, "__dict__", {}).get(BOUND, ()):
            found[id(module)] = module
    return list(found.values())
