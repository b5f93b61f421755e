"""Liger-Kernel 0.8.5's own kernels beside ours: `python -m tests.liger_reference <package folder> cpu` in Triton's interpreter, or `cuda`.

Run as a process of its own, because TRITON_INTERPRET must be set before Triton is imported. Half of the cases need a GPU: Triton's
interpreter
does not know what those kernels call. Prints one line of JSON: for each case in which Liger is
wrong, by name, whether it still is, and whether ours is right.
"""

import json
import os
import sys
import warnings
from pathlib import Path

if sys.argv[2:] == ["cpu"]:
    os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402

CASES, GPU_CASES = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def gpu_case(function):
    GPU_CASES[function.__name__] = function
    return function


def close(a, b, tolerance=1e-4):
    return bool(torch.isfinite(a).all()) and float((a.double() - b.double()).norm() / b.double().norm()) < tolerance


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(torch.get_default_device())


# ---------------------------------------------------------------- where both are right, which shows that Liger runs at all
@gpu_case
def both_rms_norm(names):
    x, w = randn(4, 48), randn(48, seed=1)
    return close(names.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma"), torch.nn.functional.rms_norm(x, (48,), w + 1, 1e-6))


@gpu_case
def both_swiglu(names):
    a, b = randn(4, 48).requires_grad_(), randn(4, 48, seed=1).requires_grad_()
    a64, b64 = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    names.LigerSiLUMulFunction.apply(a * 1, b * 1).sum().backward()
    (torch.nn.functional.silu(a64) * b64).sum().backward()
    return close(a.grad, a64.grad) and close(b.grad, b64.grad)


@case
def both_cross_entropy(names):
    logits, target = randn(4, 48), torch.tensor([3, -100, 0, 47])
    wanted = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    found = names.LigerCrossEntropyFunction.apply(logits.clone().requires_grad_(), target, None, -100, 0.0, 0.1)[0]
    return close(found.detach(), wanted)


@case
def both_jsd(names):
    x, y = randn(4, 48).log_softmax(-1), randn(4, 48, seed=1).log_softmax(-1)
    m = torch.log(0.3 * y.exp() + 0.7 * x.exp())
    wanted = (0.3 * y.exp() * (y - m) + 0.7 * x.exp() * (x - m)).sum() / 4
    return close(names.LigerJSDFunction.apply(x.requires_grad_(), y, None, 0.3).detach(), wanted.detach())


@gpu_case
def both_layer_norm(names):
    x, w, b = randn(4, 48), randn(48, seed=1), randn(48, seed=2)
    return close(names.LigerLayerNormFunction.apply(x, w, b, 1e-5), torch.nn.functional.layer_norm(x, (48,), w, b))


@case
def both_linear_jsd(names):
    x, w, t, v = randn(6, 16), randn(32, 16, seed=1), randn(6, 8, seed=2), randn(32, 8, seed=3)
    a, b = (x @ w.t()).log_softmax(-1), (t @ v.t()).log_softmax(-1)
    m = torch.log(0.5 * a.exp() + 0.5 * b.exp())
    wanted = (0.5 * b.exp() * (b - m) + 0.5 * a.exp() * (a - m)).sum() / 6
    return close(names.LigerFusedLinearJSDFunction.apply(x.requires_grad_(), w, t, v).detach(), wanted.detach())


# ---------------------------------------------------------------- where Liger 0.8.5 is wrong
@case
def llama4_rope_takes_every_row_for_the_first(names):
    q, k = randn(2, 4, 2, 8), randn(2, 4, 2, 8, seed=1)
    freqs = torch.polar(torch.ones(2, 4, 4), randn(2, 4, 4, seed=2))
    wanted = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (4, 2))) * freqs.unsqueeze(2)).flatten(3)
    return close(names.LigerLlama4RopeFunction.apply(q.clone(), k.clone(), freqs)[0], wanted)


@case
def cross_entropy_overwrites_the_logits(names):
    logits = randn(4, 16).requires_grad_()
    kept = logits.detach().clone()
    names.LigerCrossEntropyFunction.apply(logits, torch.arange(4), None)[0].backward()
    return torch.equal(logits.detach(), kept)


@case
def cross_entropy_zeroes_ignored_rows_without_gradients(names):
    logits = randn(4, 16)
    kept = logits.clone()
    with torch.no_grad():
        names.LigerCrossEntropyFunction.apply(logits, torch.tensor([0, -100, 2, 3]), None)
    return torch.equal(logits, kept)


@gpu_case
def swiglu_has_a_wrong_second_backward_pass(names):
    return second_backward(names.LigerSiLUMulFunction)


@gpu_case
def geglu_has_a_wrong_second_backward_pass(names):
    return second_backward(names.LigerGELUMulFunction)


def second_backward(function):
    a, b = randn(3, 16).requires_grad_(), randn(3, 16, seed=1).requires_grad_()
    y = function.apply(a * 1, b * 1)
    first = [g.clone() for g in torch.autograd.grad(y, (a, b), torch.ones_like(y), retain_graph=True)]
    return all(map(close, torch.autograd.grad(y, (a, b), torch.ones_like(y)), first))


@gpu_case
def group_norm_loses_a_deviation_beside_a_large_mean(names):
    x = randn(1, 4, 512) + 1000
    found = names.LigerGroupNormFunction.apply(x, torch.ones(4), torch.zeros(4), 4, 1, 1e-6)
    return close(found, torch.nn.functional.group_norm(x.double(), 1, eps=1e-6), 1e-3)


@gpu_case
def poly_norm_refuses_a_bias_of_shape_one(names):
    x, w, b = randn(3, 16).requires_grad_(), torch.full((3,), 1 / 3).requires_grad_(), torch.ones(1).requires_grad_()
    names.LigerPolyNormFunction.apply(x, w, b).sum().backward()
    return b.grad.shape == (1,)


@case
def jsd_is_nan_where_a_probability_is_0(names):
    x, y = (randn(2, 16, seed=i) for i in range(2))
    x[0, 3] = y[0, 3] = -float("inf")
    x, y = x.log_softmax(-1), y.log_softmax(-1)
    return bool(names.LigerJSDFunction.apply(x.requires_grad_(), y).isfinite())


@case
def tvd_raises_where_all_rows_are_ignored(names):
    p, q = randn(2, 16).softmax(-1), randn(2, 16, seed=1).softmax(-1)
    return names.LigerTVDLossFunction.apply(p.requires_grad_(), q, torch.tensor([-100, -100])) == 0


@case
def softmax_refuses_long_rows(names):
    x = randn(1, 65537)
    return close(names.LigerSoftmaxFunction.apply(x), x.softmax(-1))


@case
def a_tiled_mlp_does_not_train_behind_a_frozen_input(names):
    layer = torch.nn.Linear(8, 8)
    names.apply_tiled_mlp(lambda module, x: module(x), layer, randn(1, 16, 8), 2).sum().backward()
    return layer.weight.grad is not None


def right(function, names):
    """True, False, or the error that it raises."""
    try:
        return bool(function(names))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder: str, device: str) -> None:
    torch.set_default_device(device)
    import liger_kernel.ops as theirs
    from kernels import get_local_kernel

    ours = get_local_kernel(Path(folder), backend=device).liger_names
    cases = CASES | GPU_CASES if device == "cuda" else CASES
    print(json.dumps({name: {"liger": right(function, theirs), "ours": right(function, ours)} for name, function in cases.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
