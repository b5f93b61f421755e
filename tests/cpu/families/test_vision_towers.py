"""Decoders behind a vision tower: their layers, their loss without logits, TRL's head, LoRA and graphs, on models of transformers."""

import importlib
import inspect

import pytest
import torch

from tests.decoder_families import (
    FACTOR,
    IMAGE,
    NODES,
    TOKENS,
    TOWERS,
    VIDEO,
    VISION,
    inputs_with_images,
    of_words_and_image,
    step_of,
    tiny,
    tiny_behind_a_tower,
)
from tests.models import Step, check_compiled
from tests.patched import calls_of, lora
from tests.tolerances import assert_close


def behind(name, padded=False, **changes):
    """(a small model behind a vision tower, a batch with images for it)"""
    if name in VISION:
        return tiny(name, **changes), of_words_and_image(padded)
    model = tiny_behind_a_tower(name, **changes)
    return model, inputs_with_images(model, padded)


@pytest.mark.parametrize("name", VISION)
def test_positions_that_a_caller_gives(package, name):
    """Angles of documents and of three axes."""
    model, inputs = behind(name)
    positions = torch.arange(17) % 9
    given = [positions.expand(2, -1), positions.expand(3, 2, -1), positions.expand(4, 2, -1)]
    tokens = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"], "use_cache": False}
    expected = [step_of(model, **inputs), *(Step(model, **tokens, position_ids=axes) for axes in given)]
    package.apply()
    for implementation in ("sdpa", "bastile"):
        model.set_attn_implementation({"text_config": implementation})
        found = [step_of(model, **inputs), *(Step(model, **tokens, position_ids=axes) for axes in given)]
        for step, right in zip(found, expected):
            step.assert_same(right, FACTOR)
            assert step.output.logits is None


def loss_row(package, model):
    return {row.part: row for row in package.explain(model).rows}["loss without logits"]


@pytest.mark.parametrize("text", ("llama", "mistral"))
def test_a_text_behind_another_vision_tower(package, calls, text):
    """Its layers are fused, and the loss needs no logits, as the tower's own forward says."""
    model = tiny_behind_a_tower(text, "VipLlava")
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None
    assert loss_row(package, model).fused


