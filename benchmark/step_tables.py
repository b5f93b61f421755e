"""Tables of whole training steps."""

from . import models, providers
from .families import FAMILIES, QWEN3
from .markdown import Notes, by_provider, columns_of, in_order, joined, markdown, number, origin, select, share, times_faster
from .providers import is_ours
from .records import Row
from .suites import QWEN3 as QWEN3_SUITE

ADAMW, CAPTURED = "bastile_adamw", "bastile_captured"
SMALL = ("qwen3_0.6b", "qwen3_1.7b")
# What people fine-tune with, and what it is called in the results.
AS_TRAINED = {
    "LoRA, rank 16": "_lora_16",
    "autocast over bf16 weights": "_autocast",
    "autocast over fp32 weights": "_autocast_fp32",
    "8 documents, packed": "_8_documents",
    "4 rows, a fifth padding": "_4_rows_padding_0.2",
}
HOW = "one sequence a GPU, bf16, PyTorch's fused AdamW unless a column says otherwise, no checkpointing: time, and peak memory of a GPU"


def step_cells(rows: list[Row], names: list[str], notes: Notes) -> list[str]:
    """Return time and memory of each provider, at one length."""
    found, memory = (by_provider(select(rows, metric_name=name)) for name in ("step_time", "memory"))

    def cell(p: str) -> str:
        time = notes.cell(found.get(p), lambda ms: f"{number(ms)} ms")
        return joined(time, notes.cell(memory.get(p), lambda gib: f"{gib:.1f} GiB"))

    return [cell(p) for p in names]


def steps(rows: list[Row]) -> str:
    """Return time and memory of training steps by tokens. rows: of one model on one number of GPUs."""
    times = select(rows, metric_name="step_time")
    names, notes, body = columns_of(times), Notes(), []
    for tokens in in_order(row.x_value for row in times):
        mine = select(rows, x_value=tokens)
        found, memory = (by_provider(select(mine, metric_name=name)) for name in ("step_time", "memory"))
        peers = {p: row for p, row in memory.items() if not is_ours(p)}
        leanest = min(peers.values(), key=lambda row: row.y_value_50 or 0, default=None)
        with_adamw = [times_faster(found, ADAMW)] if ADAMW in names else []
        cells = step_cells(mine, names, notes)
        body.append([tokens, *cells, times_faster(found), *with_adamw, share(memory.get("bastile"), leanest)])
    speeds = ["speed vs best peer", *(["with its AdamW"] if ADAMW in names else [])]
    head = ["tokens", *map(providers.title, names), *speeds, "memory vs best peer"]
    return markdown(head, body) + str(notes) + origin(times) if times else ""


def whole_model(rows: list[Row]) -> str:
    """Return the steps of Qwen3-8B with all its layers."""
    return steps(select(rows, kernel_name=f"{QWEN3.name}_step", model=QWEN3_SUITE.model, layers=None))


def whole_models(rows: list[Row]) -> str:
    """Return the steps of every Qwen3 that was measured whole."""
    rows = select(rows, kernel_name=f"{QWEN3.name}_step", layers=None)
    found = in_order({row.config["model"] for row in rows})
    return "\n\n".join(f"**{models.title(name)}**\n\n{steps(select(rows, model=name))}" for name in found)


def small_models(rows: list[Row]) -> str:
    """Return the steps of small models, in which the host cannot keep up with the GPU; with layers that are replayed as CUDA graphs too."""
    names, notes, body = ["huggingface", "liger", "bastile", CAPTURED], Notes(), []
    shown: list[Row] = []
    for model in SMALL:
        of_model = select(rows, kernel_name=f"{QWEN3.name}_step", model=model, layers=None)
        for tokens in in_order(row.x_value for row in select(of_model, metric_name="step_time", kernel_provider=CAPTURED)):
            mine = select(of_model, x_value=tokens)
            found = by_provider(select(mine, metric_name="step_time"))
            body.append([models.title(model), tokens, *step_cells(mine, names, notes), times_faster(found), times_faster(found, CAPTURED)])
            shown += found.values()
    head = ["", "tokens", *map(providers.title, names), "speed vs best peer", "captured vs best peer"]
    return markdown(head, body) + str(notes) + origin(shown) if body else ""


