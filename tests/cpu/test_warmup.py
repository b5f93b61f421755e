"""The warm-up of every family: it launches what a training step and an evaluation launch, so that neither loads a kernel."""


import pytest
import torch

from tests.cpu.conftest import FOLDERS, kernels_of
from tests.decoder_families import NAMES, SPARSE, tiny
from tests.models import random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_5, tiny_qwen3_5_sparse, tiny_qwen3_moe
from tests.patched import calls_of

TOKENS = random_tokens(2, 21)
MODELS = {
    "qwen3": ("qwen3", lambda dtype: tiny_model(dtype)),
    "qwen3_moe": ("qwen3", lambda dtype: tiny_qwen3_moe(dtype, moe_intermediate_size=64, num_experts_per_tok=6)),
    "gpt_oss": ("gpt_oss", lambda dtype: tiny_gpt_oss(dtype, intermediate_size=64)),
    "qwen3_5": ("qwen3_5", tiny_qwen3_5),
    "qwen3_5_moe": ("qwen3_5", lambda dtype: tiny_qwen3_5_sparse("qwen3_5_moe", dtype)),
    "qwen3_next": ("qwen3_5", lambda dtype: tiny_qwen3_5_sparse("qwen3_next", dtype)),
    **{
        name: (package, lambda dtype, name=name: tiny(name, dtype, attn_implementation="eager"))
        for package, names in (("decoders", NAMES), ("moe", SPARSE)) for name in names
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_launches_what_the_warm_up_did(request, interpret, monkeypatch, name):
    """Nothing but the routing of experts is computed here: what is launched follows from shapes and dtypes."""
    of_package, make = MODELS[name]
    package, launched = request.getfixturevalue(of_package), set()
    warmup = calls_of(package)
    model = package.kernelize(make(torch.bfloat16).train())
    state = torch.random.get_rng_state()
    backend = interpret(package, kernels_of(FOLDERS[of_package]))
    prepare = backend.prepare

    def noted(variant, *args):
        run = prepare(variant, *args) if variant.name.startswith("expert_") else lambda *_: None
        return lambda *of_launch: launched.add(variant.name) or run(*of_launch)

    monkeypatch.setattr(backend, "prepare", noted)
    warmup.warm_up("cpu", torch.bfloat16, warmup.case_of(model), tokens=TOKENS.numel())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    loaded = set(launched)
    launched.clear()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=TOKENS, labels=TOKENS, skip_logits=True, use_cache=False)
    assert any(variant.startswith("cross_entropy_gradient") for variant in launched)
    assert launched <= loaded, sorted(launched - loaded)
