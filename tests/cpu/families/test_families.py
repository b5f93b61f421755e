"""The one decoder layer on model families of transformers: each is a row of the table, and must train as transformers' own. Families
without biases and with them also run every feature in the interpreted kernels."""

import copy
import importlib

import pytest
import torch

from tests.compile_checks import compiled_with_masks
from tests.decoder_families import (
    CALLED,
    CHANGES,
    EVERYWHERE,
    FACTOR,
    IN_TURNS,
    NAMES,
    NODES,
    ROUTERS,
    SPARSE,
    TO_ALL,
    TOKENS,
    UNCHANGING,
    VARIANTS,
    WINDOW,
    nodes_of,
    packed_and_padded,
    step_of,
    tiny,
)
from tests.models import Step, check_compiled, compiled_whole, random_tokens
from tests.patched import calls_of, lora
from tests.tolerances import assert_close, relative_error

ALL = (*NAMES, *SPARSE)
FEW = ("llama", "qwen2")  # of the kinds that a package is for: without biases, and with
OTHER_PARTS = ("arcee", "hunyuan_v1_dense", "starcoder2", "nemotron")  # no gate; norms after the rotary embedding; two kinds of LayerNorm
LAST = ("model.norm.weight", "model.language_model.norm.weight", *ROUTERS)  # what every change of a layer changes the gradient of
EAGER = ("gemma2", "vaultgemma", "granite_swa")  # whose attention has a cap or sinks, which SDPA has not
# As a default says, or a norm behind the experts takes away.
UNCHANGED = {("mistral", "no windows"), ("exaone4", "no windows"), ("flex_olmo", "normalised")}
UNFUSED: dict = {  # the nodes that run for a configuration of `VARIANTS`, where they are not all
    **dict.fromkeys(("another activation", "jitter", "clipped"), set()), "auxiliary loss": {"norm_attention_inputs"},
    **dict.fromkeys(("a dense layer", "every second layer"), {"norm_attention_inputs", "norm_mlp", "norm_experts"}),
}  # fmt: skip
BATCHES, FEW_LEFT = 4, ("q_proj.bias", "k_proj.bias")
LEFT = (("starcoder2", {"residual_dropout": 0.3}, "self_attn.residual_dropout is 0.3"),
        ("mixtral", {"router_jitter_noise": 0.3}, "mlp.jitter_noise is 0.3"),
        ("olmoe", {"clip_qkv": 0.4}, "self_attn.config.clip_qkv is 0.4"))  # fmt: skip


def assert_steps(model, inputs, expected):
    for each, step in zip(inputs, expected, strict=True):
        step_of(model, **each).assert_same(step, FACTOR)


def of_families(*names, kernels=FEW):
    """Runs a test with each of the families in PyTorch, and with some in interpreted kernels."""
    runs = [pytest.param(name, False, id=name) for name in names] + [pytest.param(name, True, id=f"{name}-kernels") for name in kernels]
    return pytest.mark.parametrize("name, package", runs, indirect=["package"])


CALLED_PARTS = {"norm_mlp": {"mlp"}}  # of a layer that lacks a node


@of_families(*ALL, kernels=(*FEW, *SPARSE, *OTHER_PARTS))
def test_a_training_step(package, calls, name):
    model = tiny(name, attn_implementation="eager")
    expected = step_of(model)
    package.kernelize(model)
    found = step_of(model)
    assert calls == nodes_of(name) * 2
    found.assert_same(expected, FACTOR)
    rows = {row.part: row.code for row in package.explain(model).rows if "norm" in row.part or row.part == "o_proj"}
    assert len(rows) == 3 - (name in CALLED and "o_proj" in rows)
    assert set(rows.values()) == ({"", "node"} if "o_proj" in rows and name in CALLED else {""})
    assert {row.part for row in package.explain(model).rows if row.code == "called"} == CALLED_PARTS.get(CALLED.get(name), set())


def without_few_numbers(step):
    """A step without the gradients of a handful of numbers, and of the biases of q and k, which are what is left of large ones: their
    errors in half precision are a matter of luck."""
    step.gradients = {name: grad for name, grad in step.gradients.items() if grad.numel() > 24 and not name.endswith(FEW_LEFT)}
    return step


