"""Where the GPU's time of a training step goes: `python -m benchmark.steps --parts`, with PyTorch's profiler.

Products of matrices, attention and the optimizer take what they take; everything else is what a fused layer can make shorter.
"""

from collections import Counter
from collections.abc import Callable

import torch

from . import models, providers
from .markdown import Table, by_provider, columns_of, number, select
from .records import Row

METRIC = "gpu_time"
# By kind: words of the names of the kernels; the first kind that fits counts, since attention's names speak of CUTLASS too.
KINDS = {
    "attention": ("attention", "sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq"),
    "optimizer": ("multi_tensor_apply", "optimizer", "adam"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "grouped_mm", "grouped_outer"),
}
REST = "everything else"


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def parts_of(step: Callable[[], object], steps: int = 2) -> dict[str, float]:
    """Return the milliseconds of the GPU's time that each kind takes in a step; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: Counter = Counter(dict.fromkeys((*KINDS, REST), 0.0))
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3 / steps
    return dict(found)


def table(rows: list[Row]) -> str:
    """Return the parts of each provider's step, by model and tokens."""
    found = select(rows, metric_name=METRIC)
    names = columns_of(found)
    shown = Table("", "tokens", "part", *map(providers.title, names))
    for model, layers, tokens in dict.fromkeys((r.config["model"], r.config["layers"], r.config["tokens"]) for r in found):
        mine = [r for r in found if (r.config["model"], r.config["layers"], r.config["tokens"]) == (model, layers, tokens)]
        for part in (kind for kind in (*KINDS, REST) if select(mine, x_value=kind)):
            by = by_provider(select(mine, x_value=part))
            cells = [shown.notes.cell(by.get(p), lambda ms: f"{number(ms)} ms") for p in names]
            shown.add([models.title(model, layers), str(tokens), part, *cells], by.values())
    return shown.text()


TABLES = {"step_parts": table}
