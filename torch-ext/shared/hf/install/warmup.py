"""Loads ahead of the first step what the layers of a family would otherwise load in it, by running them on a few tokens.

The tensors are made here, of the sizes that kernels depend on. Nothing of a model runs, so its gradients, hooks and shards are left alone.
"""

from typing import Callable, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...decoder.nodes import norm_attention_inputs, norm_mlp
from ...decoder.norms import add_rms_norm, any_norm, rms_norm
from ...decoder.projection import Projection
from ...decoder.shared_expert import SharedExpert
from ...decoder.sparse import DEFAULT, ExpertOptions, ExpertTensors, Router, norm_experts
from ...ops import adamw
from ...ops.attention import attention, takes_heads
from ...ops.linear_cross_entropy import linear_cross_entropy
from ...ops.linear_log_probs import linear_log_probs
from ...ops.swiglu import mlp, swiglu
from ...runtime.tuning import TOKENS, run_backward
from ..attention.attention_choice import head_dim_of
from ..family.forwards import rotary_of
from ..layer.decoder_layer import FusedLayer, make_inputs, make_outputs

__all__ = ["EPS", "Case", "Maker", "Sizes", "attend", "case_of", "is_layer_of", "warm_up"]

EPS = 1e-6
DELTA = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
NARROW = 64  # the side of a weight that no kernel sees


class Sizes(NamedTuple):
    """Holds the sizes that a decoder's kernels depend on.

    angles: how wide cos and sin are, 0 for as wide as a head. expert: the intermediate size of an expert, and top_k: experts a token goes
    to; 0 without experts, as intermediate is without an MLP. shared: the intermediate size of the expert that every token goes to, 0
    without one. bias: whether the projections to q, k and v have biases. softcap: of the logits, 0 for none. delta: key heads, heads, and
    the lengths of a key and a value of a delta net; empty without.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    angles: int = 0
    expert: int = 0
    top_k: int = 0
    shared: int = 0
    bias: bool = False
    softcap: float = 0.0
    delta: Tuple[int, ...] = ()


class Case(NamedTuple):
    """The layers of a row of the table, of some sizes."""

    own: FusedLayer
    sizes: Sizes


class Maker(NamedTuple):
    """Makes tensors of ones, which need no random numbers."""

    dtype: torch.dtype
    device: torch.device
    tokens: int

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def rows(self, width: int) -> torch.Tensor:
        """[tokens, width]."""
        return self.ones(self.tokens, width)

    def linears(self, *shapes: Sequence[int], bias: bool = False) -> list:
        """Projections of these [out, in]."""
        return [Projection(self.ones(*shape), self.ones(shape[0]) if bias else None) for shape in shapes]

    def weight(self, name: Optional[str], width: int) -> Optional[torch.Tensor]:
        """The weight of a norm; None where a layer has no norm of that name."""
        return None if name is None else self.ones(width)

    def bias(self, own: FusedLayer, weight: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The bias of a norm with a weight; None of an RMSNorm."""
        return None if weight is None or not own.family.centred else self.ones(*weight.shape)


# ---------------------------------------------------------------- what runs
def run_norms(make: Maker, own: FusedLayer, sizes: Sizes) -> None:
    """Runs the norms alone, as they run around a layer that is not fused."""
    norm, weight = own.norm(EPS), make.ones(sizes.hidden)
    any_norm(norm, make.rows(sizes.hidden), weight, make.bias(own, weight)).sum().backward()
    if not norm.centred:
        run_backward(*add_rms_norm(norm, make.rows(sizes.hidden), make.rows(sizes.hidden), weight))
    if own.family.qk_norm == "head":
        for heads in (sizes.heads, sizes.kv_heads):
            rms_norm(norm, make.ones(1, make.tokens, heads, sizes.head_dim), make.ones(sizes.head_dim)).sum().backward()


