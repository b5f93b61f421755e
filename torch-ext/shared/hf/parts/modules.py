"""Looks at modules of transformers and PyTorch: whose forward a call runs, who listens, and what a layer is made of.

A layer takes the place of one of transformers' classes whose submodules may be anything by then: LoRA, quantised, sharded, hooked. What
is exactly PyTorch's own goes to the operations; everything else is called as transformers would call it.
"""

import functools
import itertools
import operator
import sys
from contextvars import ContextVar
from types import FunctionType
from typing import Callable, List, Optional, Tuple

import torch
from torch import nn

from ...ops.operators import constant_when_traced
from ...ops.second_run import in_backward_pass
from .explanation import Reason
from .lookups import LAYER, SAVED, function_in, is_by, original_forward_of, replaced_below

__all__ = [
    "ACTIVATIONS", "ACTIVATION_CLASSES", "CAPTURED", "CAPTURING", "DEEPSPEED", "FORWARDS", "FSDP", "FSDP2", "MODULE_CALL", "OFF",
    "WITHOUT_GRAPHS", "Layer", "OwnForwards", "all_are_listened_to", "beside_class", "captured_in_first_run", "captured_outputs",
    "decoder_of", "for_class", "has_class_forward", "is_activation", "is_called_as_usual", "is_defined_by", "is_marked", "is_silu",
    "is_transformers_own", "marked", "modules_of", "original_forward", "own_class", "own_forward", "rotary_forward", "runs_torchs",
    "torchs_own", "why_not_own", "without_decorators", "without_fsdp2",
]  # fmt: skip

OFF = SAVED + "off"  # on a causal LM whose forward accelerate wrapped while it was ours: reset() cannot take it out again
FSDP = "torch.distributed.fsdp"
FSDP2 = (FSDP, "torch.distributed._composable")  # the second of `replicate`, which is made of it
DEEPSPEED = ("deepspeed.runtime.zero", "deepspeed.utils.nvtx")  # the second around hooks of the first
CAPTURING = "transformers.utils.output_capturing"
WITHOUT_GRAPHS = SAVED + "without_graphs"  # on a captured layer: the forward that stood on it before, None where there was none
CAPTURED = SAVED + "captured"  # on a module: its last forward pass outside of a backward pass was one whose outputs were captured
_MODULES = operator.attrgetter("_modules")
_VALUES = operator.methodcaller("values")  # of a dictionary, or of what a scripted module has instead
MODULE_CALL = nn.Module._wrapped_call_impl  # PyTorch's own `__call__`, whoever put another in its place before this file was read
ACTIVATIONS = "transformers.activations"
ACTIVATION_CLASSES = {  # of that module, but for SiLU: what each computes, as of `decoder.spec.Outputs`
    "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "GELUActivation": "gelu", "ReLUSquaredActivation": "relu2",
}  # fmt: skip
WRITTEN_OUT = "NewGELUActivation", "ReLUSquaredActivation"  # those that call no function of PyTorch that computes all of it
_gelu = torch._C._nn.gelu  # whatever stood for it before this file was read
# While a checkpointed layer runs for the second time: the outputs that were captured in its first run, where that is known.
captured_in_first_run: ContextVar[Optional[Tuple[str, ...]]] = ContextVar("captured_in_first_run", default=None)
_own: set = set()  # what is_transformers_own found to be so


def is_transformers_own(function, modeling: str, name: str) -> bool:
    """Tells whether a function is what transformers' module `modeling` defines as `name`, with or without transformers' own decorators.

    False for what a user, a library or a test put in its place, even if functools.wraps gave that the same name.
    """
    return type(function) is FunctionType and _is_transformers_own(function, modeling, name)


def without_decorators(function):
    """The function inside transformers' own decorators; None where another library's or the user's decorator is around it."""
    while hasattr(function, "__wrapped__"):
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return None
        function = function.__wrapped__
    return function


