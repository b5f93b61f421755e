"""Training steps of LoRA on one GPU: PEFT's adapters of rank 16 on all projections of a Qwen3-8B with 12 of its layers, in bf16.

    python -m benchmark.benchmark_lora [--model qwen3_0.6b] [--tokens 512,4096] [--lora 64] [--autocast]

The command line is that of steps.py.
"""

if not __package__:  # run as a file
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import steps

RANK, LAYERS = 16, 12
TOKENS = (512, 1024, 2048, 4096, 8192)


def main(arguments=None):
    """Measure the steps of a model with adapters."""
    return steps.main(arguments, RANK, TOKENS, LAYERS)


if __name__ == "__main__":
    main()
