"""Functions that transformers finds by name when it is called, below the forwards that ours take the place of: a user's run as often as
without the packages, and are named by `explain`."""

import functools
import importlib.util
import sys

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.activations import GELUTanh
from transformers.integrations import moe
from transformers.loss import loss_utils
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from tests.decoder_families import tiny, tiny_behind_a_tower
from tests.models import Step, check_compiled, random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_5, tiny_qwen3_moe
from tests.patched import lora

TOKENS = random_tokens(2, 13)
# By family: the fixture of its package, and the function that makes a small model.
FAMILIES = {
    "qwen3": ("qwen3", tiny_model), "qwen3_moe": ("qwen3", tiny_qwen3_moe), "gpt_oss": ("gpt_oss", tiny_gpt_oss),
    "gemma2": ("decoders", functools.partial(tiny, "gemma2", attn_implementation="eager")),
    "glm": ("decoders", functools.partial(tiny, "glm")), "qwen3_5": ("qwen3_5", tiny_qwen3_5),
    "a tower": ("decoders", functools.partial(tiny_behind_a_tower, "llava")),
}  # fmt: skip
CASES = [
    *((name, function) for name in FAMILIES for function in ("fixed_cross_entropy", "cross_entropy")),
    *((name, "rotate") for name in FAMILIES if name != "a tower"),
    *((name, function) for name in ("qwen3", "qwen3_moe", "gemma2") for function in ("linear", "rsqrt")),
    *((name, "silu") for name in ("qwen3", "qwen3_moe", "glm", "qwen3_5")),
    *((name, function) for name in ("qwen3_moe", "gpt_oss") for function in ("softmax", "topk")),
    *(("qwen3_5", function) for function in ("l2norm", "softplus", "conv1d", "rsqrt")),
]


def place_of(model, function):
    """The module in which a model's forwards find a function, and its name there."""
    if function == "fixed_cross_entropy":
        return loss_utils, function
    text = getattr(model.model, "language_model", model.model)
    modeling = sys.modules[type(text).__module__]
    if function == "rotate":
        return modeling, "_apply_rotary_emb" if hasattr(modeling, "_apply_rotary_emb") else "rotate_half"
    if hasattr(modeling, function):
        return modeling, function
    return (torch, function) if function in ("topk", "rsqrt") else (nn.functional, function)


def louder(original, calls):
    """A function whose first result is larger than the original's, by a factor that depends on it."""

    def scaled(found):
        return found * (1.5 + 0.5 * found.tanh())

    @functools.wraps(original)
    def mine(*args, **kwargs):
        calls.append(original)
        found = original(*args, **kwargs)
        return scaled(found) if isinstance(found, torch.Tensor) else (scaled(found[0]), *found[1:])

    return mine


def step(model):
    torch.manual_seed(0)
    return Step(model, input_ids=TOKENS, labels=TOKENS, use_cache=False)


@pytest.mark.parametrize(("name", "function"), CASES)
def test_a_function_that_is_looked_up_by_name(name, function, request, monkeypatch):
    package, make = FAMILIES[name]
    package, model, calls = request.getfixturevalue(package), make(), []
    where, attribute = place_of(model, function)
    before = step(model)
    with monkeypatch.context() as patch:
        patch.setattr(where, attribute, louder(getattr(where, attribute), calls))
        expected, count = step(model), len(calls)
        assert count and not torch.equal(expected.loss, before.loss)
        package.kernelize(model)
        calls.clear()
        step(model).assert_same(expected, 10)
        assert len(calls) == count
        assert any(f".{attribute} is {__name__}." in row.reason for row in package.explain(model).rows)
    step(model).assert_same(before, 10)
    assert not any(" is " + __name__ in row.reason for row in package.explain(model).rows)


class FunctionMode(TorchFunctionMode):
    """Makes the results of one function larger. calls: of it."""

    def __init__(self, function, calls):
        super().__init__()
        self.function, self.louder = function, louder(function, calls)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (self.louder if function is self.function else function)(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "function"), [
    *(("qwen3", getattr(nn.functional, function)) for function in ("linear", "silu", "cross_entropy", "scaled_dot_product_attention")),
    ("qwen3_moe", nn.functional.linear), ("gpt_oss", torch.topk), ("gemma2", torch.rsqrt), ("qwen3_5", nn.functional.softplus),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_a_function_that_a_mode_changes(name, function, request):
    """As often as without the packages, which under a mode do nothing; behind it the layers are fused again."""
    package, make = FAMILIES[name]
    package, model, calls = request.getfixturevalue(package), make(), []
    before = step(model)
    with FunctionMode(function, calls):
        expected, count = step(model), len(calls)
    assert count and not torch.equal(expected.loss, before.loss)
    package.kernelize(model)
    calls.clear()
    with FunctionMode(function, calls):
        step(model).assert_same(expected, 10)
        assert len(calls) == count
        assert any(f"the mode {__name__}.FunctionMode is in force" in row.reason for row in package.explain(model).rows)
    step(model).assert_same(before, 10)
    with torch.device("cpu"):  # a mode of PyTorch's own
        assert not any("in force" in row.reason for row in package.explain(model).rows)


def reasons(package, model):
    return [row.reason for row in package.explain(model).rows]


@pytest.mark.parametrize("how", ("apply", "kernelize"))
@pytest.mark.parametrize("function", ("fixed_cross_entropy", "silu", "rotate"))
def test_one_that_was_replaced_before(qwen3, how, function, monkeypatch):
    """Training and evaluation have the same loss, and what is put back runs fused."""
    model, calls = tiny_model(), []
    before = step(model)
    with monkeypatch.context() as patch:
        where, attribute = place_of(model, function)
        patch.setattr(where, attribute, louder(getattr(where, attribute), calls))
        expected = step(model)
        qwen3.apply() if how == "apply" else qwen3.kernelize(model)
        step(model).assert_same(expected)
        torch.testing.assert_close(model.eval()(input_ids=TOKENS, labels=TOKENS).loss, expected.loss)
    step(model.train()).assert_same(before)
    assert not any("mine" in reason for reason in reasons(qwen3, model))


def test_the_loss_itself_under_all_its_names(qwen3, monkeypatch):
    model, calls = tiny_model(), []
    mine = louder(loss_utils.ForCausalLMLoss, calls)
    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", mine)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", mine)
    expected = step(model)
    step(qwen3.kernelize(model)).assert_same(expected)
    assert len(calls) == 2


