"""Whatever its length, a decoder layer's calls are replayed once they have come a few times. The driver is a stand-in, as in
benchmark/benchmark_host.py: what is asked is what the host does."""

import importlib

import pytest
import torch

from benchmark.benchmark_host import STAND_IN, StandIn
from benchmark.published import new_model

CALLS = 5  # the first is seen, the second may only prepare launches, the third is recorded


@pytest.fixture
def stand_in(qwen3, monkeypatch):
    """The package, with a stand-in for the driver until the test ends."""
    driver, launch = (importlib.import_module(f"{qwen3.__name__}.shared.runtime.{name}") for name in ("driver", "launch"))
    for module, name in ((driver, "raw_stream"), (driver, "current_device"), (launch, "backend")):
        monkeypatch.setattr(module, name, getattr(module, name))
    StandIn(qwen3)
    return qwen3


def model_with(package, rank):
    model = new_model(STAND_IN, 1, "cpu")
    if rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    package.kernelize(model)
    return model.get_base_model().model if rank else model.model


@pytest.mark.parametrize("rank", (0, 4), ids=("dense", "LoRA"))
@pytest.mark.parametrize("rows", (1, 2, 3))
def test_no_call_of_a_layer_stays_without_a_plan(stand_in, monkeypatch, rows, rank):
    """LoRA's products make a plan long, so fewer lengths are tried with it."""
    replay = importlib.import_module(f"{stand_in.__name__}.shared.runtime.replay")
    decoder, ran = model_with(stand_in, rank), []
    run = replay.Operator._run
    monkeypatch.setattr(replay.Operator, "_run", lambda operator, *args: (ran.append(operator), run(operator, *args))[1])
    for tokens in range(1, 10 if rank else 41):
        positions = torch.arange(tokens)[None]
        x = torch.randn(rows, tokens, decoder.config.hidden_size, dtype=torch.bfloat16).requires_grad_()
        angles, dout = decoder.rotary_emb(x, positions), torch.randn_like(x)
        for _ in range(CALLS):
            ran.clear()
            decoder.layers[0](x, attention_mask=None, position_embeddings=angles, position_ids=positions).backward(dout)
        assert not ran, f"{tokens} tokens\n" + "\n".join(map(str, ran))
