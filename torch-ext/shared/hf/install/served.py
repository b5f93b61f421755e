"""Families that are served together, and which layer replaces which of their parts."""

from typing import Callable, NamedTuple, Optional, Tuple

from torch import nn

from ..family.families import Layers, Targets, targets_of
from ..family.known_texts import TEXTS
from ..family.options import TOLD
from ..layer.decoder_layer import FusedLayer
from . import layers, warmup
from .warmup import Case


def targets(own: FusedLayer) -> Targets:
    """Makes the layers of a row, and says what they stand in for."""
    family, sparse = own.family, own.family.sparse
    return targets_of(
        own,
        Layers(
            layers.rms_norm_of(family),
            layers.rotary_layer_of(family),
            layers.decoder_layer_of(own),
            layers.model(family),
            layers.causal_lm_of(family),
            layers.mlp_of(family) if family.mlp else None,
            layers.experts_of(family) if sparse is not None else None,
            tuple(layers.with_vision_of(family, tower) for tower in family.towers),
        ),
    )


class Served(NamedTuple):
    """Rows of the table that are served together.

    options: the arguments of `apply`, in its order. cases: the sizes of `warmup_all_kernels` without a model. targets_of: makes a row's
    `Targets`. warm_up: runs a case ahead, called with device, dtype, case and tokens=...; other: the row whose parts a model of no row is
    warmed up with, None where it is refused. shapes: whether models without a row are served by the texts of their parts.
    """

    rows: Tuple[FusedLayer, ...]
    options: Tuple[str, ...]
    cases: Tuple[Case, ...]
    targets_of: Callable[[FusedLayer], Targets] = targets
    warm_up: Callable = warmup.warm_up
    other: Optional[FusedLayer] = None
    shapes: bool = False

    def families(self) -> Tuple[Targets, ...]:
        """What stands in for what, of the rows whose texts are recorded: a model of another gets more without a row, by the texts of its
        parts."""
        return tuple(self.targets_of(own) for own in self.rows if own.family.modeling in TEXTS)

    def arguments(self) -> Tuple[str, ...]:
        """The options of `apply`, those that every package has among them."""
        return tuple(dict.fromkeys((*self.options, *TOLD)))

    def serves(self, model: nn.Module) -> bool:
        """Tells whether a model has decoder layers of one of the rows."""
        return any(warmup.is_layer_of(own, module) for module in model.modules() for own in self.rows)
