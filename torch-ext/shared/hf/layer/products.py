"""Which of a model's products are made in eight bits: what a user asked for, and what becomes of it."""

import warnings
from typing import Iterable, List, Mapping, Optional, Sequence, Tuple

from torch import nn

from ...decoder.eight_bits import FEWEST, KINDS, fewest_of, why_not_eight
from ...decoder.nodes import why_not_tiled
from ...decoder.projection import Group
from ...ops.arguments import fail
from ..parts.adapters import projections
from ..parts.explanation import Reason
from ..parts.modules import SAVED
from .checkpointing import tile_of, was_told

__all__ = ["PRODUCTS", "check_products", "explain_products", "products_of", "warn_of_no_layers"]

PRODUCTS = SAVED + "products"  # on a decoder layer or its class: what apply() or kernelize() was told
TILES, EXPERT_TILES = "MLP in tiles of {} tokens", "experts in tiles of {} tokens"  # as `explain` names them
Part = Tuple[Mapping[str, nn.Module], Optional[Reason]]


def check_products(products: str) -> None:
    """Raises ValueError for a kind of products that there is not."""
    if products not in KINDS:
        fail("products", repr(products), " or ".join(map(repr, KINDS)))


def products_of(layer: nn.Module) -> str:
    """Returns the kind of products that a decoder layer was asked for."""
    return was_told(layer, PRODUCTS) or KINDS[0]


def explain_products(
    layer: nn.Module, parts: Iterable[Part], down: str, dtype, wider: bool = False, experts: Optional[bool] = None
) -> List[Tuple[str, Optional[Reason]]]:
    """[(products of some projections, None or why they are not in eight bits)] of a layer, and [(MLP in tiles, None or why not)]; nothing
    where it was not asked for them.

    parts: the projections of each part of the layer, by name, and why it is not fused. down: the name of the one that reads the activation
    and not the norm; dtype, wider: as of `projections`. experts: whether the layer's are in its node, None for a layer without.
    """
    parts = list(parts)
    rows = _explain_tiles(layer, parts, down, dtype, wider, experts)
    if products_of(layer) == KINDS[0]:
        return rows
    tiled = len(rows)
    for linears, reason in parts:
        for names in ([name for name in linears if name != down], [name for name in linears if name == down]):
            if names:
                found = None if reason else projections([linears[name] for name in names], dtype, wider)
                why = "they are in no fused node" if found is None else why_not_eight(found, dtype)
                why = reason.text if reason and reason.code == "eight_bits" else why
                named = f"{', '.join(names)} in eight bits from {fewest_of(found) if found else FEWEST} tokens on"
                rows.append((named, Reason("eight_bits", why) if why else None))
    if len(rows) == tiled:
        rows.append(("products in eight bits", Reason("eight_bits", "the layer has no dense projections in a fused node")))
    return rows


def _explain_tiles(
    layer: nn.Module, parts: Sequence[Part], down: str, dtype, wider: bool, experts: Optional[bool]
) -> List[Tuple[str, Optional[Reason]]]:
    tile = tile_of(layer)
    if not tile:
        return []
    if experts is not None:
        return [(EXPERT_TILES.format(tile), None if experts else Reason("tiles", "the layer has no experts in a fused node"))]
    linears, reason = next(((linears, reason) for linears, reason in parts if down in linears), ({}, None))
    found = projections(list(linears.values()), dtype, wider) if linears and reason is None else None
    if found is None:
        return [(TILES.format(tile), Reason("tiles", "the layer has no dense MLP in a fused node"))]
    eight = products_of(layer) != KINDS[0]
    groups = [Group(each, dtype, eight and not why_not_eight(each, dtype)) for each in (found[:-1], found[-1:])]
    why = why_not_tiled(groups)
    return [(TILES.format(tile), Reason("tiles", why) if why else None)]


def warn_of_no_layers(model: nn.Module, products: str, layers: Sequence[nn.Module]) -> None:
    """Warns where a model has no decoder layer that could make its products as it was asked for."""
    if products != KINDS[0] and not layers:
        what = f"products={products!r}: this {type(model).__name__} has no fused decoder layer, and its products stay as they are"
        warnings.warn(f"{what}. explain(model) says why", RuntimeWarning, stacklevel=4)
