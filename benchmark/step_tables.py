"""Tables of whole training steps."""

from collections.abc import Callable
from functools import partial

from . import models, providers, step_parts
from .families import FAMILIES, QWEN3
from .markdown import (
    NOT_MEASURED,
    Notes,
    Shown,
    Table,
    by_provider,
    columns_of,
    comparison,
    faster,
    in_order,
    joined,
    number,
    select,
    share,
    times_faster,
)
from .providers import is_ours
from .records import Row
from .routing import SKEWED
from .suites import QWEN3 as QWEN3_SUITE

ADAMW, CAPTURED = "bastile_adamw", "bastile_captured"
SMALL = ("qwen3_0.6b", "qwen3_1.7b")
# What people fine-tune with, and what it is called in the results: of one sequence, with products in eight bits, with the losses of TRL's
# trainers, and of batches that SDPA needs a dense mask for, every peer also with the attention that is best at them.
AS_TRAINED = {
    "LoRA, rank 16": "_lora_16",
    "autocast over bf16 weights": "_autocast",
    "autocast over fp32 weights": "_autocast_fp32",
    "every layer checkpointed": "_checkpointing",
    "LoRA, rank 16, every layer checkpointed": "_lora_16_checkpointing",
    "QLoRA, rank 16, every layer checkpointed": "_lora_16_nf4_checkpointing",
}
EIGHT_BITS = {"all weights": "_fp8", "LoRA, rank 16": "_lora_16_fp8"}
TRL = {"DPO": "_lora_16_dpo", "GRPO": "_lora_16_grpo"}
# Ways of training with TRL's trainers, which checkpoint every layer unless told otherwise, and what their results' names end in.
TRAINERS = {
    "LoRA, padded batches (TRL's default)": "sft_lora_16_checkpointing_padded",
    "LoRA, packed rows": "sft_lora_16_checkpointing_packed",
    "all weights, padded batches": "sft_checkpointing_padded",
    "all weights, packed rows": "sft_checkpointing_packed",
    "DPO with LoRA, padded batches": "dpo_lora_16_checkpointing_padded",
}
MASKED = {"8 documents, packed": "_8_documents", "4 rows, a fifth padding": "_4_rows_padding_0.2"}
SPREAD = "_spread_8_documents"  # a row over all GPUs
HOW = "one sequence a GPU, bf16, PyTorch's fused AdamW unless a column says otherwise, {}: time, and peak memory of a GPU"
# What is added to it for results whose names end so.
MORE = {SKEWED: f"; {SKEWED} routing", "_lora_16": "; adapters of rank 16 on all projections",
        "_attention_checkpointing": "; adapters of rank 16 on the projections of attention"}  # fmt: skip
VERSUS = "vs best peer"


def leanest(memory: dict[str, Row]) -> Row | None:
    """Return the least memory of a peer."""
    peers = [row for p, row in memory.items() if not is_ours(p) and row.y_value_50]
    return min(peers, key=lambda row: row.y_value_50 or 0, default=None)


def parts_of(rows: list[Row]) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the time and the memory of each provider."""
    times, memory = (by_provider(select(rows, metric_name=name)) for name in ("step_time", "memory"))
    return times, memory


# How the numbers of a step are written, by their metric; of torch.compile also how long it compiled.
SHOWS = {
    "step_time": lambda ms: f"{number(ms)} ms",
    "memory": lambda gib: f"{gib:.1f} GiB",
    "compile_time": lambda s: f"compiled in {s:.0f} s",
}


def step_cells(rows: list[Row], names: list[str], notes: Notes) -> list[str]:
    """Return what there is of each provider, at one length."""
    found = {metric: by_provider(select(rows, metric_name=metric)) for metric in SHOWS}
    return [joined(*(notes.cell(found[metric].get(p), show) for metric, show in SHOWS.items())) for p in names]


def leaner(ours: str = "bastile") -> Callable[[Shown], str]:
    """Return what says how much of the leanest peer's memory one of ours takes."""
    return lambda found: share(found["memory"].get(ours), leanest(found["memory"]))


