"""torch.compile, torch.export and opcheck in PyTorch's CPU path; tests/gpu has the same through Inductor and CUDA graphs."""

import functools
import importlib
import itertools
import shutil

import pytest
import torch

from tests import compile_checks as checks
from tests.cpu.conftest import kernels_of
from tests.decoder_families import tiny
from tests.models import Step, compiled_step, random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_5
from tests.op_cases import CASES
from tests.ops.common import launched, randn
from tests.patched import calls_of
from tests.tolerances import assert_close, relative_error
from tests.versions import TORCH

BACKEND = "aot_eager"  # traces forward and backward as Inductor does, and needs no C++ compiler


def test_every_operator_is_checked(all_operations):
    assert set(checks.custom_operators(all_operations)) == set(checks.OPERATORS)


# float16 has factors of its own in the operators of a head; in all others its path is bf16's.
OPERATORS = checks.operators_in((torch.float32, torch.bfloat16), kernels=False)
OPERATORS += [(name, torch.float16) for name in checks.OPERATORS if name.startswith("linear_")]


@pytest.mark.parametrize(("name", "dtype"), OPERATORS, ids=str)
def test_operators(all_operations, name, dtype):
    checks.check_operator(all_operations, name, "cpu", dtype)


@pytest.mark.parametrize(("name", "dtype"), checks.operators_in((torch.float32, torch.bfloat16), kernels=True), ids=str)
def test_operators_with_kernels(interpreted, name, dtype):
    checks.check_operator(interpreted, name, "cpu", dtype)


@pytest.mark.parametrize("name", [name for name in checks.OPERATORS if name not in checks.BY_AUTOGRAD])
def test_rows_that_nobody_counted(all_operations, name):
    checks.check_rows_nobody_counted(all_operations, name, "cpu")


@pytest.mark.parametrize("kernels", (False, True), ids=("PyTorch", "kernels"))
def test_every_self_check_compiles_whole(request, kernels):
    package, dtype = request.getfixturevalue("interpreted" if kernels else "all_operations"), torch.bfloat16 if kernels else torch.float32
    checks.check_compiled_self_checks(package, "cpu", dtype, tokens=24, classes=300)
    assert not kernels or launched(package)


@pytest.mark.parametrize("operation", CASES)
def test_operations_compile_whole_and_once_for_all_lengths(loaded_ops, operation):
    checks.check_compiled_operation(loaded_ops, operation, "cpu", BACKEND)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("options", checks.LOSSES)
def test_the_loss_compiles_whole(loaded_ops, options, dtype):
    checks.check_compiled_loss(loaded_ops, checks.LOSSES[options], "cpu", BACKEND, dtype)


OF_WIDTH = {"width": 128, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}  # of the delta rule's kernels
WITH_KERNELS = {
    "qwen3": (".", tiny_model),
    "decoders": ("packages/decoders", functools.partial(tiny, "llama")),
    "gpt_oss": ("packages/gpt-oss", tiny_gpt_oss),
    "qwen3_5": ("packages/qwen3_5", functools.partial(tiny_qwen3_5, **OF_WIDTH)),
}


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_compiled_model_runs_the_kernels_that_it_runs_otherwise(request, interpret, name):
    folder, make = WITH_KERNELS[name]
    package = request.getfixturevalue(name)
    backend, model = interpret(package, kernels_of(folder)), package.kernelize(make().to(torch.bfloat16))
    tokens = random_tokens(2, 40)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    expected, wanted = Step(model, **inputs), set(backend.launched)
    backend.launched.clear()
    found = compiled_step(model, **inputs)
    scaled = {each for each in wanted if each.startswith("scale_in_place")}  # in place, which a graph's operators do not do
    assert wanted - scaled == set(backend.launched) and len(wanted) > 4
    assert_close(found.loss, expected.loss, torch.bfloat16, "loss")
    assert found.gradients.keys() == expected.gradients.keys()
    errors = {key: relative_error(found.gradients[key], expected.gradients[key].double()) for key in found.gradients}
    assert max(errors.values()) <= 5e-2, errors


def test_a_compiled_model_makes_no_logits(qwen3):
    model, ids = qwen3.kernelize(tiny_model(num_hidden_layers=1, vocab_size=8192)), random_tokens(2, 200)

    def loss(ids):
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    largest = checks.largest_tensors(loss, ids)
    assert len(largest) == 2 and max(largest) == 8192 * 64, "the embeddings are the largest, not logits [400, 8192]"


