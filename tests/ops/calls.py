"""One call of each operation of the suite at a size that its kernels take: for what holds of all of them."""

import types

import torch

from tests.ops.common import BF16, FP32, leaf, randn

OPERATIONS = (
    "general_rms_norm", "general_add_rms_norm", "layer_norm", "group_norm", "poly_norm", "dyt", "softmax", "sparsemax", "swiglu", "geglu",
    "tiled_swiglu", "partial_rotary", "rotary_complex", "rotary_multimodal", "cross_entropy", "kl_div", "jsd", "tvd", "linear_jsd",
    "linear_log_probs", "linear_divergence", "neighborhood_attention",
)  # fmt: skip


def calls(ops, device, dtype=BF16) -> dict:
    """(function, the tensors that it takes and is differentiated in) by name."""
    ops = types.SimpleNamespace(**{name: getattr(ops, name) for name in OPERATIONS})

    def normal(*shape, seed=0, scale=1.0):
        return leaf(randn(*shape, dtype=dtype, device=device, seed=seed, scale=scale))

    x, y, w, b = normal(48, 1024), normal(48, 1024, seed=1), normal(1024, seed=2), normal(1024, seed=3)
    one, three = (leaf(torch.ones(n, dtype=dtype, device=device)) for n in (1, 3))
    image, w8, b8 = normal(2, 8, 16, 16), normal(8, seed=2), normal(8, seed=3)
    q, k, v = (normal(2, 4, 16, 128, seed=i) for i in (4, 5, 6))
    cos, sin = (normal(3, 2, 16, 128, seed=i).detach() for i in (7, 8))
    part = cos[0, ..., :64].contiguous(), sin[0, ..., :64].contiguous()
    freqs = torch.polar(torch.ones(2, 16, 64), randn(2, 16, 64, dtype=FP32, device="cpu")).to(device)
    target = torch.arange(48, device=device)
    p, t = (leaf(randn(48, 1024, dtype=FP32, device=device, seed=i).log_softmax(-1)) for i in (9, 10))
    t = t.detach()
    teacher = t.exp()
    weights = normal(96, 1024, scale=0.03), normal(96, 1024, scale=0.03, seed=1), normal(1024, 96, scale=0.1)
    return {
        "general_rms_norm": (lambda x, w: ops.general_rms_norm(x, w), (x, w)),
        "general_add_rms_norm": (lambda x, y, w: sum(ops.general_add_rms_norm(x, y, w)), (x, y, w)),
        "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b), (x, w, b)),
        "group_norm": (lambda x, w, b: ops.group_norm(x, 2, w, b), (image, w8, b8)),
        "poly_norm": (lambda x, w, b: ops.poly_norm(x, w, b), (x, three, one)),
        "dyt": (lambda x, a, w, b: ops.dyt(x, a, w, b), (x, one, w, b)),
        "softmax": (lambda x: ops.softmax(x), (x,)),
        "sparsemax": (lambda x: ops.sparsemax(x), (x,)),
        "swiglu": (lambda a, b: ops.swiglu(a, b, 0.5, 2.0), (x, y)),
        "geglu": (lambda a, b: ops.geglu(a, b), (x, y)),
        "tiled_swiglu": (lambda x, *weights: ops.tiled_swiglu(x, *weights, shards=2), (x, *weights)),
        "partial_rotary": (lambda q, k: sum(ops.partial_rotary(q, k, *part)), (q, k)),
        "rotary_complex": (lambda q, k: sum(ops.rotary_complex(q.transpose(1, 2), k.transpose(1, 2), freqs)), (q, k)),
        "rotary_multimodal": (lambda q, k: sum(ops.rotary_multimodal(q, k, cos, sin, (16, 24, 24))), (q, k)),
        "cross_entropy": (lambda x: ops.cross_entropy(x, target), (x,)),
        "kl_div": (lambda p: ops.kl_div(p, teacher, "batchmean"), (p,)),
        "jsd": (lambda p: ops.jsd(p, t), (p,)),
        "tvd": (lambda p: ops.tvd(p.exp(), teacher), (p,)),
        "linear_jsd": (lambda x, w: ops.linear_jsd(x, w, y.detach(), weights[1].detach()), (x, weights[0])),
        "linear_log_probs": (lambda x, w: sum(ops.linear_log_probs(x, w, target, outputs=("entropy",), skip_ignored=False)[:2]),
                             (x, weights[0])),
        "linear_divergence": (lambda x, w: ops.linear_divergence(x, w, y.detach(), weights[1].detach(), beta=0.5).divergence,
                              (x, weights[0])),
        "neighborhood_attention": (lambda q, k, v: ops.neighborhood_attention(q, k, v), (q, k, v)),
    }


def run(call, leaves) -> tuple:
    """The result and the gradients."""
    result = call(*leaves)
    return (result, *torch.autograd.grad(result, leaves, torch.ones_like(result)))
