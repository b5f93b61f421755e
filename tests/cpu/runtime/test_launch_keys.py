"""What a launch, a batch of launches and an answer are remembered for: the alignment of each array by itself, not of all together."""

import itertools

import pytest
import torch

from tests.fake_driver import norm_arguments, norm_kernel

OFFSETS = (0, 4, 8, 12)  # bytes after a multiple of 16


def at(offset, *shape, dtype=torch.float32):
    """Zeros that begin so many bytes after a multiple of 16."""
    count = torch.Size(shape).numel()
    memory = torch.zeros(count + 8, dtype=dtype)
    start = ((offset - memory.data_ptr()) % 16) // dtype.itemsize
    return memory[start : start + count].view(shape)


@pytest.mark.parametrize("pair", itertools.combinations(range(3), 2), ids=str)
def test_a_launch_is_prepared_for_the_alignment_of_each_array(runtime, backend, monkeypatch, pair):
    """Every two offsets of two arrays, of which many have one "or" and one sum: a variant that was promised the first may not read the
    other. A kernel that takes anything, so that only the key tells launches apart."""
    kernel = runtime.launch.Kernel("swiglu_any_forward", grid=lambda *_: (1,))
    monkeypatch.setattr(kernel, "candidates", lambda *_: [backend.artifacts.variants("swiglu_any_forward")[0]])
    combinations = list(itertools.product(OFFSETS, OFFSETS))
    for number, offsets in enumerate(combinations, 1):
        arrays = [at(0, 64) for _ in range(3)]
        for place, offset in zip(pair, offsets, strict=True):
            arrays[place] = at(offset, 64)
        for _ in range(2):
            kernel(*arrays)
        assert len(backend.prepared) == number, offsets
    assert len(backend.launched) == 2 * len(combinations)


def test_which_array_is_aligned_decides_on_the_variant(runtime, backend):
    """x at an odd address and y at an even one, then the other way round: neither runs what was promised aligned arrays."""
    kernel = norm_kernel(runtime)
    (x, weight, y, rstd), eps = norm_arguments()
    odd_x, odd_weight, odd_y = (at(8, *t.shape, dtype=t.dtype) for t in (x, weight, y))
    for arguments in ((x, weight, y), (odd_x, weight, y), (x, odd_weight, y), (x, weight, odd_y), (x, weight, y)):
        kernel(*arguments, rstd, eps)
    names = [name.split("-")[0] for name, *_ in backend.launched]
    assert names == ["rms_norm_forward", *["rms_norm_any_forward"] * 3, "rms_norm_forward"]
    assert len(backend.prepared) == 4


def test_an_answer_is_remembered_for_the_alignment_of_each_array(runtime, backend):
    """The norm's fastest kernel wants each of its arrays aligned."""
    kernel = runtime.launch.Kernel("rms_norm_forward", grid=lambda *_: (1,))
    for _ in range(2):
        for place in (None, 0, None, 1, None, 2, None):
            offsets = [8 if i == place else 0 for i in range(4)]
            arrays = [at(offset, *shape) for offset, shape in zip(offsets, ((3, 1024), (1024,), (3, 1024), (3,)), strict=True)]
            assert kernel.takes(*arrays, 1e-6) is (place is None), place


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU of some number."""

    def get_device(self):
        return self.number


def on_device(number, tensors):
    found = [tensor.as_subclass(OnDevice) for tensor in tensors]
    for tensor in found:
        tensor.number = number
    return found


def test_a_launch_is_prepared_for_each_device(runtime, backend):
    kernel, (tensors, eps) = norm_kernel(runtime), norm_arguments()
    for number in (0, 1, 0, 1):
        kernel(*on_device(number, tensors), eps)
    assert len(backend.prepared) == 2 and len(backend.launched) == 4


def test_an_answer_is_remembered_for_each_device(runtime, backend, monkeypatch):
    """One of two GPUs in a machine has no kernels."""
    kernel, (tensors, eps) = norm_kernel(runtime), norm_arguments()
    first = backend.architecture(0)
    monkeypatch.setattr(backend, "architecture", lambda device: ("", first)[device])
    for number in (0, 1, 0, 1):
        assert kernel.takes(*on_device(number, tensors), eps) is bool(number)


@pytest.mark.parametrize("places", itertools.combinations((0, 1, 2, 4, 6), 2), ids=str)
def test_a_batch_is_launched_for_the_alignment_of_each_array(runtime, backend, places):
    kernel, found = norm_kernel(runtime), [list(norm_arguments(count)[0]) for count in (5, 6)]
    moved, still = places
    tensor = found[moved // 4][moved % 4]
    found[moved // 4][moved % 4] = at(8, *tensor.shape, dtype=tensor.dtype)
    calls = [(kernel(*tensors, 1e-6), [tensor.data_ptr() for tensor in tensors]) for tensors in found]
    addresses = [address for _, places in calls for address in places]
    batch = runtime.launch.Batch(calls)
    backend.launched.clear()
    others = list(addresses)
    others[moved], others[still] = addresses[moved] - 8, addresses[still] + 8
    assert not batch(others, (0.25,)) and not backend.launched
    assert batch(addresses, (0.25,)) and len(backend.launched) == 2


@pytest.mark.parametrize("length", (128, 1000, 1024, 4096))
def test_candidates_of_each_other_make_the_very_same_promises(runtime, backend, length):
    """What is timed and chosen from reads the same arrays in the same way."""
    forward = runtime.launch.Kernel("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward", grid=lambda *_: (1,))
    backward = runtime.launch.Kernel("rms_norm_backward", "rms_norm_rows_backward", "rms_norm_any_backward", grid=lambda *_: (1,))
    x, weight, rstd, partial = torch.zeros(4, length), torch.zeros(length), torch.zeros(4), torch.zeros(2, length)
    for kernel, arguments in ((forward, (x, weight, x.clone(), rstd, 1e-6)), (backward, (x.clone(), x.clone(), x, weight, rstd, partial))):
        for dtype in (torch.float32, torch.bfloat16):
            given = [t.to(dtype) if isinstance(t, torch.Tensor) and t is not rstd and t is not partial else t for t in arguments]
            found = kernel.candidates(*given)
            assert {(variant.symbol, variant.parameters) for variant in found} == {(found[0].symbol, found[0].parameters)}
            assert len({variant.name for variant in found}) == len(found)
            fitting = [v for v in kernel.variants() if backend.architecture(-1) in v.images and not kernel._unfit(v, given)]
            assert found[0] == fitting[0] and set(map(id, found)) <= set(map(id, fitting))
