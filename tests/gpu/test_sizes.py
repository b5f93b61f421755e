"""Sizes that only a GPU can hold: more than 2^31 logits at once, and a million tokens of RMSNorm."""

import sys

import pytest
import torch

from tests.ops import adamw, common, linear_cross_entropy, rms_norm
from tests.ops.common import leaf
from tests.tolerances import RELATIVE_ERROR, assert_close, relative_error

BF16 = torch.bfloat16
GIB = 2**30


def needs(gib):
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free memory")


def filled(*shape, seed):
    """Normal random numbers, made on the device."""
    return torch.randn(shape, dtype=BF16, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("options", ({}, {"softcap": 5.0, "lse_square_scale": 1e-3}), ids=("plain", "options"))
def test_more_than_2_31_logits_in_one_chunk(ops, monkeypatch, options):
    """65536 tokens of Qwen3's vocabulary: 10^10 logits, 3.1 * 10^9 in a chunk, which takes more memory than ours may. The rows at the ends
    of each chunk against float64, the gradient of the weight against the sum of small steps."""
    needs(12)
    tokens, features, classes = 65536, 64, 151936
    module = sys.modules[f"{ops.__name__}.shared.ops.linear_head"]
    monkeypatch.setattr(module, "LARGE_CHUNK", 12 * GIB)
    chunks = list(module.chunk_slices(tokens, module.plan_chunks(tokens, classes, BF16).tokens))
    assert max(rows.stop - rows.start for rows in chunks) * classes > 2**31
    hidden = leaf(filled(tokens, features, seed=1))
    weight = leaf(filled(classes, features, seed=2) * features**-0.5)
    target = torch.randint(0, classes, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    loss = ops.linear_cross_entropy(hidden, weight, target, reduction="sum", **options)
    loss.backward()

    ends = sorted({row for rows in chunks for row in (rows.start, rows.stop - 1)})
    exact = hidden.detach()[ends].double().requires_grad_()
    linear_cross_entropy.cross_entropy_exact(exact, weight.detach().double(), target[ends], reduction="sum", **options).backward()
    assert_close(hidden.grad[ends], exact.grad, BF16, "dhidden at the ends of the chunks", 2)

    total, dweight = 0.0, torch.zeros(classes, features, device="cuda")
    for start in range(0, tokens, 2048):
        part = slice(start, start + 2048)
        small = leaf(weight)
        step = ops.linear_cross_entropy(hidden.detach()[part], small, target[part], reduction="sum", **options)
        step.backward()
        total += step.item()
        dweight += small.grad.float()
    assert abs(loss.item() - total) <= 1e-4 * total
    assert relative_error(weight.grad, dweight) <= 3 * RELATIVE_ERROR[BF16]  # four chunks, each of which rounds


@pytest.mark.parametrize("frozen", (False, True))
def test_the_memory_of_the_loss_does_not_grow_with_the_tokens(ops, frozen):
    """Beyond the inputs, their gradients and a few numbers a token; and a grid's second dimension, of 65535 blocks, holds no tokens."""
    needs(12)
    features, classes, peaks = 64, 151936, []
    weight = (filled(classes, features, seed=2) * features**-0.5).requires_grad_(not frozen)
    for tokens in (32768, 262144):
        hidden = leaf(filled(tokens, features, seed=1))
        target = torch.randint(0, classes, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
        weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = ops.linear_cross_entropy(hidden, weight, target)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(hidden.grad).all()
        peaks.append(torch.cuda.max_memory_allocated() - before - hidden.nbytes - 64 * tokens)
    logits = (0.3 if frozen else 1.6) * GIB
    assert max(peaks) <= logits + (0 if frozen else 3 * weight.nbytes) + 2**26 and peaks[1] <= peaks[0] + 2**20


@pytest.mark.parametrize("length", (4096, 128), ids=("hidden states", "heads"))
def test_rms_norm_of_a_million_tokens(ops, length):
    """2^20 tokens of 4096, as rows of a model and as heads of 128: 2^25 rows, more than a grid has blocks."""
    needs(60)
    rows = 2**32 // length
    x, weight = leaf(filled(rows, length, seed=1)), leaf(filled(length, seed=2) + 1)
    dy = filled(rows, length, seed=3)
    y = ops.rms_norm(x, weight)
    y.backward(dy)
    dweight = torch.zeros(length, dtype=torch.float64, device="cuda")
    step = rows // 64
    for i, start in enumerate(range(0, rows, step)):
        part = slice(start, start + step)
        n = x.detach()[part].double()
        n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + 1e-6)
        dweight += (dy[part].double() * n).sum(0)
        if i % 21 == 0:  # the first, the last, and two between
            exact = common.exact(x[part][-4096:]).cuda().detach().requires_grad_()
            y64 = rms_norm.rms_norm_exact(exact, weight.detach().double(), 1e-6)
            y64.backward(dy[part][-4096:].double())
            assert_close(y[part][-4096:], y64, BF16, f"y of rows before {part.stop}")
            assert_close(x.grad[part][-4096:], exact.grad, BF16, f"dx of rows before {part.stop}")
    assert_close(weight.grad, dweight, BF16, "dweight", 2)


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("count", (2**30 + 700, 2**30 - 12), ids=("two launches", "one with checks"))
def test_adamw_of_more_elements_than_one_launch_reaches(ops, dtype, count):
    """2^30 and a few: the last piece of the first launch, and the second launch; and as many as one launch may reach, in fp32 4 GiB."""
    needs(24)
    param = torch.nn.Parameter(filled(count, seed=1).to(dtype))
    param.grad = filled(count, seed=2).to(dtype)
    ends = slice(2**30 - 1000, None)
    before, grad = param.detach()[ends].clone(), param.grad[ends]
    optimizer = ops.AdamW([param], lr=0.05, weight_decay=0.2)
    optimizer.step()
    zero = torch.zeros_like(grad)
    wanted = adamw.adamw_exact(before, grad, zero, zero, 1, 0.05, (0.9, 0.999), 1e-8, 0.2)
    state = optimizer.state[param]
    for name, found, exact in zip(("param", "exp_avg", "exp_avg_sq"), (param, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
        assert_close(found[ends], exact, dtype, name)
        assert torch.isfinite(found).all()
