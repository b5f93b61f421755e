"""Where the functions that are compared come from.

A loader returns a function, or raises: NotInstalled when its library is not here (the provider is left out, with a note),
anything else when it is here and does not work (the provider is recorded as failed).
"""

import functools
import importlib
import importlib.util
import os
import sys

import torch

from .records import ROOT


class NotInstalled(ImportError):
    """The provider, or the operation of ours, does not exist here."""


def need(*modules: str) -> None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            raise NotInstalled(f"{module} is not installed")


def liger(path: str, name: str):
    """An object of Liger-Kernel's Triton implementation, which is its default."""
    need("liger_kernel", "triton")
    return getattr(importlib.import_module(f"liger_kernel.{path}"), name)


def liger_cutedsl(name: str):
    """A function of Liger-Kernel's CuTe DSL implementation. It must not fall back to Triton under the other's name."""
    need("liger_kernel", "triton", "cutlass")
    os.environ["LIGER_KERNEL_STRICT"] = "1"
    return functools.partial(getattr(importlib.import_module("liger_kernel.functional"), name), impl="nvidia-cutedsl")


def liger_cutile(name: str):
    """An object of Liger-Kernel's cuTile implementation."""
    need("liger_kernel", "triton", "cuda.tile")
    return getattr(importlib.import_module("liger_kernel.ops.cutile.ops"), name)


def compiled(function):
    """torch.compile of a function for one size."""
    import torch._functorch.config

    torch._dynamo.reset()
    # The benchmark of a backward pass runs it again and again over one forward pass.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


@functools.cache
def package(folder: str = "."):
    """A package of ours as `kernels` loads it from its build/; its sources where nothing is built, which is enough for a CPU.

    folder: of its build.toml. Where there is a GPU, anything that keeps the kernels from running is an error.
    """
    os.environ.setdefault("BASTILE_STRICT", "1")
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    if (ROOT / folder / "build" / f"torch-{backend}").is_dir():
        need("kernels")
        from kernels import get_local_kernel

        return get_local_kernel(ROOT / folder, backend=backend)
    if folder != ".":
        (sources,) = (ROOT / folder / "torch-ext").glob("*/")
        return _sources(sources, f"bastile_{sources.name}")
    if "bastile" not in sys.modules and importlib.util.find_spec("bastile") is None:
        return _sources(ROOT / "torch-ext" / "qwen3", "bastile")
    return importlib.import_module("bastile")


def _sources(folder, name):
    if not folder.is_dir():
        raise NotInstalled("neither build/ nor an installed bastile is here; run make build")
    where = [str(folder), str(ROOT / "torch-ext")]  # the second for what packages share
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=where)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operation(kernel, name: str):
    """An operation of the package, public or not."""
    found = getattr(kernel, name, None)
    if found is None:
        try:
            found = getattr(importlib.import_module(f"{kernel.__name__}.shared.ops.{name}"), name, None)
        except ModuleNotFoundError:
            found = None
    if found is None:
        raise NotInstalled(f"this build of the package has no {name}")
    return found
