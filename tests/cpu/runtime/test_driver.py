"""What the driver is given for a launch, alone and in batches, and what becomes of its errors."""

import ctypes
import time

import pytest
import torch

from tests.fake_driver import NAMES, driver_with, first_variant, in_threads, no_library, norm_arguments, norm_kernel, number, real


def prepare_norm(driver, device=0, grid=(5, 1, 1)):
    variant = first_variant(driver.artifacts, "rms_norm_forward")
    arrays = [((5, 1024), (2048, 1)), ((1024,), (1,)), ((5, 1024), (1024, 1)), ((5,), (1,))]
    return driver.prepare(variant, device, grid, arrays, [])


def test_the_launch_configuration_lies_in_memory_as_cuda_h_has_it(runtime):
    config = runtime.driver.LaunchConfig
    offsets = [getattr(config, name).offset for name, _ in config._fields_]
    assert offsets == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48] and ctypes.sizeof(config) == 56


def test_a_launch_attribute_lies_in_memory_as_cuda_h_has_it(runtime):
    attribute = runtime.driver.LaunchAttribute
    assert (attribute.id.offset, attribute.value.offset, ctypes.sizeof(attribute)) == (0, 8, 72)
    assert (runtime.driver.EARLY.id, runtime.driver.EARLY.value) == (6, 1)


@pytest.mark.parametrize("waits", (False, True))
@pytest.mark.parametrize("capability", ((8, 0), (9, 0)))
def test_a_kernel_that_waits_by_itself_may_start_early(runtime, cubins, gpu, waits, capability):
    gpu.capability = capability
    driver = driver_with(runtime, cubins)
    driver.architecture = lambda device: f"sm_{capability[0]}{capability[1]}"
    driver.function = lambda variant, architecture: ctypes.c_void_p(2001)
    variant = first_variant(driver.artifacts, "rms_norm_forward")._replace(waits=waits)
    arrays = [((5, 1024), (1024, 1)), ((1024,), (1,)), ((5, 1024), (1024, 1)), ((5,), (1,))]
    driver.prepare(variant, 0, (5, 1, 1), arrays, [])([16] * 4, (0.5,))
    early = waits and capability == (9, 0)
    config = driver.cuda.launches[0][1]
    assert config["attributes"] == (ctypes.addressof(runtime.driver.EARLY) if early else None)
    assert config["attribute_count"] == int(early)


