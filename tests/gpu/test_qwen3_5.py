"""Small models of Qwen3.5, Qwen3.5-MoE and Qwen3-Next with the kernels that they run on a GPU: heads of 256 and delta nets of 128."""

import copy
import functools

import pytest
import torch

from tests.gpu.ways import check_cache, check_compiled_half, check_lora, check_same_bits
from tests.models import Step, random_tokens, tiny_qwen3_5, tiny_qwen3_5_sparse

DEVICE = "cuda"
BF16 = torch.bfloat16
TOKENS = random_tokens(4, 300)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# Gates: of their gradients, sums that cancel over few numbers, half precision leaves hardly more than rounding.
LUCK = {"in_proj_a", "in_proj_b", "in_proj_ba", "gate", "shared_expert_gate"}


@pytest.fixture
def package(qwen3_5):
    yield qwen3_5
    qwen3_5.reset()


def model_of(name, dtype, **changes):
    """A delta net and a layer with attention, where experts are all chosen, so that rounding chooses no others."""
    sizes = {"width": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size": 256, "intermediate_size": 512,
             "head_dim": 256, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    sparse = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    if name == "qwen3_5":
        model = tiny_qwen3_5(**{**sizes, **changes})
    else:
        model = tiny_qwen3_5_sparse(name, **{**sizes, **sparse, **changes})
    with torch.no_grad():  # so small that gradients in half precision are apart by their rounding
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.4)
    return model.to(DEVICE, dtype)


def step_of(model, call=None, **inputs):
    ids = TOKENS.to(DEVICE)
    step = Step(model, call, **{"input_ids": ids, "labels": ids, "use_cache": False, **inputs})
    kept = (pair for pair in step.gradients.items() if pair[1].numel() > 64 and not LUCK.intersection(pair[0].split(".")))
    step.gradients = dict(kept)
    return step


def padded():
    """A batch of rows with padding in front, whose attention runs in kernels."""
    ids, mask = TOKENS.to(DEVICE), (torch.arange(300) >= torch.tensor([[0], [40], [0], [170]])).long().to(DEVICE)
    return {"attention_mask": mask, "labels": ids.where(mask > 0, -100)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("inputs", ("whole", "padded"))
def test_a_step_in_half_precision_is_as_exact_as_before(package, name, inputs):
    given = padded() if inputs == "padded" else {}
    model = model_of(name, BF16)
    wide = copy.deepcopy(model).float()
    if name != "qwen3_5":
        wide.set_experts_implementation("eager")
    exact, before = step_of(wide, **given), step_of(model, **given)
    package.apply()
    step_of(model, **given).assert_as_exact_as(before, exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_those_that_stand_alone(package, name):
    """In bf16, by position_ids alone: each document's own logits are those of a row of its own, within rounding."""
    model, lengths = package.kernelize(model_of(name, BF16)).eval(), (130, 470, 600)
    row, positions = TOKENS.reshape(1, -1).to(DEVICE), torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    with torch.no_grad():
        packed = model(input_ids=row, position_ids=positions, use_cache=False).logits.float()
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in row.split(lengths, 1)], 1).float()
    assert (packed - alone).norm() < 2e-2 * alone.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_ways_to_run_give_the_same_bits(package, name):
    check_same_bits(package, model_of(name, BF16), step_of, TOKENS.shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_padded_steps_give_the_same_bits(package, name):
    model = package.kernelize(model_of(name, BF16))
    first, second = (step_of(model, **padded()) for _ in range(2))
    assert all(torch.equal(first.gradients[key], second.gradients[key]) for key in first.gradients)


@pytest.mark.parametrize("name", FAMILIES)
def test_lora(package, name):
    check_lora(package, model_of(name, BF16), functools.partial(step_of, **padded()), target_modules="all-linear")


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_compile(package, name):
    check_compiled_half(package, model_of(name, BF16), step_of)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_one_by_one(package, name):
    check_cache(package, model_of(name, BF16), TOKENS[:, :120].to(DEVICE), 100)


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_layers_are_replayed_with_documents_that_lie_elsewhere(package, name):
    model = model_of(name, BF16)
    plain = package.kernelize(copy.deepcopy(model))
    package.capture(package.kernelize(model), *TOKENS.shape)
    for first in (30, 149, 11, 200):
        positions = torch.cat((torch.arange(first), torch.arange(300 - first)))[None].expand(4, -1).to(DEVICE)
        found, expected = (step_of(each, position_ids=positions) for each in (model, plain))
        assert all(torch.equal(found.gradients[key], gradient) for key, gradient in expected.gradients.items())
    rows = [row for row in package.explain(model).rows if "captured" in row.part]
    assert rows and all(row.fused for row in rows)
