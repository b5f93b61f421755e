"""The ways to run a model that every package promises, on a GPU. step: a function of a model that makes a `Step` of it."""

import copy

import torch

from tests.models import Step, compiled_whole
from tests.patched import lora
from tests.tolerances import relative_error


def exact_and_before(model, step) -> tuple[Step, Step]:
    """A step of a model in half precision as it would be in fp32, and as it is without a package."""
    return step(copy.deepcopy(model).float()), step(model)


def check_half(package, model, step):
    """`apply` leaves a step of a model in half precision as exact as it was."""
    exact, before = exact_and_before(model, step)
    package.apply()
    step(model).assert_as_exact_as(before, exact)


def check_lora(package, model, step, **options):
    """With adapters a step is as exact as before. options: of LoRA."""
    model = lora(model, 16, **options)
    exact, before = exact_and_before(model, step)
    package.kernelize(model)
    found = step(model)
    found.assert_as_exact_as(before, exact)
    assert found.gradients and all("lora_" in name for name in found.gradients)


def check_same_bits(package, model, step, shape):
    """Twice, with each layer checkpointed, its attention kept or not, with the MLP's products made again, and replayed as CUDA graphs.
    shape: of a batch."""
    plain = package.kernelize(copy.deepcopy(model))
    expected = step(plain)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    ways = {
        "again": plain,
        "checkpointed": package.kernelize(copy.deepcopy(checkpointed)),
        "attention kept": package.kernelize(copy.deepcopy(checkpointed), keep_attention=True),
        "made again": package.kernelize(copy.deepcopy(model), recompute_mlp=True),
        "captured": package.capture(package.kernelize(copy.deepcopy(model)), *shape),
    }
    for way, each in ways.items():
        for _ in range(3 if way == "captured" else 1):
            found = step(each)
        for key, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[key], gradient), f"{way}: {key}"


def check_compiled_half(package, model, step):
    """Compiled whole, a step in half precision is as exact as before. step: takes, as a second argument, what to call in
    the model's place."""
    exact, before = exact_and_before(model, step)
    package.kernelize(model)
    step(model, compiled_whole(model)).assert_as_exact_as(before, exact)


def check_cache(package, model, ids, prompt):
    """A prompt, and after it token by token with a cache, gives the logits of all tokens at once, and these are as exact as before.
    prompt: how many of ids [batch, tokens] are in it."""
    model.eval()
    with torch.no_grad():
        exact, before = (each(input_ids=ids, use_cache=False).logits for each in (copy.deepcopy(model).float(), model))
        package.kernelize(model)
        whole, part = model(input_ids=ids, use_cache=False).logits, model(input_ids=ids[:, :prompt], use_cache=True)
        logits = [part.logits]
        for token in ids[:, prompt:].unbind(1):
            part = model(input_ids=token[:, None], past_key_values=part.past_key_values, use_cache=True)
            logits.append(part.logits)
    for found in (whole, torch.cat(logits, 1)):
        assert relative_error(found, exact) <= 1.25 * relative_error(before, exact) + 2e-3
