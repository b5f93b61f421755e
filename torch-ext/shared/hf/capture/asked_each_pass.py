"""Answers what trainers ask of a model in each pass or step without a walk by torch's generators. Twenty-eight layers with adapters have
2 400 modules, and a walk takes the host 14 ms, a third of the device's time for a captured pass of 1500 tokens.

`capture` puts the methods on the causal LM that holds the layers (a wrapper's own, PEFT's say, come to them), and `parameters`, which
clipping gradients and zero_grad ask, on the model that it was given, too. What they find is never kept: modules and parameters may be
others in the next pass.
"""

import itertools
import operator
from typing import Any, Callable, Iterator, List, Tuple

from torch import nn

from ..parts.binding import BoundMethod
from ..parts.modules import is_defined_by, modules_of

_TRAIN, _TRAINING, _PARAMETERS = nn.Module.train, operator.attrgetter("training"), operator.attrgetter("_parameters")
_OF_TRANSFORMERS = {"training", "super", "train", "use_kernels", "set_use_kernels"}  # does nothing in the same mode
_WALKS = ("parameters", "named_parameters", "_named_members", "named_modules")  # of torch, by which it finds the parameters
_OF_TORCH = tuple(getattr(nn.Module, name) for name in _WALKS)


def _changes_the_mode_alone(cls: Any) -> bool:
    """Tells whether the `train` of a class does nothing where all modules are in the mode already."""
    method = cls.train
    return method is _TRAIN or is_defined_by(cls.__mro__, method, "train") and {*method.__code__.co_names} <= _OF_TRANSFORMERS


def train(self, mode: bool = True):
    """`train` of the model's class, which is left out where it would change nothing."""
    modules = modules_of(self)
    same = isinstance(mode, bool) and all(map(operator.is_, map(_TRAINING, modules), itertools.repeat(mode)))
    if same and all(map(_changes_the_mode_alone, {*map(type, modules)})):
        if not any("train" in state for state in map(vars, modules) if state is not vars(self)):
            return self
    return type(self).train(self, mode)


def _is_found_as_torch_does(model: nn.Module, *own: str) -> bool:
    """Tells whether PyTorch's own methods find the parameters of a model. own: names of which it may have a method by itself."""
    state = vars(model)
    same = all(getattr(type(model), name) is getattr(nn.Module, name) is function for name, function in zip(_WALKS, _OF_TORCH))
    return same and not any(name in state for name in _WALKS if name not in own)


def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
    """`parameters` of PyTorch, in its order."""
    if recurse is not True or not _is_found_as_torch_does(self, "parameters"):
        yield from type(self).parameters(self, recurse)
        return
    seen: set = {None}
    left: List[Any] = [self]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if module._parameters:  # most have none
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
        if module._modules:
            left += reversed(module._modules.values())


def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """`num_parameters` of transformers."""
    modules, left_out = modules_of(self), {id(None)}
    if exclude_embeddings:
        left_out.update(id(module._parameters.get("weight")) for module in modules if isinstance(module, nn.Embedding))
    found = list(itertools.chain.from_iterable(map(dict.values, filter(None, map(_PARAMETERS, modules)))))
    each = dict(zip(map(id, found), found)).items()
    return sum(p.numel() for key, p in each if key not in left_out and (p.requires_grad or not only_trainable))


METHODS: Tuple[Callable, ...] = (train, num_parameters, parameters)


def _can_answer(model: Any, method: Callable) -> bool:
    """Tells whether a model's method of the same name is the one that a function here stands for."""
    cls, name = type(model), method.__name__
    if method is parameters:
        return _is_found_as_torch_does(model)
    if name in vars(model) or not is_defined_by(cls.__mro__, getattr(cls, name, None), name):
        return False
    # weights of four bits count twice
    return method is train or model.num_parameters(exclude_embeddings=True) == num_parameters(model, exclude_embeddings=True)


def answer(model: nn.Module) -> None:
    """Puts the methods on a model that has them of transformers or PyTorch, and has none of its user's."""
    for method in METHODS:
        if _can_answer(model, method):
            vars(model)[method.__name__] = BoundMethod(method, model)


def take_back(model: nn.Module) -> None:
    """Undoes `answer`."""
    for method in METHODS:
        if getattr(vars(model).get(method.__name__), "bound_function", None) is method:
            del vars(model)[method.__name__]
