"""Which tokens of a batch see which: a `Visible` in place of the [batch, 1, queries, keys] masks of transformers.

transformers asks the mask function once a batch and kind of layer, and hands what it returns to every layer. Ours returns a `Visible`:
what transformers said to the mask function, of which the plan of `attention` is made once, by the first layer that needs it, and for
layers that no plan serves the mask that transformers makes for its own attention.
"""

import sys
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

import torch

from ...ops.attention import AttentionPlan
from ...runtime.device import is_ordinary
from ..parts.modules import SAVED
from .defaults import MASKING, are_defaults_own, exchange_of, is_eager, names_in_forward
from .document_bounds import given_bounds

__all__ = [
    "BEFORE", "BESIDE", "CHOICE", "TRACEABLE", "WINDOWS", "Rule", "Visible", "caps_scores", "is_chosen", "is_visible", "kinds_of_layers",
    "makes_masks_by_layer", "masks_made_by", "masks_of_layers", "no_mask", "padding_of", "unless_none", "visible_documents", "visible_mask",
    "visible_rows", "visible_tokens",
]  # fmt: skip

CHOICE = SAVED + "choice"  # on a configuration of ours: what it stands for
BY_LAYER, BY_WINDOW, ONE = range(3)  # the masks that a decoder makes: one a kind of layer; one, with a window or without; one without
TRACEABLE: Dict[type, int] = {}  # by the configurations of the decoders that packages know: which masks these make
WHOLE, BEFORE, BESIDE, BETWEEN = range(4)  # where padding is: nowhere; before each row's tokens; on both sides; between them


class Rule(NamedTuple):
    """The window and documents of a causal mask function of transformers. window: keys that a query sees, its own among them, or None;
    packed: [batch, tokens], a number for each token's document, or None."""

    window: Optional[int] = None
    packed: Optional[torch.Tensor] = None


def _made_by(function, maker, *examples) -> Optional[Dict[str, Any]]:
    """The variables that a function closes over if it was made as `maker(*examples)` is, else None; maker: None for one that this
    transformers lacks."""
    code = getattr(function, "__code__", None)
    if code is None or maker is None or code is not maker(*examples).__code__:
        return None
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__)))


def rule_of(function) -> Optional[Rule]:
    """The rule behind a mask function, or None for a function that is none of transformers' for causal attention."""
    masking = sys.modules[MASKING]
    if function is masking.causal_mask_function:
        return Rule()
    both = _made_by(function, masking.and_masks, masking.causal_mask_function)
    if both is None:
        return None
    causal, rule, moved = False, Rule(), False
    for part in both["mask_functions"]:
        # From transformers 5.23 on, rules are about positions in a document, which are as far apart as the tokens of a document are.
        remapped = _made_by(part, getattr(masking, "remap_positions_for_packed_sequence", None), None, None)
        moved = moved or remapped is not None
        inner = rule_of(part if remapped is None else remapped["mask_function"])
        window = _made_by(part, masking.sliding_window_overlay, 1)
        packed = _made_by(part, masking.packed_sequence_mask_function, None)
        if inner is not None:
            found, causal = inner, True
        elif window is not None:
            found = Rule(window=window["sliding_window"])
        elif packed is not None:
            found = Rule(packed=packed["packed_sequence_mask"])
        else:
            return None
        if any(a is not None and b is not None for a, b in zip(rule, found)):
            return None
        rule = Rule(*((a if b is None else b) for a, b in zip(rule, found)))  # type: ignore[arg-type]
    return rule if causal and (rule.packed is not None or not moved) else None


def padding_of(mask: torch.Tensor) -> int:
    """WHOLE, BEFORE, BESIDE or BETWEEN. mask: [batch, tokens] bool, True where a token is no padding. Waits for the device, as
    transformers' mask function for SDPA does. Nothing of it is kept: a mask may be a user's, who writes into it between two passes."""
    runs = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    behind = (mask[:, :-1] & ~mask[:, 1:]).any()
    return int(torch.where((runs > 1).any(), BETWEEN, torch.where(behind, BESIDE, torch.where(mask.all(), WHOLE, BEFORE))))


def is_chosen(config) -> bool:
    """Tells whether a configuration is one of a model that uses our attention without having asked for it by name."""
    state = getattr(config, CHOICE, None)
    return state is not None and state.on


