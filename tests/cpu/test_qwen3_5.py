"""The package for Qwen3.5: small models of transformers with it and without."""

import copy
import functools
import importlib
import sys
from collections import Counter

import kernels
import pytest
import torch
from kernels import Mode

from tests.capturing import check_replayed, stand_in
from tests.compile_checks import operators_of
from tests.cpu.conftest import kernels_of
from tests.models import Step, check_compiled, random_tokens, tiny_olmo_hybrid, tiny_qwen3_5, tiny_qwen3_5_sparse
from tests.ops.common import launched, runtime_of
from tests.patched import lora
from tests.tolerances import assert_close, relative_error
from tests.versions import needs_decorators

TOKENS = random_tokens(2, 80)
FACTOR = 30  # of the bound for one operation: two fp32 runs of four layers; the few numbers of dt_bias and A_log are sums that cancel


def step_of(model, **inputs):
    return Step(model, **{"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **inputs})


def tiny(name, *args, **changes):
    """A model of four layers in training mode, always with the same weights. name: of transformers' module."""
    return tiny_qwen3_5(*args, **changes) if name == "qwen3_5" else tiny_qwen3_5_sparse(name, *args, **changes)


every_family = pytest.mark.parametrize("name", ("qwen3_5", "qwen3_5_moe", "qwen3_next"))
SPARSE = ("qwen3_5_moe", "qwen3_next")
# Gates: of their gradients, sums that cancel over few numbers, half precision leaves hardly more than rounding.
LUCK = {"in_proj_a", "in_proj_b", "in_proj_ba", "gate", "shared_expert_gate"}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
ADAPTED = r".*\.(in_proj_qkvz?|in_proj_z|in_proj_a|in_proj_ba|out_proj|q_proj|v_proj|o_proj)"


FEW = ("A_log", "dt_bias")  # gradients of these few numbers are sums that cancel
LENGTHS = (30, 50, 80)  # of the documents of a row
BOUNDS = {"cu_seq_lens_q": torch.tensor([0, 30, 80, 160], dtype=torch.int32)}
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def inputs_of(name):
    """The projections of a delta net's input."""
    return ("in_proj_qkvz", "in_proj_ba") if name == "qwen3_next" else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def without(steps, *names, few=0):
    """Leaves out the gradients of parameters with these names in theirs, and of those of few numbers."""
    for step in steps:
        kept = (pair for pair in step.gradients.items() if pair[1].numel() > few and not set(names).intersection(pair[0].split(".")))
        step.gradients = dict(kept)


def logits_of_each(model):
    """The logits of a row's documents, each of which stands alone."""
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in TOKENS.reshape(1, -1).split(LENGTHS, 1)], 1)


@every_family
def test_a_training_step(qwen3_5, name):
    model = tiny(name)
    expected = step_of(model)
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)
    rows = qwen3_5.explain(model).rows
    assert all(row.fused for row in rows if "norm" in row.part)
    qwen3_5.reset()
    qwen3_5.apply()
    step_of(tiny(name)).assert_same(expected, FACTOR)
    qwen3_5.reset()
    assert step_of(tiny(name)).loss == expected.loss


@every_family
def test_half_precision_is_as_exact_as_before(qwen3_5, name):
    # Where all experts are chosen rounding chooses no others; gradients of four layers with them are further apart than rounding tells.
    model = tiny(name, torch.bfloat16, **(TWO_LAYERS | {"num_experts_per_tok": 4} if name in SPARSE else {}))
    exact = step_of(copy.deepcopy(model).float())
    before = step_of(model)
    qwen3_5.apply()
    found = step_of(model)
    without((found, before, exact), *LUCK, few=64)  # numbers of a head, and gates of which little is left, are a matter of luck
    found.assert_as_exact_as(before, exact)