@pytest.mark.parametrize(("tokens", "late"), ((8, True), (65, False)))
def test_a_compiled_loss_of_few_tokens_never_copies_the_gradient_of_the_weight(loaded_ops, tokens, late):
    """It is as large as the weight: multiplied by the incoming gradient it would cost as much as a product of the head."""
    hidden, weight = (randn(rows, 64, dtype=torch.float32, device="cpu").requires_grad_() for rows in (tokens, 40))
    made = checks.made_of_shape((40, 64), loaded_ops.linear_cross_entropy, hidden, weight, torch.arange(tokens) % 40)
    assert made == ([[], ["mm"]] if late else [["getitem"], ["mul"]])


@pytest.mark.parametrize("needs", itertools.product((True, False), repeat=3), ids=str)
@pytest.mark.parametrize("tokens", (0, 8, 65))
def test_a_compiled_loss_of_some_gradients(loaded_ops, tokens, needs):
    """A head alone may be trained, or only what is below it."""
    torch._dynamo.reset()
    shapes = (tokens, 64), (40, 64), (40,)
    leaves = [randn(*shape, dtype=torch.float32, device="cpu").requires_grad_(need) for shape, need in zip(shapes, needs)]
    found = []
    for loss in (loaded_ops.linear_cross_entropy, torch.compile(loaded_ops.linear_cross_entropy, backend=BACKEND, fullgraph=True)):
        hidden, weight, bias = leaves
        value = loss(hidden, weight, torch.arange(tokens) % 40, bias)
        found.append([value, *(torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad]) if any(needs) else ())])
    for one, other in zip(*found):
        assert_close(other, one, torch.float32)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_model_compiles_with_inductor(qwen3, monkeypatch):
    """Inductor knows every operator before it meets it. Of one that it does not know it prints the arguments for its log, up to torch 2.12
    whether or not anyone reads that, and the text triples with every layer: 12 layers never ended."""
    from torch._inductor import exc, graph

    printed: list = []
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(lambda operator, *_: printed.append(operator.namespace) or ""))
    monkeypatch.setattr(graph.log, "info", lambda *told: list(map(str, told)))
    assert checks.check_compiled_model(qwen3, "cpu", lengths=(17, 40), dynamic=True) == 1
    assert importlib.import_module(f"{qwen3.__name__}._ops").NAMESPACE not in printed


def test_a_model_compiles_a_second_time_when_lengths_vary_and_then_no_more(qwen3):
    assert checks.check_compiled_model(qwen3, "cpu", backend=BACKEND) == 2


def test_nothing_that_the_first_step_learns_makes_the_second_one_compile(qwen3):
    """A graph must not depend on what was found out while it was made: that costs as much again as the first compilation."""
    model, ids = qwen3.kernelize(tiny_model(num_hidden_layers=2)), random_tokens(2, 17)
    modules = importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.modules")
    for known in (modules._own, calls_of(qwen3).rows[0].known):
        known.clear()  # as in a process that has not run a model yet
    assert checks.graphs_of(model, [ids, ids, ids], backend=BACKEND) == 1
    model(input_ids=ids, labels=ids)
    assert checks.graphs_of(model, [ids], backend=BACKEND) == 1


