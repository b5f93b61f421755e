"""Answers what trainers ask of a model in each pass or step without a walk over its modules by torch's generators. Twenty-eight layers
with adapters have 2 400 of them, and such a walk takes the host 14 ms, a third of the device's time for a captured pass of 1500 tokens. A
DPO trainer makes ten such walks for each reference pass, and PEFT's `disable_adapter` collects the full status of every adapter (the device
of each parameter, the text of each module) only to read whether it is enabled.

`capture` puts the methods on the causal LM that holds the layers (a wrapper's own, PEFT's say, come to them), and on the model that it
was given. Modules and parameters may be others in the next pass, so what they find is looked over each time (`Tree`), and no answer is
kept.

`apply` puts the two that Trainer calls in each pass on the classes of causal LMs. Nothing is kept on their models: modules and weights
would outlive what a user deletes. Both put `disable_adapter` on PEFT's class, and so does the first trainer of TRL's: PEFT may be loaded
late.
"""

import contextlib
import dataclasses
import functools
import operator
import sys
from itertools import repeat
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from ..parts.binding import BoundMethod
from ..parts.modules import SAVED, decoder_of, is_defined_by, is_transformers_own, torchs_own
from ..parts.tree import TREE, keep_tree, parameters_of, tree_of, walk

__all__ = ["answer", "answer_for_adapters", "answer_for_class", "take_back", "take_back_from_adapters", "take_back_from_class"]

_TRAIN, _NEEDS_GRAD, _NUMEL = torchs_own("train"), operator.attrgetter("requires_grad"), operator.methodcaller("numel")
_OF_TRANSFORMERS = {"training", "super", "train", "use_kernels", "set_use_kernels"}  # does nothing in the same mode
_WALKS = ("parameters", "named_parameters", "_named_members", "named_modules")  # of torch, by which it finds the parameters
_MODULES = torchs_own("modules")
_PEFT, _ADAPTED = "peft.peft_model", ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "TrainableTokensWrapper")  # PEFT skips the last
_OF_TORCH = tuple(map(torchs_own, _WALKS))
_PRETRAINED = "transformers.modeling_utils", "PreTrainedModel.train"
_OF_MODES = ("children", "named_children", "__setattr__")  # by which torch's `train` finds modules and tells them their mode
_MODES = tuple(map(torchs_own, _OF_MODES))
OURS, BENEATH = SAVED + "asked", SAVED + "beneath"  # on what stands on a class: itself, and the method that it stands for
OWNERS = SAVED + "owners"  # on PEFT's method: the packages that want it
_joined: List[Set[str]] = []  # the `OWNERS` that this package is in
_in_force: Set[type] = set()  # the classes on which they stand; a user may put one back after `take_back_from_class`


def _beneath(cls: Any, name: str) -> Any:
    """The method of a class, or what it has beneath ours; None if it has none."""
    method = getattr(cls, name, None)
    return _original(method) or method


def _original(method: Any) -> Any:
    """Returns the method that one of ours replaced on a class; None for any method that is not ours, even if it wraps ours."""
    return getattr(method, BENEATH) if method is not None and getattr(method, OURS, None) is method else None


def _is_its_librarys(cls: Any, name: str) -> bool:
    """Tells whether a method of a class, or what it has beneath ours, is the one that its library wrote."""
    return is_defined_by(cls.__mro__, _beneath(cls, name), name)


def _changes_the_mode_alone(cls: Any) -> bool:
    """Tells whether the `train` of a class does nothing where all modules are in the mode already."""
    own = [vars(each)["train"] for each in cls.__mro__ if "train" in vars(each)]
    if any(getattr(cls, name) is not function for name, function in zip(_OF_MODES, _MODES)):
        return False
    return all(method is _TRAIN or _original(method) or _is_of_transformers(method) for method in own)


def _is_of_transformers(train: Any) -> bool:
    return is_transformers_own(train, *_PRETRAINED) and {*train.__code__.co_names} <= _OF_TRANSFORMERS


def _is_ours(method: Any) -> bool:
    return getattr(method, "bound_function", None) is train


