"""Whole training steps of Qwen3 on one GPU: random weights, batch 1, bf16, fused AdamW, SDPA, no checkpointing.

One process a provider, in turns. Sequences get longer until they do not fit.
"""

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import training
from .harness import Benchmark

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 18432, 20480, 24576, 26624)


class Qwen3StepBenchmark(Benchmark):
    """Forward and backward of a Qwen3-8B of two layers, for `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        gpu = self.device.startswith("cuda")
        name, tokens = ("8b", 4096) if gpu else ("tiny", 32)
        self.model, self.reference = (training.make_model(name, 2, self.device) for _ in range(2))
        self.kernel.kernelize(self.model)
        self.ids = torch.randint(self.model.config.vocab_size, (1, tokens), device=self.device)

    def run(self, model):
        loss = model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    def benchmark_step(self) -> None:
        self.out = self.run(self.model)

    def verify_step(self):
        return self.run(self.reference)


def main(arguments=None):
    args = training.parser("Training steps of Qwen3 on one GPU.", TOKENS).parse_args(arguments)
    if args.child:
        return training.child(args, training.build_one)
    return training.parent("qwen3_step", __file__, args)


if __name__ == "__main__":
    main()
