"""What a kernel promises of its arguments, which variant is launched on them, and what is remembered of that."""

import pytest
import torch

from interpreter.backend import InterpreterBackend
from tests.fake_driver import combine_arguments, misaligned, norm_arguments, norm_kernel

PARAMETER = {
    "name": "x",
    "kind": "array",
    "dtype": "bfloat16",
    "align": 16,
    "shape": (None, 128),
    "shape_divisible": (4, 1),
    "shape_min": (8, 1),
    "stride": (None, 1),
    "stride_divisible": (8, 1),
}

KEPT = {"dtype": "bfloat16", "shape": (8, 128), "stride": (128, 1), "misalignment": 0}


def broken(runtime, found, promises=None):
    parameter = runtime.artifacts.Parameter(**{**PARAMETER, **(promises or {})})
    return runtime.launch.broken_promise(parameter, **{**KEPT, **found})


def test_an_array_that_keeps_every_promise_is_taken(runtime):
    assert broken(runtime, {}) == ""


@pytest.mark.parametrize(
    ("found", "promises", "reason"),
    (
        ({"dtype": "float16"}, {}, "has dtype float16, expected bfloat16"),
        ({"shape": (8, 1, 128), "stride": (128, 128, 1)}, {}, "has 3 dimensions, expected 2"),
        ({"misalignment": 8}, {}, "starts 8 bytes past a multiple of 16, expected a multiple of 16"),
        ({"misalignment": 1}, {"align": 2}, "starts 1 bytes past a multiple of 16, expected a multiple of 2"),
        ({"shape": (8, 64)}, {}, "has length 64 in dimension 1, expected 128"),
        ({"shape": (9, 128)}, {}, "has length 9 in dimension 0, expected a multiple of 4"),
        ({"shape": (4, 128)}, {}, "has length 4 in dimension 0, expected at least 8"),
        ({"shape": (0, 128)}, {"shape_min": (1, 1)}, "has length 0 in dimension 0, expected at least 1"),
        ({"shape": (12, 128)}, {"shape_max": (8, None)}, "has length 12 in dimension 0, expected at most 8"),
        ({"stride": (128, 2)}, {}, "has stride 2 in dimension 1, expected 1"),
        ({"stride": (132, 1)}, {}, "has stride 132 in dimension 0, expected a multiple of 8"),
        ({"stride": (0, 1)}, {}, "is expanded in dimension 0 (stride 0), expected elements of its own"),
        ({"shape": (2**31, 128)}, {}, f"has length {2**31} and stride 128 in dimension 0, expected both within 0 and 2^31 - 1"),
        ({"stride": (2**31, 1)}, {}, f"has length 8 and stride {2**31} in dimension 0, expected both within 0 and 2^31 - 1"),
        ({"stride": (-8, 1)}, {}, "has length 8 and stride -8 in dimension 0, expected both within 0 and 2^31 - 1"),
    ),
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_broken_promise_is_named(runtime, found, promises, reason):
    assert broken(runtime, found, promises) == reason


def test_a_misalignment_that_the_promise_allows_is_taken(runtime):
    assert broken(runtime, {"misalignment": 6}, {"align": 2}) == ""


@pytest.mark.parametrize("stride", ((7, 1), (0, 1)), ids=str)
def test_the_stride_of_a_single_element_is_never_used(runtime, stride):
    promises = {"shape_divisible": (1, 1), "shape_min": (1, 1)}
    assert broken(runtime, {"shape": (1, 128), "stride": stride}, promises) == ""


def test_a_variant_for_other_architectures_is_passed_over(runtime):
    """Also where it stands first; and the error says so when there is no other."""
    interpreter = InterpreterBackend(runtime, ("linear_cross_entropy",))
    kernel = runtime.launch.Kernel("linear_cross_entropy_statistics", grid=lambda c, *_: (1,))
    operands = [torch.zeros(n, 64, dtype=torch.bfloat16) for n in (3, 5)]
    tensors = (*operands, torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.launch, "backend", interpreter)
        for gpu, rows in (("sm_90", 128), ("sm_86", 64), ("sm_121", 64), ("sm_100", 128)):
            interpreter.gpu = gpu
            kernel.forget()
            assert kernel.takes(*tensors) and kernel.select(*tensors).constants["TILE_M"] == rows
        interpreter.gpu = "sm_75"
        kernel.forget()
        assert not kernel.takes(*tensors)
        with pytest.raises(runtime.launch.PromiseError, match="is not built for sm_75"):
            kernel.select(*tensors)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(
    ("length", "chosen"),
    ((1024, "rms_norm_forward"), (2560, "rms_norm_forward"), (128, "rms_norm_rows_forward"), (1000, "rms_norm_any_forward")),
)
def test_the_most_exact_variant_that_fits_is_chosen(runtime, backend, length, chosen, dtype):
    tensors, eps = norm_arguments(length=length, dtype=dtype)
    variant = norm_kernel(runtime).select(*tensors, eps)
    assert variant.symbol == f"bastile_{chosen}"
    assert variant.parameters[0].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "x",
    (
        lambda: misaligned(torch.zeros(3, 1024, dtype=torch.bfloat16)),
        lambda: torch.zeros(3, 1028, dtype=torch.bfloat16)[:, :1024],
    ),
    ids=("misaligned address", "misaligned rows"),
)
def test_an_array_that_is_not_aligned_goes_to_the_variant_for_any(runtime, backend, x):
    tensors, eps = norm_arguments(x=x())
    assert norm_kernel(runtime).select(*tensors, eps).symbol == "bastile_rms_norm_any_forward"


