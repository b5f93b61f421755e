"""The providers: what each is called and drawn with, and where its functions come from.

A loader returns a function, or raises: NotInstalled when its library is not here (the provider is left out, with a note),
anything else when it is here and does not work (the provider is recorded as failed).
"""

import functools
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field

import torch

from .records import ROOT


@dataclass(frozen=True)
class Provider:
    """title: in tables; style: of its line in a plot, for matplotlib; last: is it measured after all others, so that what it does to the
    device takes no other's numbers with it?"""

    title: str
    style: dict = field(default_factory=dict)
    last: bool = False


def form(title: str, marker: str, linestyle: str = "-") -> Provider:
    """Return a form of Bastile."""
    return Provider(title, {"color": "#D55E00", "marker": marker, "linewidth": 1.5, "zorder": 3, "linestyle": linestyle})


# In the order of the columns. Colours that colour-blind readers tell apart (Okabe and Ito); peers are thin, Bastile is not.
PROVIDERS = {
    "huggingface": Provider("Hugging Face", {"color": "#999999", "marker": "s"}),
    "huggingface_flex": Provider("Hugging Face, flex attention", {"color": "#999999", "marker": "s", "linestyle": "--"}),
    "huggingface_varlen": Provider("Hugging Face, varlen_attn", {"color": "#999999", "marker": "d", "linestyle": "-."}),
    "huggingface_fla": Provider("Hugging Face, fla", {"color": "#999999", "marker": "o", "linestyle": "--"}),
    "torch": Provider("PyTorch", {"color": "#56B4E9", "marker": "D"}),
    "torch_fused": Provider("PyTorch, fused", {"color": "#56B4E9", "marker": "D", "linestyle": "--"}),
    "torch_varlen": Provider("varlen_attn", {"color": "#009E73", "marker": "d"}),
    "torch_flex": Provider("FlexAttention", {"color": "#CC79A7", "marker": "x"}),
    "torch_compile": Provider("torch.compile", {"color": "#CC79A7", "marker": "v"}),
    "torchao": Provider("torchao float8, compiled", {"color": "#CC79A7", "marker": "P", "linestyle": "--"}),
    "torchao_rowwise": Provider("torchao float8 rowwise, compiled", {"color": "#CC79A7", "marker": "X", "linestyle": ":"}),
    "liger": Provider("Liger", {"color": "#E69F00", "marker": "^"}),
    "liger_flex": Provider("Liger, flex attention", {"color": "#E69F00", "marker": "^", "linestyle": "--"}),
    "liger_varlen": Provider("Liger, varlen_attn", {"color": "#E69F00", "marker": "d", "linestyle": "-."}),
    "liger_fla": Provider("Liger, fla", {"color": "#E69F00", "marker": "o", "linestyle": "--"}),
    "liger_cutedsl": Provider("Liger CuTe DSL", {"color": "#009E73", "marker": "<"}),
    "liger_cutile": Provider("Liger cuTile", {"color": "#0072B2", "marker": ">"}, last=True),
    "trl": Provider("TRL", {"color": "#009E73", "marker": "p"}),
    "unsloth": Provider("Unsloth", {"color": "#0072B2", "marker": "P"}),
    "bastile": Provider("Bastile", {"color": "#D55E00", "marker": "o", "linewidth": 2.5, "zorder": 3}),
    "bastile_adamw": form("Bastile with its AdamW", "o", "--"),
    "bastile_captured": form("Bastile, captured", "^"),
    "bastile_recompute": form("Bastile, recompute_mlp", "v", "-."),
    "bastile_keep_attention": form("Bastile, keep_attention", "<", "-."),
    "bastile_offload": form("Bastile, offload, MLPs in tiles", ">", "-."),
    "bastile_four_bits": form("Bastile, experts in four bits", "h", "--"),
    "bastile_fp8": form("Bastile in eight bits", "*", "--"),
    "bastile_fp8_adamw": form("Bastile in eight bits, with its AdamW", "*", "-."),
    "bastile_fp8_captured": form("Bastile in eight bits, captured", "*", ":"),
    "bastile_fp8_frozen": form("Bastile in eight bits, frozen weights too", "*"),
    "bastile_compiled": form("Bastile, torch.compile", "P", "--"),
    "bastile_sdpa": form("Bastile with SDPA", "x", ":"),
    "bastile_trl_head": form("Bastile with TRL's head", "p", ":"),
    "bastile_flex": form("Bastile with flex attention", "+", ":"),
    "bastile_unpacked": form("Bastile without pack()", "o", ":"),
}
EIGHT_BITS_OF_OURS = tuple(name for name in PROVIDERS if name.startswith("bastile_fp8"))
EIGHT_BITS = frozenset({"torchao", "torchao_rowwise", *EIGHT_BITS_OF_OURS})  # whose steps stand beside each other, in results of their own
FLOOR = "floor"  # no provider: what the bytes or the FLOPs alone take


