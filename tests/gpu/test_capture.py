"""`capture` with real CUDA graphs: the same bits, in a Trainer too. Which passes are replayed at all: tests/cpu/capture."""

import contextlib
import copy
import functools
import gc
import sys
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.nf4 import in_nf4
from tests.capturing import assert_equal
from tests.models import losses_of, tiny_model

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHAPE = 2, 256


def batch(seed, shape=SHAPE):
    return torch.randint(1, 8192, shape, generator=torch.Generator().manual_seed(seed)).cuda()


def gradients(model, seed, shape=SHAPE, passes=1, **options):
    model.zero_grad()
    for number in range(passes):
        ids = batch(seed + number, shape)
        model(**{"labels": ids, **options}, input_ids=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@contextlib.contextmanager
def captured_and_plain(ops, **options):
    """A model whose passes of SHAPE are replayed by now, and the same without. options: of `kernelize` for the first."""
    model = tiny_model(torch.bfloat16, **SIZES).cuda()
    plain = ops.pack(ops.kernelize(copy.deepcopy(model)))
    model = ops.pack(ops.kernelize(model, **options))
    ops.capture(model, *SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for seed in range(2):
            gradients(model, seed)
        model.zero_grad()
        yield model, plain
    ops.reset()


@pytest.fixture
def pair(ops):
    with captured_and_plain(ops) as models:
        yield models


def launches_of_graphs(call):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if event.key == "cudaGraphLaunch")


def test_gradients_have_the_same_bits(pair):
    model, plain = pair
    for seed in range(3):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    assert launches_of_graphs(lambda: gradients(model, 0)) == 2 * 2, "five layers and four, forward and backward"
    assert launches_of_graphs(lambda: gradients(model, 0, (1, 100))) == 0


def test_a_reference_between_a_pass_and_its_backward_pass(pair):
    """Its graphs leave alone what the pass before it has saved."""
    model, plain = pair

    def preference(m, seed):
        m.zero_grad()
        ids = batch(seed)
        loss = m(input_ids=ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            reference = m(input_ids=batch(seed + 1), labels=ids, use_cache=False).loss
        (loss - reference).square().backward()
        return {"reference": reference, **{name: parameter.grad.clone() for name, parameter in m.named_parameters()}}

    for seed in range(4):
        assert_equal(preference(model, seed), preference(plain, seed))
    assert launches_of_graphs(lambda: preference(model, 0)) == 3 * 2


def test_adapters_over_four_bits_have_the_same_bits(ops):
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    models = []
    for _ in range(2):
        model = in_nf4(tiny_model(torch.bfloat16, **SIZES), "cuda").cuda()
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).train())
        ops.kernelize(models[-1])
    model, plain = models
    ops.capture(model, *SHAPE)
    for seed in range(4):
        assert_equal(gradients(model, seed), gradients(plain, seed))
    assert launches_of_graphs(lambda: gradients(model, 0)) == 2 * 2
    ops.reset()


def test_an_mlp_that_is_made_again_has_the_same_bits(ops):
    with captured_and_plain(ops, recompute_mlp=True) as (model, plain):
        for seed in range(3):
            assert_equal(gradients(model, seed), gradients(plain, seed))
        assert launches_of_graphs(lambda: gradients(model, 0)) == 2 * 2


def test_a_captured_model_that_is_garbage_when_another_is_recorded(ops, monkeypatch):
    """Where Python would collect it at that moment, its graphs were destroyed and the recording lost."""
    first = ops.kernelize(tiny_model(torch.bfloat16, **SIZES).cuda())
    ops.capture(first, *SHAPE)
    for seed in range(2):
        gradients(first, seed)
    first.itself = [first]  # which nothing but a collection of garbage takes apart
    del first
    graph = sys.modules[f"{ops.__name__}.shared.runtime.graphs"].Graph
    record = graph.record

    def recorded(self, function):
        def collected_first():
            if gc.isenabled():
                gc.collect()
            return function()

        return record(self, collected_first)

    monkeypatch.setattr(graph, "record", recorded)
    with captured_and_plain(ops) as (model, plain):
        assert_equal(gradients(model, 5), gradients(plain, 5))


