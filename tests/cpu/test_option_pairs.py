"""The last call of `apply` and `kernelize` wins, after every other one and for every option."""

import inspect
import itertools
import sys

import pytest
import torch

from tests import heap
from tests.models import random_tokens, tiny_gpt_oss, tiny_qwen3_moe

OPERATIONS = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer", "attention", "experts")
TOLD = {"unpad": True, "keep_attention": False, "recompute_mlp": False, "log_probs": True, "products": "bf16", "offload": False,
        "capture": False}
OF_APPLY = ({}, *({name: False} for name in (*OPERATIONS, "unpad", "log_probs")), {"keep_attention": True}, {"recompute_mlp": True},
            {"recompute_mlp": 64}, {"products": "fp8"}, {"offload": True}, {"capture": 0.5},
            {"fused_linear_cross_entropy": {"label_smoothing": 0.5}})
OF_KERNELIZE = ({}, {"attention": False}, {"unpad": False}, {"log_probs": False}, {"keep_attention": True},
                {"recompute_mlp": True}, {"products": "fp8"}, {"offload": True}, {"capture": True})


def all_pairs(calls):
    """A walk over the calls in which each follows each."""
    edges, walk, stack = {i: list(range(len(calls))) for i in range(len(calls))}, [], [0]
    while stack:
        if edges[stack[-1]]:
            stack.append(edges[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return [calls[i] for i in reversed(walk)]


def state_of(package, model):
    """What is in force on a model, by option."""
    hf = f"{package.__name__}.shared.hf."
    checkpointing, is_marked = sys.modules[hf + "layer.checkpointing"], sys.modules[hf + "parts.modules"].is_marked
    layer = model.model.layers[0]
    parts = {"fused_linear_cross_entropy": model, "decoder_layer": layer, "rms_norm": model.model.norm, "attention": model.model}
    parts |= {"swiglu": getattr(model.model.layers[-1].mlp, "gate_proj", None) and model.model.layers[-1].mlp}
    parts |= {"experts": getattr(layer.mlp, "experts", None)}
    found = {name: is_marked(getattr(part.forward, "__func__", None)) for name, part in parts.items() if part is not None}
    rotary = sys.modules[type(model).__module__].apply_rotary_pos_emb
    on_class = is_marked(type(rotary).forward if isinstance(rotary, torch.nn.Module) else rotary)
    found["rope"] = is_marked(getattr(layer.self_attn.forward, "__func__", None)) or on_class
    model(random_tokens(1, 3), use_cache=False)
    found["attention"] = found["attention"] and model.model.config._attn_implementation == "bastile"
    found["unpad"] = not getattr(model, "_bastile_keeps_padding", False)
    found["loss"] = dict(getattr(model, "_bastile_loss_options", {}))
    layer.gradient_checkpointing = True
    found["keep_attention"] = bool(checkpointing.keeps_attention(layer))
    layer.gradient_checkpointing = False
    found["log_probs"] = sys.modules[hf + "model.trl"]._finder in sys.meta_path
    found["recompute_mlp"] = checkpointing.tile_of(layer) or checkpointing.recomputes_mlp(layer)
    offload = sys.modules[hf + "layer.offload"]
    found["offload"] = checkpointing.was_told(layer, offload.OFFLOADS)
    found["capture"] = checkpointing.was_told(layer, sys.modules[hf + "capture.when_told"].CAPTURES)
    found["products"] = sys.modules[hf + "layer.products"].products_of(layer)
    return found


def expected_of(name, options, before, fused):
    """What a call says of every option; `kernelize` puts all operations on, and says nothing of the options of the loss. fused: what the
    decoder layer needs to be on."""
    expected = {operation: bool(options.get(operation, True)) for operation in OPERATIONS}
    expected |= {option: options.get(option, default) for option, default in TOLD.items()}
    expected["decoder_layer"] &= all(expected[operation] for operation in fused)
    given = options.get("fused_linear_cross_entropy", True)
    expected["loss"] = dict(given) if isinstance(given, dict) else {} if name == "apply" else before["loss"]
    return expected


@pytest.mark.parametrize("make", (tiny_qwen3_moe, tiny_gpt_oss))
def test_the_last_call_wins(request, make, monkeypatch):
    package = request.getfixturevalue("gpt_oss" if make is tiny_gpt_oss else "qwen3")
    for name in ("kernels_run_on", "takes_heads"):  # the CPU's build has no kernels
        monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.hf.attention.attention_choice"], name, lambda *tensors, **asked: True)
    model = make(head_dim=64, hidden_size=16, intermediate_size=8, num_hidden_layers=2).train()
    package.apply()
    before, last, fused = state_of(package, model), None, ("rms_norm", "rope") if make is tiny_gpt_oss else ("rms_norm", "swiglu", "rope")
    heap.settle(always=True)  # apply() looks at all objects that there are
    known = set(inspect.signature(package.apply).parameters)
    calls = [("apply", options) for options in OF_APPLY if set(options) <= known]
    calls += [("kernelize", options) for options in OF_KERNELIZE if set(options) <= set(inspect.signature(package.kernelize).parameters)]
    for name, options in all_pairs(calls):
        package.apply(**options) if name == "apply" else package.kernelize(model, **options)
        found, expected = state_of(package, model), expected_of(name, options, before, fused)
        wrong = {option: value for option, value in found.items() if value != expected[option]}
        assert not wrong, f"{name}({options}) after {last} left {wrong}"
        before, last = found, f"{name}({options})"


def test_every_option_is_in_the_table(qwen3):
    for function, calls in ((qwen3.apply, OF_APPLY), (qwen3.kernelize, OF_KERNELIZE)):
        names = set(inspect.signature(function).parameters) - {"model", "mode"}
        assert names == set(itertools.chain(*calls))
