"""The package for GPT-OSS on a real GPU: its operations against float64, and models against the same models without it."""

import copy
import sys

import pytest
import torch

from tests.gpu.ways import check_cache, check_compiled_half, check_lora, check_same_bits
from tests.models import Step, random_tokens, tiny_gpt_oss
from tests.numerics.experts import *  # noqa: F403
from tests.numerics.experts import LARGE
from tests.ops import expert_adapters, experts, four_bits, rms_norm, rotary, round_last_rms_norm
from tests.ops.common import FLOATS

PLACE = "gpu"
pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda"
TOKENS = random_tokens(2, 129)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
halves = pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)


@pytest.fixture
def ops(gpt_oss):
    return gpt_oss


@pytest.fixture
def ours(gpt_oss, monkeypatch):
    """The grouped GEMMs run in our kernels, and an error says where they do not."""

    def slices(self):
        raise AssertionError("the GEMMs run in a loop")

    gemms = sys.modules[f"{gpt_oss.__name__}.shared.ops.grouped_gemm"]
    monkeypatch.setattr(gemms, "_native", lambda *tensors: False)
    monkeypatch.setattr(gemms.Groups, "slices", slices)
    return gpt_oss


@pytest.fixture
def own_gemms(ours, dtype):
    """bf16 is not built for the GPUs where PyTorch's grouped GEMM is one kernel, but for compute capability 9.0."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("there is PyTorch's kernel alone")
    return ours


def test_numbers_of_four_bits(gpt_oss):
    """Every byte with every scale, as the table of PyTorch's path and float64 have them; parts, the last tile short, odd
    addresses; and grouped GEMMs over parts."""
    four_bits.check_numbers(gpt_oss, DEVICE)
    four_bits.check_slabs(gpt_oss, DEVICE)
    four_bits.check_tiles(gpt_oss, DEVICE, 100_004)
    four_bits.check_offsets(gpt_oss, DEVICE)
    four_bits.check_parts(gpt_oss, DEVICE, experts=4, rows=5760, columns=2880)
    four_bits.check_coded_gemm(gpt_oss, DEVICE, (300, 0, 129, 160), 2880, 5760)
    four_bits.check_coded_experts_in_parts(gpt_oss, DEVICE, gpt_oss=True)
    four_bits.check_coded_experts(gpt_oss, DEVICE, gpt_oss=True, tokens=200, tile=64)


def test_weights_in_codes_and_an_embedding_on_the_host(gpt_oss):
    """Experts in MXFP4, attention in e4m3: the loss of the same numbers in bf16, with the whole embedding on the device."""
    model = tiny_gpt_oss(torch.bfloat16, intermediate_size=64).requires_grad_(False).to(DEVICE)
    gpt_oss.host_embeddings(gpt_oss.four_bits(gpt_oss.eight_bits(model)))
    plain = tiny_gpt_oss(torch.bfloat16, intermediate_size=64).requires_grad_(False).to(DEVICE)
    gpt_oss.sixteen_bits(gpt_oss.four_bits(gpt_oss.eight_bits(plain)))
    assert model.device.type == DEVICE and not model.get_input_embeddings().weight.is_cuda
    embedded = model.get_input_embeddings()(TOKENS.to(DEVICE))
    assert torch.equal(embedded, plain.get_input_embeddings()(TOKENS.to(DEVICE)))
    losses = [gpt_oss.kernelize(each)(input_ids=TOKENS.to(DEVICE), labels=TOKENS.to(DEVICE)).loss for each in (model, plain)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


@halves
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_experts_in_our_grouped_gemms(own_gemms, dtype, case):
    experts.check_experts(own_gemms, DEVICE, dtype, **case)


def test_a_second_backward_pass_of_the_experts_gives_the_same(gpt_oss):
    experts.check_second_backward_of_experts(gpt_oss, DEVICE)


@halves
def test_the_host_does_not_wait_for_the_routing(gpt_oss, dtype):
    leaves, run = experts.experts_run(gpt_oss, DEVICE, dtype, 300, 256, 128, 8, 4)
    run().backward(leaves["hidden"].detach())
    torch.cuda.set_sync_debug_mode("error")
    try:
        run().backward(leaves["hidden"].detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@halves
def test_two_runs_of_the_experts_give_the_same_bits(gpt_oss, dtype):
    leaves, run = experts.experts_run(gpt_oss, DEVICE, dtype, 3000, 256, 128, 8, 4)
    results = []
    for _ in range(2):
        out = run()
        results.append([out, *torch.autograd.grad(out, leaves.values(), leaves["hidden"].detach())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@dtypes
@pytest.mark.parametrize("shape", (*round_last_rms_norm.ROUND_LAST_RMS_NORM_SHAPES, (4099, 2880)), ids=str)
def test_norms(gpt_oss, dtype, shape):
    rms_norm.check_rms_norm(gpt_oss, DEVICE, dtype, shape, eps=1e-5)
    rms_norm.check_add_rms_norm(gpt_oss, DEVICE, dtype, shape, eps=1e-5)
    if dtype != torch.float32:
        round_last_rms_norm.check_round_last_rms_norm_weight(gpt_oss, DEVICE, dtype, shape)
        round_last_rms_norm.check_that_round_last_rms_norm_rounds_once(gpt_oss, DEVICE, dtype, shape)


@dtypes
def test_rotary(gpt_oss, dtype):
    rotary.check_rotary(gpt_oss, DEVICE, dtype, batch=2, tokens=257, heads=64, kv_heads=8, head_dim=64, half=True)


def model_of(dtype, **changes):
    """Two layers with the head_dim of GPT-OSS and every kernel in its fast form."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 64, "num_local_experts": 16}
    return tiny_gpt_oss(dtype, **{**sizes, "sliding_window": 32, **changes}).cuda()


