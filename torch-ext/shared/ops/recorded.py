"""Attention's results, recorded in one run of a function and returned in the next one instead of being computed again.

What a run returns with a recording is differentiable as without: the backward pass of attention takes the queries, keys and values of that
run, and the recorded output and log-sum-exp.
"""

import threading
from typing import Callable, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["AttentionRecording", "Results", "recorded"]

# PyTorch's kernels for attention by name: the place of the argument that asks for the log-sum-exp, None where it always comes.
KERNELS = {
    "_scaled_dot_product_flash_attention": None,
    "_scaled_dot_product_flash_attention_for_cpu": None,
    "_scaled_dot_product_efficient_attention": 4,
    "_scaled_dot_product_cudnn_attention": 4,
}
_ASKS = {getattr(torch.ops.aten, name).default: place for name, place in KERNELS.items() if hasattr(torch.ops.aten, name)}
_running = threading.local()
Results = List[Tuple[Callable, tuple]]


def _aliases(results):
    """Returns the tensors as new objects, of which autograd knows nothing."""
    return tuple(result.detach() if isinstance(result, torch.Tensor) else result for result in results)


class AttentionRecording(TorchDispatchMode):
    """A context in which attention is recorded, or what was recorded is given back.

    given: `results` of the context in which it was recorded, or None to record. Attention is PyTorch's, but for the one that is written in
    other operations (`KERNELS`), and this package's.
    """

    def __init__(self, given: Optional[Results] = None):
        super().__init__()
        self.results: Results = []
        self.given = None if given is None else list(given)

    def __enter__(self):
        self.outer = getattr(_running, "recording", None)
        _running.recording = self
        return super().__enter__()

    def __exit__(self, *error):
        _running.recording = self.outer
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in _ASKS:
            return function(*args, **(kwargs or {}))
        place = _ASKS[function]
        if place is not None:  # without gradients, as in the first run of a reentrant checkpoint, nothing would ask
            args = (*args[:place], True, *args[place + 1 :])
        return self.of(function, *args, **(kwargs or {}))

    def of(self, function: Callable, *args, **kwargs) -> tuple:
        """function(*args, **kwargs), a tuple, or what was recorded of the same function at this place."""
        if self.given and self.given[0][0] is function:
            return _aliases(self.given.pop(0)[1])
        results = function(*args, **kwargs)
        self.results.append((function, _aliases(results)))
        return results


def recorded(function: Callable, *args) -> tuple:
    """function(*args), of an attention that no dispatcher knows, as the `AttentionRecording` has it in which it runs, if any."""
    recording = getattr(_running, "recording", None)
    return function(*args) if recording is None else recording.of(function, *args)