class NotInstalled(ImportError):
    """The provider, or the operation of ours, does not exist here."""


def is_ours(provider: str) -> bool:
    """Tell Bastile and its forms from the peers."""
    return provider.startswith("bastile")


def title(provider: str) -> str:
    """Return what tables call a provider."""
    return PROVIDERS[provider].title if provider in PROVIDERS else provider


def in_order(names) -> list[str]:
    """Return those of `names` that are providers, in the order of the table."""
    return [name for name in PROVIDERS if name in names]


def require_modules(*modules: str) -> None:
    """Raise NotInstalled unless all modules can be imported."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            raise NotInstalled(f"{module} is not installed")


def liger(path: str, name: str):
    """Return an object of Liger-Kernel's Triton implementation, which is its default."""
    require_modules("liger_kernel", "triton")
    return getattr(importlib.import_module(f"liger_kernel.{path}"), name)


def liger_cutedsl(name: str):
    """Return a function of Liger-Kernel's CuTe DSL implementation. It must not fall back to Triton under the other's name."""
    require_modules("liger_kernel", "triton", "cutlass")
    os.environ["LIGER_KERNEL_STRICT"] = "1"
    return functools.partial(getattr(importlib.import_module("liger_kernel.functional"), name), impl="nvidia-cutedsl")


def liger_cutile(name: str):
    """Return an object of Liger-Kernel's cuTile implementation."""
    require_modules("liger_kernel", "triton", "cuda.tile")
    return getattr(importlib.import_module("liger_kernel.ops.cutile.ops"), name)


def compiled(function):
    """Return torch.compile of a function, for one shape."""
    import torch._functorch.config

    torch._dynamo.reset()
    # The benchmark of a backward pass runs it again and again over one forward pass.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


@functools.cache
def package(folder: str = "."):
    """Return a package of ours as `kernels` loads it from its build/; its sources where nothing is built, which is enough for a CPU.

    folder: of its build.toml. Where there is a GPU, anything that keeps the kernels from running is an error.
    """
    os.environ.setdefault("BASTILE_STRICT", "1")
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    if (ROOT / folder / "build" / f"torch-{backend}").is_dir():
        require_modules("kernels")
        from kernels import get_local_kernel

        return get_local_kernel(ROOT / folder, backend=backend)
    if folder != ".":
        sources = next((ROOT / folder / "torch-ext").glob("*/"), ROOT / folder / "torch-ext")
        return _sources(sources, f"bastile_{sources.name}")
    if "bastile" not in sys.modules and importlib.util.find_spec("bastile") is None:
        return _sources(ROOT / "torch-ext" / "qwen3", "bastile")
    return importlib.import_module("bastile")


def _sources(folder, name):
    if not (folder / "__init__.py").is_file():
        raise NotInstalled(f"neither build/ nor the installed package nor {folder.name}'s sources are here; run make build")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operation(kernel, name: str):
    """Return an operation of the package, public or not. Raise NotInstalled where it has none of that name."""
    found = getattr(kernel, name, None)
    if found is None:
        try:
            found = getattr(importlib.import_module(f"{kernel.__name__}.shared.ops.{name}"), name, None)
        except ModuleNotFoundError:
            found = None
    if found is None:
        raise NotInstalled(f"this build of the package has no {name}")
    return found
