"""Where ours stands in TRL's place: everywhere that TRL binds its function, from whichever import on, until reset() takes it back; and what
goes to TRL's own."""

import functools
import importlib
import re
import subprocess
import sys
import warnings

import pytest
import torch
import transformers

from tests.cpu.conftest import REPOSITORY as ROOT
from tests.integrations.preference import TEXTS, counted, pairs
from tests.integrations.trainers import tokenizer
from tests.models import tiny_model
from tests.ops.common import mesh_of_one, randn
from tests.tolerances import relative_error
from tools.compile import operations
from tools.kernel_package import package_folders, read_package

trl = pytest.importorskip("trl")
pytest.importorskip("trl.kernels.chunked_logprob")
PLACES = (("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"), ("trl.kernels", "ChunkedLogProbFunction"),
          ("trl.trainer.utils", "_ChunkedLogProbFunction"))  # fmt: skip
NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def bound() -> list:
    return [getattr(importlib.import_module(module), name) for module, name in PLACES]


def part(package, name="trl"):
    return sys.modules[f"{package.__name__}.shared.hf.model.{name}"]


def head(dtype=torch.float32, tokens=6):
    hidden, weight = randn(tokens, 16, dtype=dtype, device="cpu"), randn(50, 16, dtype=dtype, device="cpu", seed=1, scale=0.1)
    return hidden.requires_grad_(), weight.requires_grad_(), randn(50, dtype=dtype, device="cpu", seed=2, scale=0.3).requires_grad_()


def test_apply_binds_it_everywhere_and_reset_takes_it_back(qwen3):
    theirs = bound()
    assert len(set(theirs)) == 1 and issubclass(theirs[0], torch.autograd.Function)
    qwen3.apply()
    ours = bound()
    assert len(set(ours)) == 1 and ours[0] is not theirs[0]
    qwen3.apply()
    assert bound() == ours
    qwen3.apply(log_probs=False)
    assert bound() == theirs
    qwen3.kernelize(tiny_model(), log_probs=False)
    assert bound() == theirs
    qwen3.kernelize(tiny_model())
    assert bound() != theirs
    qwen3.reset()
    assert bound() == theirs and part(qwen3)._finder not in sys.meta_path


def test_a_mapping_of_options_reaches_linear_log_probs_until_the_next_call(qwen3, monkeypatch):
    module, found = part(qwen3), []
    original = module.linear_log_probs
    monkeypatch.setattr(module, "linear_log_probs", lambda *a, **o: found.append(o.get("recompute")) or original(*a, **o))
    model, kept = tiny_model(), {"recompute": False}
    apply, kernelize = qwen3.apply, functools.partial(qwen3.kernelize, model)
    for call in (functools.partial(apply, log_probs=kept), apply, functools.partial(kernelize, log_probs=kept), kernelize):
        call()
        hidden, weight, _ = head()
        bound()[0].apply(hidden, weight, None, torch.arange(6), 1.0, 16)[0].sum().backward()
    assert found == [False, None, False, None]
    ours = bound()
    for call in (apply, kernelize):
        with pytest.raises(TypeError, match="log_probs has no option keep; it has recompute"):
            call(log_probs={"keep": True})
    assert bound() == ours