@every_family
@pytest.mark.parametrize("said", ("cu_seq_lens_q", "position_ids"))
@pytest.mark.parametrize("cache", ({"use_cache": False}, {}), ids=("without cache", "by default"))
def test_documents_in_a_row_are_those_that_stand_alone(qwen3_5, name, said, cache):
    """Also where position_ids alone say so, in several rows, and where a cache is made by default, which holds one document; transformers
    raises, or lets documents leak into each other."""
    model = tiny(name).eval()
    qwen3_5.apply()
    row, inputs = TOKENS.reshape(1, -1), {"position_ids": POSITIONS, **(BOUNDS if said in BOUNDS else {})}
    with torch.no_grad():
        packed = model(input_ids=row, **cache, **inputs).logits
        alone = logits_of_each(model)
        rows = model(input_ids=TOKENS, position_ids=POSITIONS.view(2, 80), **cache).logits
    assert torch.allclose(packed, alone, atol=1e-5)
    assert torch.allclose(rows.reshape(1, 160, -1), alone, atol=1e-5)
    if said == "cu_seq_lens_q":
        with pytest.raises(ValueError, match="cu_seq_lens_q has 3 documents, and there is a cache, expected no cache.*use_cache=False"):
            model(input_ids=row, use_cache=True, **inputs)


@every_family
def test_generation(qwen3_5, name):
    model = tiny(name).eval()
    expected = model.generate(TOKENS[:, :20], max_new_tokens=6, do_sample=False)
    qwen3_5.apply()
    assert torch.equal(model.generate(TOKENS[:, :20], max_new_tokens=6, do_sample=False), expected)


@every_family
@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(qwen3_5, name, reentrant):
    model = tiny(name)
    expected = step_of(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)


@every_family
def test_lora(qwen3_5, name):
    mlp = {"qwen3_5": "mlp.", "qwen3_5_moe": "shared_expert."}.get(name)  # PEFT adapts Qwen3-Next's only with the experts' parameters
    adapted = r".*\.(in_proj_qkv|in_proj_qkvz|out_proj|q_proj" + (rf"|{mlp}up_proj|{mlp}down_proj)" if mlp else ")")
    model = lora(tiny(name), target_modules=adapted)
    expected = step_of(model)
    qwen3_5.kernelize(model)
    step_of(model).assert_same(expected, FACTOR)


@every_family
@pytest.mark.parametrize("kind", ("hf", "trl"))
def test_a_trainer_with_packed_rows(qwen3_5, name, tmp_path, kind):
    """Trainer and TRL's SFT, whose collators give position_ids alone, beside transformers with each document in a padded row of its own."""
    from transformers import DataCollatorWithFlattening

    from tests.integrations.trainers import ragged, rows, run

    data = [{"input_ids": row["input_ids"]} for row in ragged(rows()[:8])]
    options = {"data": data, "per_device_train_batch_size": 4, "max_grad_norm": 0.0, "max_steps": 2}

    def padded(examples):
        length = max(len(example["input_ids"]) for example in examples)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        found = [{"input_ids": e["input_ids"], "labels": e["input_ids"], "attention_mask": [1] * len(e["input_ids"])} for e in examples]
        return {name: torch.tensor([e[name] + [pad] * (length - len(e[name])) for e in found]) for name, pad in fill.items()}

    apart = run(kind, tiny(name), tmp_path, "cpu", data_collator=padded, **options)
    packing = {"padding_free": True, "max_length": None} if kind == "trl" else {"data_collator": DataCollatorWithFlattening()}
    found = run(kind, qwen3_5.kernelize(tiny(name)), tmp_path, "cpu", **packing, **options)
    assert found.losses == pytest.approx(apart.losses, rel=1e-3)
    for name, gradient in apart.gradients[0].items():
        if not name.endswith(FEW):
            assert_close(found.gradients[0][name], gradient, torch.float32, name, FACTOR)


@every_family
def test_weights_side_by_side_and_products_made_again(qwen3_5, name):
    model = tiny(name, **TWO_LAYERS)
    expected = step_of(model)
    qwen3_5.kernelize(qwen3_5.pack(model), recompute_mlp=True)
    step_of(model).assert_same(expected, FACTOR)
    rows = {row.part: row.fused for row in qwen3_5.explain(model).rows}
    assert rows["gate_proj, up_proj as one GEMM"] and "q_proj, k_proj, v_proj as one GEMM" not in rows