def steps(rows: list[Row]) -> str:
    """Return time and memory of training steps by tokens. rows: of one model on one number of GPUs."""
    times = select(rows, metric_name="step_time")
    with_adamw = {"with its AdamW": faster("step_time", ADAMW)} if ADAMW in columns_of(times) else {}
    compares = {f"speed {VERSUS}": faster("step_time"), **with_adamw, f"memory {VERSUS}": leaner()}
    cases = [((tokens,), select(rows, x_value=tokens)) for tokens in in_order(row.x_value for row in times)]
    return comparison(("tokens",), cases, SHOWS, compares=compares, remark=routes(rows))


def routes(rows: list[Row]) -> str:
    """Return in a sentence where the steps of a model with experts sent their tokens, "" for a dense model."""
    found = [row.config["routing"] for row in rows if row.config.get("routing")]
    if not found:
        return ""
    each, used, largest = found[0], min(r["used"] for r in found), max(r["largest"] for r in found)
    fair = f"{each['top_k'] / each['experts']:.1%}"
    known = f"Routing: at least {used} of {each['experts']} experts were used in every layer"
    return f"{known}; the busiest saw {largest:.1%} of the tokens, {fair} would be even."


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
    cases = []
    for model in SMALL:
        of_model = select(rows, kernel_name=f"{QWEN3.name}_step", model=model, layers=None)
        for tokens in in_order(row.x_value for row in select(of_model, metric_name="step_time", kernel_provider=CAPTURED)):
            cases.append(((models.title(model), tokens), select(of_model, x_value=tokens)))
    compares = {f"speed {VERSUS}": faster("step_time"), f"captured {VERSUS}": faster("step_time", CAPTURED)}
    return comparison(("", "tokens"), cases, SHOWS, compares=compares)


def by_kind(rows: list[Row], kinds: dict[str, str], ours: str = "bastile") -> str:
    """Return the steps of Qwen3 by what is trained or what a batch looks like. kinds: what the results call each, by its title; ours: the
    provider that is compared with the peers."""
    cases = []
    for what, kernel in kinds.items():
        of_kind = select(rows, kernel_name=f"{QWEN3.name}_step{kernel}")
        for model, layers, tokens in cases_of(of_kind):
            where = f"{what}, {models.title(model, layers or models.size(model).layers)}"
            cases.append(((where, tokens), select(of_kind, x_value=tokens, model=model, layers=layers)))
    compares = {f"speed {VERSUS}": faster("step_time", ours), f"memory {VERSUS}": leaner(ours)}
    return comparison(("", "tokens"), cases, SHOWS, compares=compares)


def cases_of(rows: list[Row]) -> list[tuple]:
    """Return the models, numbers of layers and lengths whose steps were measured; of each model and length those with the most layers."""
    layers: dict[tuple, list] = {}
    for row in select(rows, metric_name="step_time"):
        layers.setdefault((row.config["model"], row.x_value), []).append(row.config["layers"])
    found = {(model, None if None in each else max(each), tokens) for (model, tokens), each in layers.items()}
    return sorted(found, key=lambda case: (in_order({c[0] for c in found}).index(case[0]), case[1] or 0, int(case[2])))


