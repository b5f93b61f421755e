"""A row of the table of families says all that a family computes: its layers are transformers' own, one by one, and what it does not
account for is not fused."""

import ast
import functools
import importlib
import importlib.util
import warnings

import pytest
import torch

from tests.decoder_families import FACTOR, NAMES, SPARSE, TOKENS, step_of, tiny
from tests.models import tiny_gpt_oss, tiny_model, tiny_qwen3_5, tiny_qwen3_5_sparse, tiny_qwen3_moe
from tests.patched import calls_of
from tests.tolerances import assert_close
from tools.transformers_texts import fingerprints

PACKAGES = "qwen3", "gpt_oss", "decoders", "moe", "qwen3_5"
# A small model for each row, in the table's order.
MODELS = {
    "qwen3": {"qwen3": tiny_model, "qwen3_moe": tiny_qwen3_moe},
    "gpt_oss": {"gpt_oss": tiny_gpt_oss},
    "decoders": {name.removesuffix("_text"): functools.partial(tiny, name, attn_implementation="eager") for name in NAMES},
    "moe": {name: functools.partial(tiny, name, attn_implementation="eager") for name in SPARSE},
    "qwen3_5": {
        "qwen3_5": tiny_qwen3_5,
        **{name: functools.partial(tiny_qwen3_5_sparse, name) for name in ("qwen3_5_moe", "qwen3_next")},
    },
}


def part(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


def families_of(package):
    return calls_of(package).families


@pytest.mark.parametrize("fixture", PACKAGES)
def test_every_row_has_a_small_model_and_its_texts_recorded(request, fixture):
    """`python -m tools.transformers_texts --add` records them. Without them a row does nothing."""
    package = request.getfixturevalue(fixture)
    rows = calls_of(package).rows
    recorded = part(package, "shared.hf.family.known_texts").TEXTS
    assert [own.family.model for own in rows if own.family.modeling not in recorded] == []
    assert [own.family.model for own in rows] == [targets.model for targets in families_of(package)]
    assert [f"transformers.models.{name}.modeling_{name}" for name in MODELS[fixture]] == [own.family.modeling for own in rows]


@pytest.mark.parametrize("fixture", PACKAGES)
def test_every_row_accounts_for_what_transformers_forwards_read(request, fixture):
    """Of the installed release. A forward that reads one more attribute is noticed, whichever class it is of."""
    package = request.getfixturevalue(fixture)
    versions, accounted, texts = (part(package, f"shared.hf.family.{name}") for name in ("versions", "accounted", "known_texts"))
    for targets in families_of(package):
        assert versions.unfit_texts(targets) == {}
        stood_in_for = {name for operation, (name, _) in targets.classes.items() if operation != "attention"} | {*targets.fused}
        assert stood_in_for <= targets.accounted.keys()
        for cls, known in targets.accounted.items():
            module = targets.module_of(cls)
            tree = ast.parse(versions.source_of(module))
            [node] = [node for node in tree.body if getattr(node, "name", None) == cls]
            methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
            called = methods.keys() & accounted.reads(tree, cls)
            assert {f"{cls}.{method}" for method in called} <= texts.TEXTS[module].keys(), "a changed method would not be noticed"
            methods["forward"].body.insert(0, ast.parse("x = self.surprise * self.config.surprise").body[0])
            found = {cls: accounted.reads(tree, cls)}
            assert accounted.unaccounted(found, {cls: known}) == {cls: ("config.surprise", "surprise")}


READS = {
    "a submodule's own": ("self.gate.scale", ("gate.scale",)),
    "a submodule's weight": ("self.gate.weight.dtype", ("gate",)),
    "by getattr": ("getattr(self.config, 'window', None)", ("config.window",)),
    "of the text's configuration": ("self.config.get_text_config().cap + self.config.text_config.size", ("config.cap", "config.size")),
    "the configuration": ("f(self.config)", ("config",)),
    "the module": ("f(self)", ("self",)),
    "in a function within": ("[self.a for _ in (lambda: self.b)()]", ("a", "b")),
    "by a method that it calls": ("self.route(x)", ("bias", "route", "top_k")),
    "written": ("x; self.seen = x", ()),
    "of another object": ("x.shape", ()),
}


@pytest.mark.parametrize("what", READS)
def test_what_a_forward_reads(qwen3, what):
    code, expected = READS[what]
    tree = ast.parse(
        f"class A:\n    def forward(self, x):\n        {code}\n    def route(module, x):\n        return module.bias[module.top_k]\n"
        "    def other(self):\n        return self.z\n"
    )
    assert part(qwen3, "shared.hf.family.accounted").reads(tree, "A") == {*expected}


def layers_of(model, targets):
    return [module for module in model.modules() if type(module).__name__ == targets.classes["decoder_layer"][0]]


@pytest.mark.parametrize(("fixture", "name"), [(fixture, name) for fixture, models in MODELS.items() for name in models])
def test_each_layer_is_transformers_own(request, fixture, name):
    """Before a row serves a class: every layer of a small copy alone, its result and all gradients."""
    package = request.getfixturevalue(fixture)
    [targets] = [targets for targets in families_of(package) if targets.modeling.split(".")[2] == name]
    [called] = [own.family.called for own in calls_of(package).rows if own.family.modeling == targets.modeling]
    model = MODELS[fixture][name]()
    layers, found = layers_of(model, targets), []
    hooks = [layer.register_forward_pre_hook(lambda *given: found.append(given), with_kwargs=True) for layer in layers]
    model(input_ids=TOKENS, use_cache=False)
    for hook in hooks:
        hook.remove()

    def run(layer, given, named):
        x = (given[0] if given else named["hidden_states"]).detach().requires_grad_()
        given, named = (x, *given[1:]) if given else given, named if given else {**named, "hidden_states": x}
        result = layer(*given, **named)
        result = result[0] if isinstance(result, tuple) else result
        layer.zero_grad()
        result.backward(torch.randn(result.shape, generator=torch.Generator().manual_seed(1)))
        return {"result": result, "x": x.grad, **{key: p.grad for key, p in layer.named_parameters() if p.grad is not None}}

    expected = [run(*each) for each in found]
    package.kernelize(model)
    assert len(found) == len(layers) > 1
    for (layer, *given), wanted in zip(found, expected, strict=True):
        x = torch.empty((1, 1, next(iter(wanted.values())).shape[-1]))
        codes = {reason and reason.code for _, reason in targets.explain_layer(layer, x)}
        assert codes == {None} if not called else {None, "called"} <= codes <= {None, "called", "node"}
        ours = run(layer, *given)
        assert ours.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_close(ours[key], value, torch.float32, f"{name}: {key}", 10)  # some gradients are a handful of numbers


def glm4_5():
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
             "n_shared_experts": 1, "moe_intermediate_size": 32}  # fmt: skip
    return Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **SMALL)).train()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, router_jitter_noise=0.3, **SMALL)).train()


