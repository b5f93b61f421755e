"""What linear_log_probs keeps of its forward pass for the backward pass, by the products that are left to do and by the gradients."""

from unittest import mock

import torch

from tests.modes import Operators, is_product
from tests.ops.common import CPU, FP32, assert_rows_close, errors_in, randn
from tests.ops.generated import generated
from tests.ops.linear_jsd import chunks_of
from tests.ops.log_probs_exact import ALL, CAPPED, DIFFERENTIABLE, check_linear_log_probs
from tests.ops.suite import of_suite

# Heads whose backward pass finds some columns of the logits in the memory of the weight's gradient: the tokens, and options.
COLUMNS = (
    (11, {"outputs": ("entropy", "is_top1"), "without": ("entropy",), "bias": True}),  # all of them: a gradient larger than the logits
    (16, {"features": 16, "classes": 60, "temperature": 0.7, "scale": -1.3}),  # all: products go where the last of their logits are
    (24, {"features": 5, "classes": 120, "chunk": 2, "bias": True, **CAPPED}),  # of 24 slices 5 there, one apart, 18 made again
    (24, {"features": 5, "classes": 67, "weight_dtype": torch.float32}),
    (24, {"features": 1, "classes": 12, "size": 5.0}),  # none
)


def multiplications(operator, args):
    """The multiplications of a product."""
    return args[-2].shape.numel() * args[-1].shape[1] if is_product(operator, args) else 0


# (options, whether the head is trained, what gets a gradient) -> products with the vocabulary
PRODUCTS = (
    ({}, False, (), 1),
    ({}, False, ("log_probs",), 2),
    ({"outputs": ("entropy",), "entropy_gradient": False}, False, ("log_probs",), 2),
    ({"outputs": ("entropy",), "entropy_gradient": True}, False, ("log_probs", "entropy"), 3),
    ({"outputs": ("entropy",), "entropy_gradient": False}, False, ("log_probs", "entropy"), 4),
    ({}, True, ("log_probs",), 3),  # the logits of 6 tokens fit into the memory of a gradient of 32 features
    ({}, True, (), 1),
    ({"outputs": ALL}, True, DIFFERENTIABLE, 4),
    ({"outputs": ("entropy",), "entropy_gradient": True}, True, ("log_probs", "entropy"), 4),
    ({"outputs": ("entropy",), "entropy_gradient": False}, True, ("log_probs", "entropy"), 5),
    ({"tokens": 64}, True, ("log_probs",), 4 - 128 / 301),  # of a gradient that is half as large as the logits
    ({"recompute": False}, True, ("log_probs",), 3),
    ({"outputs": ALL, "recompute": False}, True, DIFFERENTIABLE, 3),
    ({"recompute": False}, False, ("log_probs",), 2),
    ({"recompute": False}, True, (), 1),
    ({"coefficients": True, "recompute": False}, True, ("weighted_sum",), 3),
    ({"coefficients": True}, True, ("weighted_sum",), 3),
    ({"coefficients": True}, False, ("weighted_sum",), 2),
)


def columns_of_small_heads(ops):
    """Keeps columns of heads with few features too, whose backward pass otherwise makes all logits again."""
    return mock.patch.object(ops.log_prob_columns_module, "LEAST", 0)


def check_columns(ops, device, dtype):
    for tokens, options in COLUMNS:
        with columns_of_small_heads(ops):
            check_linear_log_probs(ops, device, dtype, (tokens,), **{"chunk": 4, **options})


def count_products(ops, device, options, trained, differentiated) -> float:
    tokens = options.get("tokens", 6)
    hidden, weight = (randn(n, 32, dtype=torch.float32, device=device, seed=i) for i, n in enumerate((tokens, 301)))
    hidden.requires_grad_(bool(differentiated))
    weight.requires_grad_(trained)
    options = {**options, "coefficients": torch.ones(6, device=device)} if "coefficients" in options else dict(options)
    options.pop("tokens", None)
    with Operators(multiplications) as products:
        found = ops.linear_log_probs(hidden, weight, torch.arange(tokens, device=device), **options)
        if differentiated:
            sum(getattr(found, name).sum() for name in differentiated).backward()
    return products.count / (tokens * 32 * 301)  # of products with the vocabulary, which may come in parts


def check_products(ops, device):
    assert count_products(ops, device, {}, True, ("log_probs",)) == 4, "a head of few features keeps columns"
    for options, trained, differentiated, expected in PRODUCTS:
        with columns_of_small_heads(ops):
            found = count_products(ops, device, options, trained, differentiated)
        assert found == expected, f"{options}, trained {trained}, gradients of {differentiated}: {found} products, expected {expected}"


