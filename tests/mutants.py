"""Errors to plant in the kernels and in the operations, and the cheapest check that must notice each.

A mutant replaces one piece of text inside one function of a copy of the package. The copy runs with the interpreter in the
driver's place, or in plain PyTorch, and the check compares it with float64. A mutant that survives is a hole in the checks.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import importlib
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import op_cases as cases
from tests import op_checks as checks
from tests.interpreter import InterpreterError
from tests.interpreter.backend import InterpreterBackend, runtime_of
from tests.op_checks import exact, leaf, randn, rms_norm_exact
from tests.ops import NAMES, module_of, suite
from tests.tolerances import assert_close

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "torch-ext" / "qwen3"
OPERATIONS = (
    "rms_norm", "wide_rms_norm", "rotary", "qk_norm_rotary", "swiglu", "cross_entropy", "linear_cross_entropy", "column_sum", "scale", "experts",
    "clamped_gate", "grouped_gemm", "adamw", "general_rms_norm", "layer_norm", "group_norm", "poly_norm", "dyt", "softmax", "sparsemax", "sums",
    "gated_activation", "llama4_rope", "mrope", "divergence", "neighborhood_attention",
)  # fmt: skip
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = "cpu"


class Mutant(NamedTuple):
    """file: `kernel_src/x.py`, or a file of the package; function: where `old`, which must occur there once, becomes `new`.
    check: of `CHECKS`; kernels: False to run in PyTorch."""

    file: str
    function: str
    old: str
    new: str
    check: str
    kernels: bool = True

    def __str__(self):
        return f"{self.file}:{self.function}: {self.old} -> {self.new}"


# ---------------------------------------------------------------- planting
def functions_of(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            yield from functions_of(node, f"{prefix}{node.name}.")


def plant(source: str, mutant: Mutant) -> str:
    """The source with the error in it. Raises ValueError when the mutant does not fit the source any more."""
    nodes = dict(functions_of(ast.parse(source)))
    if mutant.function not in nodes:
        raise ValueError(f"{mutant}: there is no such function")
    lines = source.splitlines(keepends=True)
    first, last = nodes[mutant.function].lineno - 1, nodes[mutant.function].end_lineno
    text = "".join(lines[first:last])
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant}: the text occurs {text.count(mutant.old)} times, expected once")
    return "".join([*lines[:first], text.replace(mutant.old, mutant.new), *lines[last:]])


def kernel_module(mutant: Mutant) -> types.ModuleType:
    """The module of kernel_src with the error in it."""
    path = ROOT / mutant.file
    module = types.ModuleType(f"kernel_src.{path.stem}")
    exec(compile(plant(path.read_text(encoding="utf-8"), mutant), str(path), "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def planted(folder: Path, name: str, mutant: Mutant | None, kernels: bool = True):
    """A copy of the package, imported from `folder` as `name`, with the error in it. kernels: whether the interpreter runs them."""
    leave_out = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(SOURCES, folder / name, ignore=leave_out)
    shutil.copytree(SOURCES.parent / "shared", folder / name / "shared", ignore=leave_out)
    replaced = {}
    if mutant is not None and mutant.file.startswith("kernel_src/"):
        module = kernel_module(mutant)
        replaced = {module.__name__: sys.modules.get(module.__name__)}
        sys.modules[module.__name__] = module
    elif mutant is not None:
        path = folder / name / mutant.file
        path.write_text(plant(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
    sys.path.insert(0, str(folder))
    # A result that was never written must not be what an earlier test left in memory: new memory is NaN.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        package = importlib.import_module(name)
        if kernels:
            runtime = runtime_of(package)
            runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
        yield package
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[module]
        for module, original in replaced.items():
            del sys.modules[module]
            if original is not None:
                sys.modules[module] = original


# ---------------------------------------------------------------- checks that op_checks has no need of
def check_column_sum(ops):
    """More rows than a block takes in one step, columns that fill no tile; then other rows."""
    common = importlib.import_module(f"{ops.__name__}.shared.ops.common")
    for rows in (600, 3):
        partial = randn(rows, 37, dtype=FP32, device=CPU)
        assert_close(common.column_sum(partial, FP32), partial.double().sum(0), FP32, f"column sum of {rows} rows")


def lay_side_by_side(ops, weights):
    common = importlib.import_module(f"{ops.__name__}.shared.ops.common")
    common.lay_side_by_side(weights)
    assert common.side_by_side(weights) is not None


def check_norm_attention_inputs(ops, packed=False):
    decoder = importlib.import_module(f"{ops.__name__}.shared.ops.decoder_nodes")
    shape = (2, 3)
    x, norm = leaf(randn(6, 1024, dtype=BF16, device=CPU)), leaf(randn(1024, dtype=BF16, device=CPU, seed=1) + 1)
    weights = [leaf(randn(n * 128, 1024, dtype=BF16, device=CPU, seed=2 + i, scale=1 / 32)) for i, n in enumerate((8, 4, 4))]
    if packed:
        lay_side_by_side(ops, weights)
    norms = [leaf(randn(128, dtype=BF16, device=CPU, seed=5 + i) + 1) for i in range(2)]
    angles = randn(1, 3, 128, dtype=FP32, device=CPU, seed=7)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    results = decoder.norm_attention_inputs(x, norm, weights, *norms, cos, sin, shape)
    grads = [randn(*r.shape, dtype=BF16, device=CPU, seed=9 + i) for i, r in enumerate(results)]
    torch.autograd.backward(results, grads)
    x64, norm64, weights64, norms64 = exact(x), exact(norm), [exact(w) for w in weights], [exact(n) for n in norms]
    normed = rms_norm_exact(x64, norm64, 1e-6)
    q64, k64, v64 = ((normed @ w.t()).view(*shape, -1, 128) for w in weights64)
    heads = [rms_norm_exact(t, w, 1e-6).transpose(1, 2) for t, w in zip((q64, k64), norms64, strict=True)]
    results64 = [*checks.rotary_exact(*heads, cos.double(), sin.double(), 1), v64.transpose(1, 2), x64 * 1]
    torch.autograd.backward(results64, [g.double() for g in grads])
    for found, wanted in zip(results, results64, strict=True):
        assert_close(found, wanted, BF16, "attention's inputs", 2)
    leaves, leaves64 = (x, norm, *weights, *norms), (x64, norm64, *weights64, *norms64)
    for found, wanted in zip(leaves, leaves64, strict=True):
        assert_close(found.grad, wanted.grad, BF16, "gradient of attention's inputs", 2)


def check_norm_mlp(ops, packed=False, attended=False, inner=48):
    decoder = importlib.import_module(f"{ops.__name__}.shared.ops.decoder_nodes")
    x, norm = leaf(randn(3, 1024, dtype=BF16, device=CPU)), leaf(randn(1024, dtype=BF16, device=CPU, seed=1) + 1)
    shapes = (inner, 1024), (inner, 1024), (1024, inner)
    weights = [leaf(randn(*s, dtype=BF16, device=CPU, seed=2 + i, scale=s[1] ** -0.5)) for i, s in enumerate(shapes)]
    if packed:
        lay_side_by_side(ops, weights[:2])
    before = [leaf(randn(3, 64, dtype=BF16, device=CPU, seed=7)), leaf(randn(1024, 64, dtype=BF16, device=CPU, seed=8, scale=1 / 8))]
    before = before if attended else []
    y = decoder.norm_mlp(x, norm, *weights, 1e-6, *before)
    dy = randn(*y.shape, dtype=BF16, device=CPU, seed=9)
    y.backward(dy)
    x64, norm64, weights64, before64 = exact(x), exact(norm), [exact(w) for w in weights], [exact(t) for t in before]
    total = x64 + before64[0] @ before64[1].t() if attended else x64
    normed = rms_norm_exact(total, norm64, 1e-6)
    gate, up = normed @ weights64[0].t(), normed @ weights64[1].t()
    y64 = total + (torch.nn.functional.silu(gate) * up) @ weights64[2].t()
    y64.backward(dy.double())
    assert_close(y, y64, BF16, "norm and MLP", 2)
    for found, wanted in zip((x, norm, *weights, *before), (x64, norm64, *weights64, *before64), strict=True):
        assert_close(found.grad, wanted.grad, BF16, "gradient of norm and MLP", 2)


def check_labels_out_of_range(ops):
    """On a GPU they count like ignore_index: what the CPU's check of the labels keeps from the kernels."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.linear_cross_entropy")
    module._check = lambda *_: None
    hidden, weight = leaf(randn(5, 8, dtype=FP32, device=CPU)), leaf(randn(17, 8, dtype=FP32, device=CPU, seed=1))
    target = torch.tensor([3, -7, 17, 2**40, 16])
    ops.linear_cross_entropy(hidden, weight, target).backward()
    hidden64, weight64 = exact(hidden), exact(weight)
    target64 = torch.where((target >= 0) & (target < 17), target, -100)
    torch.nn.functional.cross_entropy(hidden64 @ weight64.t(), target64).backward()
    assert_close(hidden.grad, hidden64.grad, FP32, "labels out of range, dhidden")
    assert_close(weight.grad, weight64.grad, FP32, "labels out of range, dweight")


def check_piece_of_minus_infinity(ops):
    """A bias of -inf over all classes of one tile, as a mask of the vocabulary makes it."""
    hidden, weight = leaf(randn(2, 4, dtype=FP32, device=CPU)), leaf(randn(4100, 4, dtype=FP32, device=CPU, seed=1))
    bias = torch.zeros(4100)
    bias[4096:] = -float("inf")
    loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([1, 2]), bias)
    loss.backward()
    hidden64 = exact(hidden)
    loss64 = torch.nn.functional.cross_entropy(hidden64 @ weight.detach().double().t() + bias, torch.tensor([1, 2]))
    loss64.backward()
    assert_close(loss, loss64, FP32, "loss")
    assert_close(hidden.grad, hidden64.grad, FP32, "dhidden")


