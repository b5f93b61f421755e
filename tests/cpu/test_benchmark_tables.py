"""The tables and pictures of the results."""

import dataclasses
import json

import jinja2
import pytest
from matplotlib.text import Text

from benchmark import families, markdown, plots, providers, records, registry, step_tables, suites, tables
from benchmark.markdown import Notes, in_order, number
from tests.benchmark_support import GPU, made_up_rows, row

PADDED = "qwen3_sft_lora_16_checkpointing_padded"
ROUTED = {"kind": "uniform", "experts": 32, "top_k": 4, "used": 32, "largest": 0.2}


@pytest.fixture
def results(tmp_path):
    for r in made_up_rows():
        records.write(tmp_path / records.slug(GPU) / f"{r.kernel_name}.csv", [r])
    return tmp_path


def test_tables(results):
    rows = records.read_all(results / "nvidia-h200")
    assert "| RMSNorm, forward | 441 | 37.6 | fails [1] | 35.4 | 34 | 96% | 1.06 × |" in tables.table("operations", rows)
    assert "[1] Liger cuTile: RuntimeError: only for / others" in tables.table("operations", rows)
    assert "NVIDIA H200, driver 580.159, torch 2.11.0; Bastile 1.0.0, 2026-01-02." in tables.table("operations", rows)
    assert "| 8192 | 988 ms · 98.8 GiB | 807 ms · 80.7 GiB | 770 ms · 77.0 GiB | 1.05 × | 95% |" in tables.table("qwen3_step", rows)
    assert "| 16384 | out of memory |" in tables.table("qwen3_step", rows)
    assert "**4 GPUs**" in tables.table("fsdp", rows)
    assert "**Qwen3-8B**" in tables.table("qwen3_models", rows)
    assert "| with gradients | 12.8 | 15.0 | 0.85 × |" in tables.table("host", rows)
    assert "35.4 ms · 1.20" in tables.table("linear_cross_entropy", rows)
    assert "| one token, batch 8 | 9 | 4.5 | 2.00 × |" in tables.table("generate", rows)
    assert "| Bastile | 1.5 | 1.50 | 3.0 |" in tables.table("first_step", rows)
    for name in tables.all_tables():
        assert tables.table(name, []).endswith("*Not measured yet.*"), name


def test_the_table_of_trainers():
    """Speed in tokens of texts, and the share of a step in which the device is busy."""
    rows = [row(PADDED, p, "full", "step_time", y=ms, layers=None) for p, ms in (("liger", 200.0), ("bastile", 100.0))]
    rows += [row(PADDED, p, "full", "throughput", y=1e6 / ms, layers=None) for p, ms in (("liger", 200.0), ("bastile", 100.0))]
    rows += [dataclasses.replace(row(PADDED, "bastile", "full", "gpu_time", y=80.0, layers=None), x_name="part", x_value="device")]
    assert "| 5,000 tokens/s | 10,000 tokens/s · busy 80% | 2.00 × |" in tables.table("trainers", rows)


def test_the_table_of_ligers_operations():
    shape = "8192 tokens, bf16"
    times = {"floor": 80.0, "bastile": 100.0, "liger": 150.0}
    rows = [dataclasses.replace(row("layer_norm", provider, "full", x=shape, y=y), x_name="shape") for provider, y in times.items()]
    found = tables.table("liger_limits", rows)
    assert "| LayerNorm | 8192 tokens, bf16 | 80 | 100 | 80% | 150 | 1.50 × (Liger) [1] |" in found
    assert "[1] Beside Liger alone: PyTorch and torch.compile were not measured at this shape." in found
    level = tables.table("liger_limits", [*rows[:2], dataclasses.replace(rows[2], y_value_50=98.0)])
    assert "| 98 | level (Liger) [1] |" in level and "| 80% |  [1] |" in tables.table("liger_limits", rows[:2])
    compiled = dataclasses.replace(rows[2], kernel_provider="torch_compile", y_value_50=90.0)
    assert "| 90 | 150 | 0.90 × (torch.compile) |" in tables.table("liger_limits", [*rows, compiled]), "the fastest peer, whoever it is"
    faster = tables.table("liger_limits", [rows[0], dataclasses.replace(rows[1], y_value_50=79.0), rows[2]])
    assert "| 80 | 79 | 100% |" in faster, "no share of a floor is above it"
    assert "[1]" not in tables.table("liger_limits", [*rows, compiled])


