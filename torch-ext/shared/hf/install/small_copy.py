"""A small copy of a decoder's layers, on which what they compute is read, and on which a row is compared with the layer's own forward
before it serves the layers themselves."""

import copy
import functools
from contextlib import ExitStack, contextmanager
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ...ops.common import fail
from ..family.arguments import CACHE
from ..family.calls import ANGLES, argument_names, kind_of
from ..family.families import Family
from ..family.ownership import bind, unbind
from ..family.probes import Angles, angles_of
from ..layer.decoder_layer import FusedLayer, decoder_layer_forward
from ..parts.facts import NotServed, is_config
from ..parts.modules import original_forward
from . import layers as made

# What configurations call their sizes. Of those with several meanings, such as a number of layers by stage, only plain numbers are changed.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 56),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "top_k", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim"), 48),
}  # fmt: skip
DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}  # of norms, relative
TOKENS = 7
LARGEST = 2_000_000  # weights of a small layer


@contextmanager
def on_the_side() -> Iterator[None]:
    """Within, modules are made and run on the CPU, with gradients, whatever the caller's own mode is, and no random number of the caller's
    is used up."""
    with ExitStack() as entered:
        for each in (torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False)):
            entered.enter_context(each)  # type: ignore[arg-type]
        entered.enter_context(torch.random.fork_rng(devices=[]))
        yield


def shrink(config, sizes=SIZES) -> None:
    """Makes the sizes in a configuration small, and those of the configurations in it."""
    for name, value in list(vars(config).items()):
        if is_config(value):
            shrink(value, sizes)
        elif name in sizes and type(value) is int and value:
            setattr(config, name, sizes[name])


class Small(NamedTuple):
    """config: of the copy. layers: a copy of each, with random weights, in float32 on the CPU. given: what the model's own module of angles
    gives its layers; angles: the same, None where it is no cos and sin."""

    config: Any
    layers: List[nn.Module]
    given: Any
    angles: Optional[Angles]


def small_copy(decoder: Any, layers: Sequence[Any]) -> Small:
    """Makes the copy of a decoder's layers, each by its class and its place. Raises `NotServed` where that is not enough."""
    if not isinstance(decoder._modules.get("rotary_emb"), nn.Module):
        raise NotServed(f"{type(decoder).__name__} has no rotary_emb that makes the angles of its layers")
    config = copy.deepcopy(decoder.config)
    shrink(config)
    if getattr(decoder.config, "num_key_value_heads", None) == getattr(decoder.config, "num_attention_heads", 0):
        config.num_key_value_heads = config.num_attention_heads  # what has no groups of heads may know of none
    config._attn_implementation = "eager"
    try:
        given = angles_of(type(decoder.rotary_emb)(decoder.config), TOKENS)
        with torch.device("meta"):
            numbers = sum(weight.numel() for i, layer in enumerate(layers) for weight in type(layer)(config, i).parameters())
        if numbers > LARGEST * len(layers):
            raise NotServed(f"{type(config).__name__} has sizes under names that are not known: no small copy of its layers could be made")
        torch.manual_seed(0)
        found = [type(layer)(config, i).float() for i, layer in enumerate(layers)]
        for layer in found:
            _fill(layer)
    except NotServed:
        raise
    except Exception as error:  # whatever a class's own code raises
        raise NotServed(f"no small copy of {type(layers[0]).__name__} could be made: {type(error).__name__}: {error}") from None
    head_dim = getattr(layers[0]._modules.get("self_attn"), "head_dim", None)
    pair = isinstance(given, tuple) and len(given) == 2
    return Small(config, found, given, Angles(given[0], given[1], head_dim) if pair and head_dim else None)


def _fill(layer: nn.Module) -> None:
    """Weights that all count: none is zero, no norm is one."""
    with torch.no_grad():
        for module in layer.modules():
            for parameter in module._parameters.values():
                if parameter is not None and kind_of(module) == "norm":
                    parameter.uniform_(0.5, 1.5)
                elif parameter is not None:
                    parameter.normal_(0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)


