"""What a user calls of the package for Liger's users beside its operations: the layers on a model, its answers, the Hub's mapping."""

import copy
import gc
import importlib
import pickle
import runpy
import sys
import weakref

import pytest
import torch
from torch import nn

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


class Doubled(nn.LayerNorm):
    """Not torch's own."""

    def forward(self, input):
        return 2 * super().forward(input)


def network():
    torch.manual_seed(0)
    blocks = nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(6, 64), nn.LayerNorm(64), nn.RMSNorm(64, eps=1e-5), Doubled(64)
    model = nn.Sequential(*blocks, nn.RMSNorm(64))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5)
    return model


def step(model, x):
    """The output and every gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))


def called(liger, monkeypatch):
    """The operations that the norms call, as they happen."""
    layers, calls = liger.layers, []
    for name in ("layer_norm", "group_norm", "rms_norm"):
        function = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *args, name=name, function=function: calls.append(name) or function(*args))
    return calls


def test_the_casting_modes_say_when_the_norm_rounds(liger):
    """Takes an x in half precision with a weight in fp32, whose result has x's dtype; any other mode is refused."""
    x, weight = torch.randn(40, 96).bfloat16(), torch.randn(96)
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    first, last = (n.bfloat16().float() * (weight + 1)).bfloat16(), (n * (weight + 1)).bfloat16()
    assert not torch.equal(first, last)
    for casting, wanted in (("llama", first), ("gemma", last), ("none", last)):
        assert torch.equal(liger.rms_norm(x, weight, 1e-6, 1.0, casting), wanted)
        y, total = liger.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6, 1.0, casting)
        assert torch.equal(y, wanted) and torch.equal(total, x)
    for call in (liger.rms_norm, lambda x, *rest: liger.add_rms_norm(x, x, *rest)):
        with pytest.raises(ValueError, match="^casting is 'first', expected one of llama, gemma, none"):
            call(x, weight, 1e-6, 0.0, "first")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_the_norms_of_torch_nn_run_ours_with_the_same_results(liger, monkeypatch, dtype):
    calls, model, x = called(liger, monkeypatch), network().to(dtype), torch.randn(5, 3, 8, dtype=dtype)
    wanted, names = step(model, x), list(model.state_dict())
    assert liger.kernelize(model) is model and liger.kernelize(model) is model
    found = step(model, x)
    assert calls == ["group_norm", "layer_norm", "rms_norm"] and list(model.state_dict()) == names
    bound = 3e-2 if dtype is torch.bfloat16 else 1e-4
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= bound * b.norm() + 1e-6
    liger.reset(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(step(model, x), wanted, strict=True))


def test_a_model_without_norms(liger):
    for use in (liger.kernelize, liger.explain):
        if use is liger.explain and "liger_kernel.ops" in sys.modules:
            continue
        with pytest.raises(TypeError, match="a Linear without any of torch.nn's LayerNorm, GroupNorm, RMSNorm"):
            use(nn.Linear(2, 2))


def test_what_someone_else_put_there_stays(liger, monkeypatch):
    calls, model = called(liger, monkeypatch), network()
    model[3].forward = lambda input: input
    liger.kernelize(model)
    liger.reset(model)
    assert model[3].forward(7) == 7
    seen = []
    liger.kernelize(model)[1].register_forward_hook(lambda *args: seen.append(1))
    model(torch.randn(2, 3, 8))
    assert seen == [1] and "layer_norm" not in calls


def test_copies_pickles_and_the_end_of_a_model(liger):
    model, x = liger.kernelize(network()), torch.randn(2, 3, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))  # what was pickled runs torch.nn's own forwards
        other[3].weight.data.zero_()
        assert not torch.equal(other(x), model(x))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, other
        assert gone() is None
    finally:
        gc.enable()


def test_autocast_and_mixed_dtypes_are_left_to_torch(liger, monkeypatch):
    """Autocast computes norms in float32, or refuses dtypes that do not go together, as without us."""
    calls, model, x = called(liger, monkeypatch), network(), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        found = liger.kernelize(model)(x)
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype and not calls
    for module, tensor in ((model[1], torch.randn(2, 8, 6)), (model[3], torch.randn(2, 64))):
        with pytest.raises(RuntimeError):
            module(tensor.double())


