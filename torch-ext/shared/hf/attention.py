"""attn_implementation="bastile": the operation `attention` among transformers' attention functions, with a mask function of its own.

transformers asks the mask function once a batch and kind of layer, and hands what it returns to every layer. Ours returns a `Visible`
in the place of a [batch, 1, queries, keys] mask: what transformers said about which tokens see which, of which the plan of `attention`
is made once, by the first layer that needs it. What no plan can say (padding between tokens, overlays of other models, keys of an
earlier call, dropout, other head sizes) goes to SDPA, or to the model's own eager attention where there are sinks, with the mask that
transformers makes for these.
"""

import sys
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch

from ..ops.attention import HEAD_DIMS, AttentionPlan, attention
from ..ops.common import HALF, autocasts
from ..ops.embedding import traced_embedding
from ..runtime.device import is_ordinary, kernels_run_on
from .modules import SAVED, all_are_listened_to, is_plain, is_torchs_embedding, original_forward

ATTENTION = "bastile"  # the name of our implementation among transformers'
MASKING = "transformers.masking_utils"
KEPT = SAVED + "attention"  # on a model: the implementation that it had before `choose_attention`
PADDING = SAVED + "padding"  # on a padding mask: what `padding_of` read, and the mask's version then
TRACEABLE: set = set()  # configurations of the models that packages know
WHOLE, RUNS, HOLES = 0, 1, 2  # no padding; padding beside each row's tokens; padding between them


class Rule(NamedTuple):
    """What a causal mask function of transformers says beside that. window: keys that a query sees, its own among them, or None;
    packed: [batch, tokens], a number for each token's document, or None."""

    window: Optional[int] = None
    packed: Optional[torch.Tensor] = None


def _made_by(function, maker, example) -> Optional[Dict[str, Any]]:
    """The variables that a function closes over if it was made as `maker(example)` is, else None."""
    code = getattr(function, "__code__", None)
    if code is None or code is not maker(example).__code__:
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
    causal, rule = False, Rule()
    for part in both["mask_functions"]:
        inner = rule_of(part)
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
        rule = Rule(*(a if b is None else b for a, b in zip(rule, found)))
    return rule if causal else None


def padding_of(mask: torch.Tensor) -> int:
    """WHOLE, RUNS or HOLES. mask: [batch, tokens] bool, True where a token is no padding. Waits for the device, once for each mask;
    transformers' mask function for SDPA does the same."""
    version = None if mask.is_inference() else mask._version
    kept = getattr(mask, PADDING, None)
    if version is not None and kept is not None and kept[0] == version:
        return kept[1]
    runs = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    found = int(torch.where((runs > 1).any(), HOLES, torch.where(mask.all(), WHOLE, RUNS)))
    setattr(mask, PADDING, (version, found))
    return found


class Visible:
    """Which tokens of a batch see which, as transformers said it to the mask function.

    arguments: of the mask function. rule: of `rule_of`, None where no plan can say it. padding: [batch, tokens] bool, or None where no
    token is padding. positions: whether documents start where position_ids do not go on, beside what the rule says. documents: of
    `documents_in`, which the rule and the mask function say nothing of; None for none.
    """

    def __init__(
        self,
        arguments: Dict[str, Any],
        rule: Optional[Rule],
        padding: Optional[torch.Tensor],
        positions: bool = False,
        documents: Optional[torch.Tensor] = None,
    ):
        self.arguments, self.rule, self.padding, self.positions, self.documents = arguments, rule, padding, positions, documents
        self.batch, self.tokens, self.keys = arguments["batch_size"], arguments["q_length"], arguments["kv_length"]
        self._plans: dict = {}
        self._masks: dict = {}

    @property
    def shape(self) -> Tuple[int, int, int, int]:
        """Of the mask that this stands for: what transformers asks of one that a caller has prepared."""
        return self.batch, 1, self.tokens, self.keys

    ndim = 4

    def is_plain(self) -> bool:
        """True where each row is one document that each query sees up to itself: what SDPA does without a mask."""
        rule = self.rule
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
        shape, window = (self.batch, self.tokens), self.rule.window
        if self.documents is not None:
            return AttentionPlan(self.documents.to(device, non_blocking=True), self.batch * self.tokens, window=window)
        if cu_seqlens is not None:
            return AttentionPlan.from_cu_seqlens(cu_seqlens.to(device), self.batch * self.tokens, window=window)
        if self.rule.packed is not None:
            padding = None if self.padding is None else self.padding.to(device)
            return AttentionPlan.from_document_ids(self.rule.packed.to(device), padding, window=window)
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