@pytest.mark.parametrize(("shape", "chosen"), (((2, 1024), "TILE1024"), ((3, 1536), "TILE512"), ((2048,), "any"), ((2057,), "any")))
def test_rows_go_to_the_variant_whose_pieces_divide_them_and_a_flat_array_to_the_one_for_any(runtime, backend, shape, chosen):
    kernel = runtime.launch.Kernel("swiglu_forward", "swiglu_any_forward", grid=lambda c, x, *_: (1,))
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3)]
    assert chosen in kernel.select(*tensors).name


@pytest.mark.parametrize(("gpu", "count"), (("sm_90", 1), ("sm_100", 2), ("sm_120", 2)))
def test_a_variant_without_an_image_for_this_gpu_is_not_chosen(runtime, backend, gpu, count):
    backend.gpu = gpu
    tensors, eps = norm_arguments(length=4096)
    candidates = norm_kernel(runtime).candidates(*tensors, eps)
    assert len(candidates) == count and all(gpu in variant.images for variant in candidates)
    assert len({variant.parameters for variant in candidates}) == 1


def test_where_no_variant_has_an_image_the_error_says_so(runtime, backend):
    backend.gpu = "sm_75"
    tensors, eps = norm_arguments()
    with pytest.raises(runtime.launch.PromiseError, match="rms_norm_forward-.*: is not built for sm_75"):
        norm_kernel(runtime)(*tensors, eps)
    assert not norm_kernel(runtime).takes(*tensors, eps)


def test_the_error_names_each_variant_parameter_and_promise(runtime, backend):
    tensors, eps = norm_arguments(dtype=torch.float64)
    kernel = norm_kernel(runtime)
    with pytest.raises(runtime.launch.PromiseError, match="no variant of rms_norm_forward") as error:
        kernel(*tensors, eps)
    assert "rms_norm_any_forward-bf16u.bf16u.bf16u.f32-TILE1024: x has dtype torch.float64, expected bfloat16" in str(error.value)
    assert not kernel.takes(*tensors, eps) and kernel.takes(*norm_arguments()[0], eps)
    assert not backend.launched


def test_an_operand_of_another_dtype_is_named(runtime, backend):
    tensors, eps = norm_arguments(weight_dtype=torch.float16)
    with pytest.raises(runtime.launch.PromiseError, match="weight has dtype float16, expected bfloat16"):
        norm_kernel(runtime).select(*tensors, eps)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    (
        ((), "4 arguments, expected 5"),
        ((1,), "eps is 1, expected a number of float32"),
        ((1e-6, 1e-6), "6 arguments, expected 5"),
    ),
)
def test_a_wrong_number_is_named(runtime, backend, numbers, reason):
    with pytest.raises(runtime.launch.PromiseError, match=reason):
        norm_kernel(runtime).select(*norm_arguments()[0], *numbers)


def test_an_integer_that_needs_more_than_32_bits_is_named(runtime, backend):
    kernel = runtime.launch.Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
    with pytest.raises(runtime.launch.PromiseError, match=f"ignore_index is {2**31}, expected 32 bits"):
        kernel.select(*combine_arguments(), 2**31, 0.0)


@pytest.mark.parametrize("grid", ((2**24,), (0,), (1, 2**16), (1, 1, 2**16), (1, 1, 0)), ids=str)
def test_a_grid_that_no_gpu_takes_is_refused(runtime, backend, grid):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: grid)
    with pytest.raises(runtime.launch.PromiseError, match="column_sum needs a grid of .* expected 1 to .16777215, 65535, 65535. blocks"):
        kernel(torch.zeros(2, 4), torch.zeros(4))
    assert not backend.prepared


