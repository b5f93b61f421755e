"""Versions that do not work are refused with those that do, and where transformers' decorators are inactive no message says otherwise."""

import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from tests import environments
from tests.cpu.conftest import FOLDERS, assemble_cpu, load
from tests.models import tiny_model
from tests.patched import calls_of
from tools import transformers_texts

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["transformers"]]
RANGES = {name: SpecifierSet(text) for name, text in (re.match(r"([a-z]+)(.*)", needed).groups() for needed in NEEDED)}


def part(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


def table():
    """The rows of the table of versions in docs/integrations.md: name -> (oldest, newest, the text of what was tested)."""
    text = (ROOT / "docs/integrations.md").read_text()
    rows = re.findall(r"^\| (torch|transformers|kernels|Python) \| ([\d.]+) \| ([\d.]+) \| (.+) \|$", text, re.MULTILINE)
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("name", RANGES)
def test_the_documents_pyproject_and_the_messages_say_the_same(qwen3, name):
    oldest, newest, tested = table()[name]
    tested = [Version(number) for number in re.findall(r"\d+\.\d+\.\d+(?=[, +)]|$| with| and| on)", tested)]
    assert tested and all(RANGES[name].contains(version) for version in tested)
    assert {".".join(str(v).split(".")[: oldest.count(".") + 1]) for v in tested} >= {oldest}
    if name == "torch":
        minimum = part(qwen3, "shared.runtime.torch_version").TORCH_MIN
        assert RANGES[name] == SpecifierSet(f">={minimum[0]}.{minimum[1]}") and oldest == f"{minimum[0]}.{minimum[1]}"
    else:
        assert RANGES[name] == SpecifierSet(getattr(part(qwen3, "shared.hf.parts.hub"), f"{name.upper()}_EXPECTED"))
        assert RANGES[name].contains(newest)


@pytest.mark.parametrize("version", ("2.5.1", "2.5.1+cu121", "1.13.0", "2.0.0a0+git1234"))
def test_an_old_torch_is_refused_with_the_one_to_install(qwen3, version):
    with pytest.raises(ImportError, match=rf"^torch is {re.escape(version)}, expected torch>=2.6. Run: pip install 'torch>=2.6'$"):
        part(qwen3, "shared.runtime.torch_version").check_torch(version)


@pytest.mark.parametrize("version", ("2.6.0", "2.15.0+cu132", "2.16.0.dev20261101", "3.0.0"))
def test_a_torch_of_the_range_is_taken(qwen3, version):
    part(qwen3, "shared.runtime.torch_version").check_torch(version)


@pytest.mark.parametrize("version", ("4.57.6", "5.0.0", "5.16.1"))
def test_a_transformers_that_is_too_old_is_refused_with_those_to_install(qwen3, monkeypatch, version):
    from transformers.models.qwen3 import modeling_qwen3  # which may put another object into sys.modules["transformers"]

    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    for call in (qwen3.apply, qwen3.mapping, lambda: qwen3.kernelize(nn.Linear(1, 1))):
        with pytest.raises(ImportError) as error:
            call()
        expected = f"transformers is {version}, expected transformers>=5.17. Run: pip install 'transformers>=5.17'"
        assert str(error.value) == expected
    assert not any("bastile" in name for name in vars(modeling_qwen3.Qwen3MLP))


@pytest.mark.parametrize("version", ("5.17.0", "5.18.0", "5.22.9", "5.23.0", "5.24.0", "5.25.0.dev0", "6.0.0"))
def test_a_transformers_that_says_the_same_is_taken_with_one_line_when_it_was_not_tested(qwen3, monkeypatch, version):
    """test_texts.py has those that say something else."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qwen3.apply()
        qwen3.kernelize(tiny_model())
        qwen3.apply()
    assert len(qwen3.get_patched_ops()) == 7
    said = [str(w.message) for w in caught if "tested releases" in str(w.message)]
    assert len(said) == (version not in part(qwen3, "shared.hf.family.known_texts").TESTED)
    assert all(text.startswith(f"transformers {version} is not among the tested releases, 5.17.0 to ") for text in said)


@pytest.mark.parametrize("name", ("qwen3", "gpt_oss", "decoders", "moe", "qwen3_5"))
def test_forwards_have_the_arguments_of_those_that_they_stand_in_for(tmp_path, name):
    """Of a build that nothing was done with: a patched class gives our forwards its own signature."""
    package, before = load(assemble_cpu(tmp_path, f"\n# whose arguments are compared: {name}\n", FOLDERS[name])), {}
    for targets in calls_of(package).families:
        for operation, (name, layer) in targets.classes.items():
            cls = getattr(importlib.import_module(targets.module_of(name)), name)
            before |= {cls: inspect.signature(cls.forward)} if operation in targets.losses else {}
            found, expected = (inspect.signature(one.forward).parameters.values() for one in (layer, cls))
            assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in expected], name
    package.apply()
    for cls, signature in before.items():
        assert inspect.signature(cls.forward) == signature, "transformers looks for output_attentions in the annotation of **kwargs"
    package.reset()


@pytest.mark.parametrize(
    "arguments, named, says",
    (
        ((None, None), {"attention_mask": None}, "attention_mask by position and by name"),
        ((None,) * 20, {}, "20 by position"),
    ),
)
def test_arguments_given_twice_are_refused_with_a_vision_tower(qwen3_5, arguments, named, says):
    with pytest.raises(TypeError, match=f"^WithVision.forward got arguments {says}, expected each of input_ids, attention_mask"):
        part(qwen3_5, "layers").WithVision()(*arguments, **named)


@pytest.mark.parametrize("former", ("past_key_values", "cache_params"))
def test_a_renamed_argument_goes_by_both_names(qwen3, monkeypatch, former):
    arguments = part(qwen3, "shared.hf.family.arguments")
    monkeypatch.setattr(arguments, "RENAMED", {"past_key_values": "cache", "cache_params": "cache"})
    forward = arguments.forward_of(("hidden_states", "attention_mask", former), lambda module, given: given)
    assert list(inspect.signature(forward).parameters) == ["self", "hidden_states", "attention_mask", "cache", "kwargs"]
    assert forward(None, 1, 2, 3) == forward(None, 1, cache=3, attention_mask=2) == {"hidden_states": 1, "attention_mask": 2, "cache": 3}
    with pytest.warns(FutureWarning, match=f"`{former}` is deprecated for `NoneType.forward`. Use `cache` instead"):
        assert forward(None, 1, **{former: 3}) == {"hidden_states": 1, "cache": 3}
    with pytest.warns(FutureWarning):
        assert forward(None, 1, cache=3, **{former: 4}) == {"hidden_states": 1, "cache": 3}
    with pytest.raises(TypeError, match="cache by position and by name"):
        forward(None, 1, 2, 3, cache=4)
    with pytest.raises(TypeError, match="^NoneType.forward got no hidden_states, expected one$"):
        forward(None, attention_mask=2)


@pytest.mark.parametrize("name", (None, "past_key_values"))
def test_a_model_takes_its_cache_by_the_name_of_the_release_and_by_the_former_one(qwen3, name):
    """Either name gives the logits of a call without a cache, and warns exactly where transformers' own model does."""
    model, name = tiny_model().eval(), name or part(qwen3, "shared.hf.family.arguments").CACHE
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        expected, said = model(ids).logits, []
        for prepare in (lambda: None, qwen3.apply):
            prepare()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                cache = model(ids[:, :8], use_cache=True)[1]
                found = model(ids[:, 8:], **{name: cache}).logits
            assert torch.allclose(found, expected[:, 8:], atol=1e-5)
            assert cache.get_seq_length() == 12
            said.append(sum(issubclass(w.category, FutureWarning) for w in caught))
    assert said[0] == said[1] == (name != part(qwen3, "shared.hf.family.arguments").CACHE)


def test_an_old_kernels_is_refused_with_the_one_to_install(qwen3, monkeypatch):
    import kernels

    monkeypatch.setattr(kernels, "__version__", "0.9.0")
    monkeypatch.delattr(kernels, "replace_kernel_forward_from_hub")
    with pytest.raises(ImportError, match=r"kernels is 0.9.0, expected kernels>=0.16.2,<0.18. Run: pip install 'kernels>=0.16.2,<0.18'"):
        qwen3.mapping()


def test_the_environments_have_the_oldest_and_the_newest_releases():
    asked = {name: dict(package.split("==") for package in packages) for name, packages in environments.ENVIRONMENTS.items()}
    for name, (oldest, newest, _) in table().items():
        if name != "Python":
            pinned = next(package.split("==")[1] for package in PROJECT["optional-dependencies"]["dev"] if package.startswith(f"{name}=="))
            for age, expected in (("oldest", oldest), ("newest", newest)):
                found = {packages[name] for key, packages in asked.items() if age in key and name in packages} or {pinned}
                assert all(version.startswith(expected) for version in found), name
    assert asked["newest"]["transformers"] == asked["newest-torch"]["transformers"] == transformers_texts.tested()[-1]
    assert asked["oldest"]["transformers"] == asked["oldest-torch"]["transformers"] == transformers_texts.tested()[0]
    assert all(environments.path_of(name).exists() for name in environments.TESTS)
    assert set(environments.FEWER) <= set(environments.TESTS)


# transformers of 5.22 with another kernels than it wants: it leaves its decorators out, in silence.
INACTIVE = """
    import importlib.metadata, importlib.util, sys, warnings
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.9.0" if name == "kernels" else version(name)
    from transformers.models.qwen3 import modeling_qwen3 as modeling
    importlib.metadata.version = version
    assert not hasattr(modeling.Qwen3RMSNorm, "kernel_layer_name") and type(modeling.apply_rotary_pos_emb).__name__ == "function"

    folder = sys.argv[1]
    spec = importlib.util.spec_from_file_location("package", folder + "/__init__.py", submodule_search_locations=[folder])
    qwen3 = sys.modules["package"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(qwen3)
    from tests.models import Step, random_tokens, tiny_model
    tokens = random_tokens(2, 9)
    expected = Step(tiny_model(), input_ids=tokens, labels=tokens)

    def used(model):
        "The layers that a step goes through, and the rotary embedding."
        seen, places = set(), {"rotary": "package.shared.hf.family.forwards", "mlp": "package.shared.hf.family.forwards"}
        places |= {"norm_attention_inputs": "package.shared.hf.layer.decoder_layer", "norm_mlp": "package.shared.hf.layer.decoder_layer"}
        places |= {"rms_norm": "package.shared.hf.family.forwards", "linear_cross_entropy": "package.shared.hf.model.causal_lm"}
        originals = {name: getattr(sys.modules[place], name) for name, place in places.items()}
        for name, place in places.items():
            setattr(sys.modules[place], name, lambda *a, name=name, **k: seen.add(name) or originals[name](*a, **k))
        Step(model, input_ids=tokens, labels=tokens).assert_same(expected)
        for name, place in places.items():
            setattr(sys.modules[place], name, originals[name])
        return seen

    everything = {"rms_norm", "norm_attention_inputs", "norm_mlp", "linear_cross_entropy"}
    assert used(tiny_model()) == set()
    assert used(qwen3.kernelize(tiny_model())) == everything
    qwen3.apply()
    assert used(tiny_model()) == everything
    qwen3.reset()
    import kernels
    model = tiny_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mapping = qwen3.mapping()
    [warning] = [str(w.message) for w in caught if "does not work with kernels" in str(w.message)]
    assert "leaves the rotary embedding as it is" in warning and "It wants 'kernels>=0.1" in warning, warning
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    assert "linear_cross_entropy" in used(model)
    qwen3.reset()
    assert used(model) == set()
    print("ok")
"""


def test_inactive_decorators_are_detected(package_folder):
    """kernelize() and apply() put every layer in place all the same; mapping() warns of what it cannot reach."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INACTIVE), str(package_folder / "build/torch-cpu")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr
