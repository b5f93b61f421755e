"""A packed model that was trained, through whatever saves models: every value comes back bit for bit, packed or not."""

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.models import packed_groups, random_tokens, tiny_model


def storages(tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def is_packed(qwen3, model):
    """Whether all groups of a model's weights lie side by side; False when none does."""
    found = {group for layer in model.model.layers for group in packed_groups(qwen3, layer)}
    assert len(found) == 1
    return found.pop()


def train(model, optimizer=None):
    """One step, which changes every parameter."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # 1e-8 is nothing in fp16
    tokens = random_tokens(2, 17)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


class TorchSave:
    def save(model, folder):
        torch.save(model.state_dict(), folder / "state.pt")

    def load(model, folder):
        model.load_state_dict(torch.load(folder / "state.pt"))


class SafetensorsFile:
    def save(model, folder):
        from safetensors.torch import save_file

        save_file(model.state_dict(), folder / "state.safetensors")

    def load(model, folder):
        from safetensors.torch import load_file

        model.load_state_dict(load_file(folder / "state.safetensors"))


class SafetensorsModel:
    def save(model, folder):
        from safetensors.torch import save_model

        save_model(model, folder / "model.safetensors")

    def load(model, folder):
        from safetensors.torch import load_model

        assert load_model(model, folder / "model.safetensors") == (set(), [])


class Pretrained:
    def save(model, folder):
        model.save_pretrained(folder)

    def load(model, folder):
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).state_dict())


class AccelerateState:
    safe = True

    @classmethod
    def save(cls, model, folder):
        found = accelerator()
        found.prepare(model)
        found.save_state(folder, safe_serialization=cls.safe)

    @classmethod
    def load(cls, model, folder):
        found = accelerator()
        found.prepare(model)
        found.load_state(folder)


class AccelerateStatePickled(AccelerateState):
    safe = False


class AccelerateModel:
    def save(model, folder):
        found = accelerator()
        found.save_model(found.prepare(model), folder)

    def load(model, folder):
        from accelerate import load_checkpoint_in_model

        load_checkpoint_in_model(model, folder, strict=True)


class HubModel:
    def save(model, folder):
        from huggingface_hub import save_torch_model

        save_torch_model(model, folder)

    def load(model, folder):
        from huggingface_hub import load_torch_model

        load_torch_model(model, folder, strict=True)


class HubStateDict:
    def save(model, folder):
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(model.state_dict(), folder, max_shard_size="20KB")

    load = HubModel.load


class DistributedCheckpoint:
    def save(model, folder):
        import torch.distributed.checkpoint as checkpoint

        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")

    def load(model, folder):
        import torch.distributed.checkpoint as checkpoint

        checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp")


SAVERS = (
    TorchSave, SafetensorsFile, SafetensorsModel, Pretrained, AccelerateState, AccelerateStatePickled, AccelerateModel, HubModel,
    HubStateDict,
    DistributedCheckpoint,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.__name__)
def test_every_value_comes_back(qwen3, tmp_path, saver, dtype):
    model = qwen3.kernelize(qwen3.pack(tiny_model(dtype)))
    train(model)
    expected = values(model)
    saver.save(model, tmp_path)
    assert_equal(values(model), expected)
    assert is_packed(qwen3, model)
    for packed in (False, True):
        fresh = tiny_model(dtype)
        if packed:
            qwen3.pack(fresh)
        assert not torch.equal(fresh.model.layers[1].self_attn.k_proj.weight, expected["model.layers.1.self_attn.k_proj.weight"])
        saver.load(fresh, tmp_path)
        assert_equal(values(fresh), expected)
        if saver is not AccelerateModel:  # puts new tensors in the place of the old ones
            assert is_packed(qwen3, fresh) == packed


def test_no_two_parameters_share_a_storage(qwen3):
    model = qwen3.pack(tiny_model(torch.bfloat16))
    assert is_packed(qwen3, model)
    parameters = list(model.parameters())
    assert len(set(storages(parameters))) == len(parameters)
    for parameter in parameters:
        storage = parameter.untyped_storage()
        assert storage.data_ptr() == parameter.data_ptr() and parameter.storage_offset() == 0
        assert storage.nbytes() == parameter.nbytes


def test_one_weight_is_saved_alone(qwen3, tmp_path):
    def size(weight):
        file = io.BytesIO()
        torch.save(weight, file)
        return file.tell()

    plain, packed = tiny_model(hidden_size=256), qwen3.pack(tiny_model(hidden_size=256))
    for name in ("q_proj", "k_proj", "v_proj"):
        assert size(getattr(packed.model.layers[0].self_attn, name).weight) == size(getattr(plain.model.layers[0].self_attn, name).weight)


def test_no_two_gradients_share_a_storage(qwen3, tmp_path):
    from accelerate.utils import save
    from safetensors.torch import load_file

    model, tokens = qwen3.kernelize(qwen3.pack(tiny_model())), random_tokens(2, 17)
    model(input_ids=tokens, labels=tokens).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert len(set(storages(gradients.values()))) == len(gradients)
    state = model.state_dict()
    state.update(gradients)  # an OrderedDict, of which accelerate keeps one tensor a storage
    accelerator()
    save(state, tmp_path / "gradients", safe_serialization=True)
    assert_equal(load_file(tmp_path / "gradients"), gradients)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)


def test_a_copy_has_memory_of_its_own(qwen3):
    model = qwen3.pack(tiny_model())
    train(model)
    expected = values(model)
    other = copy.deepcopy(model)
    assert_equal(values(other), expected)
    assert not set(storages(other.parameters())) & set(storages(model.parameters())) and not is_packed(qwen3, other)
    train(other)
    assert_equal(values(model), expected)
    train(model)
    assert_equal(values(model), values(other))


def test_pickle_keeps_each_weight(qwen3):
    linears = qwen3.pack(tiny_model()).model.layers[0].mlp
    weights = {name: parameter.detach() for name, parameter in linears.named_parameters()}
    data = pickle.dumps(weights)
    assert_equal(pickle.loads(data), weights)
    assert len(data) < sum(weight.nbytes for weight in weights.values()) + 4096


@pytest.mark.parametrize("packed", (False, True), ids=("plain", "packed"))
def test_the_trainer_resumes(qwen3, tmp_path, packed):
    """Two steps with a checkpoint after the first; then the second again from there."""

    def run(model, resume=None):
        rows = [{"input_ids": ids, "labels": ids} for ids in random_tokens(8, 17)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=1e-2,
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return values(model)

    expected = run(qwen3.kernelize(qwen3.pack(tiny_model())))
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict(), expected)
    fresh = qwen3.kernelize(tiny_model())
    found = run(qwen3.pack(fresh) if packed else fresh, str(tmp_path / "checkpoint-1"))
    assert is_packed(qwen3, fresh) == packed
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if packed else {}))


def test_adapters_merge_into_packed_weights(qwen3, tmp_path):
    import peft

    expected = None
    for prepare in (lambda model: model, qwen3.pack):
        model = prepare(tiny_model())
        torch.manual_seed(0)
        targets = ["k_proj", "v_proj", "up_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        merged = model.merge_and_unload()
        expected = expected or values(merged)
    assert_equal(values(merged), expected)
    merged.save_pretrained(tmp_path)
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), expected)
