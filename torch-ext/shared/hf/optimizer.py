"""AdamW that reads and writes everything once.

PyTorch's fused AdamW moves the bytes of bf16 parameters at 64 % of an H200's copy rate (fp32: 81 %). With all parameters of Qwen3-8B
that is 42 ms of every step, whatever its length, where a copy of the bytes takes 27.

A small model has as many parameters, whose steps are short, so that the host's time counts. What a step does follows from how all its
tensors are laid out. Where they are as they were in the step before (`_Plan`), the launches are prepared, and only addresses are new.
"""

import operator
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch._compile import _disable_dynamo  # what torch's own optimizers use: torch.compiler.disable imports the compiler
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from ..ops.adamw import Steps, constants, fits, numbers, numbers_on_device
from ..ops.arguments import fail
from ..runtime.device import PLAIN, is_transformed
from ..runtime.layouts import same_as

__all__ = ["AdamW"]

REFUSED = ("amsgrad", "maximize", "differentiable")
CPU = torch.device("cpu")
ORDINARY = frozenset(PLAIN)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with kernels that read and write everything of large parameters once, and torch's own step for the rest.

    The arguments, the state and its state_dict are torch's, so that checkpoints go from one to the other, and the results are those of
    `torch.optim.AdamW(fused=True)` up to the rounding of float32. Parameters of less than a million elements (norms, LoRA), and
    what no kernel takes (float64, tensors that are not contiguous, a GPU without kernels), go through torch's fused step on a GPU and
    through its default one elsewhere.

    params: parameters or groups of them, of any dtypes and on any devices; FSDP2's too. foreach, fused: without effect, for the calls
    that pass them. capturable: steps are counted on the device, where the learning rate may be too, so that a CUDA graph can hold a
    step, after one outside of it that makes the averages; a learning rate that is a number stays in a graph as it is. Otherwise the
    steps of large parameters are counted on the host, as torch does by default, and a learning rate that is a tensor is read there. A
    GradScaler waits for the device before a step, as it does with every optimizer that is not fused. Raises ValueError when amsgrad,
    maximize or differentiable is True.
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
        refused = {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        self._plans: Dict[int, _Plan] = {}  # of groups, by their numbers
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=capturable, **refused)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._plans = {}

    def add_param_group(self, param_group):
        """Takes torch's options. Raises ValueError for those that are refused."""
        _refuse({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """One step on every parameter that has a gradient. closure: computes the loss anew; its result is returned.

        Raises RuntimeError for a sparse gradient, and while a CUDA graph is captured unless all groups are capturable and every parameter
        was stepped before; ValueError for a gradient or an average of another shape than its parameter.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        for group in self.param_groups:
            _refuse(group)
            if capturing and not group["capturable"]:
                cure = "Use AdamW(capturable=True)"
                raise RuntimeError(f"AdamW cannot be captured in a CUDA graph: it counts its steps on the host. {cure}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            self._step_group(number, group, capturing)
        return loss

    def _step_group(self, number: int, group, capturing: bool) -> None:
        tensors, states = self._with_gradients(group, capturing)
        if not states:
            return
        held = tensors if ORDINARY.issuperset(map(type, tensors)) else _held(tensors)
        alone = capturing or is_transformed()  # nothing of it holds for another step
        plan = None if alone else self._plans.get(number)
        if plan is None or not plan.is_for(held, group):
            repeated = plan is not None and plan.params == list(map(id, tensors[::4]))
            plan = _Plan(tensors, held, group, repeated)
            if not alone:
                self._plans[number] = plan
        plan.step(tensors, held, states, group, capturing)

    def _with_gradients(self, group, capturing: bool) -> Tuple[List[torch.Tensor], List[Dict[str, Any]]]:
        """Returns param, grad, exp_avg, exp_avg_sq of each parameter with a gradient, one after the other, and their states."""
        tensors: List[torch.Tensor] = []
        states = []
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                if capturing:
                    raise RuntimeError("AdamW has no averages of a parameter yet, expected a step() before one is captured in a CUDA graph")
                state["step"] = torch.zeros((), dtype=torch.float32, device=CPU)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            states.append(state)
            tensors += (param, grad, state["exp_avg"], state["exp_avg_sq"])
        return tensors, states


class _Plan:
    """How the parameters of a group that have a gradient are stepped: those that a kernel takes by device, and those that are left to
    torch's fused step and to its default one.

    tensors: param, grad, exp_avg, exp_avg_sq of one after the other; held: see `_held`. repeated: it is to serve the next steps too,
    where all tensors are still laid out in this way.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor], group, repeated: bool):
        self.params = list(map(id, tensors[::4]))
        self._capturable = group["capturable"]
        self._is_for = same_as(held) if repeated else None
        self._others: List[int] = []
        large: Dict[int, List[int]] = {}  # by device
        fused: Dict[tuple, List[int]] = {}  # by device and dtype
        for place in range(len(tensors) // 4):
            row, ours = tensors[4 * place : 4 * place + 4], held[4 * place : 4 * place + 4]
            param, grad = row[:2]
            if grad.is_sparse:
                raise RuntimeError(f"the gradient of a parameter of shape {list(param.shape)} is sparse, expected a dense one")
            ordinary = ORDINARY.issuperset(map(type, ours))
            if ordinary and fits(ours):
                large.setdefault(ours[0].get_device(), []).append(place)
                continue
            _check_shapes(row)
            if ordinary and ours[0].is_cuda and param.is_floating_point() and len({tensor.dtype for tensor in ours}) == 1:
                fused.setdefault((ours[0].device, ours[0].dtype), []).append(place)
            else:
                self._others.append(place)
        self._large = [_Large(places, held[4 * places[0]].device, self._capturable, repeated) for places in large.values()]
        self._fused = [_Fused(places, device) for (device, _), places in fused.items()]

    def is_for(self, held: Sequence[torch.Tensor], group) -> bool:
        """Tells whether it is the plan for these tensors of its group."""
        return self._is_for is not None and self._capturable == group["capturable"] and self._is_for(held)

    def step(self, tensors: List[torch.Tensor], held: List[torch.Tensor], states: Sequence[dict], group, capturing: bool) -> None:
        lr = group["lr"]
        if not (self._capturable and isinstance(lr, torch.Tensor) and lr.device.type == held[0].device.type):
            lr = float(lr)
        options = lr, *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])
        changed = []  # without autograd's knowledge
        for large in self._large:
            large.step(held, states, options, capturing)
            changed += [tensors[4 * place] for place in large.places]
            if held is not tensors:
                changed += [held[4 * place] for place in large.places]
        for fused in self._fused:
            fused.step(held, states, options, capturing)
            if held is not tensors:
                changed += [tensors[4 * place] for place in fused.places]
        if self._others:
            params, grads, exp_avgs, exp_avg_sqs = _columns(tensors, self._others)
            capturable = self._capturable and all(param.is_cuda for param in params)
            counts = [_count(states[i], p.device if capturable else CPU, capturing) for i, p in zip(self._others, params)]
            lr, beta1, beta2, eps, weight_decay = options
            adamw(
                params, grads, exp_avgs, exp_avg_sqs, [], counts,
                capturable=capturable, has_complex=any(param.is_complex() for param in params),
                amsgrad=False, maximize=False, lr=lr if capturable else float(lr),
                beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip
        if changed:  # so that autograd notices a parameter that a later backward pass would have wanted as it was
            increment_version(changed)


class _Counted:
    """Parameters that are stepped together. places: which ones of the plan's; device: where their steps are counted.

    Each has a tensor of its own that counts, as torch has it. These are views of one tensor, so that one addition counts all steps;
    where a checkpoint or anyone else put another tensor in a view's place, there are new views.
    """

    def __init__(self, places: Sequence[int], device: torch.device):
        self.places = tuple(places)
        self._device = device
        self._counts = torch.empty(0)
        self._views: Tuple[torch.Tensor, ...] = ()

    def _count(self, states: Sequence[dict], capturing: bool) -> Tuple[torch.Tensor, ...]:
        """Counts this step, and returns each parameter's tensor. Outside of a CUDA graph `_counts` has them all."""
        if capturing:
            steps = [_count(states[place], self._device, capturing) for place in self.places]
            torch._foreach_add_(steps, 1)
            return tuple(steps)
        steps = [states[place]["step"] for place in self.places]
        if not (self._views and all(map(operator.is_, steps, self._views))):
            self._counts = torch.stack([step.to(self._device).reshape(()) for step in steps])
            self._views = self._counts.unbind()
            for place, view in zip(self.places, self._views):
                states[place]["step"] = view
        self._counts += 1
        return self._views


class _Large(_Counted):
    """The parameters of one device that a kernel takes."""

    def __init__(self, places: Sequence[int], device: torch.device, capturable: bool, repeated: bool):
        super().__init__(places, device if capturable else CPU)
        self._capturable = capturable
        self._step = Steps(capturable, repeated)

    def step(self, held: List[torch.Tensor], states: Sequence[dict], options: tuple, capturing: bool) -> None:
        """options: lr, beta1, beta2, eps, weight_decay."""
        views = self._count(states, capturing)
        lr, beta1, beta2, eps, weight_decay = options
        if self._capturable:
            counts = torch.stack(views) if capturing else self._counts
            found = numbers_on_device(counts, lr, beta1, beta2, weight_decay)
            self._step([*held, *found.unbind()], self.places, constants(beta1, beta2, eps))
            return
        steps = self._counts.tolist()
        for step in set(steps):  # some may have had no gradient in earlier steps
            places = tuple([place for place, other in zip(self.places, steps) if other == step])
            self._step(held, places, numbers(step, *options))


class _Fused(_Counted):
    """The parameters of one device and dtype that torch's fused step takes."""

    def step(self, held: List[torch.Tensor], states: Sequence[dict], options: tuple, capturing: bool) -> None:
        counts = self._count(states, capturing)
        lr, beta1, beta2, eps, weight_decay = options
        lr = lr.to(self._device) if isinstance(lr, torch.Tensor) else lr
        params, grads, exp_avgs, exp_avg_sqs = _columns(held, self.places)
        torch._fused_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, [], counts,
            lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=False, maximize=False,
        )  # fmt: skip


