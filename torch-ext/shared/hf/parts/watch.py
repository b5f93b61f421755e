"""Notices whether modules are still what they were: of the same classes, the same weights at the same place, submodules, settings,
functions that they call by name, and no hooks."""

import functools
import itertools
import operator
import sys
import weakref
from typing import Any, Dict, Iterable, List, Tuple

import torch
from torch import nn

from .lookups import Lookups, original_forward_of
from .tree import HOOKS, Contents, is_called

__all__ = ["SIMPLE", "Watch"]

SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
_NEEDS_GRAD = operator.attrgetter("requires_grad")
_NOTHING = itertools.repeat(object())  # instead of an attribute that is gone
HELD = ("_modules", "_parameters", "_buffers")  # the names by which a module holds others, and tensors
FUNCTIONS = ("apply_rotary_pos_emb", "eager_attention_forward")  # that modules of transformers call by name


def _attention_of(config) -> Tuple[str, Any]:
    """The name of an attention, and the function that transformers has by that name."""
    name = config._attn_implementation
    return name, sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS.get(name)


class Watch:
    """Remembers what modules are made of, and tells whether any of it has changed since.

    A CUDA graph would not notice: it goes on reading weights where they lay when it was recorded, and running the submodules, hooks,
    settings and attention of that moment. Comparing takes 10 us a decoder layer, because everything is compared in C.
    """

    STANDARD = frozenset(nn.Module().__dict__)

    def __init__(self, modules: Iterable[nn.Module], ignored: Iterable[str] = ()):
        """ignored: names of attributes that may change."""
        parts, standard = [part for module in modules for part in module.modules()], self.STANDARD.union(ignored)
        self.parts = list(map(weakref.ref, parts))  # a watched module may be dropped
        classes = set(map(type, parts))
        self.classes = list(classes)
        self.names = [vars(sys.modules[name]) for name in sorted({cls.__module__ for cls in classes})]
        self.states = list(map(vars, parts))
        self.held = Contents(HELD, self.states)
        self.called = [state for part, state in zip(parts, self.states) if is_called(part)]
        self.tensors = [value for value in self.held.values if isinstance(value, torch.Tensor)]
        configs: Dict[int, Any] = {}
        identical: List[Tuple[dict, str, Any]] = []
        equal: List[Tuple[dict, str, Any]] = []
        for state in self.states:
            if hasattr(state.get("config"), "_attn_implementation"):
                configs[id(state["config"])] = state["config"]
            for key, value in state.items():
                if key in standard and key != "training":
                    continue
                if isinstance(value, torch.Tensor):
                    self.tensors.append(value)
                if isinstance(value, (list, tuple, set, dict)) and _is_simple(value):
                    equal.append((state, key, value if isinstance(value, tuple) else value.copy()))
                elif type(value) in (*SIMPLE, functools.partial) and type(value) is not bool or key == "forward":
                    equal.append((state, key, value))
                else:
                    identical.append((state, key, value))
        self.identical, (*self.compared, values) = (tuple(zip(*found)) or ((), (), ()) for found in (identical, equal))
        self.values = list(values)
        self.calls = [_Call(value) if type(value) is functools.partial else value for value in values]
        self.configs = list(configs.values())
        attentions = dict(map(_attention_of, self.configs))
        if attentions:  # ours may call SDPA, too
            attentions["sdpa"] = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS.get("sdpa")
        self.lookups = Lookups([*map(original_forward_of, self.classes), *attentions.values()])
        self.structure = self._structure()
        self.facts = self._facts()

    def _structure(self) -> list:
        """How many attributes each module has, its class, and how many have a forward; one call, as each counts in each pass."""
        forwards = sum(map(dict.__contains__, self.states, itertools.repeat("forward")))
        return [forwards, *map(len, self.states), *map(type, map(weakref.ref.__call__, self.parts))]

    def _facts(self) -> list:
        """Says where the tensors lie, whether they need a gradient, and which functions compute."""
        functions = [names.get(name) for names in self.names for name in FUNCTIONS]
        self.lookups.replaced()  # looks again where a name stands for something else
        functions += [self.lookups.last[1], *map(getattr, self.classes, itertools.repeat("forward"), _NOTHING)]
        functions += map(_attention_of, self.configs)
        return [*map(torch.Tensor.data_ptr, self.tensors), *map(_NEEDS_GRAD, self.tensors), *functions]

    def moved(self) -> bool:
        """Tells whether the memory of any tensor is elsewhere by now."""
        return list(map(torch.Tensor.data_ptr, self.tensors)) != self.facts[: len(self.tensors)]

    def same(self) -> bool:
        """Tells whether the modules are still made of the same."""
        if any(map(any, map(HOOKS, self.called))) or self._structure() != self.structure or not self.held.is_same(self.states):
            return False
        owners, keys, values = self.identical
        if not all(map(operator.is_, map(dict.get, owners, keys, _NOTHING), values)) or self._facts() != self.facts:
            return False
        found = list(map(dict.get, *self.compared, _NOTHING))
        return found == self.values or found == self.calls  # a list's comparison takes what is identical for equal, in C


class _Call:
    """Equals every partial that calls the same: transformers makes another one for the same checkpoints each time that they are switched
    on, as TRL does in each pass for its reference."""

    def __init__(self, partial: functools.partial):
        self.partial = partial

    def __eq__(self, found) -> bool:
        mine = self.partial
        if found is mine:
            return True
        if type(found) is not functools.partial or found.func is not mine.func or found.args or mine.args:
            return False
        return _is_simple(found.keywords) and _is_simple(mine.keywords) and found.keywords == mine.keywords


def _is_simple(container) -> bool:
    """Tells whether a container holds only numbers and names, which can be compared."""
    values = list(container.values()) if isinstance(container, dict) else container
    return all(type(value) in SIMPLE for value in values)