def check_kept_logits(ops, device, dtype):
    """Whatever is kept from the forward pass, a second backward pass gives the bits of the first one, and so do logits that are packed and
    unpacked like all that is saved. All logits, kept, give those of logits that are all made again; columns of them, of which the weight's
    gradient is one product, not four, do within rounding."""
    target = torch.tensor([5, 7, -100, 3, 299, 2, 1, 0, 8, 9, 4], device=device)
    with chunks_of(ops, tokens=4, first=0):
        for options in ({"outputs": ALL, **CAPPED}, {"temperature": 0.7}):
            gradients = []
            for recompute, copied in ((True, False), (True, True), (False, False), (False, True)):
                shapes = (11, 32), (300, 32), (300,)
                leaves = [randn(*shape, dtype=dtype, device=device, seed=i, scale=0.3).requires_grad_() for i, shape in enumerate(shapes)]
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if copied else t, lambda t: t)  # noqa: B023
                with hooks, columns_of_small_heads(ops):
                    found = ops.linear_log_probs(*leaves[:2], target, leaves[2], recompute=recompute, skip_ignored=False, **options)
                losses = [getattr(found, name) for name in DIFFERENTIABLE if getattr(found, name) is not None]
                upstream = [randn(11, dtype=torch.float32, device=device, seed=9 + i) for i in range(len(losses))]
                gradients += [torch.autograd.grad(losses, leaves, upstream, retain_graph=True) for _ in range(2)]
            columns = "outputs" not in options
            for i, other in enumerate(gradients):
                first = gradients[4 if columns and i >= 4 else 0]
                assert all(map(torch.equal, first, other)), f"{options}: gradients {i}"
            for made, kept in zip(gradients[0], gradients[4]):
                assert_rows_close(made, kept.double().cpu(), dtype, f"{options}: what is kept", 3, floor=0.3, row_factor=3)


def check_guess(ops, device):
    """What the last backward pass brought decides what the next forward pass makes, where nothing is said."""
    options, both = {"outputs": ("entropy",)}, ("log_probs", "entropy")
    ops.linear_log_probs_module._entropy_had_gradient.clear()
    found = [count_products(ops, device, options, False, names) for names in (both, both, both[:1], both[:1], both)]
    assert found == [4, 3, 3, 2, 4], f"{found} products"


# ---------------------------------------------------------------- planted errors
CHECKS = of_suite({
    "guess": lambda ops: check_guess(ops, CPU),
    "products": lambda ops: check_products(ops, CPU),
    "kept_logits": lambda ops: check_kept_logits(ops, CPU, FP32),
    "columns": lambda ops: check_columns(ops, CPU, FP32),
})
OPERATION, PIECES, HEAD = "shared/ops/linear_log_probs.py", "shared/ops/log_probs.py", "shared/ops/linear_head.py"
CHUNKS, KEPT = "shared/ops/log_prob_chunks.py", "shared/ops/log_prob_columns.py"
MUTANTS = [
    *generated(PIECES, "columns", "KernelPiece.write_columns"),
    *generated(PIECES, "columns", "TorchPiece.write_columns", kernels=False),
    *errors_in(PIECES, "columns", "TorchPiece.write_columns", (".mul_(self.scores.numbers()[2])", ""), kernels=False),
    *errors_in(OPERATION, "guess", "_LogProbs.backward", ("] = upstream.entropy is not None", "] = True")),
    *errors_in(OPERATION, "kept_logits", "_LogProbs.backward", ("[] if spent else [t.data", "[t.data")),
    *errors_in(OPERATION, "columns", "_LogProbs.backward", ("if not spent else None", "")),
    *generated(OPERATION, "products", "_what_is_kept"),
    *errors_in(KEPT, "columns", "Columns.kept", ("memory.numel() - (self.plan.slices[within - 1].stop - part.start)", "part.start")),
    *errors_in(KEPT, "columns", "Columns.keep", ("self.lse[rows] = lse", "self.lse[rows] = lse + 1")),
    *errors_in(KEPT, "columns", "Columns.weight_gradients",
         ("piece(logits, target", "piece(logits, target + 1"),
         ("else bias[part]", "else bias[: part.stop - part.start]"),
         ("logits = logits.clone()", "pass"),
         ("dbias[part] = ", "dbias[part] = 2 * "),
         ("torch.where(is_counted(target, weight.shape[0], options.ignore_index), upstream, 0.0)", "upstream")),
    *errors_in(CHUNKS, "products", "run", ("[] if keep else", "None if keep else")),
    *errors_in(HEAD, "products", "walk", ("next(made, None)", "None")),
]  # fmt: skip