def visible_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **kwargs):
    """transformers' mask function of ours: a `Visible`, or, for one query a row, what the function for SDPA returns. attention_mask: of
    transformers, or a `Visible` that was made already."""
    if isinstance(attention_mask, Visible):
        return attention_mask
    masking = sys.modules[MASKING]
    arguments = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    arguments.update(kwargs, mask_function=mask_function or masking.causal_mask_function, attention_mask=attention_mask)
    if q_length == 1:
        return masking.sdpa_mask(**arguments)
    if torch.compiler.is_compiling():
        return _visible_to_a_tracer(arguments)
    if isinstance(q_offset, torch.Tensor):  # a static cache's own counter, which goes on before a layer asks for the mask
        arguments["q_offset"] = q_offset.clone()
    rule = padding = None
    if not kwargs.get("use_vmap") and kv_length >= q_length and q_offset == 0 and kv_offset == 0:
        rule = rule_of(arguments["mask_function"])
    if rule is not None and attention_mask is not None:
        padding = masking.prepare_padding_mask(attention_mask, q_length, 0)[:, :q_length]
        kind = padding_of(padding)
        rule, padding = (None if kind == HOLES else rule), (None if kind == WHOLE else padding)
    return Visible(arguments, rule, padding)


WINDOWS = {"full_attention": lambda config: None, "sliding_attention": lambda config: config.sliding_window}  # by the kind of a layer


def kinds_of_layers(config) -> set:
    """The kinds of layers that a decoder makes masks for, of `WINDOWS` where they are known; one where all its layers share a mask."""
    if getattr(config, "layer_types", None) or type(config) not in TRACEABLE:
        return set(getattr(config, "layer_types", None) or ["unknown"])
    return {"full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"}


def masks_of_layers(config, visible_of: Callable[[str], Visible]) -> Any:
    """What a decoder takes as `attention_mask` in the place of the masks that it would make: the `Visible` of each kind of layers that
    it has, or the one that all of them share."""
    visible = {kind: visible_of(kind) for kind in kinds_of_layers(config)}
    return visible if getattr(config, "layer_types", None) else visible.popitem()[1]


def documents_in(position_ids: torch.Tensor) -> Optional[torch.Tensor]:
    """[2, at least as many as documents] int32 in main memory: the first token of each document and the one behind its last; the rest are
    empty. None where each row is one document. Waits for the device.

    position_ids: [batch, tokens]; a document starts with each row, and wherever a position is not the one before it plus 1. transformers
    looks for the same on the device, where a dozen operations that nobody else needs are loaded for it in the first step.
    """
    positions = position_ids.cpu()
    new = torch.ones_like(positions, dtype=torch.bool)
    new[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = new.flatten().nonzero()[:, 0]
    documents = starts.numel()
    if documents == positions.shape[0]:
        return None
    room = 1 << (documents - 1).bit_length()  # a launch is prepared for each number of them
    bounds = torch.full((room + 1,), positions.numel(), dtype=torch.int32)
    bounds[:documents] = starts
    return torch.stack((bounds[:-1], bounds[1:]))


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


def _causal(config, kind: str) -> Tuple[Optional[int], Callable]:
    """The window of causal layers of a kind of `WINDOWS`, and transformers' mask function for it."""
    masking, window = sys.modules[MASKING], WINDOWS[kind](config)
    return window, masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)


def _in_documents(function: Callable, document_ids: torch.Tensor) -> Callable:
    """A mask function of transformers, within documents. document_ids: [batch, tokens], a number for each token's document."""
    masking = sys.modules[MASKING]
    return masking.and_masks(function, masking.packed_sequence_mask_function(document_ids))


def _arguments(config, given: torch.Tensor, **more) -> Dict[str, Any]:
    """Of a mask function of transformers, for rows without padding and no cache. The dtype is said when a mask is made."""
    tokens = given.shape[1]
    sizes = {"batch_size": given.shape[0], "q_length": tokens, "kv_length": tokens, "q_offset": 0, "kv_offset": 0}
    return {**sizes, "attention_mask": None, "config": config, "device": given.device, **more}


