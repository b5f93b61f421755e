"""Packages with their attention registered or chosen, and what it was called with."""

import functools

import pytest
import torch
import transformers
import transformers.modeling_utils  # its table is what register_attention looks for

from tests.attention_batches import FAMILIES, module_of
from tests.decoder_families import tiny
from tests.ops.common import runtime_of


@pytest.fixture
def hf(loaded):
    """The module under test, registered with transformers."""
    choice = module_of(loaded, "attention_choice")
    choice.register_attention(transformers.Qwen3Model, transformers.GptOssModel)
    yield module_of(loaded, "attention")
    choice.unregister_attention()


@pytest.fixture
def plans(hf, monkeypatch):
    """What the operation `attention` was called with: one entry a call."""
    calls = []

    def attention(q, k, v, plan, **options):
        calls.append(plan)
        return original(q, k, v, plan, **options)

    original = hf.attention
    monkeypatch.setattr(hf, "attention", attention)
    return calls


@pytest.fixture
def looks(monkeypatch):
    """How often transformers looked for documents in position_ids, by the operation that it alone does it with: on a GPU it waits for the
    answer. Its own function there cannot be replaced unseen."""
    calls = []

    def diff(position_ids, **options):
        calls.append(position_ids)
        return original(position_ids, **options)

    original = torch.diff
    monkeypatch.setattr(torch, "diff", diff)
    return calls


@pytest.fixture
def kernels(interpreted_qwen3):
    """The package whose kernels the interpreter runs, and `launched`: the names of those that ran."""
    interpreted_qwen3.launched = runtime_of(interpreted_qwen3).launch.backend.launched
    interpreted_qwen3.launched.clear()
    return interpreted_qwen3


@pytest.fixture
def chosen(request, monkeypatch):
    """A function of a family's name: its package, whose kernels serve every device, and what makes a model that they fit."""

    def of(family):
        package = request.getfixturevalue("decoders" if family not in FAMILIES else "gpt_oss" if family == "gpt_oss" else "qwen3")
        for name in ("kernels_run_on", "takes_heads"):
            monkeypatch.setattr(module_of(package, "attention_choice"), name, lambda *tensors, **options: True)
        if family not in FAMILIES:
            return package, functools.partial(tiny, family, attn_implementation=None)
        return package, functools.partial(FAMILIES[family], head_dim=64)

    return of