SMALL = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
# Rows that say too little: (arguments of `row`, classes of the block, the router and the experts, a small model, what is read beside).
TOO_LITTLE = {
    "glm4_moe": (("GLM-4.5", "Glm4Moe"), {"partial": True}, ("Glm4MoeMoE", "Glm4MoeTopkRouter", "Glm4MoeExperts"), glm4_5,
                 ("shared_experts", "e_score_correction_bias", "routed_scaling_factor", "use_qk_norm")),
    "mixtral": (("Mixtral", "Mixtral"), {"options": (("sliding_window", "config", "sliding_window"),), "mlp": False},
                ("MixtralSparseMoeBlock", "MixtralTopKRouter", "MixtralExperts"), mixtral, ("jitter_noise",)),
}  # fmt: skip


def too_little(decoders, name):
    """A row as `families.ROWS` has it."""
    names, options, classes, _, _ = TOO_LITTLE[name]
    sparse = part(decoders, "shared.hf.family.families").Sparse(classes)
    return part(decoders, "shared.rows.dense").row(*names, name, **options, sparse=sparse)


def record_texts(decoders, own, monkeypatch):
    versions, family = part(decoders, "shared.hf.family.versions"), own.family
    names = [f"{family.prefix}{name}.forward" for name in ("RMSNorm", "Attention", "DecoderLayer", "Model", "ForCausalLM")]
    names += [f"{cls}.forward" for cls in (*family.sparse.classes, *([family.mlp_class()] if family.mlp else ()))]
    found = fingerprints(versions.source_of(family.modeling), [*names, "apply_rotary_pos_emb", "rotate_half"])
    monkeypatch.setitem(versions.TEXTS, family.modeling, {text: {"5.17.0": fingerprint} for text, fingerprint in found.items()})


