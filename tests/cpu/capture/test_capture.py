"""Which passes `capture` replays and which run as before, with a stand-in for graphs. Real ones: tests/gpu/test_capture.py."""

import collections
import copy
import pickle
import sys
import warnings

import pytest
import torch

from tests.capturing import (
    SHAPE,
    Rerun,
    assert_equal,
    batch,
    captured,
    check_two_forward_passes,
    compare,
    gradients,
    loss_of,
    replays_of,
    whole,
)
from tests.cpu.conftest import kernels_of
from tests.decoder_families import TRAINED


@pytest.mark.parametrize("kernels", (False, True), ids=("pytorch", "kernels"))
def test_the_second_pass_is_recorded_and_gradients_have_the_same_bits(package, tiny_model, family, interpret, kernels):
    launched = interpret(package, kernels_of(TRAINED[family[0]].folder)).launched if kernels else None
    model, plain = tiny_model(), tiny_model()
    package.kernelize(plain)
    assert package.capture(package.kernelize(model), *SHAPE) is model
    for seed, graphs in enumerate((0, whole(), whole(), whole())):
        assert compare(model, plain, seed) == graphs
    assert launched != []


def test_of_a_model_as_transformers_has_it(package, tiny_model):
    model, plain = tiny_model(), tiny_model()
    package.capture(model, *SHAPE)
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    assert Rerun.replays == 2 * whole()


@pytest.mark.parametrize("set_to_none", (True, False))
def test_gradients_accumulate(package, tiny_model, set_to_none):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        m.zero_grad()
        for step in range(2):
            for seed in range(3):
                (loss_of(m, 3 * step + seed) / 3).backward()
            if step == 0:
                m.zero_grad(set_to_none=set_to_none)
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name


def test_training_with_an_optimizer(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        optimizer = package.AdamW(m.parameters(), lr=1e-2)
        for seed in range(4):
            optimizer.zero_grad()
            loss_of(m, seed).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))


def test_two_forward_passes_before_their_backward_passes(package, tiny_model):
    model, plain = captured(package, tiny_model())
    check_two_forward_passes(model, plain)


def test_a_forward_pass_that_nobody_follows_up_blocks_nothing(package, tiny_model):
    model, plain = captured(package, tiny_model())
    loss_of(model)
    assert compare(model, plain) == whole()


def test_a_second_backward_pass_raises(package, tiny_model):
    model, _ = captured(package, tiny_model())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize("options", ({"shape": (2, 8)}, {"shape": (1, 9)}), ids=str)
def test_other_shapes_run_as_before(package, tiny_model, options):
    model, plain = captured(package, tiny_model())
    assert compare(model, plain, **options) == 0


def test_several_shapes(package, tiny_model):
    model, plain = captured(package, tiny_model())
    package.capture(model, 3, 5)
    for seed in range(3):
        for shape in (SHAPE, (3, 5)):
            assert_equal(gradients(model, seed, shape=shape), gradients(plain, seed, shape=shape))
    assert replays_of(lambda: gradients(model, shape=(3, 5))) == replays_of(lambda: gradients(model)) == whole()


def test_evaluation_and_generation_run_as_before(package, tiny_model):
    model, plain = captured(package, tiny_model())
    ids = batch(0)
    with torch.no_grad():
        assert replays_of(lambda: torch.equal(loss_of(model), loss_of(plain))) == 0
    model.eval(), plain.eval()
    assert compare(model, plain) == 0
    found, expected = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (model, plain))
    assert torch.equal(found, expected)
    model.train()
    assert replays_of(lambda: gradients(model)) == whole()


