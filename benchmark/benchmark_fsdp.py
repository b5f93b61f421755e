"""Whole training steps of Qwen3 sharded over 2 to 8 GPUs with FSDP2: every layer and the root, batch 1 on each GPU.

Otherwise as benchmark_qwen3.py. Each number is the slowest GPU's, or the fullest one's.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import training
from .benchmark_qwen3 import Qwen3StepBenchmark

TOKENS = (1024, 2048, 4096, 8192, 16384)


class ShardedStepper(training.Stepper):
    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        found = super().run(tokens, warmup, steps)
        numbers = torch.tensor([*found["ms"], found["first_ms"], found["peak_gib"] or 0.0], device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *ms, first_ms, peak_gib = numbers.tolist()
        return found | {"ms": ms, "first_ms": first_ms, "peak_gib": peak_gib if found["peak_gib"] is not None else None}


def shard(model, device: str):
    """FSDP2 as its documentation has it: each layer, then the root with everything else."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(args) -> training.Stepper:
    rank = int(os.environ["RANK"])
    if args.device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    model = shard(training.make_model(args.model, args.layers, args.device), args.device)
    return ShardedStepper(model, training.make_optimizer(model, args.device), args.device, model.config.vocab_size, rank)


class Qwen3ShardedStepBenchmark(Qwen3StepBenchmark):
    """The same on one GPU under FSDP2, for `kernels benchmark`: what the wrapping costs."""

    def setup(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().setup()
        shard(self.model, self.device)


def main(arguments=None):
    p = training.parser("Training steps of Qwen3 under FSDP2.", TOKENS)
    p.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 2))
    args = p.parse_args(arguments)
    if not args.child:
        return training.parent("qwen3_fsdp", __file__, args, args.gpus)
    if not training.child(args, build):
        os._exit(1)  # leaving in order would wait for the other processes, which wait for this one
    if dist.is_initialized():
        dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
