"""One file an operation: its formula in float64, the shapes that matter, its checks, and errors that the checks must notice.

A file has functions `check_<operation>(ops, device, dtype, ...)`, which tests/cpu runs in PyTorch and through the interpreter and tests/gpu
with the real cubins, and two tables for planted errors:

- `CHECKS`: name -> function(package). The cheapest check that notices an error, on the CPU.
- `MUTANTS`: (file, function, old, new, check) or (file, function, old, new, check, kernels). In `function` of `file` (kernel_src/x.py, or a
  file of torch-ext: shared/ops/x.py) the text `old`, which occurs there once, becomes `new`; `check`, one of the file's own `CHECKS`, must
  fail. kernels: False to run in PyTorch; True, the default, to run the kernels in the interpreter.

tests/mutants.py collects both from every file here and plants the errors.
"""

import importlib
import pkgutil


def modules() -> dict:
    """The files that have planted errors, by the name of their operation."""
    found = {info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)}
    return {name: module for name, module in sorted(found.items()) if hasattr(module, "CHECKS") and hasattr(module, "MUTANTS")}
