"""What the tests of all libraries share."""

import inspect
import sys

import pytest
import torch
from transformers.generation import ContinuousBatchingConfig

from tests import decoder_families
from tests.models import random_tokens, tiny_model

WAYS = ("apply", "kernelize", "pack")
FACTOR = {"cpu": 1.0, "cuda": 10.0}  # on the table of tolerances: a GPU's GEMMs add in other orders
GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}


def model_on(device, dtype=torch.float32, **changes):
    """A small Qwen3 in training mode, always with the same weights; on a GPU of a size that the kernels take."""
    sizes = {} if device == "cpu" else GPU_SIZES
    return tiny_model(dtype, **{**sizes, **changes}).to(device)


FAMILIES = ("llama", "gemma3_text", "phi3")  # the layer as it is; norms around the branches and windows; packed projections
FAMILY_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def family_on(name, device, **changes):
    """A small model of a family of `bastile/decoders` in training mode, on a GPU of a size that the kernels take."""
    kind = "eager" if name in ("gemma2", "vaultgemma", "granite_swa") else "sdpa"  # of the models of transformers that have no other
    return decoder_families.tiny(name, attn_implementation=kind, **{**({} if device == "cpu" else FAMILY_SIZES), **changes}).to(device)


# Of continuous batching: few pages, where it would take most of the memory; and no kernels of others from the Hub, which transformers 5.17
# does not look for.
PAGES = {"num_blocks": 16, "max_batch_tokens": 32, "auto_switch_to_flash": False}
if "auto_switch_to_flash" not in inspect.signature(ContinuousBatchingConfig).parameters:
    del PAGES["auto_switch_to_flash"]


def clear_choices(model):
    """A model in eval mode whose greedy choices rounding does not turn."""
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model.eval()


installed = []


@pytest.fixture(autouse=True)
def layers_run(request, monkeypatch):
    """Fails a test whose kernelized model ran none of our operations: it would have compared the plain model with itself."""
    ran, qwen3 = [], request.getfixturevalue(next((name for name in ("decoders", "served") if name in request.fixturenames), "qwen3"))
    layer = "shared.hf.layer.decoder_layer"
    for module, name in (("shared.hf.family.forwards", "rms_norm"), (layer, "rms_norm"), (layer, "norm_attention_inputs")):
        functions = sys.modules[f"{qwen3.__name__}.{module}"]
        original = getattr(functions, name)
        monkeypatch.setattr(functions, name, lambda *args, original=original: ran.append(1) or original(*args))
    installed.clear()
    yield
    assert ran or not installed


def install(qwen3, model, how="kernelize", **options):
    """Puts the layers on, in one of WAYS; returns the model."""
    installed.append(model)
    if how == "apply":
        qwen3.apply(**options)
        return model
    qwen3.kernelize(model, **options)
    return qwen3.pack(model) if how == "pack" else model


def batch(device, *shape):
    """input_ids and labels of a training step; some labels are ignored, in each row at another place."""
    tokens = random_tokens(*shape)
    labels = tokens.clone()
    for row in range(shape[0]):
        labels[row, row : 2 * row + 5] = -100
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}