@pytest.mark.parametrize("wrapped", (False, True), ids=("by a function", "by a function that looks like it"))
def test_a_replaced_forward_runs_when_compiled(qwen3, wrapped):
    torch._dynamo.reset()
    model, ids = qwen3.kernelize(tiny_model(num_hidden_layers=1)), random_tokens(2, 17)
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def other(*args, **kwargs):
        output, weights = forward(*args, **kwargs)
        return 2 * output, weights

    attention.forward = functools.wraps(forward)(other) if wrapped else other
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    assert_close(compiled(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss, torch.float32)


@pytest.mark.parametrize("form", checks.FORMS)
def test_what_people_train_is_fused_when_compiled(qwen3, form):
    """Two operators a layer and pass, and nothing else of a layer but attention; and the gradient of an embedding that is trained."""
    called = checks.check_compiled_form(qwen3, form, "cpu", "look", (17, 18, 40))
    of_layer = [name for name in called if name.startswith("norm_")]
    assert len(of_layer) == 2 * 2 * 4, "2 graphs of 2 layers, each with 2 operators forward and 2 backward"
    others = {"rms_norm_forward", "rms_norm_backward", "linear_cross_entropy_run"}
    assert set(called) - set(of_layer) == others | (set() if "LoRA" in form else {"embedding_backward"})


@pytest.mark.parametrize("form", ("plain", "LoRA", "autocast over float32 with LoRA"))
def test_a_compiled_mlp_is_made_again(qwen3, form):
    checks.check_compiled_form(qwen3, form, "cpu", "look", (17, 40), recompute_mlp=True)


def test_a_compiled_mlp_is_computed_in_tiles(qwen3):
    checks.check_compiled_form(qwen3, "LoRA", "cpu", "look", (17, 40), recompute_mlp=16)


def _with_hook(embedding):
    embedding.register_forward_hook(lambda module, args, output: 2 * output)


def _with_forward(embedding):
    forward = embedding.forward
    embedding.forward = lambda tokens: 2 * forward(tokens)


EMBEDDINGS = {  # what was done to it -> whether it is left as it is
    "nothing": (lambda embedding: None, False),
    "padding_idx": (lambda embedding: setattr(embedding, "padding_idx", 3), False),
    "scale_grad_by_freq": (lambda embedding: setattr(embedding, "scale_grad_by_freq", True), False),
    "a hook": (_with_hook, True),
    "a forward": (_with_forward, True),
    "another class": (lambda embedding: setattr(embedding, "__class__", type("Mine", (torch.nn.Embedding,), {})), True),
    "not trained": (lambda embedding: embedding.requires_grad_(False), True),
}


@pytest.mark.parametrize("what", EMBEDDINGS)
def test_the_gradient_of_the_embedding_is_eager_modes_bit_for_bit(qwen3, what):
    change, kept = EMBEDDINGS[what]
    model = qwen3.kernelize(tiny_model(num_hidden_layers=1))
    embedding = model.get_input_embeddings()
    change(embedding)
    ids, found = random_tokens(2, 17) % 10, []
    called, compiled = checks.operators_of(qwen3, model)
    for run in (model, compiled):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), embedding.weight.grad))
    (expected, wanted), (loss, gradient) = found
    assert torch.equal(loss, expected)
    assert gradient is wanted is None or torch.equal(gradient, wanted)
    assert ("embedding_backward" not in called) == kept


def test_dropout_of_an_adapter_is_drawn_when_compiled(qwen3):
    """By PEFT's own layers: what an operator draws, a graph would not know of."""
    torch._dynamo.reset()
    model, ids = qwen3.kernelize(checks.with_adapters(tiny_model(num_hidden_layers=1), lora_dropout=0.5)), random_tokens(2, 17)
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    losses = {compiled(input_ids=ids, labels=ids).loss.item() for _ in range(3)}
    assert len(losses) == 3
    model.eval()
    assert_close(compiled(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss, torch.float32)


def test_adapters_that_are_switched_compile_again(qwen3):
    torch._dynamo.reset()
    model, ids = qwen3.kernelize(checks.with_adapters(tiny_model(num_hidden_layers=1))), random_tokens(2, 17)
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)

    def both():
        found, expected = (run(input_ids=ids, labels=ids).loss for run in (compiled, model))
        assert_close(found, expected, torch.float32)
        return found.item()

    before = both()
    with model.disable_adapter():
        assert both() != pytest.approx(before, rel=1e-4)
    assert both() == before
    model.base_model.merge_adapter()
    assert both() == pytest.approx(before, rel=1e-4)


def test_a_compiled_model_evaluates_in_training_mode_without_gradients(qwen3):
    """With labels, where the loss takes the hidden states."""
    torch._dynamo.reset()
    model, ids = qwen3.kernelize(tiny_model(num_hidden_layers=1)), random_tokens(2, 17)
    with torch.no_grad():
        loss = torch.compile(model, backend=BACKEND, fullgraph=True)(input_ids=ids, labels=ids).loss
        assert_close(loss, model(input_ids=ids, labels=ids).loss, torch.float32)


@pytest.mark.parametrize("strict", (False, True), ids=("as it runs", "strict"))
def test_export(qwen3, strict):
    if not strict and TORCH < (2, 12):
        pytest.skip("torch 2.11 exports transformers' own model neither")
    checks.check_exported_model(qwen3, "cpu", strict)


@pytest.mark.parametrize("padded", (False, True))
def test_attention_has_a_mask_when_compiled_where_one_was_given(qwen3, padded):
    """transformers makes one in every graph: documents could start in positions that the caller did not give. Without it SDPA is faster."""
    model, ids = qwen3.kernelize(tiny_model(num_hidden_layers=2)), random_tokens(2, 17)
    compiled, masked = checks.compiled_with_masks(model)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if padded:
        inputs["attention_mask"] = (torch.arange(17) >= torch.tensor([[0], [5]])).long()
    for _ in range(2):
        model.zero_grad()
        compiled(**inputs).loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(**inputs).loss.backward()
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            assert_close(gradient, parameter.grad.double(), torch.float32)
    assert masked == [padded] * 2