def test_the_largest_grid_is_taken(runtime, backend):
    runtime.launch.Kernel("column_sum", grid=lambda *_: (2**24 - 1, 65535, 65535))(torch.zeros(2, 4), torch.zeros(4))
    assert backend.prepared[0][1] == (2**24 - 1, 65535, 65535)


def test_tensors_on_two_devices_are_refused(runtime, backend):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: (1,))
    with pytest.raises(runtime.launch.PromiseError, match="column_sum got tensors on .*, expected one device") as error:
        kernel(torch.zeros(2, 4), torch.zeros(4, device="meta"))
    assert "cpu" in str(error.value) and "meta" in str(error.value)


def test_a_tensor_that_holds_its_numbers_with_the_sign_turned_is_refused(runtime, backend):
    """By every call, known combinations among them: an address does not tell."""
    kernel = norm_kernel(runtime)
    for _ in range(2):
        (x, weight, y, rstd), eps = norm_arguments()
        with pytest.raises(runtime.launch.PromiseError, match="weight of rms_norm_forward has its sign turned in memory"):
            kernel(x, torch._neg_view(weight), y, rstd, eps)
        launches = len(backend.launched)
        kernel(x, weight, y, rstd, eps)
        assert len(backend.launched) == launches + 1


def test_a_contiguous_copy_holds_the_numbers_themselves(runtime):
    x = torch.randn(4, 8)
    found = runtime.launch.contiguous_copy(torch._neg_view(x))
    assert not found.is_neg() and torch.equal(found, -x) and runtime.launch.contiguous_copy(x) is x


def test_a_launch_is_prepared_once_for_each_kind_of_arguments(runtime, backend):
    kernel = norm_kernel(runtime)
    for rows in (3, 3, 4, 3, 4):
        kernel(*norm_arguments(rows)[0], 1e-6)
    assert [arrays[0][0] for _, _, arrays, _ in backend.prepared] == [(3, 1024), (4, 1024)]
    assert len(backend.launched) == 5


def test_a_launch_gets_the_addresses_and_the_floats_of_its_call(runtime, backend):
    kernel, seen = norm_kernel(runtime), []
    for eps in (0.5, 0.25):
        tensors, _ = norm_arguments()
        kernel(*tensors, eps)
        seen.append([[t.data_ptr() for t in tensors], [eps]])
    assert [[addresses, floats] for _, addresses, floats in backend.launched] == seen


def test_integers_are_part_of_what_a_launch_is_prepared_for(runtime, backend):
    kernel = runtime.launch.Kernel("cross_entropy_combine", grid=lambda c, logits, *_: (logits.shape[0],))
    for ignore_index in (-100, 0, -100):
        kernel(*combine_arguments(), ignore_index, 0.0)
    assert [integers for *_, integers in backend.prepared] == [[-100], [0]]


def test_another_alignment_is_prepared_anew(runtime, backend):
    kernel = norm_kernel(runtime)
    tensors, eps = norm_arguments()
    for x in (tensors[0], misaligned(tensors[0]), tensors[0]):
        kernel(x, *tensors[1:], eps)
    assert [name.split("-")[0] for name, *_ in backend.launched] == ["rms_norm_forward", "rms_norm_any_forward", "rms_norm_forward"]


def forward_of_rows(runtime, **options):
    """The norm's kernel on tensors of three dimensions, with a record of when views were made."""
    made = []

    def views(x, weight, y, rstd):
        made.append(tuple(x.shape))
        return x.reshape(-1, x.shape[-1]), weight, y.view(-1, y.shape[-1]), rstd

    names = ("rms_norm_forward", "rms_norm_rows_forward", "rms_norm_any_forward")
    return runtime.launch.Kernel(*names, grid=lambda c, x, *_: (x.shape[0],), views=views, **options), made


def three_dimensions():
    new = torch.zeros
    return [new(2, 3, 1024), new(1024), new(2, 3, 1024), new(6)]


def test_views_are_made_for_the_first_call_of_a_kind(runtime, backend):
    kernel, made = forward_of_rows(runtime)
    for _ in range(3):
        kernel(*three_dimensions(), 1e-6)
    assert made == [(2, 3, 1024)] and len(backend.prepared) == 1 and len(backend.launched) == 3
    assert backend.prepared[0][2][0] == ((6, 1024), (1024, 1))


