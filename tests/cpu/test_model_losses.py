"""The loss of a model with the layers: its options, what else it returns, and losses of the user's own."""

import importlib
import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.layer_steps import LABELS, TOKENS, bound, compare
from tests.models import VOCABULARY, Step, compiled_step, tiny_model, tiny_qwen3_moe
from tests.ops.linear_cross_entropy import cross_entropy_exact
from tests.tolerances import assert_close
from tests.versions import needs_compiler

CLASS_WEIGHT = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(5)) + 0.5
LOSS_OPTIONS = (
    {"label_smoothing": 0.3},
    {"class_weight": CLASS_WEIGHT},
    {"softcap": 2.0, "lse_square_scale": 1e-2},
    {"use_token_scaling": True},
    {"reduction": "sum", "ignore_index": 5},
    {"label_smoothing": 0.1, "num_items_in_batch": 17},
    {"accum_dtype": torch.float32},
)


class StepByFormula:
    """What `Step` gives, of a model as it is and the formula of tests/ops/linear_cross_entropy.py."""

    def __init__(self, model, input_ids, labels, **options):
        model.zero_grad()
        labels = nn.functional.pad(labels, (0, 1), value=options.get("ignore_index", -100))[:, 1:].flatten()
        if "num_items_in_batch" in options:
            options["num_items"] = options.pop("num_items_in_batch")
        self.loss = cross_entropy_exact(model.model(input_ids)[0].flatten(0, 1).double(), model.lm_head.weight.double(), labels, **options)
        self.loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", ({}, {"return_z_loss": True, "lse_square_scale": 1e-2}), ids=str)
@pytest.mark.parametrize("items", (None, 7, torch.tensor(7), torch.tensor([7])), ids=str)
@pytest.mark.parametrize("training", (True, False))
def test_a_hook_on_the_loss_outlives_a_change_in_place(qwen3, training, items, options):
    """FSDP1 puts one there, by which it learns that the backward pass has begun, and Trainer multiplies the loss in place."""
    model = qwen3.kernelize(tiny_model()).train(training)
    counted = {} if items is None else {"num_items_in_batch": items}
    loss, seen = model(input_ids=TOKENS, labels=LABELS, **counted, **options).loss, []
    loss.register_hook(seen.append)
    loss *= 2
    loss.sum().backward()
    assert len(seen) == 1 and seen[0].eq(2).all()
    assert not isinstance(items, torch.Tensor) or loss.shape in (items.shape, ())


@pytest.mark.parametrize("way", ["apply", "call", "kernelize", "eval", "hooked head"])
@pytest.mark.parametrize("options", LOSS_OPTIONS, ids="-".join)
def test_options_of_the_loss(qwen3, options, way):
    """Also where the loss is one of logits: in eval mode, and with a head that must be called."""
    model = tiny_model()
    expected = StepByFormula(model, TOKENS, LABELS.where(LABELS >= 0, options.get("ignore_index", -100)), **options)
    inputs = {"input_ids": TOKENS, "labels": LABELS.where(LABELS >= 0, options.get("ignore_index", -100))}
    given = {name: value for name, value in options.items() if name != "num_items_in_batch"}
    if way == "kernelize":
        qwen3.kernelize(model)
    else:
        qwen3.apply(fused_linear_cross_entropy=True if way == "call" else given)
    if way == "hooked head":
        model.lm_head.register_forward_hook(lambda *_: None)
    if way in ("call", "kernelize"):
        inputs.update(options)
    elif "num_items_in_batch" in options:
        inputs["num_items_in_batch"] = options["num_items_in_batch"]
    found = Step(model.train(way != "eval"), **inputs)
    assert (found.output.logits is None) == (way not in ("eval", "hooked head"))
    assert type(found.output).__name__ == "CausalLMOutputWithPast"
    found.assert_same(expected)


@pytest.mark.parametrize("way", ["training", "eval", "eval with options", "hooked head"])
def test_num_items_is_num_items_in_batch(qwen3, way):
    """The option of the operation, by its own name."""
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS, num_items_in_batch=37)
    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.0} if way == "eval with options" else True)
    if way == "hooked head":
        model.lm_head.register_forward_hook(lambda *_: None)
    model.train(not way.startswith("eval"))
    Step(model, input_ids=TOKENS, labels=LABELS, num_items=37).assert_same(expected)
    with pytest.raises(ValueError, match="num_items and num_items_in_batch are both given, expected one"):
        model(input_ids=TOKENS, labels=LABELS, num_items=37, num_items_in_batch=38)


