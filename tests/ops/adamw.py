"""AdamW: the kernel, the optimizer around it, and whom it must leave to PyTorch."""

import functools

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ops.common import CPU, FP32, errors_in, launched, limit, mesh_of_one, on_cpu, randn, runtime_of
from tests.ops.generated import generated
from tests.tolerances import assert_close


def adamw_exact(param, grad, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    """(param, exp_avg, exp_avg_sq) after a step, in float64."""
    param, grad, exp_avg, exp_avg_sq = (t.detach().double().cpu() for t in (param, grad, exp_avg, exp_avg_sq))
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad.square()
    change = exp_avg / (1 - betas[0] ** step) / ((exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps)
    return param - lr * weight_decay * param - lr * change, exp_avg, exp_avg_sq


# Pieces that a block takes whole, sizes that are none, nothing.
ADAMW_SHAPES = ((5, 1024), (512,), (3, 77), (1501,), (2, 0))
# So many of whole pieces, one after the other, that one launch takes four and something is left over.
FOURS = ((2, 512), (512,), (3, 512), (1501,), (1024,), (7, 512), (512,))


def small_parameters_too(package):
    """AdamW's kernel takes parameters of any size."""
    return limit(package, "adamw", "SMALLEST", 0)


def check_adamw(
    package, device, dtype, shapes=ADAMW_SHAPES, offset=0, lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2, late=True,
    capturable=False,
):  # fmt: skip
    """Six steps, each from where the last one came to, in two groups; where some are late, every second parameter begins a step later.
    offset: elements between the start of the memory and of each tensor."""

    def placed(shape, seed):
        flat = randn(offset + torch.Size(shape).numel(), dtype=dtype, device=device, seed=seed)
        return flat[offset:].view(shape)

    params = [torch.nn.Parameter(placed(shape, i)) for i, shape in enumerate(shapes)]
    half = len(params) // 2 if late else len(params) - 1
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    of_others = {"lr": torch.tensor(2 * lr, dtype=torch.float64, device=device) if capturable else 2 * lr, "weight_decay": 0.0}
    groups = [{"params": params[:half]}, {"params": params[half:], **of_others}]
    optimizer = package.AdamW(groups, **options, capturable=capturable)
    for step in range(1, 7):
        expected = []
        for i, param in enumerate(params):
            begun = i % 2 if late else 0
            param.grad = None if step <= begun else placed(param.shape, 100 * step + i)
            if param.grad is not None:
                state = optimizer.state[param] or {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                mine = {**options, "lr": 2 * lr, "weight_decay": 0.0} if i >= half else options
                expected.append((param, adamw_exact(param, param.grad, state["exp_avg"], state["exp_avg_sq"], step - begun, **mine)))
        with small_parameters_too(package):
            assert optimizer.step() is None
        for param, wanted in expected:
            state = optimizer.state[param]
            for name, found, exactly in zip(("param", "exp_avg", "exp_avg_sq"), (param, state["exp_avg"], state["exp_avg_sq"]), wanted,
                                            strict=True):
                assert_close(found, exactly, dtype, f"AdamW {name} of {list(param.shape)} after step {step}")
    steps = [optimizer.state[param]["step"] for param in params]
    assert [found.item() for found in steps] == [6.0 - (i % 2 if late else 0) for i in range(len(params))]
    assert not capturable or all(found.device == param.device for found, param in zip(steps, params, strict=True))


def check_adamw_of_four(package, device, dtype, capturable=False):
    """So that a launch takes four parameters."""
    check_adamw(package, device, dtype, FOURS, late=False, capturable=capturable)
    names = [name.partition("-")[0] for name in getattr(runtime_of(package).launch.backend, "launched", ())]
    assert not names or f"adamw_{'capturable_' * capturable}of_four" in names[-12:], names


def check_adamw_in_slabs(ops):
    """More elements than one launch may reach over, with the bound put low."""
    with limit(ops, "arrays", "SLAB", 1024):
        check_adamw(ops, CPU, FP32, ((5, 512), (1501,), (2048,)))


def check_that_slabs_are_launches(ops):
    counts = []
    for slab in (2**30, 1024):
        with limit(ops, "arrays", "SLAB", slab):
            before = len(launched(ops))
            for kernel in list(runtime_of(ops).launch.tuner.kernels):
                kernel.forget()
            check_adamw(ops, CPU, FP32, ((5, 512),))
            counts.append(len(launched(ops)) - before)
    assert counts[1] > counts[0]


def check_adamw_that_is_not_taken(ops):
    """What no kernel takes: float64, a gradient or an average of other strides or another dtype than the parameter's, a gradient that
    is there with its sign turned."""
    check_adamw(ops, CPU, torch.float64)
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
        wanted = adamw_exact(param, grad, *zeros.values(), 1, 0.1, (0.9, 0.999), 1e-8, 0.01)
        with small_parameters_too(ops):
            optimizer.step()
        for found, exactly in zip((param, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
            assert_close(found, exactly, FP32, f"AdamW with another {change}")


def check_adamw_of_shards(ops, replicated=False, steps=6):
    """Parameters of FSDP2 and tensor parallelism, on a mesh of this process alone, step after step: the kernel steps what it holds.
    replicated: from the second half on, gradients are spread in another way than the parameters, so that no kernel may run."""
    with mesh_of_one() as mesh:
        params = [torch.nn.Parameter(distribute_tensor(randn(4, 512, dtype=FP32, device=CPU, seed=i), mesh, [Shard(0)])) for i in (0, 1)]
        optimizer = ops.AdamW(params, lr=0.1, weight_decay=0.1)
        backend = runtime_of(ops).launch.backend
        for step in range(1, steps + 1):
            expected, other = [], replicated and step > steps // 2
            for i, param in enumerate(params):
                grad = randn(4, 512, dtype=FP32, device=CPU, seed=10 * step + i)
                param.grad = distribute_tensor(grad, mesh, [Replicate() if other else Shard(0)])
                state = optimizer.state[param]
                averages = [state[name].full_tensor() if state else torch.zeros_like(grad) for name in ("exp_avg", "exp_avg_sq")]
                expected.append(adamw_exact(param.full_tensor(), grad, *averages, step, 0.1, (0.9, 0.999), 1e-8, 0.1))
            backend.launched.clear()
            with small_parameters_too(ops):
                optimizer.step()
            assert any(name.startswith("adamw") for name in backend.launched) != other, backend.launched
            for param, wanted in zip(params, expected, strict=True):
                assert_close(param.full_tensor(), wanted[0], FP32, f"AdamW of a shard after step {step}")


def check_that_autograd_notices_adamw(ops):
    """A backward pass that needs a parameter as it was fails, as it does with PyTorch's step; a DTensor too."""
    with mesh_of_one() as mesh:
        plain = torch.nn.Parameter(randn(512, dtype=FP32, device=CPU))
        shared = torch.nn.Parameter(distribute_tensor(randn(512, dtype=FP32, device=CPU), mesh, [Shard(0)]))
        for param, ones in ((plain, torch.ones(512)), (shared, distribute_tensor(torch.ones(512), mesh, [Shard(0)]))):
            loss = (param * ones.requires_grad_()).sum()
            param.grad = torch.ones_like(param)
            with small_parameters_too(ops):
                ops.AdamW([param]).step()
            try:
                loss.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                raise AssertionError(f"autograd did not notice the step of a {type(param.data).__name__}")


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
                with small_parameters_too(ops):
                    optimizer.step()
            saved = optimizer.state_dict()
        found.append(param)
    assert_close(found[0], found[1], FP32, "AdamW through checkpoints")


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "adamw": on_cpu(check_adamw, FP32),
    "adamw_of_four": on_cpu(check_adamw_of_four, FP32),
    "adamw_odd": on_cpu(check_adamw, FP32, ((1501,), (1000,))),
    "adamw_capturable": on_cpu(check_adamw, FP32, capturable=True),
    "adamw_capturable_of_four": on_cpu(check_adamw_of_four, FP32, capturable=True),
    "adamw_not_taken": check_adamw_that_is_not_taken,
    "adamw_of_checkpoints": check_adamw_of_a_checkpoint,
    "adamw_sharded": check_adamw_of_shards,
    "adamw_replicated": functools.partial(check_adamw_of_shards, replicated=True),
    "adamw_noticed": check_that_autograd_notices_adamw,
}
OF_FOUR = (
    ("piece - end1", "piece - end0"),
    ("piece - end2", "piece - end1"),
    ("p1, g1, m1, v1, keep", "p1, g0, m1, v1, keep"),
    ("m2, v2, keep", "v2, m2, keep"),
    ("p3, g3, m3, v3, keep", "p2, g3, m3, v3, keep"),
)
MUTANTS = [
    *generated("kernel_src/adamw.py", "adamw_of_four or adamw_capturable_of_four or adamw or adamw_odd",
               "adamw_capturable_of_four adamw_of_four step_any stepped"),
    *generated("shared/ops/adamw.py", "adamw_capturable or adamw", "constants numbers numbers_on_device"),
    *errors_in("kernel_src/adamw.py", "adamw", "step_piece",
         ("at = piece", "at = 0"),
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("read(exp_avg, at), read(exp_avg_sq, at)", "read(exp_avg_sq, at), read(exp_avg, at)"),
         ("write(param, at", "write(grad, at"),
         ("write(exp_avg, at, m)", "write(exp_avg, at, v)"),
         ("write(exp_avg_sq, at, v)", "write(exp_avg_sq, at, m)")),
    *errors_in("kernel_src/adamw.py", "adamw_odd", "step_any",
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("write_within(param", "write(param"),
         ("write_within(exp_avg,", "write(exp_avg,"),
         ("write_within(exp_avg_sq", "write(exp_avg_sq")),
    *errors_in("kernel_src/adamw.py", "adamw_of_four", "adamw_of_four", *OF_FOUR),
    *errors_in("kernel_src/adamw.py", "adamw_capturable_of_four", "adamw_capturable_of_four", *OF_FOUR),
    *errors_in("kernel_src/adamw.py", "adamw_capturable", "of_this_step",
         ("numbers, 0", "numbers, 1"),
         ("numbers, 1", "numbers, 2"),
         ("numbers, 2", "numbers, 0")),
    *errors_in("shared/ops/adamw.py", "adamw_of_four", "Steps.__call__",
         ("for i in rows[number]]", "for i in (*rows[number][:2], *rows[number][:1:-1])]")),
    *errors_in("shared/hf/optimizer.py", "adamw", "_Counted._count",
         ("self._counts += 1", "self._counts += 2"),
         ('["step"] = view', '["step"] = view.clone()')),
    *errors_in("shared/hf/optimizer.py", "adamw", "_Large.step",
         ("numbers(step, *options)", "numbers(3.0, *options)"),
         ("if other == step]", "]")),
    *errors_in("shared/hf/optimizer.py", "adamw_not_taken", "_Plan.step",
         ("else float(lr)", "else 2 * float(lr)"),
         ("beta1=beta1, beta2=beta2", "beta1=beta2, beta2=beta1"),
         ("weight_decay=weight_decay", "weight_decay=0.0"),
         ("eps=eps", "eps=0.0")),
    *errors_in("shared/hf/optimizer.py", "adamw_noticed", "_Plan.step",
         ("if changed:", "if not changed:"),
         ("changed += [tensors[4 * place] for place in large.places]", "pass")),
    *errors_in("shared/hf/optimizer.py", "adamw_of_checkpoints", "AdamW._with_gradients", ("if not state:", "if True:")),
    *errors_in("shared/runtime/device.py", "adamw_not_taken", "kernels_run_on", ("tensor.is_neg()", "False")),
    *errors_in("shared/hf/optimizer.py", "adamw_sharded", "_held",
         ("[tensor.to_local() for tensor in row]", "row"),
         ("placements is not None", "placements is None"),
         ("== placements for", "!= placements for", "adamw_replicated")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"adamw": ("test_adamw",)}