def test_the_table_of_the_optimizer(results):
    found = tables.table("adamw", records.read_all(results / "nvidia-h200"))
    assert "| parameters of | PyTorch | PyTorch, fused | Bastile | floor | Bastile: of the floor | vs best peer |" in found
    assert "| Qwen3-8B with 4 layers, bf16 | 26 ms | 10 ms | 6.8 ms | 6.5 ms | 96% | 1.47 × |" in found
    small = row("adamw", "bastile", "full", x="small", y=2500.0, layers=4, timing="wall", host_us=750.0)
    assert "| 2.5 ms, host 0.75 ms |" in tables.table("adamw", [small])


def test_steps_with_our_optimizer_have_columns_of_their_own():
    """And are no peer of those without it."""
    step = {"gpus": 1, "layers": None, "tokens": 8192, "timing": None}
    times = (("liger", 807.0), ("bastile", 770.0), ("bastile_adamw", 757.0))
    rows = [row("qwen3_step", provider, "full", "step_time", y=ms, **step) for provider, ms in times]
    rows += [row("qwen3_step", provider, "full", "memory", y=ms / 10, **step) for provider, ms in times]
    found = tables.table("qwen3_step", rows)
    assert "| tokens | Liger | Bastile | Bastile with its AdamW | speed vs best peer | with its AdamW | memory vs best peer |" in found
    assert "| 8192 | 807 ms · 80.7 GiB | 770 ms · 77.0 GiB | 757 ms · 75.7 GiB | 1.05 × | 1.07 × | 95% |" in found


def test_tables_of_gpt_oss(results):
    rows = records.read_all(results / "nvidia-h200")
    experts = tables.table("gpt_oss_experts", rows)
    assert "| 32 experts, uniform, forward | 8192 | 2 ms · 0.50 GiB | 1.2 ms · 0.50 GiB | 1 ms | 83% | 1.67 × |" in experts
    assert "| 128 experts, skewed, forward + backward | 8192 | 12 ms · 1.00 GiB | 7.2 ms · 1.00 GiB | 6 ms | 83% | 1.67 × |" in experts
    assert experts.count("| 8192 |") == 8 and "against float64: Hugging Face 4.0%." in experts
    step, fsdp = (tables.table(name, rows) for name in ("gpt_oss_step", "gpt_oss_fsdp"))
    assert step.startswith("**A training step of GPT-OSS-20B with 12 of 24 layers on one GPU**")
    assert "| 8192 | 750 ms · 150.0 GiB | 625 ms · 125.0 GiB | 500 ms · 100.0 GiB | 1.25 × | 80% |" in step
    assert fsdp.startswith("**A training step of GPT-OSS-20B on 2 GPUs**") and "900 ms" in fsdp and "500 ms" not in fsdp
    short = tables.table("gpt_oss", rows)
    assert "| 128 experts, uniform routing | 12 ms · 1.00 GiB |  |  | 7.2 ms · 1.00 GiB | 1.67 × |" in short
    assert "| step of GPT-OSS-20B with 12 of 24 layers on one GPU |  | 750 ms · 150.0 GiB | 625 ms" in short
    assert "at least 32 of 32 experts were used in every layer; the busiest saw 20.0% of the tokens, 12.5% would be even." in step
    unrecorded = [row("gpt_oss_step", p, "full", "step_time", model="gpt_oss_20b", layers=12, gpus=1) for p in ("liger_flex", "bastile")]
    assert tables.table("gpt_oss_step", unrecorded).endswith(markdown.NOT_MEASURED), "where tokens went is unknown"


def test_steps_that_cannot_be_compared_have_tables_of_their_own():
    def step(layers, gpus, ms, kernel="gpt_oss_step"):
        return row(kernel, "bastile", "full", "step_time", y=ms, model="gpt_oss_20b", layers=layers, gpus=gpus, timing=None, routing=ROUTED)

    found = tables.table("gpt_oss_step", [step(12, 1, 100.0), step(6, 1, 50.0), step(24, 2, 200.0), step(None, 2, 201.0)])
    titles = ("20B with 6 of 24 layers on one GPU", "20B with 12 of 24 layers on one GPU", "20B on 2 GPUs")
    assert [part.partition("**")[0] for part in found.split("GPT-OSS-")[1:]] == list(titles)
    assert "201 ms" in found and "200 ms" not in found, "24 layers are all, and the newer row counts"


