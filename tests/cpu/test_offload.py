"""Checkpoints in the host's memory: the same gradients bit for bit, nothing read before its copy has ended, and two layers' tensors on the
device at most. The copies of a GPU's stream are put off here until somebody waits for them."""

import functools
import gc
import importlib
import sys
import types
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.checkpoints import FLASH, REENTRANT, OnTheHost, assert_equal, gradients, with_one_operator
from tests.compile_checks import with_adapters
from tests.models import random_tokens, tiny_model, tiny_qwen3_moe
from tests.modes import Operators

LAYERS = 4
use_count = torch._C._storage_Use_Count


def module_of(package, name):
    return importlib.import_module(f"{package.__name__}.shared.{name}")


class Later:
    """Stands in for a lane: a copy runs when somebody waits for it, until then its target holds other numbers. Of a copy whose source or
    target nobody holds any more, the memory of a GPU would be somebody else's by then: `lost` counts these."""

    def __init__(self):
        self.given, self.done, self.copied, self.lost = [], 0, 0, 0

    def mark(self):
        return len(self.given)

    def run(self, copies, after):
        assert after == len(self.given), "nothing was given meanwhile"
        for to, _ in copies:
            torch.empty(0, dtype=torch.uint8).set_(to.untyped_storage()).fill_(0xAB)
        self.given.append([(to.detach(), source.detach()) for to, source in copies])  # which hold no tensor that they are views of
        return len(self.given)

    def wait(self, point):
        while self.done < point:
            copies = self.given[self.done]
            for side in zip(*copies, strict=True):
                storages = {tensor.untyped_storage()._cdata for tensor in side}
                if len(storages) < len(side):  # the device's: the host's are one for each piece
                    self.lost += use_count(*storages) <= len(side) + 1  # Python's object of the storage counts too
            for to, source in copies:
                to.copy_(source)
                self.copied += source.numel()
            self.given[self.done] = copies = to = source = side = None
            self.done += 1

    def stream(self):
        return 0

    def hold(self, tensor):
        self.wait(len(self.given))


@pytest.fixture
def lane(qwen3, monkeypatch):
    lane, memory = Later(), module_of(qwen3, "runtime.host_memory")
    monkeypatch.setattr(memory, "lane_of", lambda device: lane)
    monkeypatch.setattr(memory, "PIECE", 1000)  # several of a tensor, and an odd last one
    return lane


def model_of(package, offload, keep=False, reentrant=False, lora=False, **changes):
    model = tiny_model(num_hidden_layers=LAYERS, **{**with_one_operator(), **changes})
    model = with_adapters(model, lora_dropout=0.1) if lora else model
    model = package.kernelize(model, keep_attention=keep, offload=offload)
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model.train()


def layers_of(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


@REENTRANT
@pytest.mark.parametrize("keep", (False, True), ids=("", "keep_attention"))
@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
def test_gradients_are_those_of_plain_checkpoints(qwen3, lane, reentrant, keep, lora):
    ids = random_tokens(2, 17)
    expected = gradients(model_of(qwen3, False, keep, reentrant, lora), input_ids=ids, labels=ids)
    assert not lane.copied
    model = model_of(qwen3, True, keep, reentrant, lora)
    with warnings.catch_warnings(), Operators(FLASH) as runs:
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):
            assert_equal(gradients(model, input_ids=ids, labels=ids), expected)
    assert runs.count == 2 * LAYERS * (1 if keep else 2), "attention runs once where it is kept"
    config = model.config
    a_token = 4 * (config.hidden_size + keep * config.num_attention_heads * (config.head_dim + 1))
    assert lane.copied == 2 * (2 * LAYERS - 1) * ids.numel() * a_token, "out, and back but for the last layer's, which is there"
    assert not lane.lost


@REENTRANT
def test_what_is_on_the_device(qwen3, lane, reentrant):
    """After the forward pass the last layer's input alone, and never more than two."""
    ids, counts = random_tokens(2, 17), {}
    for offload in (False, True):
        model, storages, most = model_of(qwen3, offload, reentrant=reentrant), [], []

        def see(module, args, storages=storages, most=most):
            if torch._C._current_graph_task_id() == -1:
                storages.append(args[0].untyped_storage())
            else:
                away = module_of(qwen3, "runtime.host_memory").Away
                most.append(sum(each.coming is not None for each in gc.get_objects() if isinstance(each, away)))

        for layer in layers_of(model):
            layer.register_forward_pre_hook(see)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        counts[offload] = [use_count(storage._cdata) > 1 for storage in storages]
        loss.backward()
        if offload:
            assert most == [1] * (LAYERS - 1) + [0], "the layer in front of the one that runs"
    assert counts == {False: [True] * LAYERS, True: [False] * (LAYERS - 1) + [True]}


