"""The forward of a model without a head: its attention is chosen, and masks of ours take the place of those that it would make."""

from typing import Any, Callable

import torch

from ...ops.embedding import traced_embedding
from ...ops.operators import constant_when_traced
from ...runtime.device import is_ordinary
from ..attention.attention_choice import choose_attention, leave_attention
from ..attention.defaults import ATTENTION, are_defaults_own, exchange_of, exchanges
from ..attention.document_bounds import documents_in
from ..attention.exchange import warn_of_graphs
from ..attention.masks import TRACEABLE, WINDOWS, kinds_of_layers, makes_masks_by_layer, masks_of_layers, no_mask, visible_rows
from ..attention.row_documents import spans_in_bounds
from ..capture.when_told import capture_as_told
from ..family.arguments import CACHE
from ..family.ownership import forward_for
from ..parts.modules import all_are_listened_to, is_marked, original_forward, own_forward
from ..parts.weights import is_torchs_embedding
from ..parts.wrapped import inside
from .padding import left_out_of_decoder, put_back

__all__ = ["choosing_forward", "given_tokens", "model_forward"]

# Tells an export, which needs its mask, from torch.compile. `torch.compiler.is_exporting` returns it, but in every graph of torch 2.11 that
# function is True; torch 2.6 has neither.
EXPORTS = "_is_exporting_flag"


def given_tokens(kwargs):
    """The tokens among the arguments of a model's forward, [rows, tokens], or their embeddings where it has these instead."""
    return kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]


def _with_documents(model, kwargs, told: bool):
    """The arguments of a model's forward with masks of ours where it would look for documents in position_ids, and where cu_seq_lens_q say
    them to attention of ours. told: whether it looks.

    Without position_ids it makes them itself, and waits for the device to learn that each row is one document; inside torch.compile it
    cannot wait, and masks as if there were several.
    """
    config, given = model.config, given_tokens(kwargs)
    ours = config._attn_implementation == ATTENTION
    spread = ours and exchanges(exchange_of(config), model)  # the documents of whole rows are known to attention alone
    if spread and kwargs.get("position_ids") is None:
        text = "position_ids are missing, and this process has a part of each row. Pass those of its tokens in their documents"
        raise ValueError(f"{text}, [rows, tokens]")
    compiled = torch.compiler.is_compiling() and not getattr(torch.compiler, EXPORTS, True)
    without_masks = compiled and config._attn_implementation == "sdpa"
    if not (without_masks or ours) or type(config) not in TRACEABLE or not are_defaults_own(config):
        return kwargs
    if not isinstance(given, torch.Tensor):
        return kwargs
    if not all(kind in WINDOWS for kind in kinds_of_layers(config, kwargs)):
        return kwargs
    documents, bounds = None, [kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if kwargs.get(name) is not None]
    if bounds and not spread and type(bounds[-1]) is not dict:  # by kind of layer: continuous batching's, whose keys are pages
        if torch.compiler.is_compiling() or any(isinstance(each, torch.Tensor) and not is_ordinary(each) for each in bounds):
            return kwargs
        documents, more = spans_in_bounds(given.shape[:2], kwargs)
        kwargs = {**kwargs, **more}
    if kwargs.get("attention_mask") is not None or kwargs.get(CACHE) is not None:
        return kwargs
    positions = kwargs.get("position_ids") if documents is None and not spread else None
    if positions is not None and (not told or torch.compiler.is_compiling() or not _says_documents(positions, given)):
        return kwargs
    use_cache = config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
    if use_cache or given.shape[1] == 1:
        return kwargs
    if without_masks:  # SDPA is causal without a mask, and faster
        if positions is not None or kinds_of_layers(config) != {"full_attention"}:
            return kwargs
        if makes_masks_by_layer(config):
            return {**kwargs, "attention_mask": {"full_attention": None}}
        return {**kwargs, "attention_mask": no_mask(given.device)} if _layers_are_ours(model) else kwargs
    if positions is not None:
        documents = documents_in(positions)
    return {**kwargs, "attention_mask": masks_of_layers(config, lambda kind: visible_rows(config, kind, given, documents))}


def _layers_are_ours(model) -> bool:
    """True where a call of each of a decoder's layers runs this package's forward and nothing else."""
    forwards = [own_forward(layer) for layer in getattr(model, "layers", ())]
    return bool(forwards) and all(_is_ours(forward) for forward in forwards)


@constant_when_traced  # what a tracer has read of a wrapper's closure, it cannot call any more
def _is_ours(forward) -> bool:
    return is_marked(inside(forward))


def _says_documents(position_ids, given: torch.Tensor) -> bool:
    """True for position_ids that have a number for each token of a batch, which may be read."""
    shape = given.shape[:2]
    readable = isinstance(position_ids, torch.Tensor) and is_ordinary(position_ids) and not position_ids.is_floating_point()
    return readable and is_ordinary(given) and position_ids.shape == shape and position_ids.dtype != torch.bool


def _embedded(model, kwargs):
    """The arguments of a model's forward in a graph, with the embeddings instead of the tokens where their weights are trained and looking
    them up is all that a call of the model's embedding does."""
    tokens, embedding = kwargs.get("input_ids"), model.get_input_embeddings()
    if kwargs.get("inputs_embeds") is not None or not isinstance(tokens, torch.Tensor) or not torch.is_grad_enabled():
        return kwargs
    if all_are_listened_to() or not is_torchs_embedding(embedding) or not embedding.weight.requires_grad:
        return kwargs
    padding_idx = -1 if embedding.padding_idx is None else embedding.padding_idx
    embeds = traced_embedding(embedding.weight, tokens, padding_idx, embedding.scale_grad_by_freq)
    return {**kwargs, "input_ids": None, "inputs_embeds": embeds}


def model_forward(self, kwargs, told=True):
    """Serves as the forward of a model without a head: chooses its attention, leaves padding out where its caller has said that it may
    (`only_labels_are_read`), and runs the model's own forward.

    Args:
        kwargs: the arguments of that forward by name.
        told: whether it finds documents in position_ids.
    """
    given, seen = given_tokens(kwargs), None
    if torch.compiler.is_compiling():
        warn_of_graphs()
        kwargs = _embedded(self, kwargs)
    else:
        choose_attention(self)
        capture_as_told(self)
        kwargs, seen = left_out_of_decoder(self, kwargs)
    output = original_forward(self)(self, **_with_documents(self, kwargs, told))
    return output if seen is None else put_back(output, seen, given.shape[:2])


def choosing_forward(decoder, check: Callable) -> Callable:
    """A forward for a decoder without a row, whose masks are handed on (mask_reader.py): it chooses the attention, and is the decoder's own
    otherwise. check: of `capture_as_told`."""
    original: Any = original_forward(decoder)

    def run(decoder, given):
        if not torch.compiler.is_compiling():
            # What it hands on says no documents of whole rows, which attention between exchanges needs.
            (choose_attention if exchange_of(decoder.config) is None else leave_attention)(decoder)
            capture_as_told(decoder, check)
        return original(decoder, **given)

    return forward_for(original, run)
