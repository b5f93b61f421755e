"""Markdown tables from the results: `python -m benchmark.tables [--check | --write] README.md CARD.md`.

A document marks where a table stands by `<!-- table: NAME -->` and `<!-- /table -->`; the names are those of TABLES.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from . import models, records
from .records import Row

TITLES = {
    "rms_norm": "RMSNorm",
    "q_norm": "RMSNorm of queries (rows of 128)",
    "add_rms_norm": "residual + RMSNorm",
    "rotary": "rotary",
    "qk_norm_rotary": "q/k-norm + rotary",
    "swiglu": "SwiGLU",
    "linear_cross_entropy": "linear + cross entropy",
}
PROVIDERS = {
    "huggingface": "Hugging Face",
    "huggingface_flex": "Hugging Face, flex attention",
    "torch": "PyTorch",
    "torch_fused": "PyTorch, fused",
    "torch_compile": "torch.compile",
    "liger": "Liger",
    "liger_flex": "Liger, flex attention",
    "liger_cutedsl": "Liger CuTe DSL",
    "liger_cutile": "Liger cuTile",
    "bastile": "Bastile",
    "bastile_adamw": "Bastile with its AdamW",
}
MODES = ("forward", "backward", "full", "no_grad_forward")
MODE_TITLES = {"full": "forward + backward", "no_grad_forward": "evaluation"}
MODEL, TOKENS = "qwen3_8b", "8192"
ADAMW = "bastile_adamw"
ADAMW_CASES = {
    "bf16": "{model} with {layers} layers, bf16",
    "fp32": "{model} with {layers} layers, fp32",
    "small": "Qwen3-0.6B, bf16, from an idle GPU",
    "lora": "LoRA of rank 16 on {model}, fp32, from an idle GPU",
}
EXPERTS = {"experts_uniform": "uniform", "experts_skewed": "skewed"}
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def select(rows: Iterable[Row], **wanted) -> list[Row]:
    """Rows whose columns, or entries of their configuration, are as wanted."""

    def fits(row: Row) -> bool:
        config = row.config
        return all(getattr(row, name, config.get(name)) == value for name, value in wanted.items())

    return [row for row in rows if fits(row)]


def by_provider(rows: Iterable[Row]) -> dict[str, Row]:
    found = {row.kernel_provider: row for row in rows}
    return {p: found[p] for p in (*PROVIDERS, "floor") if p in found}


def columns_of(rows: Iterable[Row]) -> list[str]:
    present = {row.kernel_provider for row in rows}
    return [p for p in PROVIDERS if p in present]


def in_order(values: Iterable[str]) -> list[str]:
    """Numbers by their size, models by theirs, each once."""
    names = [*models.SIZES, *models.GPT_OSS]
    return sorted(set(values), key=lambda v: (int(v), "") if v.isdigit() else (names.index(v) if v in names else 0, v))


def markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Notes:
    """Footnotes: why something was not measured."""

    def __init__(self):
        self.texts: list[str] = []

    def cell(self, row: Row | None, show: Callable[[float], str]) -> str:
        if row is None:
            return ""
        if row.y_value_50 is not None:
            return show(row.y_value_50)
        if row.error == "out of memory":
            return row.error
        text = f"{PROVIDERS.get(row.kernel_provider, row.kernel_provider)}: {row.error.replace('|', '/')}"
        if text not in self.texts:
            self.texts.append(text)
        return f"fails [{self.texts.index(text) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n\n[{n}] {text}" for n, text in enumerate(self.texts, 1))


def origin(rows: list[Row]) -> str:
    """What the numbers were measured with: the newest of them speaks for all, and all versions of ours are named."""
    row = max(rows, key=lambda r: r.timestamp)
    config, versions = row.config, dict.fromkeys(r.version for r in sorted(rows, key=lambda r: r.timestamp))
    known = {"driver": "driver", "torch": "torch", "transformers": "transformers", "liger": "liger-kernel"}
    parts = [row.gpu_name, *(f"{title} {config[name]}" for name, title in known.items() if config.get(name))]
    return f"\n\n<sub>{', '.join(parts)}; Bastile {', '.join(versions)}, {row.timestamp[:10]}.</sub>"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(us: float) -> str:
    return f"{number(us / 1e3)} ms"


def gibibytes(mib: float) -> str:
    return f"{mib / 1024:.2f} GiB"


def joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def share(part: Row | None, whole: Row | None) -> str:
    """part / whole in percent."""
    if part is None or whole is None or not part.y_value_50 or not whole.y_value_50:
        return ""
    return f"{part.y_value_50 / whole.y_value_50:.0%}"


def times_faster(found: dict[str, Row], provider: str = "bastile") -> str:
    """The fastest other provider's time over that of Bastile, or of one of its forms."""
    peers = [r.y_value_50 for p, r in found.items() if not p.startswith("bastile") and p != "floor" and r.y_value_50]
    mine = found.get(provider)
    return f"{min(peers) / mine.y_value_50:.2f} ×" if peers and mine and mine.y_value_50 else ""


