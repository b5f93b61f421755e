"""Dropout that keeps no mask: the state of the generator before it is kept, and the backward pass draws the same numbers again."""

from typing import Tuple

import torch
from torch.nn.functional import dropout

__all__ = ["dropped_again", "dropped_with_state"]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def dropped_with_state(x: torch.Tensor, probability: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns dropout(x), and the state of the generator before it."""
    state = _generator(x.device).get_state()
    return dropout(x, probability), state


def dropped_again(x: torch.Tensor, probability: float, state: torch.Tensor) -> torch.Tensor:
    """Returns dropout(x) with the numbers that follow a state of the generator, which is left as it was."""
    generator = _generator(x.device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return dropout(x, probability)
    finally:
        generator.set_state(now)
