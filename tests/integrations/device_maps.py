"""A model of which each part is on a device of its own, in one process: accelerate's hooks carry the tensors."""

import pytest
import torch

from tests.integrations.common import FACTOR, WAYS, batch, install, layers_run, model_on  # noqa: F401
from tests.models import Step
from tests.tolerances import assert_close

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
HOWS = pytest.mark.parametrize("how", WAYS)


def dispatched(model, places, folder, main):
    """The model with its parts where `places` says; what is on the CPU or on disk is computed on `main`."""
    from accelerate import dispatch_model

    device_map = dict(zip(PARTS, places))
    if "disk" in places:
        from accelerate.utils import offload_state_dict

        offload_state_dict(str(folder), model.state_dict())
        return dispatch_model(model, device_map, main_device=main, offload_dir=str(folder), force_hooks=True)
    return dispatch_model(model, device_map, main_device=main, force_hooks=True)


def check_dispatched(qwen3, device, how, order, places, folder, main):
    """The logits, and where no part is offloaded the gradients: those of the model on one device."""
    inputs = batch(device, 2, 33)
    expected = Step(model_on(device), **inputs)
    with torch.no_grad():
        logits = model_on(device).eval()(**inputs).logits
    model = model_on(device).to("cpu")
    if order == "install first":
        model = dispatched(install(qwen3, model, how), places, folder, main)
    else:
        model = install(qwen3, dispatched(model, places, folder, main), how)
    with torch.no_grad():
        assert_close(model.eval()(**inputs).logits, logits, torch.float32, "logits", FACTOR[device])
    if not {"cpu", "disk"} & set(places) or main == "cpu" and "disk" not in places:
        Step(model.train(), **inputs).assert_same(expected, FACTOR[device])


ORDERS = pytest.mark.parametrize("order", ["install first", "dispatch first"])


@pytest.mark.integration("accelerate: device_map with parts on the CPU and on disk")
@HOWS
@ORDERS
@pytest.mark.parametrize("offloaded", ["cpu", "disk"])
def test_offloaded_parts(qwen3, device, how, order, offloaded, tmp_path):
    main = "cpu" if device == "cpu" else 0
    places = [main, main, main, offloaded, main, offloaded]
    check_dispatched(qwen3, device, how, order, places, tmp_path, main)


@pytest.mark.integration("accelerate: cpu_offload of a whole model")
def test_cpu_offload(qwen3, device):
    from accelerate import cpu_offload

    inputs = batch(device, 2, 33)
    model = model_on(device).eval()
    with torch.no_grad():
        expected = model(**inputs)
        offloaded = cpu_offload(install(qwen3, model.cpu()), execution_device=device)
        assert all(p.device.type == "meta" for p in offloaded.parameters())
        assert_close(offloaded(**inputs).logits, expected.logits, torch.float32, "logits", FACTOR[device])
