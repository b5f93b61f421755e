"""Leaves the padding of a batch out of a causal LM that trains: its decoder sees one row of all other tokens, or at least its attention
sees none of the padding.

Only where the result is the same: the loss comes without logits, or the caller has said that it reads no more than the loss needs
(`only_labels_are_read`, TRL's trainers); no padded position has a label, no part of the model has hooks or is of a class that may look at
other tokens of its row, and no cache is returned. The embedding runs on the whole batch, so hooks on it (NEFTune, PEFT's) see what they
always see.

The row is a few tokens longer than what is left of the batch (`rounded_length`), so that lengths come again, and with them what the host
has prepared for a length: 2000 batches of four texts have 70 lengths instead of 1439, for 2.2 % more tokens (where `capture` records each
length, half as many for 4.5 %). The tokens at the end are zeros after the embedding and a document of their own, predict nothing, and so
add exactly nothing to any gradient.
"""

import contextlib
import itertools
import operator
import threading
import weakref
from typing import Any, Dict, MutableMapping, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...ops.attention import takes_dtype, takes_heads
from ...ops.autograd import autocasts
from ..attention.attention_choice import choose_attention, head_dim_of
from ..attention.defaults import ATTENTION, are_defaults_own, exchange_of
from ..attention.masks import (
    BEFORE,
    BESIDE,
    WINDOWS,
    caps_scores,
    kinds_of_layers,
    masks_of_layers,
    padding_of,
    visible_documents,
    visible_tokens,
)
from ..capture.capture import is_wanted, lengths_are_captured
from ..family.arguments import CACHE
from ..parts.eight_bit_linear import EightBitLinear
from ..parts.four_bit_experts import Mxfp4, Nf4, Parametrizations
from ..parts.host_embedding import HostEmbedding
from ..parts.lookups import is_by
from ..parts.modules import CAPTURING, FSDP, FSDP2, MODULE_CALL, SAVED, decoder_of, is_defined_by, is_marked, own_forward, without_fsdp2
from ..parts.tree import HOOKS, Tree, tree_of
from ..parts.weights import weight_within
from ..parts.wrapped import inside

__all__ = ["KEEPS", "left_out_of_decoder", "may_change", "only_labels_are_read", "put_back", "without_padding"]