@pytest.mark.parametrize("items", (0, torch.tensor(0), torch.tensor([0.0])), ids=str)
def test_no_items_are_no_loss_of_zero(qwen3, items):
    """The loss is infinite, as in transformers; where nothing counts it is 0 however many items there are said to be."""
    model = qwen3.kernelize(tiny_model())
    found = Step(model, input_ids=TOKENS, labels=LABELS, num_items_in_batch=items)
    assert found.loss.isposinf().all()
    assert not found.gradients["model.layers.0.mlp.up_proj.weight"].isfinite().any()
    empty = Step(model, input_ids=TOKENS, labels=torch.full_like(LABELS, -100), num_items_in_batch=items)
    assert empty.loss.eq(0).all() and all(gradient.eq(0).all() for gradient in empty.gradients.values())


@pytest.mark.parametrize("name", ("source", "target"))
@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1}), ids=str)
def test_an_argument_that_the_loss_gives_itself_is_refused(qwen3, name, options):
    model = tiny_model()
    with pytest.raises(TypeError, match=name):
        model(input_ids=TOKENS, labels=LABELS, **{name: LABELS})
    with pytest.raises(TypeError, match=f"{name} is an argument of this model's call"):
        qwen3.kernelize(model)(input_ids=TOKENS, labels=LABELS, **{name: LABELS}, **options)


@pytest.mark.parametrize("make", (tiny_model, tiny_qwen3_moe))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("name", ("head", "hidden", "weight", "bias"))
def test_arguments_that_transformers_ignores_are_ignored(qwen3, name, training, make):
    """It hands every keyword to the decoder and the loss, and each takes those that it knows: none is a name of this package's own."""
    compare(qwen3, make().train(training), input_ids=TOKENS, labels=LABELS, **{name: torch.ones(VOCABULARY)})


def test_a_head_with_other_rows_than_the_vocabulary_is_left_to_transformers(qwen3):
    """Which cuts its logits into rows of vocab_size, and finds another number of labels."""
    model = qwen3.kernelize(tiny_model())
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 2 * model.config.vocab_size, bias=False)
    with pytest.raises(ValueError, match="batch_size"):
        model(input_ids=TOKENS, labels=LABELS)


@pytest.mark.parametrize("options", [{}, {"return_z_loss": True, "lse_square_scale": 0.1}], ids=str)
def test_the_loss_of_a_float64_model_is_float32(qwen3, options):
    """The loss is that of transformers, which makes the logits float32."""
    model = tiny_model().double()
    assert model(input_ids=TOKENS, labels=LABELS).loss.dtype == torch.float32
    qwen3.apply()
    for training in (True, False):
        output = model.train(training)(input_ids=TOKENS, labels=LABELS, **options)
        assert output.loss.dtype == torch.float32 and (not options or output.z_loss.dtype == torch.float32)


def test_an_option_of_a_call_stands_before_that_of_apply(qwen3):
    model = tiny_model()
    expected = StepByFormula(model, TOKENS, LABELS, label_smoothing=0.3, lse_square_scale=1e-2)
    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.1, "lse_square_scale": 1e-2, "reduction": "sum"})
    Step(model, input_ids=TOKENS, labels=LABELS, label_smoothing=0.3, reduction="mean").assert_same(expected)


@pytest.mark.parametrize("off", ["apply", "without", "reset"])
def test_options_end_with_the_next_apply(qwen3, off):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.3})
    assert qwen3.get_patched_ops().count("fused_linear_cross_entropy") == 1
    {"apply": qwen3.apply, "without": lambda: qwen3.apply(fused_linear_cross_entropy=False), "reset": qwen3.reset}[off]()
    Step(model, input_ids=TOKENS, labels=LABELS).assert_same(expected)


