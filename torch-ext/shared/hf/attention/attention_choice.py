"""Who computes a model's attention: our name among transformers' implementations, and which models get it without asking.

A model that did not ask for an implementation by name gets ours where its kernels run. Two questions follow.

Who asked? transformers writes its own choice where a user's name would stand. Where nobody asked, what stands there afterwards is one of
the strings of `_bastile_unasked`: equal to transformers' name, and another object. Whoever hands it on (a trainer of TRL to its reference
model, `generate_batch` as it gives back what it found, a user with a copy of the configuration) says with it that nobody asked. What is
unpickled is an ordinary string again, and is taken for a name unless a decoder came with it, which knows (`NAMED`).

What says that it is ours? Not the user's configuration, of which copies, files and other models are made. The decoder and its attention
hold one of ours, of a subclass that differs in the name alone, shares the state of the user's, and is copied as that. Other ways:

- The user's configuration says it during a pass. Checkpointed layers run again in the backward pass, behind the pass, and replicas of
  DataParallel share the configuration in threads, of which one would take back what another needs.
- The decoder has a plain copy, which says it. What the user changes in one of the two is not in the other, and a copy of the model, which
  reset() does not know, asks for an implementation that is gone. A change of the same name (`set_attn_implementation("sdpa")`) is seen by
  a property alone.
- Another function stands in transformers' table, or an attention finds other globals. The table serves every model of the process, and
  what a user or DeepSpeed puts there is obeyed (defaults.py).
"""

import copy
import functools
import operator
import sys
import warnings
import weakref
from typing import Any, Dict, Iterable, Optional

import torch

from ...ops.attention import takes_heads
from ...runtime.device import kernels_run_on
from ..parts.binding import remember
from ..parts.explanation import Reason, warn_once
from ..parts.modules import SAVED, without_fsdp2
from ..parts.offers import offer, withdraw
from ..parts.weights import weight_within
from .attention import attention_forward
from .defaults import (
    ATTENTION,
    EAGER,
    MAKERS,
    MASKING,
    MODELING,
    STORED,
    are_defaults_own,
    exchange_of,
    give_exchange_back,
    is_around_ours,
    look_up,
    mask_makers,
)
from .exchange import why_left, why_spread
from .masks import CHOICE, TRACEABLE, caps_scores, masks_made_by, visible_mask
from .told import said_of, untold

__all__ = [
    "WITHOUT", "choose_attention", "give_attention_back", "head_dim_of", "ignore_new_models", "leave_attention", "lies_where_kernels_run",
    "name_that_is_kept", "note_new_models", "register_attention", "runs_between_exchanges", "unregister_attention", "watch_attention",
    "why_no_kernel",
]  # fmt: skip

NAMED = SAVED + "attention_named"  # on a decoder: its implementation was asked for by name
WITHOUT = SAVED + "without_attention"  # on a decoder: kernelize() was told not to choose ours
NOTING = SAVED + "noting"  # on PreTrainedModel: by package, what is called with each model that is made

_decoders: set = set()  # classes of models without a head that packages know


# (module of transformers, interface there, our function)
INTERFACES = (MODELING, "AttentionInterface", attention_forward), (MASKING, "AttentionMaskInterface", visible_mask)


def register_attention(*decoders: Any, causal: bool = True) -> None:
    """Makes attn_implementation="bastile" a choice for every model of transformers. decoders: classes of models without a head that a
    package knows. causal: whether their masks are, so that torch.compile needs not look into them."""
    _decoders.update(decoders)
    if causal:
        TRACEABLE.update((decoder.config_class, masks_made_by(decoder)) for decoder in decoders)
    MAKERS.update((decoder.config_class, mask_makers(decoder)) for decoder in decoders)
    EAGER.update(decoder.config_class for decoder in decoders if not decoder._supports_sdpa)
    for module, interface, ours in INTERFACES:
        offer(module, interface, ATTENTION, ours, __name__)


