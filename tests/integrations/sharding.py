"""Models in several processes, each of which has rows of a batch: how they are sharded, and their gradients beside those of one process."""

import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations.common import FACTOR, WAYS, batch
from tests.models import Step
from tests.tolerances import assert_close

HOWS = pytest.mark.parametrize("how", WAYS)
ROWS, LENGTH = 4, 24


def rows_of(inputs, rank):
    """The half of a batch that a rank has, and how many labels the whole batch counts."""
    mine = {name: tensor[rank * ROWS // 2 :][: ROWS // 2] for name, tensor in inputs.items()}
    return mine | {"num_items_in_batch": (inputs["labels"][:, 1:] != -100).sum()}


def whole(tensor):
    """All of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor):
    """What this process has of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients_of(model, within="", read=whole):
    """within: what a wrapper has put into the names."""
    return {name.replace(within, ""): read(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(found, expected, device, factor=1.0):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype, name
        assert_close(found[name], gradient, torch.float32, name, 2 * factor * FACTOR[device])


def assert_fused(here, model, **inputs):
    """The decoder layers run as ours do when nothing is in the way."""
    decoder, calls = sys.modules[f"{here.qwen3.__name__}.shared.hf.layer.decoder_layer"], []
    original = decoder.norm_mlp
    decoder.norm_mlp = lambda *args: calls.append(1) or original(*args)
    try:
        output = model(**inputs)
    finally:
        decoder.norm_mlp = original
    assert len(calls) == 2 and output.logits is None
    return output


@contextlib.contextmanager
def as_on_a_gpu(package):
    """The package chooses its attention."""
    choice = sys.modules[f"{package.__name__}.shared.hf.attention.attention_choice"]
    before = choice.kernels_run_on, choice.takes_heads
    sys.modules[f"{package.__name__}.shared.hf.parts.explanation"]._warned.clear()
    choice.kernels_run_on = choice.takes_heads = lambda *tensors, **options: True
    try:
        yield
    finally:
        choice.kernels_run_on, choice.takes_heads = before


UNITS = {
    "root alone": lambda model: [],
    "layers": lambda model: list(model.model.layers),
    "layers and head": lambda model: [*model.model.layers, model.lm_head],
    "layers, norm with head": lambda model: [*model.model.layers, [model.model.norm, model.lm_head]],
    "layers, head and embeddings": lambda model: [*model.model.layers, model.lm_head, model.model.embed_tokens],
    "attention and mlp": lambda model: [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp, layer)],
    "linears": lambda model: [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)] + list(model.model.layers),
    "norms": lambda model: [m for m in model.modules() if "Norm" in type(m).__name__] + list(model.model.layers),
}


OUTER = {  # units around layers
    "decoder": lambda model: [*model.model.layers, model.model],
    "embeddings and decoder": lambda model: [model.model.embed_tokens, *model.model.layers, model.model],
}


def units_of(model, units):
    return {**UNITS, **OUTER}[units](model)


def shard(here, model, units="layers", **options):
    from torch.distributed.fsdp import fully_shard

    for unit in units_of(model, units):  # each a module, or several that are sharded as one
        fully_shard(unit, mesh=here.mesh, **options)
    return fully_shard(model, mesh=here.mesh, **options)


def ddp(here, model, **options):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=None if here.device == "cpu" else [here.rank], **options)


def package_of(here, folder):
    """The process, with the package of a family in the place of Qwen3's."""
    from kernels import get_local_kernel

    return dataclasses.replace(here, qwen3=get_local_kernel(Path(folder), backend=here.device))


def assert_same_step(here, model, plain, call=None, within="", steps=1, factor=1.0, logits=False):
    """Each process has half of a batch: the gradients are those of the plain model with all of it. Engines take the mean of the gradients,
    so the sums are twice that. call: of the model, which may do more than call it; steps: the second one finds what the first has left;
    logits: whether the loss is made of them, as with an adapter on the head."""
    inputs = batch(here.own_device, ROWS, LENGTH)
    expected = Step(plain, **inputs)
    for _ in range(steps):
        model.zero_grad()
        output = (call or model)(**rows_of(inputs, here.rank))
        assert logits or output.logits is None  # also where the head is a unit of its own
        (2 * output.loss).backward()
        assert_gradients(gradients_of(model, within), expected.gradients, here.device, factor)
