"""Every operation by name: its arguments at a size where kernels exist, what it computes in plain PyTorch, and the layouts that
an argument may have in memory."""

import contextlib
import functools
import importlib

import torch
from torch.nn.functional import linear, silu

from tests.ops import decoder_nodes, linear_cross_entropy, rotary
from tests.ops.common import randn
from tests.tolerances import RELATIVE_ERROR, relative_error

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HIDDEN, INNER, CLASSES, WIDTH, EXPERTS, TOP_K = 3, 1024, 96, 40, 128, 4, 2
GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 7.0}  # the experts' options
CASES = {
    "rms_norm": {"x": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "add_rms_norm": {"x": (TOKENS, HIDDEN), "residual": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "round_last_rms_norm": {"x": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "round_last_add_rms_norm": {"x": (TOKENS, HIDDEN), "residual": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "norm_add": {"branch": (TOKENS, HIDDEN), "residual": (TOKENS, HIDDEN), "weight": (HIDDEN,)},
    "norm_add_norm": {"branch": (TOKENS, HIDDEN), "residual": (TOKENS, HIDDEN), "weight": (HIDDEN,), "next_weight": (HIDDEN,)},
    "gated_rms_norm": {"x": (TOKENS, 8, WIDTH), "gate": (TOKENS, 8, WIDTH), "weight": (WIDTH,)},
    "gated_output": {"out": (TOKENS, 8, WIDTH), "gate": (TOKENS, 8, WIDTH)},
    "rotary": {"q": (2, 8, TOKENS, WIDTH), "k": (2, 8, TOKENS, WIDTH), "cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    "qk_norm_rotary": {
        **{"q": (2, TOKENS, 8, WIDTH), "k": (2, TOKENS, 8, WIDTH), "q_weight": (WIDTH,), "k_weight": (WIDTH,)},
        **{"cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    },
    "swiglu": {"gate": (TOKENS, HIDDEN), "up": (TOKENS, HIDDEN)},
    "mlp": {"x": (TOKENS, HIDDEN), "gate_weight": (INNER, HIDDEN), "up_weight": (INNER, HIDDEN), "down_weight": (HIDDEN, INNER)},
    "linear_cross_entropy": {
        **{"hidden": (TOKENS, HIDDEN), "weight": (CLASSES, HIDDEN), "target": (TOKENS,)},
        **{"bias": (CLASSES,), "class_weight": (CLASSES,)},
    },
    "linear_log_probs": {"hidden": (TOKENS, HIDDEN), "weight": (CLASSES, HIDDEN), "target": (TOKENS,), "bias": (CLASSES,)},
    "experts": {
        **{"hidden": (TOKENS, INNER), "expert": (TOKENS, TOP_K), "scores": (TOKENS, TOP_K)},
        **{"gate_up_weight": (EXPERTS, INNER, 2 * WIDTH), "down_weight": (EXPERTS, WIDTH, INNER)},
        **{"gate_up_bias": (EXPERTS, 2 * WIDTH), "down_bias": (EXPERTS, INNER)},
    },
    "norm_attention_inputs": {
        **{"x": (TOKENS, HIDDEN), "norm_weight": (HIDDEN,)},
        **{f"weights[{i}]": (4 * WIDTH, HIDDEN) for i in range(3)},
        **{"q_norm": (WIDTH,), "k_norm": (WIDTH,), "cos": (1, TOKENS, WIDTH), "sin": (1, TOKENS, WIDTH)},
    },
    "norm_mlp": {
        **{"x": (TOKENS, HIDDEN), "norm_weight": (HIDDEN,), "gate_weight": (INNER, HIDDEN), "up_weight": (INNER, HIDDEN)},
        **{"down_weight": (HIDDEN, INNER)},
    },
}
# Those that the packages for Qwen3 and GPT-OSS have: what their builds are asked for on a GPU.
OF_QWEN3_AND_GPT_OSS = tuple(name for name in CASES if not name.startswith("gated_"))
NOT_DIFFERENTIABLE = {("rotary", "cos"), ("rotary", "sin"), ("qk_norm_rotary", "cos"), ("qk_norm_rotary", "sin")}
NOT_DIFFERENTIABLE |= {("norm_attention_inputs", "cos"), ("norm_attention_inputs", "sin")}
NOT_DIFFERENTIABLE |= {("linear_cross_entropy", "target"), ("linear_cross_entropy", "class_weight")}
NOT_DIFFERENTIABLE |= {("linear_log_probs", "target")}
NOT_DIFFERENTIABLE |= {("experts", "expert")}
# Roundings beside those that a gradient has among all: with a frozen head hidden's is made in the forward pass and multiplied afterwards.
ALONE = {("linear_log_probs", "hidden"): 1.5}


# Where an operation lies that has not the name of its module.
MODULES = {"add_rms_norm": "rms_norm", "qk_norm_rotary": "rotary", "mlp": "swiglu"}
MODULES |= {"norm_add": "residual_norm", "norm_add_norm": "residual_norm"}
# Those of a decoder layer as functions of weights alone.
OF_LAYERS = {"norm_attention_inputs": decoder_nodes.plain_inputs, "norm_mlp": decoder_nodes.plain_mlp}


# Operations that are others with these options, as GPT-OSS has them; from the last package that is given.
WITH_OPTIONS = {
    "round_last_rms_norm": ("rms_norm", {"eps": 1e-5, "rounds": "last"}),
    "round_last_add_rms_norm": ("add_rms_norm", {"eps": 1e-5, "rounds": "last"}),
}


class Operations:
    """The operations of loaded packages as attributes, public ones and others; each from the first package that ships it."""

    def __init__(self, *packages):
        self.packages = packages

    def __getattr__(self, name):
        if name in WITH_OPTIONS:
            operation, options = WITH_OPTIONS[name]
            found = functools.partial(getattr(Operations(self.packages[-1]), operation), **options)
            setattr(self, name, found)
            return found
        for package in self.packages:
            with contextlib.suppress(ModuleNotFoundError):
                if name in OF_LAYERS:
                    found = OF_LAYERS[name](package)
                    setattr(self, name, found)
                    return found
                found = getattr(importlib.import_module(f"{package.__name__}.shared.ops.{MODULES.get(name, name)}"), name)
                setattr(self, name, found)  # so that torch.compile need not trace an import
                return found
        raise AttributeError(f"none of {self.packages} ships the operation {name}")


def operations(*packages) -> Operations:
    return Operations(*packages)


# ---------------------------------------------------------------- what each computes
def norm(x, weight, eps=1e-6):
    """Normalised in float32 or wider, as the model does it."""
    xf = x.to(torch.promote_types(x.dtype, FP32))
    return weight * (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_rms_norm(x, weight):
    return norm(x, weight)


def plain_add_rms_norm(x, residual, weight):
    return norm(x + residual, weight), x + residual


def round_last_norm(x, weight, eps=1e-5):
    xf = x.to(torch.promote_types(x.dtype, FP32))
    return (weight * (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def plain_round_last_rms_norm(x, weight):
    return round_last_norm(x, weight)


def plain_round_last_add_rms_norm(x, residual, weight):
    return round_last_norm(x + residual, weight), x + residual


def plain_norm_add(branch, residual, weight):
    return residual + round_last_norm(branch, weight, 1e-6)


def plain_norm_add_norm(branch, residual, weight, next_weight):
    total = plain_norm_add(branch, residual, weight)
    return round_last_norm(total, next_weight, 1e-6), total


def plain_gated_rms_norm(x, gate, weight):
    return norm(x, weight) * silu(gate)


def plain_gated_output(out, gate):
    return out * torch.sigmoid(gate)


def plain_rotary(q, k, cos, sin):
    return rotary.rotary_exact(q, k, cos, sin, 1)


def plain_qk_norm_rotary(q, k, q_weight, k_weight, cos, sin):
    return rotary.rotary_exact(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin, 1)


def plain_swiglu(gate, up):
    return silu(gate) * up


def plain_mlp(x, gate_weight, up_weight, down_weight):
    return linear(silu(linear(x, gate_weight)) * linear(x, up_weight), down_weight)


def plain_linear_cross_entropy(hidden, weight, target, bias=None, class_weight=None, **options):
    return linear_cross_entropy.cross_entropy_exact(hidden.flatten(0, -2), weight, target.flatten(), bias, class_weight=class_weight,
                                                    **options)


def plain_linear_log_probs(hidden, weight, target, bias=None, rounded=False, temperature=1.0, softcap=None, scale=1.0,
                           skip_ignored=None):
    """rounded: as `cross_entropy_exact`."""
    z = linear(hidden, weight, bias)
    z = (z.double() if rounded else z) * scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    chosen = z.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(target == -100, 0.0)


def plain_norm_attention_inputs(x, norm_weight, q_rows, k_rows, v_rows, q_norm, k_norm, cos, sin):
    n = norm(x, norm_weight)
    width = q_norm.shape[0]
    q, k, v = (linear(n, rows).view(1, x.shape[:-1].numel(), rows.shape[0] // width, width) for rows in (q_rows, k_rows, v_rows))
    return (*plain_qk_norm_rotary(q, k, q_norm, k_norm, cos, sin), v.transpose(1, 2), x)


def plain_norm_mlp(x, norm_weight, gate_weight, up_weight, down_weight):
    return x + plain_mlp(norm(x, norm_weight), gate_weight, up_weight, down_weight)


def plain_experts(hidden, expert, scores, gate_up_weight, down_weight, gate_up_bias, down_bias):
    """GPT-OSS's, every expert on every token, which works under every transform."""
    alpha, limit, out = GPT_OSS["alpha"], GPT_OSS["limit"], 0
    for e in range(gate_up_weight.shape[0]):
        gate, up = (hidden @ gate_up_weight[e] + gate_up_bias[e]).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = ((up + 1) * gate * torch.sigmoid(alpha * gate)) @ down_weight[e] + down_bias[e]
        out = out + (scores * (expert == e)).sum(-1, keepdim=True) * y
    return out.to(hidden.dtype)


PLAIN = {name.removeprefix("plain_"): function for name, function in list(globals().items()) if name.startswith("plain_")}


# ---------------------------------------------------------------- running them
def arguments(operation, dtype=BF16, tokens=TOKENS, device="cpu"):
    """Tensors for every argument, of order 1, products of order 1."""
    found = {}
    for i, (name, shape) in enumerate(CASES[operation].items()):
        shape = tuple(tokens if n == TOKENS else n for n in shape)
        scale = shape[1] ** -0.5 if len(shape) > 1 and "weight" in name else 1.0
        found[name] = randn(*shape, dtype=dtype, device=device, seed=i, scale=scale)
    if operation in ("linear_cross_entropy", "linear_log_probs"):
        found["target"] = torch.arange(tokens, device=device) % CLASSES
    if operation == "linear_cross_entropy":
        found["class_weight"] = found["class_weight"].float().abs() + 0.5
    if operation == "experts":
        found["expert"] = expert_ids(tokens, device)
    return found


def expert_ids(tokens, device):
    """[tokens, TOP_K]: different experts for each token; every fifth entry is no expert."""
    number = torch.arange(tokens * TOP_K, device=device).view(tokens, TOP_K)
    return torch.where(number % 5 == 4, EXPERTS, number * 3 % EXPERTS)


def run(ops, operation, found, **options):
    """The results of an operation as a tuple. ops: of `operations`; options: what is no tensor."""
    function = getattr(ops, operation)
    if operation == "norm_attention_inputs":
        weights = [tensor for name, tensor in found.items() if name.startswith("weights")]
        rest = [found[name] for name in ("q_norm", "k_norm", "cos", "sin")]
        results = function(found["x"], found["norm_weight"], weights, *rest,
                           (1, found["cos"].shape[1] if found["cos"].dim() == 3 else TOKENS))
    elif operation == "linear_cross_entropy":
        tensors = {name: found[name] for name in ("bias", "class_weight") if name in found}
        results = function(found["hidden"], found["weight"], found["target"], **tensors, **options)
    elif operation == "linear_log_probs":
        results = function(**found, **options).log_probs
    elif operation == "experts":
        results = function(**found, **GPT_OSS, **options)
    else:
        results = function(**found, **options)
    return results if isinstance(results, tuple) else (results,)


def plain(operation, found, **options):
    if operation == "linear_cross_entropy":
        results = PLAIN[operation](**found, **options)
    else:
        results = PLAIN[operation](*found.values(), **options)
    return results if isinstance(results, tuple) else (results,)


def assert_right(results, expected, dtype, what, factor=3):
    """factor: how many roundings more than one the operations have."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape, what
        assert relative_error(result, wanted) <= factor * RELATIVE_ERROR[dtype], what


def exact_arguments(found):
    return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}


def differentiable(operation, found) -> list:
    """The names of the arguments that an operation has gradients for."""
    return [name for name in found if (operation, name) not in NOT_DIFFERENTIABLE]


def gradients(ops, operation, found, change=lambda name, tensor: tensor):
    """Results, and the gradient of every argument, of tensors that `change` has laid out otherwise."""
    passed = {name: change(name, tensor) for name, tensor in found.items()}
    passed = {name: t.detach().requires_grad_((operation, name) not in NOT_DIFFERENTIABLE) for name, t in passed.items()}
    results = run(ops, operation, passed)
    upstream = [randn(*r.shape, dtype=r.dtype, device=r.device, seed=20 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, [change("upstream", g) for g in upstream])
    return [*results, *[tensor.grad for tensor in passed.values() if tensor.requires_grad]]


# ---------------------------------------------------------------- layouts
def strided(tensor):
    """Every second element of the last dimension."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def sliced(tensor):
    """A part of longer rows, whose length no vector load divides."""
    return torch.cat((tensor, *[tensor[..., :1]] * 3), -1)[..., : tensor.shape[-1]]


def transposed(tensor):
    """In memory, the dimensions are the other way round."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def misaligned(tensor):
    """One element behind a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    start = 1 + (-memory.data_ptr() % 16) // tensor.element_size()
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def expanded(tensor):
    """The same numbers in all of the first dimension, stored once."""
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS = (strided, sliced, transposed, misaligned, expanded)


# ---------------------------------------------------------------- what autograd may rely on
def step(ops, operation, found, needed=None, **options):
    """(results, their upstream gradients, gradients by name) of one forward and backward pass. needed: the names of the arguments
    that require a gradient; by default all that can have one."""
    needed = differentiable(operation, found) if needed is None else needed
    leaves = {name: tensor.detach().requires_grad_(name in needed) for name, tensor in found.items()}
    results = run(ops, operation, leaves, **options)
    upstream = [randn(*r.shape, dtype=r.dtype, device=r.device, seed=20 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, upstream, inputs=[leaves[name] for name in needed])
    return results, upstream, {name: leaf.grad for name, leaf in leaves.items()}


def check_nothing_is_overwritten(ops, operation, dtype, device):
    """Inputs and incoming gradients keep their numbers, and no two results or gradients share memory."""
    found = arguments(operation, dtype, device=device)
    before = {name: tensor.clone() for name, tensor in found.items()}
    leaves = {name: tensor.requires_grad_((operation, name) not in NOT_DIFFERENTIABLE) for name, tensor in found.items()}
    results = run(ops, operation, leaves)
    kept = [result.detach().clone() for result in results]
    upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
    given = [gradient.clone() for gradient in upstream]
    torch.autograd.backward(results, upstream, retain_graph=True)
    first = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    torch.autograd.backward(results, upstream)  # adds to what is there
    for name in first:
        assert torch.equal(leaves[name].grad, first[name] + first[name]), f"{operation}: the second gradient of {name}"
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves.items()), f"{operation} writes into an input"
    assert all(map(torch.equal, upstream, given)), f"{operation} writes into an incoming gradient"
    assert all(map(torch.equal, results, kept)), f"{operation}'s backward writes into its results"
    passed_on = (operation == "norm_attention_inputs") * [results[-1]]  # x itself, by its contract
    own = [r for r in results if not any(r is p for p in passed_on)] + [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    memory = [t.untyped_storage().data_ptr() for t in (*own, *upstream, *leaves.values())]
    assert len(set(memory)) == len(memory), f"{operation}: two tensors share memory"


def check_a_second_backward_pass(ops, operation, dtype, device):
    """With retain_graph the same bits again, and what the first pass gave stays."""
    found = arguments(operation, dtype, device=device)
    leaves = {name: tensor.requires_grad_((operation, name) not in NOT_DIFFERENTIABLE) for name, tensor in found.items()}
    needed = [leaves[name] for name in differentiable(operation, found)]
    results = run(ops, operation, leaves)
    upstream = [randn(*r.shape, dtype=r.dtype, device=device, seed=20 + i) for i, r in enumerate(results)]
    first = torch.autograd.grad(results, needed, upstream, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(results, needed, upstream, retain_graph=True)
    third = torch.autograd.grad(results, needed, upstream)
    assert all(map(torch.equal, first, kept)) and all(map(torch.equal, second, kept)) and all(map(torch.equal, third, kept))


def check_that_one_gradient_alone_is_the_same(ops, operation, dtype, device):
    """Each gradient asked for alone is, but for rounding, what it is among all, and the others are None."""
    found = arguments(operation, dtype, device=device)
    _, _, all_of_them = step(ops, operation, found)
    for name in differentiable(operation, found):
        _, _, alone = step(ops, operation, found, [name])
        found_alone = alone.pop(name)
        assert found_alone is not None, f"{operation}: no gradient of {name} alone"
        error = relative_error(found_alone, all_of_them[name])
        bound = RELATIVE_ERROR[dtype] * ALONE.get((operation, name), 1)
        assert error <= bound, f"{operation}: the gradient of {name} alone has an error of {error:.2e}"
        assert all(gradient is None for gradient in alone.values())


def check_the_same_bits_on_every_run(ops, operation, dtype, device):
    """In memory that is NaN before it is written."""
    found = arguments(operation, dtype, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [step(ops, operation, found) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    for results, _, gradients in runs:
        found = [*results, *filter(lambda g: g is not None, gradients.values())]
        expected = [*runs[0][0], *filter(lambda g: g is not None, runs[0][2].values())]
        assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(found, expected, strict=True)), operation


def check_that_a_second_derivative_is_refused(ops, operation, dtype, device):
    """With an incoming gradient that depends on the results, and with one that does not; the gradients are what they are without it."""
    found = arguments(operation, dtype, device=device)
    needed = [found[name].requires_grad_() for name in differentiable(operation, found)]
    results = run(ops, operation, found)
    for total in (sum(result.float().square().sum() for result in results), sum(result.float().sum() for result in results)):
        plain_gradients = torch.autograd.grad(total, needed, retain_graph=True)
        check_first_and_no_second_derivative(operation, torch.autograd.grad(total, needed, create_graph=True), plain_gradients)


def check_first_and_no_second_derivative(operation, gradients, wanted):
    """gradients: of a pass with create_graph=True, each of which has the bits of one without and cannot be differentiated."""
    for gradient, mine in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, mine), operation
        try:
            gradient.float().sum().backward(retain_graph=True)
        except RuntimeError as error:
            assert "trying to differentiate twice: " in str(error) and "torch.func" in str(error), error
        else:
            raise AssertionError(f"{operation} has a second derivative")


AUTOGRAD_CHECKS = (
    check_nothing_is_overwritten,
    check_a_second_backward_pass,
    check_that_one_gradient_alone_is_the_same,
    check_the_same_bits_on_every_run,
    check_that_a_second_derivative_is_refused,
)