# A graph depends on which function it is, and has a guard on that; not on what was inspected before.
@constant_when_traced
def _is_transformers_own(function, modeling: str, name: str) -> bool:
    key = function, modeling, name
    if key in _own:
        return True
    function = without_decorators(function)
    code = getattr(function, "__code__", None)
    if code is None or function.__globals__.get("__name__") != modeling:
        return False
    if function.__qualname__ != name or code.co_name != name.rpartition(".")[2]:
        return False
    if not code.co_filename.replace("\\", "/").endswith("/".join(modeling.split(".")[-2:]) + ".py"):
        return False  # made there by exec()
    _own.add(key)
    return True


def own_class(modeling, name):
    """The class that transformers' module defines as `name`, even if another one has been put there since; None if it is gone."""
    cls = getattr(modeling, name, None)
    if isinstance(cls, type) and (cls.__module__, cls.__qualname__) == (modeling.__name__, name):
        return cls
    found, seen = [nn.Module], set()
    while found:
        cls = found.pop()
        if (cls.__module__, cls.__qualname__) == (modeling.__name__, name):
            return cls
        found += [sub for sub in type.__subclasses__(cls) if sub not in seen]
        seen.update(found)
    return None


# PyTorch's own forwards, by class; None where another was in its place before this file was read.
FORWARDS = {
    cls: cls.forward if is_transformers_own(cls.forward, cls.__module__, f"{cls.__qualname__}.forward") else None
    for cls in (nn.Linear, nn.SiLU, nn.Embedding, nn.Dropout, nn.Identity, nn.LayerNorm)
}


def runs_torchs(module, cls) -> bool:
    """Tells whether a call of a module runs the forward that PyTorch wrote for a class of `FORWARDS`, on PyTorch's functions, and nothing
    else."""
    function = own_forward(module)
    return function is not None and function is FORWARDS[cls] and not replaced_below(function)


class OwnForwards:
    """Tells the modules of one of transformers' model families that run what it or this package wrote, at 0.3 us a look."""

    def __init__(self, modeling: str, *classes: str):
        self.modeling, self.names = modeling, [f"{name}.forward" for name in classes]
        self.known: set = set()

    def run_by(self, module) -> bool:
        """True when calling a module of one of the classes runs its class's own forward, or this package's in its place, and nothing else,
        such as hooks."""
        function = own_forward(module)
        if is_marked(function):  # which another family's module may have as well
            function = original_forward(module)
        if self._knows(function):
            return True
        return any(is_transformers_own(function, self.modeling, name) for name in self.names) and self._learn(function)

    def rotary(self, name: str) -> bool:
        """True when the family's function for the rotary embedding does only that."""
        rotary = getattr(sys.modules[self.modeling], name)
        function = own_forward(rotary) if isinstance(rotary, nn.Module) else rotary
        if self._knows(function):
            return True
        of_class = not isinstance(rotary, nn.Module) or function is type(rotary).forward
        return of_class and is_transformers_own(function_in(rotary), self.modeling, name) and self._learn(function)

    def _knows(self, function) -> bool:
        # A graph that looked into the set would be compiled again whenever something is learned.
        return is_marked(function) or (not torch.compiler.is_compiling() and function in self.known)

    def _learn(self, function) -> bool:
        if not torch.compiler.is_compiling():
            self.known.add(function)
        return True


def is_defined_by(classes, function, name: str) -> bool:
    """Tells whether a function is the method that one of some classes defines under a name, by its text and not by what is there now."""
    return any(is_transformers_own(function, cls.__module__, f"{cls.__qualname__}.{name}") for cls in classes)


def torchs_own(name: str) -> Optional[Callable]:
    """PyTorch's own method of all modules; None if another is in its place."""
    method = getattr(nn.Module, name)
    return method if is_transformers_own(method, nn.Module.__module__, f"Module.{name}") else None


