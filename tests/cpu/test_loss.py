"""The fused loss: the memory of its chunks, numbers that half precision cannot hold on their way, and what it counts."""

import importlib
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.modes import Operators
from tests.op_cases import operations
from tests.ops import linear_cross_entropy as checks
from tests.ops.common import FLOATS, exact, leaf, randn
from tests.tolerances import assert_close, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN3, GPT_OSS = 151936, 201088  # classes
GIB = 2**30


def loss_module(ops, name="linear_cross_entropy"):
    return importlib.import_module(ops.linear_cross_entropy.__module__.rpartition(".")[0] + "." + name)


# ---------------------------------------------------------------- the memory of the chunks
def small_chunks(monkeypatch, ops, bytes_of_large, bytes_of_small):
    monkeypatch.setattr(loss_module(ops, "linear_head"), "LARGE_CHUNK", bytes_of_large)
    monkeypatch.setattr(loss_module(ops, "linear_head"), "SMALL_CHUNK", bytes_of_small)


@pytest.mark.parametrize("classes", (17, 32000, QWEN3, GPT_OSS, 10**7))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_logits_of_a_chunk_grow_neither_with_the_tokens_nor_with_the_classes(loaded_ops, classes, dtype):
    plan = loss_module(loaded_ops, "linear_head").plan_chunks
    for tokens in (1, 2048, 16384, 131072, 2**21, 2**27):
        for accum_dtype, weight_gradient, bound in ((None, True, 1.6), (FP32, True, 0.6), (None, False, 0.6)):
            chunk = plan(tokens, classes, dtype, accum_dtype, weight_gradient).tokens
            assert 1 <= chunk <= tokens and chunk * classes * dtype.itemsize <= bound * GIB
            assert chunk * -(-classes // 2048) < 2**24, "more blocks than a grid has"


def test_up_to_16384_tokens_of_qwen3_the_chunks_are_those_that_were_measured(loaded_ops):
    plan = loss_module(loaded_ops, "linear_head").plan_chunks
    for tokens in (1, 1000, 2048, 2049, 7281, 7282, 8192, 10000, 16384):
        assert plan(tokens, QWEN3, BF16) == (min(tokens, max(2048, -(-9 * tokens // (32 * 256)) * 256)), BF16, 0)
    assert plan(16384, QWEN3, BF16, weight_gradient=False).tokens == 1024
    assert plan(16384, QWEN3, BF16, FP32) == (2048, FP32, 0)


@pytest.mark.parametrize("classes", (QWEN3, GPT_OSS))
def test_a_sum_in_half_precision_has_four_chunks_at_most(loaded_ops, classes):
    plan = loss_module(loaded_ops, "linear_head").plan_chunks
    wide = set()
    for tokens in range(512, 65536, 512):
        chunk, accum_dtype, _ = plan(tokens, classes, BF16)
        assert accum_dtype == FP32 or -(-tokens // chunk) <= 4
        wide.add((accum_dtype == FP32, tokens > 16384))
    assert wide == {(False, False), (False, True), (True, True)} or classes == GPT_OSS


@pytest.mark.parametrize("options", ({}, {"accum_dtype": FP32}, {"reduction": "none"}, {"label_smoothing": 0.1}), ids=str)
@pytest.mark.parametrize("frozen", (False, True))
def test_the_memory_of_a_step_does_not_grow_with_the_tokens(loaded_ops, monkeypatch, options, frozen):
    classes = 1001
    small_chunks(monkeypatch, loaded_ops, 40 * classes * 2, 16 * classes * 2)
    weight = randn(classes, 8, dtype=BF16, device="cpu", seed=1).requires_grad_(not frozen)
    most = []
    for tokens in (100, 300, 900):
        hidden, target = leaf(randn(tokens, 8, dtype=BF16, device="cpu")), torch.arange(tokens) % classes
        with Operators(sizes=lambda tensor: tensor.nbytes if classes in tensor.shape else 0) as as_wide_as_logits:
            loaded_ops.linear_cross_entropy(hidden, weight, target, **options).sum().backward()
        most.append(as_wide_as_logits.largest)
    assert most[0] == most[1] == most[2] <= 2 * 40 * classes * 2


def test_the_logits_of_qwen3_8b_take_two_thirds_of_a_gibibyte_beside_the_gradients(loaded_ops):
    """With a trained head and 8192 tokens, for which TRL's own function takes 3.92 GiB in all."""
    plan = loss_module(loaded_ops, "linear_head").plan_chunks(8192, QWEN3, BF16, None, True, 4096)
    gradients, logits = (QWEN3 + 8192) * 4096 * 2, plan.tokens * QWEN3 * 2
    assert plan.first <= plan.tokens and gradients + logits <= 1.88 * GIB


def bytes_alive() -> Operators:
    """Sees the most bytes that are alive at once, of what PyTorch's operations make."""
    alive, given = {}, set()

    def arguments(operator, args):
        given.clear()
        given.update(t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor))
        return 0

    def size(tensor):
        storage = tensor.untyped_storage()
        for key in [key for key, (found, _) in alive.items() if found.expired()]:
            del alive[key]
        if storage._cdata not in given:
            alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return sum(size for _, size in alive.values())

    return Operators(arguments, size)


# (options, whether the head is trained) -> chunks of logits that are alive at once beside the gradients
PEAKS = (
    ({}, True, 1),
    ({"coefficients": True}, True, 1),
    ({"outputs": ("entropy",)}, True, 1),
    ({"recompute": False}, True, 50 / 16),
    ({"recompute": False}, False, 1),
    ({"recompute": False, "coefficients": True}, True, 1),
    ({}, False, 1),
    ({"outputs": ("entropy",), "entropy_gradient": True}, False, 1),  # two, of half the tokens
)


@pytest.mark.parametrize("options, trained, chunks", PEAKS, ids=str)
def test_the_chunks_of_logits_that_are_alive_beside_the_gradients(interpreted, monkeypatch, options, trained, chunks):
    tokens, features, classes, ops = 50, 16, 4096, operations(interpreted)
    chunk = 16 * classes * 2
    small_chunks(monkeypatch, ops, chunk, chunk)
    hidden = leaf(randn(tokens, features, dtype=BF16, device="cpu"))
    weight = randn(classes, features, dtype=BF16, device="cpu", seed=1).requires_grad_(trained)
    options = {**options, "coefficients": torch.ones(tokens)} if "coefficients" in options else options
    with bytes_alive() as peak:
        found = ops.linear_log_probs(hidden, weight, torch.arange(tokens), **options)
        (found.log_probs.sum() if found.weighted_sum is None else found.weighted_sum).backward()
    gradients = tokens * features * 2 * (1 if trained else 2) + trained * classes * features * 2  # a frozen one has another, scaled
    assert 0.95 * chunks <= (peak.largest - gradients) / chunk <= 1.15 * chunks, peak.largest


@pytest.mark.parametrize("needs", ((True, True, False), (False, False, False)), ids=str)
def test_what_a_chunk_holds_is_free_when_the_next_one_begins(loaded_ops, monkeypatch, needs):
    """The divergence of two heads holds the teacher's logits."""

    class Piece:
        def rows(self):
            return (torch.zeros(8),)

        def gradient(self, scale):
            return None

    living = weakref.WeakSet()
    most = []

    def loss_of(logits, rows, room):
        most.append(len(living))
        piece = Piece()
        living.add(piece)
        return piece

    small_chunks(monkeypatch, loaded_ops, 8 * 40 * 4, 8 * 40 * 4)
    hidden, weight, losses = torch.zeros(24, 16), torch.zeros(40, 16), torch.zeros(24)
    loss_module(loaded_ops, "linear_head").walk(hidden, weight, None, loss_of, (losses,), torch.ones(1), needs)
    assert most == [0, 0, 0]


def test_two_heads_have_half_as_many_tokens_behind_the_first_chunk(loaded_ops):
    """At most three chunks; the first takes no more than half of the gradient's memory, where the teacher's logits have the other half."""
    head, classes = loss_module(loaded_ops, "linear_head"), 128256
    for tokens, wanted in ((1024, [1024]), (2048, [2048]), (3000, [1976, 1024]), (4096, [2048, 1024, 1024])):
        plan = head.plan_chunks(tokens, classes, BF16, None, True, 4096, 2)
        slices = list(head.chunk_slices(tokens, plan.tokens, plan.first))
        assert [rows.stop - rows.start for rows in slices] == wanted
        assert [rows.start for rows in slices] == [0] + [rows.stop for rows in slices[:-1]] and slices[-1].stop == tokens
    assert head.plan_chunks(8192, classes, BF16, None, True, 4096, 2).tokens == 2304
    assert head.plan_chunks(4096, classes, BF16, None, False, 4096, 2) == (1024, BF16, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens, in_gradient", ((16, True), (32, True), (33, False)))
def test_the_logits_of_the_only_chunk_lie_in_the_gradient(loaded_ops, monkeypatch, dtype, tokens, in_gradient):
    """They do if they take at most half of it, and a copy is made only of what their own place hides. In fp16 the gradient is in fp32 and
    has room for twice as many."""
    classes, features, made, clone = 1000, 64, [], torch.Tensor.clone
    head = loss_module(loaded_ops, "linear_head")
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *a, **k: (made.append(self.shape), clone(self, *a, **k))[1])
    checks.check_linear_cross_entropy(loaded_ops, "cpu", dtype, tokens, features, classes)
    copies = [shape[1] for shape in made if len(shape) == 2 and shape[0] == tokens and shape[1] not in (features, classes)]
    share = tokens / features / (2 if dtype == FP16 else 1)
    expected = in_gradient or dtype == FP16
    assert bool(copies) == expected
    assert all(share * classes <= count <= share * classes + 2 * head.ALIGNED for count in copies)


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_the_gradient_of_the_weight_is_as_exact_in_many_chunks(loaded_ops, monkeypatch, dtype):
    """All hidden states point one way, so the sums grow with every chunk, and a sum in half precision would round the largest ones
    most often."""
    classes, tokens = 40, 1200
    small_chunks(monkeypatch, loaded_ops, 24 * classes * 2, 24 * classes * 2)
    assert loss_module(loaded_ops, "linear_head").plan_chunks(tokens, classes, dtype) == (24, FP32, 0)
    hidden = leaf(randn(tokens, 16, dtype=dtype, device="cpu", scale=0.1) + 1)
    weight = leaf(randn(classes, 16, dtype=dtype, device="cpu", seed=1, scale=0.2))
    target = torch.arange(tokens) % 3
    leaves = [exact(hidden), exact(weight)]
    checks.cross_entropy_exact(*leaves, target).backward()
    (loaded_ops.linear_cross_entropy(hidden, weight, target) * 1024).backward()
    for name, found, wanted in zip(("dhidden", "dweight"), (hidden, weight), leaves):
        assert_close(found.grad, wanted.grad * 1024, dtype, name)
    in_fp32 = leaf(weight)
    loaded_ops.linear_cross_entropy(hidden, in_fp32, target, accum_dtype=FP32).backward()
    assert relative_error(weight.grad, in_fp32.grad * 1024) <= 1e-3


def test_many_classes_are_added_up_in_slices(loaded_ops, monkeypatch):
    monkeypatch.setattr(loss_module(loaded_ops, "linear_head"), "SLICE", 16)
    checks.check_linear_cross_entropy(loaded_ops, "cpu", BF16, 50, 8, 1001, accum_dtype=FP32)


# ---------------------------------------------------------------- what counts
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("stray", (False, True))
def test_a_token_that_does_not_count_is_not_predicted_right(ops, monkeypatch, reduction, stray):
    """Where its label is -1, as the prediction of such a token is: ignore_index, or on a GPU a label outside the vocabulary."""
    if stray:
        monkeypatch.setattr(loss_module(ops), "_check", lambda *_: None)
    hidden, weight = randn(6, 16, dtype=FP32, device="cpu"), randn(9, 16, dtype=FP32, device="cpu", seed=1)
    best = (hidden @ weight.t()).argmax(1)
    target = best.clone()
    target[:2], target[2:4] = -1, (best[2:4] + 1) % 9
    found = ops.linear_cross_entropy(
        hidden, weight, target, ignore_index=-100 if stray else -1, return_token_accuracy=True, reduction=reduction
    )
    assert found.token_accuracy.tolist() == (0.5 if reduction == "mean" else [0, 0, 0, 0, 1, 1])


def of_logits(ops, hidden, weight, target, **options):
    return loss_module(ops, "cross_entropy").cross_entropy_of_logits(hidden @ weight.t(), target, **options)


@pytest.mark.parametrize("label", (-1, 9, 2**40))
@pytest.mark.parametrize("way", ("linear", "logits", "compiled"))
def test_a_label_outside_the_vocabulary_is_refused_on_a_cpu(loaded_ops, label, way):
    hidden, weight = randn(3, 8, dtype=FP32, device="cpu"), randn(9, 8, dtype=FP32, device="cpu", seed=1)
    function = {
        "linear": loaded_ops.linear_cross_entropy,
        "logits": lambda *args: of_logits(loaded_ops, *args),
        "compiled": torch.compile(loaded_ops.linear_cross_entropy, backend="aot_eager", fullgraph=True),
    }[way]
    function(hidden, weight, torch.tensor([1, -100, 8]))
    with pytest.raises(RuntimeError if way == "compiled" else ValueError, match="expected labels from 0 to 8, or -100"):
        function(hidden, weight, torch.tensor([1, label, 8]))


@pytest.mark.parametrize("dtype", (BF16, FP16, torch.float64), ids=str)
@pytest.mark.parametrize("of", (of_logits, lambda ops, *args, **options: ops.linear_cross_entropy(*args, **options)),
                         ids=("logits", "linear"))
def test_class_weights_of_any_dtype(loaded_ops, of, dtype):
    hidden, weight, target = randn(5, 8, dtype=FP32, device="cpu"), randn(9, 8, dtype=FP32, device="cpu", seed=1), torch.arange(5)
    class_weight = (torch.arange(9) + 1).to(dtype)
    for options in ({}, {"label_smoothing": 0.1}):
        found = of(loaded_ops, hidden, weight, target, class_weight=class_weight, **options)
        wanted = of(loaded_ops, hidden, weight, target, class_weight=class_weight.float(), **options)
        assert found.dtype == FP32 and torch.equal(found, wanted)


def test_class_weights_of_another_length_are_refused(loaded_ops):
    hidden, weight, target = torch.zeros(5, 8), torch.zeros(9, 8), torch.arange(5)
    with pytest.raises(ValueError, match="^class_weight is .* expected .9., one value a class"):
        of_logits(loaded_ops, hidden, weight, target, class_weight=torch.ones(10))


# ---------------------------------------------------------------- the number of items
def no_copy(operator, args):
    """Fails where a tensor is made of memory of the host, which on a GPU waits for the device."""
    is_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta"
    assert operator.name() not in ("aten::_to_copy", "aten::lift_fresh") or is_meta, operator.name()
    return 0


@pytest.mark.parametrize("items", (37, 2.5))
def test_a_number_of_items_is_made_on_the_device(loaded_ops, items):
    """The meta device stands in for a GPU: what lies on it can come from there alone."""
    with Operators(no_copy):
        assert loss_module(loaded_ops, "cross_entropy")._on_device(items, torch.device("meta")).device.type == "meta"
    assert loss_module(loaded_ops, "cross_entropy")._on_device(items, torch.device("cpu")) == items


# ---------------------------------------------------------------- numbers that fp16 cannot hold on their way
@pytest.mark.parametrize("chunk", (16, 64))
@pytest.mark.parametrize("case", checks.FP16_CASES, ids=range(len(checks.FP16_CASES)))
def test_gradients_in_fp16_are_right_where_fp16_can_hold_them(ops, monkeypatch, case, chunk):
    small_chunks(monkeypatch, ops, chunk * 40 * 2, chunk * 40 * 2)
    checks.check_fp16_range(ops, "cpu", 40, 64, **{"upstream": 1.0, "class_weight": None, **case})


def test_infinity_in_fp16_reaches_the_gradients_of_its_token_alone(ops):
    """The gradient overflows as in PyTorch, which a GradScaler looks for."""
    hidden, weight = leaf(randn(3, 16, dtype=FP16, device="cpu")), randn(9, 16, dtype=FP16, device="cpu", seed=1)
    with torch.no_grad():
        hidden[1, 0] = float("inf")
    ops.linear_cross_entropy(hidden, leaf(weight), torch.arange(3)).backward()
    assert torch.isfinite(hidden.grad).all(1).tolist() == [True, False, True]
