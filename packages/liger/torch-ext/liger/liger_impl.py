"""What Liger imports where LIGER_KERNEL_IMPL chooses this package; see `back_end.announce`.

Liger copies the names of `__all__` over those of `liger_kernel.ops`. There are none, because `use_in_liger` sets them, remembers what
stood there, and makes the operations known to Liger's dispatcher too, which reads the same variable at every call.
"""

import importlib
import sys

from . import back_end

__all__: list = []

# As the import of a submodule does, which it was spared.
vars(importlib.import_module("liger_kernel.ops.backends"))["registry"] = sys.modules[back_end.REGISTRY]

if not back_end.use_in_liger():
    raise ImportError(f"{back_end.VARIABLE} asks for bastile/liger, which has no kernels that run on this GPU")
