"""Whole training steps sharded over 2 to 8 GPUs with FSDP2: every layer and the root, batch 1 on each GPU.

    python -m benchmark.benchmark_fsdp --gpus 2
    python -m benchmark.benchmark_fsdp --gpus 2 --model gpt_oss_20b [--layers 24]
    python -m benchmark.benchmark_fsdp --gpus 4 --spread --documents 8 --tokens 32768,131072

With --spread a row's tokens are spread over all GPUs, by DeepSpeed's Ulysses. Otherwise as steps.py. Each number is the slowest GPU's, or
the fullest one's.
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not __package__:  # run as a file, or by `kernels benchmark`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))  # the links of the Hub's cache are not followed
    __package__ = Path(__file__).absolute().parent.name

from . import families, steps
from .benchmark_qwen3 import Qwen3StepBenchmark
from .providers import require_modules
from .stepping import Form, Stepper, child

TOKENS = (1024, 2048, 4096, 8192, 16384)


class ShardedStepper(Stepper):
    """A model sharded over all ranks; what it finds out is the slowest GPU's, or the fullest one's."""

    def run(self, tokens: int, warmup: int, steps: int) -> dict:
        found = super().run(tokens, warmup, steps)
        numbers = torch.tensor([*found["ms"], found["first_ms"], found["peak_gib"] or 0.0], device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *ms, first_ms, peak_gib = numbers.tolist()
        return found | {"ms": ms, "first_ms": first_ms, "peak_gib": peak_gib if found["peak_gib"] is not None else None}


@dataclass(frozen=True)
class SpreadForm:
    """Describes the part of a batch of `form` that a GPU has, where a row's tokens are spread over all of them."""

    form: Form

    def batch(self, ids: torch.Tensor) -> dict:
        """Return the arguments of a causal LM. ids: [1, tokens], of which those of the first GPU count."""
        dist.broadcast(ids, 0)
        whole = self.form.batch(ids)
        whole.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device)[None])
        labels = torch.nn.functional.pad(whole.pop("labels"), (0, 1), value=-100)[:, 1:]
        whole |= {"labels": labels, "shift_labels": labels}
        return {name: value.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for name, value in whole.items()}


def spread(model, device: str, form: Form) -> SpreadForm:
    """Register DeepSpeed's Ulysses around a model's attention, over all GPUs, and return the form of its batches."""
    os.environ["DS_ACCELERATOR"] = device.partition(":")[0]
    require_modules("deepspeed")
    deepspeed = importlib.import_module("deepspeed")
    if device == "cpu":  # communication of processes on one CPU is compiled at its first use, in minutes
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None
    deepspeed.init_distributed(dist.get_backend())
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
    ulysses.register_with_transformers(model, model.config._attn_implementation, dist.get_world_size(), form.rows)
    return SpreadForm(form)


@torch.no_grad()
def materialise(module, device: str, config, prefix: str = "") -> None:
    """Give the parameters that are on the meta device memory and the values of `families.fill`. config: of the model; prefix: of their
    names."""
    made: dict[int, torch.nn.Parameter] = {}  # what is tied stays tied
    for path, inside in module.named_modules(prefix=prefix):
        for name, parameter in list(inside.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device=device))
                families.fill_parameter(f"{path}.{name}" if path else name, made[id(parameter)], config)
            setattr(inside, name, made[id(parameter)])


def shard(model, device: str):
    """Shard a model with FSDP2 as its documentation has it: each layer, then the root with everything else.

    A model on the meta device is filled on the way, so that no GPU ever holds more than its shards and one layer, or what the root has:
    GPT-OSS 20B in bf16 is 42 GB.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for number, layer in enumerate(model.model.layers):
        materialise(layer, device, model.config, f"model.layers.{number}")
        fully_shard(layer, mesh=mesh)
    materialise(model, device, model.config)
    if any(buffer.is_meta for buffer in model.buffers()):
        with torch.device(device):  # they are the rotary embedding's, which computes them from the configuration, and Gemma's scale
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
            embedding = model.model.embed_tokens
            if hasattr(embedding, "embed_scale"):
                embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=embedding.embed_scale.dtype)
    fully_shard(model, mesh=mesh)
    return model


def build(args) -> Stepper:
    """Return what a measuring process steps, in the group of all of them."""
    rank = int(os.environ["RANK"])
    if args.device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    family = families.family_of(args.model)
    model = shard(family.new_model(args, "meta"), args.device)
    optimizer = families.make_optimizer(model, args.device, args.child, family.package)
    form: Any = steps.form_of(args)
    if args.spread:
        form = spread(model, args.device, form)
    return ShardedStepper(model, optimizer, args.device, model.config.vocab_size, rank, form)


class Qwen3ShardedStepBenchmark(Qwen3StepBenchmark):
    """The training step on one GPU under FSDP2, for `kernels benchmark`: what the wrapping costs."""

    def setup(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().setup()
        shard(self.model, self.device)


def main(arguments=None):
    """Measure the steps of a model over several GPUs, or do so in one of the measuring processes."""
    p = steps.parser("Training steps under FSDP2.", TOKENS)
    p.add_argument("--gpus", type=int, default=max(torch.cuda.device_count(), 2))
    p.add_argument("--spread", action="store_true", help="a row's tokens over all GPUs, by DeepSpeed's Ulysses")
    args = p.parse_args(arguments)
    family = families.family_of(args.model)
    if not args.child:
        args.providers = args.providers or family.fsdp_providers
        steps.check_providers(p, args, family)
        return steps.run_all(f"{family.name}_fsdp{'_spread' * args.spread}{steps.form_of(args).name}", __file__, args, args.gpus)
    if not child(args, build, family.prepare):
        os._exit(1)  # leaving in order would wait for the other processes, which wait for this one
    if dist.is_initialized():
        dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
