"""Makes the layers that take the place of a family's, from its row of the table. They have no state: `self` is the module whose forward
they become. A package's layers.py names them, because the Hub finds layers there; each has nothing but `forward`, as the Hub asks. A row's
layer is made once: a forward under several names is one function."""

import functools
from typing import Any, Callable, Dict, Iterable, Optional, Tuple, Type

import torch

from ...decoder.spec import Norm
from ..family.arguments import forward_of
from ..family.experts import experts_forward
from ..family.families import Family, Vision, head_of
from ..family.forwards import gated_mlp_forward, mlp_forward, norm_forward, rotary_of
from ..family.probes import flags_of
from ..layer.checkpointing import checkpointed
from ..layer.decoder_layer import FusedLayer, decoder_layer_forward
from ..model.causal_lm import causal_lm_forward
from ..model.decoder_model import given_tokens, model_forward
from ..model.vision import causal_lm_with_vision
from ..parts.modules import Layer, original_forward, rotary_forward

__all__ = [
    "any_norm_of", "causal_lm_of", "decoder_layer_of", "experts_named", "experts_of", "mlp_of", "model", "norm_while", "rms_norm_of",
    "rotary_layer_of", "with_vision_of",
]  # fmt: skip


def _layer(name: str, forward: Callable[..., Any]) -> Type[Layer]:
    """A layer class with a forward of this package."""
    return type(name, (Layer,), {"forward": forward, "__module__": __name__})


@functools.lru_cache(maxsize=None)
def _of_one_argument(name: str, run: Callable[..., Any], argument: str, *given: Any) -> Type[Layer]:
    """The layer whose forward, of one argument of this name, returns run(*given, module, it)."""
    if argument == "x":

        def forward(self, x):
            return run(*given, self, x)

    else:

        def forward(self, hidden_states):
            return run(*given, self, hidden_states)

    return _layer(name, forward)


def rms_norm_of(family: Family) -> Type[Layer]:
    """The layer for a family's RMSNorm: [..., n] -> [..., n]."""
    return _of_one_argument("RMSNorm", norm_forward, family.norm_argument, Norm(0.0, family.offset, family.rounds))


def norm_while(norm: Norm, flags: Tuple[Tuple[str, bool], ...]) -> Callable[..., Any]:
    """The forward of a norm that was read with these flags. With other ones its own runs. norm: without the epsilon."""

    def forward(self, hidden_states):
        if not torch.compiler.is_compiling() and tuple(flags_of(self).items()) != flags:
            return original_forward(self)(self, hidden_states)
        return norm_forward(norm, self, hidden_states)

    return _layer("RMSNorm", forward).forward  # type: ignore[attr-defined]


def any_norm_of(rows: Iterable[FusedLayer]) -> Type[Layer]:
    """The layer for the RMSNorms of all these families whose weight has no offset, and for any other that computes what Llama's does: the
    Hub has one name for them all. Some multiply by the weight before they round: [..., n] -> [..., n]."""
    last = {f"{own.family.prefix}RMSNorm" for own in rows if own.family.rounds == "last" and not own.family.offset}

    def forward(self, hidden_states):
        return norm_forward(Norm(rounds="last" if type(self).__name__ in last else "first"), self, hidden_states)

    return _layer("RMSNorm", forward)


def rotary_layer_of(family: Family) -> Type[Layer]:
    """The layer for `apply_rotary_pos_emb`: q, k [batch, heads, tokens, head_dim] and cos, sin [batch, tokens, width]."""
    return _rotary_layer(rotary_of(family))


@functools.lru_cache(maxsize=None)
def _rotary_layer(rotate: Callable[..., Any]) -> Type[Layer]:
    return _layer("RotaryPosEmb", rotary_forward(rotate))


@functools.lru_cache(maxsize=None)
def mlp_of(family: Family) -> Type[Layer]:
    """The layer for a family's MLP: [..., hidden] -> [..., hidden]. Recomputes its activations in the backward pass."""
    plain = family.activation == "silu" and len(family.gate_up) == 2
    return _of_one_argument("MLP", mlp_forward if plain else gated_mlp_forward(family), family.mlp_argument)


def experts_of(family: Family) -> Type[Layer]:
    """The layer for a family's experts: hidden states [tokens, hidden], experts and their weights [tokens, top-k] -> [tokens, hidden]."""
    return experts_named(family.sparse is not None and family.sparse.router_indices)


@functools.lru_cache(maxsize=None)
def experts_named(router_indices: bool) -> Type[Layer]:
    """The layer for experts. router_indices: as of a `Sparse`."""
    forward: Callable[..., Any]
    if router_indices:

        def forward(self, hidden_states, router_indices=None, routing_weights=None):
            return experts_forward(self, hidden_states, router_indices, routing_weights)

    else:

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    return _layer("Experts", forward)


@functools.lru_cache(maxsize=None)
def decoder_layer_of(own: FusedLayer) -> Type[Layer]:
    """The layer for a family's decoder layer: hidden_states [batch, tokens, hidden] -> the same, in three autograd nodes."""

    def run(self, given):
        return decoder_layer_forward(own, self, given)

    return _layer("DecoderLayer", checkpointed(forward_of(own.family.takes, run)))


@functools.lru_cache(maxsize=None)
def model(family: Optional[Family] = None, arguments_for: Optional[Callable[..., Dict[str, Any]]] = None) -> Type[Layer]:
    """The layer for a family's decoder: the same, with attention of ours where it has the one that transformers chooses by default.

    family: needed of one with a vision tower. arguments_for: called with (rows, tokens) and all arguments by name, returns those for the
    model's own forward that are more or others.
    """
    names = ["input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache"]
    # One row of positions behind a tower is that of all three axes, and says nothing about documents.
    told = family is None or (family.of_positions() and not family.whole)
    if family is not None and family.whole and family.whole.deepstack:  # which adds visual features to the residual stream
        names, told = [*names, "visual_pos_masks", "deepstack_visual_embeds"], True

    def run(self, given):
        if arguments_for is not None and (tokens := given_tokens(given)) is not None:
            given.update(arguments_for(tokens.shape[:2], given))
        return model_forward(self, given, told)

    return _layer("Model", forward_of(names, run))


@functools.lru_cache(maxsize=None)
def with_vision_of(family: Family, tower: Vision) -> Type[Layer]:
    """The layer for a family's model with a vision tower; the rest as of `causal_lm_of`."""
    return _layer("WithVision", causal_lm_with_vision(family, tower))


@functools.lru_cache(maxsize=None)
def causal_lm_of(family: Family) -> Type[Layer]:
    """The layer for a family's causal LM. With labels in training mode the logits are never all in memory, and `logits` is None.

    kwargs: transformers' own, the options of `linear_cross_entropy`, and `skip_logits`: True for no logits in eval mode either, False for
    logits in training mode too. With experts, the router's auxiliary loss and its logits are there where they are asked for.
    """
    if family.whole:
        return with_vision_of(family, family.whole)
    names = ["input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels"]
    names += [] if family.routed else ["use_cache"]
    names += ["output_router_logits"] if family.routed or family.sparse is not None else []

    def run(self, given):
        return causal_lm_forward(self, head_of(self.config, family.divisor, family.softcap), **given)

    return _layer("CausalLM", forward_of([*names, "logits_to_keep"], run))
