"""Families that are served together, and which layer replaces which of their parts."""

import sys
from functools import partial
from typing import Callable, NamedTuple, Optional, Tuple

from torch import nn

from ..family.accounted import accounted
from ..family.families import LOSS, Targets
from ..family.forwards import rotary_of, unless_replaced
from ..family.known_texts import TEXTS
from ..family.options import Settings
from ..layer.decoder_layer import FusedLayer
from ..parts.lookups import own_rotary, rotary_replaced
from . import layers, warmup
from .warmup import Case

__all__ = ["Served", "targets"]


def targets(own: FusedLayer) -> Targets:
    """Makes the layers of a row, and says what they stand in for."""
    family, sparse = own.family, own.family.sparse
    prefix, rotary = family.prefix, layers.rotary_layer_of(family)
    towers = {tower.name: (tower.name, layers.with_vision_of(family, tower)) for tower in family.towers}
    # The Hub's names are for what most families compute: a weight without an offset, halves of a whole head in the angles' dtype.
    classes, common = {}, {}
    if not family.centred:  # PyTorch's LayerNorm is one kernel, and not the family's own
        norm = layers.rms_norm_of(family)
        classes["rms_norm"] = family.norm_class(), norm
        common[family.norm_class() if family.offset else "RMSNorm"] = norm
    if family.mlp:
        classes["swiglu"] = (family.mlp_class(), layers.mlp_of(family))
    classes[LOSS] = (family.causal_lm(), layers.causal_lm_of(family))
    classes.update(towers)
    classes["decoder_layer"] = (f"{prefix}DecoderLayer", layers.decoder_layer_of(own))
    classes["attention"] = (family.decoder or f"{prefix}Model", layers.model(family))
    if sparse is not None:
        classes["experts"] = (sparse.classes[2], layers.experts_of(family))
    first = ["rms_norm", "swiglu" if family.mlp else "experts"]
    rest = ["rope", LOSS, *towers, "decoder_layer", "attention", "experts"]
    operations = tuple(dict.fromkeys(name for name in (*first, *rest) if name in classes or name == "rope"))
    if family.rotary == "halves" and not family.partial and not family.narrow:
        common["rotary_pos_emb"] = rotary
    replaced, original = partial(rotary_replaced, family.modeling), lambda: own_rotary(sys.modules[family.modeling])
    return Targets(
        model=family.model,
        modeling=family.modeling,
        attention=f"{prefix}Attention",
        classes=classes,
        rotary=rotary,
        rotate=unless_replaced(rotary_of(family), replaced, original),
        operations=operations,
        losses=(LOSS, *towers),
        hub_names={**common, **{name: layer for operation, (name, layer) in classes.items() if operation != "rms_norm"}},
        explain_layer=own.explain,
        fused=tuple(name for name in family.classes() if name != f"{prefix}RMSNorm" and not (family.mlp and name == family.mlp_class())),
        # A model of such a family has dense layers only where its configuration asks for them, and may have no others.
        # Where attributes may be absent, the layers of a model may all have something else than attention.
        optional=(*(("swiglu", "experts") if sparse is not None and family.mlp else ()), *(("rope",) if family.absent else ()), *towers),
        elsewhere={tower.name: tower.modeling for tower in family.towers if tower.modeling},
        accounted=accounted(family),
        needs=tuple(name for name in ("rms_norm", "swiglu", "rope") if name in operations and not (name == "rope" and family.mixers)),
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
        return tuple(dict.fromkeys((*self.options, *Settings._fields)))

    def serves(self, model: nn.Module) -> bool:
        """Tells whether a model has decoder layers of one of the rows."""
        return any(warmup.is_layer_of(own, module) for module in model.modules() for own in self.rows)
