"""The sizes of gated delta nets, for the benchmarks of their operations, and transformers' own functions for them."""

import functools
import importlib
import sys
from dataclasses import dataclass

from .operation import over_tokens


@dataclass(frozen=True)
class DeltaNet:
    """Heads of keys, heads of values, and the length of each."""

    key_heads: int
    heads: int
    width: int

    @property
    def channels(self) -> int:
        """Return those of the short convolution: queries, keys and values."""
        return (2 * self.key_heads + self.heads) * self.width


SIZES = {"qwen3.5_9b": DeltaNet(16, 32, 128), "qwen3.5_27b": DeltaNet(16, 48, 128), "qwen3.5_tiny": DeltaNet(1, 2, 16)}


def size(model: str) -> DeltaNet:
    """Return the dimensions of a model's delta nets. Raise ValueError for one without."""
    if model not in SIZES:
        raise ValueError(f"--model is {model}, expected one of {', '.join(SIZES)}")
    return SIZES[model]


LIBRARIES = ("fla", "causal_conv1d")  # whose functions transformers takes where they are installed
SWEEPS = dict.fromkeys(("token_length", "model_config"), functools.partial(over_tokens, size=size))


@functools.cache
def in_pytorch(name: str):
    """Return a function of transformers' PyTorch code, which its module has under the same name as a library's."""
    here = {library: sys.modules.pop(library) for library in LIBRARIES if library in sys.modules}
    sys.modules.update(dict.fromkeys(LIBRARIES))  # type: ignore[arg-type]
    try:
        return getattr(importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5"), name)
    finally:
        for library in LIBRARIES:
            del sys.modules[library]
        sys.modules.update(here)
