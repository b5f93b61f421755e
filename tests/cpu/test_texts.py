"""Operations run where every text of transformers that they rely on is that of a tested release; any other stays transformers' own."""

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from tests.decoder_families import tiny, tiny_behind_a_tower
from tests.models import (
    Step,
    random_tokens,
    tiny_gpt_oss,
    tiny_model,
    tiny_qwen3_5,
    tiny_qwen3_5_sparse,
    tiny_qwen3_5_with_vision,
    tiny_qwen3_moe,
)
from tests.patched import calls_of
from tools import transformers_texts as tool

ROOT = Path(__file__).resolve().parents[2]
KNOWN = json.loads(tool.KNOWN.read_text())
TEXTS, TESTED = KNOWN["texts"], tuple(KNOWN["tested"])
TOKENS = random_tokens(2, 9)
LABELS = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
QWEN3, MOE, GPT_OSS, GEMMA3, MISTRAL, MINISTRAL3, MISTRAL3, QWEN2_5_VL, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT = (
    f"transformers.models.{name}.modeling_{name}"
    for name in ("qwen3", "qwen3_moe", "gpt_oss", "gemma3", "mistral", "ministral3", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
                 "qwen3_next")
)
TEXT = {GEMMA3: "gemma3_text", MISTRAL: "mistral", MINISTRAL3: "ministral3"}  # behind a tower
MODELS = {
    **{QWEN3: tiny_model, MOE: tiny_qwen3_moe, GPT_OSS: tiny_gpt_oss, QWEN3_5: tiny_qwen3_5},
    **{module: functools.partial(tiny, name) for module, name in {**TEXT, QWEN2_5_VL: "qwen2_5_vl"}.items()},
    **{module: functools.partial(tiny_qwen3_5_sparse, module.split(".")[2]) for module in (QWEN3_5_MOE, QWEN3_NEXT)},
}

# What goes with a text, beside which everything stays on.
LEFT = {
    "RMSNorm.forward": {"rms_norm", "decoder_layer"},
    "RMSNormGated.forward": {"gated_rms_norm"},
    "RMSNorm._norm": {"rms_norm", "decoder_layer"},
    "GatedDeltaNet.forward": {"delta_net"},
    "GatedDeltaNet.fix_query_key_value_ordering": {"delta_net"},
    "MLP.forward": {"swiglu", "decoder_layer"},
    "Qwen2MLP.forward": {"swiglu", "decoder_layer"},
    "Attention.forward": {"rope", "attention", "decoder_layer"},
    "DecoderLayer.forward": {"decoder_layer"},
    "Model.forward": {"attention"},
    "TextModel.forward": {"attention"},
    "ForCausalLM.forward": {"fused_linear_cross_entropy"},
    "ForConditionalGeneration.forward": {"loss_with_vision"},
    "apply_rotary_pos_emb": {"rope", "decoder_layer"},
    "rotate_half": {"rope", "decoder_layer"},
    "_apply_rotary_emb": {"rope", "decoder_layer"},
    "SparseMoeBlock.forward": {"decoder_layer"},
    "TopKRouter.forward": {"decoder_layer"},
    "Experts.forward": {"experts", "decoder_layer"},
    "Experts._apply_gate": {"experts", "decoder_layer"},
}
LEFT_BY_MODULE = {
    "transformers.activations": {"swiglu", "experts", "decoder_layer"},
    "transformers.integrations.moe": {"experts", "decoder_layer"},
    "transformers.integrations.sdpa_attention": {"attention"},
    "transformers.loss.loss_utils": {"fused_linear_cross_entropy", "loss_with_vision"},
    "transformers.masking_utils": {"attention"},
    "transformers.modeling_layers": {"decoder_layer"},
}
CASES = [(module, name) for module, names in TEXTS.items() for name in names]


