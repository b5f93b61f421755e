"""The one decoder layer on model families of transformers: each is a row of the table, and must train as transformers' own. Families
without biases and with them also run every feature in the interpreted kernels."""

import copy
import importlib
import inspect

import pytest
import torch

from tests.compile_checks import compiled_with_masks
from tests.cpu.conftest import kernels_of
from tests.decoder_families import (
    CHANGES,
    EVERYWHERE,
    IMAGE,
    IN_TURNS,
    NAMES,
    TOWERS,
    UNCHANGING,
    VARIANTS,
    VIDEO,
    VISION,
    WINDOW,
    inputs_with_images,
    of_words_and_image,
    tiny,
    tiny_behind_a_tower,
)
from tests.models import Step, check_compiled, random_tokens
from tests.tolerances import assert_close, relative_error

TOKENS = random_tokens(2, 21)
FEW = ("llama", "qwen2")  # of the kinds that a package is for: without biases, and with
LAST_OF_TEXT = "model.language_model.norm.weight"
FEW_LEFT = ("q_proj.bias", "k_proj.bias")
BATCHES = 4
FACTOR = 3  # two fp32 runs of a model differ by more than an operation from float64


KERNELS = {"rms_norm_any_forward", "rotary_any", "swiglu_any_forward"}  # what every test of a layer launches


@pytest.fixture
def package(decoders, interpret, request):
    """The package of all these families, in PyTorch or, where a test asks for it, in interpreted kernels."""
    if not getattr(request, "param", False):
        return (yield decoders)
    backend = interpret(decoders, kernels_of("packages/decoders"))
    yield decoders
    assert {variant.split("-")[0] for variant in backend.launched} >= KERNELS


def of_families(*names, kernels=FEW):
    """Runs a test with each of the families in PyTorch, and with some in interpreted kernels."""
    runs = [pytest.param(name, False, id=name) for name in names] + [pytest.param(name, True, id=f"{name}-kernels") for name in kernels]
    return pytest.mark.parametrize("name, package", runs, indirect=["package"])


@pytest.fixture
def calls(package, monkeypatch):
    """The names of the decoder layer's nodes, as they are called."""
    found, layer = [], importlib.import_module(f"{package.__name__}.shared.hf.decoder_layer")
    for name in ("norm_attention_inputs", "norm_mlp"):
        original = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *a, name=name, original=original: found.append(name) or original(*a))
    return found


NODES = ["norm_attention_inputs", "norm_mlp"]


