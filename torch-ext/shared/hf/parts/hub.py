"""The versions of Hugging Face's libraries that go together, and a layer in the form in which `kernels` asks for one."""

from typing import Any, Mapping, NamedTuple

__all__ = ["KERNELS_EXPECTED", "PAIR", "TRANSFORMERS_EXPECTED", "kernels_library", "kernels_wanted", "mapping_of"]

TRANSFORMERS_EXPECTED = ">=5.17"
KERNELS_EXPECTED = ">=0.16.2,<0.18"
# Each transformers works with one minor version of kernels only.
PAIR = "'transformers>=5.18,<5.23' with 'kernels>=0.17.2,<0.18', or transformers 5.17 with kernels 0.16.2"
CUDA_CAPABILITIES = (80, 121)  # from, to: what kernels are built for


def kernels_library():
    """Imports `kernels` and returns it. Raises ImportError when it is absent or too old."""
    try:
        import kernels
    except ImportError as error:
        raise ImportError(f"kernels is not installed. Run: pip install 'kernels{KERNELS_EXPECTED}'") from error
    if not hasattr(kernels, "replace_kernel_forward_from_hub"):
        raise ImportError(
            f"kernels is {getattr(kernels, '__version__', 'of an unknown version')}, expected kernels{KERNELS_EXPECTED}. "
            f"Run: pip install 'kernels{KERNELS_EXPECTED}'"
        )
    return kernels


def kernels_wanted() -> str:
    """The versions of `kernels` with which the installed transformers works, by what it says itself."""
    from transformers.utils import import_utils

    bounds = (("KERNELS_MIN_VERSION", ">="), ("KERNELS_MAX_VERSION", "<"))
    found = [sign + getattr(import_utils, name) for name, sign in bounds if hasattr(import_utils, name)]
    return f"'kernels{','.join(found)}'" if found else "another kernels"


class LoadedLayer(NamedTuple):
    """A layer of this copy of the package in the form in which `kernels` asks for one: nothing is downloaded or imported again."""

    layer: Any

    def load(self):
        return self.layer

    def __str__(self):
        return f"`{self.layer.__module__}`, layer `{self.layer.__name__}`"


def mapping_of(layers: Mapping[str, type], mode=None) -> dict:
    """Makes a mapping for `kernels.use_kernel_mapping` of layers by their names there, for CPUs and for the GPUs that have kernels.

    mode: the only `kernels.Mode` that they are for; by default they are for all. Raises ImportError as `kernels_library`.
    """
    kernels = kernels_library()
    cuda = kernels.Device("cuda", kernels.CUDAProperties(*CUDA_CAPABILITIES))
    found = {}
    for name, layer in layers.items():
        entry = LoadedLayer(layer) if mode is None else {mode: LoadedLayer(layer)}
        found[name] = {"cpu": entry, cuda: entry}
    return found