PARTS = 16  # steps of a length between two powers of two
KEEPS = SAVED + "keeps_padding"  # on a causal LM or its class: what apply() or kernelize() was told about `unpad`
READ = SAVED + "labels_are_read"  # on a decoder: the `LabelReader` of its caller
ASKED = ("output_hidden_states", "output_attentions", "output_router_logits")  # what has a number for each token
UNREDUCED = ("reduction", "return_predicted_tokens")  # options of the loss with which its results may have one, too
# What treats each token by itself, or holds others: of PyTorch and this package, and by the beginning of their modules' names, of other
# libraries.
OF_TORCH = {
    *(nn.Linear, EightBitLinear, nn.Embedding, HostEmbedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
    *(nn.SiLU, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Tanh),
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    *(Mxfp4, Nf4, Parametrizations),
}
OF_TRANSFORMERS = (
    *("transformers.activations", "transformers.pytorch_utils"),
    *(f"transformers.integrations.{name}" for name in ("bitnet", "compressed_tensors", "eetq", "fbgemm_fp8", "finegrained_fp8")),
    *(f"transformers.integrations.{name}" for name in ("gemma_quant", "gguf", "higgs", "metal_quantization", "mxfp4")),
)
OF_OTHERS = "peft.utils.", "bitsandbytes.nn.modules", "torch.distributed.fsdp", "torch.distributed.algorithms._checkpoint"
# PEFT's tuners that a test saw give the same gradients without padding. Lily's router averages over tokens, PVeRA draws noise of x's shape,
# Poly, Shadow, X-LoRA and adaption prompts look at rows; what a newer PEFT adds is not known.
TUNERS = (
    *("_buffer_dict", "adalora", "beft", "boft", "c3a", "deft", "delora", "fourierft", "frod", "glora", "gralora", "hira", "hra"),
    *("ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft", "osf", "peanut", "psoft", "randlora", "road", "shira", "supertuning"),
    *("tinylora", "trainable_tokens", "unilora", "vblora", "vera", "waveft"),
)
OF_PEFT = [["peft", "tuners", name] for name in TUNERS]
# LoRA's variants that were, by the beginning of their names. VeLoRA averages over tokens, aLoRA counts them from the end of a row.
VARIANTS = "Dora", "QALora", "BdLora", "Kasa"
ASKED_EACH = "peft.tuners.lora.", "bitsandbytes."  # of whose classes one module may do so and another may not
NO_GRAD = "torch.utils._contextlib"  # the module of its decorator, which rotary embeddings of transformers have
_no_forward = nn.Module.forward
FEW = 4  # lengths of single rows, after which more are expected
_lengths: MutableMapping = weakref.WeakKeyDictionary()  # by decoder: the first few of its single rows
_known: set = set()  # what `_is_known` found to be so


def _is_known(cls: Any, modeling: str) -> bool:
    """True for a class whose modules leave each token to itself, or whose attention is the decoder's: it is one of the decoder's module in
    transformers or of the libraries above, with the forward that it has there or one of ours. False for a user's class, and for a class
    whose forward or call was replaced. modeling: the decoder's module."""
    cls = _as_it_was(cls)
    forward, call = inside(cls.forward), cls.__call__
    key = cls, forward, call, modeling
    if key in _known:
        return True
    module = cls.__module__
    named = module == modeling or module.startswith((*OF_TRANSFORMERS, *OF_OTHERS)) or module.split(".")[:3] in OF_PEFT
    if not (cls in OF_TORCH or named):
        return False
    found = call is MODULE_CALL or _is_defined_as(call, cls, "__call__")
    found = found and (is_marked(forward) or forward is _no_forward or _is_defined_as(forward, cls, "forward"))
    if found:
        _known.add(key)
    return found


def _is_defined_as(function, cls: type, name: str) -> bool:
    """True for the method that a class's own text, or that of a class which it inherits from, defines by a name."""
    if getattr(function, "__globals__", {}).get("__name__") == NO_GRAD:
        function = function.__wrapped__
    return is_defined_by(cls.__mro__, function, name)


def _as_it_was(cls: Any) -> Any:
    """The class of which FSDP2, or PyTorch for a parametrized weight, has made another one, which keeps its forward; any other class
    itself."""
    cls = without_fsdp2(cls)
    return cls.__mro__[1] if cls.__module__ == parametrize.__name__ and cls.__mro__[1] is not nn.ModuleList else cls


def _may_see_padding(decoder: nn.Module, embedding: nn.Module) -> bool:
    """True if one of a decoder's modules may do something to padding or to a whole row that its result shows. embedding: the decoder's,
    which sees the whole batch."""
    tree, modeling = tree_of(decoder, embedding), _as_it_was(type(decoder)).__module__
    kinds = list(map(type, tree.modules))
    each = {type(decoder), *kinds}
    if _is_listened_to(decoder, tree) or not all(_is_known(cls, modeling) for cls in each):
        return True
    asked = {cls for cls in each if is_by(ASKED_EACH, cls)}
    states = itertools.compress(tree.states, map(asked.__contains__, kinds)) if asked else ()
    return any(map(_may_average, [state for state in states if state.get("lora_variant") or state.get("state") is not None]))


def _may_average(state: Dict[str, Any]) -> bool:
    """True for LoRA of a variant that is not known, and for a layer in eight bits that looks for outliers among all tokens. state: the
    attributes of a module that has a variant, or a state of its weight."""
    known = all(type(variant).__name__.startswith(VARIANTS) for variant in (state.get("lora_variant") or {}).values())
    return not known or bool(getattr(state.get("state"), "threshold", 0))


def _is_listened_to(decoder: nn.Module, tree: Tree) -> bool:
    """True if one of a decoder's modules has a hook other than FSDP's or, with nothing to capture, transformers' own; if accelerate moves
    tensors around one; or if one was given a forward that is not ours."""
    states = [vars(decoder), *tree.states]
    bound = [forward for forward in map(dict.get, states, itertools.repeat("forward")) if forward is not None]
    if not all(is_marked(getattr(forward, "__func__", None)) for forward in bound):
        return True
    if any(map(operator.contains, states, itertools.repeat("_hf_hook"))):
        return True
    if not any(tree.hooks()) and not any(HOOKS(states[0])):
        return False
    for backward, backward_pre, *forward in filter(any, map(HOOKS, [states[0], *tree.called])):
        if backward or backward_pre:
            return True
        if not all(is_by((FSDP, CAPTURING), hook) for hooks in forward for hook in hooks.values()):
            return True
    return False


def _only_the_loss_is_read(model, kwargs, options, chosen: bool) -> bool:
    """True where a causal LM uses our attention, and its caller sees nothing that the decoder returns for a token without a label. chosen:
    whether the attention was chosen in this pass."""
    decoder = decoder_of(model)
    if torch.compiler.is_compiling() or hasattr(decoder.config, "text_config"):  # whose positions are counted in the batch's shape
        return False
    if not chosen and is_marked(own_forward(decoder)):
        choose_attention(decoder)  # which it does itself, after this first look at its configuration
    config = decoder.config
    if config._attn_implementation != ATTENTION or not are_defaults_own(config) or exchange_of(config) is not None:
        return False
    use_cache = kwargs.get("use_cache")
    cached = config.use_cache if use_cache is None else use_cache
    # Checkpointing switches the cache off; since transformers 5.24, only while gradients are enabled.
    checkpoints = getattr(decoder, "gradient_checkpointing", False) and model.training and torch.is_grad_enabled()
    if (cached and not checkpoints) or kwargs.get(CACHE) is not None or any(options.get(name) for name in UNREDUCED):
        return False
    if any(kwargs.get(name, getattr(config, name, False)) for name in ASKED):
        return False
    if model.training and getattr(config, "attention_dropout", 0.0):
        return False
    if isinstance(kwargs.get("logits_to_keep", 0), torch.Tensor) or kwargs.get("logits_to_keep", 0):
        return False
    known = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "shift_labels"}
    return not any(isinstance(value, torch.Tensor) and value.dim() for name, value in kwargs.items() if name not in known)


