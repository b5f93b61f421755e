"""AdamW at the speed of memory.

PyTorch's fused AdamW moves the bytes of bf16 parameters at 64 % of an H200's copy rate (fp32: 81 %). With an 8B model that is 42 ms of
every step, whatever its length, where the bytes need 27.
"""

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from .ops.adamw import fits, numbers, step_in_place

REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


def _held(tensors: Sequence[torch.Tensor]) -> Optional[Sequence[torch.Tensor]]:
    """The ordinary tensors behind a parameter, its gradient and its averages: they themselves, or what this process holds of them where
    FSDP2 or tensor parallelism spread them over several in one way. None where there are others."""
    if hasattr(tensors[0], "to_local"):
        placements = getattr(tensors[0], "placements", None)
        if any(getattr(t, "placements", None) != placements for t in tensors):
            return None
        tensors = [t.to_local() for t in tensors]
    return tensors if all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors) else None


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch a parameter, which reads and writes everything once.

    The arguments, the state and its state_dict are torch's, so that checkpoints go from one to the other, and the results are those of
    `torch.optim.AdamW(fused=True)` up to the rounding of float32. What no kernel takes (a CPU, float64, gradients of another dtype
    or layout than their parameter) goes through torch's own step.

    params: parameters or groups of them, of any dtypes and on any devices; FSDP2's too. foreach, fused: which of torch's steps;
    taken for the calls that pass them, without effect on the kernel. A learning rate that is a tensor is read on the host.
    The step counts on the host, as it does by torch's default. So a CUDA graph cannot hold it, and a GradScaler waits for the device
    before it, as with every optimizer that is not fused. Raises ValueError for amsgrad, maximize, capturable and differentiable.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, foreach=None, fused=None):
        # Not handed on: torch's fused step counts on the device.
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure=None):
        """One step on every parameter that has a gradient. closure: computes the loss anew; its result is returned.

        Raises RuntimeError for a sparse gradient, and while a CUDA graph is captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("AdamW cannot be captured in a CUDA graph: it counts its steps on the host. Use torch.optim.AdamW(capturable=True)")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group) -> None:
        for name in REFUSED:
            if group.get(name):
                raise ValueError(f"{name} is {group[name]}, expected False: use torch.optim.AdamW for it")
        options = float(group["lr"]), *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])
        ours, theirs = self._sorted(group["params"])
        if ours:
            torch._foreach_add_([step for _, step in ours], 1)
            by_step: Dict[float, Tuple[float, ...]] = {}
            for tensors, step in ours:
                count = step.item()
                if count not in by_step:
                    by_step[count] = numbers(count, *options)
                step_in_place(tensors, by_step[count])
            # So that autograd notices a parameter that a later backward pass would have wanted as it was.
            increment_version([tensors[0] for tensors, _ in ours])
        if theirs:
            lr, beta1, beta2, eps, weight_decay = options
            params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*theirs))
            adamw(
                params, grads, exp_avgs, exp_avg_sqs, [], steps,
                amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip

    def _sorted(self, params) -> Tuple[List, List]:
        """((param, grad, exp_avg, exp_avg_sq), step) of those that the kernel takes; (param, grad, exp_avg, exp_avg_sq, step) of the rest."""
        ours, theirs = [], []
        traced = torch.compiler.is_compiling()
        for param in params:
            grad: Optional[torch.Tensor] = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(f"the gradient of a parameter of shape {list(param.shape)} is sparse, expected a dense one")
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if state["step"].device.type != "cpu":  # from a checkpoint of torch's fused step
                state["step"] = state["step"].cpu()
            tensors = param, grad, state["exp_avg"], state["exp_avg_sq"]
            held = None if traced else _held(tensors)
            if held is not None and fits(held):
                ours.append((held, state["step"]))
            else:
                theirs.append((*tensors, state["step"]))
        return ours, theirs
