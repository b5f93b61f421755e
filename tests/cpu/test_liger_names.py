"""Liger's own names over our operations: the signatures of its version 0.8.5, its modules' parameters, and what each computes."""

import importlib
import inspect
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ops.common import randn

FUNCTIONS = "liger_kernel.ops"
WRAPPERS = {"liger_kernel.transformers.functional": "liger_", "liger_kernel.transformers": "liger_"}
CONFIG = types.SimpleNamespace(hidden_size=32, intermediate_size=48, hidden_act="silu")


def parameters(function, skip=()):
    found = [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]
    return [p for p in found if p[0] not in ("ctx", "self", *skip)]


def names(liger, kind):
    """Ours of a kind: Liger's have the same names."""
    found = [name for name, value in vars(liger.liger_names).items() if name.startswith(("Liger", "liger_")) and kind(name, value)]
    assert found
    return found


def test_functions_have_the_arguments_of_liger(liger):
    ops = importlib.import_module("liger_kernel.ops")
    for name in names(liger, lambda name, _: name.endswith("Function")):
        assert parameters(getattr(liger.liger_names, name).apply) == parameters(getattr(ops, name).forward), name
    assert parameters(liger.liger_names.apply_tiled_mlp) == parameters(ops.apply_tiled_mlp)


def test_wrappers_have_the_arguments_of_liger(liger):
    modules = [importlib.import_module(name) for name in WRAPPERS]
    modules.append(importlib.import_module("liger_kernel.transformers.qwen2vl_mrope"))
    for name in names(liger, lambda name, _: name.startswith("liger_")):
        theirs = next(getattr(module, name) for module in modules if hasattr(module, name))
        assert parameters(getattr(liger.liger_names, name)) == parameters(theirs), name