class Visible:
    """Which tokens of a batch see which, as transformers said it to the mask function.

    arguments: of the mask function. rule: of `rule_of`, None where no plan can say it. padding: [batch, tokens] bool, or None where no
    token is padding. positions: whether documents start where position_ids do not go on, beside what the rule says. documents: of
    `documents_in`, which the rule and the mask function say nothing of; None for none. said: the rule, also where a plan of these rows
    alone cannot say it; exchange: of `exchange_of`; whole: the position_ids of this process and the plan of whole rows, once it is made.
    seeing: whether padding behind a row's tokens sees these; averages: of `averages_for_padding`, where there is a mask.
    """

    attend: Callable[..., Any]  # the attention function of this package (attention.py)

    def __init__(
        self,
        arguments: Dict[str, Any],
        rule: Optional[Rule],
        padding: Optional[torch.Tensor],
        positions: bool = False,
        documents: Optional[torch.Tensor] = None,
        seeing: bool = False,
    ):
        self.arguments, self.rule, self.padding, self.positions, self.documents = arguments, rule, padding, positions, documents
        self.seeing, self.averages = seeing, False
        self.said, self.exchange = rule, exchange_of(arguments.get("config"))
        self.whole: Optional[Tuple[torch.Tensor, Optional[AttentionPlan]]] = None
        self.batch, self.tokens, self.keys = arguments["batch_size"], arguments["q_length"], arguments["kv_length"]
        self._plans: dict = {}
        self._masks: dict = {}

    @property
    def shape(self) -> Tuple[int, int, int, int]:
        """The shape of the mask that this stands for, which transformers asks of one that a caller has prepared."""
        return self.batch, 1, self.tokens, self.keys

    ndim = 4

    def is_plain(self) -> bool:
        """True where each row is known to be one document that each query sees up to itself: what SDPA does without a mask."""
        rule = self.rule
        if rule is None:
            return False
        parted = self.positions or rule.packed is not None or self.padding is not None or self.documents is not None
        return not parted and (rule.window is None or rule.window >= self.tokens)

    def contiguous(self) -> "Visible":
        """Returns itself: generate() asks it of every mask."""
        return self

    def plan(self, device: torch.device, cu_seqlens=None, position_ids=None) -> AttentionPlan:
        """The plan, for a device. cu_seqlens, position_ids: of the call, None where they say nothing about documents."""
        of = next((t for t in (cu_seqlens, position_ids) if t is not None), None)
        kept = self._plans.get(device)
        if kept is None or kept[0] is not of:
            kept = self._plans[device] = of, self._plan(device, cu_seqlens, position_ids)
        return kept[1]

    def _plan(self, device, cu_seqlens, position_ids):
        assert self.rule is not None, "a mask that no plan can say has no plan"
        shape, (window, packed) = (self.batch, self.tokens), self.rule
        if self.documents is not None:
            return AttentionPlan(self.documents.to(device, non_blocking=True), self.batch * self.tokens, window=window)
        if cu_seqlens is not None:
            if not torch.compiler.is_compiling() and is_ordinary(cu_seqlens):
                given_bounds(shape, cu_seqlens)
            return AttentionPlan.from_cu_seqlens(cu_seqlens.to(device), self.batch * self.tokens, window=window)
        if packed is not None:
            padding = None if self.padding is None else self.padding.to(device)
            return AttentionPlan.from_document_ids(packed.to(device), padding, window=window)
        if self.padding is not None and self.seeing:
            return AttentionPlan.with_padding_that_sees(self.padding.to(device), window=window)
        if self.padding is not None:
            return AttentionPlan.from_padding_mask(self.padding.to(device), window=window)
        if position_ids is not None:
            return AttentionPlan.from_position_ids(position_ids.to(device).expand(shape), window=window)
        starts = torch.arange(0, self.batch * self.tokens + 1, self.tokens, dtype=torch.int32, device=device)
        return AttentionPlan.from_cu_seqlens(starts, self.batch * self.tokens, window=window)

    def mask(self, kind: str, dtype: torch.dtype, device: torch.device):
        """What the mask function of `kind`, "sdpa" or "eager", returns for the same batch."""
        key = kind, dtype, device
        if key not in self._masks:
            masking, arguments = sys.modules[MASKING], self.arguments
            if self.documents is not None:
                tokens = torch.arange(self.batch * self.tokens, dtype=torch.int32)
                numbers = torch.bucketize(tokens, self.documents[1], right=True)
                function = _in_documents(arguments["mask_function"], numbers.view(self.batch, self.tokens).to(device))
                arguments = {**arguments, "mask_function": function, "allow_is_causal_skip": False}
            found = masking.ALL_MASK_ATTENTION_FUNCTIONS[kind](**{**arguments, "dtype": dtype})
            self._masks[key] = found if found is None else found.to(device)
        return self._masks[key]


