"""Products in eight bits in two processes: the gradients of each one's own rows, with scales of these, and their mean."""

import sys

import pytest
import torch

from tests.integrations.common import batch, install, model_on
from tests.integrations.sharding import LENGTH, ROWS, gradients_of, rows_of, shard
from tests.versions import TORCH

BF16 = torch.bfloat16
CODES = "codes"


def check_eight_bits(here, kind, adapted):
    """Loss and gradients have the bits of models that nothing is sharded of."""
    from torch.nn.parallel import DistributedDataParallel

    from tests.integrations.adapters import PROJECTIONS, lora

    device, bits = here.own_device, sys.modules[f"{here.qwen3.__name__}.shared.decoder.eight_bits"]
    mine, fewest = rows_of(batch(device, ROWS, LENGTH), here.rank), bits.FEWEST

    def make(products):
        torch.manual_seed(0)
        made = model_on(device, BF16)
        if adapted == CODES:
            here.qwen3.eight_bits(made.requires_grad_(False))
        return install(here.qwen3, lora(made, target_modules=PROJECTIONS) if adapted else made, products=products)

    bits.FEWEST = 16
    try:
        losses, gradients = {}, {}
        for products in ("fp8", "bf16"):
            alone = make(products)
            losses[products] = alone(use_cache=False, **mine).loss
            losses[products].backward()
            gradients[products] = gradients_of(alone)
        assert not torch.equal(losses["fp8"], losses["bf16"]), "nothing was in eight bits"
        for gradient in gradients["fp8"].values():
            gradient.div_(2)
            torch.distributed.all_reduce(gradient)
        model = make("fp8")
        if kind == "FSDP2":
            parallel = model
            shard(here, model.get_base_model() if adapted else model)
        else:
            parallel = DistributedDataParallel(model, device_ids=None if device == "cpu" else [here.rank])
        for _ in range(2):  # the second step finds what the first one left
            parallel.zero_grad()
            loss = parallel(use_cache=False, **mine).loss
            loss.backward()
            assert torch.equal(loss, losses["fp8"])
            found = gradients_of(parallel, "module.")
            assert found.keys() == gradients["fp8"].keys()
            assert [name for name in found if not torch.equal(found[name], gradients["fp8"][name])] == []
    finally:
        bits.FEWEST = fewest
    here.qwen3.reset()


@pytest.mark.integration("DDP: products in eight bits, whole models and LoRA", "FSDP2: products in eight bits, whole models and LoRA",
                         "DDP: LoRA over weights in eight bits")  # fmt: skip
@pytest.mark.integration("FSDP2: LoRA over weights in eight bits", on="cpu")  # where torch is newer than on the GPUs that ran this
@pytest.mark.parametrize("adapted", [False, True, CODES], ids=["full", "LoRA", "LoRA over weights in eight bits"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_eight_bits_in_parallel(ranks, kind, adapted):
    if kind == "FSDP2" and adapted == CODES and TORCH < (2, 13):
        pytest.skip("its fully_shard takes no parameters of integers (pytorch/pytorch#177844)")
    ranks.run(check_eight_bits, kind, adapted)