@pytest.mark.parametrize("how", ("apply", "kernelize"))
def test_gradients_of_a_step_in_fp32(gpt_oss, how):
    ids, model = TOKENS.cuda(), model_of(torch.float32)
    model.set_experts_implementation("eager")
    expected = Step(model, input_ids=ids, labels=ids, output_router_logits=True)
    gpt_oss.apply() if how == "apply" else gpt_oss.kernelize(model)
    Step(model, input_ids=ids, labels=ids, output_router_logits=True).assert_same(expected, 20)


@pytest.mark.parametrize("attention", ("eager", "bastile"))
def test_a_step_in_bf16_is_as_exact_as_before(gpt_oss, attention):
    ids, model = TOKENS.cuda(), model_of(torch.bfloat16)
    exact = Step(copy.deepcopy(model).float(), input_ids=ids, labels=ids)
    exact.gradients = {name: gradient for name, gradient in exact.gradients.items() if gradient.numel() > 16}
    before = Step(model, input_ids=ids, labels=ids)
    gpt_oss.apply(attention=attention == "bastile")
    found = Step(model, input_ids=ids, labels=ids)
    assert model.model.config._attn_implementation == attention
    found.assert_as_exact_as(before, exact)
    gpt_oss.reset()
    assert model.model.config._attn_implementation == "eager"


def model_of_all_experts():
    """In bf16; every expert is chosen, so that rounding chooses no others."""
    return model_of(torch.bfloat16, num_local_experts=8, num_experts_per_tok=8)


def step_of(model, call=None):
    ids = TOKENS.cuda()
    step = Step(model, call, input_ids=ids, labels=ids, use_cache=False)
    step.gradients = {name: gradient for name, gradient in step.gradients.items() if gradient.numel() > 64}
    return step


def test_ways_to_run_give_the_same_bits(gpt_oss):
    check_same_bits(gpt_oss, model_of(torch.bfloat16), step_of, TOKENS.shape)


@pytest.mark.parametrize("experts", ((), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")), ids=("attention", "experts"))
def test_lora(gpt_oss, experts):
    targets = {"target_modules": "all-linear", "target_parameters": list(experts) or None}
    check_lora(gpt_oss, model_of_all_experts(), step_of, **targets)


@dtypes
@pytest.mark.parametrize("rank", (3, 16))
def test_the_node_with_adapters_on_experts(gpt_oss, dtype, rank):
    expert_adapters.check_adapted_experts(gpt_oss, DEVICE, dtype, tokens=300, hidden=256, width=128, top_k=5, rank=rank, gpt_oss=True)


def test_torch_compile(gpt_oss):
    check_compiled_half(gpt_oss, model_of_all_experts(), step_of)


def test_tokens_one_by_one(gpt_oss):
    check_cache(gpt_oss, model_of_all_experts(), TOKENS.cuda(), 110)


def test_warm_up_loads_what_a_step_needs(gpt_oss):
    model = gpt_oss.kernelize(model_of(torch.bfloat16))
    gpt_oss.warmup_all_kernels(model)
    gpt_oss.warmup_all_kernels()
    ids = TOKENS.cuda()
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
