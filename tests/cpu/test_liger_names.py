"""Liger's own names over our operations: the signatures of its version 0.8.5, its modules' parameters, and what they refuse."""

import importlib
import inspect
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.liger_support import config, liger_itself, names, r  # noqa: F401

OPERATIONS = (
    "rms_norm fused_add_rms_norm layer_norm group_norm poly_norm dyt softmax sparsemax swiglu geglu rope llama4_rope qwen2vl_mrope "
    "cross_entropy kl_div jsd tvd fused_linear_cross_entropy fused_linear_jsd tiled_mlp fused_neighborhood_attention"
).split()
# In Liger's modules of these operations, and none of the 22.
BEYOND = {"LigerExperts"}
BEYOND_FUNCTIONS = {
    "liger_attn_res", "liger_fused_linear_kl_div", "liger_fused_linear_scaled_cross_entropy_tp", "liger_mhc_apply", "liger_mhc_coeffs",
    "liger_mhc_forward", "liger_mhc_post_res", "liger_mhc_pre", "liger_modulated_rms_norm", "liger_multi_token_attention",
    "liger_relu_squared",
}  # fmt: skip


@pytest.fixture
def theirs(liger_kernel):
    """Finds what Liger has under a name: in `liger_kernel.ops`, its functions, or the modules of the 22 operations."""
    modules = [importlib.import_module(f"liger_kernel.{name}") for name in ("transformers.functional", "ops")]
    modules += [importlib.import_module(f"liger_kernel.transformers.{name}") for name in OPERATIONS]

    def find(name):
        return next(getattr(module, name) for module in modules if hasattr(module, name))

    find.modules = modules
    return find


def parameters(function, skip=()):
    found = [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]
    return [p for p in found if p[0] not in ("ctx", "self", *skip)]


def names_of(n, kind):
    """Ours of a kind: Liger's have the same names."""
    found = [name for name, value in vars(n).items() if name.lower().startswith(("liger", "apply_")) and kind(name, value)]
    assert len(found) > 20
    return found


def test_every_name_of_the_operations(n, theirs):
    """Whatever Liger defines in the modules of the 22 operations, and beside it its functions."""
    functional, ops, *modules = theirs.modules
    wanted = {name for module in modules for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    wanted = {name for name in wanted if name.lower().startswith(("liger", "apply_"))} - BEYOND
    wanted |= {name for name in vars(functional) if name.startswith("liger_")} - BEYOND_FUNCTIONS
    wanted |= {name for module in modules for name in vars(module) if name.startswith("Liger") and name.endswith("Function")}
    wanted -= {"LigerFusedMoEFunction"}
    assert len(wanted) > 70 and not {name for name in wanted if not hasattr(n, name)}
    assert not {name for name in BEYOND | BEYOND_FUNCTIONS if hasattr(n, name)}


def test_functions_have_the_arguments_of_liger(liger, n, theirs):
    found = names_of(n, lambda name, _: name.endswith("Function"))
    assert sorted(found) == sorted(set(liger.back_end.NAMES) - {"apply_tiled_mlp"}) and len(found) == 22
    for name in found:
        assert parameters(getattr(n, name).apply) == parameters(theirs(name).forward), name


def test_wrappers_have_the_arguments_of_liger(n, theirs):
    for name in names_of(n, lambda name, _: name.islower()):
        assert parameters(getattr(n, name)) == parameters(theirs(name)), name


def arguments_of(name):
    given = {
        "LigerGroupNorm": (8, 2),
        "LigerFusedNeighborhoodAttention": (32, 4),
        "LigerFusedNeighborhoodAttentionLayer": (32, 4),
        **dict.fromkeys(("LigerLayerNorm", "LigerDyT", "LigerFusedAddRMSNorm"), (16,)),
    }
    made = config(hidden_act="gelu_pytorch_tanh") if "GEGLU" in name else config()
    return given.get(name, (16,) if "RMSNorm" in name else (made,) if "MLP" in name else ())


def test_modules_have_the_arguments_and_parameters_of_liger(n, theirs):
    for name in names_of(n, lambda _, value: isinstance(value, type) and issubclass(value, nn.Module)):
        ours, other = getattr(n, name), theirs(name)
        assert parameters(ours.__init__) == parameters(other.__init__), name
        assert [p[:2] for p in parameters(ours.forward)] == [p[:2] for p in parameters(other.forward)], name
        torch.manual_seed(0)
        one = ours(*arguments_of(name))
        torch.manual_seed(0)
        other = other(*arguments_of(name))
        sizes = [{k: (v.shape, v.dtype) for k, v in module.state_dict().items()} for module in (one, other)]
        assert sizes[0] == sizes[1], name
        if "MLP" not in name and "Attention" not in name:
            assert all(torch.equal(v, other.state_dict()[k]) for k, v in one.state_dict().items()), name
        one.load_state_dict(other.state_dict())
        assert repr(one)


def test_modules_by_their_configuration(n, theirs):
    """What Liger's modules make of a configuration beside its sizes."""
    wide = config(hidden_act="gelu_pytorch_tanh", use_double_wide_mlp=True)
    for layer in (None, 1, 2, 3):
        found, wanted = n.LigerGEGLUMLPForGemma4(wide, layer), theirs("LigerGEGLUMLPForGemma4")(wide, layer)
        assert found.up_proj.weight.shape == wanted.up_proj.weight.shape and found.intermediate_size == wanted.intermediate_size
        assert (found.intermediate_size == 96) == (layer in (2, 3))
    biased = config(mlp_bias=True)
    assert n.LigerFalconH1SwiGLUMLP(biased).down_proj.bias is not None
    named = types.SimpleNamespace(hidden_size=8, intermediate_size=8, hidden_activation="silu")
    assert n.LigerSwiGLUMLPForMuseGlimmer(named).hidden_size == 8
    with pytest.raises(ValueError, match="config.hidden_activation is 'gelu', expected one of silu, swish"):
        n.LigerSwiGLUMLPForMuseGlimmer(types.SimpleNamespace(**{**vars(named), "hidden_activation": "gelu"}))
    for name in ("LigerRMSNormForGemma4", "LigerRMSNormForMuseGlimmer"):
        found, wanted = getattr(n, name)(8, with_scale=False), theirs(name)(8, with_scale=False)
        x = r(3, 8).to(torch.bfloat16)
        assert found.weight is None and torch.equal(found(x), wanted(x))
    name = "LigerFusedNeighborhoodAttentionConfig"
    assert getattr(n, name)(bias=False).to_dict() == theirs(name)(bias=False).to_dict()
    modeling = types.SimpleNamespace()
    n.apply_liger_llama4_rope_full(modeling)
    assert vars(modeling) == {
        "apply_rotary_emb": n.liger_llama4_text_rotary_pos_emb, "vision_apply_rotary_emb": n.liger_llama4_vision_rotary_pos_emb
    }
    for given, message in (((32, 5), "a multiple of num_heads"), ((32, 4, 6), "an odd number"), ((32, 4, 7, 0), "1 or more")):
        with pytest.raises(ValueError, match=message):
            n.LigerFusedNeighborhoodAttention(*given)


REDUCTION = {"reduction": "average"}
OF_CROSS_ENTROPY = (REDUCTION, {"label_smoothing": 1.5}, {"label_smoothing": -0.1}, {"softcap": 0}, {"softcap": -1.0})
REFUSED_BY_LIGER = [(name, o) for name in ("LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss") for o in OF_CROSS_ENTROPY]
REFUSED_BY_LIGER += [("LigerFusedLinearJSD", {"temperature": 0})]
REFUSED = [("LigerTVDLoss", REDUCTION), ("LigerKLDIVLoss", REDUCTION), ("LigerKLDIVLoss", {"eps": -1.0}), ("LigerJSD", {"beta": 2.0}),
           ("LigerFusedLinearJSD", {"jsd_beta": -0.5}), ("LigerFusedLinearJSD", {"temperature": -1.0})]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), REFUSED_BY_LIGER + REFUSED, ids=str)
