"""Cross entropy of a linear layer's output without gradients: one kernel multiplies and joins, and no logits are stored at all."""

import torch

from ..runtime.launch import Kernel
from .cross_entropy import Chunk
from .rows import one_block_a_row

__all__ = ["LossWithoutLogits"]

TOKENS_A_READING = 1024  # that share one reading of the weight in `linear_cross_entropy_statistics`: TILE_M * GROUP, on every GPU
PARTIALS_BYTES = 48 * 2**20  # of what it leaves of the logits: 10240 tokens at once at Qwen3's vocabulary

_linear_kernel = Kernel(
    "linear_cross_entropy_statistics",
    grid=lambda c, hidden, weight, *_: (-(-hidden.shape[0] // c["TILE_M"]) * -(-weight.shape[0] // c["TILE_N"]),),
)
_linear_combine_kernel = Kernel("linear_cross_entropy_combine", grid=one_block_a_row)


class LossWithoutLogits(Chunk):
    """All tokens at once, by the kernel that stores no logits: `rows()`, where `fits()` says that it can.

    It takes bf16 and fp16, features in multiples of 64, and what follows from lse and the label's logit: no bias, softcap or
    label smoothing, and no predictions.
    """

    def __init__(self, hidden, weight, bias, target, class_weight, options):
        super().__init__(weight.t(), target, class_weight, options)
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def fits(self) -> bool:
        options, tokens = self.options, self.hidden.shape[0]
        if self.bias is not None or options.softcap or options.label_smoothing or options.predicts or not tokens:
            return False
        parts = -(-self.classes // _linear_kernel.constant("TILE_N"))
        self.step = min(tokens, max(PARTIALS_BYTES // (8 * parts) // TOKENS_A_READING, 1) * TOKENS_A_READING)
        self.partials = tuple(self.hidden.new_empty((self.step, parts), dtype=torch.float32) for _ in range(2))
        # Whether the kernel takes them does not depend on how many tokens they are.
        return _linear_kernel.takes(self.hidden[:2], self.weight, *(partial[:2] for partial in self.partials))

    def loss(self):
        tokens = self.hidden.shape[0]
        self.likelihood = torch.empty(tokens, dtype=torch.float32, device=self.hidden.device)
        self.lse = self.likelihood.new_empty((tokens, 2))
        for start in range(0, tokens, self.step):
            rows = slice(start, min(start + self.step, tokens))
            operands = self.hidden[rows], self.weight
            partials = tuple(partial[: rows.stop - start] for partial in self.partials)
            _linear_kernel(*operands, *partials)
            results = self.lse[rows], self.likelihood[rows]
            _linear_combine_kernel(*operands, self.target[rows], *partials, *results, self.options.ignore_index)
        if self.plain:
            return self.likelihood
        self.look_up()
        return self.weighted(0.0)