def _refuse(options) -> None:
    for name in REFUSED:
        if options.get(name):
            raise ValueError(f"{name} is {options[name]}, expected False: use torch.optim.AdamW for it")


def _held(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Tensors, four for each parameter, or in their place what this process holds of them, where FSDP2 or tensor parallelism spread the
    four over several in one way."""
    held: List[torch.Tensor] = []
    for i in range(0, len(tensors), 4):
        row = tensors[i : i + 4]
        placements = getattr(row[0], "placements", None)
        if placements is not None and all(getattr(tensor, "placements", None) == placements for tensor in row):
            held += [tensor.to_local() for tensor in row]  # type: ignore[attr-defined]
        else:
            held += row
    return held


def _columns(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Iterator[List[torch.Tensor]]:
    """The parameters at these places, their gradients, and their averages."""
    return ([tensors[4 * place + i] for place in places] for i in range(4))


def _check_shapes(tensors) -> None:
    """Raises ValueError for a gradient or an average of another shape than its parameter."""
    shape = tensors[0].shape
    for name, tensor in zip(("gradient", "exp_avg", "exp_avg_sq"), tensors[1:]):
        if tensor.shape != shape:
            fail(f"the {name} of a parameter", f"of shape {list(tensor.shape)}", f"the parameter's shape {list(shape)}")


def _count(state, device: torch.device, capturing: bool) -> torch.Tensor:
    """The counter of a parameter's steps on the device where its step wants it; that of a checkpoint may come from elsewhere."""
    if state["step"].device != device:
        if capturing:  # each replay would begin with this count
            raise RuntimeError(f"AdamW counts steps on {state['step'].device}, expected a step() before one is captured in a CUDA graph")
        state["step"] = state["step"].to(device)
    return state["step"]


def _two_steps(i) -> torch.Tensor:
    """Parameters after two steps, which are large enough to be all that is compared. fp16 can hold the squares of the gradients."""
    parameter = torch.nn.Parameter(i.constant(2**20).clone())
    optimizer, gradient = AdamW([parameter], lr=0.5, eps=1e-3), i.constant(2**20, of=lambda x: x + 8 * x.sign())
    for _ in range(2):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


SELF_CHECKS = {"AdamW (two steps)": _two_steps}