def check_second_backward_pass(ops):
    hidden, weight = leaf(randn(3, 8, dtype=FP32, device=CPU)), leaf(randn(17, 8, dtype=FP32, device=CPU, seed=1))
    loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3]))
    (first,) = torch.autograd.grad(loss, hidden, torch.tensor(0.5), retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(loss, hidden, torch.tensor(0.5))
    assert_close(second, first.double(), FP32, "second backward pass")


def check_fp16_gradients_of_many_tokens(ops):
    """A probability of 1 / 1500 divided by 2000 tokens is among the last numbers above zero that fp16 has."""
    checks.check_linear_cross_entropy(ops, CPU, FP16, 2000, 4, 1500, upstream=1.0, ignored=0.0)


def check_the_range_of_fp16(ops):
    """Chunks of tokens whose class weights are 10^6 apart, with a bias."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.linear_head")
    module.SMALL_CHUNK = 16 * 40 * 2
    checks.check_fp16_range(ops, CPU, 40, 64, 1.0, lambda target: torch.where(target < 20, 5e3, 5e-3), bias=True)


def check_unreduced_loss(ops):
    """Of every token, with all that the backward pass needs again."""
    cases.check_a_second_backward_pass(cases.operations(ops), "linear_cross_entropy", FP32, CPU)
    checks.check_linear_cross_entropy(ops, CPU, FP32, 5, 16, 40, reduction="none", bias=True, class_weight=True)


def _alone(operation):
    """Each gradient of an operation, asked for alone. That autograd refuses one is as good as a difference."""

    def check(ops):
        try:
            cases.check_that_one_gradient_alone_is_the_same(cases.operations(ops), operation, FP32, CPU)
        except RuntimeError as error:
            raise AssertionError(f"{operation}: {error}") from error

    return check


def check_evaluation_in_steps(ops):
    module = importlib.import_module(f"{ops.__name__}.shared.ops.linear_cross_entropy")
    module.LINEAR_BYTES, module.LINEAR_TOKENS = 0, 64
    checks.check_evaluation(ops, CPU, BF16, 100, 64, 40)


def check_evaluation_of_labels_out_of_range(ops):
    module = importlib.import_module(f"{ops.__name__}.shared.ops.linear_cross_entropy")
    module._check = lambda *_: None
    hidden, weight = randn(5, 64, dtype=BF16, device=CPU), randn(300, 64, dtype=BF16, device=CPU, seed=1)
    losses = ops.linear_cross_entropy(hidden, weight, torch.tensor([3, -7, 300, 2**40, 299]), reduction="none")
    assert_close(losses, checks.cross_entropy_exact(hidden.double(), weight.double(), torch.tensor([3, -100, -100, -100, 299]), reduction="none"), FP32)


def check_evaluation_of_infinities(ops):
    """Logits of -inf in a whole tile of the vocabulary, as a weight that overflowed makes them."""
    hidden, weight = randn(3, 64, dtype=BF16, device=CPU).abs(), randn(300, 64, dtype=BF16, device=CPU, seed=1)
    weight[256:, 0] = -float("inf")
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction="none")
    assert_close(losses, checks.cross_entropy_exact(hidden.double(), weight.double(), torch.arange(3), reduction="none"), FP32)


def check_evaluation_of_large_logits(ops):
    """Of which 2 to the power of one overflows, and almost any other distance from the largest too."""
    hidden, weight = 100 * randn(3, 64, dtype=BF16, device=CPU), randn(40, 64, dtype=BF16, device=CPU, seed=1)
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(3), reduction="none")
    assert_close(losses, checks.cross_entropy_exact(hidden.double(), weight.double(), torch.arange(3), reduction="none"), FP32)


def check_evaluation_of_certain_labels(ops):
    """The label's logit is by far the largest: the loss is 0 but for roundings, and never below."""
    hidden = 10 * randn(40, 256, dtype=BF16, device=CPU)
    weight = torch.cat([hidden, randn(20, 256, dtype=BF16, device=CPU, seed=1)])
    losses = ops.linear_cross_entropy(hidden, weight, torch.arange(40), reduction="none")
    assert (losses >= 0).all() and (losses < 1e-2).all()


def check_evaluation_that_is_not_taken(ops):
    for options in ({"softcap": 2.0}, {"label_smoothing": 0.3}):
        checks.check_evaluation(ops, CPU, BF16, 3, 64, 40, bound=BF16, **options)
    hidden, weight, bias = (randn(*s, dtype=BF16, device=CPU, seed=i) for i, s in enumerate(((3, 64), (40, 64), (40,))))
    target = torch.arange(3)
    loss = ops.linear_cross_entropy(hidden, weight, target, 3 * bias)
    assert_close(loss, checks.cross_entropy_exact(hidden.double(), weight.double(), target, 3 * bias.double()), BF16, "loss", 3)


def check_adamw_in_slabs(ops):
    """More elements than one launch may reach over, with the bound put low."""
    with checks.limit(ops, "common", "SLAB", 1024):
        checks.check_adamw(ops, CPU, FP32, ((5, 512), (1501,), (2048,)))


def launched(ops) -> list:
    """The names of the variants that ran so far."""
    return runtime_of(ops).launch.backend.launched


def check_that_slabs_are_launches(ops):
    counts = []
    for slab in (2**30, 1024):
        with checks.limit(ops, "common", "SLAB", slab):
            before = len(launched(ops))
            for kernel in list(runtime_of(ops).launch.tuner.kernels):
                kernel.forget()
            checks.check_adamw(ops, CPU, FP32, ((5, 512),))
            counts.append(len(launched(ops)) - before)
    assert counts[1] > counts[0]


def check_norm_in_parts(ops):
    """More rows than a grid has blocks, with the bound put low."""
    with checks.limit(ops, "common", "GRID_MAX", (64, 1, 1)):
        before = len(launched(ops))
        checks.check_rms_norm(ops, CPU, FP32, (130, 1024))
        assert len(launched(ops)) - before >= 4


def check_elementwise_shapes(ops):
    """Tensors that differ are refused before anything is launched."""
    kernel = importlib.import_module(f"{ops.__name__}.shared.ops.swiglu")._forward_kernel
    for other in (torch.zeros(2, 512), torch.zeros(4, 512, dtype=BF16)):
        try:
            kernel(torch.zeros(4, 512), other, torch.zeros(4, 512))
        except ValueError:
            continue
        raise AssertionError("tensors of two shapes or dtypes were launched on")


def check_launch_keys(ops):
    """Calls that differ from the one before in a single thing that a launch follows from."""
    weight = randn(1024, dtype=FP32, device=CPU, seed=1)

    def check(x, w=weight):
        dtype = x.dtype
        assert_close(ops.rms_norm(x, w.to(dtype), 1e-6), rms_norm_exact(x.double(), w.to(dtype).double(), 1e-6), dtype)

    x = randn(6, 1024, dtype=FP32, device=CPU)
    wide = randn(6, 2048, dtype=FP32, device=CPU, seed=2)
    odd = torch.empty(6 * 1024 + 8)[1 + (-x.data_ptr() % 16) // 4 :][: 6 * 1024].view(6, 1024)
    columns = randn(1024, 6, dtype=FP32, device=CPU, seed=4)
    for _ in range(2):
        for case in (x.bfloat16(), x.half(), x[:4], x, wide[:, :1024], wide[:, 1024:], odd.copy_(x), columns.t(), -columns.t()):
            check(case)
    hidden, head, target = randn(5, 64, dtype=FP32, device=CPU), randn(9, 64, dtype=FP32, device=CPU, seed=3), torch.tensor([1, 2, 3, 4, 5])
    for ignored in (1, 2, 3):
        loss = ops.linear_cross_entropy(leaf(hidden), head, target, ignore_index=ignored)
        wanted = torch.nn.functional.cross_entropy(hidden.double() @ head.double().t(), target, ignore_index=ignored)
        assert_close(loss, wanted, FP32)


def check_that_results_are_never_copies(ops):
    launch = runtime_of(ops).launch
    kernel = launch.Kernel("column_sum", grid=lambda c, partial, out: (1,), views=lambda partial, out: (partial, out.clone()), reads=("partial",))
    try:
        kernel(torch.ones(2, 4), torch.zeros(4))
    except launch.PromiseError:
        return
    raise AssertionError("a result was written into a copy")


def check_adamw_that_is_not_taken(ops):
    """What no kernel takes: float64, a gradient or an average of other strides or another dtype than the parameter's, a gradient that
    is there with its sign turned."""
    checks.check_adamw(ops, CPU, torch.float64)
    for change in ("grad", "exp_avg", "exp_avg_sq", "dtype", "sign"):
        param = torch.nn.Parameter(randn(8, 64, dtype=FP32, device=CPU))
        optimizer, grad = ops.AdamW([param], lr=0.1), randn(8, 64, dtype=FP32, device=CPU, seed=1)
        param.grad = grad.t().contiguous().t() if change == "grad" else torch._neg_view(-grad) if change == "sign" else grad
        zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        state = optimizer.state[param] = {"step": torch.tensor(0.0), **zeros}
        if change == "dtype":
            state["exp_avg_sq"] = state["exp_avg_sq"].double()
        elif change in state:
            state[change] = state[change].t().contiguous().t()
        wanted = checks.adamw_exact(param, grad, *zeros.values(), 1, 0.1, (0.9, 0.999), 1e-8, 0.01)
        with checks.small_parameters_too(ops):
            optimizer.step()
        for found, exactly in zip((param, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
            assert_close(found, exactly, FP32, f"AdamW with another {change}")


def check_adamw_of_shards(ops, replicated=False):
    """Parameters of FSDP2 and tensor parallelism, on a mesh of this process alone: the kernel steps what it holds, and autograd notices.
    replicated: the gradient is spread in another way than the parameter, so that no kernel may run."""
    with mesh_of_one() as mesh:
        param = torch.nn.Parameter(distribute_tensor(randn(4, 512, dtype=FP32, device=CPU), mesh, [Shard(0)]))
        grad = randn(4, 512, dtype=FP32, device=CPU, seed=1)
        param.grad = distribute_tensor(grad, mesh, [Replicate() if replicated else Shard(0)])
        before, optimizer = param.full_tensor().detach().clone(), ops.AdamW([param], lr=0.1, weight_decay=0.1)
        backend = runtime_of(ops).launch.backend
        backend.launched.clear()
        with checks.small_parameters_too(ops):
            optimizer.step()
        assert any(name.startswith("adamw") for name in backend.launched) != replicated, backend.launched
        zeros = torch.zeros_like(grad)
        wanted = checks.adamw_exact(before, grad, zeros, zeros, 1, 0.1, (0.9, 0.999), 1e-8, 0.1)
        assert_close(param.full_tensor(), wanted[0], FP32, "AdamW of a shard")


def check_that_autograd_notices_adamw(ops):
    """A backward pass that needs a parameter as it was fails, as it does with PyTorch's step; a DTensor too."""
    with mesh_of_one() as mesh:
        plain = torch.nn.Parameter(randn(512, dtype=FP32, device=CPU))
        shared = torch.nn.Parameter(distribute_tensor(randn(512, dtype=FP32, device=CPU), mesh, [Shard(0)]))
        for param, ones in ((plain, torch.ones(512)), (shared, distribute_tensor(torch.ones(512), mesh, [Shard(0)]))):
            loss = (param * ones.requires_grad_()).sum()
            param.grad = torch.ones_like(param)
            with checks.small_parameters_too(ops):
                ops.AdamW([param]).step()
            try:
                loss.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                raise AssertionError(f"autograd did not notice the step of a {type(param.data).__name__}")


@contextlib.contextmanager
def mesh_of_one():
    """A device mesh of this process alone."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(CPU, (1,))
    finally:
        if alone:
            dist.destroy_process_group()


def check_adamw_of_a_checkpoint(ops):
    """Steps with ours, then with PyTorch's, then with ours again, against PyTorch's alone."""
    makers = (ops.AdamW, torch.optim.AdamW, ops.AdamW), (torch.optim.AdamW,) * 3
    found = []
    for turn in makers:
        param, saved = torch.nn.Parameter(randn(3, 512, dtype=FP32, device=CPU)), None
        for i, maker in enumerate(turn):
            optimizer = maker([param], lr=0.1)
            if saved is not None:
                optimizer.load_state_dict(saved)
            for j in range(2):
                param.grad = randn(3, 512, dtype=FP32, device=CPU, seed=2 * i + j)
                with checks.small_parameters_too(ops):
                    optimizer.step()
            saved = optimizer.state_dict()
        found.append(param)
    assert_close(found[0], found[1], FP32, "AdamW through checkpoints")


def _of(check, *arguments, **options):
    return lambda ops: check(ops, CPU, *arguments, **options)


def check_wide(ops, check, shape, dtype=FP32):
    """GPT-OSS's norms, by the names of Qwen3's."""
    wide = importlib.import_module(f"{ops.__name__}.shared.ops.wide_rms_norm")
    check(types.SimpleNamespace(rms_norm=wide.wide_rms_norm, add_rms_norm=wide.wide_add_rms_norm), CPU, dtype, shape, eps=0.5)


CHECKS = {
    "wide_rms_norm": functools.partial(check_wide, check=checks.check_rms_norm, shape=(3, 40)),
    "wide_rms_norm_many_rows": functools.partial(check_wide, check=checks.check_rms_norm, shape=(19, 40)),
    "wide_add_rms_norm": functools.partial(check_wide, check=checks.check_add_rms_norm, shape=(3, 40)),
    "wide_add_rms_norm_many_rows": functools.partial(check_wide, check=checks.check_add_rms_norm, shape=(19, 40)),
    "wide_rms_norm_rounded": functools.partial(check_wide, check=checks.check_that_wide_rms_norm_rounds_once, shape=(19, 77), dtype=BF16),
    "column_sum": check_column_sum,
    "attention_inputs": check_norm_attention_inputs,
    "attention_inputs_packed": functools.partial(check_norm_attention_inputs, packed=True),
    "norm_mlp": check_norm_mlp,
    "norm_mlp_packed": functools.partial(check_norm_mlp, packed=True, inner=512),
    "norm_mlp_rows": functools.partial(check_norm_mlp, packed=True, inner=2048),
    "norm_mlp_attended": functools.partial(check_norm_mlp, attended=True),
    "labels": check_labels_out_of_range,
    "minus_infinity": check_piece_of_minus_infinity,
    "second_backward": check_second_backward_pass,
    "fp16_range": check_the_range_of_fp16,
    "fp16_loss": check_fp16_gradients_of_many_tokens,
    "rms_norm": _of(checks.check_rms_norm, FP32, (3, 1024), eps=0.5),
    "rms_norm_tail": _of(checks.check_rms_norm, BF16, (3, 2560), eps=0.5),
    "rms_norm_many_rows": _of(checks.check_rms_norm, FP32, (19, 1024)),
    "rms_norm_short": _of(checks.check_rms_norm, FP32, (81, 64), eps=0.5),
    "rms_norm_odd": _of(checks.check_rms_norm, FP32, (19, 1030), eps=0.5),
    "add_rms_norm": _of(checks.check_add_rms_norm, FP16, (3, 1024), eps=0.5),
    "add_rms_norm_tail": _of(checks.check_add_rms_norm, FP16, (3, 2560), eps=0.5),
    "add_rms_norm_odd": _of(checks.check_add_rms_norm, FP32, (3, 77)),
    "rotary": _of(checks.check_rotary, FP32, 2, 3, 16, 8, 128),
    "rotary_square": _of(checks.check_rotary, FP32, 2, 8, 8, 8, 128),
    "rotary_bf16": _of(checks.check_rotary, BF16, 2, 3, 40, 8, 128),
    "rotary_many_k": _of(checks.check_rotary, BF16, 1, 2, 16, 16, 128),
    "rotary_odd": _of(checks.check_rotary, FP32, 2, 3, 11, 3, 258),
    "rotary_odd_half": _of(checks.check_rotary, FP32, 1, 4, 12, 4, 64, half=True),
    "qk_norm_rotary": _of(checks.check_qk_norm_rotary, FP32, 2, 3, 16, 8, 128),
    "qk_norm_rotary_whole": _of(checks.check_qk_norm_rotary, FP32, 2, 4, 16, 8, 128),
    "qk_norm_rotary_tokens": _of(checks.check_qk_norm_rotary, FP32, 1, 19, 8, 8, 128),
    "qk_norm_rotary_eps": _of(checks.check_qk_norm_rotary, FP32, 1, 3, 8, 8, 128, eps=0.5),
    "qk_norm_rotary_alone": _alone("qk_norm_rotary"),
    "attention_inputs_alone": _alone("norm_attention_inputs"),
    "norm_mlp_alone": _alone("norm_mlp"),
    "mlp_alone": _alone("mlp"),
    "loss_again": lambda ops: cases.check_a_second_backward_pass(cases.operations(ops), "linear_cross_entropy", FP32, CPU),
    "loss_unreduced": check_unreduced_loss,
    "qk_norm_rotary_bf16": _of(checks.check_qk_norm_rotary, BF16, 2, 3, 40, 8, 128),
    "qk_norm_rotary_many_k": _of(checks.check_qk_norm_rotary, FP32, 1, 3, 16, 16, 128),
    "swiglu": _of(checks.check_swiglu, FP32, (3, 1536)),
    "swiglu_odd": _of(checks.check_swiglu, FP32, (2, 1501)),
    "mlp": _of(checks.check_mlp, FP32, 33, 64, 512),
    "mlp_apart": _of(checks.check_mlp, FP32, 32, 64, 160),
    "mlp_odd": _of(checks.check_mlp, FP32, 33, 64, 33),
    "loss": _of(checks.check_linear_cross_entropy, FP32, 3, 16, 4107),
    "loss_ignores_0": _of(checks.check_linear_cross_entropy, FP32, 8, 16, 17, ignore_index=0),
    "loss_pieces": _of(checks.check_linear_cross_entropy, FP32, 2, 8, 65 * 4096 + 5, ignored=0.0),
    "loss_none": _of(checks.check_linear_cross_entropy, FP32, 5, 16, 1003, reduction="none"),
    "loss_items": _of(checks.check_linear_cross_entropy, FP32, 5, 16, 40, num_items=37),
    "loss_smooth": _of(checks.check_linear_cross_entropy, FP32, 4, 16, 4107, label_smoothing=0.2, class_weight=True),
    "loss_softcap": _of(checks.check_linear_cross_entropy, FP32, 3, 16, 4107, softcap=3.0),
    "loss_bias": _of(checks.check_linear_cross_entropy, FP32, 5, 16, 40, bias=True),
    "loss_chunks": _of(checks.check_linear_cross_entropy, FP32, 2100, 4, 9),
    "loss_chunks_none": _of(checks.check_linear_cross_entropy, FP32, 2100, 4, 9, reduction="none"),
    "loss_none_weighted": _of(checks.check_linear_cross_entropy, FP32, 5, 16, 40, reduction="none", class_weight=True),
    "loss_nothing_counted": _of(checks.check_linear_cross_entropy, FP32, 5, 16, 40, ignored=1.0),
    "loss_smooth_ignored": _of(checks.check_linear_cross_entropy, FP32, 8, 16, 17, label_smoothing=0.2, ignore_index=0),
    "loss_returns": _of(
        checks.check_linear_cross_entropy, FP32, 20, 16, 17, lse_square_scale=0.1, use_token_scaling=True,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
    ),
    "loss_chunks_accum": _of(checks.check_linear_cross_entropy, BF16, 2100, 4, 9, accum_dtype=FP32),
    "loss_slices": _of(checks.check_linear_cross_entropy, BF16, 4, 8, 9000, accum_dtype=FP32),
    "evaluation": _of(checks.check_evaluation, BF16, 200, 128, 300),
    "evaluation_ignores_3": _of(checks.check_evaluation, BF16, 40, 64, 17, ignore_index=3),
    "evaluation_z_loss": _of(checks.check_evaluation, BF16, 5, 64, 17, lse_square_scale=0.1),
    "evaluation_groups": _of(checks.check_evaluation, FP16, 1100, 64, 257),
    "evaluation_labels": check_evaluation_of_labels_out_of_range,
    "evaluation_of_infinities": check_evaluation_of_infinities,
    "evaluation_of_certain_labels": check_evaluation_of_certain_labels,
    "evaluation_of_wide_hidden_states": _of(checks.check_evaluation, BF16, 3, 1088, 40),
    "evaluation_of_large_logits": check_evaluation_of_large_logits,
    "evaluation_steps": check_evaluation_in_steps,
    "evaluation_not_taken": check_evaluation_that_is_not_taken,
    "experts": _of(checks.check_experts, FP32, 70, 24, 20, 4, 2, skew=0.6),
    "experts_packed": _of(checks.check_experts, BF16, 70, 24, 128, 4, 2, skew=0.6),
    "experts_many": _of(checks.check_experts, FP32, 1100, 8, 4, 2, 1, skew=9.0),
    "experts_wide": _of(checks.check_experts, FP32, 9, 1032, 20, 8, 4, absent=0.3),
    "experts_silu": _of(checks.check_experts, FP32, 41, 24, 20, 4, 2, gpt_oss=False),
    "experts_silu_pieces": _of(checks.check_experts, FP32, 41, 24, 100, 4, 2, gpt_oss=False),
    "experts_silu_exact": _of(checks.check_experts, FP16, 41, 24, 128, 4, 2, gpt_oss=False),
    "experts_nobody": _of(checks.check_experts, FP32, 7, 24, 64, 4, 2, absent=1.1),
    "grouped": _of(checks.check_grouped_gemm, BF16, [70, 0, 129, 3], 136, 264, 9),
    "grouped_many": _of(checks.check_grouped_gemm, FP16, [1] * 10, 8, 264),
    "experts_again": lambda ops: checks.check_second_backward_of_experts(ops, CPU),
    "experts_nan": lambda ops: checks.check_nan_in_experts(ops, CPU, True),
    "scale": _of(checks.check_linear_cross_entropy, FP32, 5, 32, 1100, upstream=0.25),
    "scale_odd": _of(checks.check_linear_cross_entropy, FP32, 5, 31, 1101, upstream=0.25),
    "adamw": _of(checks.check_adamw, FP32),
    "adamw_odd": _of(checks.check_adamw, FP32, ((1501,), (1000,))),
    "adamw_in_slabs": check_adamw_in_slabs,
    "adamw_counts_slabs": check_that_slabs_are_launches,
    "norm_in_parts": check_norm_in_parts,
    "elementwise_shapes": check_elementwise_shapes,
    "launch_keys": check_launch_keys,
    "launch_copies": check_that_results_are_never_copies,
    "adamw_not_taken": check_adamw_that_is_not_taken,
    "adamw_of_checkpoints": check_adamw_of_a_checkpoint,
    "adamw_sharded": check_adamw_of_shards,
    "adamw_replicated": functools.partial(check_adamw_of_shards, replicated=True),
    "adamw_noticed": check_that_autograd_notices_adamw,
}


# ---------------------------------------------------------------- errors in the kernels
def _in(file, check, function, *pairs, kernels=True):
    """Mutants of one function: (old, new), or (old, new, another check)."""
    return [Mutant(file, function, old, new, *(other or [check]), kernels) for old, new, *other in pairs]


KERNEL_MUTANTS = [
    *_in("kernel_src/column_sum.py", "column_sum", "sum_columns",
         ("i * ROWS + ct", "ct"),
         ("* COLS +", "+"),
         ("padding_value=0", "padding_value=1"),
         ("acc + ct.gather", "ct.gather"),
         ("out.dtype), check_bounds=True", "out.dtype), check_bounds=False")),
    *_in("kernel_src/scale.py", "scale", "scale_in_place",
         ("v * f", "v"),
         ("f != 1.0", "f == 1.0"),
         ("ct.num_blocks(0)", "2 * ct.num_blocks(0)"),
         ("i * TILE + ct", "ct"),
         ("x.dtype), check_bounds=True", "x.dtype), check_bounds=False", "scale_odd")),
    *_in("kernel_src/adamw.py", "adamw", "stepped",
         ("beta1 * m", "m"),
         ("rest1 * g", "g"),
         ("beta2 * v", "v"),
         ("rest2 * g * g", "rest2 * g"),
         ("rest2 * g * g", "rest1 * g * g"),
         ("keep * p", "p"),
         ("p - step_size", "p + step_size"),
         ("step_size * m", "step_size * g"),
         ("ct.sqrt(v) * root", "ct.sqrt(v)"),
         ("ct.sqrt(v)", "v"),
         (" + eps", ""),
         ("+ eps), m, v", "+ eps), v, m")),
    *_in("kernel_src/adamw.py", "adamw", "adamw",
         ("at = ct.bid(0)", "at = 0"),
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("read(exp_avg, at), read(exp_avg_sq, at)", "read(exp_avg_sq, at), read(exp_avg, at)"),
         ("ct.scatter(param, at", "ct.scatter(grad, at"),
         ("ct.astype(m, exp_avg.dtype)", "ct.astype(v, exp_avg.dtype)"),
         ("ct.astype(v, exp_avg_sq.dtype)", "ct.astype(m, exp_avg_sq.dtype)")),
    *_in("kernel_src/adamw.py", "adamw_odd", "adamw_any",
         ("ct.bid(0) * TILE +", ""),
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("param.dtype), check_bounds=True", "param.dtype), check_bounds=False"),
         ("exp_avg.dtype), check_bounds=True", "exp_avg.dtype), check_bounds=False"),
         ("exp_avg_sq.dtype), check_bounds=True", "exp_avg_sq.dtype), check_bounds=False")),
    *_in("kernel_src/swiglu.py", "swiglu", "sigmoid", ("a * (-LOG2E)", "a * LOG2E"), ("a * (-LOG2E)", "-a")),
    *_in("kernel_src/swiglu.py", "swiglu", "piece",
         ("ct.bid(0) // pieces", "0"),
         ("* TILE +", "+", "norm_mlp_rows"),
         ("% pieces", "% (pieces + 1)", "norm_mlp_rows"),
         ("ct.bid(0) % pieces * TILE", "0", "norm_mlp_rows")),
    *_in("kernel_src/swiglu.py", "swiglu", "forward",
         ("gate * sigmoid(gate)", "sigmoid(gate)"),
         (" * up, dtype", ", dtype")),
    *_in("kernel_src/swiglu.py", "swiglu", "backward",
         ("1.0 - s", "1.0 + s"),
         ("s + silu", "s - silu"),
         ("dout * up", "dout"),
         ("dout * silu, silu", "dout * s, silu")),
    *_in("kernel_src/swiglu.py", "swiglu", "swiglu_backward",
         ("dg, du, _", "du, dg, _"),
         ("ct.scatter(dup, at, ct.astype(du", "ct.scatter(dup, at, ct.astype(dg")),
    *_in("kernel_src/swiglu.py", "mlp", "swiglu_backward_recompute", ("forward(g, u", "forward(u, g")),
    *_in("kernel_src/swiglu.py", "mlp_odd", "swiglu_any_backward_recompute", ("forward(g, u", "forward(u, g")),
    *_in("kernel_src/swiglu.py", "swiglu_odd", "swiglu_any_forward",
         ("ct.bid(0) * TILE +", ""),
         ("out.dtype), check_bounds=True", "out.dtype), check_bounds=False")),
    *_in("kernel_src/swiglu.py", "swiglu_odd", "swiglu_any_backward", ("read_padded(gate, o), read_padded(up, o)", "read_padded(up, o), read_padded(gate, o)")),
    *_in("kernel_src/rotary.py", "rotary", "angles",
         ("token % table.shape[0]", "token"),
         ("(row, part)", "(row, 0)")),
    *_in("kernel_src/rotary.py", "rotary", "rotate",
         ("x1 * c1 - x2 * s1", "x1 * c1 + x2 * s1"),
         ("x1 * s2", "x2 * s2"),
         ("x1 * s2", "x1 * s1")),
    *_in("kernel_src/rotary.py", "rotary", "rotate_back",
         ("y2 * s2", "y2 * s1"),
         ("y2 * c2 - y1 * s1", "y2 * c2 + y1 * s1")),
    *_in("kernel_src/rotary.py", "rotary", "rotate_group",
         ("if BACKWARD", "if not BACKWARD"),
         ("write_heads(y, token, group, 1", "write_heads(y, token, group, 0"),
         ("read_heads(x, token, group, 1", "read_heads(x, token, 0, 1")),
    *_in("kernel_src/rotary.py", "rotary", "rotary",
         ("angles(cos, token, FULL", "angles(cos, token, 0"),
         ("k.shape[1] // K_HEADS", "q.shape[1] // Q_HEADS"),
         ("group < k.shape[1]", "group < 0 * k.shape[1]"),
         ("Q_HEADS // Q_TAIL", "0", "rotary_bf16"),
         ("Q_TAIL > 0", "Q_TAIL > 99", "rotary_bf16")),
    *_in("kernel_src/rotary.py", "rotary_odd", "rotary_any",
         ("token % cos.shape[0]", "token"),
         ("i * HALF +", ""),
         ("ct.minimum(i * HALF + ct.arange(HALF, dtype=ct.int32), half - 1)", "i * HALF + ct.arange(HALF, dtype=ct.int32)"),
         ("read(sin, (row, cols + second))", "read(sin, (row, cols))"),
         ("cos.shape[1] - half", "half", "rotary_odd_half"),
         ("ct.cdiv(q.shape[1], Q_HEADS)", "q.shape[1] // Q_HEADS")),
    *_in("kernel_src/rotary.py", "rotary_odd", "rotate_any",
         ("ct.minimum(group * HEADS + ct.arange(HEADS, dtype=ct.int32), x.shape[1] - 1)",
          "(group * HEADS + ct.arange(HEADS, dtype=ct.int32))"),
         ("group * HEADS +", ""),
         ("x.shape[2] // 2", "x.shape[2] // 2 - 1")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "inverse_rms", ("0.5 / HALF", "1.0 / HALF"), ("x1 * x1 + x2 * x2", "x1 * x1 + x1 * x2")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "forward",
         ("norm_weight(weight, 1, HALF)", "norm_weight(weight, 0, HALF)"),
         ("x2 * r", "x2"),
         ("write_heads(y, token, group, 1, y2)", "write_heads(y, token, group, 1, y1)")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "qk_norm_rotary_forward",
         ("forward(k, k_out, k_weight", "forward(k, k_out, q_weight"),
         ("Q_HEADS // Q_TAIL", "0", "qk_norm_rotary_bf16"),
         ("angles(sin, token, FULL", "angles(sin, token, 0")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "backward",
         ("d1 * w1", "d1"),
         ("n2 * mean", "n1 * mean"),
         ("(d1 - n1 * mean) * r", "(d1 + n1 * mean) * r"),
         ("(d2 - n2 * mean) * r", "d2 - n2 * mean"),
         ("acc2 + d2 * n2", "d2 * n2"),
         ("acc1 if part == 0 else acc2", "acc2 if part == 0 else acc1"),
         ("0.5 / HALF", "1.0 / HALF"),
         ("range(ct.bid(0), ct.cdiv(x.shape[0]", "range(0, ct.cdiv(x.shape[0]", "qk_norm_rotary_tokens"),
         ("ct.cdiv(x.shape[0], TOKENS)", "x.shape[0] // TOKENS", "qk_norm_rotary_tokens"),
         ("rotate_back(g1, g2", "rotate(g1, g2")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary_whole", "token_angles",
         ("tokens % ct.cdiv(table.shape[0], TOKENS) * TOKENS", "tokens * TOKENS"),
         ("table.shape[0] - 1", "table.shape[0]", "qk_norm_rotary_many_k")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "column_sum_pair",
         ("sum_columns(second, second_out", "sum_columns(first, second_out"),
         ("ct.bid(1) == 0", "ct.bid(0) >= 0")),
    *_in("kernel_src/qk_norm_rotary.py", "qk_norm_rotary", "qk_norm_rotary_backward",
         ("ct.bid(0) * q_groups + group", "group", "qk_norm_rotary_tokens"),
         ("dk_weight, cos, sin, group - q_groups", "dk_weight, cos, sin, group - q_groups + 1"),
         ("ct.bid(0) * k_groups + group - q_groups", "ct.bid(0) * k_groups", "qk_norm_rotary_many_k")),
    *_in("kernel_src/rms_norm.py", "rms_norm_odd", "read_padded", ("padding_value=0", "padding_value=1")),
    *_in("kernel_src/rms_norm.py", "rms_norm", "scaled", (" * weight", "")),
    *_in("kernel_src/rms_norm.py", "rms_norm", "rms_norm_forward",
         (" + eps", ""),
         ("scaled(xf * r,", "scaled(xf,"),
         ("1.0 / (TILE + TAIL)", "1.0 / TILE", "rms_norm_tail"),
         ("total = total + ct.sum(tail * tail, axis=0, keepdims=False)", "pass", "rms_norm_tail"),
         ("dtype=ct.int32) + TILE", "dtype=ct.int32)", "rms_norm_tail"),
         ("scaled(tail * r", "scaled(tail", "rms_norm_tail")),
    *_in("kernel_src/rms_norm.py", "rms_norm", "backward_rows",
         ("(g - n * mean) * r", "(g + n * mean) * r"),
         ("(g - n * mean) * r", "g - n * mean"),
         ("ct.sum(g * n)", "ct.sum(d * n)"),
         ("acc = acc + d * n", "acc = acc + g * n"),
         ("        n = n * r", "        pass"),
         ("        acc = acc + d * n", "        acc = d * n", "rms_norm_many_rows"),
         ("range(block, x.shape[0]", "range(0, x.shape[0]", "rms_norm_many_rows"),
         ("x.shape[0], ct.num_blocks(0)", "x.shape[0], ct.num_blocks(0) + 1", "rms_norm_many_rows"),
         ("total = total + ct.sum(tail_g", "total = total - ct.sum(tail_g", "rms_norm_tail"),
         ("tail_n * mean) * r", "tail_n * mean)", "rms_norm_tail"),
         ("tail_acc + tail_d", "tail_acc - tail_d", "rms_norm_tail"),
         ("1.0 / (TILE + TAIL)", "1.0 / TILE", "rms_norm_tail"),
         ("gradient + past if PAST", "gradient if PAST", "add_rms_norm"),
         ("read_tile(dtotal, row, 0, TILE, LATENCY)", "read_tile(dy, row, 0, TILE, LATENCY)", "add_rms_norm"),
         ("(g - n * mean)", "(g - mean)", "add_rms_norm"),
         ("tail_gradient + tail_past if PAST", "tail_gradient if PAST", "add_rms_norm_tail"),
         ("read_tile(dtotal, row, TILE, TAIL, LATENCY)", "read_tile(dtotal, row, 0, TAIL, LATENCY)", "add_rms_norm_tail")),
    *_in("kernel_src/rms_norm.py", "rms_norm", "rms_norm_backward", ("LATENCY, False)", "LATENCY, True)"), ("(dx, dy, dy, x,", "(dx, x, dy, x,")),
    *_in("kernel_src/rms_norm.py", "norm_mlp", "rms_norm_apply", ("read(x, (row, cols)) * r", "read(x, (row, cols))")),
    *_in("kernel_src/rms_norm.py", "add_rms_norm", "add", ("read(x, index) + read(residual, index)", "read(x, index)")),
    *_in("kernel_src/rms_norm.py", "add_rms_norm", "add_rms_norm_forward",
         ("ct.scatter(total, (row, cols), ct.astype(s,", "ct.scatter(total, (row, cols), ct.astype(s * s,"),
         ("squares + ct.sum(tail * tail", "squares + ct.sum(tail", "add_rms_norm_tail"),
         ("ct.scatter(total, (row, tail_cols)", "ct.scatter(total, (row, tail_cols - 1)", "add_rms_norm_tail")),
    *_in("kernel_src/rms_norm.py", "add_rms_norm", "add_rms_norm_backward",
         ("LATENCY, True)", "LATENCY, False)"),
         ("backward_rows(dx, dy, dtotal, x", "backward_rows(dx, dtotal, dy, x")),
    *_in("kernel_src/rms_norm.py", "rms_norm_tail", "read_tile", ("start // WIDTH", "start")),
    *_in("kernel_src/rms_norm.py", "rms_norm_tail", "read_weight", ("start // WIDTH", "0")),
    *_in("kernel_src/rms_norm.py", "rms_norm_tail", "write_tile", ("start // WIDTH", "0")),
    *_in("kernel_src/rms_norm.py", "rms_norm_short", "rms_norm_rows_forward",
         ("ct.minimum(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), x.shape[0] - 1)",
          "ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32)"),
         ("ct.bid(0) * ROWS +", ""),
         ("axis=1, keepdims=True) * (1.0 / TILE)", "axis=1, keepdims=True) * (1.0 / ROWS)"),
         (" + eps", "")),
    *_in("kernel_src/rms_norm.py", "rms_norm_short", "rms_norm_rows_backward",
         ("ct.where((wanted < x.shape[0])[:, None], d * n, 0.0)", "d * n"),
         ("ct.minimum(wanted, x.shape[0] - 1)", "wanted"),
         ("i * ROWS +", ""),
         ("g - n * mean", "g - mean"),
         ("ct.cdiv(x.shape[0], ROWS)", "x.shape[0] // ROWS")),
    *_in("kernel_src/rms_norm.py", "rms_norm_odd", "rms_norm_any_forward",
         ("acc + xf * xf", "xf * xf"),
         ("ct.astype(length, ct.float32)", "TILE"),
         ("        cols = ct.arange(TILE, dtype=ct.int32) + i * TILE", "        cols = ct.arange(TILE, dtype=ct.int32)"),
         ("y.dtype), check_bounds=True", "y.dtype), check_bounds=False")),
    *_in("kernel_src/rms_norm.py", "rms_norm_odd", "rms_norm_any_backward",
         ("read_padded(dweight, (block, cols)))", "0.0)"),
         ("g - n * mean", "g - n"),
         ("dx.dtype), check_bounds=True", "dx.dtype), check_bounds=False"),
         ("* read_padded(weight, cols) * read_padded(x, (row, cols)) * r", "* read_padded(x, (row, cols)) * r"),
         ("row == block", "row != block")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "read", ("check_bounds=True", "check_bounds=False"), ("padding_value=0", "padding_value=1")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "read_once", ("check_bounds=True", "check_bounds=False")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "write", ("check_bounds=True", "check_bounds=False")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "normalise",
         (" + eps", ""),
         ("v * v", "v"),
         ("ct.astype(y.shape[1], ct.float32)", "4096"),
         ("v * r * read(weight, cols)", "v * read(weight, cols)"),
         ("v * r * read(weight, cols)", "v * r"),
         ("rstd, row, r,", "rstd, row, r * r,"),
         ("v * r * read(weight, cols)", "ct.astype(ct.astype(v * r, y.dtype), ct.float32) * read(weight, cols)", "wide_rms_norm_rounded"),
         ("v * r * read(weight, cols)", "v * r * ct.astype(ct.astype(read(weight, cols), y.dtype), ct.float32)", "wide_rms_norm_rounded"),
         ("write(y, (row, cols)", "write(y, (0, cols)"),
         ("rstd, row, r,", "rstd, 0, r,")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "wide_rms_norm_forward",
         ("ct.bid(0)", "0"),
         ("read(x, (row, cols))", "read(x, (0, cols))")),
    *_in("kernel_src/wide_rms_norm.py", "wide_add_rms_norm", "wide_add_rms_norm_forward",
         (" + read(residual, (row, cols))", ""),
         ("read(residual, (row, cols))", "read(residual, (0, cols))"),
         ("read(x, (row, cols))", "read(x, (0, cols))"),
         ("(row, cols), s, check_bounds=True", "(row, cols), s * s, check_bounds=True"),
         ("(row, cols), s, check_bounds=True", "(row, cols), s, check_bounds=False"),
         ("normalise(ct.astype(s, ct.float32)", "normalise(read(x, (row, cols))"),
         ("normalise(ct.astype(s, ct.float32)", "normalise(read(x, (row, cols)) + read(residual, (row, cols))", "wide_rms_norm_rounded")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "backward_rows",
         ("w = read(weight, cols)", "w = ct.astype(ct.astype(read(weight, cols), dx.dtype), ct.float32)", "wide_rms_norm_rounded"),
         ("(g - n * mean) * r", "(g + n * mean) * r"),
         ("(g - n * mean) * r", "(g - mean) * r"),
         ("(g - n * mean) * r", "(g - n) * r"),
         ("(g - n * mean) * r", "(g - n * mean)"),
         ("ct.sum(g * n", "ct.sum(d * n"),
         ("ct.astype(x.shape[1], ct.float32)", "TILE"),
         ("g = d * w", "g = d"),
         ("read_once(x, (row, cols)) * r", "read_once(x, (row, cols))"),
         ("acc + d * n", "acc + g * n"),
         ("read_once(x, (row, cols))", "read_once(x, (block, cols))", "wide_rms_norm_many_rows"),
         ("read_once(dy, (row, cols))", "read_once(dy, (block, cols))", "wide_rms_norm_many_rows"),
         ("ct.gather(rstd, row", "ct.gather(rstd, block", "wide_rms_norm_many_rows"),
         ("acc + d * n", "d * n", "wide_rms_norm_many_rows"),
         ("write(dx, (row, cols)", "write(dx, (block, cols)", "wide_rms_norm_many_rows"),
         ("range(block, x.shape[0]", "range(0, x.shape[0]", "wide_rms_norm_many_rows"),
         ("x.shape[0], ct.num_blocks(0)", "x.shape[0], ct.num_blocks(0) + 1", "wide_rms_norm_many_rows"),
         ("write(dweight, (block, cols)", "write(dweight, (0, cols)", "wide_rms_norm_many_rows"),
         ("gradient + read_once(dtotal, (row, cols)) if PAST", "gradient if PAST", "wide_add_rms_norm"),
         ("read_once(dtotal, (row, cols))", "read_once(dy, (row, cols))", "wide_add_rms_norm"),
         ("read_once(dtotal, (row, cols))", "read_once(dtotal, (block, cols))", "wide_add_rms_norm_many_rows")),
    *_in("kernel_src/wide_rms_norm.py", "wide_rms_norm", "wide_rms_norm_backward",
         ("TILE, False)", "TILE, True)"),
         ("(dx, dy, dy, x,", "(dx, x, dy, x,")),
    *_in("kernel_src/wide_rms_norm.py", "wide_add_rms_norm", "wide_add_rms_norm_backward",
         ("TILE, True)", "TILE, False)"),
         ("backward_rows(dx, dy, dtotal, x", "backward_rows(dx, dtotal, dy, x")),
    *_in("kernel_src/cross_entropy.py", "loss", "piece",
         ("ct.bid(0) // pieces", "0"),
         ("ct.bid(0) % pieces", "0"),
         ("// pieces", "// (pieces + 1)")),
    *_in("kernel_src/cross_entropy.py", "loss", "read_logits", ("padding_value=MINUS_INFINITY", "padding_value=0")),
    *_in("kernel_src/cross_entropy.py", "loss_softcap", "cap", ("softcap * ct.tanh", "ct.tanh")),
    *_in("kernel_src/cross_entropy.py", "minus_infinity", "write_partial", ("ct.where(m == MINUS_INFINITY, 0.0, m)", "m")),
    *_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_statistics",
         ("part * TILE +", ""),
         (" * LOG2E", "")),
    *_in("kernel_src/cross_entropy.py", "loss_softcap", "cross_entropy_statistics_weighted",
         ("ct.where(inside, cap(z, softcap), MINUS_INFINITY)", "cap(z, softcap)"),
         ("ct.where(inside, z * w, 0.0)", "z * w", "loss_smooth"),
         ("ct.where(inside, z * w, 0.0)", "ct.where(inside, z, 0.0)", "loss_smooth")),
    *_in("kernel_src/cross_entropy.py", "loss", "join_partials",
         ("ps * ct.exp2(pm - shift)", "ps"),
         ("m + ct.log2(s)", "ct.log2(s)"),
         ("s = s * ct.exp2(m - shift) +", "s =", "loss_pieces"),
         ("i * PARTS +", "", "loss_pieces"),
         ("padding_value=MINUS_INFINITY", "padding_value=1e4")),
    *_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_combine",
         ("total * LN2 - z", "total - z"),
         ("(t != ignore_index) & ", "", "loss_ignores_0"),
         (" & (t < logits.shape[1])", "", "labels"),
         (" & (t >= 0)", "", "labels"),
         ("z = cap(z, softcap)", "z = z", "loss_softcap")),
    *_in("kernel_src/cross_entropy.py", "loss", "cross_entropy_gradient",
         ("ct.gather(scale, 0, check_bounds=False)", "1.0")),
    *_in("kernel_src/cross_entropy.py", "loss", "write_gradient",
         ("1.0, 0.0", "-1.0, 0.0"),
         ("1.0, 0.0)) * scale", "1.0, 0.0))"),
         ("ct.where(counted, g, 0.0)", "g", "loss_ignores_0"),
         ("part * TILE +", ""),
         ("(t != ignore_index) & ", "", "loss_ignores_0"),
         ("v - ct.gather(lse, row, check_bounds=False)", "v"),
         ("out.dtype), check_bounds=True", "out.dtype), check_bounds=False")),
    *_in("kernel_src/cross_entropy.py", "loss_softcap", "write_gradient_weighted",
         (") * slope", ")"),
         ("1.0 - ratio * ratio", "1.0 + ratio * ratio"),
         ("z = ratio * softcap", "pass"),
         ("- hit", "+ hit"),
         (" - w * ct.gather(c, row, check_bounds=False)", "", "loss_smooth"),
         ("w * ct.gather(c, row, check_bounds=False)", "ct.gather(c, row, check_bounds=False)", "loss_smooth"),
         ("ct.gather(b, row, check_bounds=False)", "1.0", "loss_none"),
         ("p * row_a", "p", "loss_none")),
    *_in("kernel_src/linear_cross_entropy.py", "evaluation", "linear_cross_entropy_statistics",
         ("m * TILE_M + ct.arange", "ct.arange"),
         ("n * TILE_N + ct.arange", "ct.arange"),
         ("n == tiles_n - 1", "n == 0"),
         ("n == tiles_n - 1", "n == tiles_n"),
         ("index=(m, k)", "index=(m, 0)"),
         ("index=(n, k)", "index=(n, 0)"),
         ("hidden.shape[1] // TILE_K", "1"),
         ("first + within % height", "within % height", "evaluation_groups"),
         ("ct.minimum(tiles_m - first, GROUP)", "ct.minimum(tiles_m, GROUP)", "evaluation_groups"),
         ("// (GROUP * tiles_n) * GROUP", "// (GROUP * tiles_n)", "evaluation_groups"),
         ("within // height", "within % height"),
         ("ct.where((cols < weight.shape[0])[None, :], z, MINUS_INFINITY)", "z"),
         ("(cols < weight.shape[0])", "(cols <= weight.shape[0])"),
         ("ct.max(z, 1) * LOG2E", "ct.max(z, 1)", "evaluation_of_large_logits"),
         ("z * LOG2E - shift[:, None]", "z * LOG2E"),
         ("ct.scatter(part_max, (rows, n), high", "ct.scatter(part_max, (rows, 0), high"),
         ("(part_sum, (rows, n), total, check_bounds=True", "(part_sum, (rows, n), total, check_bounds=False"),
         ("part_sum, (rows, n), total", "part_sum, (rows, n), total * total"),
         ("ct.where(high == MINUS_INFINITY, 0.0, high)", "high", "evaluation_of_infinities")),
    *_in("kernel_src/linear_cross_entropy.py", "evaluation", "linear_cross_entropy_combine",
         ("row, PARTS) * LN2", "row, PARTS)"),
         ("total - ct.sum", "total + ct.sum"),
         ("ct.where(counted, distance, 0.0)", "distance"),
         ("ct.where(distance < 0.0, 0.0, distance)", "distance", "evaluation_of_certain_labels"),
         ("ct.where(counted, t, 0)", "0"),
         ("products + read_padded", "read_padded", "evaluation_of_wide_hidden_states"),
         ("i * TILE +", "", "evaluation_of_wide_hidden_states"),
         ("ct.cdiv(hidden.shape[1], TILE)", "hidden.shape[1] // TILE"),
         ("(t != ignore_index) & ", "", "evaluation_ignores_3"),
         (" & (t < weight.shape[0])", "", "evaluation_labels"),
         (" & (t >= 0)", "", "evaluation_labels"),
         ("ct.scatter(lse, row, total", "ct.scatter(lse, row, total / LN2", "evaluation_z_loss")),
    *_in("kernel_src/linear_cross_entropy.py", "evaluation", "read_padded", ("padding_value=0", "padding_value=1")),
    *_in("kernel_src/experts.py", "experts_silu", "read", ("padding_value=0", "padding_value=1")),
    *_in("kernel_src/experts.py", "experts_silu_pieces", "write", ("mask=inside, check_bounds=False", "check_bounds=True")),
    *_in("kernel_src/clamped_gate.py", "experts_packed", "split", ("w >> 16", "w"), ("w & 0xFFFF", "w >> 16")),
    *_in("kernel_src/clamped_gate.py", "experts_packed", "join", ("a | (b << 16)", "b | (a << 16)"), ("b << 16", "b << 15")),
    *_in("kernel_src/clamped_gate.py", "experts", "read_interleaved", ("2 * cols + 1", "2 * cols"), ("2 * cols, inside", "cols, inside")),
    *_in("kernel_src/clamped_gate.py", "experts", "write_interleaved", ("2 * cols + 1", "2 * cols")),
    *_in("kernel_src/experts.py", "experts", "read_scores", ("padding_value=0", "padding_value=0) * 2 + (0", "experts_silu")),
    *_in("kernel_src/clamped_gate.py", "experts", "clamped",
         ("ct.where(gate > limit, limit, gate)", "gate"),
         ("ct.where(up < -limit, -limit, up)", "up"),
         ("ct.where(gate > limit, limit, gate)", "ct.minimum(gate, limit)", "experts_nan")),
    *_in("kernel_src/clamped_gate.py", "experts", "clamped_forward_tile",
         ("ct.bid(1) * COLS +", "", "experts_packed"),
         ("u + 1.0", "u"),
         ("g * alpha", "g"),
         ("up + up_bias", "up"),
         (" * read_scores(scores, rows, rows < last, MASKED)", ""),
         ("(rows < last) & columns", "columns")),
    *_in("kernel_src/clamped_gate.py", "experts", "clamped_gate_forward",
         ("first + ct.arange", "ct.arange"),
         ("first + ROWS <= last", "first + ROWS <= last + ROWS", "experts_packed")),
    *_in("kernel_src/clamped_gate.py", "experts", "clamped_backward_tile",
         ("ct.where(gate > limit, 0.0, d * (u + 1.0) * (s + alpha * silu * (1.0 - s)))", "d * (u + 1.0) * (s + alpha * silu * (1.0 - s))"),
         ("(up > limit) | (up < -limit)", "up > limit"),
         ("(up > limit) | (up < -limit)", "up < -limit"),
         ("(rows < last) & columns", "columns"),
         ("s + alpha * silu", "s + silu"),
         ("(1.0 - s)", "(1.0 + s)"),
         ("d = d * score", "pass"),
         ("ct.sum(d * h, axis=1", "ct.sum(d * silu, axis=1"),
         ("ct.astype(h * score", "ct.astype(h"),
         ("(flat, piece), partial, mask=flat < last", "(flat, 0), partial, mask=flat < last", "experts_packed"),
         ("write(dbias, block, 2 * cols + 1, columns, dup", "write(dbias, block, 2 * cols + 1, columns, dgate")),
    *_in("kernel_src/clamped_gate.py", "experts", "clamped_gate_backward",
         ("first + ct.arange", "ct.arange"),
         ("first + ROWS <= last", "first + ROWS <= last + ROWS", "experts_packed")),
    *_in("kernel_src/clamped_gate.py", "experts", "expert_bias_sum",
         ("expert - 1, check_bounds", "expert, check_bounds"),
         ("(rows < last) & ", ""),
         ("acc + ct.gather", "ct.gather", "experts_many"),
         ("i * ROWS +", "", "experts_many"),
         ("ct.bid(0) * COLS +", "", "experts_packed")),
    *_in("kernel_src/experts.py", "experts_silu", "swiglu_rows_forward",
         ("gate * sigmoid(gate) * up * score", "gate * sigmoid(gate) * up"),
         ("cols + width", "cols"),
         ("ct.bid(0) * ROWS +", ""),
         ("ct.bid(1) * COLS +", "", "experts_silu_exact"),
         ("ct.minimum(rows, out.shape[0] - 1)", "rows", "experts_silu_exact")),
    *_in("kernel_src/experts.py", "experts_silu", "swiglu_rows_backward",
         ("s + silu * (1.0 - s)", "s"),
         ("d = d * score", "pass"),
         ("ct.astype(d * silu, gate_up", "ct.astype(d * s, gate_up"),
         ("ct.sum(d * silu * up", "ct.sum(d * silu"),
         ("ct.astype(silu * up * score", "ct.astype(silu * up"),
         ("(flat, piece)", "(flat, 0)", "experts_silu_exact"),
         ("& (cols < width)", "")),
    *_in("kernel_src/experts.py", "experts_wide", "token_sum",
         ("acc + ct.astype", "ct.astype"),
         ("(row, cols), check_bounds=True", "(row, cols), check_bounds=False"),
         ("ct.bid(1) * COLS +", "")),
    *_in("kernel_src/clamped_gate.py", "experts_wide", "token_sum_bias",
         ("score * b", "b"),
         ("acc + (", "("),
         ("ct.gather(bias, (e, cols), check_bounds=True", "ct.gather(bias, (e, cols), check_bounds=False")),
    *_in("kernel_src/grouped_gemm.py", "grouped_many", "tile_of",
         ("first + within % height", "within % height"),
         ("ct.minimum(tiles_m - first, GROUP)", "ct.minimum(tiles_m, GROUP)"),
         ("// (GROUP * tiles_n) * GROUP", "// (GROUP * tiles_n)")),
    *_in("kernel_src/grouped_gemm.py", "grouped", "read_weight",
         ("(expert, n, k)", "(0, n, k)"),
         ("(expert, k, n)", "(0, k, n)"),
         ("TILE_K), padding_mode=ZERO", "TILE_K)"),
         ("TILE_N), padding_mode=ZERO", "TILE_N)")),
    *_in("kernel_src/grouped_gemm.py", "grouped", "grouped_mm",
         ("if first < last:", "if True:"),
         ("padding_mode=ZERO, ", ""),
         ("traversal_steps=(1, TILE_K)", "traversal_steps=(TILE_M, TILE_K)"),
         ("ct.cdiv(x.shape[1], TILE_K)", "x.shape[1] // TILE_K"),
         ("(rows < last) & ", ""),
         (" & (cols < out.shape[1])", ""),
         ("n * TILE_N +", "")),
    *_in("kernel_src/grouped_gemm.py", "grouped", "before", ("rows < last", "rows < last + 1"), ("(row +", "(1 + row +")),
    *_in("kernel_src/grouped_gemm.py", "grouped", "grouped_outer",
         ("expert - 1, check_bounds", "expert, check_bounds"),
         ("padding_value=0", "padding_value=1"),
         ("first + i * TILE_K", "first"),
         ("first + steps * TILE_K", "first"),
         ("rest < last", "rest + 1 < last"),
         ("before(xs.load((rest, m)), rest, last, TILE_K)", "xs.load((rest, m))"),
         ("before(ys.load((rest, n)), rest, last, TILE_K)", "ys.load((rest, n))"),
         ("traversal_steps=(1, TILE_M)", "traversal_steps=(TILE_K, TILE_M)"),
         ("traversal_steps=(1, TILE_N)", "traversal_steps=(TILE_K, TILE_N)")),
]  # fmt: skip


# ---------------------------------------------------------------- errors in the operations
OPERATION_MUTANTS = [
    *_in("shared/ops/rms_norm.py", "rms_norm", "RMSNormFunction.forward",
         ("save_for_backward(x,", "save_for_backward(y,"),
         ("x, weight, rstd)", "x, torch.ones_like(weight), rstd)"),
         ("x, weight, rstd)", "x, weight, 1.01 * rstd)")),
    *_in("shared/ops/rms_norm.py", "rms_norm", "RMSNormFunction.backward",
         ("dweight if need", "torch.zeros_like(dweight) if need"),
         ("return dx,", "return dy,")),
    *_in("shared/ops/rms_norm.py", "rms_norm_many_rows", "_backward_launch", ("column_sum(partial, weight.dtype)", "partial[0].to(weight.dtype)")),
    *_in("shared/ops/rms_norm.py", "add_rms_norm", "AddRMSNormFunction.forward",
         ("save_for_backward(total,", "save_for_backward(x,"),
         ("total, weight, rstd)", "total, torch.ones_like(weight), rstd)"),
         ("total, weight, rstd)", "total, weight, 1.01 * rstd)"),
         ("return y, total", "return y, x + 0 * total")),
    *_in("shared/ops/rms_norm.py", "add_rms_norm", "AddRMSNormFunction.backward",
         ("return dx, dx,", "return dx, torch.zeros_like(dx),"),
         ("(dy, dtotal, total", "(dtotal, dy, total")),
    *_in("shared/ops/rms_norm.py", "add_rms_norm_odd", "_add_backward", ("return dx + dtotal", "return dx")),
    *_in("shared/ops/rms_norm.py", "rms_norm", "rms_norm_backward_reference",
         ("g - n *", "g + n *"),
         (".flatten(0, -2).sum(0)", "[0]"),
         ("d * weight.to(acc)", "d"), kernels=False),
    *_in("shared/ops/rotary.py", "rotary", "_Rotary.forward",
         ("save_for_backward(cos, sin)", "save_for_backward(sin, cos)"),
         ("ctx.heads_dim = heads_dim", "ctx.heads_dim = 3 - heads_dim", "rotary_square")),
    *_in("shared/ops/rotary.py", "rotary", "_Rotary.backward", ("return (*rotary_backward(dq, dk,", "return (*rotary_forward(dq, dk,")),
    *_in("shared/ops/rotary.py", "rotary", "_launch", ("_kernels[backward]", "_kernels[0]")),
    *_in("shared/ops/rotary.py", "rotary_many_k", "_grid", (", -(-k.shape[1] // c[\"K_HEADS\"]))", ", 0)")),
    *_in("shared/ops/rotary.py", "rotary", "rotary_backward_reference",
         ("dk * cos - _rotate_half(dk * sin)", "dk * cos + _rotate_half(dk * sin)"),
         ("_rotate_half(dq * sin)", "_rotate_half(dq) * sin"), kernels=False),
    *_in("shared/ops/rotary.py", "rotary_odd_half", "_full_width", ("torch.cat((table, table), -1)", "table.repeat_interleave(2, -1)"), kernels=False),
    *_in("shared/ops/rotary.py", "qk_norm_rotary", "_QKNormRotary.forward",
         ("save_for_backward(q, k, q_weight, k_weight", "save_for_backward(q, k, k_weight, q_weight"),
         ("save_for_backward(q, k,", "save_for_backward(k, q,", "qk_norm_rotary_many_k"),
         ("k_weight, cos, sin)\n", "k_weight, sin, cos)\n"),
         ("ctx.eps = eps", "ctx.eps = 0.0", "qk_norm_rotary_eps")),
    *_in("shared/ops/rotary.py", "qk_norm_rotary_alone", "_QKNormRotary.backward",
         ("ctx.needs_input_grad[:4]", "ctx.needs_input_grad[1:5]"),
         ("dq_weight if need_q_weight", "dk_weight if need_q_weight", "qk_norm_rotary"),
         ("dk_weight if need_k_weight", "dk_weight if need_q_weight")),
    *_in("shared/ops/rotary.py", "qk_norm_rotary", "_whole_steps",
         ("table.expand(batch, -1, -1).contiguous()", "table")),
    *_in("shared/ops/rotary.py", "qk_norm_rotary", "norm_backward_into",
         ("outs[1].copy_(dk)", "pass"), kernels=False),
    *_in("shared/ops/rotary.py", "qk_norm_rotary_alone", "norm_backward_into",
         ("column_sum(partials[1], k_weight.dtype)", "column_sum(partials[0], k_weight.dtype)"),
         ("column_sum(partials[0], q_weight.dtype)", "partials[0][0].to(q_weight.dtype)")),
    *_in("shared/ops/rotary.py", "qk_norm_rotary", "norm_backward_into",
         ("(*partials, *sums)", "(*partials, *sums[::-1])"),
         ("(*partials, *sums)", "(*partials[::-1], *sums)")),
    *_in("shared/ops/swiglu.py", "swiglu", "_SwiGLU.forward", ("save_for_backward(gate, up)", "save_for_backward(up, gate)")),
    *_in("shared/ops/swiglu.py", "swiglu", "_SwiGLU.backward", ("(dout, *ctx.saved_tensors)", "(dout, *ctx.saved_tensors[::-1])")),
    *_in("shared/ops/common.py", "swiglu_odd", "ElementwiseKernel.__init__", ("-(-first.numel() // c[\"TILE\"])", "first.numel() // c[\"TILE\"]")),
    *_in("shared/ops/swiglu.py", "swiglu", "swiglu_backward_reference", ("1 - s", "1 + s"), kernels=False),
    *_in("shared/ops/swiglu.py", "mlp", "_MLP.forward",
         ("save_for_backward(x, gate, up", "save_for_backward(x, up, gate"),
         ("save_for_backward(x,", "save_for_backward(2 * x,"),
         ("up, gate_weight, up_weight, down_weight)", "up, up_weight, gate_weight, down_weight)"),
         ("up, gate_weight, up_weight, down_weight)", "up, gate_weight, up_weight, 2 * down_weight)")),
    *_in("shared/ops/swiglu.py", "mlp_alone", "mlp_backward",
         ("torch.mm(dy.t(), swiglu_forward(gate, up))", "torch.mm(dy.t(), swiglu_forward(up, gate))"),
         ("(need_x or need_gate or need_up)", "(need_gate or need_up)")),
    *_in("shared/ops/swiglu.py", "mlp", "mlp_backward",
         (".addmm_(dup, up_weight)", ""),
         ("torch.mm(dgate.t(), normed)", "torch.mm(dup.t(), normed)"),
         ("torch.mm(dy.t(), hidden)", "torch.mm(dy.t(), gate)"),
         ("torch.mm(both, whole)", "torch.mm(dgate, gate_weight)", "norm_mlp_packed")),
    *_in("shared/ops/swiglu.py", "mlp_apart", "backward_in_place",
         ("dgate.copy_(apart[0])", "pass"),
         ("dup.copy_(apart[1])", "dup.copy_(apart[0])")),
    *_in("shared/ops/swiglu.py", "mlp", "backward_in_place",
         ("both[:, :columns], both[:, columns:]", "both[:, columns:], both[:, :columns]", "norm_mlp_packed")),
    *_in("shared/ops/swiglu.py", "mlp", "backward_in_place", ("target.copy_(value)", "pass"), kernels=False),
    *_in("shared/ops/swiglu.py", "norm_mlp_packed", "gate_and_up", ("both[:, : gate_weight.shape[0]]", "both[:, gate_weight.shape[0] :]")),
    *_in("shared/ops/decoder_nodes.py", "attention_inputs", "_input_gradient", ("total.addmm_(grad, weight)", "pass")),
    *_in("shared/ops/decoder_nodes.py", "attention_inputs", "_weight_gradients", ("torch.mm(grad.t(), y)", "torch.mm(-grad.t(), y)")),
    *_in("shared/ops/decoder_nodes.py", "attention_inputs", "_NormAttentionInputs.forward",
         ("k, q_norm, k_norm, cos, sin, *weights)\n", "k, k_norm, q_norm, cos, sin, *weights)\n"),
         ("k_norm, cos, sin, *weights)\n", "k_norm, sin, cos, *weights)\n"),
         ("save_for_backward(x, norm_weight, rstd", "save_for_backward(2 * x, norm_weight, rstd"),
         ("save_for_backward(x, norm_weight, rstd", "save_for_backward(x, torch.ones_like(norm_weight), rstd"),
         ("save_for_backward(x, norm_weight, rstd", "save_for_backward(x, norm_weight, 2 * rstd"),
         ("rstd, q, k, q_norm", "rstd, 2 + q, k, q_norm"),
         ("rstd, q, k, q_norm", "rstd, q, 2 + k, q_norm"),
         ("cos, sin, *weights)\n", "cos, sin, *[2 * w for w in weights])\n")),
    *_in("shared/ops/decoder_nodes.py", "attention_inputs_alone", "_NormAttentionInputs.backward",
         ("ctx.head_eps, needs[3], needs[4]", "ctx.head_eps, needs[4], needs[3]"),
         ("if needs[0] or needs[1]:", "if needs[0]:"),
         ("_weight_gradients(grads, y, needs[9:])", "_weight_gradients(grads, y, needs[8:])")),
    *_in("shared/ops/decoder_nodes.py", "norm_mlp", "_NormMLP.forward",
         ("save_for_backward(x, attended", "save_for_backward(2 * x, attended"),
         ("o_weight, norm_weight, rstd, gate", "o_weight, torch.ones_like(norm_weight), rstd, gate"),
         ("norm_weight, rstd, gate, up", "norm_weight, 2 * rstd, gate, up"),
         ("rstd, gate, up, gate_weight", "rstd, up, gate, gate_weight"),
         ("up, gate_weight, up_weight, down_weight)\n", "up, up_weight, gate_weight, down_weight)\n"),
         ("up_weight, down_weight)\n        #", "up_weight, 2 * down_weight)\n        #"),
         ("torch.addmm(x, swiglu_forward", "torch.addmm(0 * x, swiglu_forward")),
    *_in("shared/ops/decoder_nodes.py", "norm_mlp_alone", "_NormMLP.backward",
         ("need_x or need_attended or need_o or need_norm", "need_x"),
         ("dnorm if need_norm", "dx[0] if need_norm", "norm_mlp")),
    *_in("shared/ops/decoder_nodes.py", "attention_inputs", "_NormAttentionInputs.backward",
         ("add_rms_norm_backward(dy, dresidual", "add_rms_norm_backward(dy, torch.zeros_like(dresidual)"),
         ("rms_norm_again(x, norm_weight, rstd)", "x"),
         ("(dnorm, dq_norm, dk_norm)", "(dnorm, dk_norm, dq_norm)"),
         ("dv_place.copy_(dv)", "dv_place.zero_()", "attention_inputs_packed"),
         ("torch.mm(together, whole)", "_input_gradient(grads[:2], weights[:2])", "attention_inputs_packed")),
    *_in("shared/ops/decoder_nodes.py", "norm_mlp", "_NormMLP.backward",
         ("add_rms_norm_backward(dy, dout", "add_rms_norm_backward(dy, torch.zeros_like(dout)"),
         ("torch.mm(dx.t(), attended)", "torch.mm(dout.t(), attended)", "norm_mlp_attended"),
         ("torch.mm(dx, o_weight)", "torch.mm(dout, o_weight)", "norm_mlp_attended")),
    *_in("shared/ops/cross_entropy.py", "loss_smooth", "Chunk.coefficients",
         ("b + smooth * self.weight_sum", "b + smooth"),
         ("* self.target_weight", ""),
         ("torch.where(self.counted, t, 0.0) * scale", "t * scale", "loss_smooth_ignored"),
         ("2 * options.lse_square_scale", "options.lse_square_scale", "loss_returns")),
    *_in("shared/ops/cross_entropy.py", "loss_smooth", "Chunk.weighted",
         ("self.weight_sum * self.lse - total", "self.weight_sum * self.lse"),
         ("torch.where(self.counted, loss + options.lse_square_scale * self.lse.square(), 0.0)", "loss", "loss_returns")),
    *_in("shared/ops/cross_entropy.py", "loss_returns", "Chunk.rows",
         ("torch.where(counted, options.lse_square_scale * self.lse.detach().square(), 0.0)", "options.lse_square_scale * self.lse.detach().square()"),
         ("torch.where(counted, self.logits.detach().argmax(1), -1)", "self.logits.detach().argmax(1)"),
         ("self.logits.detach().argmax(1)", "self.logits.detach().argmin(1)"),
         ("loss, z_loss = loss * self.scaling", "loss, z_loss = loss"),
         ("z_loss * self.scaling", "z_loss"),
         ("torch.exp(-self.likelihood.detach())", "torch.exp(self.likelihood.detach())")),
    *_in("shared/ops/cross_entropy.py", "loss_returns", "KernelChunk.lse", ("self.lse2 * LN2", "self.lse2")),
    *_in("shared/ops/linear_cross_entropy.py", "loss_none_weighted", "_PerToken.forward",
         ("ctx.save_for_backward(hidden, weight, bias, target, class_weight)", "ctx.save_for_backward(hidden, weight, bias, target, None)")),
    *_in("shared/ops/linear_cross_entropy.py", "loss_smooth", "_Reduced.forward",
         ("_run(hidden, weight, bias, target, class_weight, scale,", "_run(hidden, weight, bias, target, None, scale,"),
         ("rows.loss.sum() * scale.view(())", "rows.loss.sum()")),
    *_in("shared/ops/cross_entropy.py", "loss_nothing_counted", "reduction_scale", ("torch.where(items == 0, 0.0, 1.0 / items)", "(1.0 / items)")),
    *_in("shared/ops/cross_entropy.py", "loss_smooth", "reduction_scale",
         ("torch.where(counted, class_weight[torch.where(counted, target, 0)], 0.0).sum()", "counted.sum()")),
    *_in("shared/ops/cross_entropy.py", "loss_returns", "Chunk.scaled", ("scale * self.scaling", "scale")),
    *_in("shared/ops/cross_entropy.py", "loss_returns", "output_of",
         (".clamp(min=1)", ".clamp(min=1) * 2"),
         ("(rows.predicted >= 0).sum()", "(rows.predicted >= -1).sum()"),
         ("reduced(rows.z_loss, scale)", "rows.z_loss.sum()")),
    *_in("shared/ops/linear_cross_entropy.py", "evaluation_steps", "_WithoutLogits.loss",
         ("self.hidden[rows]", "self.hidden[: rows.stop - start]"),
         ("self.target[rows]", "self.target[: rows.stop - start]"),
         ("self.likelihood[rows]", "self.likelihood[: rows.stop - start]"),
         ("return self.weighted(0.0)", "return self.likelihood", "evaluation_z_loss")),
    *_in("shared/ops/linear_cross_entropy.py", "evaluation_not_taken", "_WithoutLogits.fits",
         ("options.softcap or ", ""),
         ("options.label_smoothing or ", ""),
         ("self.bias is not None or ", "")),
    *_in("shared/ops/linear_head.py", "loss_chunks_accum", "_add_product",
         ("x[part].to(total.dtype), y, beta=beta", "x[part].to(total.dtype), y, beta=0.0"),
         ("start + SLICE", "start + SLICE // 2", "loss_slices"), kernels=False),
    *_in("shared/ops/routing.py", "experts", "route",
         ("position[order] =", "position[:] ="),
         ("right=True", "right=False"),
         ("flat < experts, position", "flat <= experts, position", "experts_wide")),
    *_in("shared/ops/routing.py", "experts", "row_blocks",
         ("(stops - count) * height", "stops * height"),
         ("+ (height - 1)", "")),
    *_in("shared/ops/grouped_gemm.py", "grouped", "Groups.blocks", ("_mm_kernels[0].constant", "2 * _mm_kernels[0].constant")),
    *_in("shared/ops/experts.py", "experts", "_dense", ("expert[:, :, None] == numbers", "expert[:, :, None] >= numbers")),
    *_in("shared/ops/experts.py", "experts", "gate_backward_reference",
         ("torch.where(keep_gate, dg, 0.0)", "dg"),
         ("u.abs() <= gate.limit", "u <= gate.limit"),
         ("1 + gate.alpha * g * (1 - s)", "1 + g * (1 - s)"), kernels=False),
    *_in("shared/ops/experts.py", "experts_silu", "gate_backward_reference", ("d * u * (s + g * s * (1 - s))", "d * u * s"), kernels=False),
    *_in("shared/ops/experts.py", "experts_wide", "token_sum_reference", ("torch.where(there[..., None], rows, 0.0)", "rows"), kernels=False),
    *_in("shared/ops/experts.py", "experts", "_gate_backward", ("d * scores[:, None], gate_up", "d, gate_up"), kernels=False),
    *_in("shared/ops/experts.py", "experts_wide", "_backward",
         ("dscores = torch.where(position < order.shape[0], dscores, 0.0)", "dscores = dscores"),
         ("dscores = dscores + of_bias", "of_bias = of_bias"),
         ("_token_sum(dx, position)", "_token_sum(dx, position, expert, scores, down_bias)"),
         ("_dense(expert, scores", "_dense(expert, scores.abs() + 1")),
    *_in("shared/ops/experts.py", "experts", "_Experts.forward", ("save_for_backward(*inputs, *saved)", "save_for_backward(*inputs[:2], *inputs[2:3], *inputs[3:], *saved[:1], saved[1].flip(0), *saved[2:])")),
    *_in("shared/ops/wide_rms_norm.py", "wide_rms_norm_many_rows", "_gradients", ("column_sum(partial, weight.dtype)", "partial[0].to(weight.dtype)")),
    *_in("shared/ops/wide_rms_norm.py", "wide_add_rms_norm", "_gradients",
         ("kernel(dx, *grads, x", "kernel(dx, *grads[::-1], x")),
    *_in("shared/ops/wide_rms_norm.py", "wide_add_rms_norm", "_gradients", ("return dx + grads[1] if len(grads) > 1 else dx", "return dx"), kernels=False),
    *_in("shared/ops/wide_rms_norm.py", "wide_rms_norm_rounded", "wide_rms_norm_reference",
         ("weight * (xf * rstd)", "weight * (xf * rstd).to(x.dtype)"),
         ("x.to(wide(x.dtype))", "x"), kernels=False),
    *_in("shared/ops/experts.py", "experts_again", "_Experts.backward", ("ctx.written_over = True", "pass")),
    *_in("shared/ops/cross_entropy.py", "loss_items", "reduction_scale", ("if num_items is not None", "if False")),
    *_in("shared/ops/cross_entropy.py", "loss_ignores_0", "is_counted", ("(target != ignore_index) & ", ""), kernels=False),
    *_in("shared/ops/linear_head.py", "loss_bias", "walk", ("dbias.add_(logits.sum(0, dtype=acc) if", "dbias.add_(logits[0] if")),
    *_in("shared/ops/linear_head.py", "loss_chunks", "walk",
         ("out=dhidden[rows]", "out=dhidden[: part.shape[0]]"),
         ("else scale[rows]", "else scale[: part.shape[0]]", "loss_chunks_none"), kernels=False),
    *_in("shared/ops/linear_head.py", "loss_chunks_accum", "_add_product", ("0.0 if first else 1.0", "0.0"), kernels=False),
    *_in("shared/ops/linear_head.py", "loss_chunks", "_add_product", ("total.addmm_(x, y)", "torch.mm(x, y, out=total)"), kernels=False),
    *_in("shared/ops/cross_entropy.py", "loss_softcap", "TorchChunk.gradient", ("gradient.mul_(slope)", "pass"), kernels=False),
    *_in("shared/ops/cross_entropy.py", "fp16_loss", "Chunk.in_range", ("t * factor for t", "t for t"), kernels=False),
    *_in("shared/ops/linear_head.py", "fp16_range", "walk",
         ("hidden_factor[rows] /= factor", "pass"),
         ("_multiply(dweight, factor / unit)", "pass"),
         ("weight_factor / unit", "weight_factor"),
         ("logits.sum(0, dtype=acc) / factor", "logits.sum(0, dtype=acc)"), kernels=False),
    *_in("shared/ops/linear_head.py", "fp16_range", "_into_fp16", ("1 / factor", "factor"), kernels=False),
    *_in("shared/ops/linear_cross_entropy.py", "loss", "_Reduced.backward",
         ("gradients.times(dloss)", "gradients.times()"),
         ("ctx.gradients = None", "pass", "second_backward")),
    *_in("shared/ops/linear_cross_entropy.py", "loss_again", "_Reduced.forward",
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(-hidden, weight, bias, target, class_weight, scale)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(hidden, -weight, bias, target, class_weight, scale)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(hidden, weight, -bias, target, class_weight, scale)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(hidden, weight, bias, target + 1, class_weight, scale)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(hidden, weight, bias, target, None, scale)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight, scale)", "save_for_backward(hidden, weight, bias, target, class_weight, 2 * scale)")),
    *_in("shared/ops/linear_cross_entropy.py", "loss_unreduced", "_PerToken.forward",
         ("save_for_backward(hidden, weight, bias, target, class_weight)", "save_for_backward(-hidden, weight, bias, target, class_weight)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight)", "save_for_backward(hidden, -weight, bias, target, class_weight)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight)", "save_for_backward(hidden, weight, -bias, target, class_weight)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight)", "save_for_backward(hidden, weight, bias, target.clamp(max=0), class_weight)"),
         ("save_for_backward(hidden, weight, bias, target, class_weight)", "save_for_backward(hidden, weight, bias, target, None)")),
    *_in("shared/ops/linear_cross_entropy.py", "loss_unreduced", "_PerToken.backward",
         ("scale = dlosses.to(", "scale = torch.ones_like(dlosses).to(")),
    *_in("shared/ops/adamw.py", "adamw", "numbers",
         ("lr / (1 - beta1**step)", "lr"),
         ("1 / math.sqrt(1 - beta2**step)", "1.0"),
         ("1 - beta2**step", "1 - beta1**step"),
         ("lr * weight_decay", "weight_decay"),
         ("1 - beta1, beta2", "1 - beta2, beta2"),
         ("1 - beta2, step_size", "1 - beta1, step_size")),
    *_in("shared/ops/common.py", "adamw_in_slabs", "ElementwiseKernel._slabs",
         ("range(0, arrays[0].shape[0], rows)", "range(0, arrays[0].shape[0] - rows, rows)"),
         ("start : start + rows", "0:rows"),
         ("arrays[0].shape[0] <= rows", "True", "adamw_counts_slabs")),
    *_in("shared/ops/common.py", "norm_in_parts", "split_rows",
         ("start : start + most", "0:most"),
         ("range(0, rows, most)", "range(0, rows - most, most)"),
         ("t.shape[0] == rows", "True"),
         ("0 < rows <= GRID_MAX[0]", "True")),
    *_in("shared/ops/common.py", "elementwise_shapes", "ElementwiseKernel._rows",
         ("tensor.shape != first.shape", "False")),
    *_in("shared/runtime/launch.py", "launch_keys", "Kernel.__call__",
         ("argument.shape, ", ""),
         (", argument.stride()", ""),
         ("argument.dtype, ", ""),
         ("if low_bits & 15:", "if False:"),
         ("key.append(argument)", "pass")),
    *_in("shared/runtime/launch.py", "launch_keys", "Kernel._first",
         ("if places == addresses:", "if True:")),
    *_in("shared/runtime/launch.py", "launch_copies", "Kernel._arrays",
         ("if not self.reads.issuperset(moved):", "if False:")),
    *_in("shared/hf/optimizer.py", "adamw", "AdamW._step_group",
         ("for _, step in large], 1)", "for _, step in large], 2)"),
         ("by_step[number] = numbers(number,", "by_step[number] = numbers(3.0,"),
         ("lr=lr", "lr=2 * lr", "adamw_not_taken"),
         ("beta1=beta1, beta2=beta2", "beta1=beta2, beta2=beta1", "adamw_not_taken"),
         ("weight_decay=weight_decay", "weight_decay=0.0", "adamw_not_taken"),
         ("eps=eps", "eps=0.0", "adamw_not_taken"),
         ("if changed:", "if not changed:", "adamw_noticed")),
    *_in("shared/hf/optimizer.py", "adamw_of_checkpoints", "AdamW._by_way", ("if not state:", "if True:")),
    *_in("shared/runtime/device.py", "adamw_not_taken", "kernels_run_on", ("tensor.is_neg()", "False")),
    *_in("shared/hf/optimizer.py", "adamw_sharded", "_held",
         ("tensors = [t.to_local() for t in tensors]", "return None"),
         ("return tensors", "return None"),
         ("any(getattr", "all(getattr", "adamw_replicated")),
]  # fmt: skip


# ---------------------------------------------------------------- of the suite, beside its checks
def suite_check(name: str, check: str):
    return lambda package: module_of(name).CHECKS[check](suite(package))


for _name in NAMES:
    CHECKS |= {f"{_name}: {check}": suite_check(_name, check) for check in module_of(_name).CHECKS}
    for _file, _function, _old, _new, _check in module_of(_name).MUTANTS:
        _of_kernels = _file.startswith("kernel_src/")
        _mutant = Mutant(_file if _of_kernels else f"shared/{_file}", _function, _old, _new, f"{_name}: {_check}", "PyTorch" not in _check)
        (KERNEL_MUTANTS if _of_kernels else OPERATION_MUTANTS).append(_mutant)


# ---------------------------------------------------------------- python -m tests.mutants
MUTANTS = [*KERNEL_MUTANTS, *OPERATION_MUTANTS]


def caught(number: int) -> bool:
    """Plants one of `MUTANTS` and says whether its check notices."""
    mutant = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder, planted(Path(folder), f"mutant_{number}", mutant, mutant.kernels) as package:
        try:
            CHECKS[mutant.check](package)
        except (AssertionError, InterpreterError):
            return True
    return False


def main(arguments=None) -> int:
    """Plants those of some files, or all, on all cores, and prints how many were caught and which were not."""
    p = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plants errors and counts those that the tests catch.")
    p.add_argument("files", nargs="*", metavar="file", help="files with these words in their paths; without any, all")
    files = p.parse_args(arguments).files
    wanted = [i for i, mutant in enumerate(MUTANTS) if not files or any(word in mutant.file for word in files)]
    if not wanted:
        p.error(f"no planted error is in {', '.join(files)}")
    with concurrent.futures.ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = list(pool.map(caught, wanted, chunksize=4))
    places: dict[str, list[bool]] = {}
    for mutant, was_caught in zip((MUTANTS[i] for i in wanted), found, strict=True):
        places.setdefault(mutant.file, []).append(was_caught)
        if not was_caught:
            print(f"survived: {mutant} (check {mutant.check})")
    for place, results in places.items():
        print(f"{place:40} {sum(results):4} of {len(results)} caught")
    print(f"{sum(found)} of {len(found)} planted errors caught: {'all of them' if all(found) else 'the others are holes in the tests'}")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
