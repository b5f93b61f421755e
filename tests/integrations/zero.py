"""DeepSpeed's ZeRO in two processes: gradients, training and checkpoints are those of one process without it.

Stages 1 and 2 leave every process whole weights, and decoder layers run fused. Stage 3 leaves each a part; a module gets its weights when
it is called, so the layers are taken apart only where DeepSpeed was told to gather whole ones (`leaf`).
"""

import importlib
import os

import pytest
import torch

from tests.integrations.common import FACTOR, WAYS, batch, install, model_on
from tests.integrations.ranks import WORLD, in_each_process
from tests.integrations.sharding import LENGTH, ROWS, assert_fused, assert_gradients, rows_of
from tests.models import Step
from tests.tolerances import assert_close

CODES = "over weights in eight bits"
ZERO_1, ZERO_2, ZERO_3 = (pytest.param(stage, False, id=f"ZeRO-{stage}") for stage in (1, 2, 3))
ZERO_3_OF_LAYERS = pytest.param(3, True, id="ZeRO-3 of layers")
STAGES = pytest.mark.parametrize(("stage", "leaf"), [ZERO_1, ZERO_2, ZERO_3, ZERO_3_OF_LAYERS])
SHARDED = pytest.mark.parametrize(("stage", "leaf"), [ZERO_3, ZERO_3_OF_LAYERS])


@pytest.fixture(autouse=True)
def deepspeed_is_here():
    if not os.environ.get("DS_ACCELERATOR") and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed", reason="deepspeed is not installed, and ZeRO goes untested: pip install '.[dev]'")


def deepspeed_of(here):
    """DeepSpeed in this process, with PyTorch's own communication only."""
    os.environ["DS_ACCELERATOR"] = here.device
    import deepspeed

    # Communication of processes on one CPU, compiled at its first use, in minutes.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo" if here.device == "cpu" else "nccl")  # takes what is initialised already
    return deepspeed


def config_of(stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": ROWS // WORLD,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        **changes,
    }


def decoder_layers(model):
    return [module for module in model.modules() if type(module).__name__ == "Qwen3DecoderLayer"]


def shard(here, model, stage, leaf=False, lr=1e-3, **changes):
    """DeepSpeed's engine around a model. leaf: gather whole decoder layers."""
    deepspeed = deepspeed_of(here)
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [type(decoder_layers(model)[0])])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage, **changes))[0]


def gradients_of(here, model, prefix=""):
    """The whole gradients of a backward pass, on every process."""
    full = deepspeed_of(here).utils.safe_get_full_grad
    found = {name.removeprefix(prefix): full(p) for name, p in model.named_parameters() if p.requires_grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def run(here, engine, fused, **inputs):
    return assert_fused(here, engine, **inputs) if fused else engine(**inputs)


def check_gradients(here, how, stage, leaf, changes, checkpointing, adapted=False):
    """Each process has half of the batch. DeepSpeed takes the mean of the gradients, so the sums are twice that."""
    from tests.integrations.adapters import PROJECTIONS, lora

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)

    def make():
        made = model_on(device, **changes)
        if adapted == CODES:
            here.qwen3.eight_bits(made.requires_grad_(False))
        return lora(made, target_modules=PROJECTIONS) if adapted else made

    expected = Step(make(), **inputs)
    model = install(here.qwen3, make(), how)
    if adapted and (leaf or checkpointing):  # or DeepSpeed takes the weights away from transformers' layers too, before their backward pass
        model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        model.config.use_cache = False
    engine = shard(here, model, stage, leaf, lr=0.0)
    mine = rows_of(inputs, here.rank)
    for _ in range(2):  # the second step knows in which order the first called the modules
        output = run(here, engine, stage < 3 or leaf, **mine)
        assert output.logits is None  # also where the head is gathered on its own
        engine.backward(2 * output.loss)
        assert_gradients(gradients_of(here, model), expected.gradients, here.device)
        engine.step()
    if stage == 3:
        assert all(p.numel() == 0 for p in model.parameters()), "the weights were never sharded"