def unregister_attention(modules: Iterable = ()) -> None:
    """Takes this package's implementation back. Leaves another package's registration, or ours if one of the
    modules still names it."""
    asked = any(getattr(vars(module).get("config"), "_attn_implementation", None) == ATTENTION for module in modules)
    give_exchange_back()
    for module, interface, _ in INTERFACES:
        withdraw(module, interface, ATTENTION, __name__, lambda: asked)


def head_dim_of(config) -> Optional[int]:
    """The size of a head by a model's configuration, None where it says nothing of heads. Where layers differ, that of those which the
    configuration makes no exception for: attention asks about each again."""
    if look_up(config, "__dict__").get("_heterogeneity_spec") is not None:
        return look_up(config, "__dict__").get("head_dim")
    found, heads = getattr(config, "head_dim", None), getattr(config, "num_attention_heads", 0)
    return config.hidden_size // heads if found is None and heads else found


def _has_kernels(config) -> bool:
    """Tells whether this package has attention's kernels for a model."""
    return takes_heads(head_dim_of(config), capped=caps_scores(config))


def lies_where_kernels_run(module) -> bool:
    """Tells whether a module has its weights on a GPU whose kernels run."""
    weight = weight_within(module)
    return weight is not None and not weight.is_meta and kernels_run_on(torch.empty(0, device=weight.device))


def why_no_kernel(module) -> Optional[Reason]:
    """Why a decoder's attention is never ours on a GPU whose kernels run, None where it may be; None for every other module."""
    if without_fsdp2(type(module)) not in _decoders:
        return None
    if not lies_where_kernels_run(module):
        return None
    config = module.config
    kept = name_that_is_kept(module) or vars(module).get(WITHOUT)
    replaced = None if kept else why_left(config)
    if replaced is not None:
        return replaced
    if _has_kernels(config):
        return _why_not_told(module)
    text = f"there is no kernel for heads of {head_dim_of(config)}"
    if caps_scores(config):
        return Reason("shape", f"{text} whose scores are capped, so attention is transformers' eager one")
    return Reason("shape", f"{text}, so windows, documents and padding are a mask of SDPA's")


def runs_between_exchanges(module) -> bool:
    """Tells whether the last step of a decoder ran attention of ours between the exchanges of DeepSpeed's Ulysses."""
    known = without_fsdp2(type(module)) in _decoders
    return known and module.config._attn_implementation == ATTENTION and exchange_of(module.config) is not None


# ---------------------------------------------------------------- the name that nobody asked for
def _unasked_names() -> Dict[str, str]:
    """`_bastile_unasked` of a copy of this file that was loaded before, or one of new strings."""
    for loaded in list(sys.modules.values()):
        found = getattr(loaded, "__dict__", {}).get(UNASKED)
        if found:
            return found
    return {name: name.encode().decode() for name in ("sdpa", "eager")}  # which makes another string, and no literal is ever this one


UNASKED = "_bastile_unasked"  # in every loaded copy of this file: the same strings
_bastile_unasked = _unasked_names()


def _is_unasked(name: Optional[str]) -> bool:
    """Tells whether a name is of `_bastile_unasked`, and so one that nobody asked for."""
    return name is not None and _bastile_unasked.get(name) is name


def _leave_unasked(config) -> None:
    """Writes into a configuration that nobody asked for the implementation that it has."""
    name = vars(config).get(STORED)
    vars(config)[STORED] = _bastile_unasked.get(name, name)


# ---------------------------------------------------------------- choosing it
class _State:
    """What a configuration of ours stands for. config: the user's; decoder: weakly, the model that it is on; default: the implementation
    that transformers chooses; on: whether ours takes its place; off: whether it takes the place of ours, which was asked for by name;
    layers: of the decoder when all of it was told; read: whether the decoder has no row, and what it returns for padding may be read."""

    __slots__ = ("config", "decoder", "default", "layers", "off", "on", "read")

    def __init__(self, config, decoder):
        self.config, self.decoder, self.on, self.off, self.layers, self.read = config, weakref.ref(decoder), False, False, 0, False
        self.default = "sdpa" if decoder._supports_sdpa else "eager"


