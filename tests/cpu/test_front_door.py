"""The package that pip installs: one call for any model, with its own kernels or those of the Hub's packages."""

import inspect
import sys
import types
import warnings

import pytest
import torch
from transformers import BertConfig, BertModel

from tests.any_model import tiny_of
from tests.cpu.conftest import REPOSITORY
from tests.decoder_families import FACTOR, TOKENS, tiny
from tests.models import Step, tiny_gpt_oss, tiny_model, tiny_qwen3_5, tiny_qwen3_moe
from tests.patched import step_without_small_gradients
from tools.kernel_package import package_folders, public_names, read_package

# One model of each package, by the package that serves it.
MODELS = {
    "bastile/qwen3": tiny_qwen3_moe,
    "bastile/gpt-oss": tiny_gpt_oss,
    "bastile/qwen3_5": tiny_qwen3_5,
    "bastile/moe": lambda: tiny("granitemoe", attn_implementation="eager"),
    "bastile/decoders": lambda: tiny("gemma2", attn_implementation="eager"),
}
FIXTURES = {"bastile/qwen3": "qwen3", "bastile/gpt-oss": "gpt_oss", "bastile/qwen3_5": "qwen3_5", "bastile/moe": "moe",
            "bastile/decoders": "decoders"}  # fmt: skip


@pytest.fixture
def hub(request, bastile, monkeypatch):
    """An installation without kernels on a machine with a GPU, and the Hub: {name: package} of what was loaded from there."""
    found, calls = {}, bastile._calls
    monkeypatch.setattr(calls, "_loaded", {})
    monkeypatch.setattr(type(calls), "has_kernels", lambda self: False)

    def get_kernel(name, version, trust_remote_code):
        assert version == 1 and trust_remote_code == [name] and name not in found
        found[name] = request.getfixturevalue(FIXTURES[name])
        return found[name]

    front = sys.modules[f"{bastile.__name__}.front"]
    monkeypatch.setattr(front, "kernels_library", lambda: types.SimpleNamespace(get_kernel=get_kernel))
    yield found
    bastile.reset()


def is_fused(package, model) -> bool:
    """Tells whether all of a model is fused that can be on a CPU, without `pack`."""
    left = {row.part for row in package.explain(model).rows if not row.fused}
    return not {part for part in left if "as one GEMM" not in part and part not in ("kernels on cpu", "attention")}


def step_of(model):
    return step_without_small_gradients(model, input_ids=TOKENS, labels=TOKENS)


def test_it_has_every_family_and_every_public_function_of_the_others(bastile):
    packages = [read_package(folder) for folder in package_folders(root=REPOSITORY)]
    served = [package for package in packages if package.module != "liger"]  # which has a surface of its own
    assert [each.name for each in bastile.PACKAGES] == list(MODELS) and set(MODELS) == {package.repo_id for package in served}
    for package in served:
        names = public_names((package.sources / "__init__.py").read_text(), package.name)
        assert set(names) - {"layers"} <= set(bastile.__all__), package.name
        [mine] = [each for each in bastile.PACKAGES if each.name == package.repo_id]
        assert set(mine.served.arguments()) <= set(inspect.signature(bastile.apply).parameters)
    for name in ("apply", "reset", "get_patched_ops", "warmup_all_kernels", "clear_autotune_cache"):
        assert callable(getattr(bastile, name))


@pytest.mark.parametrize("name", MODELS)
def test_one_line_serves_a_model_of_any_family(bastile, name):
    model = MODELS[name]()
    expected = step_of(model)
    assert bastile.kernelize(model) is model
    found = step_of(model)
    found.assert_same(expected, FACTOR)
    assert found.output.logits is None
    assert is_fused(bastile, model)


def test_apply_has_the_options_of_all_families(bastile):
    """`moe` is another name for experts. Each family takes what it has, and its fused layer needs no option that it has not."""
    models = {name: make() for name, make in MODELS.items()}
    expected = {name: step_of(model) for name, model in models.items()}
    bastile.apply()
    assert {"swiglu", "experts", "delta_net", "gated_rms_norm", "rope"} <= set(bastile.get_patched_ops())
    for name, model in models.items():
        step_of(model).assert_same(expected[name], FACTOR)
        assert is_fused(bastile, model), name
    bastile.apply(moe=False, swiglu=False)
    assert not {"experts", "swiglu"} & set(bastile.get_patched_ops()) and "delta_net" in bastile.get_patched_ops()
    for wrong in ({"moe": True, "experts": True}, {"cheese": True}):
        with pytest.raises(TypeError, match=r"apply\(\): got an unexpected keyword argument '(moe|cheese)'; its options are rms_norm"):
            bastile.apply(**wrong)
    bastile.reset()
    assert bastile.get_patched_ops() == []


def test_gpt_oss_is_fused_without_an_mlp(bastile):
    """The option of a part that a family has not changes nothing there."""
    bastile.apply(swiglu=False)
    assert is_fused(bastile, tiny_gpt_oss()) and not is_fused(bastile, tiny_model())