def modules_of(root: nn.Module, *but: nn.Module) -> List[nn.Module]:
    """A module, which is the first, and what is in it, each once: 0.3 ms of a decoder with adapters, where `modules()` takes 1.6. but:
    modules to leave out with what is in them."""
    found: List[nn.Module] = []
    seen, level = {None, *but}, [root]
    while level:
        level = [module for module in dict.fromkeys(level) if module not in seen]
        found += level
        seen.update(level)
        level = list(itertools.chain.from_iterable(map(_VALUES, filter(None, map(_MODULES, level)))))
    return found


def without_fsdp2(cls: type) -> type:
    """Returns the class of which FSDP2 has made another one, with the same forward, for a module that it shards; any other class itself."""
    return cls.__bases__[1] if len(cls.__bases__) == 2 and is_by(FSDP2, cls.__bases__[0]) else cls


def is_called_as_usual(cls, *libraries: str) -> bool:
    """Tells whether a class's `__call__` is PyTorch's, transformers' or another library's. libraries: how the names of their modules begin.

    PyTorch replaces its own while it exports a model. The file that defines the function decides: functools.wraps copies `__module__`.
    """
    if cls.__call__ is MODULE_CALL:
        return True
    return getattr(cls.__call__, "__globals__", {}).get("__name__", "").startswith(("torch.", "transformers.", *libraries))


def all_are_listened_to() -> bool:
    """Tells whether each module must be called: every module of the process has a hook, such as torch.utils.flop_counter's, or another
    `nn.Module.__call__` than PyTorch's is in force."""
    hooks = nn.modules.module
    return bool(
        hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks or hooks._global_backward_pre_hooks
    ) or not is_called_as_usual(nn.Module)


def captured_outputs() -> Tuple[str, ...]:
    """The names of the outputs that transformers captures in the forward pass that is under way."""
    collector = getattr(sys.modules.get(CAPTURING), "_active_collector", None)
    return () if collector is None else tuple(collector.get() or ())


def _is_captured(module, hooks) -> bool:
    """Tells whether forward hooks of a module have something to do. Those with which transformers captures outputs stay on a module
    once a caller has asked for hidden states or attentions, and do nothing until the next one asks."""
    if getattr(sys.modules.get(CAPTURING), "_active_collector", None) is None:
        return True
    first_run, captured = captured_in_first_run.get(), False
    collected = captured_outputs() if first_run is None else first_run
    for hook in hooks.values():
        if getattr(hook, "__module__", None) != CAPTURING:
            return True
        closed_over = dict(zip(hook.__code__.co_freevars, hook.__closure__ or ()))
        captured |= "key" not in closed_over or closed_over["key"].cell_contents in collected
    return captured if first_run is not None else _as_in_last_pass(module.__dict__, captured)


def _as_in_last_pass(state, captured: bool) -> bool:
    """Tells whether a module's outputs are captured, where nothing says what was in a first run. In a backward pass, in which nothing is,
    the second run of a checkpoint has to do what the first one did, which most likely was the module's last forward pass."""
    if in_backward_pass():
        return captured or CAPTURED in state
    if captured:
        state[CAPTURED] = True
    else:
        state.pop(CAPTURED, None)
    return captured


def own_forward(module):
    """The only function that a call of a module runs, its class's or one that was put on it; None while the module has hooks, and where its
    class is called in another way than PyTorch's and transformers' are."""
    cls = type(module)
    if not is_called_as_usual(cls):
        return None
    state = module.__dict__
    if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return None
    if state["_forward_hooks"] and (torch.compiler.is_compiling() or _is_captured(module, state["_forward_hooks"])):
        return None
    return cls.forward if has_class_forward(module) else getattr(state["forward"], "__func__", None)


def has_class_forward(module) -> bool:
    """Tells whether no forward was put on a module itself. While a graph is made, the attribute is asked for: the graph learns when that
    changes, and not when `__dict__` gets an entry."""
    if torch.compiler.is_compiling() and module.forward is None:
        return False
    return "forward" not in module.__dict__


def decoder_of(causal_lm):
    """The model without a head in a causal LM: "model" in most families, "transformer" in GPT-2's. None where there is none."""
    modules = causal_lm._modules
    if not isinstance(modules, dict):  # of a scripted module
        return None
    return modules.get(getattr(causal_lm, "base_model_prefix", ""), modules.get("model"))