def test_a_causal_lm_that_another_model_calls_for_its_logits(package, calls):
    """BLIP-2 computes the loss itself, from the logits of the causal LM that it holds."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
    config = Blip2Config(
        text_config=tiny("llama").config.to_dict(), vision_config={**size, "image_size": 8, "patch_size": 4},
        qformer_config={**size, "encoder_hidden_size": 32, "attention_probs_dropout_prob": 0.0}, num_query_tokens=4,
        image_token_index=IMAGE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).train()
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    for step in (found, expected):  # of biases that the softmax takes away again
        step.gradients = {name: gradient for name, gradient in step.gradients.items() if not name.endswith("key.bias")}
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is not None
    rows = [row for row in package.explain(model).rows if row.part == "loss without logits"]
    (row,) = rows
    assert "LlamaForCausalLM.forward" in row.reason and "in line" in row.reason


BEHIND = (*TOWERS, *VISION)
behind_towers = pytest.mark.parametrize("text", BEHIND)


def features_of(output, kind: str) -> torch.Tensor:
    """All numbers of what a vision tower gives the decoder. transformers has them as a tensor or a list of these; in `*_hidden_states` or,
    from 5.24 on, in `*_outputs` with all else that the tower returns."""
    found = getattr(output, f"{kind}_outputs", None)
    found = getattr(output, f"{kind}_hidden_states") if found is None else found
    found = getattr(found, "pooler_output", found)
    return torch.cat([part.flatten() for part in ([found] if isinstance(found, torch.Tensor) else found)])


@pytest.mark.parametrize(
    ("text", "inputs", "changes"),
    [
        *((text, inputs, {}) for inputs in ({}, {"num_items_in_batch": 3}, {"output_hidden_states": True}) for text in BEHIND),
        ("gemma3_text", {}, {"final_logit_softcapping": 0.7}),
        ("paligemma", {}, {"final_logit_softcapping": 0.7}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
def test_a_training_step_behind_a_vision_tower(package, calls, text, inputs, changes, padded):
    """The loss makes no logits. Gemma 3: an image's tokens see each other, and logits are never capped: transformers reads no softcap.
    PaliGemma: a prefix's tokens do, and logits are capped since transformers 5.23. Qwen's: angles of three positions a token, in Qwen3-VL
    visual features that are added after the first layer."""
    model, given = behind(text, padded, **changes)
    inputs = {**given, **inputs}
    expected, before = step_of(model, **inputs), inspect.signature(model.forward).parameters
    assert not loss_row(package, model).fused
    package.kernelize(model)
    rows = package.explain(model).rows
    assert [(row.count, row.fused) for row in rows if row.part == "loss without logits"] == [(1, True)]
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None
    assert any(name.startswith(("model.vision_tower", "model.vision_model", "model.visual")) for name in found.gradients)
    assert inspect.signature(model.forward).parameters.keys() == before.keys(), "a trainer drops columns that a forward does not name"
    for found_states, states in zip(found.output.hidden_states or (), expected.output.hidden_states or ()):
        assert_close(found_states, states, torch.float32, "hidden states", FACTOR)
    assert (found.output.hidden_states is None) == (expected.output.hidden_states is None)
    if text in TOWERS:
        assert_close(*(features_of(step.output, "image") for step in (found, expected)), torch.float32, "image", FACTOR)
    evaluated = model.eval()(**inputs)
    assert evaluated.logits is not None
    assert_close(evaluated.logits, expected.output.logits, torch.float32, "logits in eval mode", FACTOR)
    package.reset()
    assert torch.equal(step_of(model.train(), **inputs).loss, expected.loss)


@pytest.mark.parametrize("aspect", ({}, {"batch_num_images": torch.tensor([1, 1])}), ids=("", "numbers of images"))
def test_images_and_videos_behind_one_vision_tower(package, calls, aspect):
    """LLaVA-OneVision: a video of two frames, each a token, with one token after them, beside an image in tiles."""
    model = tiny_behind_a_tower("llava_onevision")
    inputs = {**inputs_with_images(model, True), **aspect}
    inputs["input_ids"][:, :3] = VIDEO
    inputs["pixel_values_videos"] = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None and expected.output.logits is not None
    assert_close(*(features_of(step.output, "video") for step in (found, expected)), torch.float32, "video", FACTOR)


@pytest.mark.parametrize("capped", (True, False), ids=("capped scores", "no caps"))
@pytest.mark.parametrize("both", (True, False), ids=("both directions", "one direction"))
def test_a_prefix_that_sees_itself_behind_a_vision_tower(package, calls, both, capped):
    """PaliGemma 2: no attention takes a mask with a prefix for a causal one, nor the other way round. Up to transformers 5.20 it may run
    in SDPA, which does the latter in both directions, and ours does as that."""
    changes = {"use_bidirectional_attention": both, **({} if capped else {"attn_logit_softcapping": None})}
    model = tiny_behind_a_tower("paligemma", **changes)
    text, with_prefix = model.model.language_model, inputs_with_images(model, True)
    text.set_attn_implementation("eager")
    batches = [with_prefix, {**with_prefix, "token_type_ids": None}, {**with_prefix, "token_type_ids": None, "attention_mask": None}]
    expected = [step_of(model, **batch) for batch in batches]
    assert not torch.equal(expected[0].loss, expected[1].loss)
    package.kernelize(model)
    for implementation in ("eager", "bastile"):
        text.set_attn_implementation(implementation)
        for batch, right in zip(batches, expected):
            if implementation == "bastile" and both and text._supports_sdpa and batch is not with_prefix:
                continue
            calls.clear()
            found = step_of(model, **batch)
            found.assert_same(right, FACTOR)
            assert found.output.logits is None and calls == NODES * 2


@pytest.mark.parametrize("text", ("gemma", "gemma3_text"))
def test_other_texts_behind_the_tower_of_paligemma(package, text):
    """`apply` puts the loss on the class, whatever text is behind it: Gemma's configuration has no softcap."""
    model = tiny_behind_a_tower(text, "PaliGemma")
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.apply()
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None
    assert_close(model.eval()(**inputs).logits, expected.output.logits, torch.float32, "logits in eval mode", FACTOR)


