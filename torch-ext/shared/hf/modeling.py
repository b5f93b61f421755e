"""What the layers do. The Hub allows a layer class nothing but `forward`, so the rest of it is here.

A layer takes the place of one of transformers' classes whose submodules may be anything by then: LoRA, quantised, sharded,
hooked. What is exactly PyTorch's own goes to the operations; everything else is called as transformers would call it.
"""

import dataclasses
import sys
from contextlib import nullcontext
from typing import Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.common import autocasts
from ..ops.cross_entropy import LinearCrossEntropyOutput, Options, cross_entropy_of_logits
from ..ops.experts import experts
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.rms_norm import rms_norm
from ..ops.rotary import rotary, rotary_reference
from ..ops.swiglu import mlp, swiglu
from ..runtime.device import PLAIN

SAVED = "_bastile_"  # prefix of the attribute that keeps what `patching` replaced, on the class or module where it stood
OFF = SAVED + "off"  # on a causal LM whose forward accelerate wrapped while it was ours: reset() cannot take it out again
LAYER = SAVED + "layer"  # on a forward of ours: the forward itself, so a wrapper to which functools copies it is told apart
EXPERTS = "bastile"  # the name of our implementation among transformers' implementations of experts
FSDP = "torch.distributed.fsdp"
LOSS_OPTIONS = SAVED + "loss_options"  # what apply() was told about the loss, on the class of the causal LM
# Of the loss, beside transformers' own ignore_index, num_items_in_batch and shift_labels; see `linear_cross_entropy`.
OPTIONS = ("class_weight", "reduction", *(name for name in Options._fields if name != "ignore_index"))


def is_plain(tensor) -> bool:
    """True for an ordinary tensor or parameter, and for what torch.export puts in its place while it traces."""
    kind = type(tensor)
    return kind in PLAIN or (kind is FakeTensor and torch.compiler.is_compiling())


def all_are_listened_to() -> bool:
    """True while someone has hooks on every module of the process, as torch.utils.flop_counter has: then each must be called."""
    hooks = nn.modules.module
    return bool(
        hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks or hooks._global_backward_pre_hooks
    )


def own_forward(module):
    """The function that is all a call of a module runs, its class's or the one that was put on it; None while someone listens to it."""
    state = module.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return None
    forward = state.get("forward")
    return type(module).forward if forward is None else getattr(forward, "__func__", None)


def plain_weight(layer):
    """The weight of a torch.nn.Linear whose call does nothing but multiply by it, an ordinary tensor; None for all else.

    Everything is read from `__dict__`: a look-up of an attribute on a module costs 0.3 us.
    """
    if type(layer) is not nn.Linear:
        return None
    state = layer.__dict__
    parameters = state["_parameters"]
    weight = parameters.get("weight")
    listened_to = state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]
    if listened_to or "forward" in state or parameters.get("bias") is not None or not is_plain(weight):
        return None
    return weight


def sharded_weight(layer):
    """The weight of a torch.nn.Linear that FSDP2 shards as a unit of its own, with which nobody else does anything; None for all
    else. It is whole while the layer is called, and only then."""
    classes, state = type(layer).__mro__, layer.__dict__
    if len(classes) < 3 or classes[2] is not nn.Linear or not classes[1].__module__.startswith(FSDP):
        return None
    hooks = [*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()]
    of_fsdp = all((getattr(hook, "__module__", None) or "").startswith(FSDP) for hook in hooks)
    listened_to = not of_fsdp or state["_backward_hooks"] or state["_backward_pre_hooks"]
    if listened_to or "forward" in state or layer.bias is not None or torch.compiler.is_compiling():
        return None
    return layer.weight


def call_with(function, layer, x):
    """Calls a layer, and with it the hooks on it, with another forward."""
    layer.__dict__["forward"] = function
    try:
        return layer(x)
    finally:
        del layer.__dict__["forward"]


