"""Training steps of LoRA on one GPU: PEFT's adapters of rank 16 on all projections of a Qwen3-8B with 12 of its layers, in bf16.

    python -m benchmark.benchmark_lora [--model qwen3_0.6b] [--tokens 512,4096] [--lora 64] [--autocast]

The command line is that of steps.py. Unsloth takes part where it is installed. It wants a version of transformers of its own: with
another one, run `--providers unsloth` alone in its environment; its rows join the others.
"""

if not __package__:  # run as a file
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import steps
from .benchmark_qwen3 import Qwen3StepBenchmark

RANK, LAYERS = 16, 12
TOKENS = (512, 1024, 2048, 4096, 8192)


class Qwen3LoRAStepBenchmark(Qwen3StepBenchmark):
    """The training step with PEFT's adapters, for `kernels benchmark`."""

    def setup(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().setup()
        config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=True)
        self.model, self.reference = (get_peft_model(model, config) for model in (self.model, self.reference))


def main(arguments=None):
    """Measure the steps of a model with adapters."""
    return steps.main(arguments, RANK, TOKENS, LAYERS, peers=("unsloth",))


if __name__ == "__main__":
    main()