def test_what_a_loss_cannot_compute_with_is_refused_by_its_constructor(n, theirs, name, options):
    """Whatever Liger's refuses, and more."""
    if (name, options) in REFUSED_BY_LIGER:
        with pytest.raises(AssertionError):
            theirs(name)(**options)
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{option.removeprefix('jsd_')} is {value!r}, expected "):
        getattr(n, name)(**options)


@pytest.mark.parametrize("activation", ("gelu", "gelu_fast", "gelu_pytorch_tanh", None, "silu", "quick_gelu"))
@pytest.mark.parametrize("name", ("LigerGEGLUMLP", "LigerGEGLUMLPForGemma4"))
def test_geglu_is_of_tanh_whatever_the_configuration_says(n, theirs, name, activation):
    """Does what Liger's does, and says that an activation which is no GELU has no effect."""
    made = config(hidden_act=activation)
    theirs(name)(made)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mlp = getattr(n, name)(made)
    said = [str(warning.message) for warning in found]
    assert (len(said) == 1 and f"config.hidden_act is {activation!r}" in said[0]) if activation in ("silu", "quick_gelu") else not said
    assert not said or found[0].filename == __file__
    x = r(3, 32).float()
    wanted = mlp.down_proj(functional.gelu(mlp.gate_proj(x), approximate="tanh") * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), wanted)


ROWS, HEAD, TARGET = r(3, 5), r(7, 5), torch.tensor([0, 1, 2])
# A quotient by a softcap of 0 is NaN, in Liger's functions too, whose modules refuse it.
NO_CAP = "^softcap is 0, expected a positive number, or None for no cap"
CALLS = {
    "softcap": (ValueError, NO_CAP, lambda n: n.liger_cross_entropy(ROWS, TARGET, softcap=0)),
    "linear softcap": (ValueError, NO_CAP, lambda n: n.liger_fused_linear_cross_entropy(ROWS, HEAD, TARGET, softcap=0)),
    "size_average": (ValueError, "is False, expected None", lambda n: n.liger_cross_entropy(ROWS, TARGET, size_average=False)),
    "reduce": (ValueError, "reduce is False, expected True", lambda n: n.liger_kl_div(ROWS, ROWS, reduce=False)),
    "channels": (ValueError, r"expected \[batch, 6, ...\]", lambda n: n.liger_group_norm(r(2, 4, 3), None, None, 6, 2, 1e-5)),
    "attention_mask": (NotImplementedError, "attention_mask", lambda n: n.LigerFusedNeighborhoodAttention(32, 4).double()(
        r(1, 5, 32), torch.ones(5, 5))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_given_is_ignored(n, name):
    error, message, call = CALLS[name]
    with pytest.raises(error, match=message):
        call(n)
