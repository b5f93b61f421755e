"""Makes functions, autograd functions and modules of rows: a name, its arguments as Python writes them, and what computes it.

Liger-Kernel has up to three names for an operation, whose arguments differ in order, names and defaults. A made function passes on, by
position, its arguments without a default, and by name those with one, as far as what computes it takes them. Arguments that it does not
take must be among `WITHOUT_EFFECT`: a misspelt row fails when it is imported.
"""

import inspect
from typing import Any, Callable, Dict, List, Optional

from torch import nn

# What these arguments of Liger's choose does not exist here: nothing of the caller's is overwritten, and there is one implementation.
WITHOUT_EFFECT = frozenset(
    "in_place row_mode BLOCK_SIZE impl mode backend compute_params chunk_mem_const ce_impl ce_mode jsd_impl jsd_mode".split()
    + ["position_ids", "unsqueeze_dim"]  # of rotary embeddings, as in Liger
    + ["compiled", "chunk_size"]  # of chunked losses
)


def _compiled(name: str, arguments: str, body: str, values: Dict[str, Any], module: str) -> Callable:
    """The function `name(arguments)` with a body of one line, in which `values` have names.

    They are variables of a function around it: a tracer takes globals of the same name in the same module for the same.
    """
    space: Dict[str, Any] = {"__name__": module}
    source = f"def make({', '.join(values)}):\n  def {name}({arguments}):\n    {body}\n  return {name}"
    exec(compile(source, f"<{module}.{name}>", "exec"), space)
    return space["make"](**values)


def _parameters(name: str, arguments: str) -> List[inspect.Parameter]:
    return list(inspect.signature(_compiled(name, arguments, "pass", {}, __name__)).parameters.values())


def _passed_on(name: str, arguments: str, computes: Callable) -> str:
    """The arguments of the call of what computes it."""
    taken = inspect.signature(computes).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given = []
    for p in _parameters(name, arguments):
        if p.default is p.empty:
            given.append(p.name)
        elif p.name in taken or (takes_any and p.name not in WITHOUT_EFFECT):
            given.append(f"{p.name}={p.name}")
        elif p.name not in WITHOUT_EFFECT:
            raise TypeError(f"{name} has the argument {p.name}, which {computes.__name__} does not take")
    return ", ".join(given)


def function(name: str, arguments: str, computes: Callable, module: str, returns: Optional[Callable] = None) -> Callable:
    """Makes a function.

    Args:
        name: of the function.
        arguments: as in a definition, "x, dim=-1".
        computes: what it calls.
        module: the `__name__` of the module that holds it.
        returns: called with the result, returns what is returned instead.
    """
    call = f"_computes({_passed_on(name, arguments, computes)})"
    values = {"_computes": computes, "_returns": returns}
    made = _compiled(name, arguments, f"return _returns({call})" if returns else f"return {call}", values, module)
    made.__doc__ = computes.__doc__
    return made


def autograd_function(name: str, arguments: str, computes: Callable, module: str, **attributes) -> type:
    """Makes a class with `apply` and nothing else of an autograd function: that is the operation's own. Takes what `function` takes."""
    apply = staticmethod(function("apply", arguments, computes, module))
    return type(name, (), {"__doc__": computes.__doc__, "__module__": module, "apply": apply, **attributes})


def options_module(
    name: str,
    options: str,
    arguments: str,
    computes: Callable,
    module: str,
    check: Callable[[Any], None] = lambda self: None,
    returns: Optional[Callable] = None,
    given: str = "",
) -> type:
    """Makes a module without parameters, whose options are attributes.

    Args:
        options: arguments of its constructor.
        arguments: of its forward.
        check: called with the new module, raises ValueError for wrong options.
        given: the arguments of the forward in the order in which they are passed on, where that differs.
        For the others see `function`.
    """
    names = [p.name for p in _parameters("__init__", options)]
    takes = inspect.signature(computes).parameters
    with_effect = [n for n in names if n in takes or n not in WITHOUT_EFFECT]
    taken = ", ".join([given or _passed_on("forward", arguments, computes), *(f"{n}=self.{n}" for n in with_effect)])
    call = f"_computes({taken})"
    values = {"_computes": computes, "_returns": returns}
    forward = _compiled("forward", f"self, {arguments}", f"return _returns({call})" if returns else f"return {call}", values, module)

    def start(self, **chosen):
        nn.Module.__init__(self)
        for option, value in chosen.items():
            setattr(self, option, value)
        check(self)

    body = f"_start(self, {', '.join(f'{n}={n}' for n in names)})"
    init = _compiled("__init__", ", ".join(filter(None, ["self", options])), body, {"_start": start}, module)
    return type(name, (nn.Module,), {"__doc__": computes.__doc__, "__module__": module, "__init__": init, "forward": forward})


def module_variant(name: str, base: type, options: str, module: str, **fixed: str) -> type:
    """Makes a module that is another one with other defaults.

    Args:
        options: arguments of its constructor. The first is passed on by position, the others by name.
        fixed: for an option that the other module calls otherwise, its name there.
    """
    first, *rest = [p.name for p in _parameters("__init__", options)]
    call = ", ".join(["self", first, *(f"{fixed.get(n, n)}={n}" for n in rest)])
    keep = "; ".join(f"self.{n} = {n}" for n in fixed if n in rest)
    init = _compiled("__init__", f"self, {options}", f"_base.__init__({call}); {keep}", {"_base": base}, module)
    return type(name, (base,), {"__module__": module, "__init__": init})