@pytest.fixture
def tried(decoders):
    """The package, whose own rows serve its forwards again after a test that had other rows use them."""
    yield decoders
    part(decoders, "shared.hf.family.ownership").claim_layers(families_of(decoders))


@pytest.mark.parametrize("how", ("kernelize", "apply"))
@pytest.mark.parametrize("name", TOO_LITTLE)
def test_a_row_that_says_too_little_does_not_serve(tried, monkeypatch, name, how):
    """The decoder layer stays transformers' own, with what the row would have to say; what else is known runs in ours."""
    decoders, own, (_, _, _, make, expected) = tried, too_little(tried, name), TOO_LITTLE[name]
    record_texts(decoders, own, monkeypatch)
    targets = (part(decoders, "shared.hf.install.served").targets(own),)
    part(decoders, "shared.hf.family.ownership").claim_layers(targets)  # which the package's own rows share
    one_model, patching = part(decoders, "shared.hf.install.one_model"), part(decoders, "shared.hf.install.patching")
    torch.manual_seed(0)
    model = make()
    before = step_of(model)
    operations = dict.fromkeys(("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention", "experts"), True)
    with pytest.warns(RuntimeWarning, match="decoder_layer.* transformers' own") as caught:
        one_model.kernelize(targets, model) if how == "kernelize" else patching.patch_classes(targets, operations)
    [said] = [str(each.message) for each in caught if "decoder_layer" in str(each.message)]
    rows = {row.part: row for row in one_model.explain(targets, model).rows}
    assert not rows["decoder layer"].fused and rows["loss without logits"].fused and not any("experts" in part for part in rows)
    for text in (said, rows["decoder layer"].reason):
        assert "does not account for" in text and "unknown" not in text and all(attribute in text for attribute in expected)
    assert "maintainers" in rows["decoder layer"].advice
    found = step_of(model)
    found.assert_same(before, FACTOR)
    assert found.output.logits is None
    patching.reset(targets)


def test_the_norm_behind_experts_is_in_their_node(tried, monkeypatch):
    """Of a family that no package serves: a norm of the experts' branch, none before it. Its weight gets transformers' gradient."""
    from transformers import FlexOlmoConfig, FlexOlmoForCausalLM

    classes = "FlexOlmoSparseMoeBlock", "FlexOlmoTopKRouter", "FlexOlmoExperts"
    dense, sparse = part(tried, "shared.rows.dense"), part(tried, "shared.hf.family.families").Sparse(classes)
    options = {"norms": dense.BEHIND, "rounds": "last", "qk_norm": "whole", "narrow": True, "mlp": False, "sparse": sparse}
    own = dense.row("FlexOlmo", "FlexOlmo", "flex_olmo", **options)
    record_texts(tried, own, monkeypatch)
    targets = (part(tried, "shared.hf.install.served").targets(own),)
    part(tried, "shared.hf.family.ownership").claim_layers(targets)
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None}
    model = FlexOlmoForCausalLM(FlexOlmoConfig(**experts, **SMALL)).train()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight.uniform_(0.5, 1.5)
    before = step_of(model)
    one_model = part(tried, "shared.hf.install.one_model")
    one_model.kernelize(targets, model)
    rows = {row.part: row.fused for row in one_model.explain(targets, model).rows}
    assert rows["norm, router, experts"] and rows["o_proj"]
    step_of(model).assert_same(before, FACTOR)
    part(tried, "shared.hf.install.patching").reset(targets)


def test_a_row_without_texts_is_as_good_as_none(decoders, monkeypatch):
    """The layers of such a model are read, which a row would have kept from them."""
    torch.manual_seed(0)
    own, model = too_little(decoders, "glm4_moe"), glm4_5()
    without = str(decoders.explain(decoders.kernelize(model)))
    decoders.reset()
    assert "norm, q_proj" in without and "yes" in without and "no kernels of experts; bastile/moe has" in without
    [served] = calls_of(decoders).served
    served = served._replace(rows=(*served.rows, own))
    one_model, shapes = part(decoders, "shared.hf.install.one_model"), part(decoders, "shared.hf.install.shapes").Shapes(served.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_model.kernelize(served.families(), model, shapes=shapes)
    assert str(one_model.explain(served.families(), model, shapes)) == without