def operations(rows: list[Row]) -> str:
    """Microseconds of each operation at 8192 tokens of Qwen3-8B."""
    rows = select(rows, metric_name="speed", model=MODEL, x_name="tokens", x_value=TOKENS, dtype="bf16", timing="device")
    rows = [row for row in rows if row.kernel_name in TITLES]
    providers, notes, body = columns_of(rows), Notes(), []
    for name, title in TITLES.items():
        for mode in MODES:
            found = by_provider(select(rows, kernel_name=name, kernel_operation_mode=mode))
            if not found:
                continue
            line = [f"{title}, {MODE_TITLES.get(mode, mode)}", *(notes.cell(found.get(p), number) for p in providers)]
            floor = found.get("floor")
            body.append([*line, notes.cell(floor, number), share(floor, found.get("bastile")), times_faster(found)])
    head = [f"µs, {TOKENS} tokens", *(PROVIDERS[p] for p in providers), "floor", "Bastile: of the floor", "vs best peer"]
    return markdown(head, body) + str(notes) + origin(rows) if rows else ""


def linear_cross_entropy(rows: list[Row]) -> str:
    """Time and memory of the loss with both gradients by tokens, and the error of the weight's gradient."""
    rows = select(rows, kernel_name="linear_cross_entropy", kernel_operation_mode="full", model=MODEL, x_name="tokens", dtype="bf16")
    speed = select(rows, metric_name="speed", timing="device")
    providers, notes, body = columns_of(speed), Notes(), []
    for tokens in in_order(row.x_value for row in speed):
        found = by_provider(select(speed, x_value=tokens))
        memory = by_provider(select(rows, metric_name="memory", x_value=tokens))
        errors = by_provider(select(rows, metric_name="error_dweight_ratio", x_value=tokens))
        line = [tokens]
        for p in providers:
            cells = notes.cell(found.get(p), milliseconds), notes.cell(memory.get(p), gibibytes)
            line.append(joined(*cells, notes.cell(errors.get(p), lambda ratio: f"{ratio:.2f}")))
        floor = found.get("floor")
        body.append([*line, notes.cell(floor, milliseconds), share(found.get("bastile"), floor)])
    head = ["tokens", *(PROVIDERS[p] for p in providers), "three GEMMs", "Bastile: of the GEMMs"]
    text = "\n\nTime, peak memory beyond the inputs, and the error of the weight's gradient relative to that of one bf16 GEMM."
    return markdown(head, body) + text + str(notes) + origin(speed) if speed else ""


def steps(rows: list[Row]) -> str:
    """Time and memory of training steps by tokens. rows: of one model on one number of GPUs."""
    times = select(rows, metric_name="step_time")
    providers, notes, body = columns_of(times), Notes(), []
    for tokens in in_order(row.x_value for row in times):
        found = by_provider(select(times, x_value=tokens))
        memory = by_provider(select(rows, metric_name="memory", x_value=tokens))
        line = [tokens]
        for p in providers:
            line.append(joined(notes.cell(found.get(p), lambda ms: f"{number(ms)} ms"), notes.cell(memory.get(p), lambda gib: f"{gib:.1f} GiB")))
        peers = {p: row for p, row in memory.items() if not p.startswith("bastile")}
        leanest = min(peers.values(), key=lambda row: row.y_value_50 or 0, default=None)
        with_adamw = [times_faster(found, ADAMW)] if ADAMW in providers else []
        body.append([*line, times_faster(found), *with_adamw, share(memory.get("bastile"), leanest)])
    speeds = ["speed vs best peer", *(["with its AdamW"] if ADAMW in providers else [])]
    head = ["tokens", *(PROVIDERS[p] for p in providers), *speeds, "memory vs best peer"]
    return markdown(head, body) + str(notes) + origin(times) if times else ""