def test_parameters_are_addresses_lengths_strides_and_scalars_in_the_kernels_order(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    prepare_norm(driver)([0x7F0000000010, 0x20, 0x30, 0x40], (0.125,))
    kernel, config, words = driver.cuda.launches[0]
    assert [number(word) for word in words[:-1]] == [
        *(0x7F0000000010, 5, 1024, 2048, 1),
        *(0x20, 1024, 1),
        *(0x30, 5, 1024, 1024, 1),
        *(0x40, 5, 1),
    ]
    assert real(words[-1]) == 0.125
    assert driver.cuda.symbol == b"bastile_rms_norm_forward"
    assert kernel == 2001


def test_integers_and_floats_stand_where_the_kernel_has_them(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    variant = next(v for v in driver.artifacts.variants("cross_entropy_combine") if v.parameters[0].dtype == "float32")
    arrays = [((2, 20), (20, 1)), ((2,), (1,)), ((2, 1), (1, 1)), ((2, 1), (1, 1)), ((2, 2), (2, 1)), ((2,), (1,))]
    driver.prepare(variant, 0, (2, 1, 1), arrays, [-100])([16] * 6, (30.0,))
    words = driver.cuda.launches[0][2]
    assert len(words) == 5 + 3 + 5 + 5 + 5 + 3 + 2
    assert (number(words[-2]), real(words[-1])) == (-100, 30.0)


def test_the_grid_and_the_stream_of_the_device_are_passed(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    prepare_norm(driver, grid=(5, 6, 7))([16] * 4, (0.5,))
    assert driver.cuda.launches[0][1] == {
        **{"grid_x": 5, "grid_y": 6, "grid_z": 7, "block_x": 1, "block_y": 1, "block_z": 1},
        **{"shared_bytes": 0, "stream": 7000, "attributes": None, "attribute_count": 0},
    }


def test_the_stream_is_looked_up_at_each_launch(runtime, cubins, gpu, monkeypatch):
    launch = prepare_norm(driver := driver_with(runtime, cubins))
    launch([16] * 4, (0.5,))
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 1)
    launch([16] * 4, (0.5,))
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7000, 1]


def test_a_device_that_is_not_current_is_made_so(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    for device in (0, 3):
        prepare_norm(driver, device)([16] * 4, (0.5,))
    assert gpu.switched == [3]
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7000, 7003]


def test_an_image_is_loaded_once_for_all_launches_and_devices(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    for device in (0, 1, 0):
        for _ in range(3):
            prepare_norm(driver, device)([16] * 4, (0.5,))
    assert [image[64:-64].decode().split()[1:] for image in driver.cuda.loaded] == [["x86_64", "sm_90"]]
    assert {kernel for kernel, _, _ in driver.cuda.launches} == {2001}


def test_an_image_is_loaded_once_for_all_threads(runtime, cubins, gpu, monkeypatch):
    gpu.current = -1  # the device of a CPU tensor
    driver = driver_with(runtime, cubins)
    monkeypatch.setattr(runtime.launch, "backend", driver)
    kernel = norm_kernel(runtime)
    in_threads(8, lambda _: kernel(*norm_arguments()[0], 1e-6))
    assert len(driver.cuda.loaded) == 1 and len(driver.cuda.launches) == 8


def test_threads_that_share_a_launch_do_not_mix_their_parameters(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    launch = prepare_norm(driver)
    driver.cuda.on_launch = lambda: time.sleep(0)
    in_threads(6, lambda i: [launch([16 * (i + 1)] * 4, (float(i + 1),)) for _ in range(40)])
    seen = [[number(words[at]) for at in (0, 5, 8, 13)] + [16 * real(words[-1])] for _, _, words in driver.cuda.launches]
    assert len(seen) == 240
    assert all(len(set(words)) == 1 for words in seen)


def together(runtime, driver, device=0):
    """Three launches of a norm, of two sizes, that are made together."""
    return runtime.driver.Together([prepare_norm(driver, device, grid=(rows, 1, 1)) for rows in (5, 6, 5)])


def test_launches_together_have_addresses_of_their_own_and_share_floats(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    launch = together(runtime, driver)
    for begin in (16, 32):
        launch(list(range(begin, begin + 12)), (float(begin),))
    assert [config["grid_x"] for _, config, _ in driver.cuda.launches] == [5, 6, 5] * 2
    assert {config["stream"] for _, config, _ in driver.cuda.launches} == {7000}
    for i, (_, _, words) in enumerate(driver.cuda.launches):
        begin = (16, 32)[i // 3]
        first = begin + 4 * (i % 3)
        assert [number(words[at]) for at in (0, 5, 8, 13)] == list(range(first, first + 4)) and real(words[-1]) == begin
        assert [number(word) for word in words[1:5]] == [5, 1024, 2048, 1]


def test_launches_together_leave_those_they_are_made_of_alone(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    alone = prepare_norm(driver)
    alone([16] * 4, (0.5,))
    runtime.driver.Together([alone, alone])([32] * 8, (1.5,))
    driver.cuda.launches.clear()
    alone([48] * 4, (float("inf"),))
    assert [number(driver.cuda.launches[0][2][at]) for at in (0, 5, 8, 13)] == [48] * 4


def test_launches_together_go_to_the_stream_and_device_of_the_moment(runtime, cubins, gpu, monkeypatch):
    driver = driver_with(runtime, cubins)
    launch = together(runtime, driver, device=3)
    launch([16] * 12, (0.5,))
    monkeypatch.setattr(runtime.driver, "raw_stream", lambda device: 1)
    launch([16] * 12, (0.5,))
    assert gpu.switched == [3, 3] and gpu.current == 0
    assert [config["stream"] for _, config, _ in driver.cuda.launches] == [7003] * 3 + [1] * 3


def test_floats_of_launches_together_may_be_beyond_the_largest(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins)
    together(runtime, driver)([16] * 12, (1e300,))
    assert [real(words[-1]) for _, _, words in driver.cuda.launches] == [float("inf")] * 3


@pytest.mark.parametrize(("codes", "calls"), (([0, 201, 0, 0], 4), ([0, 0, 209], 3)), ids=("no context yet", "an error"))
def test_an_error_of_one_of_the_launches_together(runtime, cubins, gpu, codes, calls):
    driver = driver_with(runtime, cubins, cuLaunchKernelEx=codes)
    launch = together(runtime, driver)
    if 209 in codes:
        with pytest.raises(runtime.driver.DriverError, match="launching rms_norm_forward-.*: CUDA error 209"):
            launch([16] * 12, (0.5,))
    else:
        launch([16] * 12, (0.5,))
        assert driver.cuda.context == 1040 and not gpu.synchronized
    assert driver.cuda.calls["cuLaunchKernelEx"] == calls


def batch_of_norms(runtime, rows=(5, 6)):
    """Two norms, their tensors, and a batch of their launches."""
    kernel, found = norm_kernel(runtime), [norm_arguments(count)[0] for count in rows]
    calls = [(kernel(*tensors, 1e-6), [tensor.data_ptr() for tensor in tensors]) for tensors in found]
    return runtime.launch.Batch(calls), found


def test_a_batch_launches_again_at_other_addresses(runtime, backend):
    batch, found = batch_of_norms(runtime)
    for tensors in ([t for each in found for t in each], [t.clone() for each in found for t in each]):
        backend.launched.clear()
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert batch(addresses, (0.25,))
        assert [(places, floats) for _, places, floats in backend.launched] == [(addresses[:4], [0.25]), (addresses[4:], [0.25])]


def test_a_batch_is_not_launched_where_an_address_is_aligned_in_another_way(runtime, backend):
    batch, found = batch_of_norms(runtime)
    addresses = [tensor.data_ptr() for each in found for tensor in each]
    backend.launched.clear()
    assert not batch([*addresses[:-1], addresses[-1] + 8], (0.25,)) and not backend.launched
    assert batch(addresses, (0.25,)) and len(backend.launched) == 2


def test_a_batch_is_not_launched_after_kernels_were_chosen_anew(runtime, backend):
    batch, found = batch_of_norms(runtime)
    addresses = [tensor.data_ptr() for each in found for tensor in each]
    runtime.launch.tuner._changed()
    assert not batch(addresses, (0.25,))


@pytest.mark.parametrize(
    ("capability", "expected"), (((8, 0), "sm_80"), ((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 0), ""), ((7, 5), ""), ((12, 1), ""))
)
def test_only_images_of_8_0_run_on_a_sibling(runtime, cubins, gpu, capability, expected):
    gpu.capability = capability
    assert driver_with(runtime, cubins).architecture(0) == expected


@pytest.mark.parametrize(
    ("codes", "message"),
    (
        (
            {"cuLibraryLoadData": [200]},
            "loading rms_norm_forward-.* for sm_90: CUDA error 200 CUDA_ERROR_INVALID_IMAGE what the driver says",
        ),
        ({"cuLibraryGetKernel": [209]}, "finding bastile_rms_norm_forward in .* sm_90: CUDA error 209 CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ({"cuLaunchKernelEx": [209]}, "launching rms_norm_forward-.*: CUDA error 209 CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ({"cuLaunchKernelEx": [201, 201]}, "launching rms_norm_forward-.*: CUDA error 201 CUDA_ERROR_INVALID_CONTEXT"),
    ),
    ids=("load", "find", "launch", "context"),
)
def test_an_error_of_the_driver_has_its_code_and_name(runtime, cubins, gpu, codes, message):
    driver = driver_with(runtime, cubins, **codes)
    with pytest.raises(runtime.driver.DriverError, match=message) as error:
        prepare_norm(driver)([16] * 4, (0.5,))
    assert error.value.code in NAMES


def test_where_memory_is_short_torch_gives_back_what_it_does_not_use(runtime, cubins, gpu, emptied):
    driver = driver_with(runtime, cubins, cuLibraryLoadData=[2])
    prepare_norm(driver)([16] * 4, (0.5,))
    assert len(emptied) == 1 and len(driver.cuda.launches) == 1


@pytest.mark.parametrize("codes", ({"cuLibraryLoadData": [2, 2]}, {"cuLibraryGetKernel": [2]}, {"cuLaunchKernelEx": [2]}), ids=str)
def test_no_memory_for_a_kernel_is_torchs_own_error_and_the_next_call_works(runtime, cubins, gpu, emptied, codes):
    driver = driver_with(runtime, cubins, **codes)
    with pytest.raises(torch.OutOfMemoryError, match="rms_norm_forward-.*: CUDA error 2"):
        prepare_norm(driver)([16] * 4, (0.5,))
    prepare_norm(driver)([16] * 4, (0.5,))
    assert driver.cuda.launches


def test_a_thread_without_a_context_gets_one_and_launches(runtime, cubins, gpu):
    driver = driver_with(runtime, cubins, cuLaunchKernelEx=[201])
    prepare_norm(driver)([16] * 4, (0.5,))
    assert driver.cuda.calls["cuLaunchKernelEx"] == 2
    assert driver.cuda.context == 1040 and not gpu.synchronized


def test_a_missing_driver_is_named_with_the_cure(runtime, cubins, monkeypatch):
    driver = runtime.driver.Driver(runtime.artifacts.Artifacts(cubins))
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(runtime.driver.DriverError, match="cannot be loaded .*Install an NVIDIA driver, R580 or newer"):
        driver.version()