def step_of(model, **inputs):
    """A step whose dropouts draw the same numbers each time."""
    torch.manual_seed(0)
    return Step(model, **{"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **inputs})


@of_families(*NAMES)
def test_a_training_step(package, calls, name):
    model = tiny(name, attn_implementation="eager")
    expected = step_of(model)
    package.kernelize(model)
    found = step_of(model)
    assert calls == NODES * 2
    found.assert_same(expected, FACTOR)
    rows = {row.part: row.fused for row in package.explain(model).rows if "norm" in row.part or row.part == "o_proj"}
    assert len(rows) == 3 and all(rows.values())


def without_few_numbers(step):
    """A step without the gradients of a handful of numbers, and of the biases of q and k, which are what is left of large ones: their
    errors in half precision are a matter of luck."""
    step.gradients = {name: grad for name, grad in step.gradients.items() if grad.numel() > 24 and not name.endswith(FEW_LEFT)}
    return step


@of_families(*NAMES, kernels=("llama",))
def test_half_precision_is_as_exact_as_before(package, calls, name):
    model = tiny(name, torch.bfloat16, attn_implementation="eager")
    exact, before = steps_of_batches(copy.deepcopy(model).float()), steps_of_batches(model)
    package.apply()
    assert_err_no_more(steps_of_batches(model), before, exact)
    assert calls == NODES * 2 * len(exact)


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in NAMES for variant in VARIANTS[name]])
def test_what_a_configuration_may_change(package, calls, name, variant):
    """Losses and gradients in fp32, in eager attention, SDPA and ours, and in bf16."""
    large = {"initializer_range": 0.1}  # or scores hardly differ, and neither a window nor a cap changes much
    changes = {**large, **VARIANTS[name][variant]}
    kinds = ("eager",) if name == "gemma2" else ("eager", "sdpa")  # Gemma 2 has no other
    models = [tiny(name, attn_implementation=kind, **changes) for kind in kinds]
    half = tiny(name, torch.bfloat16, attn_implementation="eager", **changes)
    expected = [step_of(model) for model in models]
    exact, before = steps_of_batches(copy.deepcopy(half).float()), steps_of_batches(half)
    plain, last = step_of(tiny(name, attn_implementation="eager", **large)), "model.norm.weight" if name not in VISION else LAST_OF_TEXT
    assert variant == "no windows" or relative_error(expected[0].gradients[last], plain.gradients[last]) > 1e-3
    package.apply()
    for model, step in zip(models, expected, strict=True):
        step_of(model).assert_same(step, FACTOR)
    models[-1].set_attn_implementation("bastile")
    step_of(models[-1]).assert_same(expected[-1], FACTOR)
    if variant != "dropout":  # bf16 draws other numbers than fp32
        assert_err_no_more(steps_of_batches(half), before, exact)
    assert set(calls) == (set() if variant == "another activation" else set(NODES))


def steps_of_batches(model):
    return [without_few_numbers(step_of(model, input_ids=tokens, labels=tokens)) for tokens in random_tokens(BATCHES, 2, 21)]


def assert_err_no_more(found, before, exact):
    """Losses, and each gradient over all batches: in which of them more errors add up than cancel is a matter of luck, and of the
    processor."""
    for mine, other, right in zip(found, before, exact, strict=True):
        assert relative_error(mine.loss, right.loss) <= 2 * relative_error(other.loss, right.loss) + 1e-3
    for name in exact[0].gradients:
        mine, others = (
            sum(relative_error(one.gradients[name], right.gradients[name]) ** 2 for one, right in zip(steps, exact, strict=True)) ** 0.5
            for steps in (found, before)
        )
        assert mine <= 1.25 * others + 1e-3, f"{name}: relative error {mine:.2e}, without the layers {others:.2e}"


@of_families(*FEW, "gemma3_text", "glm4", "olmo2")
def test_autocast(package, calls, name):
    model = tiny(name)
    exact = without_few_numbers(step_of(model))
    with torch.autocast("cpu", torch.bfloat16):
        before = step_of(model)
        package.apply()
        found = step_of(model)
    assert calls == NODES * 2
    assert {n: g.dtype for n, g in found.gradients.items()} == {n: g.dtype for n, g in before.gradients.items()}
    found.assert_as_exact_as(before, exact)