@of_families(*ALL, kernels=("llama", *OTHER_PARTS))
def test_half_precision_is_as_exact_as_before(package, calls, name):
    model = tiny(name, torch.bfloat16, attn_implementation="eager", **TO_ALL.get(name, {}))
    exact, before = steps_of_batches(copy.deepcopy(model).float()), steps_of_batches(model)
    package.apply()
    assert_err_no_more(steps_of_batches(model), before, exact)
    assert calls == nodes_of(name) * 2 * len(exact)


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in ALL for variant in VARIANTS[name]])
def test_what_a_configuration_may_change(package, calls, name, variant):
    """Losses and gradients in fp32, in eager attention, SDPA and ours, and in bf16."""
    large = {"initializer_range": 0.1}  # or scores hardly differ, and neither a window nor a cap changes much
    changes = {**large, **VARIANTS[name][variant]}
    kinds = ("eager",) if name in EAGER else ("eager", "sdpa")
    models = [tiny(name, attn_implementation=kind, **changes) for kind in kinds]
    half = tiny(name, torch.bfloat16, attn_implementation="eager", **changes, **TO_ALL.get(name, {}))
    try:
        expected = [step_of(model) for model in models]
    except AttributeError as error:
        if (name, variant) != ("granitemoe", "auxiliary loss"):
            raise
        pytest.skip(f"transformers' own Granite-MoE has none in this release: {error}")
    exact, before = steps_of_batches(copy.deepcopy(half).float()), steps_of_batches(half)
    plain = step_of(tiny(name, attn_implementation="eager", **large))
    shared = {key for key in expected[0].gradients if key.endswith(LAST)}
    differ = (relative_error(expected[0].gradients[key], gradient) for key, gradient in plain.gradients.items() if key in shared)
    assert (name, variant) in UNCHANGED or max(differ) > 1e-3
    package.apply()
    for model, step in zip(models, expected, strict=True):
        step_of(model).assert_same(step, FACTOR)
    models[-1].set_attn_implementation("bastile")
    step_of(models[-1]).assert_same(expected[-1], FACTOR)
    if variant != "dropout":  # bf16 draws other numbers than fp32
        assert_err_no_more(steps_of_batches(half), before, exact)
    assert set(calls) == UNFUSED.get(variant, set(nodes_of(name)))


def steps_of_batches(model):
    """Runs more of them for experts, as the gradient of a router is that of few numbers, and for StarCoder 2: one of its gradients errs by
    1.39 of what it errs by without the layers in four batches, and by 1.05 in 32."""
    more = model.config.model_type == "starcoder2" or any("experts" in name for name, _ in model.named_modules())
    count = BATCHES * (4 if more else 1)
    return [without_few_numbers(step_of(model, input_ids=tokens, labels=tokens)) for tokens in random_tokens(count, 2, 21)]


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


@of_families(*FEW, "gemma3_text", "glm4", "olmo2", *SPARSE, *OTHER_PARTS)
def test_autocast(package, calls, name):
    model = tiny(name, **TO_ALL.get(name, {}))
    exact = steps_of_batches(model)
    with torch.autocast("cpu", torch.bfloat16):
        before = steps_of_batches(model)
        package.apply()
        found = steps_of_batches(model)
    assert calls == nodes_of(name)[: 1 if name in SPARSE else 2] * 2 * len(exact)  # experts of fp32 are called
    for mine, other in zip(found, before, strict=True):
        assert {n: g.dtype for n, g in mine.gradients.items()} == {n: g.dtype for n, g in other.gradients.items()}
    assert_err_no_more(found, before, exact)


@pytest.mark.parametrize("options", ({}, {"lora_dropout": 0.3, "lora_bias": True}), ids=("plain", "dropout and biases"))
@of_families(*FEW, "phi3", *SPARSE, *OTHER_PARTS)
def test_lora(package, calls, name, options):
    linears = "all-linear" if name not in SPARSE else ["q_proj", "k_proj", "v_proj", "o_proj"]  # PEFT takes experts among all
    model = lora(tiny(name), target_modules=linears, **options)
    expected = step_of(model)
    package.kernelize(model)
    # FlexOlmo's q and k with biases: transformers' own float32 gradients are up to 5e-5 from float64's, by the processor.
    step_of(model).assert_same(expected, 2 * FACTOR if name == "flex_olmo" and options else FACTOR)
    assert calls == nodes_of(name) * 2


