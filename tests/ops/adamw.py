"""AdamW: the kernel, the optimizer around it, and whom it must leave to PyTorch."""

import functools

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ops.common import CPU, FP32, errors_in, launched, limit, mesh_of_one, on_cpu, randn, runtime_of
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


def small_parameters_too(package):
    """AdamW's kernel takes parameters of any size."""
    return limit(package, "adamw", "SMALLEST", 0)


def check_adamw(package, device, dtype, shapes=ADAMW_SHAPES, offset=0, lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2):
    """Three steps, each from where the last one came to, in two groups; every second parameter begins a step later.
    offset: elements between the start of the memory and of each tensor."""

    def placed(shape, seed):
        flat = randn(offset + torch.Size(shape).numel(), dtype=dtype, device=device, seed=seed)
        return flat[offset:].view(shape)

    params = [torch.nn.Parameter(placed(shape, i)) for i, shape in enumerate(shapes)]
    half = len(params) // 2
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    optimizer = package.AdamW([{"params": params[:half]}, {"params": params[half:], "lr": 2 * lr, "weight_decay": 0.0}], **options)
    for step in (1, 2, 3):
        expected = []
        for i, param in enumerate(params):
            late = i % 2
            param.grad = None if late and step == 1 else placed(param.shape, 100 * step + i)
            if param.grad is not None:
                state = optimizer.state[param] or {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                mine = {**options, "lr": 2 * lr, "weight_decay": 0.0} if i >= half else options
                expected.append((param, adamw_exact(param, param.grad, state["exp_avg"], state["exp_avg_sq"], step - late, **mine)))
        with small_parameters_too(package):
            assert optimizer.step() is None
        for param, wanted in expected:
            state = optimizer.state[param]
            for name, found, exactly in zip(("param", "exp_avg", "exp_avg_sq"), (param, state["exp_avg"], state["exp_avg_sq"]), wanted,
                                            strict=True):
                assert_close(found, exactly, dtype, f"AdamW {name} of {list(param.shape)} after step {step}")
    assert [optimizer.state[param]["step"].item() for param in params] == [3.0 - i % 2 for i in range(len(params))]


def check_adamw_in_slabs(ops):
    """More elements than one launch may reach over, with the bound put low."""
    with limit(ops, "common", "SLAB", 1024):
        check_adamw(ops, CPU, FP32, ((5, 512), (1501,), (2048,)))


def check_that_slabs_are_launches(ops):
    counts = []
    for slab in (2**30, 1024):
        with limit(ops, "common", "SLAB", slab):
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
        with small_parameters_too(ops):
            optimizer.step()
        assert any(name.startswith("adamw") for name in backend.launched) != replicated, backend.launched
        zeros = torch.zeros_like(grad)
        wanted = adamw_exact(before, grad, zeros, zeros, 1, 0.1, (0.9, 0.999), 1e-8, 0.1)
        assert_close(param.full_tensor(), wanted[0], FP32, "AdamW of a shard")


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
    "adamw_odd": on_cpu(check_adamw, FP32, ((1501,), (1000,))),
    "adamw_not_taken": check_adamw_that_is_not_taken,
    "adamw_of_checkpoints": check_adamw_of_a_checkpoint,
    "adamw_sharded": check_adamw_of_shards,
    "adamw_replicated": functools.partial(check_adamw_of_shards, replicated=True),
    "adamw_noticed": check_that_autograd_notices_adamw,
}
MUTANTS = [
    *errors_in("kernel_src/adamw.py", "adamw", "stepped",
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
    *errors_in("kernel_src/adamw.py", "adamw", "adamw",
         ("at = ct.bid(0)", "at = 0"),
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("read(exp_avg, at), read(exp_avg_sq, at)", "read(exp_avg_sq, at), read(exp_avg, at)"),
         ("ct.scatter(param, at", "ct.scatter(grad, at"),
         ("ct.astype(m, exp_avg.dtype)", "ct.astype(v, exp_avg.dtype)"),
         ("ct.astype(v, exp_avg_sq.dtype)", "ct.astype(m, exp_avg_sq.dtype)")),
    *errors_in("kernel_src/adamw.py", "adamw_odd", "adamw_any",
         ("ct.bid(0) * TILE +", ""),
         ("p, g, m, v = read", "p, m, g, v = read"),
         ("param.dtype), check_bounds=True", "param.dtype), check_bounds=False"),
         ("exp_avg.dtype), check_bounds=True", "exp_avg.dtype), check_bounds=False"),
         ("exp_avg_sq.dtype), check_bounds=True", "exp_avg_sq.dtype), check_bounds=False")),
    *errors_in("shared/ops/adamw.py", "adamw", "numbers",
         ("lr / (1 - beta1**step)", "lr"),
         ("1 / math.sqrt(1 - beta2**step)", "1.0"),
         ("1 - beta2**step", "1 - beta1**step"),
         ("lr * weight_decay", "weight_decay"),
         ("1 - beta1, beta2", "1 - beta2, beta2"),
         ("1 - beta2, step_size", "1 - beta1, step_size")),
    *errors_in("shared/hf/optimizer.py", "adamw", "AdamW._step_group",
         ("for _, step in large], 1)", "for _, step in large], 2)"),
         ("by_step[number] = numbers(number,", "by_step[number] = numbers(3.0,"),
         ("lr=lr", "lr=2 * lr", "adamw_not_taken"),
         ("beta1=beta1, beta2=beta2", "beta1=beta2, beta2=beta1", "adamw_not_taken"),
         ("weight_decay=weight_decay", "weight_decay=0.0", "adamw_not_taken"),
         ("eps=eps", "eps=0.0", "adamw_not_taken"),
         ("if changed:", "if not changed:", "adamw_noticed")),
    *errors_in("shared/hf/optimizer.py", "adamw_of_checkpoints", "AdamW._by_way", ("if not state:", "if True:")),
    *errors_in("shared/runtime/device.py", "adamw_not_taken", "kernels_run_on", ("tensor.is_neg()", "False")),
    *errors_in("shared/hf/optimizer.py", "adamw_sharded", "_held",
         ("[t.to_local() for t in tensors]", "list(tensors)"),
         ("return local if all", "return None if all"),
         ("any(getattr", "all(getattr", "adamw_replicated")),
]  # fmt: skip
