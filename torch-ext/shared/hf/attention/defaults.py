"""Tells whether transformers' default attention is its own: the function under its name, the one that makes its masks, and what these look
up by name when they are called. Only then may ours take its place.

A user may have put another function there. SageAttention's users put it into torch.nn.functional, as torch's `context_parallel` does with
its own. DeepSpeed's Ulysses stands in the table of attention functions, around the one that was there: ours may take that one's place.
"""

import inspect
import sys
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple

import torch

from ...ops.operators import constant_when_traced
from ..family.ownership import name_of
from ..parts.explanation import Reason
from ..parts.lookups import is_by, mode_in_force, original_forward_of
from ..parts.modules import is_transformers_own

__all__ = [
    "ATTENTION", "EAGER", "MAKERS", "MASKING", "MODELING", "PARALLEL", "STORED", "are_defaults_own", "exchange_in", "exchange_of",
    "exchanges", "give_exchange_back", "is_around_ours", "is_eager", "look_up", "mask_makers", "names_in_forward", "sdpa_of_transformers",
    "spread_by", "why_not_own_defaults",
]  # fmt: skip

ATTENTION = "bastile"  # the name of our implementation among transformers'
AROUND_OURS = "bastile/ulysses"  # the name of what DeepSpeed has registered around it, once `exchange_of` has found it
STORED = "_attn_implementation_internal"  # where transformers keeps the name of an implementation
MASKING = "transformers.masking_utils"
MODELING = "transformers.modeling_utils"
SDPA = "transformers.integrations.sdpa_attention"
FUNCTIONAL = "torch.nn.functional"
FUNCTIONS, MASKS = "ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS"  # transformers' tables
# The functions behind a causal mask, by their names in MASKING. Some releases lack some of them.
BEHIND_MASKS = (
    *("_preprocess_mask_arguments", "find_packed_sequence_indices", "prepare_padding_mask", "padding_mask_function", "sdpa_mask"),
    *("causal_mask_function", "sliding_window_overlay", "sliding_window_causal_mask_function", "packed_sequence_mask_function"),
    *("packed_sequence_compatibility_function", "remap_positions_for_packed_sequence", "and_masks", "fast_all"),
    *("_ignore_causal_mask_sdpa", "_non_vmap_expansion_sdpa"),
)
# What spreads attention over processes, by how the modules of its functions begin.
PARALLEL = {"deepspeed.": "DeepSpeed's Ulysses", "torch.distributed.": "torch's context_parallel"}
MAKERS: Dict[type, Tuple[str, Tuple[str, ...]]] = {}  # by the configurations of decoders that packages know: of `mask_makers`
EAGER: Set[type] = set()  # those of these configurations whose decoders do not support SDPA
look_up = object.__getattribute__  # a look-up on a configuration of transformers' costs 4 us, which this goes round
_own: Dict[Any, list] = {}  # by places: what was found in them when all of it was transformers' and PyTorch's own


class NameInModule(NamedTuple):
    """A name of a module, or of one of transformers' tables there, and the module and the name that define what belongs there."""

    module: str
    table: str
    name: str
    home: str
    defined: str


def is_eager(config) -> bool:
    """Tells whether a configuration is one of a model that packages know whose attention transformers never gives to SDPA."""
    return isinstance(config, tuple(EAGER))


def names_in_forward(decoder: type) -> Tuple[str, ...]:
    """The names that the own forward of a decoder of transformers looks up."""
    return getattr(getattr(inspect.unwrap(original_forward_of(decoder)), "__code__", None), "co_names", ())


def mask_makers(decoder: type) -> Tuple[str, Tuple[str, ...]]:
    """The module of a decoder of transformers, and the functions there that make its masks, by their names."""
    return decoder.__module__, tuple(name for name in names_in_forward(decoder) if name.startswith("create_") and name.endswith("_mask"))


@constant_when_traced
def _places(modeling: str, makers: Tuple[str, ...], default: str) -> Tuple[Tuple[str, str, str, str, str], ...]:
    """Returns every `NameInModule` whose function Bastile's attention makes needless. modeling, makers: of `mask_makers`, "" for a decoder
    that no package knows; default: the name of its default attention, "" where only its masks count."""
    found = [NameInModule(MASKING, "", name, MASKING, name) for name in BEHIND_MASKS]
    found += [NameInModule(modeling, "", name, MASKING, name) for name in makers]
    home = modeling if default == "eager" else SDPA
    looked_up = [(SDPA, "use_gqa_in_sdpa"), (FUNCTIONAL, "scaled_dot_product_attention")]
    if default == "eager":
        looked_up = [(FUNCTIONAL, "softmax"), (FUNCTIONAL, "dropout")]
    if default:
        found.append(NameInModule(MASKING, MASKS, default, MASKING, f"{default}_mask"))
        found.append(NameInModule(modeling, FUNCTIONS, default, home, f"{default}_attention_forward"))
        found += [NameInModule(module, "", name, module, name) for module, name in ((home, "repeat_kv"), *looked_up)]
    return tuple([(*place,) for place in found])


def _function(module: str, table: str, name: str, home: str, defined: str):
    """What stands in a place; None where the installed release has nothing there."""
    holder = sys.modules[module]
    if not table:
        return getattr(holder, name, None)
    entries = getattr(holder, table)
    found = entries._local_mapping.get(name) or entries._global_mapping.get(name) or getattr(holder, defined, None)
    exchange = None if torch.compiler.is_compiling() else exchange_in(found)
    return found if exchange is None else exchange.attn


