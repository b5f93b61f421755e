"""Low-rank adapters on experts, inside the decoder layer's node of a mixture of experts (`sparse_nodes`)."""

import importlib

import torch

from tests.ops.common import BF16, CPU, FP16, FP32, errors_in, exact, leaf, on_cpu, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.experts import experts_exact
from tests.ops.generated import generated
from tests.ops.rms_norm import rms_norm_exact
from tests.ops.sparse_nodes import leaves_of
from tests.ops.traced_nodes import as_in_a_graph
from tests.tolerances import assert_close

GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "limit": 100.0}  # far from where rounding decides what is clamped
BOTH = ("gate_up", "down")
WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")


def adapted_leaves(dtype, device, tokens, hidden, width, experts, rank, on, wider, gpt_oss):
    """The node's tensors by name, with the adapters' as PEFT keeps them. wider: whether these are in float32. gpt_oss: with biases, and the
    weights the other way."""
    leaves = leaves_of(dtype, device, tokens, hidden, width, experts)
    if gpt_oss:
        for name in BOTH:
            leaves[name] = leaf(leaves[name].transpose(1, 2).contiguous())
        leaves["gate_up_bias"] = leaf(randn(experts, 2 * width, dtype=dtype, device=device, seed=5))
        leaves["down_bias"] = leaf(randn(experts, hidden, dtype=dtype, device=device, seed=6))
    for seed, (name, columns, rows) in enumerate((("gate_up", hidden, 2 * width), ("down", width, hidden))):
        if name in on:
            kind = {"dtype": FP32 if wider else dtype, "device": device}
            leaves[f"{name}_a"] = leaf(randn(experts * rank, columns, seed=30 + seed, scale=columns**-0.5, **kind))
            leaves[f"{name}_b"] = leaf(randn(rows, rank * experts, seed=40 + seed, scale=rank**-0.5, **kind))
    return leaves


def arguments_of(ops, leaves, top_k, scalings, gpt_oss):
    """What `norm_experts` is called with, and its options."""
    sparse, spec = part_of(ops, "sparse"), part_of(ops, "spec")
    adapters = importlib.import_module(f"{ops.__name__}.shared.ops.expert_adapters")
    given = [
        adapters.ExpertAdapter(leaves[f"{name}_a"], leaves[f"{name}_b"], scaling) if f"{name}_a" in leaves else None
        for name, scaling in zip(BOTH, scalings, strict=True)
    ]
    weights = sparse.ExpertTensors(*[leaves.get(name) for name in WEIGHTS])
    gate = sparse.ExpertOptions(**(GPT_OSS if gpt_oss else {}))
    router = sparse.Router(leaves["router"], top_k, True)
    arguments = leaves["x"], leaves["norm_weight"], router, weights, spec.Outputs(before=spec.Norm(0.5)), gate
    return arguments, {"adapters": adapters.ExpertAdapters(*given)}


