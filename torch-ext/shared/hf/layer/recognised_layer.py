"""A decoder layer whose row was read off its own forwards (row_reader.py): it holds for the layers that it was read of, while what decided
their branches stays as it was."""

import sys
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from torch import nn

from ..family.families import Family
from ..parts.explanation import Reason
from ..parts.facts import Path, held_at
from ..parts.lookups import SAVED, Lookups
from ..parts.modules import is_marked, original_forward_of, own_forward
from .decoder_layer import WHOLE, FusedLayer

FACTS = SAVED + "facts"  # on a layer: what decided its branches, by the attributes that lead to it


class RecognisedLayer(FusedLayer):
    """A row that no table has. classes: the names of those that are taken apart. called: why parts are called, by their attributes.
    arguments: of the forwards, with the defaults for which they were read."""

    def __init__(self, family: Family, classes: Sequence[str], called: Mapping[str, str], arguments: Mapping[str, Any]):
        super().__init__(family)
        self.called, self.arguments = called, arguments
        self.classes = tuple(classes)
        # What the file of the model has under a name was read; later it may not be another thing.
        home = sys.modules[family.modeling]
        self._forwards = [original_forward_of(getattr(home, name)) for name in classes]
        self._functions = {name: getattr(home, name) for name in self.rotary_functions}
        own = ("eager_attention_forward", *family.position_scale[:1])
        self.lookups = Lookups(self._forwards, own, (family.modeling,))  # type: ignore[misc]

    def explain(self, layer, x) -> List[Tuple[str, Optional[Reason]]]:
        """As of `FusedLayer`, with a row that says that the others were read."""
        rows = super().explain(layer, x)
        return rows if rows[0][0] == WHOLE else [(f"read: {type(layer).__name__}.forward", None), *rows]

    def reason_of_called(self, name: str) -> Reason:
        return Reason("called", self.called[name])

    def run_by(self, module) -> bool:
        function = own_forward(module)
        return is_marked(function) or any(function is each for each in self._forwards)

    def rotary(self, name: str) -> bool:
        return getattr(sys.modules[self.modeling], name) is self._functions[name]

    def is_read_for(self, given: Mapping[str, Any]) -> bool:
        """Whether the arguments of a call, by name, are those for which the forwards were read."""
        values = ((given.get(name, default), default) for name, default in self.arguments.items())
        return all(value is default or (type(value) is type(default) and value == default) for value, default in values)

    def why_other(self, layer: nn.Module, facts: Optional[Mapping[Path, Any]] = None) -> Optional[Reason]:
        """As of `FusedLayer`. facts: that decided its branches, by default those that are noted on the layer."""
        for path, held in (vars(layer)[FACTS] if facts is None else facts).items():
            now = held_at(layer, path)
            if now is not held and now != held:
                return Reason("facts", f"{'.'.join(path)} is {now!r}, and was {held!r} when kernelize() read what the layer computes")
        return super().why_other(layer)