def test_apply_tells_classes_and_reset_takes_it_back(qwen3, lane):
    ids, model = random_tokens(2, 17), tiny_model(num_hidden_layers=LAYERS).train()
    model.gradient_checkpointing_enable()
    base, name = sys.modules["transformers.modeling_layers"].GradientCheckpointingLayer, "_gradient_checkpointing_func"
    qwen3.apply(offload=True)
    try:
        for offload in (True, False, True):
            qwen3.apply(offload=offload)
            before = lane.copied
            gradients(model, input_ids=ids, labels=ids)
            assert (lane.copied > before) == offload
        assert name in vars(base)
    finally:
        qwen3.reset()
    assert name not in vars(base) and layers_of(model)[0]._gradient_checkpointing_func
    before = lane.copied
    gradients(model, input_ids=ids, labels=ids)
    assert lane.copied == before


def test_models_that_were_not_told_are_left_alone(qwen3, lane):
    ids, told = random_tokens(2, 17), model_of(qwen3, True)
    gradients(model_of(qwen3, False), input_ids=ids, labels=ids)
    assert not lane.copied
    told.gradient_checkpointing_disable()
    gradients(told, input_ids=ids, labels=ids)
    told.gradient_checkpointing_enable()
    with torch.no_grad():
        told(input_ids=ids)
    assert not lane.copied


WAYS = "transformers' offload", "every second layer", "Unsloth's", "hooks around", "a checkpoint around", "autocast"


@pytest.mark.parametrize("way", WAYS)
def test_with_other_ways_of_checkpointing(qwen3, lane, way):
    ids, found = random_tokens(2, 17), []

    def run(model):
        step = functools.partial(gradients, model, input_ids=ids, labels=ids)
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return step()
        if way == "hooks around":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
                return step()
        if way == "a checkpoint around":
            embedded = model.model.embed_tokens(ids)
            run_decoder = lambda x: model.model(inputs_embeds=x, use_cache=False).last_hidden_state  # noqa: E731
            checkpoint(run_decoder, embedded, use_reentrant=False).square().sum().backward()
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return step()

    for offload in (False, True):
        model = model_of(qwen3, offload)
        if way == "transformers' offload" and offload:  # without ours it wants a GPU
            model.gradient_checkpointing_enable(offload=True)
        if way == "every second layer":
            model.gradient_checkpointing_enable(every_n_layers=2)
        if way == "Unsloth's":
            for layer in layers_of(model):
                layer._gradient_checkpointing_func = OnTheHost.apply
        found.append(run(model))
    assert_equal(*found)
    size = ids.numel() * 4 * model.config.hidden_size
    layers = {"every second layer": LAYERS // 2, "Unsloth's": 0}.get(way, LAYERS)
    if layers and way != "a checkpoint around":
        assert lane.copied == (2 * layers - 1) * size, "once"


@REENTRANT
@pytest.mark.parametrize("keep", (False, True), ids=("", "keep_attention"))
def test_passes_that_overlap(qwen3, lane, keep, reentrant):
    """Accumulation, two passes ahead of their backward passes in either order, and one that never gets a backward pass."""
    first, second = random_tokens(2, 17), random_tokens(1, 9)

    def run(offload):
        model = model_of(qwen3, offload, keep, reentrant)
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (first, second, first)]
        losses[1].backward()
        (2 * losses[0]).backward()
        del losses
        gradients_of = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (first, second)]
        (gradients_of[0] + 2 * gradients_of[1]).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(run(True), run(False))
    assert not lane.lost


def test_a_second_backward_pass(qwen3, lane):
    def run(offload):
        ids, model = random_tokens(2, 17), model_of(qwen3, offload)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("where", ("forward", "backward"))
def test_an_error_in_the_middle_leaves_nothing_behind(qwen3, lane, where):
    ids, model = random_tokens(2, 17), model_of(qwen3, True, keep=True)
    expected = gradients(model_of(qwen3, False, keep=True), input_ids=ids, labels=ids)
    calls = []

    def fail(*_):
        calls.append(torch._C._current_graph_task_id() != -1)
        if calls.count(where == "backward") == 2:
            raise KeyError("no memory")

    hook = layers_of(model)[2 if where == "forward" else 1].register_forward_pre_hook(fail)
    hooks = [hook, layers_of(model)[3 if where == "backward" else 1].register_forward_pre_hook(fail)]
    with pytest.raises(KeyError):
        gradients(model, input_ids=ids, labels=ids)
    for hook in hooks:
        hook.remove()
    gc.collect()
    away = module_of(qwen3, "runtime.host_memory").Away
    assert not [each for each in gc.get_objects() if isinstance(each, away)]
    assert_equal(gradients(model, input_ids=ids, labels=ids), expected)
    assert not lane.lost


def test_an_input_that_is_written_to_is_refused_as_pytorch_refuses_it(qwen3, lane):
    ids, model = random_tokens(2, 17), model_of(qwen3, True)
    layers_of(model)[1].register_forward_hook(lambda module, args, output: [args[0].detach().add_(1)] and None)
    with pytest.raises(RuntimeError, match="written to in place"):
        gradients(model, input_ids=ids, labels=ids)