@pytest.fixture
def document(tmp_path):
    """A document's path, with a template of the text that it is called with."""

    def make(template):
        path = tmp_path / "README.md"
        tables.template_of(path).write_text(template)
        return path

    return make


def test_a_document_is_checked_and_written(results, document, capsys):
    path = document('before\n\n<< table("host") >>\n\nafter {{ repo_id }} {% if layers %}\n\n<< table("operations") >>\n')
    arguments = [str(path), "--results", str(results)]
    assert tables.main([*arguments, "--check"]) == 1 and not path.exists()
    assert f"Run: python -m benchmark.tables --write {path}" in capsys.readouterr().out
    assert tables.main([*arguments, "--write"]) == 0 and tables.main([*arguments, "--check"]) == 0
    text = path.read_text()
    assert text.startswith("before\n\n| µs of host time |") and "\n\nafter {{ repo_id }} {% if layers %}\n\n| µs, 8192" in text
    path.write_text(text.replace("before", "changed by hand"))
    assert tables.main([*arguments, "--check"]) == 1
    assert "README.md: not what the template (.md.j2) and the results make; change the text there" in capsys.readouterr().out
    document('<< table("gpt_oss_step") >>')
    assert tables.main([*arguments, "--write"]) == 0
    assert path.read_text().startswith("**A training step of GPT-OSS-20B")
    assert max(len(line) for line in path.read_text().splitlines() if not line.startswith("|")) <= tables.WIDTH
    (results / "nvidia-h200" / "gpt_oss_step.csv").unlink()
    assert tables.main([*arguments, "--check"]) == 1 and tables.main([*arguments, "--write"]) == 0
    assert path.read_text().endswith(markdown.NOT_MEASURED), "a reader is told what was not measured"
    document('<< table("speed") >>')
    with pytest.raises(ValueError, match="table is speed, expected one of operations"):
        tables.main([*arguments, "--check"])
    document("<< sped(1) >>")
    with pytest.raises(jinja2.UndefinedError, match="'sped' is undefined"):
        tables.main([*arguments, "--check"])


def test_plots(results):
    """A chart for each page that shows one, which knows the rows that it was made of."""
    pytest.importorskip("matplotlib")
    folder = results / "nvidia-h200"
    shape = dataclasses.replace(row("dyt", "liger", "full", y=2.0), x_name="shape", x_value="8192 tokens, bf16")
    operation = [shape, dataclasses.replace(shape, kernel_provider="bastile", y_value_50=1.0)]
    packed = [row("qwen3_step_8_documents", p, "full", "step_time", y=y) for p, y in (("liger_varlen", 3.0), ("bastile", 2.0))]
    sft = [row(PADDED, p, "full", metric, y=y) for p, y in (("liger", 3.0), ("bastile", 2.0)) for metric in ("step_time", "throughput")]
    records.write(folder / "limits.csv", operation)
    records.write(folder / "qwen3_step_8_documents.csv", packed)
    records.write(folder / f"{PADDED}.csv", sft)
    for name, model in (("dense_step", "llama_3.1_8b"), ("qwen3_5_step_lora_16", "qwen3.5_9b")):
        pair = [row(name, p, "full", "step_time", y=y, model=model, layers=8, gpus=1) for p, y in (("liger", 3.0), ("bastile", 2.0))]
        records.write(folder / f"{name}.csv", pair)
    names = "trainers qwen3_step masked gpt_oss dense qwen3_5 liger_operations".split()
    assert plots.stale(folder) == list(plots.CHARTS) == names
    arguments = ["--results", str(results)]
    assert plots.main([*arguments, "--check"]) == 1 and plots.main(arguments) == 0 and plots.main([*arguments, "--check"]) == 0
    assert all((folder / "plots" / f"{name}.png").stat().st_size > 10_000 for name in plots.CHARTS)
    records.write(folder / "limits.csv", [dataclasses.replace(operation[1], y_value_50=1.5)])
    assert plots.stale(folder) == ["liger_operations"]
    (folder / "qwen3_step_8_documents.csv").unlink()
    assert plots.stale(folder) == ["masked", "liger_operations"], "nothing is shown of what was not measured"