def test_options_of_the_loss_that_do_not_reach_a_trainer_are_named(qwen3):
    def call():
        hidden, weight, _ = head()
        bound()[0].apply(hidden, weight, None, torch.arange(6), 1.0, 16)[0].sum().backward()

    qwen3.apply(fused_linear_cross_entropy={"label_smoothing": 0.1, "lse_square_scale": 1e-3})
    with pytest.warns(RuntimeWarning, match=r"label_smoothing, lse_square_scale of apply\(.*\) do not reach TRL"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()  # once is enough
        qwen3.apply(fused_linear_cross_entropy={"class_weight": None})
        qwen3.apply()
        call()


def test_two_packages_take_theirs_back_in_any_order(qwen3, other_build):
    theirs = bound()
    for first, second in ((qwen3, other_build), (other_build, qwen3)):
        qwen3.apply()
        other_build.apply()
        first.reset()
        assert bound() != theirs
        module, calls = part(second), []
        original = module.linear_log_probs
        module.linear_log_probs = lambda *a, original=original, calls=calls, **o: calls.append(1) or original(*a, **o)
        try:
            hidden, weight, _ = head()
            bound()[0].apply(hidden, weight, None, torch.arange(6), 1.0, 16)
        finally:
            module.linear_log_probs = original
        assert calls
        second.reset()
        assert bound() == theirs


def test_false_gives_back_what_another_package_had_put_there(qwen3, other_build):
    """The last call decides for the whole process."""
    theirs = bound()
    for call in (other_build.apply, functools.partial(other_build.kernelize, tiny_model())):
        qwen3.apply()
        assert bound() != theirs
        call(log_probs=False)
        assert bound() == theirs and not any(hasattr(finder, "bastile_trl") for finder in sys.meta_path)
        qwen3.apply()
        assert bound() != theirs
        other_build.reset()
        assert bound() != theirs
        qwen3.reset()
        assert bound() == theirs


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", ((1.0, 32, None, 1.0, NAMES[1:]), (0.7, 16, 5.0, 0.5, NAMES), (0.7, 16, None, 2.0, ("log_probs",))))
def test_the_same_numbers_as_trl_s(qwen3, dtype, options):
    results = []
    for ours in (False, True):
        if ours:
            qwen3.apply()
        tensors = head(dtype)
        found = bound()[0].apply(*tensors, torch.arange(6) * 7, *options)
        assert isinstance(found, tuple) and len(found) == 5 and [x is None for x in found] == [
            name != "log_probs" and name not in options[-1] for name in NAMES
        ]
        assert [x is not None and x.requires_grad for x in found] == [True, found[1] is not None, False, False, False]
        loss = (found[0] * torch.arange(6)).sum() + (0.3 * found[1].sum() if found[1] is not None else 0.0)
        results.append([*(x for x in found if x is not None), *torch.autograd.grad(loss, tensors)])
    bound_of = 1e-5 if dtype == torch.float32 else 2e-2  # TRL adds a bias to logits that it has rounded
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert relative_error(mine, theirs.double()) <= bound_of


def test_a_class_of_the_user_s_own_derives_from_trl_s(qwen3):
    theirs = bound()[0]
    qwen3.apply()

    class Mine(bound()[0]):
        """Changes nothing."""

    assert issubclass(Mine, theirs)
    hidden, weight, _ = head()
    found = [function.apply(hidden, weight, None, torch.arange(6), 1.0, 16)[0] for function in (Mine, theirs)]
    assert torch.equal(*found)


def test_a_refused_kernelize_leaves_trl_as_it_was(qwen3):
    from trl.trainer.utils import add_fused_lm_head

    theirs, model = bound(), tiny_model()
    add_fused_lm_head(model)
    with pytest.raises(RuntimeError, match="before Accelerator.prepare.*and before creating a TRL trainer"):
        qwen3.kernelize(model)
    assert bound() == theirs
    with pytest.warns(RuntimeWarning, match="Qwen3ForCausalLM keeps the forward that trl.trainer.utils gave it"):
        qwen3.apply(log_probs={"recompute": False})
    ours = bound()
    with pytest.raises(RuntimeError, match="before creating a TRL trainer"):
        qwen3.kernelize(model, log_probs=False)
    assert bound() == ours and part(qwen3)._options == {"recompute": False}
    del model.forward  # of which later calls of apply() would warn


@pytest.fixture
def theirs_called(qwen3, monkeypatch):
    """apply() is in force; a list that grows with each call of TRL's own."""
    calls = []
    original = bound()[0]
    monkeypatch.setattr(original, "forward", staticmethod(lambda *a, forward=original.forward: calls.append(1) or forward(*a)))
    monkeypatch.setattr(part(qwen3), "PLACES", [part(qwen3).PLACES[0]._replace(arguments=("a", "forward"))])
    qwen3.apply()
    yield calls
    qwen3.reset()


class Sharded(torch.nn.Parameter):
    """Looks like a weight of a quantised or sharded head."""


def zero3(weight):
    weight.ds_id = 3
    return weight


TO_THEIRS = {
    "a subclass": lambda h, w, y, o: (h, Sharded(w.detach()), y, o),
    "ZeRO-3": lambda h, w, y, o: (h, zero3(torch.nn.Parameter(w.detach())), y, o),
    "labels of 32 bits": lambda h, w, y, o: (h, w, y.int(), o),
    "an output that we do not know": lambda h, w, y, o: (h, w, y, (*o, "perplexity")),
}


@pytest.mark.parametrize("case", ("ours", *TO_THEIRS))
def test_what_goes_to_trl_s_own(qwen3, theirs_called, case):
    hidden, weight, _ = head()
    arguments = (hidden, weight, torch.arange(6), ("entropy",))
    hidden, weight, target, outputs = TO_THEIRS[case](*arguments) if case != "ours" else arguments
    bound()[0].apply(hidden, weight, None, target, 1.0, 16, None, 1.0, outputs)
    assert bool(theirs_called) == (case != "ours")


def test_another_signature_or_a_name_that_is_gone_leaves_trl_its_own(qwen3, monkeypatch):
    module = part(qwen3)
    theirs = bound()
    monkeypatch.setattr(importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation"), "_warned", set())
    monkeypatch.setattr(module, "PLACES", (module.PLACES[0]._replace(arguments=("ctx", "hidden")),))
    with pytest.warns(RuntimeWarning, match=r"TRL .*has ChunkedLogProbFunction with the arguments ctx, hidden, weight.*Expected trl>="):
        qwen3.apply()
    assert bound() == theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qwen3.apply()  # once
    monkeypatch.setattr(module, "PLACES", (module.PLACES[0]._replace(name="GoneFunction"),))
    with pytest.warns(RuntimeWarning, match="has no GoneFunction"):
        qwen3.apply()
    monkeypatch.setattr(module, "NAME_THERE", "_Gone")
    with pytest.warns(RuntimeWarning, match="trl.trainer.utils has no _Gone"):
        qwen3.apply()


def test_explain_says_who_computes(qwen3):
    model = tiny_model()

    def row(model):
        return next((row.fused, row.reason) for row in qwen3.explain(model).rows if "TRL" in row.part)

    assert row(model) == (False, "TRL's own function")
    qwen3.apply()
    assert row(model) == (True, "")
    model.lm_head.weight = Sharded(model.lm_head.weight.detach())
    assert row(model) == (False, "the head is a Sharded")
    qwen3.apply(log_probs=False)
    assert row(model) == (False, "TRL's own function")


def test_torch_compile_takes_ours(qwen3):
    """In one graph, and with the numbers of eager mode."""
    qwen3.apply()
    hidden, weight, bias = head()
    target = torch.arange(6)

    def loss(hidden, weight, bias):
        function = sys.modules["trl.trainer.utils"]._ChunkedLogProbFunction
        found = function.apply(hidden, weight, bias, target, 0.9, 16, None, 1.0, ("entropy",))
        return found[0].sum() + 0.1 * found[1].sum()

    importlib.import_module("trl.trainer.utils")
    expected = torch.autograd.grad(loss(hidden, weight, bias), (hidden, weight, bias))
    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight, bias), (hidden, weight, bias))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("last", ("qwen3", "decoders", "qwen3 without"))