def trainer_rows(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each way of training with SFTTrainer, by its title."""
    found = {what: select(rows, kernel_name=f"{QWEN3.name}_{kernel}") for what, kernel in TRAINERS.items()}
    return {what: mine for what, mine in found.items() if mine}


def trainer_cells(rows: list[Row], device: dict[str, Row], names: list[str], notes: Notes) -> list[str]:
    """Return the speed and the memory of each provider, at one length. device: the time of all kernels of a step."""
    speeds, (times, memory) = by_provider(select(rows, metric_name="throughput")), parts_of(rows)

    def cell(p: str) -> str:
        speed = notes.cell(speeds.get(p) or times.get(p), lambda rate: f"{rate:,.0f} tokens/s")
        ms, kernels = (found[p].y_value_50 if p in found else None for found in (times, device))
        busy = f"busy {kernels / ms:.0%}" if ms and kernels else ""
        return joined(speed, busy, notes.cell(memory.get(p), lambda gib: f"{gib:.1f} GiB"))

    return [cell(p) for p in names]


def trainers(rows: list[Row]) -> str:
    """Return the speed of SFTTrainer in tokens of texts, the share of a step in which the device is busy, and the peak memory."""
    found = trainer_rows(rows)
    names = columns_of(row for mine in found.values() for row in select(mine, metric_name="step_time"))
    table = Table("", *map(providers.title, names), f"speed {VERSUS}", f"memory {VERSUS}")
    for what, of_kind in found.items():
        for model, layers, tokens in cases_of(of_kind):
            mine = select(of_kind, x_value=tokens, model=model, layers=layers)
            device = by_provider(select(of_kind, metric_name="gpu_time", model=model, layers=layers))
            times, memory = parts_of(mine)
            cells = trainer_cells(mine, device, names, table.notes)
            line = [f"{what}, {models.title(model, layers or models.size(model).layers)}", *cells, times_faster(times)]
            table.add([*line, share(memory.get("bastile"), leanest(memory))], [*times.values(), *memory.values()])
    return table.text()


def sharded(rows: list[Row], kind: str = "", layers: int | None = None) -> str:
    """Return the sharded steps of Qwen3-8B by the number of GPUs. kind: what the results' name ends in; layers: None for all."""
    rows = select(rows, kernel_name=f"{QWEN3.name}_fsdp{kind}", model=QWEN3_SUITE.model, layers=layers)
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
    """Return a titled table for each group of a benchmark's steps, or a line that says what was not measured."""
    groups = step_groups(defensible(select(rows, kernel_name=kernel)))
    how = HOW.format("every layer checkpointed" if kernel.endswith("_checkpointing") else "no checkpointing")
    how += next((more for end, more in MORE.items() if kernel.endswith(end)), "")
    if not groups:
        return f"**A training step** ({how}): {NOT_MEASURED}"
    return "\n\n".join(f"**A training step of {title}** ({how})\n\n{steps(mine)}" for title, mine in groups)


def defensible(rows: list[Row]) -> list[Row]:
    """Return the steps but for those of models with experts whose routing is not in the results: what they measured is unknown."""
    return [row for row in rows if row.config.get("routing") or not models.size(row.config["model"]).experts]


def first_step(rows: list[Row]) -> str:
    """Return the seconds from a fresh process to the end of its first step."""
    rows = select(rows, kernel_name=f"{QWEN3.name}_step", model=QWEN3_SUITE.model, layers=None)
    ready, first = (by_provider(select(rows, metric_name=name)) for name in ("until_ready", "first_step"))
    table = Table("seconds", "imports and making the model", "first step", "together")
    for p in ready:
        a, b = ready[p].y_value_50, first[p].y_value_50 if p in first else None
        if a and b:
            table.add([providers.title(p), f"{a:.1f}", f"{b:.2f}", f"{a + b:.1f}"], [ready[p], first[p]])
    return table.text()


def titled_tables() -> dict:
    """Return the tables that bring their titles along, of every family, by name."""
    kernels = [f"{family.name}_{kind}" for family in FAMILIES.values() if family is not QWEN3 for kind in family.kinds]
    return {kernel: lambda rows, kernel=kernel: titled(rows, kernel) for kernel in kernels}


TABLES = {
    "qwen3_step": whole_model,
    "qwen3_models": whole_models,
    "as_trained": partial(by_kind, kinds=AS_TRAINED),
    "trainers": trainers,
    "trl": partial(by_kind, kinds=TRL),
    "eight_bits": partial(by_kind, kinds=EIGHT_BITS, ours="bastile_fp8"),
    "masked": partial(by_kind, kinds=MASKED),
    "small_models": small_models,
    "first_step": first_step,
    "fsdp": sharded,
    "spread": partial(sharded, kind=SPREAD, layers=12),
    "step_parts": step_parts.table,
}
