"""Attention that is called, between projections that the nodes around it make."""

import copy
import functools
import importlib

import pytest
import torch
from torch import nn

from tests.any_model import shrink
from tests.cpu.families.test_layers_of_all_types import check_same, step_of, tiny_model_of
from tests.patched import lora
from tests.tolerances import relative_error
from tools.family_loss import config_of

CALLED = {
    "gemma4_text": ("norm, q_proj, k_proj, v_proj", "o_proj"),
    "deepseek_v3": ("norm, q_a_proj, kv_a_proj_with_mqa", "o_proj"),
    "diffllama": ("norm, q_proj, k_proj, v_proj", "o_proj"),
    "gpt_neox": ("norm, query_key_value", "dense"),
    "persimmon": ("norm, query_key_value", "dense"),
    "shared keys and values": ("norm, q_proj", "o_proj"),
}
WAYS = "plain", "adapters", "adapters that drop", "checkpointed", "packed"


def _model(kind):
    import transformers

    if kind != "shared keys and values":
        return tiny_model_of(kind)
    config = config_of("gemma4_text", transformers.Gemma4ForCausalLM)
    shrink(config)
    config.num_hidden_layers, config.num_kv_shared_layers = 4, 2
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(config).train()


def _fused(package, model):
    return {row.part for row in package.explain(model).rows if row.fused}


@pytest.mark.parametrize("kind, way", [(kind, way) for kind in CALLED for way in WAYS if (kind, way) != ("deepseek_v3", WAYS[2])])
def test_results_are_those_of_transformers(bastile, kind, way):
    model = _model(kind)
    if way.startswith("adapters"):
        drops = 0.999999 if way == "adapters that drop" else 0.0  # all, whatever the numbers that are drawn
        model = lora(model, target_modules="all-linear", lora_dropout=drops)
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    inputs = {"position_ids": torch.cat((torch.arange(4), torch.arange(7)))[None].expand(2, -1)} if way == "packed" else {}
    expected = step_of(model, **inputs)
    bastile.kernelize(model)
    assert _fused(bastile, model) >= {*CALLED[kind]}, bastile.explain(model)
    check_same([step_of(model, **inputs)], [expected], 1e-4)  # Gemma 4 scales no scores: transformers' own fp32 errs by 9e-6


@pytest.mark.parametrize("kind", ("gemma4_text", "diffllama", "gpt_neox"))
def test_half_precision_is_as_exact_as_before(bastile, kind):
    model = lora(_model(kind), target_modules="all-linear").bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):  # without a scaling, one key takes all, and the gradients of q are rounding
            parameter.data.mul_(0.1)
    exact, before = ([step_of(each, seed=seed) for seed in range(8)] for each in (copy.deepcopy(model).float(), model))
    bastile.kernelize(model)
    assert _fused(bastile, model) >= {*CALLED[kind]}
    found = [step_of(model, seed=seed) for seed in range(8)]
    mine, other = (
        sum(relative_error(one.gradients[name], right.gradients[name]) ** 2
            for one, right in zip(steps, exact, strict=True) for name in right.gradients) ** 0.5
        for steps in (found, before)
    )
    assert mine <= 1.1 * other, (mine, other)


def _of(package, name):
    """A function of the package that a test has loaded. name: of its file and function."""
    file, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"{package.__name__}.shared.hf.{file}"), function)


def _attention_of(model):
    return next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn"))


@pytest.mark.parametrize("on", ("attention", "q_proj", "o_proj"))
def test_hooks_are_called(bastile, on):
    model = _model("gemma4_text")
    attention = _attention_of(model)
    module = attention if on == "attention" else attention._modules[on]
    found = []
    bastile.kernelize(model)
    module.register_forward_hook(lambda module, args, result: found.append(type(module)))
    without = _model("gemma4_text")
    check_same([step_of(model)], [step_of(without)])
    assert found == [type(module)]


@pytest.mark.parametrize("where", ("class", "module"))
def test_a_forward_that_replaces_attentions_runs(bastile, monkeypatch, where):
    model, other = _model("gemma4_text"), _model("gemma4_text")
    bastile.kernelize(model)
    original = type(_attention_of(model)).forward

    def forward(self, *args, **kwargs):
        result, weights = original(self, *args, **kwargs)
        return 3 * result, weights

    for each in (model, other):
        if where == "class":
            monkeypatch.setattr(type(_attention_of(each)), "forward", forward)
        else:
            _attention_of(each).forward = functools.partial(forward, _attention_of(each))
    check_same([step_of(model)], [step_of(other)])