def test_the_loss_of_routers(qwen3, monkeypatch):
    model, calls = tiny_qwen3_moe(output_router_logits=True), []
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "load_balancing_loss_func", louder(modeling.load_balancing_loss_func, calls))
    expected = step(model)
    step(qwen3.kernelize(model)).assert_same(expected)
    assert len(calls) == 2


def test_a_method_of_a_norm(decoders, monkeypatch):
    """One that replaces the class's, and that of a subclass."""
    model, calls = tiny("gemma2", attn_implementation="eager"), []
    before, decoders = step(model), decoders.kernelize(model) and decoders
    with monkeypatch.context() as patch:
        patch.setattr(Gemma2RMSNorm, "_norm", louder(Gemma2RMSNorm._norm, calls))
        plain = tiny("gemma2", attn_implementation="eager")
        step(model).assert_same(step(plain))
        mine = Gemma2RMSNorm._norm
    step(model).assert_same(before)
    for each in (model, plain):
        for norm in (each.model.norm, each.model.layers[0].pre_feedforward_layernorm):
            norm.__class__ = type("MyNorm", (Gemma2RMSNorm,), {"_norm": mine})
    step(model).assert_same(step(plain))


def test_the_gate_of_experts(qwen3, monkeypatch):
    model, calls = tiny_qwen3_moe(), []
    experts = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(experts, "_apply_gate", louder(experts._apply_gate, calls))
    expected = step(model)
    step(qwen3.kernelize(model)).assert_same(expected)


def test_a_function_of_experts(qwen3, monkeypatch):
    model, calls = tiny_qwen3_moe(), []
    monkeypatch.setattr(moe, "_grouped_linear", louder(moe._grouped_linear, calls))
    expected, count = step(model), len(calls)
    step(qwen3.kernelize(model)).assert_same(expected)
    assert len(calls) == 2 * count > 0


@pytest.mark.parametrize("where", (nn.Dropout, nn.functional))
def test_dropout_of_an_adapter(qwen3, where, monkeypatch):
    model, calls = lora(tiny_model(), lora_dropout=0.5), []
    name = "forward" if where is nn.Dropout else "dropout"
    monkeypatch.setattr(where, name, louder(getattr(where, name), calls))
    expected, count = step(model), len(calls)
    qwen3.kernelize(model)
    step(model).assert_same(expected)
    assert len(calls) == 2 * count > 0


def test_deepspeeds_linear_stays_fused(qwen3, monkeypatch):
    """zero.Init puts it there for the rest of the process."""
    model = qwen3.kernelize(tiny_model())
    monkeypatch.setattr(nn.functional, "linear", zero3_linear_wrap)
    assert all(row.fused for row in qwen3.explain(model).rows if row.part.startswith(("norm", "o_proj", "loss")))


def test_a_graph_calls_it(qwen3, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(nn.functional, "silu", lambda x, inplace=False: x * torch.sigmoid(2 * x))
    expected = step(model)
    check_compiled(qwen3.kernelize(model), expected, input_ids=TOKENS, labels=TOKENS, use_cache=False)


def test_what_stood_there_before_the_package_was_imported(qwen3, monkeypatch):
    """Is not taken for PyTorch's own."""
    hf = f"{qwen3.__name__}.shared.hf.parts"
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", louder(nn.Linear.forward, []))
        patch.setattr(nn.functional, "gelu", louder(nn.functional.gelu, []))
        for name in ("modules", "weights"):  # the second reads what the first has kept
            spec = importlib.util.spec_from_file_location(f"{hf}.{name}", sys.modules[f"{hf}.{name}"].__file__)
            again = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, f"{hf}.{name}", again)
            spec.loader.exec_module(again)
        modules, weights = sys.modules[f"{hf}.modules"], again
        assert weights.why_not_plain(nn.Linear(2, 2, bias=False)).text == "torch.nn.Linear.forward was replaced"
        assert not modules.is_activation(GELUTanh(), "gelu_tanh")
    assert modules.is_activation(GELUTanh(), "gelu_tanh")


def test_an_object_of_a_library_s_class_that_is_called(qwen3):
    """As torch.library.custom_op makes one of a function; one of a user's class is named."""
    lookups = importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.lookups")
    names = {"__name__": "transformers.models", "name": torch.library.custom_op("bastile_tests::same", torch.clone, mutates_args=(),
                                                                             schema="(Tensor x) -> Tensor")}  # fmt: skip
    assert lookups._stranger(names, "name") == ""
    assert "functools.partial" in lookups._stranger({**names, "name": functools.partial(nn.functional.silu)}, "name")
