"""A user's own module sees the whole batch, with its padding; modules that treat each token by itself do not keep padding."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.qwen3 import modeling_qwen3

from tests.attention_batches import LENGTHS, labels_of, module_of, padded, tokens_of
from tests.models import tiny_model


class PerRow(nn.Module):
    """Scales what a module returns by a number a row, as stochastic depth does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def changed(self, y):
        return y * torch.linspace(0.2, 1, len(LENGTHS))[: y.shape[0], None, None]

    def forward(self, x, *args, **kwargs):
        y = self.inner(x, *args, **kwargs)
        return (self.changed(y[0]), *y[1:]) if isinstance(y, tuple) else self.changed(y)


class Shift(PerRow):
    """Adds to what a module returns what it returns for the token before."""

    def changed(self, y):
        return y + y.roll(1, dims=1)


def wrap(part, kind, name):
    setattr(part, name, kind(getattr(part, name)))


def patched(model, monkeypatch, name):
    """Patches the forward of the class of a layer's part."""
    cls = type(getattr(model.model.layers[0], name))
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: forward(self, x) + x.roll(1, dims=1))


def saved(model, monkeypatch, part):
    """Trains a copy of a module of the user's beside LoRA, as PEFT wraps it."""
    from peft import LoraConfig, get_peft_model

    wrap(part.mlp, Shift, "up_proj")
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj"], task_type="CAUSAL_LM"))


CHANGES = {
    "mlp by row": lambda model, patch: wrap(model.model.layers[0], PerRow, "mlp"),
    "mlp shifted": lambda model, patch: wrap(model.model.layers[1], Shift, "mlp"),
    "norm": lambda model, patch: wrap(model.model, Shift, "norm"),
    "o_proj": lambda model, patch: wrap(model.model.layers[0].self_attn, Shift, "o_proj"),
    "layer": lambda model, patch: wrap(model.model.layers, PerRow, "0"),
    "class": lambda model, patch: patched(model, patch, "input_layernorm"),
    "modules_to_save": lambda model, patch: saved(model, patch, model.model.layers[0]),
    "of another model": lambda model, patch: setattr(model.model.layers[0], "input_layernorm", nn.Sequential(nn.BatchNorm1d(23))),
}
OF_QWEN3 = "modules_to_save", "of another model"


def loss_of(model):
    batch = padded("right")
    loss = model(**batch, labels=labels_of(batch), use_cache=False).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("family", ("qwen3", "sliding", "gpt_oss", "gemma3_text", "phi3"))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ("before", "after"))
def test_a_users_module_sees_the_whole_batch(chosen, monkeypatch, family, change, when):
    if change in OF_QWEN3 and family != "qwen3":
        pytest.skip("told once")
    package, make = chosen(family)
    losses = []
    for ours in (False, True):
        with monkeypatch.context() as patch:
            model = make()
            if when == "before":
                CHANGES[change](model, patch)
            if ours:
                with pytest.warns() if when == "before" and change == "class" else monkeypatch.context():
                    package.apply()
                assert loss_of(make()) is not None  # which fills what is remembered of classes
            if when == "after":
                CHANGES[change](model, patch)
            losses.append(loss_of(model))
            if ours:
                # A layer of the user's own may read its mask, so the decoder has transformers' attention then.
                assert (model.model.config._attn_implementation == "bastile") == (change != "layer")
        package.reset()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def lora(model):
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, modules_to_save=["up_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, adapters)


def eight_bits(model, threshold=0.0):
    from bitsandbytes.nn import Linear8bitLt

    down = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Linear8bitLt(down.in_features, down.out_features, bias=False, threshold=threshold)


def outliers(model):
    """Columns with an outlier in any token are multiplied in sixteen bits for all of them, as transformers loads eight-bit models."""
    eight_bits(model, threshold=6.0)


def from_library(model, name):
    """Puts a class in, which a library may define tomorrow, in the place of an MLP's activation."""
    model.model.layers[1].mlp.act_fn = type("New", (nn.SiLU,), {"__module__": name, "forward": nn.SiLU.forward})()


def of_fsdp(model):
    """Gives modules the classes that fully_shard makes of theirs, which keep the forward."""
    for module in (model.model, *model.model.layers, model.model.layers[0].mlp.down_proj):
        cls = type(module)
        module.__class__ = type(f"FSDP{cls.__name__}", (type("FSDPModule", (), {"__module__": FSDPModule.__module__}), cls), {})


def dense(model):
    model.model.layers[0].post_attention_layernorm = nn.Sequential(nn.Dropout(0.1), nn.RMSNorm(64), nn.Identity())


def may_see_padding(package, model):
    return module_of(package, "padding")._may_see_padding(model.model, model.model.embed_tokens)


@pytest.mark.parametrize("change", (lora, eight_bits, of_fsdp, dense))
def test_known_modules_keep_no_padding(qwen3, change):
    model = tiny_model()
    qwen3.apply()
    change(model)
    assert not may_see_padding(qwen3, model)


@pytest.mark.parametrize("change", (outliers, "peft.tuners.new.layer", "torch.distributed.nn", "transformers.integrations.nvfp4"))
def test_modules_that_may_average_over_tokens_keep_padding(qwen3, change):
    model = tiny_model()
    qwen3.apply()
    from_library(model, change) if isinstance(change, str) else change(model)
    assert may_see_padding(qwen3, model)


@pytest.mark.parametrize("operation", ("rms_norm", "swiglu", "rope", "decoder_layer", "experts"))
def test_operations_that_are_off_keep_no_padding(chosen, monkeypatch, operation):
    """Then the forward of their class is transformers' own."""
    package, make = chosen("qwen3_moe" if operation == "experts" else "qwen3")
    model, tokens = make(), tokens_of(package, monkeypatch)
    package.apply(**{operation: False})
    loss_of(model)
    assert set(tokens) == {sum(LENGTHS)}


def test_what_is_known_of_a_class_is_of_its_forward(qwen3):
    qwen3.apply()
    model = tiny_model()
    for _ in range(2):
        assert not may_see_padding(qwen3, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: x)
            assert may_see_padding(qwen3, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_qwen3.Qwen3MLP, "__call__", lambda self, x: x)
            assert may_see_padding(qwen3, model)