def _implementation(config) -> Optional[str]:
    """Read by every layer in every pass."""
    stored = look_up(config, "__dict__").get(STORED)
    try:
        state = look_up(config, CHOICE)
    except AttributeError:  # transformers has made another one of our class
        return stored
    if stored == state.default:
        return ATTENTION if state.on else stored
    return state.default if state.off and stored == ATTENTION else stored


def _ask_for(config, name: Optional[str]) -> None:
    """Sets an implementation that was asked for by name, even the current one: `set_attn_implementation` of a model calls this too. Given
    back one that nobody asked for, as `generate_batch` does with what it found, the decoder chooses again."""
    state = getattr(config, CHOICE, None)
    if name == ATTENTION == _implementation(config):
        return  # another model is made of this configuration, and writes what it reads
    config.__dict__[STORED] = name
    if state is not None:
        state.on = False
        decoder = state.decoder()
        if decoder is not None and _is_unasked(name):
            vars(decoder).pop(NAMED, None)
        elif decoder is not None:
            vars(decoder)[NAMED] = True


def _absent(config):
    raise AttributeError


def _own(config):
    """The user's configuration that one of ours wraps; any other configuration itself."""
    state = getattr(config, CHOICE, None)
    if state is not None:
        return state.config
    if CHOICE not in vars(type(config)):
        return config
    made: Any = object.__new__(type(config).__mro__[1])  # transformers has made another one of our class
    made.__dict__.update(config.__dict__)
    return made


@functools.lru_cache(maxsize=None)
def _class_of_ours(cls: Any) -> type:
    """The class of a configuration that answers for one of a class. All who ask see that class, and copies are of it again."""
    names: dict = {
        "__slots__": (CHOICE,),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        STORED: property(_implementation, _ask_for),
        "_attn_implementation": property(_implementation, cls._attn_implementation.fset),
        # transformers up to 5.20 notes there that it has set this configuration, and sets it no second time.
        "_attn_was_changed": property(_absent, lambda self, value: None),
        "__eq__": lambda self, other: _own(self) == _own(other),
        "__hash__": None,
        "__copy__": lambda self: copy.copy(_own(self)),
        "__reduce_ex__": lambda self, protocol: (operator.itemgetter(0), ((_own(self),),)),
    }
    return type(cls.__name__, (cls,), names)


def watch_attention(model) -> _State:
    """Gives a decoder a configuration of ours (or keeps one of another of our packages), which notices when an implementation is asked for
    by name. Returns its state."""
    config = vars(model)["config"]
    state = getattr(config, CHOICE, None)
    if state is None or state.decoder() is not model:
        config = _own(config)
        ours: Any = object.__new__(_class_of_ours(type(config)))  # type: ignore[arg-type]
        state = _State(config, model)
        object.__setattr__(ours, "__dict__", config.__dict__)  # what either is told, both know
        object.__setattr__(ours, CHOICE, state)
        if NAMED not in vars(model) and vars(config).get(STORED) == state.default:
            _leave_unasked(config)
        if type(config) in TRACEABLE:
            TRACEABLE[type(ours)] = TRACEABLE[type(config)]
        vars(model)["config"] = ours
        remember(model)
    return state


def give_attention_back(module) -> None:
    """Gives a decoder, or a part of one, the configuration that it had before `watch_attention`, and what is in it, too."""
    ours = vars(module).get("config")
    state = getattr(ours, CHOICE, None)
    if state is not None:
        for part in module.modules() if state.decoder() is module else (module,):
            if vars(part).get("config") is ours:
                vars(part)["config"] = state.config


