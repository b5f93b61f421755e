"""What a causal LM's forward does to its logits, where there are none: it gets a stand-in, which notes it."""

import math
from typing import Any, NamedTuple, Optional

import torch

__all__ = ["Head", "Unmade", "check_head"]


class Head(NamedTuple):
    """What a model makes of its head's products before the loss: softcap * tanh(scale * products / softcap), or scale * products without a
    softcap. A family's row says it, and no model may do anything else."""

    scale: float = 1.0
    softcap: Optional[float] = None

    def is_like(self, other: "Head") -> bool:
        caps = self.softcap, other.softcap
        same_caps = caps == (None, None) or (None not in caps and math.isclose(*caps, rel_tol=1e-6))  # type: ignore[arg-type]
        return same_caps and math.isclose(self.scale, other.scale, rel_tol=1e-6)


class Unmade:
    """Stands in a model's forward for logits that are never made. It may be scaled and capped, which `done` says, and cast to float32; all
    else raises RuntimeError.

    hidden: [..., features], what went into the head. factor: by which the products are multiplied; capped: the product of the factors
    before a tanh, None without one; factor is then that after it.
    """

    def __init__(self, hidden: torch.Tensor, factor: float = 1.0, capped: Optional[float] = None):
        self.hidden, self.factor, self.capped = hidden, factor, capped

    @property
    def done(self) -> Head:
        if self.capped is None:
            return Head(self.factor)
        scale = self.capped * self.factor
        return Head(1.0 if math.isclose(scale, 1.0, rel_tol=1e-12) else scale, self.factor)  # 30 * (1 / 30) is not 1

    def __mul__(self, other) -> "Unmade":
        if type(other) not in (int, float):
            raise _refused(f"multiplies the logits by a {type(other).__name__}")
        return Unmade(self.hidden, self.factor * other, self.capped)

    __rmul__ = __mul__

    def __truediv__(self, other) -> "Unmade":
        if type(other) not in (int, float):
            raise _refused(f"divides the logits by a {type(other).__name__}")
        return Unmade(self.hidden, self.factor / other, self.capped)

    def float(self) -> "Unmade":
        return self  # the loss computes in float32

    contiguous = float

    def to(self, dtype) -> "Unmade":
        if dtype is not torch.float32:
            raise _refused(f"casts the logits to {dtype}")
        return self

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def tanh(self) -> "Unmade":
        if self.capped is not None:
            raise _refused("caps the logits twice")
        return Unmade(self.hidden, 1.0, self.factor)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        if function in (torch.mul, torch.multiply) and not kwargs:
            return args[0] * args[1]
        if function in (torch.div, torch.divide, torch.true_divide) and not kwargs:
            return args[0] / args[1]
        raise _refused(f"calls {getattr(function, '__name__', function)} with the logits")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and torch.compile ask of every object
            raise AttributeError(name)
        raise _refused(f"reads the logits' {name}")


def _refused(what: str) -> RuntimeError:
    return RuntimeError(
        f"the model's forward {what} before its loss, which is computed without logits. Pass skip_logits=False, or call "
        "apply(fused_linear_cross_entropy=False)"
    )


def check_head(done: Head, expected: Head) -> None:
    """Raises RuntimeError where a model's forward did something else to its logits than a package knows."""
    if not done.is_like(expected):
        raise _refused(f"makes {done} of its logits, expected {expected},")
