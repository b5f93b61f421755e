"""Whole training steps of Qwen3 on one GPU: those of steps.py, whose command line this has, and two layers for `kernels benchmark`."""

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from .families import make_model
from .kernels_cli import Benchmark
from .steps import main


class Qwen3StepBenchmark(Benchmark):
    """Forward and backward of a Qwen3-8B of two layers, for `kernels benchmark`."""

    seed = 0

    def setup(self) -> None:
        gpu = self.device.startswith("cuda")
        name, tokens = ("8b", 4096) if gpu else ("tiny", 32)
        self.model, self.reference = (make_model(name, 2, self.device) for _ in range(2))
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


if __name__ == "__main__":
    main()