def adapted_exact(leaves, top_k, scalings, gpt_oss):
    """In float64, with each expert's weight made whole: W + scaling * b @ a."""
    experts, weights = leaves["router"].shape[0], {}
    for name, scaling in zip(BOTH, scalings, strict=True):
        weights[name] = leaves[name]
        if f"{name}_a" in leaves:
            a, b = leaves[f"{name}_a"], leaves[f"{name}_b"]
            a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
            delta = torch.einsum("ore,eri->eoi", b, a) * scaling
            weights[name] = weights[name] + (delta.transpose(1, 2) if gpt_oss else delta)
    y = rms_norm_exact(leaves["x"], leaves["norm_weight"], 0.5)
    scores, expert = torch.softmax(y @ leaves["router"].t(), -1).topk(top_k, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    biases = {name: leaves[name] for name in WEIGHTS[2:] if name in leaves}
    return leaves["x"] + experts_exact(y, expert, scores, *weights.values(), **biases, **(GPT_OSS if gpt_oss else {}))


def check_adapted_experts(ops, device, dtype=FP32, *, tokens=11, hidden=64, width=24, experts=5, top_k=2, rank=3, on=BOTH, wider=False,
                          scalings=(2.0, 0.6), gpt_oss=False, trained=("x", "norm_weight", "router"), frozen=(), recompute=False,
                          again=False, tile=0):
    """on: the projections with an adapter. trained: what needs a gradient beside the adapters, of which `frozen` do not. again: a second
    backward pass. tile: of `norm_experts`. In half precision the sizes must leave no choice of experts to rounding."""
    leaves = adapted_leaves(dtype, device, tokens, hidden, width, experts, rank, on, wider, gpt_oss)
    exacts = {name: exact(tensor) for name, tensor in leaves.items()}
    for name, tensor in leaves.items():
        tensor.requires_grad_((name in trained or name[-2:] in ("_a", "_b")) and name not in frozen)
    arguments, options = arguments_of(ops, leaves, top_k, scalings, gpt_oss)
    y = part_of(ops, "sparse").norm_experts(*arguments, recompute=recompute, tile=tile, **options)
    y64 = adapted_exact(exacts, top_k, scalings, gpt_oss)
    assert_close(y, y64, dtype, "experts with adapters", 2)
    dy = randn(*y.shape, dtype=dtype, device=device, seed=9)
    if again:
        y.backward(dy, retain_graph=True)
        for tensor in leaves.values():
            tensor.grad = None
    y.backward(dy)
    y64.backward(dy.double().cpu())
    for name, tensor in leaves.items():
        if not tensor.requires_grad:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype
        # What an expert has no rows of has a gradient of exactly zero.
        assert_close(tensor.grad, exacts[name].grad, dtype, f"gradient of experts with adapters: {name}", 3)


def check_few_rows(ops, device):
    """One token: most experts have no row, and the gradients of their factors are zeros."""
    check_adapted_experts(ops, device, tokens=1, experts=6, top_k=2)
    check_adapted_experts(ops, device, tokens=0)


def check_frozen_adapters(ops, device):
    """Parts of the adapters, and all around them, that need no gradient."""
    check_adapted_experts(ops, device, frozen=("gate_up_a", "down_b"))
    check_adapted_experts(ops, device, frozen=("gate_up_b", "down_a", "router"))
    check_adapted_experts(ops, device, trained=())
    check_adapted_experts(ops, device, trained=("x",), frozen=("gate_up_a", "gate_up_b"))
    check_adapted_experts(ops, device, trained=(), on=("down",), recompute=True)


def check_tiles(ops, device):
    """Adapters of both projections and of one, their factors wider, over several tiles."""
    check_adapted_experts(ops, device, tokens=40, tile=16)
    check_adapted_experts(ops, device, tokens=40, tile=16, gpt_oss=True, trained=("x", "router", *WEIGHTS), again=True)
    check_adapted_experts(ops, device, tokens=40, tile=16, frozen=("gate_up_a", "down_b"))
    check_adapted_experts(ops, device, BF16, tokens=40, tile=16, top_k=5, rank=8, wider=True, on=("down",))


def check_wrong_adapters(ops):
    """Factors of another shape, dtype or number are refused by name."""
    leaves = adapted_leaves(BF16, CPU, 3, 16, 8, 4, 2, BOTH, False, False)
    cut = {name: tensor[:3] for name, tensor in leaves.items()}
    for name, wrong in (("gate_up_a", leaves["gate_up_a"][:, 1:]), ("down_b", leaves["down_b"].half()), ("gate_up_b", cut["gate_up_b"]),
                        ("down_a", cut["down_a"]), ("down_b", None)):
        arguments, options = arguments_of(ops, leaves | {name: wrong}, 2, (1.0, 1.0), False)
        try:
            part_of(ops, "sparse").norm_experts(*arguments, **options)
        except Exception as error:
            assert isinstance(error, ValueError) and f"adapters.{name[:-2]}" in str(error), error
        else:
            raise AssertionError(f"{name} is taken")


def check_layout_of_factors(ops):
    """Rows of whole 16 bytes, side by side, as the grouped GEMMs' kernels read them."""
    adapters = importlib.import_module(f"{ops.__name__}.shared.ops.expert_adapters")
    for rank, whole in ((3, 8), (8, 8), (16, 16), (20, 24)):
        tensors = randn(4 * rank, 16, dtype=FP32, device=CPU), randn(24, rank * 4, dtype=FP32, device=CPU)
        a, b = adapters.ExpertAdapter(*tensors, 0.5).factors(4, BF16)
        assert (a.shape, b.shape) == ((4, whole, 16), (4, 24, whole)) and a.is_contiguous() and b.is_contiguous()


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "adapted": on_cpu(check_adapted_experts),
    "adapted_gpt_oss": on_cpu(check_adapted_experts, gpt_oss=True, trained=("x", "router", *WEIGHTS)),
    "adapted_half": on_cpu(check_adapted_experts, BF16, top_k=5, rank=8, wider=True),
    "adapted_half_odd": on_cpu(check_adapted_experts, FP16, top_k=5, rank=3, gpt_oss=True),
    "adapted_one": on_cpu(check_adapted_experts, on=("gate_up",), scalings=(1.0, 0.5)),
    "adapted_other": on_cpu(check_adapted_experts, on=("down",), trained=("x", "down", "gate_up")),
    "adapted_again": on_cpu(check_adapted_experts, again=True, recompute=True, rank=8),
    "adapted_few": on_cpu(check_few_rows),
    "adapted_frozen": on_cpu(check_frozen_adapters),
    "adapted_tiles": on_cpu(check_tiles),
    "adapted_of_a_graph_tiles": as_in_a_graph(on_cpu(check_adapted_experts, tokens=40, tile=16, gpt_oss=True)),
    "adapted_of_a_graph": as_in_a_graph(on_cpu(check_adapted_experts, BF16, top_k=5, rank=8, wider=True)),
    "adapted_of_a_graph_again": as_in_a_graph(on_cpu(check_adapted_experts, gpt_oss=True, recompute=True, again=True)),
    "adapted_layout": check_layout_of_factors,
    "adapted_wrong": check_wrong_adapters,
}
_ADAPTERS, _EXPERTS, _SPARSE = "shared/ops/expert_adapters.py", "shared/ops/experts.py", "shared/decoder/sparse.py"
MUTANTS = [
    *generated(_ADAPTERS, "adapted or adapted_layout", "ExpertAdapter.factors ExpertAdapter.gradients adapter_gradients"),
    *errors_in(_ADAPTERS, "adapted", "Factors.turned",
         ("self.b.transpose(1, 2), self.a.transpose(1, 2)", "2 * self.b.transpose(1, 2), self.a.transpose(1, 2)")),
    *errors_in(_ADAPTERS, "adapted", "ExpertAdapter.factors",
         ("permute(2, 0, 1)", "permute(2, 0, 1).flip(0)"),
         ("reshape(experts, rank, -1)", "reshape(rank, experts, -1).transpose(0, 1)"),
         ("reshape(-1, rank, experts).permute(2, 0, 1)", "reshape(-1, experts, rank).permute(1, 0, 2)"),
         ("b.contiguous()", "b", "adapted_layout")),
    *errors_in(_ADAPTERS, "adapted", "ExpertAdapter.gradients",
         ("permute(1, 2, 0)", "permute(1, 0, 2)"),
         ("da[:, :rank]", "da[:, -rank:]"),
         (".to(self.a.dtype)", "", "adapted_of_a_graph"),
         (".to(self.b.dtype)", "", "adapted_of_a_graph")),
    *errors_in(_ADAPTERS, "adapted", "adapted_mm",
         ("y.add_(more)", "y"),
         ("if low is None else low", "if low is None else 2 * low"),
         ("more = grouped_mm(low, factors.b", "more = grouped_mm(low, 0 * factors.b")),
    *errors_in(_ADAPTERS, "adapted", "adapter_gradients", ("not any(need)", "not all(need)", "adapted_frozen")),
    *errors_in(_ADAPTERS, "adapted_one", "narrow_mm", ("factors.a.transpose", "2 * factors.a.transpose")),
    *errors_in(_EXPERTS, "adapted", "experts_start", ("transposed, factors)", "transposed)")),
    *errors_in(_EXPERTS, "adapted_again", "first_gemm", ("weight, factors, groups", "weight, None, groups")),
    *errors_in(_EXPERTS, "adapted", "experts_finish", ("transpose(1, 2), factors, groups", "transpose(1, 2), None, groups")),
    *errors_in(_EXPERTS, "adapted", "experts_backward",
         ("turned.down, groups, dlow)", "None, groups, dlow)"),
         ("turned.gate_up, groups, dlow)", "None, groups, dlow)"),
         ("gated, rows, dlow", "2 * gated, rows, dlow"),
         ("rows, dgate_up, dlow", "2 * rows, dgate_up, dlow")),
    *errors_in(_SPARSE, "adapted", "_adapters", ("zip(tensors.factors, spec.scalings)", "zip(tensors.factors, spec.scalings[::-1])")),
    *errors_in(_SPARSE, "adapted", "_forward", ("routing, groups, factors)", "routing, groups, factors._replace(down=None))")),
    *errors_in(_SPARSE, "adapted", "_gradients",
         ("or any(need_factors.gate_up) or", "or", "adapted_frozen"),
         ("spec.gate.transposed, factors.gate_up)", "spec.gate.transposed)", "adapted_again"),
         ("else adapter.gradients(each)", "else adapter._replace(scaling=1.0).gradients(each)")),
    *errors_in("shared/decoder/checks.py", "adapted_wrong", "check_expert_adapter",
         ("tensor is None or tensor.shape", "tensor is not None and tensor.shape"),
         ("tensor.shape != shape or", ""),
         ("tensor.dtype not in (x.dtype, torch.float32) or", "")),
]  # fmt: skip