def overlapping(figure) -> list[tuple[str, str]]:
    """Pairs of texts of a figure that lie over each other, and texts that reach out of it, or out of the axes that they are written in."""
    figure.canvas.draw()
    beyond = set()  # ticks beyond the ends of an axis, which are not drawn
    for axes in figure.axes:
        for place, axis in enumerate((axes.xaxis, axes.yaxis)):
            low, high = sorted(axis.get_view_interval())
            beyond |= {label for label in axis.get_ticklabels(which="both") if not low <= label.get_position()[place] <= high}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in beyond]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    found = [(a, b) for number, (a, box) in enumerate(boxes) for b, other in boxes[number + 1 :] if box.overlaps(other)]
    around = {text: axes.bbox for axes in figure.axes for text in axes.texts}
    frames = [around.get(text, figure.bbox) for text in shown]
    outside = [box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1 for (_, box), whole in zip(boxes, frames)]
    return found + [(text, "the edge") for (text, _), out in zip(boxes, outside) if out]


@pytest.mark.parametrize("name", plots.CHARTS)
def test_no_text_of_a_chart_lies_over_another_or_is_cut(name):
    for folder in records.RESULTS.iterdir():
        figure = plots.CHARTS[name](records.read_all(folder)).draw()
        assert figure is None or overlapping(figure) == []


def test_texts_that_lie_over_each_other_are_found():
    figure, (left, right) = plots.figure_of(2)
    assert overlapping(figure) == []
    for axes in (left, right):
        axes.set_xlabel("a label that is much too long for the half of a picture that it has, and runs into its neighbour's")
    assert len(overlapping(figure)) >= 2


def test_the_charts_of_the_repository_are_of_its_results():
    for folder in records.RESULTS.iterdir():
        assert plots.stale(folder) == [], "python -m benchmark.plots"
        assert {path.stem for path in (folder / "plots").iterdir()} <= set(plots.CHARTS)


def test_the_documents_of_the_repository_are_of_its_results(capsys):
    """None is stale, no sentence mixes commits or has a quantity that no row has, no step's routing collapsed."""
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_parts_of_tables():
    assert in_order(["8192", "512", "8192"]) == ["512", "8192"]
    assert in_order(["gpt_oss_20b", "qwen3_8b", "qwen3_0.6b"]) == ["qwen3_0.6b", "qwen3_8b", "gpt_oss_20b"]
    assert [number(value) for value in (0.1234, 12.345, 99.96, 1234.5)] == ["0.123", "12.3", "100", "1,234"]
    notes = Notes()
    cells = [
        notes.cell(each, str)
        for each in (None, row(y=2.0), row(y=None, error="out of memory"), row(y=None, error="no"), row(y=None, error="no"))
    ]
    assert cells == ["", "2.0", "out of memory", "fails [1]", "fails [1]"] and str(notes) == "\n\n[1] Bastile: no"


def test_everything_that_was_measured_is_known():
    """No provider, operation or step has results under a name that no file declares."""
    rows = [row for folder in records.RESULTS.iterdir() if folder.is_dir() for row in records.read_all(folder)]
    assert {r.kernel_provider for r in rows} <= {*providers.PROVIDERS, providers.FLOOR}
    others = {"adamw", "fits", "generate", "host", "training"}
    others |= {f"{family}_{kind}" for family in families.FAMILIES for kind in ("step", "fsdp")} | {f"qwen3_fsdp{step_tables.SPREAD}"}
    others |= {f"qwen3_step{kind}" for kind in (*step_tables.AS_TRAINED.values(), *step_tables.MASKED.values())}
    others |= {f"qwen3_step{kind}" for kind in (*step_tables.TRL.values(), *step_tables.EIGHT_BITS.values())}
    others |= {f"{family}_{kind}" for family in families.FAMILIES for kind in step_tables.TRAINERS.values()}
    others |= {f"{name}_{kind}" for name, family in families.FAMILIES.items() for kind in (*family.kinds, "step_parts")}
    assert {r.kernel_name for r in rows} <= {*registry.operations(), *others}


