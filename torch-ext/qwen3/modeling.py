"""What the layers do. The Hub allows a layer class nothing but `forward`, so the rest of it is here.

A layer takes the place of one of transformers' classes whose submodules may be anything by then: LoRA, quantised, sharded,
hooked. What is exactly PyTorch's own goes to the operations; everything else is called as transformers would call it.
"""

import sys
from contextlib import nullcontext

import torch
from torch import nn

from .ops.experts import experts
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.rms_norm import rms_norm
from .ops.rotary import rotary, rotary_reference
from .ops.swiglu import mlp, swiglu

SAVED = "_bastile_"  # prefix of the attribute that keeps what `patching` replaced, on the class or module where it stood
OFF = SAVED + "off"  # on a causal LM whose forward accelerate wrapped while it was ours: reset() cannot take it out again
EXPERTS = "bastile"  # the name of our implementation among transformers' implementations of experts
PLAIN = (torch.Tensor, nn.Parameter)


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
    if listened_to or "forward" in state or parameters.get("bias") is not None or type(weight) not in PLAIN:
        return None
    return weight


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
    if type(weight) in PLAIN and type(x) in PLAIN:
        return rms_norm(x, weight, layer.variance_epsilon)
    xf = x.to(torch.float32)
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)).to(x.dtype)


def rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' `apply_rotary_pos_emb`."""
    if type(q) is torch.Tensor and type(k) is torch.Tensor and q.dtype == k.dtype == cos.dtype:
        return rotary(q, k, cos, sin, unsqueeze_dim)
    return rotary_reference(q, k, cos, sin, unsqueeze_dim)  # of different dtypes the wider one is the result's


def mlp_forward(layer, x: torch.Tensor) -> torch.Tensor:
    """Of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`."""
    children = layer.__dict__["_modules"]
    gate_proj, up_proj, down_proj = children["gate_proj"], children["up_proj"], children["down_proj"]
    act_fn = children.get("act_fn")
    if not is_silu(act_fn):
        return down_proj(layer.act_fn(gate_proj(x)) * up_proj(x))
    gate_weight, up_weight, down_weight = plain_weight(gate_proj), plain_weight(up_proj), plain_weight(down_proj)
    if gate_weight is not None and up_weight is not None and down_weight is not None and type(x) in PLAIN:
        same = gate_weight.dtype == up_weight.dtype == down_weight.dtype == x.dtype
        if same and not torch.is_autocast_enabled(x.device.type):
            return mlp(x, gate_weight, up_weight, down_weight)
    gate, up = gate_proj(x), up_proj(x)
    if type(gate) is torch.Tensor and type(up) is torch.Tensor and gate.dtype == up.dtype:
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
    device = hidden.device.type
    # Under autocast transformers' grouped GEMMs run in the dtype of the weights too.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
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


def original_forward(layer):
    """The `forward` that the class of a module has without us, as a function of the module."""
    cls = type(layer)
    return getattr(cls, SAVED + "forward", None) or cls.forward


def shift(labels, shift_labels, ignore_index):
    """[tokens]: for each token the label of the next one, or what the caller has shifted."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def causal_lm_loss(hidden, weight, bias, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """transformers' `ForCausalLMLoss`, of what goes into the head instead of what comes out of it.

    hidden: [..., features]; weight: [classes, features]; bias: [classes] or None. kwargs: for nothing, as in transformers.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (hidden, weight, bias))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = shift(labels, shift_labels, ignore_index).to(hidden.device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        loss = linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index, num_items=num_items_in_batch)
    if isinstance(num_items_in_batch, torch.Tensor):
        loss = loss.view(num_items_in_batch.shape)  # DataParallel counts in a tensor of one element, and so is the loss then
    return loss


def causal_lm_loss_of_logits(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
    """transformers' `ForCausalLMLoss`, as it is."""
    logits = logits.float().view(-1, vocab_size)
    target = shift(labels, shift_labels, ignore_index).to(logits.device)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, target, ignore_index=ignore_index)
    loss = nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


class _Headless:
    """A causal LM as its own forward sees it, except that the hidden states pass the head by and the loss takes both."""

    def __init__(self, model):
        self.whole = model

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def lm_head(self, hidden):
        return hidden

    def loss_function(self, logits, labels, vocab_size, **kwargs):
        return causal_lm_loss(logits, plain_weight(self.whole.lm_head), None, labels, **kwargs)


def loss_is_standard(model) -> bool:
    """True when nothing but `lm_head` as PyTorch's own layer and transformers' causal LM loss stand behind the hidden states."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    weight = plain_weight(model.lm_head)
    return (
        weight is not None
        and weight.shape[0] == model.config.vocab_size
        and model.loss_function is ForCausalLMLoss
        and original_forward(model).__module__.startswith("transformers.")
    )


def causal_lm_forward(model, labels, kwargs):
    """Of a causal LM. Training with labels gives the loss without logits; everything else is the model's own forward.

    That forward runs in both cases: nothing of it is copied here, and every version of it keeps its own arguments.
    """
    forward = original_forward(model)
    if labels is None or not model.training or OFF in model.__dict__ or not loss_is_standard(model):
        return forward(model, labels=labels, **kwargs)
    as_tuple = kwargs.pop("return_dict", None) is False
    output = forward(_Headless(model), labels=labels, **kwargs)
    output = type(output)(**{**output, "logits": None})
    return output.to_tuple() if as_tuple else output
