"""What tests of several families do with a patched model: put a package on it, ask which operations run, and look for what is left over."""

import sys

import kernels
import pytest
import torch
from kernels import Mode
from transformers.integrations import moe

from tests.models import Step
from tests.versions import forward_of


def calls_of(package):
    """What holds the calls of a loaded package, the rows that it serves and what stands in for what (`hf.install.interface.Interface`)."""
    return package._calls


def everything_of(modeling, classes):
    """All that can be found of a module of transformers, and of its classes of these names."""
    rotary = modeling.apply_rotary_pos_emb
    found = [dict(vars(modeling)), dict(vars(type(rotary))), dict(moe.ExpertsInterface._global_mapping)]
    made = [getattr(modeling, name) for name in classes]
    return found + [dict(vars(cls)) for cls in made] + [{cls: forward_of(cls) for cls in made}]


def install(package, model, how):
    """Puts a package on a model: "apply", "kernelize", "pack" (after kernelize) or "mapping"; "" leaves it alone."""
    if how == "apply":
        package.apply()
    elif how in ("kernelize", "pack"):
        assert package.kernelize(model) is model
        if how == "pack":
            package.pack(model)
    elif how == "mapping":
        with kernels.use_kernel_mapping(package.mapping()):
            kernels.kernelize(model, mode=Mode.TRAINING)


def called_operations(package, places, step) -> set:
    """The names of the functions that a step calls. places: ((module of the package, names of functions in it), ...)."""
    called = set()
    with pytest.MonkeyPatch.context() as patch:
        for where, names in places:
            module = sys.modules[f"{package.__name__}.{where}"]
            for name in names:
                original = getattr(module, name)

                def spy(*args, name=name, original=original, **kwargs):
                    called.add(name)
                    return original(*args, **kwargs)

                patch.setattr(module, name, spy)
        step()
    return called


def step_without_small_gradients(model, **inputs) -> Step:
    """A step without the gradients of a handful of numbers, whose errors in half precision are a matter of luck."""
    step = Step(model, **inputs)
    step.gradients = {name: gradient for name, gradient in step.gradients.items() if gradient.numel() > 16}
    return step


def lora(model, rank=4, **options):
    """The model with adapters that change it from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, init_lora_weights=False, task_type="CAUSAL_LM", **options)).train()