def run_attention(make: Maker, own: FusedLayer, sizes: Sizes) -> None:
    """Runs the fused part in front of attention, attention itself, and the rotary embedding alone."""
    family, shape, head_dim = own.family, (1, make.tokens), sizes.head_dim
    rows = tuple(heads * head_dim for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    packed = len(family.qkv) == 1
    norms = [make.ones(length if family.qk_norm == "whole" else head_dim) if own.head_norms else None for length in rows[:2]]
    width = sizes.angles or head_dim
    cos = torch.ones(1, make.tokens, width, dtype=torch.float32 if family.narrow else make.dtype, device=make.device)
    q, k = (make.ones(1, make.tokens, heads, head_dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
    run_backward(*rotary_of(family)(q, k, cos, cos))
    spec = make_inputs(own, head_dim, None if family.norms.inputs is None else EPS, EPS, width, rows if packed else None)
    linears = make.linears(*[(length, sizes.hidden) for length in ((sum(rows),) if packed else rows)], bias=sizes.bias)
    x, weight = make.rows(sizes.hidden), make.weight(family.norms.inputs, sizes.hidden)
    run_backward(*norm_attention_inputs(x, weight, linears, norms[0], norms[1], cos, cos, shape, spec, norm_bias=make.bias(own, weight)))
    options = {name for name, *_ in family.options}
    attend(make, sizes, "s_aux" in options, "softcap" in options)


def attend(make: Maker, sizes: Sizes, sinks: bool = False, capped: bool = False) -> None:
    """Runs attention, if the package has kernels for heads of this length. capped: whether its scores are."""
    if takes_heads(sizes.head_dim, sinks, capped):
        q, k, v = (make.ones(1, make.tokens, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
        attention(q, k, v, sinks=make.ones(sizes.heads) if sinks else None, softcap=50.0 if capped else None).sum().backward()


def _outputs(make: Maker, own: FusedLayer, hidden: int):
    """The description of the second half of a layer, and the weights of its norms."""
    names, multiplier = own.family.norms[1:], 1.0 if own.family.multiplier is None else 0.5
    eps = [None if name is None else EPS for name in names]
    return make_outputs(own, eps[0], eps[1], eps[2], multiplier), [make.weight(name, hidden) for name in names]


def run_mlp(make: Maker, own: FusedLayer, sizes: Sizes) -> None:
    """Runs the second half of a layer with an MLP: its norms, then its activation, with narrow projections."""
    family, hidden, inner = own.family, sizes.hidden, sizes.intermediate
    spec, (after, before, behind) = _outputs(make, own, hidden)
    count = 2 if family.gated else 1
    o, *linears = make.linears((hidden, NARROW), *[(NARROW, hidden)] * count, (hidden, NARROW))
    attended = make.rows(NARROW)
    shift = make.bias(own, before)
    norm_mlp(make.rows(hidden), before, [o, *linears], spec, attended, after, behind, before_bias=shift).sum().backward()
    for recompute in (False, True):
        linears = make.linears(*[(inner, NARROW)] * count, (NARROW, inner))
        norm_mlp(make.rows(NARROW), None, linears, spec, recompute=recompute).sum().backward()
    if family.gated and family.activation == "silu":  # as modules of their own
        mlp(make.rows(NARROW), make.ones(inner, NARROW), make.ones(inner, NARROW), make.ones(NARROW, inner)).sum().backward()
        swiglu(make.rows(inner), make.rows(inner)).sum().backward()


def run_experts(make: Maker, own: FusedLayer, sizes: Sizes, options: ExpertOptions) -> None:
    """Runs the second half of a layer with experts. A few experts are enough: no kernel depends on how many there are."""
    family, hidden, width, count = own.family, sizes.hidden, sizes.expert, sizes.top_k
    assert family.sparse is not None
    biases = [make.ones(count, rows) if options.transposed else None for rows in (2 * width, hidden)]
    of_gate_up, of_down = ((hidden, 2 * width), (width, hidden)) if options.transposed else ((2 * width, hidden), (hidden, width))
    weights = ExpertTensors(make.ones(count, *of_gate_up), make.ones(count, *of_down), *biases)
    by_logits = family.sparse.by_logits
    router = Router(make.ones(count, hidden), count, True, make.ones(count) if by_logits else None, by_logits)
    spec, (after, before, behind) = _outputs(make, own, hidden)
    shared = None
    if sizes.shared:
        shapes = (sizes.shared, hidden), (sizes.shared, hidden), (hidden, sizes.shared)
        shared = SharedExpert(make.ones(1, hidden), make.linears(*shapes))
    tensors = router, weights, spec, options
    norm_experts(make.rows(hidden), before, *tensors, shared=shared, behind=behind).sum().backward()
    of_attention = make.rows(NARROW), make.linears((hidden, NARROW))[0], after
    norm_experts(make.rows(hidden), before, *tensors, *of_attention, shared=shared, behind=behind).sum().backward()


def run_head(make: Maker, sizes: Sizes) -> None:
    """Runs the loss without logits, in training and evaluation, and the log-probabilities, on few tokens because their logits are large."""
    few = min(make.tokens, TOKENS)
    hidden, weight, softcap = make.ones(few, NARROW), make.ones(sizes.vocabulary, NARROW), sizes.softcap or None
    target = torch.zeros(few, dtype=torch.int64, device=make.device)
    run_backward(linear_cross_entropy(hidden, weight, target, softcap=softcap))
    linear_log_probs(hidden, weight, target, outputs=("entropy",), softcap=softcap, skip_ignored=False).log_probs.sum().backward()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, target, softcap=softcap)


def warm_up(device, dtype, case: Case, tokens: int = TOKENS, options: ExpertOptions = DEFAULT, mix: Callable = run_attention) -> None:
    """Runs a family's layers forward and backward on some tokens. Draws no random numbers.

    Args:
        device, dtype: of all tensors.
        case: the row of the table, and the sizes.
        options: how the experts' weights are laid out.
        mix: runs what mixes the tokens, attention in most families; called with what makes tensors, the row and the sizes.
    """
    make, (own, sizes) = Maker(dtype, torch.device(device), tokens), case
    run_norms(make, own, sizes)
    mix(make, own, sizes)
    if sizes.intermediate:
        run_mlp(make, own, sizes)
    if sizes.top_k:
        run_experts(make, own, sizes, options)
    run_head(make, sizes)
    adamw.load(dtype, make.device)


# ---------------------------------------------------------------- of a model
def case_of(model: nn.Module, rows: Sequence[FusedLayer], other: Optional[FusedLayer] = None) -> Case:
    """Reads the sizes of a model from its configuration and its first decoder layer.

    Args:
        model: of transformers, wrapped or not.
        rows: of the package.
        other: the row for a model that has a decoder's configuration and none of their decoder layers; None where it is refused.

    Raises:
        TypeError: for any other model.
    """
    config = next((module.config for module in model.modules() if hasattr(getattr(module, "config", None), "num_key_value_heads")), None)
    own, layer = next(((own, each) for each in model.modules() for own in rows if is_layer_of(own, each)), (other, None))
    if config is None or own is None:
        names = " or ".join(each.family.model for each in rows)
        raise TypeError(f"model is a {type(model).__name__} without a decoder layer and a configuration of {names}")
    attention = getattr(layer, "self_attn", None)
    first = getattr(attention, own.family.qkv[0], None)
    return Case(own, _sizes_of(config, own, getattr(first, "bias", None) is not None))


def is_layer_of(own: FusedLayer, module: nn.Module) -> bool:
    """Tells whether a module is a decoder layer of a row."""
    # FSDP2 makes a class of its own that has the layer's among its bases.
    name = f"{own.family.prefix}DecoderLayer"
    return any(each.__name__ == name and each.__module__ == own.family.modeling for each in type(module).__mro__)


def _sizes_of(config, own: FusedLayer, bias: bool) -> Sizes:
    family, head_dim, sparse = own.family, head_dim_of(config) or 0, own.family.sparse
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    dense = getattr(config, "shared_intermediate_size" if family.block == "shared_mlp" else "intermediate_size", 0)
    return Sizes(
        hidden=config.hidden_size,
        intermediate=dense if family.mlp else 0,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocabulary=config.vocab_size,
        angles=int(head_dim * part) if family.partial else head_dim // 2 if family.half_angles else 0,
        expert=0 if sparse is None else getattr(config, "moe_intermediate_size", dense),
        top_k=0 if sparse is None else config.num_experts_per_tok,
        shared=getattr(config, "shared_expert_intermediate_size", 0) if sparse is not None and sparse.shared else 0,
        bias=bias,
        softcap=float((family.softcap and getattr(config, family.softcap)) or 0.0),
        delta=tuple(getattr(config, name) for name in DELTA) if family.mixers else (),
    )