def _visible_to_a_tracer(arguments) -> Visible:
    """As `visible_mask`, of a graph, in which no number is read and nothing is known of a function but which one it is: of a model
    that a package knows, whose masks are causal, with a window or without, and packed where SDPA may not leave them out."""
    known = type(arguments.get("config")) in TRACEABLE and not arguments.get("use_vmap")
    offset, padding = arguments["q_offset"], arguments["attention_mask"]
    square = isinstance(offset, int) and offset == 0 and arguments["kv_offset"] == 0 and arguments["kv_length"] == arguments["q_length"]
    if known and square and padding is None:
        return Visible(arguments, Rule(window=arguments.get("local_size")), None, not arguments.get("allow_is_causal_skip", True))
    return Visible(arguments, None, None)


def _takes(q, k, v, sinks, dropout, kwargs) -> bool:
    """True where `attention` does what these arguments ask for, in its kernels if they lie on a GPU."""
    asked = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache")) or kwargs.get("output_attentions")
    if sinks is not None and not is_plain(sinks):  # sharded
        return False
    if dropout or asked or k.shape != v.shape or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        return False
    if autocasts(q.device):
        dtype = torch.get_autocast_dtype(q.device.type)
    else:
        dtype = q.dtype
        if not q.dtype == k.dtype == v.dtype:
            return False
    if q.device.type == "cpu":
        return True
    fits = q.is_cuda and dtype in HALF and q.shape[3] in HEAD_DIMS
    return fits and (torch.compiler.is_compiling() or kernels_run_on(q, k, v))


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, s_aux=None, **kwargs):
    """transformers' attention function of ours. query, key, value: [batch, heads, tokens, head_dim] of any strides; s_aux: sinks
    [heads]. Returns ([batch, tokens, heads, head_dim], None).

    Documents are those of cu_seq_lens_q, if the caller gave it; else those that transformers found in position_ids for the mask; where
    there are sinks, which no mask of transformers' can part, also those that start where position_ids do not go on.
    """
    visible = attention_mask
    if not isinstance(visible, Visible):
        return _as_transformers(module, query, key, value, visible, scaling, dropout, s_aux, kwargs)
    tokens = visible.tokens
    usable = visible.rule is not None and query.shape[2] == tokens and key.shape[2] == visible.keys
    if usable and _takes(query, key, value, s_aux, dropout, kwargs):
        cu_seqlens, position_ids = documents_of(visible, kwargs, s_aux)
        if s_aux is not None or cu_seqlens is not None or not visible.is_plain():
            if key.shape[2] > tokens:  # a static cache, with room for what comes
                key, value = key[:, :, :tokens], value[:, :, :tokens]
            plan = visible.plan(query.device, cu_seqlens, position_ids)
            return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan, sinks=s_aux, scale=scaling), None
    return _as_transformers(module, query, key, value, visible, scaling, dropout, s_aux, kwargs)


def documents_of(visible, kwargs, sinks):
    """(cu_seqlens, position_ids) of a call, None where the mask has said what documents there are."""
    cu_seqlens, position_ids = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if visible.padding is not None or visible.documents is not None:
        return None, None
    if cu_seqlens is not None and visible.batch == 1:
        return cu_seqlens, None
    asked = visible.positions or (sinks is not None and visible.rule.packed is None)
    return None, position_ids if asked and position_ids is not None and position_ids.dim() == 2 else None


def _as_transformers(module, query, key, value, mask, scaling, dropout, sinks, kwargs):
    """SDPA's function of transformers, or with sinks the eager one of the module's own model. mask: a `Visible` or what transformers
    made."""
    kind = "sdpa" if sinks is None else "eager"
    if isinstance(mask, Visible):
        # SDPA needs no mask there: what transformers knows too, but not inside a graph.
        needless = sinks is None and mask.rule is not None and mask.is_plain() and query.shape[2] == key.shape[2]
        mask = None if needless else mask.mask(kind, query.dtype, query.device)
    if sinks is None:
        function = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS["sdpa"]
        return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), torch.finfo(query.dtype).min)
    function = sys.modules[type(module).__module__].eager_attention_forward
    return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, s_aux=sinks, **kwargs)


# ---------------------------------------------------------------- choosing it
_before: dict = {}  # by its class, what an interface of transformers had under our name: the implementation of another package of ours


def _interfaces():
    """(interface of transformers, our function) of those that are imported."""
    found = ("AttentionInterface", "transformers.modeling_utils", attention_forward), ("AttentionMaskInterface", MASKING, visible_mask)
    return [(getattr(sys.modules[module], name), ours) for name, module, ours in found if module in sys.modules]