def train(self, mode: bool = True, *, beneath: Optional[Callable] = None):
    """`train` of the model's class, which is left out where it would change nothing. beneath: the method that this stands for, None for
    that of the model's class."""
    if isinstance(mode, bool) and self.training is mode:
        tree = tree_of(self)
        if all(map(operator.is_, map(dict.get, tree.states, repeat("training")), repeat(mode))):
            own = filter(None, map(dict.get, tree.states, repeat("train")))
            states = vars(self), *tree.states
            finds = any(any(map(dict.__contains__, states, repeat(name))) for name in _OF_MODES)  # a module's own method
            if not finds and all(map(_changes_the_mode_alone, {type(self), *map(type, tree.modules)})) and all(map(_is_ours, own)):
                return self
    return type(self).train(self, mode) if beneath is None else beneath(mode)


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
    yield from parameters_of(self).every


def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False, *, beneath: Optional[Callable] = None) -> int:
    """`num_parameters` of transformers. beneath: as of `train`; asked for weights of four bits, which count twice."""
    cls = type(self)
    others = beneath is None and not _is_its_librarys(cls, "num_parameters")
    if others or getattr(self, "is_loaded_in_4bit", False) or not _is_found_as_torch_does(self, "parameters"):
        asked = (only_trainable, exclude_embeddings)
        return cls.num_parameters(self, *asked) if beneath is None else beneath(*asked)
    every, of_embeddings = parameters_of(self)
    return _numel(every, only_trainable) - (_numel(of_embeddings, only_trainable) if exclude_embeddings else 0)


def _numel(parameters: Iterable[nn.Parameter], only_trainable: bool) -> int:
    return sum(map(_NUMEL, filter(_NEEDS_GRAD, parameters) if only_trainable else parameters))


@functools.wraps(nn.Module.modules)
def modules(self, *args, **kwargs):
    if args or kwargs or type(self).modules is not _MODULES:
        return type(self).modules(self, *args, **kwargs)
    return walk(self)


class _WithShortStatus:
    """Takes the place of a PEFT model inside PEFT's `disable_adapter`, which reads a single field of the adapters' status: `enabled`."""

    def __init__(self, model: nn.Module, method: Callable):
        vars(self).update(_model=model, _method=method)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_model"], name, value)

    def get_model_status(self) -> Any:
        model, method = vars(self)["_model"], vars(self)["_method"]
        peft, base = sys.modules[_PEFT], model.base_model
        known = _asks_for_a_short_status(type(model), method) and "get_model_status" not in vars(model)
        if not known or not isinstance(base, peft.BaseTuner):
            return model.get_model_status()
        *kinds, but = (getattr(peft, name) for name in _ADAPTED)
        found = list(walk(base))
        classes = {cls for cls in set(map(type, found)) if issubclass(cls, tuple(kinds)) and not issubclass(cls, but)}
        enabled = {not module.disable_adapters for module in found if type(module) in classes}
        if not enabled:
            return model.get_model_status()
        return SimpleNamespace(enabled=enabled.pop() if len(enabled) == 1 else "irregular")


def _asks_for_a_short_status(cls: Any, method: Any) -> bool:
    """Tells whether a `disable_adapter` is PEFT's, and reads no field of the status of a model of a class, PEFT's own, but `enabled`."""
    peft, within = sys.modules.get(_PEFT), getattr(method, "__wrapped__", None)
    if peft is None or getattr(method, "__globals__", {}).get("__name__") != "contextlib":
        return False
    wanted = [(within, "PeftModel.disable_adapter"), (getattr(cls, "get_model_status", None), "PeftModel.get_model_status")]
    wanted += [(getattr(peft, name, None), name) for name in ("get_model_status", "get_layer_status")]
    if not all(is_transformers_own(function, _PEFT, name) for function, name in wanted):
        return False
    fields = {field.name for field in dataclasses.fields(peft.TunerModelStatus)}
    if not {*_ADAPTED} <= {*peft.get_layer_status.__code__.co_names}:  # another version's
        return False
    return fields.intersection(within.__code__.co_names) == {"enabled"}  # type: ignore[union-attr]  # is_transformers_own says so


