"""Whole training steps sharded over 2 to 8 GPUs with FSDP2: every layer and the root, batch 1 on each GPU.

    python -m benchmark.benchmark_fsdp --gpus 2
    python -m benchmark.benchmark_fsdp --gpus 2 --model gpt_oss_20b [--layers 24]

Otherwise as benchmark_qwen3.py, or the step of benchmark_gpt_oss.py. Each number is the slowest GPU's, or the fullest one's.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import benchmark_gpt_oss, models, training
from .benchmark_qwen3 import Qwen3StepBenchmark

TOKENS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Family:
    """What differs between the models. name: of the results; providers: those that take part unless told otherwise, of those known."""

    name: str
    providers: tuple[str, ...]
    known: tuple[str, ...]
    prepare: Callable
    new_model: Callable  # (args, device) -> a model that is not filled
    package: str  # the folder of its build.toml


FLEX = tuple(p for p in benchmark_gpt_oss.STEP_PROVIDERS if p != "huggingface")  # whose eager attention fits at the shortest lengths alone
FAMILIES = {
    "qwen3": Family(
        "qwen3_fsdp",
        training.PROVIDERS,
        training.ALL_PROVIDERS,
        training.prepare,
        lambda args, device: training.new_qwen3(args.model, args.layers, device),
        ".",
    ),
    "gpt_oss": Family("gpt_oss_fsdp", FLEX, benchmark_gpt_oss.STEP_PROVIDERS, benchmark_gpt_oss.prepare, benchmark_gpt_oss.new_model, benchmark_gpt_oss.PACKAGE),
}


class ShardedStepper(training.Stepper):
    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        found = super().run(tokens, warmup, steps)
        numbers = torch.tensor([*found["ms"], found["first_ms"], found["peak_gib"] or 0.0], device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *ms, first_ms, peak_gib = numbers.tolist()
        return found | {"ms": ms, "first_ms": first_ms, "peak_gib": peak_gib if found["peak_gib"] is not None else None}


@torch.no_grad()
def materialise(module, device: str, prefix: str = "") -> None:
    """Memory and `training.fill`'s values for the parameters that are on the meta device. prefix: of their names."""
    made: dict[int, torch.nn.Parameter] = {}  # what is tied stays tied
    for path, inside in module.named_modules(prefix=prefix):
        for name, parameter in list(inside.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device=device))
                training.fill_parameter(f"{path}.{name}" if path else name, made[id(parameter)])
            setattr(inside, name, made[id(parameter)])


def shard(model, device: str):
    """FSDP2 as its documentation has it: each layer, then the root with everything else.

    A model on the meta device is filled on the way, so that no GPU ever holds more than its shards and one layer, or what the root has:
    GPT-OSS 20B in bf16 is 42 GB.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for number, layer in enumerate(model.model.layers):
        materialise(layer, device, f"model.layers.{number}")
        fully_shard(layer, mesh=mesh)
    materialise(model, device)
    if any(buffer.is_meta for buffer in model.buffers()):
        with torch.device(device):  # they are the rotary embedding's, which computes them from the configuration
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    fully_shard(model, mesh=mesh)
    return model


def build(args) -> training.Stepper:
    rank = int(os.environ["RANK"])
    if args.device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    family = FAMILIES[models.family(args.model)]
    model = shard(family.new_model(args, "meta"), args.device)
    optimizer = training.make_optimizer(model, args.device, args.child, family.package)
    return ShardedStepper(model, optimizer, args.device, model.config.vocab_size, rank)


class Qwen3ShardedStepBenchmark(Qwen3StepBenchmark):
    """The same on one GPU under FSDP2, for `kernels benchmark`: what the wrapping costs."""

    def setup(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().setup()
        shard(self.model, self.device)


def main(arguments=None):
    known = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.known))
    p = training.parser("Training steps under FSDP2.", TOKENS, None, known)
    p.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 2))
    args = p.parse_args(arguments)
    family = FAMILIES[models.family(args.model)]
    args.providers = args.providers or family.providers
    if unknown := set(args.providers) - set(family.known):
        p.error(f"argument --providers: {', '.join(sorted(unknown))}, expected some of {', '.join(family.known)} for {args.model}")
    if not args.child:
        return training.parent(family.name, __file__, args, args.gpus)
    if not training.child(args, build, family.prepare):
        os._exit(1)  # leaving in order would wait for the other processes, which wait for this one
    if dist.is_initialized():
        dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
