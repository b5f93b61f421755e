"""The package for Qwen3.5: small models of transformers with it and without."""

import copy
import importlib

import kernels
import pytest
import torch
from kernels import Mode

from tests.models import Step, random_tokens, tiny_qwen3_5
from tests.ops.common import launched, runtime_of

TOKENS = random_tokens(2, 80)
FACTOR = 30  # of the bound for one operation: two fp32 runs of four layers; the few numbers of dt_bias and A_log are sums that cancel


def step_of(model, **inputs):
    return Step(model, **{"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **inputs})


def test_a_training_step(qwen3_5):
    model = tiny_qwen3_5()
    expected = step_of(model)
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    rows = qwen3_5.explain(model).rows
    assert all(row.fused for row in rows if "norm" in row.part)
    qwen3_5.reset()
    qwen3_5.apply()
    step_of(tiny_qwen3_5()).assert_same(expected, FACTOR)
    qwen3_5.reset()
    assert step_of(tiny_qwen3_5()).loss == expected.loss


def test_half_precision_is_as_exact_as_before(qwen3_5):
    model = tiny_qwen3_5(torch.bfloat16)
    exact = step_of(copy.deepcopy(model).float())
    before = step_of(model)
    qwen3_5.apply()
    for step in (found := step_of(model), before, exact):  # numbers of a head, and gates of which little is left, are a matter of luck
        step.gradients = {name: grad for name, grad in step.gradients.items() if grad.numel() > 64 and "in_proj_a" not in name}
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize("said", ("cu_seq_lens_q", "position_ids"))
def test_documents_in_a_row_are_those_that_stand_alone(qwen3_5, said):
    """Also where position_ids alone say so, in several rows; transformers raises, or lets documents leak into each other."""
    model = tiny_qwen3_5().eval()
    qwen3_5.apply()
    lengths = (30, 50, 80)
    row, positions = TOKENS.reshape(1, -1), torch.cat([torch.arange(n) for n in lengths])[None]
    inputs = {"position_ids": positions}
    if said == "cu_seq_lens_q":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 30, 80, 160], dtype=torch.int32)
    with torch.no_grad():
        packed = model(input_ids=row, use_cache=False, **inputs).logits
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in row.split(lengths, 1)], 1)
        rows = model(input_ids=TOKENS, position_ids=positions.view(2, 80), use_cache=False).logits
    assert torch.allclose(packed, alone, atol=1e-5)
    assert torch.allclose(rows.reshape(1, 160, -1), alone, atol=1e-5)


def test_generation(qwen3_5):
    model = tiny_qwen3_5().eval()
    expected = model.generate(TOKENS[:, :20], max_new_tokens=6, do_sample=False)
    qwen3_5.apply()
    assert torch.equal(model.generate(TOKENS[:, :20], max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(qwen3_5, reentrant):
    model = tiny_qwen3_5()
    expected = step_of(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)


def test_lora(qwen3_5):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = ["in_proj_qkv", "out_proj", "q_proj", "up_proj"]
    model = get_peft_model(tiny_qwen3_5(), LoraConfig(r=4, init_lora_weights=False, target_modules=adapted))
    expected = step_of(model)
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)


def test_padding(qwen3_5):
    model = tiny_qwen3_5()
    mask = (torch.arange(80) >= torch.tensor([[0], [30]])).long()
    inputs = {"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)}
    expected = step_of(model, **inputs)
    qwen3_5.apply()
    found = step_of(model, **inputs)
    for step in (expected, found):  # of these few numbers less is left where half of a row is padding
        step.gradients = {name: grad for name, grad in step.gradients.items() if not name.endswith(("A_log", "dt_bias"))}
    found.assert_same(expected, FACTOR)


def test_the_hubs_mapping(qwen3_5):
    model = tiny_qwen3_5()
    expected = step_of(model)
    with kernels.use_kernel_mapping(qwen3_5.mapping()):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")
    ours = importlib.import_module(f"{qwen3_5.__name__}.shared.hf.modules").is_marked
    nets = [module for module in model.modules() if type(module).__name__ in ("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNorm")]
    assert nets and all(ours(getattr(net.forward, "__func__", net.forward)) for net in nets)
    step_of(model).assert_same(expected, FACTOR)


def test_the_kernels_in_a_model(qwen3_5):
    """One layer of each kind in bf16, with heads of the kernels' size, in the interpreter."""
    from interpreter.backend import interpreting
    from tools.kernel_package import ROOT, read_package
    from tools.targets import operations

    model = tiny_qwen3_5(torch.bfloat16, 128, linear_num_key_heads=1, linear_num_value_heads=2, num_hidden_layers=2,
                 layer_types=["linear_attention", "full_attention"])
    tokens = random_tokens(1, 70)
    inputs = {"input_ids": tokens, "labels": tokens}
    exact = step_of(copy.deepcopy(model).float(), **inputs)
    before = step_of(model, **inputs)
    qwen3_5.apply()
    with interpreting(runtime_of(qwen3_5), operations(read_package(ROOT / "packages/qwen3_5"))):
        found = step_of(model, **inputs)
        assert {"delta_walk", "delta_inverse", "short_conv_backward"} <= {name.partition("-")[0] for name in launched(qwen3_5)}
    for step in (found, before, exact):
        step.gradients = {name: grad for name, grad in step.gradients.items() if grad.numel() > 64 and "in_proj_a" not in name}
    found.assert_as_exact_as(before, exact)


def test_whose_convolution_is_another_one_keeps_its_forward(qwen3_5):
    model = tiny_qwen3_5()
    model.model.layers[0].linear_attn.activation = "relu"
    expected = step_of(model)
    qwen3_5.apply()
    step_of(model).assert_same(expected, FACTOR)