def qwen3_step(rows: list[Row]) -> str:
    return steps(select(rows, kernel_name="qwen3_step", model=MODEL, layers=None))


def qwen3_models(rows: list[Row]) -> str:
    """The same for every model that was measured whole."""
    rows = select(rows, kernel_name="qwen3_step", layers=None)
    found = in_order({row.config["model"] for row in rows})
    return "\n\n".join(f"**{models.title(name)}**\n\n{steps(select(rows, model=name))}" for name in found)


def fsdp(rows: list[Row]) -> str:
    rows = select(rows, kernel_name="qwen3_fsdp", model=MODEL, layers=None)
    gpus = sorted({row.config["gpus"] for row in rows})
    return "\n\n".join(f"**{n} GPUs**\n\n{steps(select(rows, gpus=n))}" for n in gpus)


def step_groups(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Steps of each model, number of its layers and number of GPUs, with a title that says which: no two are comparable."""

    names = in_order(row.config["model"] for row in rows)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        config = row.config
        groups.setdefault((names.index(config["model"]), config["gpus"], config["layers"] or models.size(config["model"]).layers), []).append(row)
    found = []
    for (model, gpus, layers), mine in sorted(groups.items()):
        on = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        found.append((f"{models.title(names[model], layers)} on {on}", mine))
    return found


def titled_steps(rows: list[Row]) -> str:
    how = "one sequence a GPU, bf16, PyTorch's fused AdamW unless a column says otherwise, no checkpointing: time, and peak memory of a GPU"
    return "\n\n".join(f"**A training step of {title}** ({how})\n\n{steps(mine)}" for title, mine in step_groups(rows))


def expert_cells(rows: list[Row], providers: list[str], notes: Notes) -> list[str]:
    """Of one size and pass: time and memory of each provider, the time of the bare GEMMs, and both comparisons."""
    found, memory = (by_provider(select(rows, metric_name=name)) for name in ("speed", "memory"))
    line = [joined(notes.cell(found.get(p), milliseconds), notes.cell(memory.get(p), gibibytes)) for p in providers]
    floor = found.get("floor")
    return [*line, notes.cell(floor, milliseconds), share(found.get("bastile"), floor), times_faster(found)]


def gpt_oss_experts(rows: list[Row]) -> str:
    """The layer of experts by model, pass, routing and tokens."""
    rows = select(rows, dtype="bf16", timing="device")
    rows = [row for row in rows if row.kernel_name in EXPERTS]
    speed = select(rows, metric_name="speed")
    providers, notes, body = columns_of(speed), Notes(), []
    for model in in_order(row.config["model"] for row in speed):
        for mode in ("forward", "full"):
            for name, routing in EXPERTS.items():
                mine = select(rows, kernel_name=name, model=model, kernel_operation_mode=mode)
                for tokens in in_order(row.x_value for row in select(mine, metric_name="speed")):
                    what = f"{models.size(model).experts} experts, {routing}, {MODE_TITLES.get(mode, mode)}"
                    body.append([what, tokens, *expert_cells(select(mine, x_value=tokens), providers, notes)])
    head = ["layer, routing, pass", "tokens", *(PROVIDERS[p] for p in providers), "bare GEMMs", "Bastile: of the GEMMs", "vs best peer"]
    return markdown(head, body) + bias_errors(rows) + str(notes) + origin(speed) if speed else ""


def bias_errors(rows: list[Row]) -> str:
    """What the bounds of the benchmark's own let pass."""
    errors = [row for name in ("error_dgate_up_bias", "error_ddown_bias") for row in select(rows, metric_name=name)]
    worst = {p: max(row.y_value_50 or 0 for row in select(errors, kernel_provider=p)) for p in columns_of(errors)}
    text = ", ".join(f"{PROVIDERS[p]} {error:.1%}" for p, error in worst.items())
    return f"\n\nThe largest relative error of a bias's gradient, against float64: {text}." if text else ""


def gpt_oss_step(rows: list[Row]) -> str:
    return titled_steps(select(rows, kernel_name="gpt_oss_step"))


def gpt_oss_fsdp(rows: list[Row]) -> str:
    return titled_steps(select(rows, kernel_name="gpt_oss_fsdp"))


def gpt_oss(rows: list[Row]) -> str:
    """GPT-OSS in short: the layer of experts forward and backward, and the steps, at one number of tokens."""
    rows = select(rows, x_name="tokens", x_value=TOKENS, kernel_operation_mode="full", dtype="bf16")
    layer = select([row for row in rows if row.kernel_name in EXPERTS], timing="device")
    step = [row for row in rows if row.kernel_name in ("gpt_oss_step", "gpt_oss_fsdp")]
    times = select(layer, metric_name="speed") + select(step, metric_name="step_time")
    providers, notes, body = columns_of(times), Notes(), []

    def add(title: str, mine: list[Row], metric: str, time: Callable, size: Callable) -> None:
        found, memory = by_provider(select(mine, metric_name=metric)), by_provider(select(mine, metric_name="memory"))
        cells = [joined(notes.cell(found.get(p), time), notes.cell(memory.get(p), size)) for p in providers]
        body.append([title, *cells, times_faster(found)])

    for model in in_order(row.config["model"] for row in layer):
        for name, routing in EXPERTS.items():
            title = f"{models.size(model).experts} experts, {routing} routing"
            add(title, select(layer, kernel_name=name, model=model), "speed", milliseconds, gibibytes)
    for title, mine in step_groups(step):
        add(f"step of {title}", mine, "step_time", lambda ms: f"{number(ms)} ms", lambda gib: f"{gib:.1f} GiB")
    head = [f"{TOKENS} tokens", *(PROVIDERS[p] for p in providers), "vs best peer"]
    return markdown(head, body) + str(notes) + origin(times) if times else ""


def first_step(rows: list[Row]) -> str:
    """Seconds from a fresh process to the end of its first step."""
    rows = select(rows, kernel_name="qwen3_step", model=MODEL, layers=None)
    ready, first = (by_provider(select(rows, metric_name=name)) for name in ("until_ready", "first_step"))
    body = []
    for p in ready:
        a, b = ready[p].y_value_50, first[p].y_value_50 if p in first else None
        if a and b:
            body.append([PROVIDERS[p], f"{a:.1f}", f"{b:.2f}", f"{a + b:.1f}"])
    head = ["seconds", "imports and making the model", "first step", "together"]
    return markdown(head, body) + origin(list(first.values())) if body else ""


def host(rows: list[Row]) -> str:
    """The host's microseconds in one eager RMSNorm."""
    rows = select(rows, kernel_name="rms_norm", metric_name="host_time", dtype="bf16")
    providers, notes = columns_of(rows), Notes()
    body = []
    for mode, title in (("forward", "with gradients"), ("no_grad_forward", "without")):
        found = by_provider(select(rows, kernel_operation_mode=mode))
        if found:
            ours, theirs = (found[p].y_value_50 if p in found else None for p in ("bastile", "torch"))
            cells = [notes.cell(found.get(p), lambda us: f"{us:.1f}") for p in providers]
            body.append([title, *cells, f"{ours / theirs:.2f} ×" if ours and theirs else ""])
    head = ["µs of host time", *(PROVIDERS[p] for p in providers), "Bastile / PyTorch"]
    return markdown(head, body) + str(notes) + origin(rows) if rows else ""


def adamw(rows: list[Row]) -> str:
    """Milliseconds of an optimizer step by what it steps."""
    rows = select(rows, kernel_name="adamw", model=MODEL, metric_name="speed")
    providers, notes, body = columns_of(rows), Notes(), []
    for name in dict.fromkeys(row.x_value for row in rows):
        found = by_provider(select(rows, x_value=name))
        title = ADAMW_CASES.get(name, name).format(model=models.title(MODEL), layers=rows[-1].config["layers"])
        cells = [notes.cell(found.get(p), milliseconds) for p in (*providers, "floor")]
        body.append([title, *cells, share(found.get("floor"), found.get("bastile")), times_faster(found)])
    head = ["parameters of", *(PROVIDERS[p] for p in providers), "floor", "Bastile: of the floor", "vs best peer"]
    return markdown(head, body) + str(notes) + origin(rows) if rows else ""


def generate(rows: list[Row]) -> str:
    """Milliseconds of a prefill and of one more token, by the number of sequences."""
    rows = select(rows, kernel_name="generate", model=MODEL, metric_name="speed")
    notes, body = Notes(), []
    for mode, title in (("prefill", "prefill"), ("decode", "one token")):
        for batch in in_order(row.x_value for row in rows):
            found = by_provider(select(rows, kernel_operation_mode=mode, x_value=batch))
            cells = [notes.cell(found.get(p), lambda us: number(us / 1e3)) for p in ("huggingface", "bastile")]
            body.append([f"{title}, batch {batch}", *cells, times_faster(found)])
    if not rows:
        return ""
    config = rows[-1].config
    head = [f"ms, {config['tokens']} tokens, {config['layers']} layers", "Hugging Face", "Bastile", "speed"]
    return markdown(head, body) + str(notes) + origin(rows)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "operations": operations,
    "linear_cross_entropy": linear_cross_entropy,
    "qwen3_step": qwen3_step,
    "qwen3_models": qwen3_models,
    "gpt_oss_experts": gpt_oss_experts,
    "gpt_oss_step": gpt_oss_step,
    "gpt_oss_fsdp": gpt_oss_fsdp,
    "gpt_oss": gpt_oss,
    "first_step": first_step,
    "fsdp": fsdp,
    "host": host,
    "adamw": adamw,
    "generate": generate,
}


