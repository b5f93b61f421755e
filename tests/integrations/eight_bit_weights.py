"""Adapters over weights in eight bits, trained, saved and resumed by Trainer and SFTTrainer, and recorded as graphs."""

import copy

import pytest
import torch

from tests.integrations.adapters import PROJECTIONS, lora
from tests.integrations.common import install, model_on
from tests.integrations.trainers import BOTH, run
from tests.models import mesh_of_one

BF16 = torch.bfloat16


def base_on(qwen3, device):
    """A small Qwen3 in bf16 with frozen weights in eight bits."""
    return qwen3.eight_bits(model_on(device, BF16).requires_grad_(False))


WHAT = "LoRA over weights in eight bits, saved and resumed"


@pytest.mark.integration(*(f"{trainer}: {WHAT}" for trainer in ("Trainer", "SFTTrainer")))
@BOTH
def test_adapters_over_weights_in_eight_bits(qwen3, device, kind, tmp_path):
    """The steps are those over the numbers that the codes stand for; a run that is resumed ends where the whole one did."""
    if kind == "trl":
        pytest.importorskip("trl")
    base = base_on(qwen3, device)
    models = [base, qwen3.sixteen_bits(copy.deepcopy(base)), copy.deepcopy(base)]
    models = [install(qwen3, lora(model, target_modules=PROJECTIONS)) for model in models]
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = run(kind, models[0], tmp_path / "codes", device, **saving)
    plain = run(kind, models[1], tmp_path / "plain", device)
    assert whole.losses == plain.losses and len(whole.losses) == 2
    folder = tmp_path / "codes" / "checkpoint-1"
    assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    run(kind, models[2], tmp_path / "again", device, resume=str(folder))
    found = [{name: p.detach() for name, p in model.named_parameters() if p.requires_grad} for model in models]
    for other in found[1:]:
        assert found[0].keys() == other.keys() and all(torch.equal(found[0][name], other[name]) for name in other)


def test_what_cannot_hold_them_raises(qwen3, device):
    """FSDP version 1, whose buffers are of floating point numbers, and accelerate's offloading, which takes parameters from a state dict by
    their names: as docs/lora.md says, instead of other numbers."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerate = pytest.importorskip("accelerate")
    with mesh_of_one(), pytest.raises(ValueError, match="integer|uniform dtype"):
        FullyShardedDataParallel(base_on(qwen3, device), use_orig_params=True, device_id=torch.device(device))
    offloaded = accelerate.cpu_offload(base_on(qwen3, device), execution_device=device)
    with pytest.raises(KeyError, match="codes"):
        offloaded(input_ids=torch.ones((1, 4), dtype=torch.long, device=device))