def test_under_torch_compile(liger):
    model, x = network(), torch.randn(2, 3, 8)
    wanted = step(model, x)
    torch._dynamo.reset()
    found = step(torch.compile(liger.kernelize(model), fullgraph=True, backend="aot_eager"), x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_explain(liger):
    model = network()
    before = {row.part: row for row in liger.explain(model).rows if row.part.endswith("Norm")}
    assert {row.advice for row in before.values()} == {"call kernelize(model)"} and before["RMSNorm"].count == 2
    rows = liger.explain(liger.kernelize(model)).rows
    found = {(row.part, row.reason): row for row in rows}
    assert found["LayerNorm", ""].fused and found["GroupNorm", ""].fused and found["RMSNorm", ""].count == 1
    assert "subclass" in next(row.reason for row in rows if row.part == "Doubled")
    assert "eps" in next(row.reason for row in rows if row.part == "RMSNorm" and not row.fused)
    assert found["kernels on cpu", "no GPU (cpu): PyTorch's operations run"].advice == "move the model to a CUDA device"
    with torch.autocast("cpu", torch.bfloat16):
        assert all("autocast" in row.reason for row in liger.explain(model).rows if row.part in ("LayerNorm", "GroupNorm"))
    model[3].forward = lambda input: input
    assert "was replaced" in next(row.reason for row in liger.explain(model).rows if row.part == "LayerNorm")
    assert "LayerNorm" in str(liger.explain(model))


def test_what_explain_says_runs_ours_does(liger, monkeypatch):
    calls, model = called(liger, monkeypatch), liger.kernelize(network())
    model(torch.randn(2, 3, 8))
    fused = [row for row in liger.explain(model).rows if row.fused and row.part.endswith("Norm")]
    assert sum(row.count for row in fused) == len(calls) == 3


def test_report(liger, capsys, monkeypatch):
    found = {finding.name: finding for finding in liger.report().findings}
    assert found["torch"].fits and found["liger-kernel"].fits and found["transformers"].fits
    monkeypatch.setattr(sys, "argv", ["x"])
    runpy.run_module(f"{liger.__name__}.__main__", run_name="__main__")
    assert torch.__version__ in capsys.readouterr().out


def test_the_hubs_mapping(liger):
    """`kernels` gives a model of transformers our RMSNorm and rotary embedding by it."""
    kernels, llama = pytest.importorskip("kernels"), importlib.import_module("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES))
    tokens = torch.randint(64, (2, 7))
    wanted = model(tokens).logits
    with kernels.use_kernel_mapping(liger.mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert model.model.norm.forward.__func__ is liger.layers.RMSNorm.forward
    torch.testing.assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
    assert llama.LlamaRMSNorm.forward is not liger.layers.RMSNorm.forward
    assert all(set(liger.mapping(kernels.Mode.TRAINING)[name]["cpu"]) == {kernels.Mode.TRAINING} for name in liger.mapping())


def test_an_mlp_of_ones_own(liger):
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("GatedMLP")
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model, x = nn.Sequential(MLP()), torch.randn(3, 8)
    wanted = model(x)
    with kernels.use_kernel_mapping(liger.mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert model[0].forward.__func__ is liger.layers.GatedMLP.forward
    torch.testing.assert_close(model(x), wanted)


def test_warm_up(liger):
    """There is nothing to load on a CPU; what would be loaded runs there too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, state = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES)), torch.get_rng_state()
    assert liger.warmup_all_kernels() is None and liger.warmup_all_kernels(model) is None
    warmup = importlib.import_module(f"{liger.__name__}.warmup")
    assert warmup.sizes_of(nn.Sequential(model)) == warmup.Sizes(32, 48, 4, 2, 8, 64)
    warmup.warm_up("cpu", torch.bfloat16, warmup.sizes_of(model), 3)
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="Linear without a configuration"):
        liger.warmup_all_kernels(nn.Linear(2, 2))
    liger.clear_autotune_cache()
