"""Qwen3-MoE on a real GPU: its node against float64, and models against the same models without the layers."""

import functools

import pytest
import torch

from tests.gpu.ways import check_same_bits
from tests.models import Step, losses_of, random_tokens, tiny_qwen3_moe
from tests.ops import expert_adapters, sparse_nodes
from tests.ops.common import FLOATS
from tests.patched import lora
from tests.qwen3_moe_steps import exact_step

DEVICE = "cuda"
TOKENS = random_tokens(2, 129)
BF16 = torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
halves = pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)

# Where all experts are chosen, rounding decides nothing; elsewhere only fp32 chooses as float64 does.
ALL_CHOSEN = (
    dict(tokens=300, hidden=2048, width=768, experts=8, top_k=8),
    dict(tokens=70, hidden=1024, width=20, experts=6, top_k=6, normalised=False),
    dict(tokens=515, hidden=256, width=128, experts=4, top_k=4, attended=True),
    dict(tokens=1, hidden=2048, width=64, experts=3, top_k=3),
    dict(tokens=300, hidden=2048, width=512, experts=4, top_k=4, shared=512),
    dict(tokens=70, hidden=1024, width=20, experts=3, top_k=3, shared=24, attended=True, recompute=True),
)
CHOSEN = (
    dict(tokens=200, hidden=1024, width=128, experts=16, top_k=4),
    dict(tokens=200, hidden=1024, width=41, experts=12, top_k=1, normalised=False),
    dict(tokens=33, hidden=1024, width=64, experts=6, top_k=2, frozen=("gate_up", "down")),
    dict(tokens=33, hidden=1024, width=64, experts=6, top_k=2, frozen=("x", "norm_weight", "gate_up", "down")),
    dict(tokens=33, hidden=1024, width=64, experts=6, top_k=2, again=True),
)


