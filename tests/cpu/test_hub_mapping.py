"""The layers as kernels' mapping, and transformers' configuration of it, put them on a model."""

import copy
import functools

import kernels
import pytest
from kernels import Mode
from transformers.models.qwen3 import modeling_qwen3

from tests.models import tiny_model
from tests.qwen3_steps import CLASSES, OPERATIONS, uses_layers
from tests.versions import DECORATORS, needs_decorators


def test_the_hubs_mapping(qwen3, package_folder, monkeypatch):
    """`kernels` takes every layer of ours for the class or function that it replaces, also by its name in a folder."""
    from kernels.layer.layer import _validate_layer

    load_here = functools.partial(kernels.get_local_kernel, backend="cpu")  # also where torch is built for CUDA
    monkeypatch.setattr("kernels.layer.layer.get_local_kernel", load_here)
    originals = {
        "RMSNorm": CLASSES["rms_norm"],
        **({"rotary_pos_emb": CLASSES["rope"]} if DECORATORS else {}),
        "Qwen3MLP": CLASSES["swiglu"],
        "Qwen3ForCausalLM": CLASSES["fused_linear_cross_entropy"],
        "SwiGLUMLP": CLASSES["swiglu"],
    }
    for name, devices in qwen3.mapping().items():
        for repository in devices.values():
            layer = repository.load()
            _validate_layer(check_cls=originals.get(name, layer), cls=layer, repo=repository)
            for own in {layer.__name__, name} & vars(qwen3.layers).keys():
                assert kernels.LocalLayerRepository(package_folder, layer_name=own).load() is layer


@pytest.mark.parametrize("given", [None, Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE])
@pytest.mark.parametrize("wanted", [Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE])
def test_modes(qwen3, given, wanted):
    """A mapping for one mode serves what `kernels` lets it serve; one for no mode serves all."""
    serves = {
        None: True,
        Mode.TRAINING: wanted in (Mode.TRAINING, Mode.INFERENCE),
        Mode.INFERENCE: wanted is Mode.INFERENCE,
        Mode.TRAINING | Mode.TORCH_COMPILE: True,
    }[given]
    model = tiny_model()
    with kernels.use_kernel_mapping(qwen3.mapping(given)):
        kernels.kernelize(model, mode=wanted)
    assert uses_layers(qwen3, model) == (set(OPERATIONS) if serves else set())


@pytest.mark.parametrize(("capability", "serves"), [(75, False), (80, True), (90, True), (100, True), (121, True), (130, False)])
def test_gpus_that_the_mapping_serves(qwen3, capability, serves, monkeypatch):
    monkeypatch.setattr("kernels.layer.repos._find_capability", lambda: capability)
    with kernels.use_kernel_mapping(qwen3.mapping(), inherit_mapping=False):
        from kernels.layer.globals import _KERNEL_MAPPING

        found = _KERNEL_MAPPING.get()["RMSNorm"]["cuda"].repos
        assert (found is not None) == serves
        if found:
            assert next(iter(found.values())).load() is qwen3.layers.RMSNorm


@needs_decorators
def test_kernel_config(qwen3, package_folder, monkeypatch):
    """transformers' own way, on a CPU: its list of devices has no CPU, for no reason that concerns us."""
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers import KernelConfig
    from transformers.utils import kernel_config

    if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
        pytest.skip("this transformers has its list of devices elsewhere")
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])
    monkeypatch.setattr("kernels.layer.layer.get_kernel", functools.partial(kernels.get_kernel, backend="cpu"))
    monkeypatch.setenv("LOCAL_KERNELS", f"bastile/qwen3={package_folder}")
    qwen3.mapping()  # gives the last two their names
    names = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryPosEmb", "Qwen3MLP": "MLP", "Qwen3ForCausalLM": "CausalLM"}
    # With `version` the Hub is asked for the revision before the local copy is found.
    options = {"revision": "v1", "trust_remote_code": True}
    model = tiny_model()
    token = _KERNEL_MAPPING.set(copy.deepcopy(_KERNEL_MAPPING.get()))
    try:
        model.set_use_kernels(True, KernelConfig({name: (f"bastile/qwen3:{layer}", options) for name, layer in names.items()}))
    finally:
        _KERNEL_MAPPING.reset(token)
    assert uses_layers(qwen3, model) == set(OPERATIONS)


def test_mapping_warns_when_the_decorators_are_inactive(qwen3, monkeypatch):
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    with pytest.warns(RuntimeWarning, match=r"apply\(\) or kernelize\(model\)"):
        qwen3.mapping()