def test_experts(qwen3, lane):
    ids, found = random_tokens(2, 17), []
    for offload in (False, True):
        model = qwen3.kernelize(tiny_qwen3_moe(num_hidden_layers=3), offload=offload).train()
        model.gradient_checkpointing_enable()
        found.append(gradients(model, input_ids=ids, labels=ids))
    assert_equal(*found)
    assert lane.copied and not lane.lost


def broken(method, text, by):
    """The class `Away` with a text of one of its methods replaced."""

    def plant(memory, monkeypatch):
        import inspect
        import textwrap

        source = textwrap.dedent(inspect.getsource(getattr(memory.Away, method)))
        assert source.count(text) == 1
        space = dict(vars(memory))
        exec(source.replace(text, by), space)
        monkeypatch.setattr(memory.Away, method, space[method])

    return plant


PLANTED = {
    "gone before its copy has ended": broken("settle", "self.lane.wait(self.left)", "pass"),
    "read before it is back": broken("take", "self.lane.wait(self.back)", "pass"),
    "a freed one is forgotten": broken("__del__", "self.lane.hold(tensor)", "pass"),
    "what nobody came for is forgotten": broken("forget", "self.lane.hold(self.coming)", "pass"),
    "the last piece is left out": broken("_copies", "zip(self.blocks, ", "zip(self.blocks[:-1], "),
}


@pytest.mark.parametrize("error", (None, *PLANTED))
def test_planted_errors_are_noticed(qwen3, lane, monkeypatch, error):
    memory = module_of(qwen3, "runtime.host_memory")
    if error:
        PLANTED[error](memory, monkeypatch)
    x = torch.randn(5, 7, 31)

    def trip(start=lambda away: away.settle()):
        nonlocal x
        away, numbers = memory.Away(x.transpose(0, 1).clone()), x.transpose(0, 1).clone()
        start(away)
        return torch.equal(away.take(), numbers)

    def asked_twice(away):
        away.settle()
        away.ask()
        away.forget()
        lane.given.append(())  # what follows is asked for anew

    fine = trip() and trip(asked_twice)
    away = memory.Away(x.clone())
    del away
    away = memory.Away(x.clone())
    away.settle()
    away.ask()
    del away
    lane.wait(len(lane.given))
    assert (fine and not lane.lost) == (error is None)


def test_pinned_memory_is_bounded(qwen3, monkeypatch):
    """On a machine without a GPU nothing can be pinned: what would be asked of torch is."""
    memory, asked = module_of(qwen3, "runtime.host_memory"), []
    empty = torch.empty

    def pinning(*sizes, pin_memory=False, **options):
        asked.append((*sizes, pin_memory))
        if sizes[0] == 13 and pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(*sizes, **options)

    monkeypatch.setattr(memory, "torch", types.SimpleNamespace(**{**vars(torch), "empty": pinning}))
    monkeypatch.setattr(memory, "pinned", memory.Pinned())
    assert memory._block(100, 200)[1] == 128
    with pytest.warns(RuntimeWarning, match="offload: 0.0 GiB are pinned already, and no more may be, so .* goes to pageable memory"):
        assert memory._block(100, 200)[1] == 0
    assert memory.pinned.used == 128 and asked == [(100, True), (100, False)]
    memory.pinned.give(128)
    assert memory._block(100, 200)[1] == 128
    memory.pinned.said = False
    with pytest.warns(RuntimeWarning, match=r"the system pins no more memory \(CUDA error: out of memory\)"):
        assert memory._block(13, None)[1] == 0
    assert memory.pinned.used == 128
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    memory.pinned.limit = None
    assert memory._block(7, None)[1] == 8, "where the system does not say, until it refuses"


def test_free_memory_is_shared_by_the_ranks_of_a_host(qwen3, monkeypatch):
    memory = module_of(qwen3, "runtime.host_memory")
    files = {"/proc/meminfo": 1000, "/sys/fs/cgroup/memory.max": 600_000, "/sys/fs/cgroup/memory.current": 100_000}
    monkeypatch.setattr(memory, "_read", lambda path, name="": files.get(path))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory.free_memory() == 500_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory.free_memory() == 62_500
    files.clear()
    assert memory.free_memory() is None


@pytest.mark.parametrize("offload", (-1, 0, "cpu", None, float("nan")))
def test_other_values_are_refused(qwen3, offload):
    for call in (functools.partial(qwen3.kernelize, tiny_model()), qwen3.apply):
        with pytest.raises(ValueError, match="offload is .*, expected True, False, or the GiB of host memory that may be pinned"):
            call(offload=offload)


def test_explain_says_whether_it_happens(qwen3):
    model = model_of(qwen3, 1.5)
    rows = {row.part: row for row in qwen3.explain(model).rows}
    assert rows["checkpoints in host memory"].fused and rows["checkpoints in host memory"].count == LAYERS
    model.gradient_checkpointing_disable()
    row = {row.part: row for row in qwen3.explain(model).rows}["checkpoints in host memory"]
    assert (row.fused, row.code, row.reason) == (False, "offload", "gradient checkpointing is off") and "enable" in row.advice
    assert "checkpoints in host memory" not in str(qwen3.explain(model_of(qwen3, False)))
