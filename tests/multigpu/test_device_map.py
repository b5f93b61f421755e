"""One process, several GPUs: kernels run on the GPU of their tensors."""

import pytest
import torch

from tests.integrations.common import FACTOR, batch, install, layers_run, model_on  # noqa: F401
from tests.integrations.device_maps import HOWS, ORDERS, check_dispatched
from tests.integrations.inference import generated, model_for_inference
from tests.models import Step
from tests.tolerances import assert_close


@pytest.mark.integration("accelerate: device_map over several GPUs in one process")
@HOWS
@ORDERS
@pytest.mark.parametrize("places", [(0, 0, 0, 1, 1, 1), (1, 1, 1, 0, 0, 0), (0, 0, 1, 1, 0, 1)], ids=str)
def test_device_map(qwen3, device, how, order, places, tmp_path):
    check_dispatched(qwen3, device, how, order, list(places), tmp_path, places[0])


@pytest.mark.integration("accelerate: device_map over several GPUs in one process")
@HOWS
def test_generate_over_two_gpus(qwen3, device, how, tmp_path):
    from tests.integrations.device_maps import dispatched

    expected, _ = generated(model_for_inference(device), device)
    model = dispatched(install(qwen3, model_for_inference(device).cpu(), how), (0, 0, 0, 1, 1, 1), tmp_path, 0)
    assert torch.equal(generated(model, device)[0], expected)


@pytest.mark.integration("PyTorch: a model on another GPU than the current one")
@HOWS
def test_a_model_on_another_gpu_than_the_current_one(qwen3, how):
    expected = Step(model_on("cuda"), **batch("cuda", 2, 33))
    model = install(qwen3, model_on("cuda").to("cuda:1"), how)
    assert torch.cuda.current_device() == 0
    Step(model, **batch("cuda:1", 2, 33)).assert_same(expected, FACTOR["cuda"])
    assert torch.cuda.current_device() == 0


@pytest.mark.integration("PyTorch: DataParallel, after apply()")
def test_data_parallel(qwen3):
    """Its replicas share the classes of the model; each has half of the batch, and a loss of its own."""
    inputs = batch("cuda", 4, 33)
    expected = Step(model_on("cuda"), **inputs)
    count = (inputs["labels"][:, 1:] != -100).sum()
    model = install(qwen3, model_on("cuda"), "apply")
    losses = torch.nn.DataParallel(model)(**inputs, use_cache=False, num_items_in_batch=count.expand(torch.cuda.device_count(), 1)).loss
    losses.sum().backward()
    for name, gradient in expected.gradients.items():
        assert_close(model.get_parameter(name).grad, gradient, torch.float32, name, FACTOR["cuda"])