@pytest.mark.parametrize("router", (False, True))
@of_families(*SPARSE, kernels=SPARSE)
def test_adapters_of_experts_and_routers(package, calls, name, router):
    parts = ["experts.gate_up_proj", "experts.down_proj"] + ["gate.weight", "router.weight"] * router
    model = tiny(name)
    targets = [part for part in parts if any(key.endswith(part) for key, _ in model.named_parameters())]
    model = lora(model, target_modules=["q_proj", "v_proj"], target_parameters=targets)
    expected = step_of(model)
    package.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    assert calls == nodes_of(name) * 2 and len(targets) == 2 + router
    assert all("with adapters" in row.part and row.fused for row in package.explain(model).rows if "experts" in row.part)


@pytest.mark.parametrize("keep_attention", (False, True))
@of_families(*FEW, *SPARSE, *OTHER_PARTS)
def test_gradient_checkpointing(package, calls, name, keep_attention):
    model = tiny(name)
    expected = step_of(model)
    model.gradient_checkpointing_enable()
    package.kernelize(model, keep_attention=keep_attention)
    step_of(model).assert_same(expected, FACTOR)
    assert len(calls) == 8


def test_an_mlp_that_is_called_is_not_made_again_and_says_so(package):
    model = tiny("apertus")
    expected = step_of(model)
    package.kernelize(model, recompute_mlp=True)
    with pytest.warns(RuntimeWarning, match=r"recompute_mlp: the \w+ of this \w+DecoderLayer is not fused"):
        step_of(model).assert_same(expected, FACTOR)


@pytest.mark.parametrize("how", (True, 16), ids=("whole", "in tiles"))
@of_families(*FEW, "gemma3_text", "phi3", *OTHER_PARTS)
def test_made_again_in_the_backward_pass(package, calls, name, how):
    model = tiny(name)
    package.apply()
    expected = step_of(model)
    package.apply(recompute_mlp=how)
    found = step_of(model)
    found.assert_same(expected, FACTOR)
    assert how == 16 or all(torch.equal(found.gradients[key], expected.gradients[key]) for key in expected.gradients)
    assert calls == NODES * 4


@of_families(*FEW, "granitemoehybrid", *SPARSE, *OTHER_PARTS)
def test_documents_and_padding(package, calls, name):
    """Packed documents by their positions, and a batch with padding, in attention of ours."""
    model = tiny(name)
    inputs = packed_and_padded()[1:]
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    model.set_attn_implementation("bastile")
    assert_steps(model, inputs, expected)
    assert calls == nodes_of(name) * 6


@pytest.mark.parametrize("graph", (False, True), ids=("eager", "a graph"))
@pytest.mark.parametrize(("name", "variant"), (("mistral", "both directions"), ("gemma3_text", "both directions"), ("llama", None),
                                               ("llama", "one call"), ("gemma3_text", "one call")))  # fmt: skip
def test_attention_in_both_directions(package, calls, name, variant, graph):
    """Models that embed text have it, or are called so: no mask of ours is causal, nor one for documents, padding or a graph."""
    asked, once = {"is_causal": False}, variant == "one call"
    model = tiny(name, initializer_range=0.1, **({} if once else VARIANTS[name][variant] if variant else asked))
    inputs = [{**each, **(asked if once else {})} for each in packed_and_padded()[: 1 if graph else 3]]
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    model.set_attn_implementation("bastile")
    if graph:
        compiled = compiled_whole(model)
        found = compiled(input_ids=TOKENS, labels=TOKENS, use_cache=False, **inputs[0])
        assert_close(found.loss, expected[0].loss, torch.float32, "loss")
    else:
        assert_steps(model, inputs, expected)


@of_families(*FEW)
def test_weights_side_by_side(package, calls, name):
    model = tiny(name)
    expected = step_of(model)
    package.kernelize(package.pack(model))
    rows = {row.part: row.fused for row in package.explain(model).rows if "one GEMM" in row.part}
    assert rows == {"q_proj, k_proj, v_proj as one GEMM": True, "gate_proj, up_proj as one GEMM": True}
    step_of(model).assert_same(expected, FACTOR)