@pytest.mark.parametrize("kind", ("afmoe-AfmoeForCausalLM", "laguna-LagunaForCausalLM", "axk1-AXK1ForCausalLM"))
def test_experts_are_ours_in_a_block_that_is_called(bastile, kind):
    """Whose router no row can say: beside transformers' own, with a padded row, and taken off again."""
    model = tiny_of(*kind.split("-"))
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    inputs = {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)}
    expected = Step(model, **inputs)
    bastile.kernelize(model)
    fused = {row.part: row.count for row in bastile.explain(model).rows if row.fused}
    assert fused["experts"] == sum(type(module).__name__.endswith("Experts") for module in model.modules()) > 0
    found = Step(model, **inputs)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-2 * largest), name
    bastile.reset()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_eight_bits_are_those_of_the_package_that_serves_a_model(bastile, hub, name):
    model = MODELS[name]().requires_grad_(False)
    parts = {module for module in bastile.eight_bits(model).modules() if type(module).__name__ == "EightBitLinear"}
    assert {type(module).__module__.partition(".")[0] for module in parts} == {hub[name].__name__.partition(".")[0]}
    assert bastile.sixteen_bits(model) is model and {type(module) for module in parts} == {torch.nn.Linear}


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_four_bits_are_those_of_the_package_that_serves_a_model(bastile, hub, name):
    pytest.importorskip("bitsandbytes")
    model = MODELS[name]().requires_grad_(False)
    if not any(part.rpartition(".")[2] == "experts" for part, _ in model.named_modules()):
        with pytest.raises(TypeError, match="expected a model with decoder layers of experts"):
            bastile.four_bits(model)
        return
    parts = [module for module in bastile.four_bits(model, "nf4").modules() if type(module).__name__ == "Nf4"]
    assert {type(module).__module__.partition(".")[0] for module in parts} == {hub[name].__name__.partition(".")[0]}
    assert bastile.sixteen_bits(model) is model and not [module for module in model.modules() if module in parts]


@pytest.mark.parametrize("name", MODELS)
def test_without_kernels_a_model_gets_the_package_of_the_hub_that_serves_it(bastile, hub, name, caplog, monkeypatch, tmp_path):
    model, cleared = MODELS[name](), []
    expected = step_of(model)
    with caplog.at_level("INFO"):
        bastile.kernelize(model)
    assert list(hub) == [name] and f"taking them from the Hub, {name} version 1" in caplog.text
    step_of(model).assert_same(expected, FACTOR)
    assert type(model).forward.__module__.startswith("transformers") and str(bastile.explain(model)) == str(hub[name].explain(model))
    assert f"loaded: {name}" in next(finding.found for finding in bastile.report().findings if finding.name == "kernels from")
    assert bastile.warmup_all_kernels(model) is None and list(hub) == [name]
    monkeypatch.setattr(hub[name], "clear_autotune_cache", lambda: cleared.append(name))
    monkeypatch.setenv("BASTILE_CACHE", str(tmp_path))
    bastile.clear_autotune_cache()
    assert cleared == [name]
    bastile.reset()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("kind", "class_name", "name"),
    (("glm4_moe", "Glm4MoeForCausalLM", "bastile/moe"), ("starcoder2", "Starcoder2ForCausalLM", "bastile/decoders")),
)
def test_without_kernels_a_model_of_no_family_takes_the_package_that_has_those_of_its_layers(bastile, hub, kind, class_name, name):
    model = tiny_of(kind, class_name)
    expected = step_of(model)
    bastile.kernelize(model)
    assert list(hub) == [name]
    step_of(model).assert_same(expected, FACTOR)
    fused = [row.part for row in bastile.explain(model).rows if row.fused]
    assert any("router, experts" in part for part in fused) is (name == "bastile/moe") and "loss without logits" in fused


def test_without_kernels_apply_takes_every_package_of_the_hub(bastile, hub):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bastile.apply(keep_attention=True, delta_net=False, moe=False)
    assert list(hub) == list(MODELS)
    patched = {name: package.get_patched_ops() for name, package in hub.items()}
    assert "delta_net" not in patched["bastile/qwen3_5"] and "experts" not in patched["bastile/gpt-oss"]
    assert "gated_rms_norm" in bastile.get_patched_ops()
    assert is_fused(bastile, tiny_model()) and is_fused(bastile, MODELS["bastile/decoders"]())
    bastile.reset()
    assert bastile.get_patched_ops() == [] == [name for package in hub.values() for name in package.get_patched_ops()]


def test_without_kernels_the_layers_of_kernels_are_those_of_a_package(bastile, hub):
    with pytest.raises(RuntimeError, match=r"no layers to map to. Take those of a package: bastile/qwen3 \(Qwen3 or Qwen3-MoE\)"):
        bastile.mapping()


@pytest.mark.parametrize("found", ([], ["sm_90"], "damaged"))
def test_it_looks_for_its_own_kernels_on_a_machine_with_a_gpu(bastile, monkeypatch, found):
    """One whose kernels are damaged says so itself when it launches one."""
    launch = sys.modules[f"{bastile.__name__}.shared.runtime.launch"]
    error = sys.modules[f"{bastile.__name__}.shared.runtime.artifacts"].ArtifactError

    def architectures():
        if found == "damaged":
            raise error("damaged")
        return found

    monkeypatch.setattr(launch, "backend", types.SimpleNamespace(artifacts=types.SimpleNamespace(architectures=architectures)))
    assert bastile._calls.has_kernels()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bastile._calls.has_kernels() is bool(found)


def test_a_model_of_no_family_is_refused_by_name(bastile):
    model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50))
    with pytest.raises(TypeError, match="model is a BertModel without any of transformers' Qwen3 or "):
        bastile.kernelize(model)