def as_trained(rows: list[Row]) -> str:
    """Return the steps of what people fine-tune with: adapters, autocast, packed and padded batches."""
    names, notes, body = ["huggingface", "liger", "unsloth", "bastile"], Notes(), []
    shown: list[Row] = []
    for what, kernel in AS_TRAINED.items():
        of_kernel = select(rows, kernel_name=f"{QWEN3.name}_step{kernel}")
        for tokens in in_order(row.x_value for row in select(of_kernel, metric_name="step_time")):
            mine = select(of_kernel, x_value=tokens)
            found, memory = (by_provider(select(mine, metric_name=name)) for name in ("step_time", "memory"))
            leanest = min((row for p, row in memory.items() if not is_ours(p)), key=lambda row: row.y_value_50 or 0, default=None)
            cells = step_cells(mine, names, notes)
            body.append([what, tokens, *cells, times_faster(found), share(memory.get("bastile"), leanest)])
            shown += found.values()
    head = ["", "tokens", *map(providers.title, names), "speed vs best peer", "memory vs best peer"]
    return markdown(head, body) + str(notes) + origin(shown) if body else ""


def sharded(rows: list[Row]) -> str:
    """Return the sharded steps of Qwen3-8B by the number of GPUs."""
    rows = select(rows, kernel_name=f"{QWEN3.name}_fsdp", model=QWEN3_SUITE.model, layers=None)
    gpus = sorted({row.config["gpus"] for row in rows})
    return "\n\n".join(f"**{n} GPUs**\n\n{steps(select(rows, gpus=n))}" for n in gpus)


def step_groups(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Return the steps of each model, number of its layers and number of GPUs, with a title that says which: no two are comparable."""

    names = in_order(row.config["model"] for row in rows)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        config = row.config
        layers = config["layers"] or models.size(config["model"]).layers
        groups.setdefault((names.index(config["model"]), config["gpus"], layers), []).append(row)
    found = []
    for (model, gpus, layers), mine in sorted(groups.items()):
        on = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        found.append((f"{models.title(names[model], layers)} on {on}", mine))
    return found


def titled(rows: list[Row], kernel: str) -> str:
    """Return a titled table for each group of a benchmark's steps."""
    groups = step_groups(select(rows, kernel_name=kernel))
    return "\n\n".join(f"**A training step of {title}** ({HOW})\n\n{steps(mine)}" for title, mine in groups)


def first_step(rows: list[Row]) -> str:
    """Return the seconds from a fresh process to the end of its first step."""
    rows = select(rows, kernel_name=f"{QWEN3.name}_step", model=QWEN3_SUITE.model, layers=None)
    ready, first = (by_provider(select(rows, metric_name=name)) for name in ("until_ready", "first_step"))
    body = []
    for p in ready:
        a, b = ready[p].y_value_50, first[p].y_value_50 if p in first else None
        if a and b:
            body.append([providers.title(p), f"{a:.1f}", f"{b:.2f}", f"{a + b:.1f}"])
    head = ["seconds", "imports and making the model", "first step", "together"]
    return markdown(head, body) + origin(list(first.values())) if body else ""


def titled_tables() -> dict:
    """Return the tables that bring their titles along, of every family, by name: a document shows nothing where nothing was measured."""
    kernels = [f"{name}_{kind}" for name in FAMILIES if name != QWEN3.name for kind in ("step", "fsdp")]
    return {kernel: lambda rows, kernel=kernel: titled(rows, kernel) for kernel in kernels}


TABLES = {
    "qwen3_step": whole_model,
    "qwen3_models": whole_models,
    "as_trained": as_trained,
    "small_models": small_models,
    "first_step": first_step,
    "fsdp": sharded,
}