@of_families(*FEW, "gemma3_text", "glm4", "granitemoehybrid", *SPARSE, *OTHER_PARTS)
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
    inputs = packed_and_padded()[1] if how == "packed" else {}
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
    inputs = packed_and_padded()[:3]
    expected = [step_of(model, **each) for each in inputs]
    package.apply()
    compiled, _ = compiled_with_masks(model)
    Step(model, compiled, input_ids=TOKENS, labels=TOKENS, use_cache=False).assert_same(expected[0], FACTOR)
    model.set_attn_implementation("bastile")
    assert_steps(model, inputs, expected)


@of_families(*FEW, "phi3", "smollm3", "granitemoehybrid", *SPARSE, *OTHER_PARTS)
def test_generation(package, calls, name):
    model = tiny(name).eval()
    expected = model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    package.apply()
    assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), expected) and calls


@pytest.mark.parametrize("name", ("llama", "hunyuan_v1_dense"))
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


def test_apply_calls_granites_layers_with_mamba_or_experts_as_they_are(package, calls):
    """One layer of each kind, and with experts beside its MLP none that is taken apart. `kernelize` reads them
    (test_layers_beside_a_row.py)."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "mamba_d_state": 8, "mamba_chunk_size": 8}
    for changes, nodes, reason in (
        (kinds, NODES, "the layer has mamba"), ({"num_local_experts": 4, "intermediate_size": 24}, [], "the layer has block_sparse_moe"),
    ):
        calls.clear()
        model = tiny("granitemoehybrid", **changes)
        expected, text = step_of(model), model.eval().generate(TOKENS, max_new_tokens=3, do_sample=False)
        package.apply()
        step_of(model.train()).assert_same(expected, FACTOR)
        assert calls == nodes
        assert f"{reason}, which is called as it is" in {row.reason for row in package.explain(model).rows}
        assert torch.equal(model.eval().generate(TOKENS, max_new_tokens=3, do_sample=False), text)
        package.reset()


@pytest.mark.parametrize(("name", "changes", "reason"), LEFT)
def test_what_a_layer_is_only_taken_apart_without(package, calls, name, changes, reason):
    before = step_of(model := tiny(name, **changes))
    package.apply()
    step_of(model).assert_same(before, FACTOR)
    assert f"{reason}, so the layer is called as it is" in {row.reason for row in package.explain(model).rows} and calls == []
    package.reset()
    step_of(package.kernelize(model)).assert_same(before, FACTOR)
    rows = package.explain(model).rows
    assert "called" in {row.code for row in rows} or f"{reason}, so the layer is called as it is" in {row.reason for row in rows}


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


@pytest.mark.parametrize("name", ALL)
def test_half_precision_of_a_layer_that_is_not_fused(package, calls, name):
    """Its parts run one by one, each in the dtypes of transformers' own."""
    model = tiny(name, torch.bfloat16, attn_implementation="eager", **TO_ALL.get(name, {}))
    for module in model.modules():
        if type(module).__name__.endswith(("MLP", "Experts")):
            module.act_fn = module.activation_fn = module.activation = module.act = torch.nn.ReLU()
    exact, before = steps_of_batches(copy.deepcopy(model).float()), steps_of_batches(model)
    package.apply()
    assert_err_no_more(steps_of_batches(model), before, exact)
    called = name in SPARSE or CALLED.get(name) == "norm_mlp"  # experts, and an MLP that is called whatever is in it
    assert set(calls) == ({"norm_attention_inputs"} if called else set())


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


@pytest.mark.parametrize(("names", "fixture"), ((NAMES, "decoders"), (SPARSE, "moe")), ids=("dense", "sparse"))
def test_every_row_of_a_package_is_tested(request, names, fixture):
    """In the order of the rows; a small model's class tells which row it is for."""
    rows = calls_of(request.getfixturevalue(fixture)).rows
    assert [type(tiny(name, attn_implementation="eager")).__name__ for name in names] == [own.family.causal_lm() for own in rows]
    assert CHANGES.keys() <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_option_of_a_configuration_is_tested(name):
    """A release that gives a family one more has it tested too, or listed among those that leave its layers as they are."""
    config = tiny(name, attn_implementation="eager").config.get_text_config()
    options = set(vars(type(config))["__annotations__"])
    tested = set(CHANGES.get(name, ())).union(*VARIANTS[name].values()) | set(EVERYWHERE)
    assert {option for option in options - tested if not option.endswith("_plan")} <= UNCHANGING.get(name, set())