def _is_own(function, module: str, table: str, name: str, home: str, defined: str) -> bool:
    if defined == "scaled_dot_product_attention":
        return function is torch._C._nn.scaled_dot_product_attention
    return function is None or is_transformers_own(function, home, defined)


def _makers_of(config) -> Tuple[str, Tuple[str, ...]]:
    """What `MAKERS` has for a configuration, also for one of a class of the user's or of ours that is made of a known one."""
    for cls in type(config).__mro__:
        if cls in MAKERS:
            return MAKERS[cls]
    return "", ()


def _places_of(config):
    modeling, makers = _makers_of(config)
    named = not modeling or look_up(config, "__dict__").get(STORED) == ATTENTION
    return _places(modeling, makers, "" if named else "eager" if is_eager(config) else "sdpa")


def are_defaults_own(config) -> bool:
    """Tells whether a decoder's masks are made by transformers' own functions and its default attention is computed by them. If a user or a
    library has replaced one, ours must not replace what it does. Where ours was asked for by name, only the masks count, and who spreads
    attention over processes."""
    places = _places_of(config)
    functions = [_function(*place) for place in places]
    traced = torch.compiler.is_compiling()
    if not traced and mode_in_force():
        return False
    if traced or _own.get(places) != functions:
        if not all(_is_own(function, *place) for function, place in zip(functions, places)):
            return False
        if not traced:
            _own[places] = functions
    return not spread_by(config)


def why_not_own_defaults(config) -> Optional[Reason]:
    """Which function keeps `are_defaults_own` from being True; None where none does."""
    mode = mode_in_force()
    if mode:
        return Reason("default", f"{mode}, which attention of ours would leave out")
    for place in map(NameInModule._make, _places_of(config)):
        function = _function(*place)
        if not _is_own(function, *place):
            where = f"{place.table}[{place.name!r}]" if place.table else f"{place.module}.{place.name}"
            return Reason("default", f"{where} is {name_of(function)}, which attention of ours would leave out")
    return None


def exchange_in(function) -> Any:
    """DeepSpeed's Ulysses (its `UlyssesSPAttentionHF`, whose `attn` runs between two exchanges) in an attention function that it has
    registered; None in any other function."""
    if not is_by("deepspeed.", function):
        return None
    held = (cell.cell_contents for cell in function.__closure__ or ())
    return next((each for each in held if hasattr(each, "attn") and hasattr(each, "process_group")), None)


def exchange_of(config) -> Any:
    """DeepSpeed's Ulysses that is registered for the implementation which a configuration of the user's names, None where there is none.

    DeepSpeed's function around ours would drop the masks before ours saw them, so it gets a name of its own in the table.
    """
    if config is None or torch.compiler.is_compiling():
        return None
    entries, named = sys.modules[MODELING].ALL_ATTENTION_FUNCTIONS._local_mapping, look_up(config, "__dict__").get(STORED)
    if named != ATTENTION:
        return exchange_in(entries.get(named))
    if exchange_in(entries.get(ATTENTION)) is not None:
        entries[AROUND_OURS] = entries.pop(ATTENTION)
    return exchange_in(entries.get(AROUND_OURS)) or exchange_in(entries.get("sdpa"))


def exchanges(exchange, module) -> bool:
    """Tells whether a module's call exchanges. exchange: of `exchange_of`, which Trainer switches off where its model is evaluated."""
    return exchange is not None and (module.training or not getattr(exchange, "disable_in_eval", False))


def sdpa_of_transformers():
    """The function under SDPA's name in transformers' table, without DeepSpeed's exchanges around it."""
    found = sys.modules[MODELING].ALL_ATTENTION_FUNCTIONS["sdpa"]
    exchange = None if torch.compiler.is_compiling() else exchange_in(found)
    return found if exchange is None else exchange.attn


def is_around_ours(config) -> bool:
    """Tells whether DeepSpeed's Ulysses was registered around our implementation by its name, for a configuration that asks for that."""
    entries = sys.modules[MODELING].ALL_ATTENTION_FUNCTIONS._local_mapping
    named = look_up(config, "__dict__").get(STORED) == ATTENTION
    return named and bool(_library(entries.get(ATTENTION) or entries.get(AROUND_OURS)))


def give_exchange_back() -> None:
    """Undoes what `exchange_of` does to transformers' table."""
    entries = sys.modules[MODELING].ALL_ATTENTION_FUNCTIONS._local_mapping if MODELING in sys.modules else {}
    if AROUND_OURS in entries:
        entries[ATTENTION] = entries.pop(AROUND_OURS)


def spread_by(config) -> str:
    """Who spreads a decoder's attention over processes, with no place for ours; "" for nobody."""
    entries = getattr(sys.modules[_makers_of(config)[0] or MODELING], FUNCTIONS)._local_mapping
    named = look_up(config, "__dict__").get(STORED) == ATTENTION
    names = () if exchange_of(config) is not None else ("sdpa", ATTENTION, AROUND_OURS) if named else ("sdpa",)
    found = [_library(function) for function in (*map(entries.get, names), torch.nn.functional.scaled_dot_product_attention)]
    return next(filter(None, found), "")


@constant_when_traced
def _library(function) -> str:
    """Which of those that spread attention over processes a function belongs to; "" for none."""
    module = getattr(function, "__module__", None) or ""
    return next((name for begins, name in PARALLEL.items() if module.startswith(begins)), "")
