"""State dicts for weights in eight and four bits and for embeddings on the host: models without numbers take them, and what would become
other numbers is refused."""

import copy

import pytest
import torch

from tests.cpu.test_eight_bit_weights import frozen
from tests.cpu.test_four_bits import sparse
from tests.models import random_tokens, tiny_model

BF16 = torch.bfloat16
TOKENS = random_tokens(2, 12)
WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{WEIGHT}_scale_inv"
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def in_eight(package, **sizes):
    return package.eight_bits(frozen(**sizes))


def on_host(package):
    return package.host_embeddings(package.eight_bits(tiny_model(BF16, tie_word_embeddings=False).requires_grad_(False)))


MAKES = {
    "eight bits": ("qwen3", in_eight),
    "eight bits, embedding on the host": ("qwen3", on_host),
    "MXFP4": ("gpt_oss", lambda package: package.four_bits(sparse("mxfp4"))),
    "NF4": ("qwen3", lambda package: package.four_bits(sparse("nf4"))),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_model_on_meta_takes_what_is_assigned(request, name):
    """Scales, and where an embedding's rows go, are no parameters, and follow the codes to where there are numbers."""
    package, make = MAKES[name]
    model = make(request.getfixturevalue(package))
    other = copy.deepcopy(model).to("meta")
    other.load_state_dict(model.state_dict(), assign=True)
    other.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # which no state dict has
    assert torch.equal(other(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


# ---------------------------------------------------------------- weights in eight bits
def changed(model, **tensors):
    """A state dict of a model with other tensors under WEIGHT and SCALES."""
    names = {"weight": WEIGHT, "scales": SCALES}
    return {**model.state_dict(), **{names[name]: tensor for name, tensor in tensors.items()}}


@pytest.mark.parametrize("scales", (torch.tensor(0.3), torch.full((256, 1), 0.25)), ids=("one for all", "rows with equal ones"))
def test_scales_that_are_one(qwen3, scales):
    model = in_eight(qwen3, **SIZES)
    exact = model.state_dict()[WEIGHT].float() * scales.flatten()[0]
    model.load_state_dict(changed(model, scales=scales))
    weight = model.get_submodule(WEIGHT.rpartition(".")[0]).weight
    assert (weight.float() - exact).norm() <= 10 ** (-30 / 20) * exact.norm()


CODES = torch.ones(256, 128)
REFUSED = {
    "a scale a row": ({"scales": torch.arange(1.0, 257)[:, None]}, r"has scales \[256, 1\], expected \[2, 1\]"),
    "blocks of 64": ({"scales": torch.arange(1.0, 9).view(4, 2)}, r"has scales \[4, 2\], expected \[2, 1\]"),
    "e5m2": ({"weight": CODES.to(torch.float8_e5m2)}, "is torch.float8_e5m2 with weight_scale_inv, expected torch.float8_e4m3fn"),
    "bytes": ({"weight": CODES.to(torch.uint8)}, "is torch.uint8 with weight_scale_inv, expected torch.float8_e4m3fn"),
    "bytes alone": ({"weight": CODES.to(torch.uint8), "scales": None}, "is torch.uint8, expected torch.float8_e4m3fn with"),
    "an infinity": ({"weight": CODES.index_fill(0, torch.tensor(3), torch.inf).to(BF16), "scales": None}, "is not finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_other_numbers_is_refused(qwen3, name):
    """Read as codes with a scale a block, or rounded as numbers, these would load without a word and be others."""
    tensors, expected = REFUSED[name]
    model = in_eight(qwen3, **SIZES)
    before = copy.deepcopy(model.state_dict()[WEIGHT].view(torch.uint8))
    state = {key: tensor for key, tensor in changed(model, **tensors).items() if tensor is not None}
    with pytest.raises(RuntimeError, match=expected):
        model.load_state_dict(state)
    assert torch.equal(model.state_dict()[WEIGHT].view(torch.uint8), before)


# ---------------------------------------------------------------- weights in four bits
@pytest.mark.parametrize("kind", ("mxfp4", "nf4"))
def test_numbers_for_four_bits_are_finite(request, kind):
    package = request.getfixturevalue("gpt_oss" if kind == "mxfp4" else "qwen3")
    plain = sparse(kind).state_dict()
    name = next(name for name in plain if name.endswith("experts.gate_up_proj"))
    plain[name] = plain[name].clone()
    plain[name][1, 2, 3] = torch.nan
    with pytest.raises(RuntimeError, match=f"{name} is not finite"):
        package.four_bits(sparse(kind)).load_state_dict(plain)


def test_nf4_needs_its_scales(qwen3):
    """bitsandbytes keeps them beside the codes, and those of the weights before would be taken instead."""
    model = qwen3.four_bits(sparse("nf4"))
    state = model.state_dict()
    name = next(name for name in state if name.endswith("experts.gate_up_proj"))
    with pytest.raises(RuntimeError, match=f"{name} is torch.uint8 without its scales, such as {name}.absmax"):
        model.load_state_dict({key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")})


@pytest.mark.parametrize("numbers", (False, True), ids=("codes", "numbers"))
@pytest.mark.parametrize("kind", ("mxfp4", "nf4"))
def test_four_bits_keep_the_models_dtype(request, kind, numbers):
    package = request.getfixturevalue("gpt_oss" if kind == "mxfp4" else "qwen3")
    model = package.four_bits(sparse(kind))
    state = sparse(kind).state_dict() if numbers else model.state_dict()
    expected = copy.deepcopy(model).float()
    model.float().load_state_dict(state)
    experts, wanted = (next(each for name, each in m.named_modules() if name.endswith("mlp.experts")) for m in (model, expected))
    assert experts.down_proj.dtype == torch.float32 and torch.equal(experts.down_proj, wanted.down_proj)