def test_another_module_for_a_projection_is_called(bastile):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, other = _model("gemma4_text"), _model("gemma4_text")
    bastile.kernelize(model)
    for each in (model, other):
        attention = _attention_of(each)
        doubled = Doubled(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
        doubled.load_state_dict(attention.q_proj.state_dict())
        attention.q_proj = doubled
    check_same([step_of(model)], [step_of(other)])


def test_products_that_nobody_reads_are_made_once(bastile):
    model = _model("gemma4_text")
    bastile.kernelize(model)
    layer = model.model.layers[1]
    row = _of(bastile, "install.recognised.read_of")(layer)
    row.around = row.around._replace(inputs=(*row.around.inputs, "spare"))
    layer.self_attn.spare = nn.Linear(64, 8, bias=False)
    step_of(model)
    assert row.around is None
    layer.self_attn.spare.weight.grad = None
    step_of(model)
    assert layer.self_attn.spare.weight.grad is None


# ---------------------------------------------------------------- texts
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.kept = nn.LayerNorm(4), None


class Plain(Base):
    def forward(self, x):
        shape = x.shape
        result = self.q_proj(x) + self.k_proj(x) * self.norm(self.k_proj.weight.new_ones(4)) if self.kept else self.q_proj(x).view(shape)
        return self.o_proj(result)


class Named(Base):
    def forward(self, x, **kwargs):
        q, k = self.q_proj(x), self.k_proj(x)
        result = (q + self.norm(k)).to(x.dtype)
        result = self.o_proj(result)
        return result, None


class WithMethod(Named):
    def between(self, q):
        return self.norm(q)

    def forward(self, x):
        return self.o_proj(self.between(self.q_proj(x)))


class ReadsTheInput(Base):
    def forward(self, x):
        return self.o_proj(self.q_proj(x) + x)


class NormalisesTheInput(Base):
    def forward(self, x):
        return self.o_proj(self.q_proj(self.norm(x)) + self.k_proj(x))


class WritesTheInput(Base):
    def forward(self, x):
        q = self.q_proj(x)
        x = q
        return self.o_proj(self.k_proj(x))


class DoesMore(Base):
    def forward(self, x):
        result = self.o_proj(self.q_proj(x))
        result = result * 2
        return result


class DoesMoreInPlace(Base):
    def forward(self, x):
        result = self.o_proj(self.q_proj(x))
        result += 1
        return result, None


class ReturnsTwice(Base):
    def forward(self, x):
        if self.kept:
            return self.q_proj(x)
        return self.o_proj(self.k_proj(x))


class Keeps(Base):
    def forward(self, x):
        self.kept = self.q_proj(x)
        return self.o_proj(self.kept)


class ReadsAWeight(Base):
    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.q_proj.weight.sum())


class MethodKeeps(Base):
    def between(self, q):
        self.kept = q
        return q

    def forward(self, x):
        return self.o_proj(self.between(self.q_proj(x)))


class MethodProjects(Base):
    def between(self, q):
        return self.k_proj(q) + self.o_proj(q)

    def forward(self, x):
        return self.o_proj(self.between(self.q_proj(x)))


class ProjectsTwice(Base):
    def forward(self, x):
        return self.o_proj(self.o_proj(self.q_proj(x)))


@pytest.mark.parametrize("cls, inputs", [(Named, ("q_proj", "k_proj")), (WithMethod, ("q_proj",))])
def test_ends_are_read(bastile, cls, inputs):
    assert _of(bastile, "family.around.around_of")([cls()], "x")[:2] == (inputs, "o_proj")


@pytest.mark.parametrize(
    "cls",
    (Plain, ReadsTheInput, NormalisesTheInput, WritesTheInput, DoesMore, DoesMoreInPlace, ReturnsTwice, Keeps, ReadsAWeight, MethodKeeps,
     MethodProjects, ProjectsTwice),
)  # fmt: skip
def test_other_texts_have_no_ends(bastile, cls):
    assert _of(bastile, "family.around.around_of")([cls()], "x") is None