def part(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


def expected_left(module, name, targets):
    """The operations of a family that go with a text."""
    if module in LEFT_BY_MODULE:
        found = LEFT_BY_MODULE[module]
    elif (name.removesuffix(".forward"), module) in targets.elsewhere.items():
        found = {name.removesuffix(".forward")}
    elif module == targets.modeling:
        found = LEFT[name.removeprefix(targets.attention.removesuffix("Attention"))]
        if name == f"{targets.classes['fused_linear_cross_entropy'][0]}.forward":  # of which there may be one only, with a tower
            found = LEFT["ForCausalLM.forward"]
    else:
        return set()
    if module == "transformers.integrations.moe" and "experts" not in targets.operations:
        return set()
    if module == GPT_OSS and name == "GptOssMLP.forward":  # the block of experts
        return {"decoder_layer"}
    if found == LEFT["ForConditionalGeneration.forward"]:
        found = {name.removesuffix(".forward")}
    towers = targets.losses[1:] if "loss_with_vision" in found else ()
    return {operation for operation in targets.operations if operation in found or operation in towers}


def changed(source, name):
    """A source with one more statement in a function or class, or with that one where it has none."""
    module = ast.parse(source)
    node = module
    for piece in name.split("."):
        found = next((child for child in node.body if getattr(child, "name", None) == piece), None)
        if found is None:
            return source + f"\n\ndef {name}():\n    pass\n"
        node = found
    node.body.append(ast.parse("_next = 1").body[0])
    return ast.unparse(module)


def cases():
    """(package, module, name): each text with Qwen3's package, and with the others those of a family and one of each shared module."""
    of_packages = {"qwen3": (QWEN3, MOE), "gpt_oss": (GPT_OSS,), "decoders": (GEMMA3, MISTRAL3, QWEN2_5_VL)}
    of_packages["qwen3_5"] = QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
    for package, families in of_packages.items():
        for module, names in TEXTS.items():
            count = len(names) if module in families or (module in LEFT_BY_MODULE and package == "qwen3") else 0
            for name in list(names)[: max(count, package == "gpt_oss" and module in LEFT_BY_MODULE)]:
                yield package, module, name


@pytest.mark.parametrize(("fixture", "module", "name"), cases(), ids=lambda text: text.removeprefix("transformers."))
def test_a_changed_text_leaves_what_relies_on_it_to_transformers_and_nothing_else(request, fixture, module, name, monkeypatch):
    package = request.getfixturevalue(fixture)
    versions, patching = (part(package, name) for name in ("shared.hf.family.versions", "shared.hf.install.patching"))
    families = calls_of(package).families
    left = {targets.model: expected_left(module, name, targets) for targets in families}
    assert any(left.values())
    source = versions.source_of(module)
    monkeypatch.setattr(versions, "source_of", lambda m, before=versions.source_of: changed(source, name) if m == module else before(m))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        package.apply()
    [said] = [str(w.message) for w in caught if "unknown" in str(w.message)]
    for targets in families:
        arguments = {*map(targets.argument_of, left[targets.model])}
        assert set(patching.get_patched_ops([targets])) == {*map(targets.argument_of, targets.operations)} - arguments
        assert all(f"of {targets.model} unknown" in said and argument in said for argument in arguments)
    package.reset()
    for targets in [targets for targets in families if left[targets.model]]:
        check_one_model(package, targets, name, left[targets.model], MODELS[targets.modeling]())
        for cls in [targets.classes[loss][0] for loss in targets.losses[1:]]:
            text, folder = TEXT.get(targets.modeling), targets.modeling.split(".")[2]
            wrapper = cls.removesuffix("ForConditionalGeneration")
            of_vision = tiny_qwen3_5_with_vision(folder) if text is None else tiny_behind_a_tower(text, wrapper)
            check_one_model(package, targets, name, left[targets.model], of_vision)


def check_one_model(package, targets, name, left, model):
    """left: the operations of the family that go with the text."""
    [loss] = [loss for loss in targets.losses if targets.classes[loss][0] == type(model).__name__]
    other = set(targets.losses) - {loss}
    left = left - other
    expected = Step(model, **LABELS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        package.kernelize(model)
    said = [str(w.message) for w in caught if "unknown" in str(w.message)]
    if any(row.part.startswith("read: ") for row in package.explain(model).rows):  # where the text is one of the family's own
        left = left - {"decoder_layer"}
    assert len(said) == bool(left) and all(name in text for text in said)
    names = {operation: cls for operation, (cls, _) in targets.classes.items()} | {"rope": targets.attention}
    for operation, cls in names.items():
        if operation in other:
            continue
        modules = [module for module in model.modules() if type(module).__name__ == cls]
        assert modules and all(("forward" in vars(module)) == (operation not in left) for module in modules)
    Step(model, **LABELS).assert_same(expected, 10)
    rows = [row for row in package.explain(model).rows if "unknown text" in row.reason]
    names = {"decoder layer": "decoder_layer", "loss without logits": loss}
    assert {names.get(row.part, row.part) for row in rows} == left and all(name in row.reason and row.advice for row in rows)
    found = {finding.name: finding for finding in package.report().findings}["transformers' texts"]
    assert not found.fits and name in found.found and found.advice
    package.reset()


def test_the_hubs_mapping_has_no_layer_for_an_unknown_text(qwen3, monkeypatch):
    versions = part(qwen3, "shared.hf.family.versions")
    everything = set(qwen3.mapping())
    source = versions.source_of(MOE)
    new = changed(changed(source, "Qwen3MoeRMSNorm.forward"), "Qwen3MoeForCausalLM.forward")
    monkeypatch.setattr(versions, "source_of", lambda m, before=versions.source_of: new if m == MOE else before(m))
    with pytest.warns(RuntimeWarning, match="Qwen3MoeRMSNorm.forward, Qwen3MoeForCausalLM.forward of Qwen3-MoE unknown"):
        found = set(qwen3.mapping())
    assert everything - found == {"RMSNorm", "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer"}


def test_without_a_source_nothing_is_replaced(qwen3, monkeypatch):
    """An application may have its libraries as compiled files only."""
    monkeypatch.setattr(part(qwen3, "shared.hf.family.versions"), "source_of", lambda module: "")
    with pytest.warns(RuntimeWarning, match="unknown"):
        qwen3.apply()
    assert qwen3.get_patched_ops() == []


def test_every_text_that_a_layer_needs_is_recorded(qwen3, gpt_oss, decoders, moe, qwen3_5):
    needed = set()
    for package in (qwen3, gpt_oss, decoders, moe, qwen3_5):
        for targets in calls_of(package).families:
            for operation in targets.operations:
                needed |= set(part(package, "shared.hf.family.versions").texts_of(targets, operation))
    assert needed == set(CASES)
    assert all(of_name and set(of_name) <= set(TESTED) for names in TEXTS.values() for of_name in names.values())


# A function, and others that do something else; names, constants, order, defaults and operators all count.
FUNCTION = '''
class A:
    def f(self, x, scale=1.0, *rest, eps=None):
        y: int = x * scale
        def inner():
            return y is None
        return [y, "a", 1, True, *rest][0:2] if eps else inner()
'''
SAME = {
    "annotations": ("def f(self, x, scale=1.0", "def f(self, x: 'int', scale: float = 1.0"),
    "result": ("eps=None):", "eps=None) -> dict[str, int]:"),
    "docstring": ("        y: int", '        """What it does."""\n        y: int'),
    "decorator": ("    def f(", "    @staticmethod\n    def f("),
    "comment": ("        return [", "        # why\n        return ["),
    "format": ("[y, ", "[\n            y,\n            "),
    "annotated": ("y: int = x", "y = x"),
    "declared": ("        y: int = x", "        z: int\n        y: int = x"),
}
OTHERS = {
    "name": ("y is None", "x is None"),
    "operator": ("x * scale", "x / scale"),
    "comparison": ("y is None", "y is not None"),
    "constant": ("1, True", "2, True"),
    "kind of constant": ("1, True", "1, 1"),
    "float": ("scale=1.0", "scale=1"),
    "default": ("eps=None", "eps=0"),
    "string": ('"a"', '"b"'),
    "order": ("x, scale=1.0", "scale=1.0, x=None"),
    "keyword only": (", *rest, eps", ", eps"),
    "slice": ("[0:2]", "[0:]"),
    "statement": ("        def inner", "        y = y\n        def inner"),
    "star": ("*rest][", "rest]["),
}


@pytest.mark.parametrize("change", [*SAME, *OTHERS])
def test_a_fingerprint_is_that_of_what_the_code_does(change):
    before = tool.fingerprints(FUNCTION, ["A.f", "A", "B", "A.g"])
    assert before["B"] == before["A.g"] == "absent" and before["A.f"] != before["A"]
    old, new = {**SAME, **OTHERS}[change]
    assert FUNCTION.count(old) == 1 and ast.parse(FUNCTION.replace(old, new))
    after = tool.fingerprints(FUNCTION.replace(old, new), ["A.f", "A"])
    assert all((after[name] == before[name]) == (change in SAME) for name in after)


def test_fingerprints_do_not_depend_on_the_version_of_python():
    """These were taken with Python 3.11."""
    found = tool.fingerprints(FUNCTION, ["A.f", "A"])
    assert found == {"A.f": "bf3ca1edc940f7d2", "A": "d785335e17f42671"}


def test_recording_a_release():
    def source(answer):
        return lambda module: f"def f():\n    return {answer}\n" if module == "m" else ""

    texts = {"m": {"f": {}}, "other": {"g": {}}}
    texts, tested = tool.record(texts, (), {"5.9.0": source(1), "5.10.0": source(2)})
    assert tested == ("5.9.0", "5.10.0") and list(texts["m"]["f"]) == ["5.9.0", "5.10.0"] and texts["other"]["g"] == {"5.9.0": "absent"}
    assert not tool.unknown(texts, source(1)) and list(tool.unknown(texts, source(3))) == [("m", "f")]
    texts, tested = tool.record(texts, tested, {"5.11.0": source(1), "5.8.1": source(2)})
    assert tested == ("5.8.1", "5.9.0", "5.10.0", "5.11.0") and list(texts["m"]["f"]) == ["5.8.1", "5.9.0"]
    assert json.loads(tool.written(texts, tested)) == {"texts": texts, "tested": list(tested)}
    row = tool.documented("| torch | 2 |\n| transformers | 5.17 | 5.23 | 5.17.0, 5.23.0 |\n", tested)
    assert row == "| torch | 2 |\n| transformers | 5.8 | 5.11 | 5.8.1, 5.9.0, 5.10.0, 5.11.0 |\n"
    assert "+    return 3" in tool.changes(source(1)("m"), source(3)("m"), "f")


def test_what_is_recorded_is_as_the_tool_writes_it():
    assert tool.written(TEXTS, TESTED) == tool.KNOWN.read_text()
    document = tool.DOCUMENT.read_text()
    assert tool.documented(document, TESTED) == document
    environments = tool.ENVIRONMENTS.read_text()
    assert tool.with_newest(environments, TESTED[-1]) == environments
    assert tool.with_newest(environments, "9.9.9").count("transformers==9.9.9") == 2
    assert not tool.unknown(TEXTS, tool.installed_source)


NEXT = """
    import importlib.util, sys, warnings
    import transformers
    assert transformers.__version__ == "5.99.0", transformers.__file__
    folder = sys.argv[1]
    spec = importlib.util.spec_from_file_location("package", folder + "/__init__.py", submodule_search_locations=[folder])
    qwen3 = sys.modules["package"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(qwen3)
    from tests.models import Step, random_tokens, tiny_model
    tokens = random_tokens(2, 9)
    expected = Step(tiny_model(), input_ids=tokens, labels=tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qwen3.apply()
        qwen3.apply()
    said = [str(w.message) for w in caught if "transformers 5.99.0" in str(w.message)]
    found = Step(tiny_model(), input_ids=tokens, labels=tokens)
    found.assert_same(expected)
    assert found.output.logits is None
    print(len(said), said[0])
    print(*qwen3.get_patched_ops())
"""


def next_release(folder, change):
    """A folder with a made-up release: the installed transformers by links, with its number and one text changed."""
    import transformers

    def copy(source, target, inside):
        target.mkdir()
        for entry in source.iterdir():
            if inside and entry.name == inside[0]:
                copy(entry, target / entry.name, inside[1:])
            else:
                (target / entry.name).symlink_to(entry)

    package = Path(transformers.__path__[0])
    copy(package, folder / "transformers", ("models", "qwen3"))
    for name, old, new in (("__init__.py", f'__version__ = "{transformers.__version__}"', '__version__ = "5.99.0"'), *change):
        file = folder / "transformers" / name
        text = file.read_text()
        assert text.count(old) == 1, old
        file.unlink()
        file.write_text(text.replace(old, new))


ALL = "rms_norm swiglu rope fused_linear_cross_entropy decoder_layer attention experts"
MLP = "models/qwen3/modeling_qwen3.py", "self.act_fn(self.gate_proj(x)) * ", "2 * self.act_fn(self.gate_proj(x)) * "


@pytest.mark.parametrize(
    ("change", "says", "operations"),
    [
        ([], "1 transformers 5.99.0 is not among the tested releases", ALL),
        ([MLP], "2 transformers 5.99.0: Qwen3MLP.forward of Qwen3 unknown, so swiglu, decoder_layer stay transformers' own. To change",
         ALL.replace("swiglu ", "").replace("decoder_layer ", "")),
    ],
    ids=["nothing changed", "another MLP"],
)
def test_a_made_up_release(package_folder, tmp_path, change, says, operations):
    """A changed forward is what runs, beside the rest of the package."""
    next_release(tmp_path, change)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NEXT), str(package_folder / "build/torch-cpu")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{tmp_path}"}, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said, patched = done.stdout.strip().splitlines()[-2:]
    assert said.startswith(says) and patched == operations