def register_attention(*configurations: type) -> None:
    """Makes attn_implementation="bastile" a choice for every model of transformers. configurations: the classes of those whose masks
    are known to be causal, so that torch.compile needs not look into them."""
    TRACEABLE.update(configurations)
    for interface, ours in _interfaces():
        before = interface._global_mapping.get(ATTENTION)
        if before is not ours:
            _before[interface] = before
            interface.register(ATTENTION, ours)


def unregister_attention() -> None:
    """Puts back what `register_attention` replaced, unless another package has taken its place since."""
    for interface, ours in _interfaces():
        if interface._global_mapping.get(ATTENTION) is ours:
            before = _before.pop(interface, None)
            if before is None:
                del interface._global_mapping[ATTENTION]
            else:
                interface.register(ATTENTION, before)


def give_attention_back(module) -> None:
    """Gives a model the implementation that it had before `choose_attention`."""
    kept = vars(module).pop(KEPT, None)
    if kept is not None and module.config._attn_implementation == ATTENTION:
        module.set_attn_implementation(kept)


def head_dim_of(config) -> Optional[int]:
    """The size of a head by a model's configuration, None where it says nothing of heads."""
    found, heads = getattr(config, "head_dim", None), getattr(config, "num_attention_heads", 0)
    return config.hidden_size // heads if found is None and heads else found


def choose_attention(model) -> None:
    """Gives a model on a GPU whose kernels run our implementation in the place of the one that transformers chooses by default; any other
    that it has, it keeps."""
    config, replaces = model.config, "sdpa" if model._supports_sdpa else "eager"
    if config._attn_implementation != replaces or head_dim_of(config) not in HEAD_DIMS:
        return
    weight = next(model.parameters(), None)
    if weight is None or weight.is_meta or not kernels_run_on(torch.empty(0, device=weight.device)):
        return
    vars(model)[KEPT] = replaces
    model.set_attn_implementation(ATTENTION)


def _with_documents(model, kwargs):
    """The arguments of a model's forward with masks of ours where it would look for documents in position_ids.

    Where nobody gave them it makes them itself, and waits for the device to hear that each row is one document; inside torch.compile it
    cannot hear, and masks as if there were several.
    """
    config, given = model.config, kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if config._attn_implementation != ATTENTION or type(config) not in TRACEABLE or not isinstance(given, torch.Tensor):
        return kwargs
    if any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values", "cu_seq_lens_q")):
        return kwargs
    positions, documents = kwargs.get("position_ids"), None
    if positions is not None and (torch.compiler.is_compiling() or not _says_documents(positions, given)):
        return kwargs
    use_cache = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    if use_cache or given.shape[1] == 1 or not all(kind in WINDOWS for kind in kinds_of_layers(config)):
        return kwargs
    if positions is not None:
        documents = documents_in(positions)
    return {**kwargs, "attention_mask": masks_of_layers(config, lambda kind: visible_rows(config, kind, given, documents))}


def _says_documents(position_ids, given: torch.Tensor) -> bool:
    """True for position_ids that have a number for each token of a batch, which may be read."""
    shape = given.shape[:2]
    readable = isinstance(position_ids, torch.Tensor) and is_ordinary(position_ids) and not position_ids.is_floating_point()
    return readable and is_ordinary(given) and position_ids.shape == shape and position_ids.dtype != torch.bool


def _embedded(model, kwargs):
    """The arguments of a model's forward in a graph, with the embeddings in the place of the tokens where their weights are trained and
    looking them up is all that a call of the model's embedding does."""
    tokens, embedding = kwargs["input_ids"], model.get_input_embeddings()
    if kwargs["inputs_embeds"] is not None or not isinstance(tokens, torch.Tensor) or not torch.is_grad_enabled():
        return kwargs
    if all_are_listened_to() or not is_torchs_embedding(embedding) or not embedding.weight.requires_grad:
        return kwargs
    padding_idx = -1 if embedding.padding_idx is None else embedding.padding_idx
    embeds = traced_embedding(embedding.weight, tokens, padding_idx, embedding.scale_grad_by_freq)
    return {**kwargs, "input_ids": None, "inputs_embeds": embeds}


def model_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    use_cache=None,
    **kwargs,
):
    """Serves as the forward of a model without a head: chooses its attention, and runs the model's own forward."""
    kwargs.update(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
    )
    if torch.compiler.is_compiling():
        kwargs = _embedded(self, kwargs)
    else:
        choose_attention(self)
    return original_forward(self)(self, **_with_documents(self, kwargs))