def test_an_unknown_option_is_named_before_anything_is_patched(qwen3):
    with pytest.raises(TypeError, match="no option label_smooth, ce_weight; it has ignore_index, class_weight, .*skip_logits"):
        qwen3.apply(fused_linear_cross_entropy={"label_smooth": 0.1, "softcap": 3.0, "ce_weight": None})
    assert qwen3.get_patched_ops() == []


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_what_else_the_loss_returns(qwen3, training, hooked):
    model = tiny_model()
    plain = model(input_ids=TOKENS, labels=LABELS)
    best = nn.functional.pad(plain.logits.argmax(-1), (1, 0))[:, :-1]
    labels = torch.where((LABELS != -100) & (torch.arange(33) % 2 == 0), best, LABELS)  # every other token is predicted right
    qwen3.apply(fused_linear_cross_entropy={"return_token_accuracy": True, "return_predicted_tokens": True})
    if hooked:
        model.lm_head.register_forward_hook(lambda *_: None)
    output = model.train(training)(input_ids=TOKENS, labels=labels, return_z_loss=True, lse_square_scale=1e-2)
    target = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    counted = target != -100
    assert torch.equal(output.predicted_tokens, torch.where(counted, plain.logits.argmax(-1).flatten(), -1))
    assert_close(output.token_accuracy, (output.predicted_tokens == target)[counted].double().mean(), torch.float32)
    assert 0.4 < output.token_accuracy < 0.8
    assert_close(output.z_loss, 1e-2 * plain.logits.double().logsumexp(-1).square().flatten()[counted].mean(), torch.float32)
    assert (output.logits is None) == (training and not hooked)
    assert isinstance(output, type(plain)) and output.loss.requires_grad and output.to_tuple()[0] is output.loss
    leaves, form = torch.utils._pytree.tree_flatten(output)  # as FSDP and accelerate take outputs apart
    assert torch.utils._pytree.tree_unflatten(leaves, form).token_accuracy is output.token_accuracy
    assert pickle.loads(pickle.dumps(output.__class__)) is output.__class__
    as_tuple = model(input_ids=TOKENS, labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[-1], output.predicted_tokens)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("skip", [None, False, True])
@pytest.mark.parametrize("way", ["apply", "call"])
def test_skip_logits(qwen3, training, skip, way):
    model = tiny_model()
    expected = Step(model, input_ids=TOKENS, labels=LABELS)
    qwen3.apply(fused_linear_cross_entropy={"skip_logits": skip} if way == "apply" else True)
    found = Step(model.train(training), input_ids=TOKENS, labels=LABELS, **({"skip_logits": skip} if way == "call" else {}))
    found.assert_same(expected)
    assert (found.output.logits is None) == (training if skip is None else skip)
    assert model(input_ids=TOKENS).logits is not None


def test_a_loss_of_the_users_own_gets_its_arguments(qwen3):
    model, seen = tiny_model(), []

    def loss(logits, labels, vocab_size, label_smoothing, **kwargs):
        seen.append(label_smoothing)
        return logits.square().mean()

    model.loss_function = loss
    qwen3.apply()
    model(input_ids=TOKENS, labels=LABELS, label_smoothing=0.3)
    assert seen == [0.3]


def test_a_batch_of_ignored_labels_gives_zero(qwen3):
    model = tiny_model()
    for options in ({}, {"label_smoothing": 0.1, "use_token_scaling": True, "lse_square_scale": 0.1, "return_token_accuracy": True}):
        qwen3.apply(fused_linear_cross_entropy=options or True)
        for training in (True, False) if options else (True,):
            found = Step(model.train(training), input_ids=TOKENS, labels=torch.full_like(TOKENS, -100))
            assert found.loss == 0 and all(not gradient.any() for gradient in found.gradients.values())


def test_labels_that_do_not_fit_the_kept_logits(qwen3):
    model = tiny_model()
    for patch in (lambda: None, qwen3.apply):
        patch()
        with pytest.raises(ValueError, match="target"):
            model(input_ids=TOKENS, labels=LABELS, logits_to_keep=8)


def test_a_loss_of_the_users_own_is_called(qwen3):
    model = tiny_model()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    _, found = compare(qwen3, model, input_ids=TOKENS, labels=LABELS)
    assert found.logits is not None


@pytest.mark.parametrize("loss", ["of logits", "loss_function", "loss_type"])
def test_options_that_do_not_reach_a_loss_are_named(qwen3, loss, monkeypatch):
    """They are the model's own loss's. Any other that trains would leave them out without a word."""
    monkeypatch.setattr(importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation"), "_warned", set())
    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.1, "lse_square_scale": 1e-3, "skip_logits": True})
    model, inputs = tiny_model(), {"input_ids": TOKENS, "labels": LABELS}
    if loss == "of logits":
        del inputs["labels"]
    elif loss == "loss_type":
        model.loss_type = "ForMaskedLM"
    else:
        model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(**inputs)  # nothing trains here
        model.eval()(**inputs)
    with pytest.warns(RuntimeWarning, match=r"^label_smoothing, lse_square_scale of apply\(.*\) do not reach a loss that is"):
        model.train()(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)  # once is enough
        for options in ({"skip_logits": True}, True):
            qwen3.apply(fused_linear_cross_entropy=options)
            model(**inputs)


