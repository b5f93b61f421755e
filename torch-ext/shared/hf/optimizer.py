"""AdamW that reads and writes everything once.

PyTorch's fused AdamW moves the bytes of bf16 parameters at 64 % of an H200's copy rate (fp32: 81 %). With all parameters of Qwen3-8B
that is 42 ms of every step, whatever its length, where a copy of the bytes takes 27.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch._compile import _disable_dynamo  # what torch's own optimizers use: torch.compiler.disable imports the compiler
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from ..ops.adamw import fits, numbers, step_in_place
from ..ops.common import fail
from ..runtime.device import PLAIN

REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")
CPU = torch.device("cpu")


def _held(tensors: Sequence[torch.Tensor]) -> Optional[Sequence[torch.Tensor]]:
    """The ordinary tensors behind a parameter, its gradient and its averages: they themselves, or what this process holds of them where
    FSDP2 or tensor parallelism spread them over several in one way. None where there are others."""
    for tensor in tensors:  # a loop, for all() over a generator costs the host twice as much, for each of hundreds of parameters
        if type(tensor) not in PLAIN:
            break
    else:
        return tensors
    if not hasattr(tensors[0], "to_local"):
        return None
    placements = getattr(tensors[0], "placements", None)
    if any(getattr(t, "placements", None) != placements for t in tensors):
        return None
    local = [t.to_local() for t in tensors]  # type: ignore[attr-defined]
    return local if all(type(t) in PLAIN for t in local) else None


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with a launch for each large parameter that reads and writes everything once, and torch's own step for the rest.

    The arguments, the state and its state_dict are torch's, so that checkpoints go from one to the other, and the results are those of
    `torch.optim.AdamW(fused=True)` up to the rounding of float32. Parameters of less than a million elements (norms, LoRA), and
    what no kernel takes (float64, tensors that are not contiguous, a GPU without kernels), go through torch's fused step on a GPU and
    through its default one elsewhere.

    params: parameters or groups of them, of any dtypes and on any devices; FSDP2's too. foreach, fused: without effect, for the calls
    that pass them. A learning rate that is a tensor is read on the host. The steps of large parameters are counted on the host, as
    torch does by default, so a CUDA graph cannot hold them, and a GradScaler waits for the device before a step, as it does with
    every optimizer that is not fused. Raises ValueError when amsgrad, maximize, capturable or differentiable is True.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
    ):
        refused = {"amsgrad": amsgrad, "maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **refused)

    def add_param_group(self, param_group):
        """As torch's. Raises ValueError for the options that are refused."""
        _refuse({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """One step on every parameter that has a gradient. closure: computes the loss anew; its result is returned.

        Raises RuntimeError for a sparse gradient, and while a CUDA graph is captured; ValueError for a gradient or an average of another
        shape than its parameter.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            cure = "Use torch.optim.AdamW(capturable=True)"
            raise RuntimeError(f"AdamW cannot be captured in a CUDA graph: it counts its steps on the host. {cure}")
        for group in self.param_groups:
            _refuse(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group) -> None:
        options = float(group["lr"]), *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])
        large, fused, others, changed = self._by_way(group["params"])
        if large:
            torch._foreach_add_([step for _, step in large], 1)
            by_step: Dict[float, Tuple[float, ...]] = {}
            for tensors, step in large:
                number = step.item()
                if number not in by_step:
                    by_step[number] = numbers(number, *options)
                step_in_place(tensors, by_step[number])
        lr, beta1, beta2, eps, weight_decay = options
        default: Dict[str, Any] = {"has_complex": any(p.is_complex() for p, *_ in others)}
        for way, found in (({"fused": True}, fused), (default, others)):
            if found:
                params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*found))
                adamw(
                    params, grads, exp_avgs, exp_avg_sqs, [], steps,
                    amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, **way,
                )  # fmt: skip
        if changed:  # so that autograd notices a parameter that a later backward pass would have wanted as it was
            increment_version(changed)

    def _by_way(self, params) -> Tuple[List, List, List, List]:
        """Parameters with a gradient by the way that they are stepped: ((param, grad, exp_avg, exp_avg_sq), step) for our kernels, (param,
        grad, exp_avg, exp_avg_sq, step) for torch's fused step and for its default one; and what is changed without torch's knowledge."""
        large: List = []
        fused: List = []
        others: List = []
        changed: List = []
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(f"the gradient of a parameter of shape {list(param.shape)} is sparse, expected a dense one")
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device=CPU)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            tensors = param, grad, state["exp_avg"], state["exp_avg_sq"]
            held = _held(tensors)
            if held is not None and fits(held):
                large.append((held, _on(state, CPU)))
                changed += (param, held[0])
                continue
            _check_shapes(tensors)
            if held is not None and held[0].is_cuda and param.is_floating_point() and _of_one_dtype(held):
                fused.append((*held, _on(state, held[0].device)))
                changed.append(param)
            else:
                others.append((*tensors, _on(state, CPU)))
        return large, fused, others, changed


def _refuse(options) -> None:
    for name in REFUSED:
        if options.get(name):
            raise ValueError(f"{name} is {options[name]}, expected False: use torch.optim.AdamW for it")


def _of_one_dtype(tensors) -> bool:
    param, grad, exp_avg, exp_avg_sq = tensors
    return param.dtype == grad.dtype == exp_avg.dtype == exp_avg_sq.dtype


def _check_shapes(tensors) -> None:
    """Raises ValueError for a gradient or an average of another shape than its parameter."""
    param, grad, exp_avg, exp_avg_sq = tensors
    shape = param.shape
    if grad.shape == exp_avg.shape == exp_avg_sq.shape == shape:
        return
    for name, tensor in zip(("gradient", "exp_avg", "exp_avg_sq"), tensors[1:]):
        if tensor.shape != shape:
            fail(f"the {name} of a parameter", f"of shape {list(tensor.shape)}", f"the parameter's shape {list(shape)}")


def _on(state, device: torch.device) -> torch.Tensor:
    """The counter of a parameter's steps on the device where its step wants it; that of a checkpoint may come from elsewhere."""
    if state["step"].device != device:
        state["step"] = state["step"].to(device)
    return state["step"]