def test_padded_batches_have_graphs_of_their_own(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for seed, length in enumerate((4, 6, 8, 3)):
        mask = torch.ones(SHAPE, dtype=torch.int64)
        mask[1, length:] = 0
        found = compare(model, plain, seed, attention_mask=mask)
        assert found == (0 if seed == 0 else whole())
    assert compare(model, plain) == whole()


def test_the_packages_own_attention(package, tiny_model):
    """Its plan of a padded or packed batch is read from memory that each pass fills."""
    model, plain = tiny_model(attn_implementation="sdpa"), tiny_model(attn_implementation="sdpa")
    for m in (model, plain):
        package.kernelize(m).set_attn_implementation("bastile")
    package.capture(model, *SHAPE)
    positions = torch.arange(9).expand(2, 9)
    for seed in range(4):
        mask, packed = torch.ones(SHAPE, dtype=torch.int64), positions.clone()
        mask[1, 3 + seed :] = 0
        packed[1, 2 + seed :] -= 2 + seed
        for options in ({}, {"attention_mask": mask}, {"position_ids": packed}):
            assert compare(model, plain, seed, **options) == (0 if seed == 0 else whole()), options


@pytest.mark.parametrize("chosen", (False, True), ids=("asked for by name", "chosen"))
def test_padding_that_attention_has_no_plan_for(package, tiny_model, monkeypatch, chosen):
    """It lies between tokens, or has labels where the model did not ask for our attention: such a batch runs as before, and says so."""
    for name in ("kernels_run_on", "takes_heads"):  # the CPU's build has no kernels
        monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.hf.attention.attention_choice"], name, lambda *tensors, **asked: True)
    model = package.kernelize(tiny_model(head_dim=64))
    if not chosen:
        model.set_attn_implementation("bastile")
    model, plain = captured(package, model)
    package.kernelize(plain, unpad=False)  # as with `capture`: batches keep their shape
    mask = torch.ones(SHAPE, dtype=torch.int64)
    mask[1, 4:] = 0
    unlabelled = batch(3).where(mask.bool(), torch.tensor(-100))

    def padded(labels, mask=mask):
        """(the graphs that ran, whether something was said) in a step; its gradients are those without `capture`."""
        before, found = Rerun.replays, []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for each in (model, plain):
                each.zero_grad()
                each(input_ids=batch(3), attention_mask=mask, labels=labels, use_cache=False).loss.backward()
                found.append({name: parameter.grad.clone() for name, parameter in each.named_parameters()})
        assert_equal(*found)
        return Rerun.replays - before, any("no plan" in str(warning.message) for warning in said)

    assert [padded(unlabelled) for _ in range(3)] == [(0, False), (whole(), False), (whole(), False)]
    if chosen:
        assert [padded(batch(3)) for _ in range(2)] == [(0, True), (0, False)], "SDPA's numbers for padding are read, and said once"
    between = mask.clone()
    between[1, 6:] = 1
    assert padded(batch(3), between) == (0, not chosen)
    assert padded(unlabelled) == (whole(), False) and compare(model, plain) == whole()
    assert plain.model.config._attn_implementation == model.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("items", (7, torch.tensor(7), 7.5))
def test_the_number_of_items_is_the_losses_alone(package, tiny_model, items):
    model, plain = captured(package, tiny_model())
    for number in (items, items + 1):
        options = {"num_items_in_batch": number}
        assert compare(model, plain, **options) == whole()


def test_a_cache_keeps_it_off_and_says_so(package, tiny_model):
    model = package.capture(package.kernelize(tiny_model()), *SHAPE)
    ids = batch(0)
    with pytest.warns(RuntimeWarning, match="use_cache=False"):
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()


def test_hooks_are_called(package, tiny_model):
    model, plain = captured(package, tiny_model())
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with pytest.warns(RuntimeWarning, match="hooks on a layer"):
        gradients(model)
    assert len(seen) == 1
    handle.remove()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such layers run as before
        for _ in range(2):
            gradients(model)
    assert len(seen) == 3, "a hook on a part of a layer"
    handle.remove()
    for _ in range(3):
        assert_equal(gradients(model), gradients(plain))


def test_a_hook_in_another_dictionary_is_called(package, tiny_model):
    """Some remove hooks by giving a module new dictionaries."""
    model, _ = captured(package, tiny_model())
    norm = model.model.layers[-1].input_layernorm
    norm._forward_hooks = collections.OrderedDict()
    expected = replays_of(lambda: gradients(model))
    assert expected == whole()
    norm.register_forward_hook(lambda module, args, output: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such layers run as before
        assert replays_of(lambda: gradients(model)) < expected


def test_autocast_is_a_pass_of_its_own(package, tiny_model):
    model, plain = captured(package, tiny_model())
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(3):
            assert_equal(gradients(model, seed), gradients(plain, seed))
    assert_equal(gradients(model), gradients(plain))


def test_saved_tensors_may_be_packed(package, tiny_model):
    model, plain = captured(package, tiny_model())
    packed = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t),
        pytest.warns(RuntimeWarning, match="offload"),
    ):
        assert compare(model, plain) == 0
    assert packed


