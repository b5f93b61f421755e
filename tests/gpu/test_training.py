"""Training on the GPU: the losses of the kernelized model are those of the model as it is."""

import gc
import importlib
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models import Step, losses_of, packed_groups, tiny_model

STEPS = 20


def model_of(dtype=torch.bfloat16, **changes):
    """Four layers with the head_dim of the Qwen3 family."""
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    return tiny_model(dtype, **{**sizes, **changes}).cuda()


def tokens(batch, length, vocabulary=8192):
    """Text that can be learned: every sequence counts up from its own number."""
    start = torch.randint(1, vocabulary // 2, (batch, 1), generator=torch.Generator().manual_seed(3))
    return ((start + torch.arange(length)) % vocabulary).cuda()


def losses(model):
    return losses_of(model, torch.optim.AdamW(model.parameters(), lr=3e-4), (tokens(4, 256 + step) for step in range(STEPS)))


def test_losses_stay_within_half_a_percent(ops):
    expected = losses(model_of())
    model = ops.kernelize(model_of())
    found = losses(model)
    assert expected[-1] < 0.8 * expected[0], "the model learns nothing, so equal losses would say nothing"
    for step, (mine, theirs) in enumerate(zip(found, expected)):
        assert abs(mine - theirs) <= 5e-3 * theirs, f"step {step}: loss {mine}, expected {theirs}"


@pytest.mark.parametrize("rank", (0, 16), ids=("dense", "lora"))
@pytest.mark.parametrize("packed", (False, True), ids=("", "packed"))
@pytest.mark.parametrize("batch", ((1, 192), (2, 129), (4, 512)), ids=str)
@pytest.mark.parametrize("autocast", (False, True), ids=("", "autocast"))
def test_replayed_layers_give_the_same_bits(ops, monkeypatch, rank, packed, batch, autocast):
    """And take no more memory, in the pass that is recorded neither."""
    replay, recording = (importlib.import_module(f"{ops.__name__}.shared.runtime.{name}") for name in ("replay", "recording"))
    model = model_of(torch.float32 if autocast else torch.bfloat16)
    if packed:
        ops.pack(model)
    if rank:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))
    ops.kernelize(model)
    runs, run = [], replay.Plan.run
    monkeypatch.setattr(replay.Plan, "run", lambda plan, *args: runs.append(plan) or run(plan, *args))

    def step(seed):
        torch.manual_seed(seed)
        ids = torch.randint(1, 8192, batch, device="cuda")
        model.zero_grad()
        gc.collect()  # what an earlier test left, freed within a pass, would hide as much of the pass's memory
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # What is asked for: what is given may be up to 1 MiB more a tensor, by the blocks that happen to be free.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        with sdpa_kernel(SDPBackend.MATH):  # the others add dq up in any order
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {**found, "loss": loss.detach()}, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    kernel = next(iter(importlib.import_module(f"{ops.__name__}.shared.runtime.launch").tuner.kernels))
    kernel.forget()  # and with it what other tests recorded
    with monkeypatch.context() as in_full:
        in_full.setattr(replay, "ATTEMPTS", 0)
        step(0)  # loads the kernels
        expected = [step(seed) for seed in range(4)]
    kernel.forget()
    step(0)
    runs.clear()
    for seed, (wanted, memory) in enumerate(expected):
        found, used = step(seed)
        assert found.keys() == wanted.keys() and len(found) > 8
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{name} of pass {seed}"
        assert used <= 1.01 * memory, f"{used} bytes, {memory} without replays"
    layers = model.config.num_hidden_layers
    if batch != (2, 129):  # where the angles of one row are copied for each of the others
        products = list(recording.COMPUTATIONS.values())
        named = [[value for value in plan.body.__globals__.values() if callable(value)] for plan in runs]
        assert sum(any(value in products for value in values) for values in named) >= 3 * 4 * layers


@pytest.mark.parametrize("way", ("apply", "apply without the decoder layer", "kernelize"))
def test_gradients_of_a_step_in_fp32(ops, way):
    ids = tokens(2, 129)
    model = model_of(torch.float32)
    expected = Step(model, input_ids=ids, labels=ids)
    try:
        if way == "kernelize":
            ops.kernelize(model)
        else:
            ops.apply(decoder_layer=way == "apply")
        Step(model, input_ids=ids, labels=ids).assert_same(expected, 10)
    finally:
        ops.reset()


def test_generates_the_same_tokens(ops):
    model = model_of(torch.float32).eval()
    prompt = tokens(2, 9)
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
    ops.kernelize(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), expected)


def test_evaluation_without_logits(ops):
    """The loss of the model as it is, whose logits are rounded to bf16."""
    model = model_of().eval()
    ids = tokens(4, 300)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
        ops.kernelize(model)
        found = model(input_ids=ids, labels=ids, skip_logits=True)
        assert found.logits is None and abs(found.loss - expected) <= 5e-3 * expected
        scaled = model(input_ids=ids, labels=ids, skip_logits=True, lse_square_scale=1.0, return_z_loss=True)
        assert abs(scaled.loss - scaled.z_loss - found.loss) <= 1e-4 * scaled.loss


def test_warm_up_loads_what_a_step_needs(ops):
    model = ops.kernelize(model_of())
    ops.warmup_all_kernels(model)
    ops.warmup_all_kernels()
    ids = tokens(1, 64)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_packed_weights_give_the_same_step(ops, dtype):
    ids = tokens(2, 301)
    exact = Step(model_of(torch.float64), input_ids=ids, labels=ids)
    plain = Step(model_of(dtype), input_ids=ids, labels=ids)
    packed = Step(ops.kernelize(ops.pack(model_of(dtype))), input_ids=ids, labels=ids)
    packed.assert_as_exact_as(plain, exact)


def test_packed_weights_have_storages_of_their_own(ops, tmp_path):
    """tests/cpu/test_saving.py has every way to save; here is what CUDA's memory adds."""
    from safetensors.torch import load_model, save_model

    ids, model = tokens(2, 301), ops.kernelize(ops.pack(model_of(torch.bfloat16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    for tensors in (list(model.parameters()), [parameter.grad for parameter in model.parameters()]):
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    save_model(model, tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for load in (lambda m: load_model(m, tmp_path / "model.safetensors"), lambda m: m.load_state_dict(torch.load(tmp_path / "state.pt"))):
        other = ops.pack(model_of(torch.bfloat16))
        load(other)
        assert all(all(packed_groups(ops, layer)) for layer in other.model.layers)
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_packed_memory_lives_as_long_as_one_of_its_weights(ops):
    model = ops.pack(model_of(torch.bfloat16))
    side_by_side, attention = importlib.import_module(f"{ops.__name__}.shared.ops.neighbours").side_by_side, model.model.layers[0].self_attn
    weights = [linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    block, weight = weakref.ref(side_by_side(weights)), weights[1].detach()
    expected = weight.clone()
    del model, attention, weights
    gc.collect()
    noise = torch.full((2**26,), torch.nan, device="cuda")
    assert torch.equal(weight, expected) and noise.isnan().all()
    allocated = torch.cuda.memory_allocated()
    del weight
    assert block() is None and torch.cuda.memory_allocated() <= allocated - 4096 * 1024 * 2  # q, k and v: [4096, 1024] in bf16