@behind_towers
def test_apply_and_the_hubs_mapping_behind_a_vision_tower(package, text):
    """`apply` decides about its loss with the argument of the text's; kept logits and generated tokens are transformers'."""
    kernels = pytest.importorskip("kernels")
    model, inputs = behind(text)
    prompt = {key: value for key, value in inputs.items() if key != "labels"}
    some = {**prompt, "logits_to_keep": 2}
    expected, kept = step_of(model, **inputs), model.eval()(**some).logits
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    package.apply()
    patched = package.get_patched_ops()
    assert patched.count("fused_linear_cross_entropy") == 1 and inspect.signature(package.apply).parameters.keys() >= {*patched}
    assert_close(model(**some).logits, kept, torch.float32, "kept logits", FACTOR)
    assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), generated)
    found = step_of(model.train(), **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None
    package.apply(fused_linear_cross_entropy=False)
    assert step_of(model, **inputs).output.logits is not None and not loss_row(package, model).fused
    package.reset()
    with kernels.use_kernel_mapping({key: layer for key, layer in package.mapping().items() if key == type(model).__name__}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None


@behind_towers
def test_the_head_of_trls_trainers_behind_a_vision_tower(package, text):
    utils = pytest.importorskip("trl.trainer.utils")
    model, inputs = behind(text, True)
    utils.add_fused_lm_head(model)
    expected, theirs = Step(model, **inputs, fused_lm_head=True), Step(model, **inputs)
    del model.forward
    package.kernelize(model)
    utils.add_fused_lm_head(model)
    found, ours = Step(model, **inputs, fused_lm_head=True), Step(model, **inputs)
    found.assert_same(expected, FACTOR)
    ours.assert_same(theirs, FACTOR)
    rows = {row.part: row.fused for row in package.explain(model).rows}
    assert rows["log-probabilities in TRL's trainers"] and rows["loss without logits"] and ours.output.logits is None


OF_TEXT = r".*(language_model|text_model)\.layers.*\.(q_proj|o_proj|up_proj)"


@pytest.mark.parametrize("targets", (OF_TEXT, r".*(lm_head|q_proj)"), ids=("text", "head"))
@behind_towers
def test_lora_behind_a_vision_tower(package, text, targets):
    """Adapters are on the text's projections, with the padded rows checkpointed, or on the head, which is then called."""
    (model, inputs), fused = behind(text, True), "lm_head" not in targets
    model = lora(model, target_modules=targets)
    if fused:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert loss_row(package, model).fused == fused == (found.output.logits is None)


@pytest.mark.parametrize("text", ("gemma3_text", "mistral", "qwen2_5_vl"))
def test_torch_compile_behind_a_vision_tower(package, text):
    """In one graph, but for images of Mistral 3 and Qwen2.5-VL: their sizes are data, which breaks transformers' own graph as well."""
    model = tiny(text) if text in VISION else tiny_behind_a_tower(text)
    inputs = {**(inputs_with_images(model) if text == "gemma3_text" else {"input_ids": TOKENS, "labels": TOKENS}), "use_cache": False}
    expected = step_of(model, **inputs)
    package.kernelize(model)
    check_compiled(model, expected, FACTOR, **inputs)


@pytest.mark.parametrize("backwards", (False, True), ids=("", "backwards"))
def test_two_families_behind_one_vision_tower(package, calls, backwards):
    """Their class is one: what is on one model is not on the other, and everything comes off again in either order."""
    patching = importlib.import_module(f"{package.__name__}.shared.hf.install.patching")
    families = calls_of(package).families
    models = [tiny_behind_a_tower(text) for text in ("mistral", "ministral3")]
    cls, inputs = type(models[0]), inputs_with_images(models[0])
    assert type(models[1]) is cls
    steps, before = [step_of(model, **inputs) for model in models], dict(vars(cls))

    def unmade():
        """Whether each model's step is the same, without logits."""
        found = [step_of(model, **inputs) for model in models]
        for step, expected in zip(found, steps):
            step.assert_same(expected, FACTOR)
        return [step.output.logits is None for step in found]

    def take_off():
        patching.reset(families[::-1] if backwards else families)
        assert dict(vars(cls)) == before and unmade() == [False, False] and not calls

    package.kernelize(models[backwards])
    assert unmade() == [not backwards, backwards] and calls == NODES * 2
    assert [loss_row(package, model).fused for model in models] == [not backwards, backwards]
    calls.clear()
    take_off()
    package.apply(fused_linear_cross_entropy={"label_smoothing": 0.0})
    assert unmade() == [True, True] and all(loss_row(package, model).fused for model in models)
    package.kernelize(models[backwards])
    package.apply()
    assert unmade() == [True, True] and "fused_linear_cross_entropy" in package.get_patched_ops()
    calls.clear()
    take_off()


def test_a_text_of_a_third_family_behind_the_tower_of_two(package, calls):
    """`kernelize` reads what its forward does with its logits; `apply` puts the layer of a row on the class, whatever text is behind it."""
    model = tiny_behind_a_tower("llama", "Mistral3")
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None and loss_row(package, model).fused
    package.reset()
    package.apply()
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None and loss_row(package, model).fused