def test_another_loss_type_is_called(qwen3):
    model = tiny_model()
    model.loss_type = "ForMaskedLM"
    _, found = compare(qwen3, model, input_ids=TOKENS, labels=LABELS)
    assert found.logits is not None


@needs_compiler
def test_torch_compile_with_options_of_the_loss(qwen3):
    model = tiny_model()
    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.2, "use_token_scaling": True, "return_token_accuracy": True})
    inputs = {"input_ids": TOKENS, "labels": LABELS, "return_z_loss": True, "lse_square_scale": 1e-2, "return_predicted_tokens": True}
    expected = Step(model, **inputs)
    found = compiled_step(model, **inputs)
    for name in ("z_loss", "token_accuracy"):
        assert_close(found.output[name], expected.output[name], torch.float32, name)
    assert torch.equal(found.output.predicted_tokens, expected.output.predicted_tokens)
    found.assert_same(expected)


@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("shifted", [False, True])
def test_for_causal_lm_loss(qwen3, num_items, shifted):
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight = torch.randn(2, 33, 64), torch.randn(VOCABULARY, 64)
    options = {"num_items_in_batch": num_items, "shift_labels": LABELS.roll(-1, 1) if shifted else None}
    expected = ForCausalLMLoss(hidden @ weight.T, LABELS, VOCABULARY, **options)
    loss = bound(qwen3, "ForCausalLMLoss")
    assert_close(loss(None, LABELS, VOCABULARY, hidden_states=hidden, lm_head_weight=weight, **options), expected, torch.float32)
    assert_close(loss(hidden @ weight.T, LABELS, VOCABULARY, **options), expected, torch.float32)
    options.update(lse_square_scale=1.0, return_predicted_tokens=True, something_of_transformers=1)
    heads = {"hidden_states": hidden, "lm_head_weight": weight}
    found, of_logits = loss(None, LABELS, VOCABULARY, **heads, **options), loss(hidden @ weight.T, LABELS, VOCABULARY, **options)
    assert torch.equal(found.predicted_tokens, of_logits.predicted_tokens)
    assert_close(found.loss, of_logits.loss, torch.float32)
    assert found.loss > 1.1 * expected


def test_logits_that_were_not_expected_are_told_once(qwen3):
    """With the reason, for each model; not where the user asked for logits, or for another loss."""
    model = qwen3.kernelize(tiny_model())
    model.lm_head.register_forward_hook(lambda *_: None)
    inputs = {"input_ids": TOKENS, "labels": LABELS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(**inputs, skip_logits=False).logits is not None
        assert model.eval()(**inputs).logits is not None
    with pytest.warns(RuntimeWarning, match="makes all logits for its loss: lm_head: hooks listen to it. What to do: remove"):
        model.train()(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)
        other = qwen3.kernelize(tiny_model())
        other.loss_function = lambda logits, labels, vocab_size, **_: logits.mean()
        other(**inputs)
    model.lm_head._forward_hooks.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "cross_entropy", lambda logits, *_, **__: logits.mean())
        with pytest.warns(RuntimeWarning, match=r"torch.nn.functional.cross_entropy is .*test_model_losses"):
            model(**inputs)
    qwen3.reset()
    assert not any(name.startswith("_bastile") for name in vars(model))


@pytest.mark.parametrize("routers", (False, True))
def test_a_tuple_has_none_where_transformers_has_logits(qwen3, routers):
    model = tiny_qwen3_moe(output_router_logits=routers)
    plain = model(input_ids=TOKENS, labels=LABELS, return_dict=False)
    found = qwen3.kernelize(model)(input_ids=TOKENS, labels=LABELS, return_dict=False)
    assert [type(value) for value in found] == [type(value) if i != 1 + routers else type(None) for i, value in enumerate(plain)]


def test_the_decoder_of_a_model_has_another_name_than_model(qwen3, monkeypatch):
    """As GPT-2's: padding is left out there, too."""
    model = qwen3.kernelize(tiny_model())
    model.set_attn_implementation("bastile")
    monkeypatch.setattr(type(model), "base_model_prefix", "transformer")
    model._modules = {"transformer": model.model, "lm_head": model.lm_head}
    padding = importlib.import_module(f"{qwen3.__name__}.shared.hf.model.padding")
    mask = (torch.arange(TOKENS.shape[1]) < TOKENS.shape[1] - 2).long().expand_as(TOKENS)
    kwargs = {"input_ids": TOKENS, "attention_mask": mask, "use_cache": False}
    _, places = padding.without_padding(model, torch.full((TOKENS.numel(),), -100), -100, kwargs, {})
    assert torch.equal(places, mask.flatten().nonzero()[:, 0])