@dtypes
@pytest.mark.parametrize("case", ALL_CHOSEN, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_the_node(qwen3, dtype, case):
    sparse_nodes.check_norm_experts(qwen3, DEVICE, dtype, **case)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_the_node_where_experts_are_chosen(qwen3, case):
    sparse_nodes.check_norm_experts(qwen3, DEVICE, torch.float32, **case)


@dtypes
@pytest.mark.parametrize("rank", (3, 8, 64))
@pytest.mark.parametrize("tokens", (33, 300, 900))  # few rows an expert, those where our grouped GEMM takes over from torch's, and many
@pytest.mark.usefixtures("poisoned")
def test_the_node_with_adapters_on_experts(qwen3, dtype, rank, tokens):
    sizes = dict(tokens=tokens, hidden=256, width=128, experts=6, top_k=6, rank=rank)
    expert_adapters.check_adapted_experts(qwen3, DEVICE, dtype, **sizes, wider=dtype != torch.float32)
    expert_adapters.check_adapted_experts(qwen3, DEVICE, dtype, **sizes, on=("down",), trained=("x", "down"), recompute=True, again=True)


@pytest.mark.usefixtures("poisoned")
def test_experts_without_rows(qwen3):
    expert_adapters.check_few_rows(qwen3, DEVICE)
    expert_adapters.check_frozen_adapters(qwen3, DEVICE)


def model_of(dtype, **changes):
    """Two layers of experts and one without, in sizes that every kernel takes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 128,
             "num_experts": 16, "num_experts_per_tok": 4}  # fmt: skip
    return tiny_qwen3_moe(dtype, **{**sizes, **changes}).to(DEVICE)


@pytest.mark.parametrize("how", ("apply", "kernelize"))
@pytest.mark.parametrize("normalised", (True, False))
@pytest.mark.parametrize("router_logits", (False, True))
def test_gradients_of_a_step_in_fp32(qwen3, how, normalised, router_logits):
    ids, model = TOKENS.to(DEVICE), model_of(torch.float32, norm_topk_prob=normalised, router_aux_loss_coef=0.3)
    model.set_experts_implementation("eager")
    expected = Step(model, input_ids=ids, labels=ids, output_router_logits=router_logits)
    model.set_experts_implementation("grouped_mm")
    qwen3.apply() if how == "apply" else qwen3.kernelize(model)
    Step(model, input_ids=ids, labels=ids, output_router_logits=router_logits).assert_same(expected, 20)


@halves
@pytest.mark.parametrize("normalised", (True, False))
def test_a_step_in_half_precision_is_as_exact_as_before(qwen3, dtype, normalised):
    ids, model = TOKENS.to(DEVICE), model_of(dtype, norm_topk_prob=normalised, num_experts=8, num_experts_per_tok=8)
    exact = exact_step(model, input_ids=ids, labels=ids)
    if dtype == torch.float16:
        model.set_experts_implementation("eager")
    before = Step(model, input_ids=ids, labels=ids)
    model.set_experts_implementation("grouped_mm")
    qwen3.pack(model)
    qwen3.apply()
    Step(model, input_ids=ids, labels=ids).assert_as_exact_as(before, exact)


def test_twenty_steps(qwen3):
    def losses():
        model = model_of(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return torch.tensor(losses_of(model, optimizer, (random_tokens(2, 100 + 8 * step).to(DEVICE) for step in range(20))))

    expected = losses()
    qwen3.apply()
    found = losses()
    assert (found / expected - 1).abs().max() < 5e-3 and found[-1] < found[0]


@pytest.mark.parametrize("adapter", (False, True), ids=("full", "LoRA"))
def test_the_host_does_not_wait_in_a_step(qwen3, adapter):
    ids, model = TOKENS.to(DEVICE), qwen3.kernelize(model_of(BF16))
    model = lora(model, 8, target_modules=["q_proj", "o_proj"]) if adapter else model
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("side", ("left", "right"))
def test_padded_batches(qwen3, side):
    ids, model = TOKENS.to(DEVICE), model_of(BF16, num_experts=4, num_experts_per_tok=4)
    lengths = torch.tensor([[129], [77]])
    mask = (torch.arange(129) < lengths if side == "right" else torch.arange(129) >= 129 - lengths).to(DEVICE)
    inputs = {"input_ids": ids, "labels": ids.where(mask & mask.roll(1, 1), -100), "attention_mask": mask.long(), "use_cache": False}
    exact = exact_step(model, **inputs)
    before = Step(model, **inputs)
    qwen3.apply()
    found = Step(model, **inputs)
    assert model.model.config._attn_implementation == "bastile"
    found.assert_as_exact_as(before, exact)


def test_packed_documents(qwen3):
    model = model_of(BF16, num_experts=4, num_experts_per_tok=4)
    ids = TOKENS.reshape(1, -1).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in (100, 31, 127)])[None].to(DEVICE)
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    exact = exact_step(model, **inputs)
    before = Step(model, **inputs)
    qwen3.apply()
    Step(model, **inputs).assert_as_exact_as(before, exact)


@pytest.mark.parametrize("options", ({"target_modules": ["q_proj", "v_proj", "o_proj"]},
                                     {"target_modules": ["q_proj"],
                                      "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
                                     {"target_modules": "all-linear"}),
                         ids=("attention", "experts", "all"))  # fmt: skip
def test_lora(qwen3, options):
    ids, model = TOKENS.to(DEVICE), lora(model_of(torch.float32), 8, **options)
    model.get_base_model().set_experts_implementation("eager")
    expected = Step(model, input_ids=ids, labels=ids)
    model.get_base_model().set_experts_implementation("grouped_mm")
    qwen3.kernelize(model)
    found = Step(model, input_ids=ids, labels=ids)
    found.assert_same(expected, 20)
    assert all("lora" in name for name in found.gradients)


def test_ways_to_run_give_the_same_bits(qwen3):
    ids = TOKENS.to(DEVICE)
    check_same_bits(qwen3, model_of(BF16), lambda model: Step(model, input_ids=ids, labels=ids, use_cache=False), TOKENS.shape)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_torch_compile(qwen3, backend):
    ids, model = TOKENS.to(DEVICE), qwen3.kernelize(model_of(BF16, num_experts=4, num_experts_per_tok=4))
    exact = exact_step(model, input_ids=ids, labels=ids)
    before = Step(model, input_ids=ids, labels=ids)
    torch._dynamo.reset()
    found = Step(model, input_ids=ids, labels=ids)
    compiled = torch.compile(model, backend=backend)
    model.zero_grad()
    found.loss = compiled(input_ids=ids, labels=ids).loss
    found.loss.backward()
    found.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    found.assert_as_exact_as(before, exact)


def test_generation(qwen3):
    ids, model = TOKENS[:, :9].to(DEVICE), model_of(torch.float32).eval()
    generate = functools.partial(model.generate, ids, max_new_tokens=12, do_sample=False)
    model.set_experts_implementation("eager")
    expected = generate()
    model.set_experts_implementation("grouped_mm")
    qwen3.apply()
    assert torch.equal(generate(), expected)


def test_warm_up_loads_what_a_step_needs(qwen3):
    model = qwen3.kernelize(model_of(BF16))
    qwen3.warmup_all_kernels(model)
    ids = TOKENS.to(DEVICE)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