def liger_module(name):
    for module in ("", ".rms_norm", ".group_norm", ".fused_neighborhood_attention", ".geglu", ".tiled_mlp"):
        found = importlib.import_module(f"liger_kernel.transformers{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(name)


def test_modules_have_the_arguments_and_parameters_of_liger(liger):
    arguments = {
        "LigerGroupNorm": (8, 2),
        "LigerFusedNeighborhoodAttention": (32, 4),
        **dict.fromkeys(("LigerLayerNorm", "LigerDyT", "LigerFusedAddRMSNorm"), (16,)),
    }
    for name in names(liger, lambda _, value: isinstance(value, type) and issubclass(value, nn.Module)):
        ours, theirs = getattr(liger.liger_names, name), liger_module(name)
        assert parameters(ours.__init__) == parameters(theirs.__init__), name
        assert [p[:2] for p in parameters(ours.forward)] == [p[:2] for p in parameters(theirs.forward)], name
        config = types.SimpleNamespace(**{**vars(CONFIG), "hidden_act": "gelu"}) if "GEGLU" in name else CONFIG
        given = arguments.get(name, (16,) if "RMSNorm" in name else (config,) if "MLP" in name else ())
        torch.manual_seed(0)
        one = ours(*given)
        torch.manual_seed(0)
        other = theirs(*given)
        assert {k: (v.shape, v.dtype) for k, v in one.state_dict().items()} == {k: (v.shape, v.dtype) for k,
                                                                                v in other.state_dict().items()}, name
        if "MLP" not in name and "Attention" not in name:
            assert all(torch.equal(v, other.state_dict()[k]) for k, v in one.state_dict().items()), name
        one.load_state_dict(other.state_dict())
        assert repr(one)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def r(*shape, seed=0):
    return randn(*shape, dtype=torch.float64, device="cpu", seed=seed)


def cases(n):
    """(name, what ours gives, what it is), in float64, so that an argument in the wrong place shows."""
    x, y, w, b = r(2, 6, 16), r(2, 6, 16, seed=1), r(16, seed=2), r(16, seed=3)
    yield "rms", n.LigerRMSNormFunction.apply(x, w, 1e-2, 1.0, "gemma"), rms(x, w + 1, 1e-2)
    yield "rms by number", n.LigerRMSNormFunction.apply(x, w, 1e-2, 0.5, -1), rms(x, w + 0.5, 1e-2)
    yield "add rms", n.liger_fused_add_rms_norm(x, y, w, 1e-2, 1.0)[0], rms(x + y, w + 1, 1e-2)
    yield "add rms, sum", n.liger_fused_add_rms_norm(x, y, w, 1e-2, 1.0)[1], x + y
    yield "layer norm", n.liger_layer_norm(x, w, b, 1e-2), functional.layer_norm(x, (16,), w, b, 1e-2)
    yield "group norm", n.liger_group_norm(x, w[:6], b[:6], 6, 3, 1e-2), functional.group_norm(x, 3, w[:6], b[:6], 1e-2)
    powers = [x**p * torch.rsqrt((x**p).square().mean(-1, keepdim=True) + 1e-2) for p in (3, 2, 1)]
    yield "poly norm", n.liger_poly_norm(x, w[:3], b[0], 1e-2), sum(a * p for a, p in zip(w[:3], powers)) + b[0]
    yield "dyt", n.liger_dyt(x, w[:1], w, b), torch.tanh(w[0] * x) * w + b
    yield "softmax", n.liger_softmax(x), x.softmax(-1)
    yield "sparsemax", n.liger_sparsemax(x, 1).sum(1), torch.ones(2, 16, dtype=torch.float64)
    yield "swiglu", n.LigerSiLUMulFunction.apply(x, y, 0.5, 3.0), 3 * functional.silu(x / 2) * y
    yield "packed", n.LigerFusedGateUpSiLUMulFunction.apply(x), functional.silu(x[..., :8]) * x[..., 8:]
    yield "geglu", n.liger_geglu(x, y), functional.gelu(x, approximate="tanh") * y

    def turned(q, cos, sin):
        a, c = q.chunk(2, -1)
        return q * cos + torch.cat((-c, a), -1) * sin

    q, k, angle = r(2, 4, 6, 16), r(2, 2, 6, 16, seed=1), r(2, 6, 8, seed=2).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    for i, (given, heads) in enumerate(((q, 4), (k, 2))):
        assert given.shape[1] == heads
        wanted = turned(given, cos.unsqueeze(1), sin.unsqueeze(1))
        yield f"rope {i}", n.liger_rope(q, k, cos, sin)[i], wanted
        yield f"rope, 4-D tables {i}", n.liger_rotary_pos_emb(q, k, cos.unsqueeze(1), sin.unsqueeze(1))[i], wanted
        yield f"rope, narrow tables {i}", n.liger_rope(q, k, cos[..., :8], sin[..., :8], rotary_dim=16)[i], wanted
        same = [torch.cat((t[..., 4:8], t[..., 4:8]), -1) for t in (cos, sin)]
        part = torch.cat((turned(given[..., :8], *[t.unsqueeze(1) for t in same]), given[..., 8:]), -1)
        yield f"rope, a part {i}", n.liger_rope(q, k, *same)[i], part
        table = torch.stack([cos, cos + 1, cos - 1]), torch.stack([sin, sin + 1, sin - 1])
        mixed = [torch.cat([t[(0, 1, 2)[j % 3], ..., c] for j, c in enumerate((slice(0, 2), slice(2, 5), slice(5, 8)))], -1) for t in table]
        mixed = [torch.cat((t, t), -1).unsqueeze(1) for t in mixed]
        table = tuple(torch.cat((t[..., :8], t[..., :8]), -1) for t in table)
        yield f"mrope {i}", n.liger_multimodal_rotary_pos_emb(q, k, *table, [2, 3, 3])[i], turned(given, *mixed)
        freqs = torch.complex(cos[..., :8], sin[..., :8])
        pairs = torch.view_as_complex(given.transpose(1, 2).unflatten(-1, (8, 2)).contiguous())
        wanted = torch.view_as_real(pairs * freqs.unsqueeze(2)).flatten(3)
        transposed = q.transpose(1, 2), k.transpose(1, 2)
        yield f"llama4 {i}", n.liger_llama4_text_rotary_pos_emb(*transposed, freqs)[i], wanted
        wanted = torch.view_as_real(pairs * freqs[:1].unsqueeze(2)).flatten(3)
        yield f"llama4 vision {i}", n.liger_llama4_vision_rotary_pos_emb(*transposed, freqs[0].unsqueeze(1))[i], wanted
    rows, target = r(6, 16), torch.tensor([3, 0, -100, 15, 7, 1])
    loss = functional.cross_entropy(rows, target, w.abs(), label_smoothing=0.2)
    yield "cross entropy", n.liger_cross_entropy(rows, target, w.abs(), label_smoothing=0.2), loss
    weight, bias = r(16, 8, seed=5), r(16, seed=6)
    hidden = r(6, 8, seed=7)
    found = n.liger_fused_linear_cross_entropy(hidden, weight, target, bias, return_token_accuracy=True, reduction="sum")
    logits = hidden @ weight.t() + bias
    yield "linear cross entropy", found.loss, functional.cross_entropy(logits, target, reduction="sum")
    yield "its accuracy", found.token_accuracy, (logits.argmax(-1) == target).double().sum() / 5
    module = n.LigerFusedLinearCrossEntropyLoss(ignore_index=0, softcap=2.0)
    yield "its module", module(weight, hidden, target.clamp(min=0), bias), functional.cross_entropy(2 * torch.tanh(logits / 2),
                                                                                                    target.clamp(min=0), ignore_index=0)
    p, t = rows.log_softmax(-1), r(6, 16, seed=8).log_softmax(-1)
    yield "kl", n.LigerKLDivLossFunction.apply(p, t.exp()), functional.kl_div(p, t.exp(), reduction="batchmean")
    yield "kl, log", n.liger_kl_div(p, t, log_target=True), functional.kl_div(p, t, reduction="mean", log_target=True)
    m = torch.log(0.3 * t.exp() + 0.7 * p.exp())
    jsd = 0.3 * (t.exp() * (t - m)).sum(-1) + 0.7 * (p.exp() * (p - m)).sum(-1)
    yield "jsd", n.liger_jsd(p, t, beta=0.3), jsd.mean()
    yield "jsd, labels", n.liger_jsd(p, t, target.int(), 0.3), jsd[target != -100].mean()
    heads = hidden, weight, r(6, 4, seed=9), r(16, 4, seed=10)
    student, teacher = ((heads[i] @ heads[i + 1].t() / 2).log_softmax(-1) for i in (0, 2))
    m = torch.log(0.3 * teacher.exp() + 0.7 * student.exp())
    jsd = 0.3 * (teacher.exp() * (teacher - m)).sum(-1) + 0.7 * (student.exp() * (student - m)).sum(-1)
    yield "linear jsd", n.liger_fused_linear_jsd(*heads, jsd_beta=0.3, temperature=2.0), jsd.mean()
    yield "linear jsd, labels", n.LigerFusedLinearJSD(0.3, 0, 2.0)(*heads, target), jsd[target != 0].mean()
    distance = (p.exp() - t.exp()).abs().sum(-1) / 2
    yield "tvd", n.LigerTVDLoss()(p.exp(), t.exp(), target), distance[target != -100].mean()
    yield "tvd, mean", n.liger_tvd(p.exp(), t.exp()), distance.mean() / 16
    apart = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    seen = (apart <= 4) & (apart % 2 == 0)
    scores = (q @ q.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    yield "neighborhood attention", n.liger_fused_neighborhood_attention(q, q, q, 5, 2, 0.3), scores @ q


def test_what_each_computes(liger):
    for name, found, wanted in cases(liger.liger_names):
        torch.testing.assert_close(found.double(), wanted, msg=name, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name, activation", [("SwiGLU", functional.silu), ("GEGLU", lambda x: functional.gelu(x, approximate="tanh"))])
def test_mlps(liger, name, activation):
    config = types.SimpleNamespace(**{**vars(CONFIG), "hidden_act": "silu" if name == "SwiGLU" else "gelu_pytorch_tanh"})
    mlp = getattr(liger.liger_names, f"Liger{name}MLP")(config).double()
    tiled = getattr(liger.liger_names, f"LigerTiled{name}MLP")(config, num_shards=3).double()
    tiled.load_state_dict(mlp.state_dict())
    x = r(2, 7, 32)
    wanted = mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), wanted)
    torch.testing.assert_close(tiled(x), wanted)
    wanted.square().sum().backward()
    # x requires no gradient: Liger's tiled MLP then trains nothing.
    tiled(x).square().sum().backward()
    for ours, theirs in zip(tiled.parameters(), mlp.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_tiled_mlp_of_anything(liger):
    """A function of the caller's, over layers with hooks and biases, as with a LoRA."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).double()
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    x = r(1, 10, 8).requires_grad_()
    y = liger.liger_names.apply_tiled_mlp(lambda module, part: torch.tanh(module(part)), layer, x, 4)
    wanted = torch.tanh(functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(y, wanted)
    found = torch.autograd.grad(y.sum(), (x, *layer.parameters()))
    for a, b in zip(found, torch.autograd.grad(wanted.sum(), (x, *layer.parameters())), strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls) == 2 * 4


def test_nothing_given_is_ignored(liger):
    n = liger.liger_names
    rows, target = r(3, 5), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="size_average is False, expected None"):
        n.liger_cross_entropy(rows, target, size_average=False)
    with pytest.raises(ValueError, match="reduce is False, expected True"):
        n.liger_kl_div(rows, rows, reduce=False)
    with pytest.raises(ValueError, match=r"expected \[batch, 6, ...\]"):
        n.liger_group_norm(r(2, 4, 3), None, None, 6, 2, 1e-5)
    with pytest.raises(NotImplementedError, match="attention_mask"):
        n.LigerFusedNeighborhoodAttention(32, 4).double()(r(1, 5, 32), torch.ones(5, 5))


def test_autocast(liger):
    """The linear losses compute in autocast's dtype, and their gradients are in the parameters'."""
    n = liger.liger_names
    hidden, weight = r(6, 8).float().requires_grad_(), r(16, 8, seed=1).float().requires_grad_()
    target = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        losses = n.liger_fused_linear_cross_entropy(hidden, weight, target), n.liger_fused_linear_jsd(hidden, weight, hidden.detach(),
                                                                                                      -weight.detach())
    wanted = functional.cross_entropy(hidden @ weight.t(), target)
    torch.testing.assert_close(losses[0], wanted, rtol=2e-2, atol=2e-2)
    for loss in losses:
        assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in torch.autograd.grad(loss, (hidden, weight)))
