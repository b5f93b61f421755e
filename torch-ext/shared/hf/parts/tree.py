"""The modules and parameters in a module, found by one walk and looked over since: that takes a third of the time of a walk, which for
2 400 modules waits for memory most of the time."""

import itertools
import operator
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from torch import nn

from .modules import SAVED, modules_of

__all__ = ["HOOKS", "TREE", "NotCopied", "keep_tree", "tree_of"]

TREE = SAVED + "tree"  # on a module: its `Tree`, where a walk over it in each pass would take too long
_MODULES, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
HOOKS = operator.itemgetter("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_each = itertools.chain.from_iterable


class NotCopied:
    """Becomes None in a copy of what holds it (copy.deepcopy, pickle)."""

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


class _Held:
    """What some dictionaries hold, and whether they still do. They are compared in C."""

    def __init__(self, owners: Iterable[dict]):
        self._owners = list(owners)
        self._sizes = list(map(len, self._owners))
        self._filled = list(filter(None, self._owners))
        self.values = list(_each(map(dict.values, self._filled)))

    def is_same(self) -> bool:
        if list(map(len, self._owners)) != self._sizes:
            return False
        return all(map(operator.is_, _each(map(dict.values, self._filled)), self.values))


class _Step(NamedTuple):
    """Holds where PyTorch's walk over modules comes to. siblings: what has `module` by its name; below: what that module holds, None where
    there is none, or the walk has been there; size: of that; parent: the number of the step to what holds it, -1 for the root; place: among
    its siblings."""

    siblings: dict
    name: str
    module: Optional[nn.Module]
    below: Optional[dict]
    size: int
    parent: int
    place: int


def _steps_of(root: nn.Module) -> List[_Step]:
    steps: List[_Step] = []
    seen = {root}

    def descend(siblings: dict, parent: int) -> None:
        for place, (name, module) in enumerate(siblings.items()):
            below = None if module is None or module in seen else module._modules
            steps.append(_Step(siblings, name, module, below, len(below or ()), parent, place))
            if below is not None:
                seen.add(module)
                descend(below, len(steps) - 1)

    descend(root._modules, -1)
    return steps


class Tree(NotCopied):
    """What is in a module. It stands on that module, and so refers to what is below it alone: a cycle would wait for Python's cyclic
    garbage collector. A module's own dictionaries, such as that of its hooks, are taken to stay the objects that they are.

    modules: what is below, each once; states: the attributes of each; hooks: the dictionaries of the hooks of each.
    """

    def __init__(self, root: nn.Module, without: Tuple[nn.Module, ...]):
        self.without, self._below, self._own = without, root._modules, root._parameters
        self.modules = modules_of(root, *without)[1:]
        self.states = list(map(vars, self.modules))
        self.hooks = list(_each(map(HOOKS, self.states)))
        self._found: Optional[_Held] = None  # modules
        self._held: Optional[_Held] = None  # parameters, in no order
        self._parameters: List[nn.Parameter] = []
        self._steps: Optional[List[_Step]] = None
        self.embeddings: List[nn.Module] = []

    def is_of(self, root: nn.Module, without: Tuple[nn.Module, ...]) -> bool:
        """Tells whether another walk would find the same modules."""
        if self.without != without or self._below is not root._modules or self._own is not root._parameters:
            return False
        if self._found is None:
            self._found = _Held([root._modules, *map(_MODULES, self.modules)])
        return self._found.is_same()

    def parameters(self, root: nn.Module) -> List[nn.Parameter]:
        """The parameters of the module on which it stands, in PyTorch's order."""
        if self._held is None or not self._held.is_same():
            self._held, self._parameters = _Held([root._parameters, *map(_PARAMETERS, self.modules)]), _parameters_of(root)
            self.embeddings = [module for module in self.modules if isinstance(module, nn.Embedding)]
        return self._parameters


    def walk(self, root: nn.Module) -> Iterator[nn.Module]:
        """Yields the module on which it stands and what is below, as PyTorch's `modules` does, also what the caller puts there meanwhile.
        Where that makes PyTorch's raise, since a module holds more than when the walk began with it, this one may go on."""
        if self._steps is None:
            self._steps = _steps_of(root)
        before = len(root._modules)
        yield root
        if len(root._modules) != before:
            yield from self._rest(root, 0, -1, 0)
            return
        for number, (siblings, name, module, below, size, parent, place) in enumerate(self._steps):
            if siblings.get(name) is not module:
                yield from self._rest(root, number, parent, place)
                return
            if below is not None:
                yield module  # type: ignore[misc]  # it is one
                if len(below) != size:
                    yield from self._rest(root, number + 1, number, 0)
                    return

    def _rest(self, root: nn.Module, number: int, parent: int, place: int) -> Iterator[nn.Module]:
        """Yields what a walk comes to after so many steps: the modules that the one of step `parent` holds, from a place on, and so on."""
        steps: List[Any] = self._steps or []
        seen = {root, *(step.module for step in steps[:number] if step.below is not None)}
        while True:
            above = root if parent < 0 else steps[parent].module
            for module in itertools.islice(above._modules.values(), place, None):
                if module is not None:
                    yield from (found for _, found in module.named_modules(seen))
            if parent < 0:
                return
            parent, place = steps[parent].parent, steps[parent].place + 1


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