def test_losses_that_the_caller_holds(ops):
    """Autograd's nodes of the parameters live on with them, and remember the default stream."""
    model = ops.kernelize(tiny_model(torch.bfloat16, **SIZES).cuda())
    plain, held = ops.kernelize(copy.deepcopy(model)), []
    ops.capture(model, *SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for seed in range(4):
            for each in (model, plain):
                each.zero_grad()
                held.append(each(input_ids=batch(seed), labels=batch(seed), use_cache=False).loss)
                held[-1].backward()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(found.grad, expected.grad)
    assert launches_of_graphs(lambda: gradients(model, 0)) == 2 * 2
    ops.reset()


def test_accumulated_gradients_have_the_same_bits(pair):
    model, plain = pair
    for seed in (3, 7):
        assert_equal(gradients(model, seed, passes=3), gradients(plain, seed, passes=3))


@pytest.mark.parametrize("labelled", (False, True), ids=("", "labelled"))
def test_padded_and_unpadded_batches_in_turn(ops, pair, labelled):
    """Where padding has labels its numbers are SDPA's, for whose masks nothing is recorded: such a batch runs as before, and says so."""
    model, plain = pair
    ops.kernelize(plain, unpad=False)  # as with `capture`: batches keep their shape
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        for seed in range(6):
            mask = torch.ones(SHAPE, dtype=torch.int64, device="cuda")
            mask[1, 100 + 20 * seed :] = 0
            padded = {"attention_mask": mask, "labels": batch(seed) if labelled else batch(seed).where(mask.bool(), -100)}
            with sdpa_kernel(SDPBackend.MATH) if labelled else contextlib.nullcontext():  # the others add dq up in any order
                assert_equal(gradients(model, seed, **padded), gradients(plain, seed, **padded))
            assert_equal(gradients(model, seed), gradients(plain, seed))
    assert ["no plan" in str(warning.message) for warning in said] == [True] * labelled
    assert launches_of_graphs(lambda: gradients(model, 5, **padded)) == (0 if labelled else 2 * 2)
    assert launches_of_graphs(lambda: gradients(model, 5)) == 2 * 2


def test_two_forward_passes_before_their_backward_passes(pair):
    for model in pair:
        model.zero_grad()
        sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (batch(1), batch(2))).backward()
    for found, expected in zip(*(model.parameters() for model in pair), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_what_comes_between_layers_of_one_graph(pair):
    """A loss of what a layer in the middle of a graph has returned: its layers run again, in the same bits."""
    kept = []

    class Keeps(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, **kwargs):
            kept.append(self.layer(x, **kwargs))
            return kept[-1]

    def gradients_with_kept(model, seed, used):
        model.zero_grad()
        ids = batch(seed)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss + kept.pop().float().square().mean() if used else loss).backward()
        kept.clear()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    for model in pair:
        model.model.layers[2] = Keeps(model.model.layers[2])
    for seed, used in enumerate((False, False, True, True, True, False)):
        assert_equal(*(gradients_with_kept(model, seed, used) for model in pair))


def test_weights_that_moved_are_recorded_anew(pair):
    """While gradients lie in the memory of the graphs that were, and that of another shape's."""
    model, plain = pair
    for seed in range(6):
        for m in pair:
            if seed in (1, 3):
                weight = m.model.layers[seed].mlp.up_proj.weight
                weight.data = weight.data * 2
        kept = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"].grad
        assert_equal(gradients(model, seed), gradients(plain, seed))
        del kept


def test_two_shapes_share_the_memory(ops, pair):
    model, plain = pair
    ops.capture(model, 1, 128)
    for seed in range(4):
        for shape in ((1, 128), SHAPE):
            assert_equal(gradients(model, seed, shape), gradients(plain, seed, shape))


def test_a_training_in_the_same_bits(ops, pair):
    batches = [batch(step % 4) for step in range(12)]
    losses = [losses_of(model, ops.AdamW(model.parameters(), lr=1e-3), batches, use_cache=False) for model in pair]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_dropout_draws_new_numbers(ops):
    model = ops.kernelize(tiny_model(torch.bfloat16, attention_dropout=0.3, **SIZES).cuda())
    ops.capture(model, *SHAPE)
    found = [gradients(model, 0)["model.layers.0.mlp.up_proj.weight"] for _ in range(4)]
    assert not torch.equal(found[2], found[3])
    ops.reset()


class Reads(torch.nn.Linear):
    """Has the host wait for a number, at which CUDA gives up a recording."""

    def forward(self, x):
        x.sum().item()
        return super().forward(x)


LOST, LATER = (1, 128), (1, 64)