def is_visible(mask) -> bool:
    """Tells a `Visible`, of this package or another loaded one, from masks of transformers. A graph has none of another package."""
    return isinstance(mask, Visible) or (not torch.compiler.is_compiling() and hasattr(type(mask), "attend"))


def visible_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **kwargs):
    """transformers' mask function of ours: a `Visible`, or, for one query a row, what the function for SDPA returns. attention_mask: of
    transformers, or a `Visible` that was made already."""
    if is_visible(attention_mask):
        return attention_mask
    masking = sys.modules[MASKING]
    arguments = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    function = masking.causal_mask_function if mask_function is None else mask_function  # torch 2.11 traces no `or` of functions
    arguments.update(kwargs, mask_function=function, attention_mask=attention_mask)
    config = arguments.get("config")
    if not are_defaults_own(config):  # the function that asks may change what it gets, as it changes a mask of transformers
        return masking.ALL_MASK_ATTENTION_FUNCTIONS["eager" if is_eager(config) or caps_scores(config) else "sdpa"](**arguments)
    if q_length == 1:
        return masking.sdpa_mask(**arguments)
    if torch.compiler.is_compiling():
        return _visible_to_a_tracer(arguments)
    if isinstance(q_offset, torch.Tensor):  # a static cache's own counter, which goes on before a layer asks for the mask
        arguments["q_offset"] = q_offset.clone()
    rule, padding, sees, averages = None, None, False, attention_mask is not None and averages_for_padding(config)
    if not kwargs.get("use_vmap") and kv_length >= q_length and q_offset == 0 and kv_offset == 0:
        rule = rule_of(arguments["mask_function"])
    said = rule
    if rule is not None and attention_mask is not None:
        padding = masking.prepare_padding_mask(attention_mask, q_length, 0)[:, :q_length]
        kind = padding_of(padding)
        # Padding after a row's tokens sees them in transformers, and would see nothing here. Padding in front of them sees nothing, which
        # gives zeros, but the mean of all values in eager attention.
        seeing = kind == BESIDE or (kind == BEFORE and averages)
        read = is_chosen(config) and getattr(config, CHOICE).read  # what a decoder without a row returns for padding may be read
        sees = kind == BESIDE and read and rule.packed is None and not averages
        unknown = kind == BETWEEN or (seeing and is_chosen(config) and not sees)
        rule, padding = (None if unknown else rule), (None if kind == WHOLE else padding)
    visible = Visible(arguments, rule, padding, seeing=sees)
    visible.said, visible.averages = said, averages
    return visible


def averages_for_padding(config) -> bool:
    """Tells whether transformers' attention gives the mean of all values for tokens that see none: eager attention does, the one for capped
    scores and of models that do not support SDPA, but not where there are sinks, which take all of the weight. It may say no for a model
    that asked for ours by name."""
    if caps_scores(config) or not (is_eager(config) and is_chosen(config)):
        return caps_scores(config)
    layers = getattr(getattr(config, CHOICE).decoder(), "layers", ())
    return not all(getattr(getattr(layer, "self_attn", None), "sinks", None) is not None for layer in layers)


def caps_scores(config) -> bool:
    """Tells whether a model caps the scores of its attention."""
    return getattr(config, "attn_logit_softcapping", None) is not None


WINDOWS = {"full_attention": lambda config: None, "sliding_attention": lambda config: config.sliding_window}  # by the kind of a layer


def is_causal(config) -> bool:
    """Tells whether a configuration of a model that packages know leaves its attention causal: all of transformers' decoders can look in
    both directions too, as models that embed text do."""
    return bool(getattr(config, "is_causal", True)) and not getattr(config, "use_bidirectional_attention", False)


def masks_made_by(decoder: type) -> int:
    """Which masks a decoder of transformers makes, by the names in its own forward. A configuration cannot tell: it keeps entries that its
    decoder reads nowhere, such as the sliding_window of a Mistral that was saved as a Llama."""
    names = names_in_forward(decoder)
    if "layer_types" in names or "layers_block_type" in names:
        return BY_LAYER
    return BY_WINDOW if "create_sliding_window_causal_mask" in names else ONE


def makes_masks_by_layer(config) -> bool:
    """Tells whether a decoder makes a mask for each kind of its layers, which it reads by that kind."""
    return TRACEABLE.get(type(config), BY_LAYER) == BY_LAYER and bool(getattr(config, "layer_types", None))


