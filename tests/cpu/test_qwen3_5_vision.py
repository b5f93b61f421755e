"""Qwen3.5 and Qwen3.5-MoE with their vision towers: the text's layers are fused, and the loss comes without logits."""

import importlib
import inspect

import kernels
import pytest
import torch
from kernels import Mode

from tests.models import IMAGE, Step, check_compiled, random_tokens, tiny_qwen3_5_with_vision
from tests.patched import lora
from tests.tolerances import assert_close

NAMES = ("qwen3_5", "qwen3_5_moe")
with_both = pytest.mark.parametrize("name", NAMES)
FACTOR = 30  # as of the text alone
TOKENS = random_tokens(2, 80).clamp(max=180)


def text_inputs():
    return {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}


def inputs_with_images(padded=False):
    """An image of 16 x 16 between the words of each row."""
    tokens = TOKENS.clone()
    tokens[:, 3:9] = torch.tensor([195, *[IMAGE] * 4, 196])
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(3))
    found = {"input_ids": tokens, "labels": tokens.where(tokens < 190, -100), "pixel_values": pixels, "use_cache": False}
    found |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (tokens == IMAGE).long()}
    if padded:
        mask = (torch.arange(80) < torch.tensor([[80], [61]])).long()
        found |= {"attention_mask": mask, "labels": found["labels"].where(mask > 0, -100)}
    return found


def loss_row(package, model):
    return {row.part: row for row in package.explain(model).rows}["loss without logits"]


@with_both
@pytest.mark.parametrize("inputs", (text_inputs(), inputs_with_images(), inputs_with_images(True)), ids=("text", "images", "padded"))
def test_a_training_step(qwen3_5, name, inputs):
    model = tiny_qwen3_5_with_vision(name)
    expected, parameters = Step(model, **inputs), inspect.signature(model.forward).parameters
    assert not loss_row(qwen3_5, model).fused
    qwen3_5.kernelize(model)
    found = Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None and loss_row(qwen3_5, model).fused
    assert any(name.startswith("model.visual") for name in found.gradients) == ("pixel_values" in inputs)
    assert inspect.signature(model.forward).parameters.keys() == parameters.keys(), "a trainer drops columns that a forward does not name"
    rows = {row.part: row.fused for row in qwen3_5.explain(model).rows}
    assert rows["delta net"] and any(fused for part, fused in rows.items() if part.startswith("norm, "))
    assert_close(model.eval()(**inputs).loss, expected.loss, torch.float32, "loss in eval mode", FACTOR)
    qwen3_5.reset()
    assert torch.equal(Step(model.train(), **inputs).loss, expected.loss)


@with_both
def test_apply_and_options_of_the_loss(qwen3_5, name):
    """`apply` says for both classes what the loss is; False leaves both to transformers."""
    model, inputs = tiny_qwen3_5_with_vision(name), inputs_with_images()
    expected = Step(model, **inputs)
    qwen3_5.apply()
    patched = qwen3_5.get_patched_ops()
    assert patched.count("fused_linear_cross_entropy") == 1 and inspect.signature(qwen3_5.apply).parameters.keys() >= {*patched}
    found = Step(model, **inputs, num_items_in_batch=3, return_token_accuracy=True)
    assert found.output.token_accuracy >= 0
    counted = int((inputs["labels"][:, 1:] >= 0).sum())
    assert_close(found.loss * 3 / counted, expected.loss, torch.float32, "sum")
    qwen3_5.apply(fused_linear_cross_entropy={"skip_logits": False})
    assert Step(model, **inputs).output.logits is not None
    assert "skip_logits=False" in loss_row(qwen3_5, model).reason
    qwen3_5.apply(fused_linear_cross_entropy=False)
    found = Step(model, **inputs)
    assert found.output.logits is not None and not loss_row(qwen3_5, model).fused
    found.assert_same(expected, FACTOR)


@pytest.mark.parametrize("images", (False, True))
def test_the_router_adds_its_loss(qwen3_5, images):
    model = tiny_qwen3_5_with_vision("qwen3_5_moe")
    inputs = {**(inputs_with_images(True) if images else text_inputs()), "output_router_logits": True}
    expected = Step(model, **inputs)
    without = Step(model, **{**inputs, "output_router_logits": False})
    assert expected.loss > without.loss + 1e-3, "the auxiliary loss is a part of it"
    qwen3_5.kernelize(model)
    found = Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None
    assert_close(found.output.aux_loss, expected.output.aux_loss, torch.float32, "auxiliary loss")


@with_both
def test_lora(qwen3_5, name):
    """Adapters are on the text's projections, or on the head, which is then called."""
    inputs = inputs_with_images()
    for targets, fused in ((r".*language_model.*\.(in_proj_qkv|out_proj|q_proj|o_proj)", True), (r".*(lm_head|q_proj)", False)):
        model = lora(tiny_qwen3_5_with_vision(name), target_modules=targets)
        expected = Step(model, **inputs)
        qwen3_5.kernelize(model)
        found = Step(model, **inputs)
        found.assert_same(expected, FACTOR)
        assert loss_row(qwen3_5, model).fused == fused and (found.output.logits is None) == fused


@with_both
def test_generation(qwen3_5, name):
    model, inputs = tiny_qwen3_5_with_vision(name).eval(), inputs_with_images()
    prompt = {key: value for key, value in inputs.items() if key not in ("labels", "use_cache")}
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    qwen3_5.apply()
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), expected)


@with_both
def test_torch_compile(qwen3_5, name):
    model = tiny_qwen3_5_with_vision(name)
    expected = Step(model, **text_inputs())
    qwen3_5.kernelize(model)
    check_compiled(model, expected, FACTOR, **text_inputs())


@with_both
def test_the_hubs_mapping(qwen3_5, name):
    """Its forward has the release's own number of arguments, which `kernels` compares."""
    model, inputs = tiny_qwen3_5_with_vision(name), inputs_with_images()
    expected = Step(model, **inputs)
    with kernels.use_kernel_mapping({key: layer for key, layer in qwen3_5.mapping().items() if key.endswith("ForConditionalGeneration")}):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")
    found = Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None


@pytest.mark.parametrize("when", ("before", "after"))
@with_both
def test_the_head_of_trls_trainers(qwen3_5, name, when, monkeypatch):
    """Log-probabilities of a batch with images, with TRL's head put on the model before ours or after it."""
    utils = pytest.importorskip("trl.trainer.utils")
    inputs, model = {**inputs_with_images(True), "fused_lm_head": True}, tiny_qwen3_5_with_vision(name)
    plain = tiny_qwen3_5_with_vision(name)
    utils.add_fused_lm_head(plain, outputs=("log_probs", "entropy"))
    expected, called = Step(plain, **inputs), []
    if when == "before":
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        qwen3_5.apply()
    else:
        qwen3_5.kernelize(model)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ours = importlib.import_module(f"{qwen3_5.__name__}.shared.hf.model.trl")
    run = ours.linear_log_probs
    monkeypatch.setattr(ours, "linear_log_probs", lambda *args, **options: called.append(1) or run(*args, **options))
    found = Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert called
    for key in ("log_probs", "entropy"):
        assert_close(found.output[key], expected.output[key], torch.float32, key, FACTOR)
    row = {row.part: row for row in qwen3_5.explain(model).rows}["log-probabilities in TRL's trainers"]
    assert row.fused
    assert loss_row(qwen3_5, model).fused == (when == "after"), "of other losses, which TRL's head gives to the forward that it found"
    assert (Step(model, **inputs_with_images()).output.logits is None) == (when == "after")