@pytest.fixture
def given_up(ops):
    """A model with dropout in its attention that is replayed for SHAPE. CUDA gave up its recording for LOST, in the same pool of memory,
    after the attention of the first layer. The next one is for LATER."""
    model = ops.kernelize(tiny_model(torch.bfloat16, attention_dropout=0.3, **SIZES).cuda())
    for shape in (SHAPE, LOST, LATER):
        ops.capture(model, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            gradients(model, 0)
        attention = model.model.layers[0].self_attn
        attention.o_proj.__class__ = Reads
        gradients(model, 0, LOST)
        with pytest.warns(RuntimeWarning, match="the layers cannot be captured .*previous error during capture"):
            gradients(model, 0, LOST)
        attention.o_proj.__class__ = torch.nn.Linear
        yield model
    ops.reset()


def test_random_numbers_after_a_recording_that_cuda_gave_up(given_up):
    """PyTorch's, those of layers that run as before, and those of older and newer graphs."""
    torch.rand(1, device="cuda")
    for shape, graphs in ((LOST, 0), (SHAPE, 2 * 9), (LATER, 2 * 9)):
        found = [gradients(given_up, 0, shape)["model.layers.0.mlp.up_proj.weight"] for _ in range(4)]
        assert not torch.equal(found[2], found[3])
        assert launches_of_graphs(lambda shape=shape: gradients(given_up, 0, shape)) == graphs


def test_memory_after_a_recording_that_cuda_gave_up(given_up):
    """What another stream has used is free again when that is done with it. The allocator looks for it when it is asked for more, and only
    where no recording goes on."""

    def active():
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")
        return torch.cuda.memory_stats()["active_bytes.all.current"]

    before = active()
    used = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    used.record_stream(torch.cuda.Stream())
    del used
    assert active() < before + 2**28


def test_autocast_over_float32_weights(ops):
    model = ops.kernelize(tiny_model(**SIZES).cuda())
    plain = copy.deepcopy(model)
    ops.capture(model, *SHAPE)
    for seed in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            expected = gradients(plain, seed)
            found = gradients(model, seed)
        assert_equal(found, expected)
    ops.reset()


def test_memory_of_a_reset_model_is_free_again(ops, pair):
    model, _ = pair
    gradients(model, 0)
    model.zero_grad()
    held = torch.cuda.memory_allocated()
    ops.reset()
    gc.collect()
    weights = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    assert torch.cuda.memory_allocated() <= held - weights


def test_trainer(ops, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def trained(captures):
        model = ops.kernelize(tiny_model(**SIZES).cuda())
        if captures:
            ops.capture(model, 4, 128)
        ids = [batch(seed, (128,)).cpu() for seed in range(64)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, bf16=True, logging_steps=1,
            save_strategy="no", report_to=[], dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": i, "labels": i} for i in ids])
        trainer.train()
        ops.reset()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert trained(True) == trained(False)


def of_two_texts(seed, tokens, packs):
    """A batch of two texts of so many tokens in all, whose lengths the seed sets: in one row, or in two with padding."""
    first = int(torch.randint(tokens // 4, tokens // 2, (1,), generator=torch.Generator().manual_seed(seed)))
    if packs:
        ids = batch(seed, (1, tokens))
        positions = torch.cat((torch.arange(first), torch.arange(tokens - first)))[None]
        return {"input_ids": ids, "labels": ids, "position_ids": positions.cuda()}
    mask = (torch.arange(tokens - first) < torch.tensor((first, tokens - first))[:, None]).long().cuda()
    ids = batch(seed, tuple(mask.shape))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


@pytest.mark.parametrize("checkpoints", (False, True), ids=("plain", "checkpointed"))
@pytest.mark.parametrize("packs", (False, True), ids=("padded", "packed"))
def test_lengths_that_come_again_have_the_same_bits(ops, packs, checkpoints):
    """Without a shape, of other texts each time; the longest row is recorded last, and needs more room than the pool had."""
    model = tiny_model(torch.bfloat16, **SIZES).cuda()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = ops.kernelize(copy.deepcopy(model))
    ops.capture(ops.kernelize(model))

    def step(of, inputs):
        of.zero_grad()
        of(**inputs, use_cache=False).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in of.named_parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for seed in range(5):
            for tokens in (512, 768, 1024):
                inputs = of_two_texts(seed, tokens, packs)
                assert_equal(step(model, inputs), step(plain, inputs))
    for tokens in (512, 768, 1024):
        inputs = of_two_texts(9, tokens, packs)
        assert launches_of_graphs(functools.partial(step, model, inputs)) == 2 * 2
    ops.reset()