def why_not_own(module, name: str) -> Reason:
    """Says why a module, by a name for it, is not one that runs what transformers or this package wrote and nothing else."""
    hooks = [*module.__dict__["_forward_hooks"].values(), *module.__dict__["_forward_pre_hooks"].values()]
    if any(is_by(DEEPSPEED, hook) for hook in hooks):
        return Reason("zero3", f"DeepSpeed's ZeRO-3 gathers the weights of {name} on their own")
    return Reason("hooks", f"{name} has hooks, or a replaced forward")


def is_activation(activation, name: str) -> bool:
    """True for a module whose call is the activation that a family's row names and nothing else. name: of `decoder.spec.Outputs`."""
    if name == "silu":
        return is_silu(activation)
    class_name = type(activation).__name__
    if ACTIVATION_CLASSES.get(class_name) != name or type(activation).__module__ != ACTIVATIONS:
        return False
    act, function = activation.__dict__.get("act"), own_forward(activation)
    if not is_transformers_own(function, ACTIVATIONS, f"{class_name}.forward"):
        return False
    if class_name in WRITTEN_OUT:
        return not replaced_below(function)
    if name == "gelu":
        return act is _gelu
    return type(act) is functools.partial and act.func is _gelu and act.keywords == {"approximate": "tanh"} and not act.args


def beside_class(module, name: str):
    """Returns what the file that defines a module's class has under a name. A user's subclass lives in a file of its own, so the files of
    the classes it inherits from are searched too."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))


def is_silu(activation) -> bool:
    """True for PyTorch's and transformers' SiLU modules without hooks and with their own forward."""
    cls = type(activation)
    if cls is not nn.SiLU and (cls.__name__, cls.__module__) != ("SiLUActivation", ACTIVATIONS):
        return False
    function = own_forward(activation)
    own = function is FORWARDS[nn.SiLU] or is_transformers_own(function, ACTIVATIONS, "SiLUActivation.forward")
    return function is not None and own and not replaced_below(function)


class Layer(nn.Module):
    """Base class of this package's layers. It marks their `forward` as ours, to tell it from one that others put on a module."""

    can_torch_compile = True

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        marked(cls.forward)


def rotary_forward(rotate):
    """The forward of a layer for the Hub's `rotary_pos_emb`, one name for the functions of many families.

    Where the angles have another dtype than q and k, the function that the layer stands in for is called: Llama's returns the wider dtype,
    OLMo's that of q and k.

    Args:
        rotate: called with q, k, cos, sin and unsqueeze_dim, all of one dtype, or of any where the layer is no stand-in.
    """

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        # `kernels` replaces the forward of the instance, and `apply` that of the class.
        of_family = getattr(type(self), SAVED + "forward", None) or type(self).forward
        if of_family in (forward, nn.Module.forward):
            return rotate(q, k, cos, sin, unsqueeze_dim)
        if q.dtype == k.dtype == cos.dtype and not replaced_below(function_in(self, of_family)):
            return rotate(q, k, cos, sin, unsqueeze_dim)
        return of_family(self, q, k, cos, sin, unsqueeze_dim)

    return forward


def for_class(forward):
    """The forward of a layer that goes on a class; see `checkpointing.checkpointed`."""
    return getattr(forward, "__wrapped__", forward)


def marked(forward):
    """Marks a function, and the one in it that goes on a class, as a forward of this package, and returns it."""
    for each in (forward, for_class(forward)):
        setattr(each, LAYER, each)
    return forward


def is_marked(function) -> bool:
    """Tells whether a function is a forward of this package; a wrapper to which functools copied the mark is not."""
    return function is not None and getattr(function, LAYER, None) is function


def original_forward(layer):
    """The `forward` that the class of a module has without us and without gradient checkpointing, as a function of the module."""
    return original_forward_of(type(layer))
