"""What a package puts on objects that are not its own is known by name, and `reset` takes all of it off, after whatever a model did."""

import gc
import importlib
import sys

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from tests.cpu.test_front_door import FIXTURES, MODELS
from tests.footprint import changes, footprint
from tests.models import Step, random_tokens, tiny_model
from tests.patched import install

TOKENS = random_tokens(2, 21)
BLOCK = "_bastile_block"  # on the storage of a weight that `pack` moved, which stays where it is
# Besides names that begin with _bastile_: what is replaced where it stands.
KNOWN = {
    "forward", "train", "num_parameters",  # of modules and classes; the last two of causal LMs
    "class", "config",  # of a decoder's configuration: its attention is ours
    "__init__", "__init_subclass__",  # of PreTrainedModel, which notes models that are made
    "bastile",  # in transformers' tables of attention, masks and experts
    "apply_rotary_pos_emb", "kernel_layer_name", "kernel_condition", "_use_kernels",
    "disable_adapter",  # of PEFT's models
    "_WhenImported",  # in sys.meta_path: for TRL
    "ChunkedLogProbFunction", "_ChunkedLogProbFunction", "ChunkedDivergenceFunction", "_ChunkedDivergenceFunction",  # of TRL
    "add_fused_lm_head",  # the same
}  # fmt: skip
WAYS = (["apply"], ["kernelize"], ["mapping", "apply", "kernelize"], ["pack"])  # the last one moves weights


def live(model):
    """Steps with and without checkpoints, an evaluation and a generation."""
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        Step(model, input_ids=TOKENS, labels=TOKENS)
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    model.eval()
    with torch.no_grad():
        model(input_ids=TOKENS)
        model.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False)
    model.train().zero_grad()


def said(found):
    return "\n".join(f"{change.where}: {change.name!r} was {change.was!r}, is {change.now!r}"[:200] for change in found)


@pytest.mark.parametrize("name", MODELS)
def test_reset_takes_everything_off(request, name):
    for place in ("trainer.utils", "kernels.chunked_divergence"):  # in which some of it is put where they are loaded
        importlib.import_module(f"trl.{place}")
    package, model = request.getfixturevalue(FIXTURES[name]), MODELS[name]()
    for how in ("kernelize", "mapping"):  # which load what they need
        install(package, model, how)
        live(model)
        package.reset()
    first = footprint(model)
    live(model)
    before = footprint(model)
    usual = {change[:2] for change in changes(first, before)}  # of a model that has none of ours
    for ways in WAYS if hasattr(package, "pack") else WAYS[:-1]:
        for how in ways:
            install(package, model, how)
        live(model)
        found = [change for change in changes(before, footprint(model)) if change[:2] not in usual]
        replaced = tuple(f"{change.where}.{change.name}" for change in found if change.name in KNOWN)  # has a namespace of its own
        known = [change for change in found if change.name in KNOWN or change.where.startswith(replaced)]
        unknown = [change for change in found if change not in known and not str(change.name).startswith("_bastile_")]
        assert found and not unknown, f"{ways}: {said(unknown)}"
        package.reset()
        gc.collect()
        left = [change for change in changes(before, footprint(model)) if change[:2] not in usual]
        left = [change for change in left if change.name != BLOCK or ways != WAYS[-1]]
        assert not left, f"{ways}: {said(left)}"


def test_what_is_put_anywhere_is_seen(monkeypatch):
    model = tiny_model()
    before = footprint(model)
    layer, weight = model.model.layers[0], model.lm_head.weight
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    for owner in (PreTrainedModel, modeling_qwen3, modeling_qwen3.rotate_half, layer, model.config, weight, weight.untyped_storage()):
        monkeypatch.setattr(owner, "_bastile_mark", 1, raising=False)
    monkeypatch.setitem(functions._global_mapping, "mark", print)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, "mark"])
    monkeypatch.setitem(layer._forward_hooks, 7, print)
    seen = [(change.where, change.name) for change in changes(before, footprint(model))]
    monkeypatch.undo()
    marked = {where.rpartition(".")[2] for where, name in seen if name == "_bastile_mark"}
    assert marked == {"PreTrainedModel", "modeling_qwen3", "rotate_half", "0", "config", "weight", "storage"}
    assert {"mark", "str", 7} <= {name for _, name in seen}
    assert not changes(before, footprint(model))