@every_family
def test_torch_compile(qwen3_5, name):
    model = tiny(name, **TWO_LAYERS)
    expected = step_of(model)
    qwen3_5.kernelize(model)
    called, compiled = operators_of(qwen3_5, model)
    check_compiled(model, expected, FACTOR, compiled, input_ids=TOKENS, labels=TOKENS, use_cache=False)
    nodes = "norm_projections", "norm_experts" if name in SPARSE else "norm_mlp"
    assert [called.count(node + end) for node in nodes for end in ("", "_backward")] == [2] * 4


@pytest.mark.parametrize("dropout", (0.0, 0.5))
def test_a_graph_has_no_operator_for_dropout_in_a_shared_expert(qwen3_5, monkeypatch, dropout):
    model = lora(tiny("qwen3_5_moe"), target_modules=r".*shared_expert\.(gate|up|down)_proj", lora_dropout=dropout)
    qwen3_5.kernelize(model)
    said = "norm, router, experts, shared expert"
    assert {row.part: row.fused for row in qwen3_5.explain(model).rows}[said]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: sys._getframe(1).f_globals["__name__"].endswith(".sparse_block"))
    row = next(row for row in qwen3_5.explain(model).rows if row.part == said)
    assert row.fused == (not dropout) and (row.fused or row.reason.startswith("shared_expert.gate_proj: torch.compile, for an adapter"))


@every_family
def test_capture(qwen3_5, name, monkeypatch):
    """Layers of both kinds are replayed, each kind of pass after one that was observed; documents may lie elsewhere in the next pass."""
    stand_in(qwen3_5, monkeypatch)
    model = tiny(name, **TWO_LAYERS)
    plain = copy.deepcopy(model)
    qwen3_5.kernelize(plain)
    qwen3_5.capture(qwen3_5.kernelize(model), *TOKENS.shape)
    documents = [torch.cat((torch.arange(first), torch.arange(80 - first)))[None].expand(2, -1) for first in (30, 49, 11)]
    elsewhere = [functools.partial(step_of, position_ids=positions) for positions in documents]
    check_replayed(model, plain, [step_of] * 3 + elsewhere)
    assert all(row.fused for row in qwen3_5.explain(model).rows if "captured" in row.part)


@every_family
def test_what_is_said_of_a_layer(qwen3_5, name):
    model = tiny(name)
    qwen3_5.kernelize(model)
    half = "norm, router, experts, shared expert" if name in SPARSE else "norm, gate_proj, up_proj, down_proj"
    rows = {row.part: (row.count, row.fused) for row in qwen3_5.explain(model).rows}
    assert rows[half] == (4, True)
    assert rows["delta net"] == rows[f"norm, {', '.join(inputs_of(name))}"] == rows["out_proj"] == (3, True)
    assert rows["attention with its gate"] == rows["norm, q_proj, k_proj, v_proj"] == rows["o_proj"] == (1, True)
    model.model.layers[3].self_attn.q_norm.register_forward_hook(lambda *args: None)
    assert "q_norm or k_norm has hooks" in {row.part: row for row in qwen3_5.explain(model).rows}["attention with its gate"].reason
    model.model.layers[0].linear_attn.activation = "relu"
    found = [row for row in qwen3_5.explain(model).rows if row.part == "delta net" and not row.fused]
    assert [row.count for row in found] == [1] and "expected 4 and silu" in found[0].reason


@every_family
@pytest.mark.parametrize("function", ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "apply_mask_to_padding_states"))
def test_a_function_that_someone_put_in_the_module_is_called(qwen3_5, name, function, monkeypatch):
    """By transformers' forward of the delta net, before and after ours is there; explain says so."""
    model, called = tiny(name, **TWO_LAYERS), []
    modeling = importlib.import_module(type(model).__module__)

    run = getattr(modeling, function)

    @functools.wraps(run)
    def of_the_user(*args, **options):
        called.append(function)
        found = run(*args, **options)
        return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found

    qwen3_5.kernelize(model)
    ours = step_of(model)
    monkeypatch.setattr(modeling, function, of_the_user)
    found = step_of(model)
    reasons = {row.reason for row in qwen3_5.explain(model).rows if row.part == "delta net"}
    assert reasons == {f"{function} is not transformers' own"} and called == [function]
    qwen3_5.reset()
    found.assert_same(step_of(model), FACTOR)
    monkeypatch.undo()
    assert relative_error(found.loss, ours.loss) > 1e-4, "the function matters"


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("change", ("router", "expert", "gate", "logits"))
def test_a_sparse_layer_with_something_that_listens_is_called(qwen3_5, name, change):
    model = tiny(name, **TWO_LAYERS)
    inputs = {"output_router_logits": True} if change == "logits" else {}
    expected = step_of(model, **inputs)
    qwen3_5.kernelize(model)
    block, called = model.model.layers[1].mlp, []
    part = {"router": block.gate, "expert": block.shared_expert, "gate": block.shared_expert_gate}.get(change)
    if part is not None:
        part.register_forward_hook(lambda *args: called.append(change))
        assert any("shared" in row.part and not row.fused for row in qwen3_5.explain(model).rows)
    found = step_of(model, **inputs)
    found.assert_same(expected, FACTOR)
    assert called == [change] * (part is not None)
    if change == "logits":
        assert_close(found.output.aux_loss, expected.output.aux_loss, torch.float32, "auxiliary loss")


