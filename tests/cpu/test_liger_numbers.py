"""What Liger's names compute over our operations, beside the formulas in float64."""


import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.liger_support import config, names, r  # noqa: F401


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


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
        yield f"rope of GPT-OSS {i}", n.liger_rotary_pos_emb_gpt_oss(q, k, cos[..., :8], sin[..., :8])[i], wanted
        tokens_first = [x[0].transpose(0, 1) for x in (q, k)]
        yield f"rope of vision {i}", n.liger_rotary_pos_emb_vision(*tokens_first, cos[0], sin[0])[i].transpose(0, 1), wanted[0]
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
    # The z-loss is an average over the tokens, the rest over the sum of their classes' weights.
    z = 0.1 * torch.where(target != -100, rows.logsumexp(-1).square(), 0.0)
    loss = functional.cross_entropy(rows, target, w.abs())
    found = n.LigerCrossEntropyLoss(w.abs(), lse_square_scale=0.1, return_z_loss=True)(rows, target)
    yield "cross entropy with z-loss and weights", found.loss, loss + z.sum() / 5
    yield "its z-loss", found.z_loss, z.sum() / 5
    z = 0.1 * torch.where(target != -100, logits.logsumexp(-1).square(), 0.0)
    wanted = functional.cross_entropy(logits, target, w.abs(), label_smoothing=0.2) + z.sum() / 5
    options = {"ce_weight": w.abs(), "lse_square_scale": 0.1, "label_smoothing": 0.2}
    found = n.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **options)
    yield "linear cross entropy with z-loss and weights", found, wanted
    wanted = functional.cross_entropy(logits, target, w.abs(), label_smoothing=0.2, reduction="sum") + z.sum()
    found = n.liger_fused_linear_cross_entropy(hidden, weight, target, bias, reduction="sum", **options)
    yield "the sum of it", found, wanted
    found = n.liger_fused_linear_cross_entropy(hidden, weight, torch.full_like(target, -100), bias, **options)
    yield "of nothing", found, torch.zeros((), dtype=torch.float64)
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
    torch.manual_seed(0)
    layer = n.LigerFusedNeighborhoodAttentionLayer(16, 1, 5, 2, scale=0.3).double()
    one, a = x[:, :6], layer.attention
    normed = functional.layer_norm(one, (16,), eps=1e-5)
    q, k, v = a.q_proj(normed), a.k_proj(normed), a.v_proj(normed)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    yield "neighborhood attention layer", layer(one), one + a.out_proj(scores @ v)
    mlp = n.LigerFalconH1SwiGLUMLP(config()).double()
    hidden = r(3, 32)
    wanted = mlp.down_proj(functional.silu(mlp.gate_proj(hidden) / 2) * mlp.up_proj(hidden) * 2)
    yield "Falcon-H1's MLP", mlp(hidden), wanted
    mlp = n.LigerHunyuanV1SwiGLUMLP(config()).double()
    yield "Hunyuan's MLP", mlp(hidden), mlp.down_proj(functional.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))


def test_what_each_computes(n):
    for name, found, wanted in cases(n):
        torch.testing.assert_close(found.double(), wanted, msg=name, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_distributions_of_two_dtypes(n, dtypes):
    """A student in half precision beside a teacher in float32, and the other way round: both computed in float32."""
    x, y = (r(6, 16, seed=i).log_softmax(-1) for i in range(2))
    for probabilities, function, formula in (
        ((False, True), n.LigerKLDIVLoss(reduction="batchmean"), lambda p, t: functional.kl_div(p, t, reduction="batchmean")),
        ((True, True), n.LigerTVDLoss(), lambda p, q: (p - q).abs().sum() / 12),
        ((False, False), n.LigerJSD(0.0), lambda q, p: (p.exp() * (p - q)).sum() / 6),
    ):
        given = [(t.exp() if exp else t).to(dtype) for t, exp, dtype in zip((x, y), probabilities, dtypes)]
        student = given[0].clone().requires_grad_()
        loss = function(student, given[1])
        loss.backward()
        exact = given[0].double().requires_grad_()
        wanted = formula(exact, given[1].double())
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-2 if loss.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert student.grad.dtype == dtypes[0]
        torch.testing.assert_close(student.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_rope_of_an_odd_width(n):
    """Heads of 9 with tables of 9 or 10: eight columns turn, by the tables' left four, and the last stays."""
    q, k, angle = r(2, 3, 5, 9), r(2, 1, 5, 9, seed=1), r(1, 5, 5, seed=2)
    for width in (9, 10):
        table = torch.cat((angle, angle), -1)[..., :width]
        wanted = n.liger_rope(q[..., :8], k[..., :8], angle.cos()[..., :4], angle.sin()[..., :4], rotary_dim=8)
        for found, x, turned in zip(n.liger_rope(q, k, table.cos(), table.sin()), (q, k), wanted):
            torch.testing.assert_close(found, torch.cat((turned, x[..., 8:]), -1))


@pytest.mark.parametrize("label", (5, -1, 1000))
def test_a_label_out_of_bounds(n, label):
    """Liger's error, by which its users find a tokenizer that does not go with the model."""
    rows, target = r(3, 5), torch.tensor([0, label, -100])
    with pytest.raises(AssertionError, match=f"target {label} is out of bounds, expected labels from 0 to 4 or -100"):
        n.liger_cross_entropy(rows, target)
    assert n.liger_cross_entropy(rows, torch.tensor([0, 4, -100])).isfinite()
    assert n.liger_cross_entropy(rows, torch.tensor([0, label, 4]), ignore_index=label).isfinite()


@pytest.mark.parametrize("name, activation", [("SwiGLU", functional.silu), ("GEGLU", lambda x: functional.gelu(x, approximate="tanh"))])
def test_mlps(n, name, activation):
    sizes = config(hidden_act="silu" if name == "SwiGLU" else "gelu_pytorch_tanh")
    mlp = getattr(n, f"Liger{name}MLP")(sizes).double()
    tiled = getattr(n, f"LigerTiled{name}MLP")(sizes, num_shards=3).double()
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


def test_a_tiled_mlp_of_anything(n):
    """A function of the caller's, over layers with hooks and biases, as with a LoRA."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).double()
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    x = r(1, 10, 8).requires_grad_()
    y = n.apply_tiled_mlp(lambda module, part: torch.tanh(module(part)), layer, x, 4)
    wanted = torch.tanh(functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(y, wanted)
    found = torch.autograd.grad(y.sum(), (x, *layer.parameters()))
    for a, b in zip(found, torch.autograd.grad(wanted.sum(), (x, *layer.parameters())), strict=True):
        torch.testing.assert_close(a, b)
    assert len(calls) == 2 * 4


def test_autocast(n):
    """The linear losses compute in autocast's dtype, and their gradients are in the parameters'."""
    hidden, weight = r(6, 8).float().requires_grad_(), r(16, 8, seed=1).float().requires_grad_()
    target = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        losses = n.liger_fused_linear_cross_entropy(hidden, weight, target), n.liger_fused_linear_jsd(hidden, weight, hidden.detach(),
                                                                                                      -weight.detach())
    wanted = functional.cross_entropy(hidden @ weight.t(), target)
    torch.testing.assert_close(losses[0], wanted, rtol=2e-2, atol=2e-2)
    for loss in losses:
        assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in torch.autograd.grad(loss, (hidden, weight)))