def is_silu(activation) -> bool:
    """True for PyTorch's and transformers' SiLU modules, unless someone listens to them."""
    cls = type(activation)
    if cls is not nn.SiLU and cls.__name__ != "SiLUActivation":
        return False
    state = activation.__dict__
    return not (state["_forward_hooks"] or state["_forward_pre_hooks"])


def rms_norm_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `weight` and `variance_epsilon`."""
    weight = layer.weight
    if is_plain(weight) and is_plain(x):
        return rms_norm(x, weight, layer.variance_epsilon)
    xf = x.to(torch.float32)
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)).to(x.dtype)


def rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' `apply_rotary_pos_emb`."""
    if is_plain(q) and is_plain(k) and q.dtype == k.dtype == cos.dtype:
        return rotary(q, k, cos, sin, unsqueeze_dim)
    return rotary_reference(q, k, cos, sin, unsqueeze_dim)  # of different dtypes the wider one is the result's


def mlp_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""
    children = layer.__dict__["_modules"]
    gate_proj, up_proj, down_proj = children["gate_proj"], children["up_proj"], children["down_proj"]
    act_fn = children.get("act_fn")
    if not is_silu(act_fn) or all_are_listened_to():
        return down_proj(layer.act_fn(gate_proj(x)) * up_proj(x))
    gate_weight, up_weight, down_weight = plain_weight(gate_proj), plain_weight(up_proj), plain_weight(down_proj)
    if gate_weight is not None and up_weight is not None and down_weight is not None and is_plain(x):
        same = gate_weight.dtype == up_weight.dtype == down_weight.dtype == x.dtype
        if same and not autocasts(x.device):
            return mlp(x, gate_weight, up_weight, down_weight)
    gate, up = gate_proj(x), up_proj(x)
    if is_plain(gate) and is_plain(up) and gate.dtype == up.dtype:
        return down_proj(swiglu(gate, up))
    return down_proj(nn.functional.silu(gate) * up)


def _experts_gate(layer):
    """The gate of a module of experts as `experts` takes it, or None for one that it does not know.

    `_apply_gate` is what transformers' implementations call between the two projections: its own default one for gate before up,
    and GPT-OSS's, which is told by its two constants.
    """
    gate = getattr(type(layer), "_apply_gate", None)
    module = getattr(gate, "__module__", "")
    if gate is None or not getattr(layer, "has_gate", False) or getattr(layer, "has_post_expert_norm", False):
        return None
    if module == "transformers.integrations.moe":
        known = layer.is_concatenated and is_silu(layer.act_fn)
        return {"interleaved": False, "alpha": 0.0, "limit": float("inf")} if known else None
    if module.startswith("transformers.models.gpt_oss.") and not layer.is_concatenated:
        return {"interleaved": True, "alpha": layer.alpha, "limit": layer.limit}
    return None


def _known_experts(layer, hidden, index, scores):
    """The result of `experts` for a module of transformers' with `gate_up_proj` and `down_proj`; None when it is not for it."""
    gate = _experts_gate(layer)
    if gate is None or index is None or scores is None:
        return None
    weights = [layer.gate_up_proj, layer.down_proj]
    if layer.has_bias:
        weights += [layer.gate_up_proj_bias, layer.down_proj_bias]
    dtype = weights[0].dtype
    if not all(type(tensor) in PLAIN for tensor in (hidden, index, scores, *weights)) or any(w.dtype != dtype for w in weights):
        return None
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    # Under autocast transformers' grouped GEMMs run in the dtype of the weights too.
    with torch.autocast(hidden.device.type, enabled=False) if autocasts(hidden.device) else nullcontext():
        result = experts(flat, index, scores, *weights, transposed=layer.is_transposed, **gate)
    return result.view(hidden.shape).to(hidden.dtype)


def experts_forward(layer, hidden, index, scores):
    """Of a class that transformers' `use_experts_implementation` decorates.

    hidden: [..., hidden]; index: [tokens, top-k], in which an id from the number of experts on is none of them; scores: [tokens, top-k].
    """
    found = _known_experts(layer, hidden, index, scores)
    return original_forward(layer)(layer, hidden, index, scores) if found is None else found