def check_made_sharded(here, folder, how):
    """from_pretrained under ZeRO-3 makes a model of which no process ever has all weights."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed_of(here)
    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    expected = Step(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train(), **inputs)
    kept = HfDeepSpeedConfig(config_of(3, train_batch_size=ROWS))
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    finally:
        del kept
    assert all(p.numel() == 0 for p in model.parameters())
    engine = shard(here, install(here.qwen3, model, how), 3)
    output = engine(**rows_of(inputs, here.rank))
    assert output.logits is None
    engine.backward(2 * output.loss)
    assert_gradients(gradients_of(here, model), expected.gradients, here.device)


@pytest.mark.integration("DeepSpeed: ZeRO-1, ZeRO-2, ZeRO-3")
@STAGES
def test_gradients_under_zero(ranks, stage, leaf):
    ranks.run(check_gradients, "kernelize", stage, leaf, {}, None)


@pytest.mark.parametrize("how", sorted({*WAYS} - {"kernelize"}))
@pytest.mark.parametrize(("stage", "leaf"), [ZERO_2, ZERO_3_OF_LAYERS])
def test_other_ways_under_zero(ranks, how, stage, leaf):
    ranks.run(check_gradients, how, stage, leaf, {}, None)


@pytest.mark.integration("DeepSpeed: tied embeddings")
@SHARDED
def test_tied_embeddings_under_zero(ranks, stage, leaf):
    ranks.run(check_gradients, "kernelize", stage, leaf, {"tie_word_embeddings": True}, None)


@pytest.mark.integration("DeepSpeed: gradient checkpointing, whole models and LoRA")
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
@SHARDED
def test_checkpointing_under_zero(ranks, stage, leaf, checkpointing, adapted):
    ranks.run(check_gradients, "kernelize", stage, leaf, {}, checkpointing, adapted)


@pytest.mark.integration("DeepSpeed: LoRA", "DeepSpeed: LoRA over weights in eight bits")
@pytest.mark.parametrize("adapted", [True, CODES], ids=["", CODES])
@pytest.mark.parametrize(("stage", "leaf"), [ZERO_2, ZERO_3, ZERO_3_OF_LAYERS])
def test_lora_under_zero(ranks, stage, leaf, adapted):
    ranks.run(check_gradients, "kernelize", stage, leaf, {}, None, adapted)


@pytest.mark.integration("DeepSpeed: options of the loss")
@pytest.mark.parametrize("stage", [2, 3])
@in_each_process
def test_options_of_the_loss_under_zero(here, stage):
    """What the loss returns beside itself passes through the hooks of the head."""
    device = here.own_device
    mine = rows_of(batch(device, ROWS, LENGTH), here.rank)
    options = {"return_z_loss": True, "return_token_accuracy": True, "lse_square_scale": 1e-3}
    expected = here.qwen3.kernelize(model_on(device))(**mine, **options)
    found = shard(here, here.qwen3.kernelize(model_on(device)), stage)(**mine, **options)
    assert found.logits is None
    for name in ("loss", "z_loss", "token_accuracy"):
        assert_close(found[name], expected[name], torch.float32, name, FACTOR[here.device])


@pytest.mark.integration("DeepSpeed: clipping, optimizer steps, checkpoints")
@pytest.mark.parametrize(("stage", "leaf"), [ZERO_2, ZERO_3, ZERO_3_OF_LAYERS])
@in_each_process
def test_training_under_zero(here, tmp_path, stage, leaf):
    """Three steps with clipping; then logits, the model written and read again, and DeepSpeed's own checkpoint."""
    from transformers import AutoModelForCausalLM

    device = here.own_device
    inputs = batch(device, ROWS, LENGTH)
    mine = rows_of(inputs, here.rank)
    plain = model_on(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):
        plain(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    expected = plain.eval()(input_ids=inputs["input_ids"]).logits

    def assert_trained(logits, what):
        assert_close(logits, expected, torch.float32, what, 1000 * FACTOR[here.device])

    engine = shard(here, install(here.qwen3, model_on(device)), stage, leaf, gradient_clipping=1.0)
    for _ in range(3):
        engine.backward(2 * engine(**mine).loss)
        engine.step()
    with torch.no_grad():
        engine.eval()
        assert_trained(engine(input_ids=inputs["input_ids"]).logits, "logits")
    state = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
    engine.save_checkpoint(f"{tmp_path}/checkpoint")
    if here.rank == 0:
        engine.module.save_pretrained(f"{tmp_path}/model", state_dict=state)
    torch.distributed.barrier()
    read = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/model", dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        assert_trained(read(input_ids=inputs["input_ids"]).logits, "logits of the written model")
    other = shard(here, install(here.qwen3, model_on(device)), stage, leaf)
    assert other.load_checkpoint(f"{tmp_path}/checkpoint")[0]
    with torch.no_grad():
        other.eval()
        assert_trained(other(input_ids=inputs["input_ids"]).logits, "logits of the checkpoint")


@pytest.mark.integration("DeepSpeed: from_pretrained under ZeRO-3")
@pytest.mark.parametrize("how", ["apply", "kernelize"])
def test_a_model_made_sharded(ranks, device_type, how, tmp_path):
    model_on(device_type).save_pretrained(tmp_path)
    ranks.run(check_made_sharded, str(tmp_path), how)


@pytest.mark.parametrize("leaf", [False, True])
@in_each_process
def test_zero_3_is_explained(here, leaf):
    model = here.qwen3.kernelize(model_on(here.own_device))
    engine = shard(here, model, 3, leaf)
    rows = {row.part: row for row in here.qwen3.explain(engine).rows}
    assert rows["loss without logits"].fused
    if leaf:
        assert rows["o_proj"].fused and "decoder layer" not in rows
    else:
        assert "ZeRO-3" in rows["decoder layer"].reason and "set_z3_leaf_modules" in rows["decoder layer"].advice


@pytest.mark.integration("Trainer: under DeepSpeed's ZeRO-1, ZeRO-2, ZeRO-3")
@STAGES
@in_each_process
def test_trainer_under_zero(here, tmp_path, stage, leaf):
    """The Trainer with a configuration of DeepSpeed: losses and gradient norms of the plain model under the same."""
    from accelerate.state import AcceleratorState, PartialState

    from tests.integrations.trainers import run as train

    deepspeed_of(here)
    config = config_of(stage, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto")
    if leaf:
        config["zero_optimization"]["leaf_module"] = {"classes": ["transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer"]}
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "deepspeed": config}
    before = dict(os.environ)
    try:
        runs = []
        for ours in (False, True):
            model = model_on(here.device)
            runs.append(train("hf", install(here.qwen3, model) if ours else model, tmp_path, here.device, evaluate=True, **options))
            AcceleratorState._reset_state(reset_partial_state=True)
    finally:
        PartialState._reset_state()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    expected, found = runs
    for ours, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert len(ours) == 3 and ours == pytest.approx(theirs, rel=1e-4)
    assert found.evaluation["eval_loss"] == pytest.approx(expected.evaluation["eval_loss"], rel=1e-4)