def kinds_of_layers(config, given: Mapping[str, Any] = {}) -> set:
    """The kinds of layers that a decoder makes masks for, of `WINDOWS` where they are known and causal; one where all its layers share a
    mask. given: the arguments of the decoder's forward, in which is_causal may be False for this call alone."""
    asked = given.get("is_causal")
    if not is_causal(config) or not (asked is None or asked):
        return {"both directions"}
    made = TRACEABLE.get(type(config), BY_LAYER)
    if made == BY_LAYER:
        return set(getattr(config, "layer_types", None) or ["unknown"])
    return {"sliding_attention" if made == BY_WINDOW and getattr(config, "sliding_window", None) is not None else "full_attention"}


def masks_of_layers(config, visible_of: Callable[[str], Visible]) -> Any:
    """What a decoder takes as `attention_mask` instead of the masks that it would make: the `Visible` of each kind of layers that it has,
    or the one that all of them share."""
    visible = {kind: visible_of(kind) for kind in kinds_of_layers(config)}
    return visible if makes_masks_by_layer(config) else visible.popitem()[1]


def no_mask(device: torch.device) -> torch.Tensor:
    """Makes what a decoder with one mask hands its layers as it is, and stands for none: None itself would have it make one."""
    return torch.empty((0, 0, 0, 0), device=device)


def unless_none(mask: Any) -> Any:
    """Returns a layer's mask, None for what `no_mask` made."""
    return None if isinstance(mask, torch.Tensor) and mask.shape == (0, 0, 0, 0) else mask


def visible_rows(config, kind: str, given: torch.Tensor, documents: Optional[torch.Tensor] = None) -> Visible:
    """The `Visible` of causal layers of a kind of `WINDOWS` where each row is one document, or is made of those of `documents_in`. given:
    input_ids [batch, tokens] or inputs_embeds [batch, tokens, hidden]."""
    window, causal = _causal(config, kind)
    arguments = _arguments(config, given, mask_function=causal, allow_is_causal_skip=True)
    return Visible(arguments if window is None else {**arguments, "local_size": window}, Rule(window), None, documents=documents)


def visible_documents(config, kind: str, document_ids: torch.Tensor) -> Visible:
    """The `Visible` of causal layers of a kind of `WINDOWS`, for one row of tokens. document_ids: [1, tokens], a number for each
    token's document."""
    window, causal = _causal(config, kind)
    function = _in_documents(causal, document_ids)
    return Visible(_arguments(config, document_ids, mask_function=function, allow_is_causal_skip=False), Rule(window, document_ids), None)


def visible_tokens(config, kind: str, mask: torch.Tensor) -> Visible:
    """The `Visible` of causal layers of a kind of `WINDOWS` for rows with padding on either side, where what attention returns for
    padding is not read. mask: [batch, tokens] bool, True where a token is no padding."""
    window, causal = _causal(config, kind)
    return Visible({**_arguments(config, mask, mask_function=causal), "attention_mask": mask}, Rule(window), mask)


def _causal(config, kind: str) -> Tuple[Optional[int], Callable]:
    """The window of causal layers of a kind of `WINDOWS`, and transformers' mask function for it."""
    masking, window = sys.modules[MASKING], WINDOWS[kind](config)
    return window, masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)


def _in_documents(function: Callable, document_ids: torch.Tensor) -> Callable:
    """A mask function of transformers, within documents. document_ids: [batch, tokens], a number for each token's document."""
    masking = sys.modules[MASKING]
    return masking.and_masks(function, masking.packed_sequence_mask_function(document_ids))


def _arguments(config, given: torch.Tensor, **more) -> Dict[str, Any]:
    """The arguments of a mask function of transformers, for rows without padding and no cache. The dtype is said when a mask is made."""
    tokens = given.shape[1]
    sizes = {"batch_size": given.shape[0], "q_length": tokens, "kv_length": tokens, "q_offset": 0, "kv_offset": 0}
    return {**sizes, "attention_mask": None, "config": config, "device": given.device, **more}


def _visible_to_a_tracer(arguments) -> Visible:
    """What `visible_mask` finds while a graph is traced, where no number is read and nothing is known of a function but which one it is:
    the masks of a model that a package knows, which are causal, with a window or without, and packed where SDPA may not leave them out."""
    config = arguments.get("config")
    known = type(config) in TRACEABLE and is_causal(config) and not arguments.get("use_vmap")
    offset, padding = arguments["q_offset"], arguments["attention_mask"]
    square = isinstance(offset, int) and offset == 0 and arguments["kv_offset"] == 0 and arguments["kv_length"] == arguments["q_length"]
    if known and square and padding is None:
        return Visible(arguments, Rule(window=arguments.get("local_size")), None, not arguments.get("allow_is_causal_skip", True))
    return Visible(arguments, None, None)