def experts_implementation(layer, hidden, index, scores):
    """The same as one of transformers' implementations of experts: what it does not know, transformers' grouped_mm does."""
    found = _known_experts(layer, hidden, index, scores)
    if found is not None:
        return found
    return sys.modules["transformers.integrations.moe"].grouped_mm_experts_forward(layer, hidden, index, scores)


def mark_forwards(*layers) -> None:
    """Marks the forwards of layer classes as this package's own, so that they are told from what others put on a module."""
    for layer in layers:
        setattr(layer.forward, LAYER, layer.forward)


def is_marked(function) -> bool:
    """Tells whether a function is a forward of this package; a wrapper to which functools copied the mark is not."""
    return function is not None and getattr(function, LAYER, None) is function


def original_forward(layer):
    """The `forward` that the class of a module has without us, as a function of the module."""
    cls = type(layer)
    return getattr(cls, SAVED + "forward", None) or cls.forward


def shift(labels, shift_labels, ignore_index):
    """[tokens]: for each token the label of the next one, or what the caller has shifted."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _on(device, options):
    """The options with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _items(num_items_in_batch, kwargs):
    """The number of items under transformers' name, `num_items_in_batch`, or under that of `linear_cross_entropy`, `num_items`. Raises
    ValueError when it is given under both."""
    num_items = kwargs.get("num_items")
    if num_items is None or num_items_in_batch is None:
        return num_items_in_batch if num_items is None else num_items
    raise ValueError("num_items and num_items_in_batch are both given, expected one of them: they are two names of the same number")


def _like_items(found, num_items):
    """The result of a loss whose items are counted: DataParallel does it in a tensor of one element, and so is the loss then."""
    if not isinstance(num_items, torch.Tensor):
        return found
    if isinstance(found, LinearCrossEntropyOutput):
        return found._replace(loss=found.loss.view(num_items.shape))
    return found.view(num_items.shape)


def causal_lm_loss(hidden, weight, bias, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """transformers' `ForCausalLMLoss`, of what goes into the head instead of what comes out of it; float32 as that is.

    hidden: [..., features]; weight: [classes, features]; bias: [classes] or None. kwargs: `OPTIONS`, `num_items`, which
    is num_items_in_batch, and others, which are ignored, as in transformers. Returns what `linear_cross_entropy` returns.
    """
    num_items = _items(num_items_in_batch, kwargs)
    device = hidden.device.type
    autocast = autocasts(hidden.device)
    if autocast:
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (hidden, weight, bias))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = shift(labels, shift_labels, ignore_index).to(hidden.device)
    options = _on(hidden.device, {name: kwargs[name] for name in OPTIONS if name in kwargs})
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        found = linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index, num_items=num_items, **options)
    return _like_items(_in_float32(found) if hidden.dtype == torch.float64 else found, num_items)


def _in_float32(found):
    """A loss in the dtype that transformers' is in, whatever the model's."""
    if isinstance(found, LinearCrossEntropyOutput):
        floats = {name: value.float() for name, value in found._asdict().items() if value is not None and value.is_floating_point()}
        return found._replace(**floats)
    return found.float()


