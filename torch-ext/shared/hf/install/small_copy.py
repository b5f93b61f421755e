"""A small copy of a decoder's layers, on which what they compute is read, and on which a row is compared with the layer's own forward
before it serves the layers themselves."""

import ast
import copy
import functools
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ...ops.arguments import fail
from ..family.arguments import CACHE
from ..family.calls import ANGLES, argument_names, kind_of
from ..family.ownership import bind, unbind
from ..family.probes import Angles, angles_of
from ..layer.decoder_layer import decoder_layer_forward
from ..layer.recognised_layer import RecognisedLayer
from ..parts.facts import NotServed, is_config
from ..parts.modules import original_forward
from . import layers as made

__all__ = ["Small", "check_on_copy", "experts_in", "on_the_side", "small_copy"]

# What configurations call their sizes. Of those with several meanings, such as a number of layers by stage, only plain numbers are changed.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 56),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token", "top_k", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4), "mamba_n_heads": 8, "mamba_d_head": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim"), 64),
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
    gives its layers; angles: the same, None where it is no cos and sin; without_angles: whether that module is None."""

    config: Any
    layers: List[nn.Module]
    given: Any
    angles: Optional[Angles]
    without_angles: bool


def small_copy(decoder: Any, layers: Sequence[Any]) -> Small:
    """Makes the copy of a decoder's layers, each by its class and its place. Raises `NotServed` where that is not enough."""
    others = (module for module in decoder._modules.values() if type(module).__name__.endswith("RotaryEmbedding"))
    rotary: Any = decoder._modules.get("rotary_emb") or next(others, None)
    config = copy.deepcopy(decoder.config)
    shrink(config)
    if type(getattr(config, "qk_rope_head_dim", None)) is int:  # by which the angles are made
        config.head_dim = config.qk_rope_head_dim
    if getattr(decoder.config, "num_key_value_heads", None) == getattr(decoder.config, "num_attention_heads", 0):
        config.num_key_value_heads = config.num_attention_heads  # what has no groups of heads may know of none
    config._attn_implementation = "eager"
    try:
        given: Any = None if rotary is None else angles_of(type(rotary)(decoder.config), TOKENS)
        if not isinstance(given, tuple) and rotary is not None:  # one table, whose width is that of heads
            given = angles_of(type(rotary)(config), TOKENS)
        with torch.device("meta"):
            numbers = sum(weight.numel() for i, layer in enumerate(layers) for weight in _another(layer, config, i).parameters())
        if numbers > LARGEST * len(layers):
            raise NotServed(f"{type(config).__name__} has sizes under names that are not known: no small copy of its layers could be made")
        torch.manual_seed(0)
        found = [_another(layer, config, i).float() for i, layer in enumerate(layers)]
        for layer in found:
            _fill(layer)
    except NotServed:
        raise
    except Exception as error:  # whatever a class's own code raises
        raise NotServed(f"no small copy of {type(layers[0]).__name__} could be made: {type(error).__name__}: {error}") from None
    head_dim = next((heads for heads in map(_head_dim, layers) if heads), None)
    pair = isinstance(given, tuple) and len(given) == 2
    without = rotary is None and {**vars(decoder), **decoder._modules}.get("rotary_emb", ...) is None
    return Small(config, found, given, Angles(given[0], given[1], head_dim) if pair and head_dim else None, without)


def _another(layer: nn.Module, config, number: int) -> nn.Module:
    """A layer of the same class for another configuration. What that is made with beside is taken from where the layer keeps it."""
    cls = type(layer)
    assigned = [node for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))) if isinstance(node, ast.Assign)]
    pairs = [(node.value, target) for node in assigned for target in node.targets]
    kept = {value.id: to.attr for value, to in pairs if isinstance(value, ast.Name) and isinstance(to, ast.Attribute)}
    names = [*inspect.signature(cls).parameters][2:]  # behind the configuration and the number
    return cls(config, number, **{name: vars(layer)[kept[name]] for name in names if kept.get(name) in vars(layer)})


def _head_dim(layer: nn.Module) -> Any:
    """The size of attention's heads, None where it has none under these names."""
    sizes = (vars(module).get(name) for module in layer._modules.values() if module is not None for name in ("head_dim", "head_size"))
    return next((size for size in sizes if size), None)


def _fill(layer: nn.Module) -> None:
    """Weights that all count: none is zero, no norm is one."""
    with torch.no_grad():
        for module in layer.modules():
            for parameter in module._parameters.values():
                if parameter is not None and kind_of(module) == "norm":
                    parameter.uniform_(0.5, 1.5)
                elif parameter is not None:
                    parameter.normal_(0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        for buffer in layer._buffers.values():
            if buffer is not None and buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)


