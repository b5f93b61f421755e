"""The embedding in a graph, called without one: PyTorch's own, whose gradient is an operator's."""

import importlib

import torch
import torch.nn.functional as F

from tests.ops.common import errors_in, leaf, randn


def check_embedding(ops):
    traced = importlib.import_module(f"{ops.__name__}.shared.ops.embedding").traced_embedding
    tokens = torch.tensor([[3, 9, 3], [0, 7, 9]])
    for padding_idx, by_frequency in ((-1, False), (3, False), (-1, True)):
        weight, other = (leaf(randn(10, 8, dtype=torch.float32, device="cpu")) for _ in range(2))
        found = traced(weight, tokens, padding_idx, by_frequency)
        expected = F.embedding(tokens, other, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=by_frequency)
        dout = randn(2, 3, 8, dtype=torch.float32, device="cpu", seed=1)
        found.backward(dout)
        expected.backward(dout)
        assert torch.equal(found, expected)
        assert torch.equal(weight.grad, other.grad), f"padding_idx {padding_idx}, scale_grad_by_freq {by_frequency}"


# ---------------------------------------------------------------- planted errors
CHECKS = {"embedding": check_embedding}
FILE = "shared/ops/embedding.py"
MUTANTS = [
    *errors_in(FILE, "embedding", "_Embedding.forward",
         ("save_for_backward(tokens)", "save_for_backward(tokens.flip(0))"),
         ("weight.shape[0], padding_idx, scale_grad_by_freq", "weight.shape[0], -1, scale_grad_by_freq"),
         ("F.embedding(tokens, weight)", "F.embedding(tokens.flip(0), weight)"), kernels=False),
    *errors_in(FILE, "embedding", "_Embedding.backward",
         ("gradient_operator(dout", "gradient_operator(2 * dout"), kernels=False),
    *errors_in(FILE, "embedding", "_gradient",
         ("rows, padding_idx, scale_grad_by_freq)", "rows, padding_idx, False)"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _calls(new):
    tokens = new.integers([[0, 1, 0], [3, 0, 3]])
    return [(new(2, 3, 64, seed=19), tokens, 10, 3, by_frequency) for by_frequency in (True, False)]


OPERATORS = {"embedding_backward": _calls}