def _run(layer, forward, named, dtype, inputs) -> List[torch.Tensor]:
    """What a layer's forward returns for inputs, and the gradients of these and of all weights."""
    x = inputs.to(dtype).requires_grad_()
    torch.manual_seed(0)  # of a dropout in a part that is called
    result = forward(layer, hidden_states=x, **named)
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(4)).to(result.dtype)
    gradients = torch.autograd.grad(result, [x, *weights], direction, allow_unused=True)
    return [result.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def check_on_copy(own: FusedLayer, small: Small, index: int, dtype: torch.dtype) -> None:
    """Compares a row's fused layer with the forward of a small copy of a layer, in training, forward and all gradients. Raises `NotServed`
    where they differ by more than rounding, or the row would not serve it."""
    if dtype not in DIFFERENCE:
        fail("dtype", dtype, "one of floating point with 16 bits or more")
    for each in dict.fromkeys((torch.float32, dtype)):  # the wider one first: the copy is cast
        layer: Any = small.layers[index].to(each).train()
        named = _arguments(small, layer, each)
        inputs = torch.randn(2, TOKENS, small.config.hidden_size, generator=torch.Generator().manual_seed(3))
        name = type(layer).__name__
        try:
            wanted = _run(layer, original_forward(layer), dict(named), each, inputs)
        except Exception as error:  # of the class itself, with arguments that it does not know
            raise NotServed(f"a small copy of {name} does not run: {type(error).__name__}: {error}") from None
        experts = experts_in(own.family, layer)
        for module in experts:
            bind(module, made.experts_of(own.family).forward)
        reasons = [reason for _, reason in own.explain(layer, inputs[:1, :1].to(each)) if reason is not None]
        if any(reason.code not in ("called", "node", "eight_bits") for reason in reasons):
            raise NotServed(f"the fused layer would not serve {name}: {reasons[0].text}")
        try:
            found = _run(layer, functools.partial(_fused, own), dict(named), each, inputs)
        except Exception as error:  # of a part that is called, with arguments that it does not know
            raise NotServed(f"the fused layer of {name} does not run: {type(error).__name__}: {error}") from None
        for module in experts:
            unbind(module)
        worst = max(_difference(mine, other) for mine, other in zip(found, wanted))
        if not worst <= DIFFERENCE[each]:
            raise NotServed(f"the fused layer of {name} differs from its own forward by {worst:.1e} in {each}, on a small copy")


def experts_in(family: Family, layer: nn.Module) -> List[nn.Module]:
    """The modules of experts in a layer that a row knows."""
    name = family.sparse and family.sparse.classes[2]
    return [module for module in layer.modules() if type(module).__name__ == name]


def _fused(own: FusedLayer, layer, **named) -> torch.Tensor:
    return decoder_layer_forward(own, layer, named)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))


def _arguments(small: Small, layer: Any, dtype: torch.dtype) -> dict:
    """What a decoder calls its layers with, of a batch with padding on the left of its second row."""
    allowed = torch.ones(TOKENS, TOKENS).tril().bool().repeat(2, 1, 1, 1)
    allowed[1, :, :, :2] = False
    allowed[1, :, :2, :2] = torch.eye(2).bool()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min).to(dtype)
    of_heads = None if small.angles is None else small.angles.of_heads(layer._modules["self_attn"].head_dim)
    given: Any = small.given if of_heads is None else of_heads[:2]
    given = tuple(each.expand(2, -1, -1).to(dtype) for each in given) if isinstance(given, tuple) else given
    named = {"attention_mask": mask, ANGLES.name: given, "position_ids": torch.arange(TOKENS).expand(2, -1), CACHE: None}
    known = argument_names(original_forward(layer))
    return {name: value for name, value in named.items() if name in known or name == "position_ids"}
