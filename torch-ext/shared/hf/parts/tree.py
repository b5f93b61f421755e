"""The modules and parameters in a module, found by one walk and looked over since: that takes a third of the time of a walk, which for
2 400 modules waits for memory most of the time."""

import functools
import itertools
import operator
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from .modules import SAVED, modules_of, torchs_own

__all__ = ["HOOKS", "TREE", "Contents", "NotCopied", "Tree", "is_called", "keep_tree", "parameters_of", "tree_of", "walk"]

TREE = SAVED + "tree"  # on a module: its `Tree`, where a walk over it in each pass would take too long
CONTAINERS = frozenset((nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList))  # never called, so their hooks never run
# Read anew each time: some remove hooks by giving a module new dictionaries.
HOOKS = operator.itemgetter("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_each = itertools.chain.from_iterable
_NAMED_MODULES = torchs_own("named_modules")


class NotCopied:
    """Becomes None in a copy of what holds it (copy.deepcopy, pickle)."""

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


class Contents:
    """Remembers the dictionaries that modules hold by some names, and their contents, and tells whether any has changed. The comparison
    runs in C, and touches as little memory as it can, for which it mostly waits."""

    def __init__(self, names: Sequence[str], states: Sequence[dict]):
        """states: the attributes of each module. Where one has no dictionary by a name, as a scripted or traced module, the answer is
        always that it has changed."""
        self._of = list(map(operator.itemgetter, names))
        owners = [state.get(name) for name in names for state in states]
        known = all(isinstance(owner, dict) for owner in owners)
        self._owners = owners if known else None
        self._empty = [owner for owner in owners if not owner]
        self._filled: List[dict] = list(filter(None, owners)) if known else []
        self._sizes = list(map(len, self._filled))
        self._keys = list(_each(self._filled))
        self.values = list(_each(map(dict.values, self._filled)))

    def is_same(self, states: Sequence[dict]) -> bool:
        if self._owners is None or not all(map(operator.is_, _each(map(map, self._of, itertools.repeat(states))), self._owners)):
            return False
        if any(self._empty) or list(map(len, self._filled)) != self._sizes or list(_each(self._filled)) != self._keys:
            return False
        return all(map(operator.is_, _each(map(dict.values, self._filled)), self.values))


def is_called(module: nn.Module) -> bool:
    """Tells whether a module's hooks may ever run."""
    return type(module) not in CONTAINERS or "forward" in vars(module)


class Parameters(NamedTuple):
    """Holds the parameters of a module in PyTorch's order, and those of them that are the weight of an embedding below it, by the first
    module that has them."""

    every: List[nn.Parameter]
    of_embeddings: List[nn.Parameter]


class Tree(NotCopied):
    """What is in a module. It stands on that module, and so refers to what is below it alone: a cycle would wait for Python's cyclic
    garbage collector.

    modules: what is below, each once; states: the attributes of each.
    """

    def __init__(self, root: nn.Module, without: Tuple[nn.Module, ...]):
        self.without = without
        self.modules = modules_of(root, *without)[1:]
        self.states = list(map(vars, self.modules))
        self._found: Optional[Contents] = None  # modules
        self._held: Optional[Contents] = None  # parameters, in no order
        self._kinds: List[type] = []
        self._parameters = Parameters([], [])

    def is_of(self, root: nn.Module, without: Tuple[nn.Module, ...]) -> bool:
        """Tells whether another walk would find the same modules."""
        if self.without != without:
            return False
        states = [vars(root), *self.states]
        if self._found is None:
            self._found = Contents(("_modules",), states)
        return self._found.is_same(states)

    @functools.cached_property
    def called(self) -> List[dict]:
        """The attributes of each module that may be called."""
        return [state for module, state in zip(self.modules, self.states) if is_called(module)]

    def hooks(self) -> Iterable[dict]:
        """The dictionaries of the hooks of each module that may be called."""
        return _each(map(HOOKS, self.called))

    def parameters(self, root: nn.Module) -> Parameters:
        """The parameters of the module on which it stands."""
        states, kinds = [vars(root), *self.states], list(map(type, self.modules))
        found_by_torch = not any(map(dict.__contains__, self.states, itertools.repeat("named_modules")))
        if self._held is None or kinds != self._kinds or not found_by_torch or not self._held.is_same(states):
            self._kinds = kinds
            self._held, self._parameters = Contents(("_parameters",), states), _parameters_of(root)
        return self._parameters


def walk(root: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and all modules below it as PyTorch's `modules` does, even if the caller changes them during the walk. One generator
    covers all levels; PyTorch nests one for each."""
    left: List[Iterator[Any]] = [iter((root,))]
    seen: set = {None}
    while left:
        for module in left[-1]:
            if module in seen:
                continue
            if type(module).named_modules is not _NAMED_MODULES or "named_modules" in vars(module):
                yield from (found for _, found in module.named_modules(seen, "", True))
                continue
            seen.add(module)
            yield module
            if module._modules:
                left.append(iter(module._modules.values()))
                break
        else:
            left.pop()


def _parameters_of(root: nn.Module) -> Parameters:
    found: Dict[int, nn.Parameter] = {}
    of_embeddings = []
    for module in walk(root):
        for name, parameter in module._parameters.items() if module._parameters else ():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = parameter
                if name == "weight" and isinstance(module, nn.Embedding) and module is not root:
                    of_embeddings.append(parameter)
    return Parameters(list(found.values()), of_embeddings)


def parameters_of(root: nn.Module) -> Parameters:
    """The parameters of a module as they are now."""
    return tree_of(root).parameters(root) if TREE in vars(root) else _parameters_of(root)


def keep_tree(root: nn.Module) -> None:
    """Keeps the tree of a module from now on."""
    vars(root)[TREE] = None


def tree_of(root: nn.Module, *without: nn.Module) -> Tree:
    """The tree of a module as it is now: a kept one that is still right, or a new one. without: modules to leave out with what is in
    them."""
    kept = vars(root).get(TREE)
    if kept is not None and kept.is_of(root, without):
        return kept
    tree = Tree(root, without)
    if TREE in vars(root):
        tree.is_of(root, without)
        vars(root)[TREE] = tree
    return tree