@pytest.mark.parametrize("options", ({}, {"lora_dropout": 0.3, "lora_bias": True}), ids=("plain", "dropout and biases"))
@of_families(*FEW, "phi3")
def test_lora(package, calls, name, options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny(name), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear", **options)).train()
    expected = step_of(model)
    package.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    assert calls == NODES * 2


@pytest.mark.parametrize("keep_attention", (False, True))
@of_families(*FEW)
def test_gradient_checkpointing(package, calls, name, keep_attention):
    model = tiny(name)
    expected = step_of(model)
    model.gradient_checkpointing_enable()
    package.kernelize(model, keep_attention=keep_attention)
    step_of(model).assert_same(expected, FACTOR)
    assert len(calls) == 8


@of_families(*FEW, "gemma3_text", "phi3")
def test_made_again_in_the_backward_pass(package, calls, name):
    model = tiny(name)
    package.apply()
    expected = step_of(model)
    package.apply(recompute_mlp=True)
    found = step_of(model)
    assert all(torch.equal(found.gradients[key], expected.gradients[key]) for key in expected.gradients) and calls == NODES * 4


@of_families(*FEW, "granitemoehybrid")
def test_documents_and_padding(package, calls, name):
    """Packed documents by their positions, and a batch with padding, in attention of ours."""
    model = tiny(name)
    positions = torch.cat((torch.arange(8), torch.arange(13)))[None].expand(2, -1)
    mask = (torch.arange(21) >= torch.tensor([[0], [9]])).long()
    inputs = ({"position_ids": positions}, {"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)})
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    model.set_attn_implementation("bastile")
    for each, step in zip(inputs, expected, strict=True):
        step_of(model, **each).assert_same(step, FACTOR)
    assert calls == NODES * 4


@pytest.mark.parametrize(("name", "variant"), (("mistral", "both directions"), ("gemma3_text", "both directions"), ("llama", None)))
def test_attention_in_both_directions(package, calls, name, variant):
    """Models that embed text have it: no mask of ours is causal, nor one for documents, padding or a graph."""
    model = tiny(name, initializer_range=0.1, **(VARIANTS[name][variant] if variant else {"is_causal": False}))
    positions = torch.cat((torch.arange(8), torch.arange(13)))[None].expand(2, -1)
    mask = (torch.arange(21) >= torch.tensor([[0], [9]])).long()
    inputs = ({}, {"position_ids": positions}, {"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)})
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    model.set_attn_implementation("bastile")
    for each, step in zip(inputs, expected, strict=True):
        step_of(model, **each).assert_same(step, FACTOR)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss, expected[0].loss, torch.float32, "loss")


@of_families(*FEW)
def test_weights_side_by_side(package, calls, name):
    model = tiny(name)
    expected = step_of(model)
    package.kernelize(package.pack(model))
    rows = {row.part: row.fused for row in package.explain(model).rows if "one GEMM" in row.part}
    assert rows == {"q_proj, k_proj, v_proj as one GEMM": True, "gate_proj, up_proj as one GEMM": True}
    step_of(model).assert_same(expected, FACTOR)


@of_families(*FEW, "gemma3_text", "glm4", "granitemoehybrid")
def test_torch_compile(package, calls, name):
    kinds = {"layer_types": CHANGES[name]["layer_types"][:1]} if "layer_types" in CHANGES.get(name, {}) else {}
    model = tiny(name, num_hidden_layers=1, **kinds)
    expected = step_of(model)
    package.kernelize(model)
    check_compiled(model, expected, FACTOR, input_ids=TOKENS, labels=TOKENS, use_cache=False)


@pytest.mark.parametrize(
    ("name", "how"), (("llama", "apply"), ("llama", "kernelize"), ("llama", "hook"), ("llama", "packed"), ("phi3", "apply"))
)
def test_attention_of_a_decoder_with_one_mask_has_none_when_compiled(package, name, how):
    """transformers makes one in every graph. It stays where a layer has a hook, which would see what stands for no mask, and for
    positions that may be those of documents."""
    model = tiny(name)
    inputs = {"position_ids": torch.cat((torch.arange(8), torch.arange(13)))[None].expand(2, -1)} if how == "packed" else {}
    seen = []
    if how == "hook":
        model.model.layers[0].register_forward_pre_hook(lambda layer, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    expected = step_of(model, **inputs)
    package.kernelize(model) if how == "kernelize" else package.apply()
    compiled, masked = compiled_with_masks(model)
    found = Step(model, compiled, input_ids=TOKENS, labels=TOKENS, use_cache=False, **inputs)
    found.assert_same(expected, FACTOR)
    assert masked == [how in ("hook", "packed")] * 2 and all(mask is None or mask.numel() for mask in seen)


@pytest.mark.parametrize(("name", "entries"), (("llama", IN_TURNS), ("granite", WINDOW), ("mistral", IN_TURNS), ("phi3", IN_TURNS)))
def test_entries_of_a_configuration_that_its_decoder_does_not_read_change_nothing(package, calls, name, entries):
    """A Mistral that was saved as a Llama brings its sliding_window, and a configuration keeps whatever stands in its file."""
    model = tiny(name, **{"sliding_window": None, **entries})
    positions = torch.cat((torch.arange(8), torch.arange(13)))[None].expand(2, -1)
    mask = (torch.arange(21) >= torch.tensor([[0], [9]])).long()
    inputs = ({}, {"position_ids": positions}, {"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)})
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    compiled, _ = compiled_with_masks(model)
    Step(model, compiled, input_ids=TOKENS, labels=TOKENS, use_cache=False).assert_same(expected[0], FACTOR)
    model.set_attn_implementation("bastile")
    for each, step in zip(inputs, expected, strict=True):
        step_of(model, **each).assert_same(step, FACTOR)


@of_families(*FEW, "phi3", "smollm3", "granitemoehybrid")
def test_generation(package, calls, name):
    model = tiny(name).eval()
    expected = model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    package.apply()
    assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), expected) and calls


@pytest.mark.parametrize("name", ("llama",))
def test_what_the_row_does_not_say_is_called_as_it_is(package, calls, name):
    """A dropout after a branch, another activation, a hook."""
    model = tiny(name)
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: None)
    expected = step_of(model)
    package.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    assert calls == ["norm_mlp"]
    assert {row.reason for row in package.explain(model).rows if not row.fused} >= {"the activation of mlp is not SiLU, or has hooks"}


@pytest.mark.parametrize("how", ("apply", "kernelize"))
def test_granites_layers_with_mamba_or_experts_are_called_as_they_are(package, calls, how):
    """One layer of each kind, and with experts beside its MLP none that is taken apart."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "mamba_d_state": 8, "mamba_chunk_size": 8}
    for changes, nodes, reason in (
        (kinds, NODES, "the layer has mamba"), ({"num_local_experts": 4, "intermediate_size": 24}, [], "the layer has block_sparse_moe"),
    ):
        calls.clear()
        model = tiny("granitemoehybrid", **changes)
        expected, text = step_of(model), model.eval().generate(TOKENS, max_new_tokens=3, do_sample=False)
        package.apply() if how == "apply" else package.kernelize(model)
        step_of(model.train()).assert_same(expected, FACTOR)
        assert calls == nodes
        assert f"{reason}, which is called as it is" in {row.reason for row in package.explain(model).rows}
        assert torch.equal(model.eval().generate(TOKENS, max_new_tokens=3, do_sample=False), text)
        package.reset()


def test_a_function_of_someone_elses_that_scales_queries_is_called(package, calls, monkeypatch):
    model = tiny("ministral3", attn_implementation="eager")
    package.apply()
    before = step_of(model)
    modeling = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(modeling, "get_llama_4_attn_scale", lambda positions, *_: torch.full((1, 1, positions.shape[1], 1), 9.0))
    after = step_of(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert calls == NODES * 2 and not torch.equal(after.gradients[name], before.gradients[name])
    assert "get_llama_4_attn_scale is not transformers' own" in {row.reason for row in package.explain(model).rows}


@pytest.mark.parametrize("more", ({}, {"num_items_in_batch": 3}, {"output_hidden_states": True}), ids=" ".join)
@pytest.mark.parametrize("name", VISION)
def test_an_image_between_words(package, calls, name, more):
    """Angles of three positions a token, in Qwen3-VL visual features that are added after the first layer, and padding, which stays."""
    model, inputs = tiny(name), {**of_words_and_image(), **more}
    expected = step_of(model, **inputs)
    before = inspect.signature(model.forward).parameters
    package.kernelize(model)
    rows = package.explain(model).rows
    assert [(row.count, row.fused) for row in rows if row.part == "loss without logits"] == [(1, True)]
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None and any(name.startswith("model.visual") for name in found.gradients)
    assert inspect.signature(model.forward).parameters.keys() == before.keys(), "a trainer drops columns that a forward does not name"
    assert (found.output.hidden_states is None) == (expected.output.hidden_states is None)
    for found_states, states in zip(found.output.hidden_states or (), expected.output.hidden_states or ()):
        assert_close(found_states, states, torch.float32, "hidden states", FACTOR)
    package.reset()
    assert torch.equal(step_of(model, **inputs).loss, expected.loss) and not loss_row(package, model).fused


@pytest.mark.parametrize("name", VISION)
def test_apply_and_the_hubs_mapping_with_a_tower_of_qwen(package, name):
    """Kept logits and generated tokens are transformers', and angles of documents and of three axes, which a caller gives."""
    kernels = pytest.importorskip("kernels")
    model, inputs = tiny(name).eval(), of_words_and_image(padded=False)
    prompt = {key: value for key, value in inputs.items() if key != "labels"}
    some = {**prompt, "logits_to_keep": 2}
    positions = torch.arange(17) % 9
    given = [positions.expand(2, -1), positions.expand(3, 2, -1), positions.expand(4, 2, -1)]
    tokens = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"], "use_cache": False}
    kept, generated = model(**some).logits, model.generate(**prompt, max_new_tokens=4, do_sample=False)
    expected = [step_of(model.train(), **inputs), *(Step(model, **tokens, position_ids=axes) for axes in given)]
    package.apply()
    assert_close(model.eval()(**some).logits, kept, torch.float32, "kept logits", FACTOR)
    assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), generated)
    for implementation in ("sdpa", "bastile"):
        model.set_attn_implementation({"text_config": implementation})
        found = [step_of(model.train(), **inputs), *(Step(model, **tokens, position_ids=axes) for axes in given)]
        for step, right in zip(found, expected):
            step.assert_same(right, FACTOR)
            assert step.output.logits is None
    model.set_attn_implementation({"text_config": "sdpa"})
    package.reset()
    with kernels.use_kernel_mapping({key: layer for key, layer in package.mapping().items() if key == type(model).__name__}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    found = step_of(model, **inputs)
    found.assert_same(expected[0], FACTOR)
    assert found.output.logits is None


def loss_row(package, model):
    return {row.part: row for row in package.explain(model).rows}["loss without logits"]


@pytest.mark.parametrize("text", ("llama", "mistral"))
def test_a_text_behind_another_vision_tower(package, calls, text):
    """Its layers are fused, and the loss, with its logits, is transformers' own."""
    model = tiny_behind_a_tower(text, "VipLlava")
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is not None
    assert loss_row(package, model).reason == "VipLlavaForConditionalGeneration makes all logits and computes its loss from them"


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
    assert [row.reason for row in rows] == ["Blip2ForConditionalGeneration makes all logits and computes its loss from them"]


behind_towers = pytest.mark.parametrize("text", TOWERS)


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
        *((text, {}, {}) for text in TOWERS),
        *((text, {"num_items_in_batch": 3}, {}) for text in TOWERS),
        *((text, {"output_hidden_states": True}, {}) for text in TOWERS),
        ("gemma3_text", {}, {"final_logit_softcapping": 0.7}),
        ("paligemma", {}, {"final_logit_softcapping": 0.7}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
def test_a_training_step_behind_a_vision_tower(package, calls, text, inputs, changes, padded):
    """The loss makes no logits. Gemma 3: an image's tokens see each other, and logits are never capped: transformers reads no softcap.
    PaliGemma: a prefix's tokens do, and logits are capped since transformers 5.23."""
    model = tiny_behind_a_tower(text, **changes)
    inputs = {**inputs_with_images(model, padded), **inputs}
    expected, before = step_of(model, **inputs), inspect.signature(model.forward).parameters
    assert not loss_row(package, model).fused
    package.kernelize(model)
    rows = package.explain(model).rows
    assert [(row.count, row.fused) for row in rows if row.part == "loss without logits"] == [(1, True)]
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is None
    assert any(name.startswith(("model.vision_tower", "model.vision_model")) for name in found.gradients)
    assert inspect.signature(model.forward).parameters.keys() == before.keys(), "a trainer drops columns that a forward does not name"
    for found_states, states in zip(found.output.hidden_states or (), expected.output.hidden_states or ()):
        assert_close(found_states, states, torch.float32, "hidden states", FACTOR)
    assert (found.output.hidden_states is None) == (expected.output.hidden_states is None)
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
    model = tiny_behind_a_tower(text)
    inputs = inputs_with_images(model)
    prompt = {key: value for key, value in inputs.items() if key != "labels"}
    some = {**prompt, "logits_to_keep": 2}
    expected, kept = step_of(model, **inputs), model.eval()(**some).logits
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    package.apply()
    patched = package.get_patched_ops()
    assert patched.count("fused_linear_cross_entropy") == 1 and "loss_with_vision" not in " ".join(patched)
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
    model = tiny_behind_a_tower(text)
    inputs = inputs_with_images(model, True)
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
@pytest.mark.parametrize("text", (*TOWERS, *VISION))
def test_lora_behind_a_vision_tower(package, text, targets):
    """Adapters are on the text's projections, with the padded rows checkpointed, or on the head, which is then called."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = tiny(text) if text in VISION else tiny_behind_a_tower(text)
    inputs, fused = of_words_and_image() if text in VISION else inputs_with_images(model, True), "lm_head" not in targets
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
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
    patching = importlib.import_module(f"{package.__name__}.shared.hf.patching")
    families = importlib.import_module(f"{package.__name__}.targets").FAMILIES
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
    """`kernelize` leaves the loss to transformers and says so; `apply` puts it on the class, whatever text is behind it."""
    model = tiny_behind_a_tower("llama", "Mistral3")
    inputs = inputs_with_images(model)
    expected = step_of(model, **inputs)
    package.kernelize(model)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert calls == NODES * 2 and found.output.logits is not None and loss_row(package, model).advice == "call apply(), or kernelize(model)"
    package.apply()
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None and loss_row(package, model).fused


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_of_a_layer_that_is_not_fused(package, calls, name):
    """Its parts run one by one, each in the dtypes of transformers' own."""
    model = tiny(name, torch.bfloat16, attn_implementation="eager")
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            module.act_fn = module.activation_fn = module.activation = torch.nn.ReLU()
    exact, before = steps_of_batches(copy.deepcopy(model).float()), steps_of_batches(model)
    package.apply()
    assert_err_no_more(steps_of_batches(model), before, exact)
    assert not calls


@pytest.mark.parametrize("name", ("phi3",))
def test_a_dropout_of_a_branch_is_drawn(package, calls, name):
    model = tiny(name, resid_pdrop=0.5)
    expected = step_of(model)
    package.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    assert calls == []
    model.eval()
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert calls == NODES * 2


def test_every_row_of_the_package_is_tested(package):
    """In the order of the rows; a small model's class tells which row it is for."""
    rows = importlib.import_module(f"{package.__name__}.families").ROWS
    assert [type(tiny(name, attn_implementation="eager")).__name__ for name in NAMES] == [own.family.causal_lm() for own in rows]
    assert CHANGES.keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_a_configuration_is_tested(name):
    """A release that gives a family one more has it tested too, or listed among those that leave its layers as they are."""
    config = tiny(name, attn_implementation="eager").config.get_text_config()
    options = set(vars(type(config))["__annotations__"])
    tested = set(CHANGES.get(name, ())).union(*VARIANTS[name].values()) | set(EVERYWHERE)
    assert {option for option in options - tested if not option.endswith("_plan")} <= UNCHANGING.get(name, set())