def test_copies_run_as_before(package, tiny_model, tmp_path):
    model, plain = captured(package, tiny_model())
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert compare(other, plain) == 0
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert not torch.equal(loss_of(other), loss_of(plain)), "a copy reads its own weights"
    state = pickle.loads(pickle.dumps(model.state_dict()))
    assert_equal(state, dict(plain.state_dict()))


def test_a_failing_capture_leaves_the_model_as_it_is(package, tiny_model, monkeypatch):
    def fail(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Rerun, "record", fail)
    model, plain = package.kernelize(tiny_model()), package.kernelize(tiny_model())
    package.capture(model, *SHAPE)
    gradients(model)
    with pytest.warns(RuntimeWarning, match="cannot be captured .*not permitted"):
        assert_equal(gradients(model), gradients(plain))
    for _ in range(3):
        assert_equal(gradients(model), gradients(plain))


def test_the_recording_is_no_gradient_to_the_hooks_of_a_parameter(package, tiny_model):
    """And does not touch autograd's nodes of the parameters, which an earlier pass may have made for another stream."""
    model = package.kernelize(tiny_model())
    weight, seen = model.model.layers[0].mlp.up_proj.weight, []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    package.capture(model, *SHAPE)
    for seed in range(4):
        found = gradients(model, seed)
        assert len(seen) == seed + 1 and torch.equal(seen[-1], found["model.layers.0.mlp.up_proj.weight"])


def test_parameters_that_no_module_holds_are_not_recorded(package, tiny_model):
    """Their gradients would be missing."""
    model = package.kernelize(tiny_model())
    mlp = model.model.layers[1].mlp

    def forward(x, held=(mlp.down_proj.weight,)):
        return torch.nn.functional.linear(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x), *held)

    mlp.forward = forward
    plain = gradients(model)
    package.capture(model, *SHAPE)
    assert_equal(gradients(model), plain)
    with pytest.warns(RuntimeWarning, match="cannot be captured .*no module holds"):
        assert_equal(gradients(model), plain)
    assert_equal(gradients(model), plain)


@pytest.mark.parametrize("kernelized", (True, False))
def test_reset_takes_it_off(package, tiny_model, kernelized):
    model = tiny_model()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    if kernelized:
        package.kernelize(model)
    package.capture(model, *SHAPE)
    gradients(model)
    gradients(model)
    package.reset()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    assert replays_of(lambda: assert_equal(gradients(model), gradients(tiny_model()))) == 0


def test_wrong_arguments(qwen3):
    model = TRAINED["qwen3"].tiny()
    with pytest.raises(ValueError, match="cpu.*expected one CUDA device"):
        qwen3.capture(model, 1, 16)
    for batch_size, tokens in ((0, 16), (1, -1), (1.0, 16), (True, 16)):
        with pytest.raises(ValueError, match="positive int"):
            qwen3.capture(model, batch_size, tokens)
    with pytest.raises(TypeError, match="Qwen3DecoderLayer"):
        qwen3.capture(torch.nn.Linear(2, 2), 1, 16)
