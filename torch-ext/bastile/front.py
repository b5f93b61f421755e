"""One front door for every family: finds the package that serves a model, and where its kernels are.

| this machine                     | what serves a model                                                        |
|----------------------------------|----------------------------------------------------------------------------|
| has no GPU                       | this package, in PyTorch's operations                                      |
| has one, and the package kernels | this package (`make wheel` puts the kernels of all families into it)       |
| has one, and the package none    | the package of the Hub that has them, loaded when a model needs it          |
"""

import functools
import logging
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from .shared.hf.family.families import names_of
from .shared.hf.install.interface import Interface
from .shared.hf.install.served import Served
from .shared.hf.parts.hub import kernels_library
from .shared.hf.say.doctor import Finding
from .shared.runtime import launch
from .shared.runtime.artifacts import ArtifactError

VERSION = 1  # of the Hub's packages
logger = logging.getLogger(__package__)


class OnHub(NamedTuple):
    """A package of the Hub, and the families that it serves."""

    name: str
    served: Served


def _by_what_serves(call: Callable) -> Any:
    """Hands a call on to the package that serves its model."""

    @functools.wraps(call)
    def of_model(self, model, *args, **kwargs):
        return getattr(self._of(model), call.__name__)(model, *args, **kwargs)

    return of_model


class Front(Interface):
    """The calls of the package that pip installs. packages: of the Hub, in whose order a model's is looked for."""

    def __init__(self, package: str, packages: Sequence[OnHub], named: Mapping[str, type] = {}):
        super().__init__(package, [each.served for each in packages], named=named)
        self._packages = packages
        self._loaded: Dict[str, Any] = {}

    def has_kernels(self) -> bool:
        """Tells whether this package serves the machine itself: it has kernels, or there is no GPU. A damaged one says so when it is used,
        instead of being passed over."""
        if not torch.cuda.is_available():
            return True
        try:
            return bool(launch.backend.artifacts.architectures())
        except ArtifactError:
            return True

    def from_hub(self, name: str):
        """Loads a package of the Hub, once, and says so."""
        if name not in self._loaded:
            logger.info("this installation has no kernels: taking them from the Hub, %s version %d", name, VERSION)
            self._loaded[name] = kernels_library().get_kernel(name, version=VERSION, trust_remote_code=[name])
        return self._loaded[name]

    def _of(self, model: nn.Module):
        """What serves a model: this package's own calls, or a package of the Hub."""
        if self.has_kernels():
            return super()
        found = next((each for each in self._packages if each.served.serves(model)), None)
        if found is None:  # of no family: with experts it wants a package that has their kernels
            with_experts = any("experts" in module._modules for module in model.modules())
            found = next(each for each in self._packages if each.served.shapes and ("experts" in each.served.options) == with_experts)
        return self.from_hub(found.name)

    def put_on_classes(self, given):
        if self.has_kernels():
            return super().put_on_classes(given)
        for each in self._packages:
            package = self.from_hub(each.name)
            with warnings.catch_warnings():  # Qwen3 is served by two of them
                warnings.filterwarnings("ignore", message=".* is served by the package .* already", category=RuntimeWarning)
                package.apply(**{name: given[name] for name in each.served.arguments()})

    kernelize = _by_what_serves(Interface.kernelize)
    eight_bits = _by_what_serves(Interface.eight_bits)
    four_bits = _by_what_serves(Interface.four_bits)
    sixteen_bits = _by_what_serves(Interface.sixteen_bits)
    host_embeddings = _by_what_serves(Interface.host_embeddings)
    explain = _by_what_serves(Interface.explain)
    capture = _by_what_serves(Interface.capture)

    def warmup_all_kernels(self, model=None):
        if model is not None:
            return self._of(model).warmup_all_kernels(model)
        if self.has_kernels():
            return super().warmup_all_kernels()
        for each in self._packages:
            self.from_hub(each.name).warmup_all_kernels()

    def mapping(self, mode=None):
        if not self.has_kernels():
            names = ", ".join(f"{each.name} ({names_of(each.served.families())})" for each in self._packages)
            raise RuntimeError(f"this installation has no kernels, so it has no layers to map to. Take those of a package: {names}")
        return super().mapping(mode)

    def get_patched_ops(self) -> List[str]:
        found = [super().get_patched_ops(), *(package.get_patched_ops() for package in self._loaded.values())]
        return list(dict.fromkeys(name for names in found for name in names))

    def reset(self):
        super().reset()
        for package in self._loaded.values():
            package.reset()

    def clear_autotune_cache(self):
        super().clear_autotune_cache()
        for package in self._loaded.values():
            package.clear_autotune_cache()

    def _findings(self):
        where = "its own" if self.has_kernels() else "those of the Hub's packages"
        loaded = f", loaded: {', '.join(self._loaded)}" if self._loaded else ""
        return (*super()._findings(), Finding("kernels from", where + loaded, True))