# These bring their titles along, so that a document shows nothing where nothing was measured.
TITLED = ("gpt_oss_step", "gpt_oss_fsdp")


def table(name: str, rows: list[Row]) -> str:
    """A table by its name. Raises ValueError for one that does not exist."""
    if name not in TABLES:
        raise ValueError(f"table is {name}, expected one of {', '.join(TABLES)}")
    return TABLES[name](rows) or ("" if name in TITLED else "*Not measured yet.*")


def content(name: str, rows: list[Row]) -> str:
    """What stands between the marks of a document."""
    text = table(name, rows)
    return f"{text}\n" if text else ""


def filled(text: str, rows: list[Row]) -> str:
    """A document with all its tables made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{content(block[2], rows)}{block[4]}", text)


def stale(text: str, rows: list[Row]) -> list[str]:
    """Names of the tables of a document that are not what the results say."""
    return [name for _, name, found, _ in BLOCK.findall(text) if found != content(name, rows)]


def main(arguments=None) -> int:
    p = argparse.ArgumentParser(description="Tables of the results in Markdown.")
    p.add_argument("documents", nargs="*", type=Path, help="without any, all tables are printed")
    p.add_argument("--gpu", default="nvidia-h200", help="folder under the results")
    p.add_argument("--results", type=Path, default=records.RESULTS)
    p.add_argument("--check", action="store_true", help="fail when a document's table is not what the results say")
    p.add_argument("--write", action="store_true", help="replace the documents' tables")
    args = p.parse_args(arguments)
    rows = records.read_all(args.results / args.gpu)
    if not args.documents:
        print("\n\n".join(f"## {name}\n\n{table(name, rows)}" for name in TABLES))
    wrong = 0
    for document in args.documents:
        text = document.read_text()
        names = stale(text, rows)
        if args.write and names:
            document.write_text(filled(text, rows))
        if names:
            print(f"{document}: {'wrote' if args.write else 'not as the results say:'} {', '.join(names)}")
            wrong += not args.write
    if wrong and args.check:
        print("Run: python -m benchmark.tables --write " + " ".join(map(str, args.documents)))
    return 1 if wrong and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
