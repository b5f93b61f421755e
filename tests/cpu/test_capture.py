"""Which passes `capture` replays and which run as before. CUDA graphs exist on GPUs only (tests/gpu/test_capture.py): here a stand-in runs
the function again where a graph would replay it, on the same inputs, and writes the results to where the first ones are."""

import copy
import importlib
import pickle
import sys
import warnings

import pytest
import torch

from tests.cpu.conftest import kernels_of
from tests.decoder_families import TRAINED

SHAPE = 2, 9


class Rerun:
    """A graph on the CPU."""

    replays = 0
    together = 1

    def record(self, function):
        self.function = function
        self.results = function()
        return self.results

    def replay(self):
        Rerun.replays += 1
        with torch.enable_grad():
            new = self.function()
        for old, result in zip(*(found if isinstance(found, tuple) else (found,) for found in (self.results, new)), strict=True):
            if old is not None:
                old.data.copy_(result)


class Pool:
    def __init__(self, device):
        pass

    graph = staticmethod(Rerun)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def id_of(family):
    return "{}-layers_a_graph={}".format(*family)


QWEN3 = ("qwen3", 1), ("qwen3", 2)
# For tests of what stands between layers, whatever is in them.
one_family = pytest.mark.parametrize("family", QWEN3, ids=id_of, indirect=True)


@pytest.fixture(params=(*QWEN3, ("llama", 2), ("qwen2", 1)), ids=id_of)
def family(request):
    """The name of a family, and how many layers share a graph."""
    return request.param


@pytest.fixture
def tiny_model(family):
    """A function that makes a small model of the family."""
    return TRAINED[family[0]].tiny


@pytest.fixture
def package(family, monkeypatch, request):
    """The package that serves the family, with graphs on the CPU."""
    name, together = family
    loaded = request.getfixturevalue(TRAINED[name].package)
    module = importlib.import_module(f"{loaded.__name__}.shared.hf.capture")
    monkeypatch.setattr(module, "TOGETHER", together)
    monkeypatch.setattr(Rerun, "together", together)
    monkeypatch.setattr(module, "GraphPool", Pool)
    monkeypatch.setattr(module, "can_record", lambda device: True)
    Rerun.replays = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield loaded


def replays_of(call):
    """How many graphs ran during a call."""
    before = Rerun.replays
    call()
    return Rerun.replays - before


def batch(seed, shape=SHAPE):
    return torch.randint(1, 199, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0, shape=SHAPE, **options):
    ids = batch(seed, shape)
    return model(input_ids=ids, labels=ids, use_cache=False, **options).loss


def gradients(model, seed=0, **options):
    model.zero_grad()
    loss_of(model, seed, **options).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def captured(package, model, shape=SHAPE):
    """Both, with their graphs recorded. The other is the same model without."""
    plain = copy.deepcopy(model)
    package.kernelize(plain)
    package.capture(package.kernelize(model), *shape)
    for seed in range(2):
        gradients(model, seed, shape=shape)
    return model, plain


def compare(model, plain, *args, **options):
    """How many graphs ran in a step of a model whose gradients are those of another one."""
    before = Rerun.replays
    assert_equal(gradients(model, *args, **options), gradients(plain, *args, **options))
    return Rerun.replays - before


LAYERS = 2


def whole(layers=LAYERS):
    """The number of graphs of a training step."""
    return 2 * -(-layers // Rerun.together)


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
    for m in (model, plain):
        m.zero_grad()
        losses = [loss_of(m, seed) for seed in (5, 6)]
        sum(losses).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert replays_of(lambda: gradients(model)) == whole()


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
        monkeypatch.setattr(sys.modules[f"{package.__name__}.shared.hf.attention_choice"], name, lambda *tensors: True)
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


def test_gradient_checkpointing_keeps_it_off_and_says_so(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = gradients(plain)
    with pytest.warns(RuntimeWarning, match="gradient checkpointing"):
        assert replays_of(lambda: assert_equal(gradients(model), expected)) == 0
    model.gradient_checkpointing_disable()
    gradients(model)  # looked at anew: the layers have attributes now that they did not have
    assert replays_of(lambda: assert_equal(gradients(model), expected)) == whole()


def test_hooks_are_called(package, tiny_model):
    model, plain = captured(package, tiny_model())
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with pytest.warns(RuntimeWarning, match="hooks on a layer"):
        gradients(model)
    assert len(seen) == 1
    handle.remove()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    for _ in range(2):
        gradients(model)
    assert len(seen) >= 2, "a hook on a part of a layer"
    handle.remove()
    for _ in range(3):
        assert_equal(gradients(model), gradients(plain))


def first_norm(layer):
    """The norm of q, or the first one of a layer whose heads have none."""
    return next(module for name, module in layer.named_modules() if name.endswith("norm"))


def replace_weight(norm):
    norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, 3.0))


CHANGES = {
    "weights that moved": lambda model: setattr(
        model.model.layers[0].mlp.up_proj.weight, "data", model.model.layers[0].mlp.up_proj.weight * 2
    ),
    "another weight": lambda model: replace_weight(first_norm(model.model.layers[1])),
    "another epsilon": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
    "a frozen weight": lambda model: model.model.layers[0].mlp.up_proj.weight.requires_grad_(False),
    "another layer": lambda model: setattr(
        model.model.layers[0].mlp, "up_proj", torch.nn.Linear(model.config.hidden_size, model.config.intermediate_size)
    ),
    "a loaded state": lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_recorded_anew(package, tiny_model, change):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        torch.manual_seed(2)
        CHANGES[change](m)
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert 0 in counts[:2], "a pass is looked at: this one, or the next where graphs in front of the changed layer were replayed"
    assert counts[0] < whole() and counts[2:] == [whole()] * 2


def test_weights_that_are_written_in_place_need_no_new_graphs(package, tiny_model):
    model, plain = captured(package, tiny_model())
    for m in (model, plain):
        m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()})
    assert compare(model, plain) == whole()