def leave_attention(module) -> None:
    """Leaves a decoder the implementation that it had, until `choose_attention` is called again."""
    state = getattr(vars(module).get("config"), CHOICE, None)
    if state is not None:
        state.on = state.off = False


def choose_attention(model) -> None:
    """Gives a model on a GPU whose kernels run our implementation instead of the one that transformers chooses by default. The model keeps
    one that was asked for by name, and one where a function of the user's or a library's replaces transformers' own. Where a part
    of it may not know what ours hands it for a mask, or attention is spread over processes, it has the default one in either case."""
    state, described = watch_attention(model), vars(model)
    named, spread = vars(state.config).get(STORED), why_spread(state.config)
    asked = NAMED in described or described.get(WITHOUT) or named != state.default
    if asked or not (spread or are_defaults_own(state.config)):
        state.on = False
    elif not state.on:
        state.on = _has_kernels(state.config) and lies_where_kernels_run(model)
    why_not = ""
    if state.on or named == ATTENTION:
        why_not = spread or said_of(untold(model, state))
    if why_not and is_around_ours(state.config):
        raise ValueError(f"DeepSpeed's Ulysses is around attn_implementation={ATTENTION!r}, which this model cannot have: {why_not}")
    if why_not and named == ATTENTION and not state.off:
        warnings.warn(f"attn_implementation={ATTENTION!r} is left for {state.default!r}: {why_not}", RuntimeWarning, stacklevel=2)
    elif spread and state.on:
        warn_once(f"attention is transformers': {spread}")
    state.on, state.off = state.on and not why_not, bool(why_not) and named == ATTENTION


def name_that_is_kept(model) -> str:
    """The implementation that a decoder keeps because it was asked for by name; "" where there is none, or where that is ours."""
    name = vars(model.config).get(STORED) if NAMED in vars(model) else ATTENTION
    return "" if name == ATTENTION else str(name)


def _why_not_told(model) -> Optional[Reason]:
    """Why a decoder that may have our attention does not get it, None where it does or was told to have another one."""
    state, described = getattr(vars(model)["config"], CHOICE, None), vars(model)
    if state is None:
        return None
    named = vars(state.config).get(STORED)
    if named != ATTENTION and (NAMED in described or described.get(WITHOUT) or named != state.default):
        return None
    said = said_of(untold(model, state))
    return Reason("model", said) if said else None


# ---------------------------------------------------------------- knowing what was asked for by name
def note_new_models(package: str) -> None:
    """Notes on each decoder that is made from now on whether its implementation was asked for by name. package: the one that wants it
    noted."""
    cls: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel
    noting = vars(cls).get(NOTING)
    if noting is None:
        noting, original = {}, cls.__init__

        @functools.wraps(original)
        def noted(self, config, *args, **kwargs):
            requested = getattr(_own(config), "_attn_implementation", None)
            original(self, config, *args, **kwargs)
            for note in list(noting.values()):
                note(self, _own(config), requested)

        setattr(noted, NOTING, True)
        setattr(cls, NOTING, noting)
        cls.__init__ = noted
    noting[package] = _note


def ignore_new_models(package: str) -> None:
    """Undoes `note_new_models`."""
    cls: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    noting = {} if cls is None else vars(cls).get(NOTING, {})
    if noting.pop(package, None) is None or noting:
        return
    delattr(cls, NOTING)
    if NOTING in vars(cls.__init__) and not hasattr(cls.__init__.__wrapped__, NOTING):
        cls.__init__ = cls.__init__.__wrapped__


def _note(model, config, requested: Optional[str]) -> None:
    """Is called with each model of transformers that is made, the outer one before the one in it. requested: what the configuration said
    before transformers chose."""
    if requested is None:
        _leave_unasked(config)
    elif type(model) in _decoders and not _is_unasked(requested):
        vars(model)[NAMED] = True
    if type(model) in _decoders:
        watch_attention(model)