def _run(layer, forward, named, dtype, inputs) -> List[torch.Tensor]:
    """What a layer's forward returns for inputs, and the gradients of these and of all weights."""
    x = inputs.to(dtype).requires_grad_()
    torch.manual_seed(0)  # of a dropout in a part that is called
    found = forward(layer, **{argument_names(original_forward(layer))[0]: x}, **named)
    results = found if isinstance(found, tuple) else (found,)
    tensors = [each for each in results if isinstance(each, torch.Tensor)]
    kinds = torch.tensor([len(results) * isinstance(found, tuple), *(isinstance(each, torch.Tensor) for each in results)])
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    gradients = torch.autograd.grad(tensors[0], [x, *weights], direction, allow_unused=True)
    return [kinds, *(each.detach() for each in tensors), *(torch.zeros(()) if each is None else each for each in gradients)]


def check_on_copy(own: RecognisedLayer, small: Small, index: int, dtype: torch.dtype) -> None:
    """Compares a row's fused layer with the forward of a small copy of a layer, in training, forward and all gradients. Raises `NotServed`
    where they differ by more than rounding, or the row would not serve it."""
    if dtype not in DIFFERENCE:
        fail("dtype", dtype, "one of floating point with 16 bits or more")
    for each in dict.fromkeys((torch.float32, dtype)):  # the wider one first: the copy is cast
        layer: Any = small.layers[index].to(each).train()
        named = _arguments(own, small, layer, each)
        inputs = torch.randn(2, TOKENS, small.config.hidden_size, generator=torch.Generator().manual_seed(3))
        name = type(layer).__name__
        try:
            try:
                wanted = _run(layer, original_forward(layer), dict(named), each, inputs)
            except Exception:  # what mixes tokens in another way takes no mask of scores
                named["attention_mask"] = None
                wanted = _run(layer, original_forward(layer), dict(named), each, inputs)
        except Exception as error:  # of the class itself, with arguments that it does not know
            raise NotServed(f"a small copy of {name} does not run: {type(error).__name__}: {error}") from None
        experts = experts_in(own, layer)
        for module, forward in experts:
            bind(module, forward)
        reasons = [reason for _, reason in own.explain(layer, inputs[:1, :1].to(each)) if reason is not None]
        if any(reason.code not in ("called", "node", "eight_bits") for reason in reasons):
            raise NotServed(f"the fused layer would not serve {name}: {reasons[0].text}")
        try:
            found = _run(layer, functools.partial(_fused, own), dict(named), each, inputs)
        except Exception as error:  # of a part that is called, with arguments that it does not know
            raise NotServed(f"the fused layer of {name} does not run: {type(error).__name__}: {error}") from None
        for module, _ in experts:
            unbind(module)
        # What cancels, such as the gradient of a router that chooses one expert, is rounding alone.
        least = max(1e-9, 1e-3 * max(float(each.double().norm()) for each in wanted))
        worst = max(_difference(mine, other, least) for mine, other in zip(found, wanted))
        if not worst <= DIFFERENCE[each]:
            raise NotServed(f"the fused layer of {name} differs from its own forward by {worst:.1e} in {each}, on a small copy")


def experts_in(own: RecognisedLayer, layer: nn.Module) -> List[Tuple[nn.Module, Callable[..., Any]]]:
    """The modules of experts in a layer, each with the forward of ours for it."""
    kinds = own.experts
    found = [(module, kinds.get(type(module).__name__)) for module in layer._modules[own.family.block].modules()]  # type: ignore[union-attr]
    return [(module, made.experts_named(indices).forward) for module, indices in found if indices is not None]


def _fused(own: RecognisedLayer, layer, **named) -> Any:
    return decoder_layer_forward(own, layer, named)


def _difference(found: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=least))


def _arguments(own: RecognisedLayer, small: Small, layer: Any, dtype: torch.dtype) -> dict:
    """What a decoder calls its layers with, of a batch with padding on the left of its second row."""
    allowed = torch.ones(TOKENS, TOKENS).tril().bool().repeat(2, 1, 1, 1)
    allowed[1, :, :, :2] = False
    allowed[1, :, :2, :2] = torch.eye(2).bool()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min).to(dtype)
    of_heads = None if small.angles is None else small.angles.of_heads(_head_dim(layer) or small.angles.head_dim)
    given: Any = small.given if of_heads is None else of_heads[:2]
    given = tuple(each.expand(2, -1, -1).to(dtype) for each in given) if isinstance(given, tuple) else given
    named = {"attention_mask": mask, ANGLES.name: given, "position_ids": torch.arange(TOKENS).expand(2, -1), CACHE: None}
    forward, attention = original_forward(layer), original_forward(layer._modules[own.family.attention])
    known = {*argument_names(forward), "position_ids", *({ANGLES.name} & {*argument_names(attention)})}
    for name, shape in own.frame.factors.items():
        sizes = [{"B": 2, "S": TOKENS}.get(axis, axis) for axis in shape]
        named[name] = torch.randn(sizes, generator=torch.Generator().manual_seed(5)).to(dtype)
    of_layer = inspect.signature(forward).parameters
    tables: Dict[str, Any] = {name: {} for name in own.frame.handed.arguments() if "dict" in str(of_layer[name].annotation)}
    return {**{name: value for name, value in named.items() if name in known}, **tables}
