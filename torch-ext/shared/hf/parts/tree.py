"""The modules and parameters in a module, found by one walk and looked over since: that takes a third of the time of a walk, which for
2 400 modules waits for memory most of the time."""

import itertools
import operator
from typing import Dict, List, Optional, Tuple

from torch import nn

from .modules import SAVED, modules_of

TREE = SAVED + "tree"  # on a module: its `Tree`, where a walk over it in each pass would take too long
_MODULES, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
_values = itertools.chain.from_iterable


class NotCopied:
    """Becomes None in a copy of what holds it (copy.deepcopy, pickle)."""

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


class Tree(NotCopied):
    """What is in a module. It stands on that module, and so refers to what is below it alone: a cycle would wait for Python's cyclic
    garbage collector.

    modules: what is below, each once; states: the attributes of each.
    """

    def __init__(self) -> None:
        self._without: Tuple[nn.Module, ...] = ()
        self._sized: List[dict] = []  # all that hold modules and parameters
        self._sizes: List[int] = []
        self._filled: List[dict] = []  # those of them that hold any
        self._held: list = []
        self._parameters: Optional[List[nn.Parameter]] = None
        self._embeddings: Optional[List[nn.Module]] = None

    def look_over(self, root: nn.Module, *without: nn.Module) -> "Tree":
        """The tree as it is now. root: the module on which it stands; without: modules to leave out with what is in them."""
        if not (self._sized and self._sized[0] is root._modules and self._sized[1] is root._parameters and self._is_same(without)):
            self.walk(root, *without)
            each: List[nn.Module] = [root, *self.modules]
            self._sized = list(_values(zip(map(_MODULES, each), map(_PARAMETERS, each))))
            self._sizes = list(map(len, self._sized))
            self._filled = list(filter(None, self._sized))
            self._held = list(_values(map(dict.values, self._filled)))
        return self

    def walk(self, root: nn.Module, *without: nn.Module) -> "Tree":
        """Finds everything anew."""
        self._without, self._parameters, self._embeddings = without, None, None
        self.modules = modules_of(root, *without)[1:]
        self.states = list(map(vars, self.modules))
        return self

    def _is_same(self, without: Tuple[nn.Module, ...]) -> bool:
        """Tells whether the modules still hold the same ones and the same parameters. They are compared in C."""
        if self._without != without or list(map(len, self._sized)) != self._sizes:
            return False
        return all(map(operator.is_, _values(map(dict.values, self._filled)), self._held))

    def parameters(self, root: nn.Module) -> List[nn.Parameter]:
        """Those of the module on which it stands, in PyTorch's order."""
        if self._parameters is None:
            self._parameters = _parameters_of(root)
        return self._parameters

    def embeddings(self) -> List[nn.Module]:
        """The modules that look tokens up."""
        if self._embeddings is None:
            self._embeddings = [module for module in self.modules if isinstance(module, nn.Embedding)]
        return self._embeddings


def _parameters_of(root: nn.Module) -> List[nn.Parameter]:
    """The parameters of a module in the order in which PyTorch finds them: a module's own before those of what it holds."""
    found: Dict[int, nn.Parameter] = {}
    seen: set = {None}
    left: List[nn.Module] = [root]
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


def tree_of(root: nn.Module, *without: nn.Module) -> Tree:
    """The tree of a module, found anew unless it stands there. without: as in `Tree.look_over`."""
    kept = vars(root).get(TREE)
    return Tree().walk(root, *without) if kept is None else kept.look_over(root, *without)