@every_family
@pytest.mark.parametrize("given", ("padding", "padding and adapters", "numbers", "numbers and biases"))
def test_padding(qwen3_5, name, given):
    """transformers multiplies what a net gets by the mask, whatever its numbers are. The node reads rows of zeros where padding is, which
    do not reach the residual stream."""
    model, mask = tiny(name), (torch.arange(80) >= torch.tensor([[0], [30]])).long()
    inputs = {"attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)}
    if given == "padding and adapters":
        model = lora(model, target_modules=ADAPTED, lora_bias=True)
    if given.startswith("numbers"):
        inputs["attention_mask"] = mask * torch.rand(mask.shape, generator=torch.Generator().manual_seed(3))
    if given == "numbers and biases":
        model = lora(model, target_modules=["out_proj", "in_proj_qkv", "in_proj_ba"], lora_bias=True)
    expected = step_of(model, **inputs)
    qwen3_5.apply()
    found = step_of(model, **inputs)
    without((expected, found), *FEW)  # less is left of them where half of a row is padding
    found.assert_same(expected, FACTOR)


@pytest.fixture
def functions_put_back():
    """transformers has one object for all models of each function that a mapping replaces."""
    names = "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in names]
    functions = [found for module in modules for found in vars(module).values() if isinstance(found, torch.nn.Module)]
    before = [dict(vars(function)) for function in functions]
    yield
    for function, kept in zip(functions, before, strict=True):
        vars(function).clear()
        vars(function).update(kept)


@needs_decorators
@pytest.mark.parametrize("name", SPARSE)
def test_models_that_open_functions_to_the_hub(qwen3_5, functions_put_back, name, monkeypatch):
    """Qwen3-Next and Qwen3.5-MoE by the mapping alone: a training step, generated text, and documents in a row."""
    model = tiny(name)
    tokens = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    expected = Step(model, **tokens)
    prompt = {"inputs": TOKENS[:, :20], "max_new_tokens": 6, "do_sample": False}
    text = model.eval().generate(**prompt)
    with kernels.use_kernel_mapping(qwen3_5.mapping()):
        kernels.kernelize(model.train(), mode=Mode.TRAINING, device="cpu")
    called = Counter()

    def counting(function):
        def run(*args, **options):
            called.update([function.__name__])
            return function(*args, **options)

        return run

    ours = importlib.import_module(f"{qwen3_5.__name__}.shared.hf.layer.delta_net")
    for function in ("gated_delta_rule", "gated_delta_step", "short_conv"):
        monkeypatch.setattr(ours, function, counting(getattr(ours, function)))
    Step(model, **tokens).assert_same(expected, FACTOR)
    assert called == {"gated_delta_rule": 3, "short_conv": 3}
    with torch.no_grad():
        assert torch.equal(model.eval().generate(**prompt), text)
        assert called["gated_delta_step"] == 3 * 5
        packed = model(input_ids=TOKENS.reshape(1, -1), position_ids=POSITIONS, use_cache=False, **BOUNDS).logits
        alone = logits_of_each(model)
    assert torch.allclose(packed, alone, atol=1e-4)  # experts of a whole row sum in another order


@needs_decorators
def test_what_packed_rows_of_olmo_hybrid_need(qwen3_5, functions_put_back):
    """position_ids for the attention, cu_seq_lens_q or seq_idx for the delta nets, and no cache, refused wherever a delta net
    hears of documents. Of position_ids alone it hears nothing: that leak is transformers' own, and the card says so."""
    model = tiny_olmo_hybrid().eval()
    with kernels.use_kernel_mapping(qwen3_5.mapping()):
        kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    row, positions = TOKENS.reshape(1, -1), {"position_ids": POSITIONS}
    index = {"seq_idx": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()}
    with torch.no_grad():
        alone = logits_of_each(model)
        for said in (BOUNDS, index, {**BOUNDS, **index}):
            packed = model(input_ids=row, use_cache=False, **positions, **said).logits
            assert torch.allclose(packed, alone, atol=1e-5)
            for cache in ({}, {"use_cache": True}):
                with pytest.raises(ValueError, match=f"{next(iter(said))} has 3 documents, and there is a cache.*Pass use_cache=False"):
                    model(input_ids=row, **cache, **positions, **said)
        leaked = model(input_ids=row, use_cache=False, **positions).logits
        assert not torch.allclose(leaked, alone, atol=1e-2)
        one = {"cu_seq_lens_q": torch.tensor([0, 160], dtype=torch.int32)}  # a cache may hold that
        assert torch.allclose(model(input_ids=row, use_cache=True, **one).logits, model(input_ids=row, use_cache=False).logits, atol=1e-5)


def test_the_hubs_mapping(qwen3_5, functions_put_back):
    model = tiny_qwen3_5()
    expected = step_of(model)
    with kernels.use_kernel_mapping(qwen3_5.mapping()):
        kernels.kernelize(model, mode=Mode.TRAINING, device="cpu")
    ours = importlib.import_module(f"{qwen3_5.__name__}.shared.hf.parts.modules").is_marked
    nets = [module for module in model.modules() if type(module).__name__ in ("Qwen3_5GatedDeltaNet", "Qwen3_5RMSNorm")]
    assert nets and all(ours(getattr(net.forward, "__func__", net.forward)) for net in nets)
    step_of(model).assert_same(expected, FACTOR)


@every_family
def test_the_kernels_in_a_model(qwen3_5, name):
    """One layer of each kind in bf16, with heads of the kernels' size, in the interpreter."""
    from interpreter.backend import interpreting

    chosen = {"num_experts_per_tok": 4} if name in SPARSE else {}
    model = tiny(name, torch.bfloat16, width=128, linear_num_key_heads=1, linear_num_value_heads=2, head_dim=256, **TWO_LAYERS, **chosen)
    tokens = random_tokens(2, 70)
    mask = (torch.arange(70) >= torch.tensor([[0], [9]])).long()  # without it attention goes to SDPA
    inputs = {"input_ids": tokens, "labels": tokens.where(mask > 0, -100), "attention_mask": mask}
    exact = step_of(copy.deepcopy(model).float(), **inputs)
    before = step_of(model, **inputs)
    qwen3_5.apply()
    with interpreting(runtime_of(qwen3_5), kernels_of("packages/qwen3_5")):
        found = step_of(model, **inputs)
        kernels_run = {name.partition("-")[0] for name in launched(qwen3_5)}
    assert {"delta_walk", "delta_inverse", "short_conv_backward", "attention_forward", "attention_backward_dq",
            "gated_output_forward", "gated_output_backward", "head_norm_rotary_forward", "head_norm_rotary_backward"} <= kernels_run
    assert (name in SPARSE) == ({"swiglu_rows_forward", "swiglu_rows_backward", "token_sum"} <= kernels_run)
    without((found, before, exact), *LUCK, few=64)
    found.assert_as_exact_as(before, exact)


def test_whose_convolution_is_another_one_keeps_its_forward(qwen3_5):
    model = tiny_qwen3_5()
    model.model.layers[0].linear_attn.activation = "relu"
    expected, exact = step_of(model), step_of(copy.deepcopy(model).double())
    qwen3_5.apply()
    found = step_of(model)
    without((found, expected, exact), *FEW)  # either run is 5e-4 off
    found.assert_as_exact_as(expected, exact, 2e-5)