def test_lora(package, tiny_model):
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        return model

    model, plain = captured(package, adapted(tiny_model()))
    assert compare(model, plain) == whole()
    for m in (model, plain):
        m.base_model.disable_adapter_layers()
        for parameter in m.parameters():
            parameter.requires_grad_(True)
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))


@pytest.mark.parametrize("change", (
    lambda layer: layer.scaling.update(default=3.0), lambda layer: layer.scaling.__setitem__("default", 0.0),
    lambda layer: layer.merged_adapters.append("default"),
), ids=("update", "zero", "merged"))
def test_a_container_that_is_changed_in_place(package, tiny_model, change):
    """PEFT keeps the scaling of each adapter in a dictionary, and the names of the merged ones in a list."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model, plain = captured(package, model)
    assert compare(model, plain) == whole()
    for m in (model, plain):
        m.base_model.model.requires_grad_(True)
    for seed in range(2):
        compare(model, plain, seed)
    assert compare(model, plain) == whole()
    for m in (model, plain):
        change(m.base_model.model.model.layers[-1].self_attn.q_proj)
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert counts[0] < whole() == counts[-1]


def test_frozen_layers(package, tiny_model):
    def frozen():
        model = tiny_model()
        for module in (model.model.embed_tokens, model.model.layers[0]):
            module.requires_grad_(False)
        return model

    model, plain = captured(package, frozen())
    assert compare(model, plain) == whole() - (Rerun.together == 1), "a frozen layer alone has no backward pass"


class Between(torch.nn.Module):
    """A decoder layer that changes what it hands on, or keeps it, or is left out, as a model's own forward may between its layers."""

    def __init__(self, layer, what):
        super().__init__()
        self.layer, self.what, self.kept = layer, what, None

    def forward(self, x, **kwargs):
        if self.what == "left out":
            return x
        output = self.layer(x, **kwargs)
        self.kept = output if self.what == "kept" else None
        if self.what == "changed":
            return output * 2
        if self.what == "changed in place":
            return output.mul_(2)
        return output


def between(model, number, what):
    """Puts a `Between` in a layer's place, or tells the one that is there."""
    if isinstance(model.model.layers[number], Between):
        model.model.layers[number].what = what
    else:
        model.model.layers[number] = Between(model.model.layers[number], what)


def gradients_with_kept(model, seed):
    """Those of the loss and of what each `Between` keeps."""
    model.zero_grad()
    loss = loss_of(model, seed)
    for layer in model.model.layers:
        if isinstance(layer, Between) and layer.kept is not None:
            loss = loss + layer.kept.square().mean()
            layer.kept = None
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


WHATS = "changed", "changed in place", "kept", "left out"


@one_family
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("number", range(4))
def test_what_stands_between_layers_when_they_are_looked_at(package, tiny_model, what, number):
    """Layers that do not follow each other at once share no graph."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        between(m, number, what)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in range(5):
            assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed))


@one_family
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("number", range(4))
def test_what_comes_between_captured_layers(package, tiny_model, what, number):
    """A model whose forward does something between its layers at some steps only: LayerDrop, say."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        between(m, number, "")
    for seed in range(3):
        found = replays_of(lambda seed=seed: assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed)))
    assert found == whole(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed, now in enumerate(("", what, "", "", what, what, "", "", "")):
            for m in (model, plain):
                between(m, number, now)
            assert_equal(gradients_with_kept(model, seed), gradients_with_kept(plain, seed))


def test_random_numbers_between_layers_share_no_graph(package, tiny_model):
    """With dropout in the attention a layer cannot run again to give the same."""
    model = package.capture(package.kernelize(tiny_model(attention_dropout=0.5)), *SHAPE)
    for seed in range(2):
        gradients(model, seed)
    assert replays_of(lambda: gradients(model)) == 2 * LAYERS


@pytest.mark.parametrize("name", ("position_embeddings", "attention_mask"))
def test_layers_with_arguments_of_their_own_share_no_graph(package, tiny_model, name):
    def own(model):
        class Own(torch.nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def forward(self, x, **kwargs):
                cos, sin = kwargs["position_embeddings"]
                mask = torch.zeros(SHAPE[0], 1, SHAPE[1], SHAPE[1])
                mask[..., 0, 1:] = -100.0
                kwargs[name] = {"position_embeddings": (cos * 0.5, sin), "attention_mask": mask}[name]
                return self.layer(x, **kwargs)

        model = package.kernelize(model)
        captured = package.capture(copy.deepcopy(model), *SHAPE)
        for m in (captured, model):
            m.model.layers[1] = Own(m.model.layers[1])
        return captured, model

    model, plain = own(tiny_model())
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    assert replays_of(lambda: gradients(model)) == 2 * LAYERS


@one_family
@pytest.mark.parametrize("number", range(5))
def test_a_change_of_a_later_layer(package, tiny_model, number):
    """The layers in front of it are replayed, those behind run as before, and the next passes are looked at and recorded anew."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=5)) for _ in range(2))
    package.capture(model, *SHAPE)
    for seed in range(3):
        gradients(model, seed)
    for m in (model, plain):
        m.model.layers[number].input_layernorm.variance_epsilon = 0.5
    counts = [compare(model, plain, seed) for seed in range(4)]
    assert counts[0] < whole(5) and counts[-1] == whole(5)


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