def _peft_model() -> Any:
    """PEFT's class of models, None where PEFT is not loaded."""
    return getattr(sys.modules.get(_PEFT), "PeftModel", None)


def answer_for_adapters() -> None:
    """Puts a `disable_adapter` on PEFT's models that asks for no status but whether adapters are on. Without PEFT, and over a method of its
    user's, nothing changes."""
    cls = _peft_model()
    original: Any = getattr(cls, "disable_adapter", None)
    if _original(original) is not None:
        _joined.append(getattr(original, OWNERS))
        _joined[-1].add(__name__)
        return
    if not _asks_for_a_short_status(cls, original):
        return

    @functools.wraps(original)
    def disable_adapter(self) -> ContextManager:
        short = bool(owners) and _asks_for_a_short_status(type(self), original)
        return contextlib.contextmanager(original.__wrapped__)(_WithShortStatus(self, original)) if short else original(self)

    owners = {__name__}
    _joined.append(owners)
    vars(disable_adapter).update({OURS: disable_adapter, BENEATH: original, OWNERS: owners})
    cls.disable_adapter = disable_adapter


def take_back_from_adapters() -> None:
    """Undoes `answer_for_adapters`, where no other package wants it."""
    for owners in _joined:  # also of a method that its user put away
        owners.discard(__name__)
    _joined.clear()
    cls = _peft_model()
    method = getattr(cls, "disable_adapter", None)
    if _original(method) is not None and not getattr(method, OWNERS):
        cls.disable_adapter = getattr(method, BENEATH)


OF_CLASSES: Tuple[Callable, ...] = (train, num_parameters)
METHODS: Tuple[Callable, ...] = (*OF_CLASSES, parameters, modules)


def _of_class(cls: type, method: Callable) -> Callable:
    """Returns the function that replaces a method on a class. It calls that method wherever it must not answer itself."""
    name = method.__name__
    original = getattr(cls, name)

    @functools.wraps(original)
    def asked(self, *args, **kwargs):
        if not isinstance(self, cls):
            return original(self, *args, **kwargs)
        beneath = getattr(super(cls, self), name)
        if cls not in _in_force or torch.compiler.is_compiling() or getattr(beneath, "__func__", None) is not original:
            return beneath(*args, **kwargs)
        return method(self, *args, **kwargs, beneath=beneath)

    asked.__module__, asked.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    vars(asked).update({OURS: asked, BENEATH: original})
    return asked


def answer_for_class(cls: type) -> None:
    """Puts on a class of transformers what Trainer asks a model in each pass, unless it has a method of its own, or its user's."""
    take_back_from_class(cls)  # what another package may have left
    _in_force.add(cls)
    for method in OF_CLASSES:
        name = method.__name__
        if name not in vars(cls) and _is_its_librarys(cls, name):
            setattr(cls, name, _of_class(cls, method))


def take_back_from_class(cls: type) -> None:
    """Undoes `answer_for_class`."""
    _in_force.discard(cls)
    for method in OF_CLASSES:
        if _original(vars(cls).get(method.__name__)) is not None:
            delattr(cls, method.__name__)


def _can_answer(model: Any, method: Callable) -> bool:
    """Tells whether a model's method of the same name is the one that a function here stands for."""
    cls, name = type(model), method.__name__
    if name in vars(model):
        return False
    if method is parameters:
        return _is_found_as_torch_does(model)
    if method is modules:
        return cls.modules is _MODULES
    return _is_its_librarys(cls, name)


def answer(model: nn.Module) -> None:
    """Puts the methods on a model that has them of transformers or PyTorch, and has none of its user's."""
    for method in METHODS:
        if _can_answer(model, method):
            vars(model)[method.__name__] = BoundMethod(method, model)
    for each in (model, decoder_of(model)):
        if each is not None:
            keep_tree(each)
    answer_for_adapters()


def take_back(model: nn.Module) -> None:
    """Undoes `answer`."""
    for method in METHODS:
        if getattr(vars(model).get(method.__name__), "bound_function", None) is method:
            del vars(model)[method.__name__]
    for each in (model, decoder_of(model)):
        if each is not None:
            vars(each).pop(TREE, None)
