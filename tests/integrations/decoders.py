"""Families of `bastile/decoders` and `bastile/moe` under the libraries that people train them with. Qwen3 has every case of the files
beside this one."""

import pytest
import torch

from tests import decoder_families
from tests.integrations.common import FACTOR, FAMILIES, batch, clear_choices, family_on, install, layers_run  # noqa: F401
from tests.integrations.inference import batched, generated
from tests.integrations.lora import lora
from tests.integrations.preference import counted, train
from tests.integrations.trainers import BOTH, run
from tests.models import Step

SPARSE = decoder_families.SPARSE
OTHERS = tuple(name for name in (*decoder_families.NAMES, *SPARSE) if name not in FAMILIES)
IS = "Llama, Gemma 3 and Phi-3"
EACH = pytest.mark.parametrize("name", FAMILIES)
TWO_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture
def served(request):
    """The package with the family of the test's parameter `name`."""
    return request.getfixturevalue("moe" if request.node.callspec.params["name"] in SPARSE else "decoders")


@pytest.mark.integration(*(f"{trainer}: {IS}, accumulated" for trainer in ("Trainer", "SFTTrainer")))
@BOTH
@EACH
def test_trainers_of_families(decoders, device, tmp_path, kind, name):
    expected = run(kind, family_on(name, device), tmp_path, device, **TWO_STEPS)
    run(kind, install(decoders, family_on(name, device)), tmp_path, device, **TWO_STEPS).assert_same(expected, device, 10)


@pytest.mark.integration("Trainer: every other family of bastile/decoders and those of bastile/moe, checkpointed, saved")
@pytest.mark.parametrize("name", OTHERS)
def test_the_trainer_of_the_other_families(served, device, tmp_path, name):
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "gradient_checkpointing": True}
    expected = run("hf", family_on(name, device), tmp_path, device, **options)
    model = install(served, family_on(name, device))
    run("hf", model, tmp_path, device, **options).assert_same(expected, device, 10)
    model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(value.cpu(), saved[key]) for key, value in model.state_dict().items())


@pytest.mark.integration(f"DPOTrainer: {IS}")
@EACH
def test_dpo_of_families(decoders, device, tmp_path, name):
    pytest.importorskip("trl")
    outcomes = []
    for ours in (False, True):
        model = family_on(name, device)
        model.save_pretrained(tmp_path / "model")  # TRL loads the reference model by its name
        model.config._name_or_path = str(tmp_path / "model")
        if ours:
            install(decoders, model)
        with counted(decoders) as calls:
            outcomes.append(train("DPO", model, tmp_path, device))
        assert set(calls) == ({"linear_log_probs"} if ours else set())
    outcomes[1].assert_same(outcomes[0], device)


@pytest.mark.integration(f"PEFT: {IS}, LoRA on all linear layers", "PEFT: the families of bastile/moe, LoRA on all linear layers")
@pytest.mark.parametrize("name", (*FAMILIES, *SPARSE))
def test_lora_on_families(served, device, name):
    model = lora(family_on(name, device), target_modules="all-linear")
    expected = Step(model, **batch(device, 2, 33))
    found = Step(install(served, model), **batch(device, 2, 33))
    found.assert_same(expected, 3 * FACTOR[device])
    assert found.output.logits is None and all("lora" in parameter for parameter in found.gradients)


def with_window(name, device):
    """A model for inference, with a window where its family has one."""
    return clear_choices(family_on(name, device, **({} if name == "llama" else decoder_families.WINDOW)))


@pytest.mark.integration(f"generate: {IS}, past their windows")
@EACH
def test_continuous_batching_of_families(decoders, device, name):
    model = with_window(name, device)
    expected = batched(model, prompts=(20, 3, 5))
    assert batched(install(decoders, model), prompts=(20, 3, 5)) == expected


@pytest.mark.integration(f"generate: {IS}, past their windows", "generate: the families of bastile/moe")
@pytest.mark.parametrize("name", (*FAMILIES, *SPARSE))
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_families(served, device, name, cache):
    model = with_window(name, device)
    expected, _ = generated(model, device, cache_implementation=cache)
    tokens, _ = generated(install(served, model), device, cache_implementation=cache)
    assert torch.equal(tokens, expected)