def causal_lm_loss_of_logits(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """The same of logits [..., vocab_size], in PyTorch and in float32."""
    num_items = _items(num_items_in_batch, kwargs)
    logits = logits.float().view(-1, vocab_size)
    target = shift(labels, shift_labels, ignore_index).to(logits.device)
    options = _on(logits.device, {name: kwargs[name] for name in OPTIONS if name in kwargs})
    if options:
        found = cross_entropy_of_logits(logits, target, ignore_index=ignore_index, num_items=num_items, **options)
        return _like_items(found, num_items)
    if num_items is None:
        return nn.functional.cross_entropy(logits, target, ignore_index=ignore_index)
    loss = nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    return loss / (num_items.to(loss.device) if isinstance(num_items, torch.Tensor) else num_items)


class _WithLoss:
    """A causal LM as its own forward sees it, except for the loss, which is ours, with options. found: what it returned."""

    def __init__(self, model, options):
        self.whole, self.options, self.found = model, options, None

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def loss_function(self, logits, labels, vocab_size, **kwargs):
        self.found = self.loss(logits, labels, vocab_size, kwargs)
        return self.found.loss if isinstance(self.found, LinearCrossEntropyOutput) else self.found

    def loss(self, logits, labels, vocab_size, kwargs):
        return causal_lm_loss_of_logits(logits, labels, vocab_size, **kwargs, **self.options)


class _Headless(_WithLoss):
    """The same, and the hidden states pass the head by and the loss takes both."""

    def lm_head(self, hidden):
        return hidden

    def loss(self, logits, labels, vocab_size, kwargs):
        head = self.whole.lm_head
        weight = plain_weight(head)
        if weight is not None:
            return causal_lm_loss(logits, weight, None, labels, **kwargs, **self.options)
        return call_with(lambda hidden: causal_lm_loss(hidden, head.weight, None, labels, **kwargs, **self.options), head, logits)


OUTPUTS = {}  # by the class of a model's output: the same with metrics


def output_with_metrics(cls):
    """The class of a model's output, with a field for each of what `linear_cross_entropy` returns beside the loss."""
    if cls not in OUTPUTS:
        fields = [(name, Optional[torch.Tensor], None) for name in LinearCrossEntropyOutput._fields[1:]]
        made = OUTPUTS[cls] = dataclasses.make_dataclass(f"{cls.__name__}AndMetrics", fields, bases=(cls,))
        made.__module__ = __name__  # where pickle finds it
        globals()[made.__name__] = made
    return OUTPUTS[cls]


def loss_is_standard(model) -> bool:
    """True when transformers' causal LM loss stands behind the logits, in transformers' own forward."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss and original_forward(model).__module__.startswith("transformers.")


def head_is_plain(model) -> bool:
    """True when nothing but PyTorch's own layer, sharded or not, stands between the hidden states and the logits."""
    weight = plain_weight(model.lm_head)
    if weight is None:
        weight = sharded_weight(model.lm_head)
    return weight is not None and not all_are_listened_to() and weight.shape[0] == model.config.vocab_size


def causal_lm_forward(model, labels, kwargs):
    """Of a causal LM. Training with labels gives the loss without logits; everything else is the model's own forward.

    That forward runs in both cases: nothing of it is copied here, and every version of it keeps its own arguments. kwargs: those
    and `OPTIONS`, which stand before what `apply` was given, and `skip_logits`: whether a loss comes without logits, in training
    mode by default.
    """
    forward = original_forward(model)
    if labels is None or OFF in model.__dict__ or not loss_is_standard(model):
        return forward(model, labels=labels, **kwargs)
    if "num_items" in kwargs:
        kwargs["num_items_in_batch"] = _items(kwargs.get("num_items_in_batch"), kwargs)
        del kwargs["num_items"]
    options = dict(getattr(model, LOSS_OPTIONS, ()))
    for name in (*OPTIONS, "skip_logits"):
        if name in kwargs:
            options[name] = kwargs.pop(name)
    if "ignore_index" in options:
        kwargs.setdefault("ignore_index", options.pop("ignore_index"))
    skip_logits = options.pop("skip_logits", None)
    skip_logits = model.training if skip_logits is None else skip_logits
    if skip_logits and head_is_plain(model):
        seen = _Headless(model, options)
    elif options:
        skip_logits, seen = False, _WithLoss(model, options)
    else:
        return forward(model, labels=labels, **kwargs)
    as_tuple = kwargs.pop("return_dict", None) is False
    output = forward(seen, labels=labels, **kwargs)
    cls, fields = type(output), dict(output)
    if skip_logits:
        fields["logits"] = None
    if isinstance(seen.found, LinearCrossEntropyOutput):
        cls = output_with_metrics(cls)
        fields.update(seen.found._asdict())
    output = cls(**fields)
    return output.to_tuple() if as_tuple else output