def rounded_length(tokens: int, parts: int = PARTS) -> int:
    """The length of a row for this many tokens: the next multiple of a power of two of which a length of 2 * parts or more has parts to
    2 * parts."""
    step = 1 << max(tokens.bit_length() - parts.bit_length(), 0)
    return -(-tokens // step) * step


def _row_length(decoder, tokens: int) -> int:
    """The length of a row for this many tokens of a decoder. Where each length has to be recorded there are half as many lengths: a pass
    without graphs takes the host several times as long as the GPU takes for some tokens more."""
    return rounded_length(tokens, PARTS // 2 if lengths_are_captured(decoder) else PARTS)


def _lengths_vary(decoder, tokens: int) -> bool:
    """Tells whether the rows that a decoder has seen differ in length. If they are all the same, longer rows would gain nothing."""
    lengths = _lengths.setdefault(decoder, set())
    if len(lengths) < FEW:
        lengths.add(tokens)
    return len(lengths) == FEW


def _angles_follow_the_length(decoder) -> bool:
    """Tells whether the angles of all tokens follow from the largest position of their batch, as those of "dynamic" and "longrope" do."""
    kind = getattr(getattr(decoder, "rotary_emb", None), "rope_type", "")
    return any("dynamic" in one or one == "longrope" for one in (kind.values() if isinstance(kind, dict) else [kind]))


def may_change(kwargs: Dict[str, Any]) -> bool:
    """Tells by the arguments of a forward whether they are of a batch with a mask of padding, or of one row."""
    mask, given = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
    given = kwargs.get("input_ids") if given is None else given
    if not isinstance(given, torch.Tensor):
        return False
    if mask is None:
        return given.shape[0] == 1
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and given.shape[:2] == mask.shape


def _kernels_take(model, device: torch.device, dtype: torch.dtype) -> bool:
    if autocasts(device):
        dtype = torch.get_autocast_dtype(device.type)
    config, capped = model.config, caps_scores(model.config)
    fits = device.type == "cuda" and takes_dtype(dtype, capped) and takes_heads(head_dim_of(config), capped=capped)
    return fits or device.type == "cpu"


def without_padding(
    model, target: torch.Tensor, ignore_index: int, kwargs: Dict[str, Any], options: Dict[str, Any], chosen: bool = False
) -> Tuple[Dict[str, Any], Optional[torch.Tensor]]:
    """Changes the arguments of a causal LM's forward so that the same loss comes from one row of tokens, none of them padding. If the batch
    has to keep its shape, they get masks by which attention skips the padding. They stay as they are if there is no padding, or if the
    difference could be seen. Waits for the device.

    One row without padding gets the tokens at its end, too, where the lengths of such rows vary: in causal attention no other token sees
    them.

    Args:
        target: [batch * tokens], for each token the label of the next one.
        kwargs: the arguments of the forward.
        options: of the loss.
        chosen: whether the decoder's attention was chosen in this pass.

    Returns:
        The arguments, and the places of the row's first tokens among batch * tokens, None where there is no such row. The others are
        of no text.
    """
    ids, embeds, positions = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), kwargs.get("position_ids")
    mask: Any = kwargs.get("attention_mask")
    given: Any = ids if embeds is None else embeds
    if not may_change(kwargs) or not _only_the_loss_is_read(model, kwargs, options, chosen):
        return kwargs, None
    embedding, decoder, (batch, tokens) = model.get_input_embeddings(), decoder_of(model), given.shape[:2]
    alone = batch == 1 and (mask is None or bool(mask.all()))
    follows = _angles_follow_the_length(decoder)
    grows = alone and not follows and _lengths_vary(decoder, tokens) and _row_length(decoder, tokens) > tokens
    if alone and not (grows and (positions is None or positions.dim() == 2)):
        return kwargs, None
    weight, device = weight_within(embedding), given.device
    weight = given if weight is None else weight
    elsewhere = {weight.device, target.device, *(t.device for t in (mask, positions) if t is not None)} != {device}
    config = decoder.config
    if elsewhere or not kinds_of_layers(config, kwargs) <= WINDOWS.keys() or not _kernels_take(model, device, weight.dtype):
        return kwargs, None
    if _may_see_padding(decoder, embedding):
        return kwargs, None
    # Where FSDP gathers a decoder by itself, its embeddings lie in shards before it is called, or are a unit that processes whose rows have
    # no padding gather later.
    keeps = getattr(model, KEEPS, False) or is_wanted(decoder, torch.Size((batch, tokens))) or (not chosen and is_by(FSDP2, type(decoder)))
    if alone and keeps:
        return kwargs, None
    if alone:
        seen = torch.arange(tokens, device=device)
    else:
        mask = mask.bool()
        real, labelled = torch.stack((mask.flatten(), target != ignore_index)).cpu()  # the only wait for the device
        if padding_of(real.view(batch, tokens)) not in (BEFORE, BESIDE) or bool((labelled & ~real).any()):
            return kwargs, None
        if keeps:
            return {**kwargs, "attention_mask": masks_of_layers(config, lambda kind: visible_tokens(config, kind, mask))}, None
        seen = real.nonzero()[:, 0].to(device, non_blocking=True)
        if not seen.numel():
            return kwargs, None
        positions = (torch.arange(tokens, device=device)[None] if positions is None else positions).expand(batch, -1)
    more = _row_length(decoder, seen.numel() + follows) - seen.numel()
    embeds = embedding(ids) if embeds is None else embeds
    found = {"input_ids": None, "inputs_embeds": nn.functional.pad(embeds.flatten(0, 1).index_select(0, seen), (0, 0, 0, more))[None]}
    if positions is not None:
        tail = torch.arange(more, dtype=positions.dtype, device=device)
        if follows:  # the batch's largest position, which may be one of padding
            tail[-1] = positions.amax()
        found["position_ids"] = torch.cat((positions.flatten()[seen], tail))[None]
    if not alone:
        row = nn.functional.pad(seen // tokens, (0, more), value=batch)[None]
        found["attention_mask"] = masks_of_layers(config, lambda kind: visible_documents(config, kind, row))
    elif mask is not None:
        found["attention_mask"] = nn.functional.pad(mask, (0, more), value=1)
    return {**kwargs, **found}, seen


# ---------------------------------------------------------------- for callers of the decoder itself
class LabelReader(NamedTuple):
    """What a caller reads of a decoder's results: those that predict a label. thread: the caller's; target: as in `without_padding`."""

    thread: int
    causal_lm: nn.Module
    target: torch.Tensor
    ignore_index: int


@contextlib.contextmanager
def only_labels_are_read(causal_lm, target: torch.Tensor, ignore_index: int):
    """A context in which this thread calls the decoder of a causal LM, and reads of its results only those that predict a label. The
    others may be anything then; where padding is left out, they are zeros.

    It is noted on the decoder, so that it reaches whichever package's forward runs there.
    """
    decoder = decoder_of(causal_lm)
    state = vars(causal_lm if decoder is None else decoder)
    state[READ] = LabelReader(threading.get_ident(), causal_lm, target, ignore_index)
    try:
        yield
    finally:
        state.pop(READ, None)


def left_out_of_decoder(decoder, kwargs: Dict[str, Any]) -> Tuple[Dict[str, Any], Optional[torch.Tensor]]:
    """`without_padding` of a decoder that is called inside of `only_labels_are_read`; anywhere else the arguments stay as they are. Its
    attention was chosen before."""
    read = vars(decoder).get(READ)
    if read is None or read.thread != threading.get_ident() or kwargs.get("return_dict") is False or not decoder.config.return_dict:
        return kwargs, None
    given = {name: value for name, value in kwargs.items() if value is not None}
    return without_padding(read.causal_lm, read.target, read.ignore_index, given, {}, chosen=True)


def put_back(output, seen: torch.Tensor, shape: torch.Size):
    """The output of a decoder for a whole batch, from that for one row. seen: as `without_padding` returned it; shape: (batch, tokens)."""
    row = output.last_hidden_state[0, : seen.numel()]
    whole = row.new_zeros(shape.numel(), row.shape[-1]).index_copy(0, seen, row)
    output.last_hidden_state = whole.view(*shape, -1)
    return output