# What a launch follows from of each of its tensors: another of it must not run what was prepared for the first.
CHANGES = {
    "shape": lambda x: torch.zeros(x.shape[0] + 1, *x.shape[1:], dtype=x.dtype),
    "strides": lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)[..., :-8],
    "dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.bfloat16),
    "alignment": lambda x: misaligned(x),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("place", range(5))
def test_every_property_of_every_tensor_is_in_the_key(runtime, backend, monkeypatch, place, what):
    """A kernel that takes anything, so that only the key tells two launches apart."""
    kernel = runtime.launch.Kernel("swiglu_any_backward", grid=lambda *_: (1,))
    monkeypatch.setattr(kernel, "candidates", lambda *_: [backend.artifacts.variants("swiglu_any_backward")[0]])
    tensors = [torch.zeros(4, 64) for _ in range(5)]
    for wanted in (tensors, [*tensors[:place], CHANGES[what](tensors[place]), *tensors[place + 1 :]]):
        for _ in range(2):
            kernel(*wanted)
    assert len(backend.prepared) == 2 and len(backend.launched) == 4


@pytest.mark.parametrize("place", (0, 1))
def test_what_is_only_read_is_copied_where_no_variant_takes_it(runtime, backend, place):
    kernel, _ = forward_of_rows(runtime, reads=("x", "weight"))
    tensors = three_dimensions()
    tensors[place] = torch.zeros(*tensors[place].shape, 2)[..., 0]
    for _ in range(2):
        kernel(*tensors, 1e-6)
    given = [addresses[place] for _, addresses, _ in backend.launched]
    assert tensors[place].data_ptr() not in given and len(backend.prepared) == 2  # a copy has an address of its own each time
    assert backend.launched[0][0].startswith("rms_norm_forward")


def test_what_is_written_is_never_a_copy(runtime, backend):
    kernel, _ = forward_of_rows(runtime, reads=("x", "weight", "y"))
    kernel.reads = frozenset(("x", "weight"))
    tensors = three_dimensions()
    kernel.views = lambda x, weight, y, rstd: (x.view(-1, 1024), weight, y.view(-1, 1024).clone(), rstd)
    with pytest.raises(runtime.launch.PromiseError, match="rms_norm_forward would write y into a copy"):
        kernel(*tensors, 1e-6)
    assert not backend.launched


def test_a_split_launches_each_part_and_is_not_remembered(runtime, backend):
    kernel = runtime.launch.Kernel("column_sum", grid=lambda *_: (1,), split=lambda partial, out: None if len(partial) <= 2 else (
        (partial[i : i + 2], out) for i in range(0, len(partial), 2)
    ))  # fmt: skip
    partial, out = torch.zeros(6, 4), torch.zeros(4)
    for _ in range(2):
        kernel(partial, out)
    starts = [addresses[0] - partial.data_ptr() for _, addresses, _ in backend.launched]
    assert starts == [0, 32, 64] * 2 and len(backend.prepared) == 1


def test_where_restricts_the_variants(runtime, monkeypatch):
    monkeypatch.setattr(runtime.launch, "backend", InterpreterBackend(runtime, ("rotary",)))
    for backward in (0, 1):
        kernel = runtime.launch.Kernel("rotary", grid=lambda *_: (1,), where={"BACKWARD": backward})
        assert {variant.constants["BACKWARD"] for variant in kernel.variants()} == {backward}


def test_constants_come_from_the_manifest(runtime, backend):
    kernel = runtime.launch.Kernel("swiglu_forward", "swiglu_any_forward", grid=lambda *_: (1,))
    assert kernel.constants("TILE", "swiglu_forward") == (1024, 512) and set(kernel.constants("TILE")) == {1024, 512}
    with pytest.raises(runtime.launch.PromiseError, match="the constant TILE of swiglu_forward is .*, expected one value"):
        kernel.constant("TILE")
    with pytest.raises(runtime.launch.PromiseError, match="the constant ROWS of swiglu_forward is missing"):
        kernel.constant("ROWS")
    norm = runtime.launch.Kernel("add_rms_norm_forward", grid=lambda *_: (1,))
    assert norm.lengths("x", 1) == {1024, 2048, 2560, 4096, 5120}


def test_what_is_remembered_stays_bounded(runtime, backend, monkeypatch):
    monkeypatch.setattr(runtime.launch, "KEPT", 3)
    kernel = norm_kernel(runtime)
    for rows in range(1, 9):
        tensors, eps = norm_arguments(rows)
        kernel(*tensors, eps)
        kernel.takes(*tensors, eps)
        assert len(kernel._prepared) <= 3 and len(kernel._taken) <= 3