def test_imports_that_come_later(package_folder, decoders_folder, last):
    """apply() of two packages in front of the import of TRL, which they do not import themselves."""
    program = f"""
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
qwen3, decoders = (get_local_kernel(Path(folder), backend="cpu") for folder in {(str(package_folder), str(decoders_folder))!r})
qwen3.apply()
decoders.apply()
if {last!r} != "decoders":
    qwen3.apply(log_probs={last!r} == "qwen3")
assert not any(name == "trl" or name.startswith("trl.") for name in sys.modules)
import trl.kernels.chunked_logprob, trl.trainer.utils
places = {PLACES!r}
bound = [getattr(sys.modules[module], name) for module, name in places]
if {last!r} == "qwen3 without":
    assert issubclass(bound[0], torch.autograd.Function)
else:
    assert len(set(bound)) == 1 and hasattr(bound[0], "bastile_original"), bound
    assert bound[0].apply.__globals__["__name__"] == {{"qwen3": qwen3, "decoders": decoders}}[{last!r}].__name__ + ".shared.hf.model.trl"
qwen3.reset()
decoders.reset()
bound = [getattr(sys.modules[module], name) for module, name in places]
assert len(set(bound)) == 1 and issubclass(bound[0], torch.autograd.Function)
assert not any(hasattr(finder, "bastile_trl") for finder in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


SCRIPTS = [
    script
    for page in ("trl", "quickstart")
    for script in re.findall(r"^```py\n(.*?)^```$", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a model and of a larger one, with a tokenizer each."""
    found = []
    for changes in ({}, {"hidden_size": 96}):
        found.append(tmp_path_factory.mktemp("model"))
        tiny_model(**changes).save_pretrained(found[-1])
        tokenizer().save_pretrained(found[-1])
    return [str(path) for path in found]


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "get_kernel" not in s], ids=lambda s: re.search(r"(\w+)\(\n|$", s)[1] or "loop")
def test_the_guide(qwen3, models, script, tmp_path, monkeypatch):
    """Every script of docs/trl.md and docs/quickstart.md, on tiny models and short texts, with our functions in TRL's place."""
    from datasets import Dataset

    importlib.import_module("trl.trainer.sft_trainer")  # which says TrainingArguments in a signature
    assert len(script.splitlines()) <= 30
    if "BitsAndBytes" in script:
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    data = {"dataset": [{"text": text} for text in TEXTS], "pairs": pairs(), "prompts": [{"prompt": text} for text in TEXTS]}
    names = {"qwen3": qwen3, "model": models[0], "teacher": models[1]} | {name: Dataset.from_list(rows) for name, rows in data.items()}
    settings = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}  # left to the machine
    configs = (trl, "SFTConfig"), (trl, "DPOConfig"), (trl, "GRPOConfig"), (trl, "DistillationConfig"), (transformers, "TrainingArguments")
    for library, name in configs:
        monkeypatch.setattr(library, name, functools.partial(getattr(library, name), **settings))
    with counted(qwen3) as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script, "a script of the documents", "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 2
        assert bool(calls) == ("from trl" in script)


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_a_head_that_fsdp2_shards(qwen3, frozen):
    """TRL gathers it in front of the call: the numbers and gradients are those of TRL's own, sharded as the head is."""
    from torch.distributed.fsdp import fully_shard
    from trl.trainer.utils import add_fused_lm_head

    from tests.models import random_tokens

    tokens, found = random_tokens(2, 12), []
    with mesh_of_one() as mesh:
        for ours in (False, True):
            qwen3.apply(log_probs=ours)
            model = tiny_model(tie_word_embeddings=False)
            model.lm_head.requires_grad_(not frozen)
            add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
            fully_shard(model.lm_head, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with counted(qwen3) as calls:
                output = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
                (output.loss + 0.1 * output.entropy.mean()).backward()
            assert bool(calls) == ours
            gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
            found.append([output.log_probs, output.entropy, *gradients])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_every_package_that_stands_in_trl_s_place_ships_the_kernels():
    """A call on a GPU would not find them in the manifest."""
    found = {folder.name: read_package(folder) for folder in package_folders(root=ROOT)}
    patching = [package for package in found.values() if "import Interface" in (package.sources / "__init__.py").read_text()]
    assert len(patching) >= 4
    for package in patching:
        assert {"log_probs", "head_divergence", "scale"} <= set(operations(package.folder)), package.name
