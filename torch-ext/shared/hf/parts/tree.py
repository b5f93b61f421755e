"""The modules and parameters in a module, found by one walk and looked over since: that takes a third of the time of a walk, which for
2 400 modules waits for memory most of the time."""

import itertools
import operator
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from torch import nn

from .modules import SAVED, modules_of, torchs_own

__all__ = ["HOOKS", "TREE", "NotCopied", "keep_tree", "tree_of", "walk"]

TREE = SAVED + "tree"  # on a module: its `Tree`, where a walk over it in each pass would take too long
_MODULES, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
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


class _Held:
    """Remembers some dictionaries and their contents, and tells whether either has changed. The comparison runs in C."""

    def __init__(self, owners: Iterable[dict]):
        self._owners = list(owners)
        self._sizes = list(map(len, self._owners))
        self._filled = list(filter(None, self._owners))
        self.values = list(_each(map(dict.values, self._filled)))

    def is_same(self, owners: Iterable[dict]) -> bool:
        """owners: the dictionaries that are there now."""
        if not all(map(operator.is_, owners, self._owners)) or list(map(len, self._owners)) != self._sizes:
            return False
        return all(map(operator.is_, _each(map(dict.values, self._filled)), self.values))


class Tree(NotCopied):
    """What is in a module. It stands on that module, and so refers to what is below it alone: a cycle would wait for Python's cyclic
    garbage collector.

    modules: what is below, each once; states: the attributes of each.
    """

    def __init__(self, root: nn.Module, without: Tuple[nn.Module, ...]):
        self.without = without
        self.modules = modules_of(root, *without)[1:]
        self.states = list(map(vars, self.modules))
        self._found: Optional[_Held] = None  # modules
        self._held: Optional[_Held] = None  # parameters, in no order
        self._parameters: List[nn.Parameter] = []
        self.embeddings: List[nn.Module] = []

    def is_of(self, root: nn.Module, without: Tuple[nn.Module, ...]) -> bool:
        """Tells whether another walk would find the same modules."""
        if self.without != without:
            return False
        if self._found is None:
            self._found = _Held(self._each_of(root, _MODULES))
        return self._found.is_same(self._each_of(root, _MODULES))

    def _each_of(self, root: nn.Module, which: Callable[[Any], dict]) -> Iterable[dict]:
        return itertools.chain((which(root),), map(which, self.modules))

    def hooks(self) -> Iterable[dict]:
        """The dictionaries of the hooks of each."""
        return _each(map(HOOKS, self.states))

    def parameters(self, root: nn.Module) -> List[nn.Parameter]:
        """The parameters of the module on which it stands, in PyTorch's order."""
        if self._held is None or not self._held.is_same(self._each_of(root, _PARAMETERS)):
            self._held, self._parameters = _Held(self._each_of(root, _PARAMETERS)), _parameters_of(root)
            self.embeddings = [module for module in self.modules if isinstance(module, nn.Embedding)]
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


def _parameters_of(root: nn.Module) -> List[nn.Parameter]:
    """The parameters of a module in the order in which PyTorch finds them: a module's own before those of what it holds."""
    found: Dict[int, nn.Parameter] = {}
    seen: set = {None}
    left: List[Any] = [root]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        if module._parameters:  # most have none
            found.update((id(parameter), parameter) for parameter in module._parameters.values() if parameter is not None)
        if module._modules:
            left += reversed(module._modules.values())
    return list(found.values())


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
