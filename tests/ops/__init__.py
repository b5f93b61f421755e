"""One file an operation: its formula in float64, the shapes that matter, its checks, and errors that the checks must notice.

A file has functions `check_<operation>(ops, device, dtype, ...)`, which tests/cpu runs in PyTorch and through the interpreter and tests/gpu
with the real cubins, and two tables for planted errors:

- `CHECKS`: name -> function(package). The cheapest check that notices an error, on the CPU.
- `MUTANTS`: (file, function, old, new, check) or (file, function, old, new, check, kernels). In `function` of `file` (kernel_src/x.py, or a
  file of torch-ext: shared/ops/x.py) the text `old`, which occurs there once, becomes `new`; `check`, one of the file's own `CHECKS`, must
  fail; or one of several, with " or " between their names. kernels: False to run in PyTorch; True, the default, to run the kernels in the
  interpreter. Most rows are generated (generated.py), one error of each statement of the functions that it names; a pair of texts is for
  what generation cannot say.

tests/mutants.py collects both from every file here and plants the errors.

What the tests of every operation need of one stands in its file, too, and is found there; no list names the operations:

- `all_cases(ops, device, dtypes)`: (name, function) of every check. A file with it and `OPERATIONS` is one of the suite (suite.py).
- `OPERATIONS`: name -> `suite.Case`, how the operation is called, at which sizes. A name may have a comma and a remark after it.
- `MODULE`: the file of torch-ext/shared/ops, where it has another name than the one here.
- `check_large(ops, device)`: checks of large shapes on a GPU.
- `SIGNATURES`: name -> `signature.Signature`, the names and shapes of its arguments and its formula: what the tests of every kind of
  tensor, layout, transform and wrong argument, those of autograd, and those whose calls hypothesis draws, know of an operation.
- `MORE_CALLS`: title -> function of a package and of `Inputs` (test_turned_signs.py) that calls an operation with arguments which
  `SELF_CHECKS` of torch-ext leaves out.
- `OPERATORS`: name of an operator of Qwen3's package -> function of `signature.New`, which gives calls of it, for torch.library's checks.
- `GPU_TESTS`: name of a file of kernel_src -> parts of the names of the tests in tests/gpu that launch its kernels, for the sanitizer.
"""

import functools
import importlib
import pkgutil


@functools.cache
def files() -> dict:
    """Every file here, by name. Without cuda-tile, as where tests/gpu runs, those that interpret kernels themselves are left out."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        try:
            found[info.name] = importlib.import_module(f"{__name__}.{info.name}")
        except ModuleNotFoundError as error:
            if error.name not in ("cuda", "cuda.tile"):
                raise
    return found


def modules() -> dict:
    """The files that have planted errors, by the name of their operation."""
    return {name: module for name, module in sorted(files().items()) if hasattr(module, "CHECKS") and hasattr(module, "MUTANTS")}


@functools.cache
def collected(table: str) -> dict:
    """The tables of a name that the files have, as one. Raises ValueError for a key that two of them have."""
    found: dict = {}
    for name, module in sorted(files().items()):
        twice = found.keys() & getattr(module, table, {}).keys()
        if twice:
            raise ValueError(f"{table} of tests/ops/{name}.py has {sorted(twice)}, which another file has too")
        found |= getattr(module, table, {})
    return found