def test_the_order_of_a_table_is_that_of_the_declarations():
    names = [operation.name for operation in registry.of_suite(suites.QWEN3)]
    first = ["rms_norm", "q_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "swiglu", "linear_cross_entropy", "attention"]
    of_heads = ("", "_frozen", "_entropy", "_entropy_frozen", "_known", "_kept")
    assert names == [*first, *(f"linear_log_probs{name}" for name in of_heads)]


@pytest.mark.parametrize("table", ("operations", "attention"))
def test_attention_is_shown_with_as_many_tokens_as_the_table_is_of(table):
    """It is measured by documents, with several numbers of tokens."""
    known = dataclasses.asdict(row("attention", x=8)) | {"x_name": "documents"}
    rows = [
        records.Row(**known | {"y_value_50": microseconds, "extra_benchmark_config_str": json.dumps(row().config | case)})
        for tokens, microseconds in ((1024, 111.0), (8192, 222.0), (16384, 333.0))
        for case in ({"tokens": tokens, "window": "none"},)
    ]
    found = tables.table(table, rows)
    assert "8192 tokens" in found and "222" in found and "111" not in found and "333" not in found


def test_a_line_of_log_probabilities_that_was_not_measured_says_so():
    rows = records.read_all(records.RESULTS / "nvidia-h200")
    others = [r for r in rows if r.kernel_name != "linear_log_probs_kept"]
    measured = [dataclasses.replace(r, kernel_name="linear_log_probs_kept") for r in others if r.kernel_name == "linear_log_probs"]

    def lines(rows):
        return [line for line in tables.table("linear_log_probs", rows).splitlines() if line.startswith("| a trained head, logits kept")]

    assert len(lines(others)) == 1 and "not measured yet" in lines(others)[0]
    assert len(lines(others + measured)) == 3 and not any("not measured" in line for line in lines(others + measured))


def test_a_line_that_was_measured_apart_says_so(results, monkeypatch):
    """Whatever the table: another commit, another processor, or fewer rounds than the other lines'."""
    shown, add = [], markdown.Table.add
    monkeypatch.setattr(markdown.Table, "add", lambda self, cells, rows: add(self, cells, [*rows]) or shown.extend(self.lines[-1][1]))
    rows = records.read_all(results / "nvidia-h200")
    names = [name for name in tables.all_tables() if not tables.table(name, rows).endswith(markdown.NOT_MEASURED)]
    assert len(names) > 10
    for name in names:
        assert "Measured apart" not in tables.table(name, rows), name
        shown.clear()
        tables.table(name, rows)
        assert shown, f"{name} is no Table"
        other = next(r for r in reversed(shown) if r.kernel_provider == "bastile")
        changed = [dataclasses.replace(r, version="1.0.0+abc") if r is other else r for r in rows]
        shown.clear()
        text = tables.table(name, changed)
        assert "Measured apart" in text and "1.0.0+abc" in text or len(shown) == 1, name
        assert [r.version for r in shown if r.version not in text] == []


def test_hosts_and_rounds_are_compared():
    step = {"gpus": 1, "layers": None, "tokens": 8, "timing": None}

    def steps(x, **config):
        return [row("qwen3_step", p, "full", "step_time", x, 2.0, **step, **config) for p in ("liger", "bastile")]

    rows = steps(8, rounds=3, processor="Xeon") + steps(16, rounds=3, processor="Xeon") + steps(32, rounds=3, processor="EPYC")
    found = tables.table("qwen3_step", rows + steps(64, rounds=1, processor="Xeon"))
    assert "| 8 | 2 ms" in found and "| 32 [1] | 2 ms" in found and "| 64 [2] | 2 ms" in found
    assert "EPYC." in found and "[2] Rounds: 1, instead of 3." in found and ", Xeon, " in found


def number_of(call, rows):
    return tables.rendered(f"<< {call} >>", rows)[0]


def test_numbers_of_sentences_come_from_the_results(results, document, capsys):
    path, arguments = document('It is << speed("qwen3_step", 8192) >> as fast.\n`9 ms`\n```\n8 ms\n```\n'), ["--results", str(results)]
    assert tables.main([str(path), *arguments, "--write"]) == 0 and tables.main([str(path), *arguments, "--check"]) == 0
    assert path.read_text() == "It is 1.05 × as fast.\n`9 ms`\n```\n8 ms\n```\n"
    rows = records.read_all(results / "nvidia-h200")
    assert number_of('speed("qwen3_step", 8192, peer="huggingface")', rows) == "1.28 ×"
    assert number_of('memory("qwen3_step", 8192)', rows) == "5% less"
    assert number_of('peak("qwen3_step", 8192)', rows) == "77.0 GiB"
    assert number_of('longest("qwen3_step", "bastile")', rows) == number_of('longest("qwen3_step")', rows) == "8,192"
    assert number_of('operation("rms_norm", "forward", 8192)', rows) == "1.06 ×"
    pairs = [(n, p, y) for n in (4, 12) for p, y in (("liger", 3.0 * n), ("bastile", 6.0))]
    some = [row("qwen3_step_lora_16", p, "full", "step_time", y=y, gpus=1, layers=n) for n, p, y in pairs]
    assert number_of('speed("qwen3_step_lora_16", 8192)', some) == "6.00 ×", "with the most layers that were measured"
    assert number_of('speed("qwen3_step_lora_16", 8192, ours="bastile")', rows + some) == "6.00 ×"
    absent = 'speed("qwen3_step", 512)', 'speed("qwen3_step", 8192, model="qwen3_4b")', 'longest("qwen3_step", "unsloth")'
    for wrong in (*absent, 'peak("qwen3_step", 512)'):
        with pytest.raises(ValueError, match="no row of the results says"):
            number_of(wrong, rows)
    capsys.readouterr()
    document("In 770 ms, 17 % less, 2.1 × as fast, 1.3x faster, 40 percent, 1.5-fold, 3 TB/s.\n"
             "2 × 512 rows, 2x512, 8 KiB and 30 seconds are none.\n")  # fmt: skip
    tables.main([str(path), *arguments, "--write"])
    assert tables.main([str(path), *arguments, "--check"]) == 1
    found = [line.split("no row has ")[1] for line in capsys.readouterr().out.splitlines() if "has" in line]
    assert found == ["'770 ms'", "'17 %'", "'2.1 ×'", "'1.3x'", "'40 percent'", "'1.5-fold'", "'3 TB/s'"]
    tables.template_of(path).unlink()
    assert tables.main([str(path), *arguments, "--check"]) == 1, "a document without a template is searched itself"


@pytest.mark.parametrize("changed", ({"version": "1.0.0+abc"}, {"processor": "EPYC"}), ids=("commit", "host"))
@pytest.mark.parametrize(("call", "metric", "other"), (
    ("speed('qwen3_step', 8192)", "step_time", "liger"), ("memory('qwen3_step', 8192)", "memory", "bastile"),
    ("operation('rms_norm', 'forward', 8192)", "speed", "liger"),
))  # fmt: skip
def test_a_sentence_that_compares_commits_or_hosts_is_refused(call, metric, other, changed, results):
    """It has no notes that could say so, as a table has. Rows that it does not compare may be of any."""
    def planted(provider):
        def fits(row):
            return (row.metric_name, row.x_value, row.kernel_provider) == (metric, "8192", provider)

        found = [replaced(row, **changed) if fits(row) else row for row in records.read_all(results / "nvidia-h200")]
        return tables.rendered(f"<< {call} >>", found)[1]

    assert planted(other) == [f"{call} compares rows of several commits or hosts"] and planted("huggingface") == []


def replaced(row, version=None, **config):
    extra = json.dumps(row.config | config)
    return dataclasses.replace(row, version=version or row.version, extra_benchmark_config_str=extra)


def test_rounds_that_nobody_recorded_are_said():
    """Below a table where they were recorded of no row, and of a line among others."""
    known = {"tokens": 2048, "layers": 4}
    rows = [row("generate", p, mode, x="1", y=9000.0, **known) for p in ("huggingface", "bastile") for mode in ("prefill", "decode")]
    unknown = tables.table("generate", rows)
    assert "How many rounds the providers took was not recorded." in unknown and "instead of 3" not in unknown
    some = [replaced(r, rounds=3) if r.kernel_operation_mode == "decode" else r for r in rows]
    found = tables.table("generate", some)
    assert "| prefill, batch 1 [1] |" in found and "[1] Rounds: not recorded, instead of 3." in found and "How many" not in found
    assert "Rounds" not in tables.table("generate", [replaced(r, rounds=3) for r in rows])


def test_steps_whose_tokens_all_go_to_a_few_experts_are_refused(tmp_path, capsys):
    def step(**changed):
        return row("gpt_oss_step", "bastile", "full", "step_time", model="gpt_oss_20b", layers=12, gpus=1, routing=ROUTED | changed)

    assert tables.collapsed([step()]) == tables.collapsed([step(kind="skewed", largest=0.44)]) == []
    assert tables.collapsed([step(used=7)]) == tables.collapsed([step(largest=0.91)]) == ["gpt_oss_step of bastile at 8192 tokens"]
    records.write(tmp_path / "nvidia-h200" / "gpt_oss_step.csv", [step(used=7, largest=0.91)])
    (document := tmp_path / "README.md").write_text("nothing\n")
    assert tables.main([str(document), "--results", str(tmp_path), "--check"]) == 1
    assert "gpt_oss_step of bastile at 8192 tokens" in capsys.readouterr().out
