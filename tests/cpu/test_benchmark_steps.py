"""Whole training steps in tiny sizes, and their results."""

import pytest
import torch

from benchmark import (
    benchmark_families,
    benchmark_fsdp,
    benchmark_lora,
    benchmark_qwen3,
    benchmark_trainers,
    families,
    models,
    records,
    step_parts,
    step_results,
    stepping,
    steps,
    tables,
    varlen_peer,
)
from tests.benchmark_support import GPU, STEPS, in_this_process_fixture, losses_agree, one_thread, sources, step_of  # noqa: F401


@pytest.mark.parametrize("given", (
    [], ["--warmup", "0", "--steps", "1"], ["--lora", "0"], ["--lora", "8", "--attention", "--checkpointing", "--weights", "fp32"],
    ["--documents", "3", "--rows", "2", "--padding", "0.25", "--parts", "--routing", "skewed", "--layers", "1", "--tokens", "8,16"],
    ["--loss", "dpo", "--autocast", "--providers", "bastile", "--rounds", "2", "--fresh", "--budget-s", "9"],
))  # fmt: skip
def test_a_measuring_process_is_told_what_its_parent_was(given):
    """Also what is 0 where that is no default."""
    p = steps.parser("", (8,))
    steps.add_recipe(p, 16)
    args = p.parse_args(["--model", "qwen3_tiny", *given])
    told = p.parse_args(steps.child_arguments(args, "liger"))
    assert told.child == "liger" and told.layers == (args.layers or 2)
    assert steps.recipe_of(told) == steps.recipe_of(args) and steps.form_of(told) == steps.form_of(args)
    assert all(getattr(told, name) == getattr(args, name) for name in ("model", "tokens", "warmup", "steps", "device", "parts"))


def test_training_steps_in_a_process_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = benchmark_qwen3.main([*STEPS, "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"step_time", "throughput", "loss"}
    assert len(found.steps["huggingface", 8].ms) == 2 and len(found.steps["huggingface", 16].losses) == 3


def test_the_first_step_of_a_new_interpreter_is_measured_alone(tmp_path, in_this_process):
    benchmark_qwen3.main([*STEPS, "--fresh", "--providers", "huggingface", "--results", str(tmp_path)])
    saved = records.read(tmp_path / "cpu" / "qwen3_step.csv")
    assert {r.metric_name for r in saved} == {"first_step", "until_ready"} and all(r.y_value_50 > 0 for r in saved)


STEPPED = {
    "lora": (benchmark_lora, "qwen3_step_lora_2", "--lora 2 --layers 2"),
    "autocast": (benchmark_lora, "qwen3_step_autocast_fp32", "--lora 0 --autocast --weights fp32"),
    "qlora": (benchmark_lora, "qwen3_step_lora_2_nf4_checkpointing", "--lora 2 --layers 2 --weights nf4 --checkpointing"),
    "dense": (steps, "dense_step", "--model gemma_tiny --layers 2"),
    "qwen3_5": (steps, "qwen3_5_step", "--model qwen3.5_tiny --layers 4"),
    "gpt_oss": (steps, "gpt_oss_step", "--model gpt_oss_tiny --layers 1"),
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_of_every_package_with_adapters_and_under_autocast(name, tmp_path, in_this_process):
    """Every provider steps the same weights: their first losses are the same."""
    module, file, arguments = STEPPED[name]
    found = module.main([*STEPS, *arguments.split(), "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    assert {r.kernel_provider for r in records.read(tmp_path / "cpu" / f"{file}.csv")} == {"huggingface", "bastile"}
    assert losses_agree(found)
    if module is steps:
        assert models.title(arguments.split()[1]) in tables.table(file, found.rows())


@pytest.mark.parametrize("name", benchmark_families.CASES)
def test_steps_of_families_that_are_read_or_have_experts(name, tmp_path, in_this_process):
    """By the command of all of them, whose providers step the same weights."""
    arguments = ["--cases", name, "--device", "cpu", "--tokens", "16", "--warmup", "1", "--steps", "1", "--rounds", "1"]
    layers = "10" if name == "gemma_4" else "2"
    found = benchmark_families.main([*arguments, "--layers", layers, "--providers", "huggingface,bastile", "--results", str(tmp_path)])
    assert found.whole and not found.left_out
    assert losses_agree(found.found[name])
    assert [file.stem for file in (tmp_path / "cpu").glob("*.csv")] == [benchmark_families.CASES[name].shows]
    assert (16 in found.found[name].routings) == (name in ("mixtral", "glm"))


def test_a_provider_whose_losses_are_others_has_no_times(in_this_process, monkeypatch):
    monkeypatch.setattr(benchmark_families, "APART", -1.0)
    arguments = ["--cases", "qwen3_vl", "--device", "cpu", "--tokens", "16", "--warmup", "1", "--steps", "1", "--lora", "0"]
    found = benchmark_families.main([*arguments, "--layers", "1", "--providers", "huggingface,bastile"]).found["qwen3_vl"]
    times = {row.kernel_provider: row for row in found.rows() if row.metric_name == "step_time"}
    assert times["huggingface"].y_value_50 and "from transformers'" in times["bastile"].error
    found.theirs[16].append([loss + 2.0 for loss in found.theirs[16][0]])  # another round of transformers'
    assert all(row.y_value_50 for row in found.rows() if row.metric_name == "step_time"), "no farther than theirs from each other"
    left_out = benchmark_families.main(["--cases", "qwen3_vl,glm", "--budget-s", "-1"])
    assert left_out.left_out == ["qwen3_vl", "glm"] and not left_out.whole


NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
    "bastile_grouped_outer": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "bastile_attention_forward": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>": "optimizer",
    "bastile_adamw_of_four": "optimizer",
    "_swiglu_backward_kernel": step_parts.REST,
    "bastile_add_rms_norm_backward": step_parts.REST,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_a_step_are_told_apart_by_their_names(name):
    assert step_parts.kind_of(name) == NAMES[name]


def test_the_parts_of_a_step_are_rows_of_a_file_of_their_own(tmp_path, in_this_process, monkeypatch):
    """In milliseconds a step, by PyTorch's profiler, which a CPU has none of."""
    assert step_parts.parts_of(lambda: None) == {} or torch.cuda.is_available()
    monkeypatch.setattr(step_parts, "parts_of", lambda step: {"products": 3.0 + len(step()), step_parts.REST: 1.5})
    arguments = [*STEPS, "--model", "gemma_tiny", "--layers", "2", "--providers", "huggingface,bastile", "--parts"]
    found = steps.main([*arguments, "--results", str(tmp_path)])
    rows = records.read(tmp_path / "cpu" / "dense_step_parts.csv")
    assert {(r.x_value, r.y_value_50) for r in rows if r.metric_name == step_parts.METRIC} == {("products", 5.0), (step_parts.REST, 1.5)}
    lines = tables.table("step_parts", found.rows()).splitlines()
    assert [line.split("|")[3].strip() for line in lines if "Gemma-Tiny" in line] == ["products", step_parts.REST] * 2
    assert any("5 ms | 5 ms" in line for line in lines), lines


def test_sharded_training_steps(tmp_path, monkeypatch):
    """One family is enough: a model is sharded the same way in all, and test_benchmark_models.py has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = "gpt_oss_tiny"
    arguments = [*STEPS, "--model", model, "--layers", "2", "--gpus", "2", "--providers", "bastile", "--results", str(tmp_path)]
    found = benchmark_fsdp.main(arguments)
    saved = records.read(tmp_path / "cpu" / "gpt_oss_fsdp.csv")
    assert {r.x_value for r in saved if r.metric_name == "step_time" and r.y_value_50} == {"8", "16"}
    assert {(r.config["gpus"], r.config["layers"], r.config["model"]) for r in saved} == {(2, None, models.full_name(model))}, (
        "2 layers are all"
    )
    assert len(found.steps["bastile", 16].losses) == 3


def test_steps_of_rows_that_are_spread(tmp_path, monkeypatch):
    """DeepSpeed's Ulysses, around attention of transformers here: there are no kernels on a CPU."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--gpus", "2", "--spread", "--documents", "2", "--providers", "bastile", "--results", str(tmp_path)]
    found = benchmark_fsdp.main([*STEPS, *arguments])
    assert len(found.steps["bastile", 16].losses) == 3
    assert list((tmp_path / "cpu").glob("*_fsdp_spread*.csv"))


OF_GPT_OSS = "huggingface, huggingface_flex, liger_flex, bastile, bastile_adamw, bastile_four_bits, bastile_flex"


@pytest.mark.parametrize(("module", "arguments", "why"), (
    (benchmark_fsdp, "--model gpt_oss_20b --providers bastile,liger", f"liger, expected some of {OF_GPT_OSS} for gpt_oss_20b"),
    (benchmark_trainers, "--model qwen3_tiny --trainer dpo --packing", "DPO has no packed rows"),
    (benchmark_trainers, "--model qwen3_tiny --providers unsloth", "expected some of"),
    (steps, "--model tiny --loss dpo --lora 4 --documents 2", "argument --loss"),
    (steps, "--model tiny --loss dpo --lora 4 --tokens 8", "argument --tokens: 8, expected at least 16"),
))  # fmt: skip
def test_what_would_not_be_measured_is_refused(module, arguments, why, capsys):
    with pytest.raises(SystemExit):
        module.main(arguments.split())
    assert why in capsys.readouterr().err


def test_a_step_that_does_not_fit_is_recorded_for_all_longer_ones():
    args = steps.parser("", ()).parse_args(["--tokens", "8,16,32", "--model", "tiny"])
    found = step_results.Results("qwen3_step", args, gpu=GPU)
    found.add("liger", {"kind": "result", "tokens": 8, "ms": [1.0, 2.0], "first_ms": 9.0, "peak_gib": 1.0, "losses": [6.2]})
    found.add("liger", {"kind": "failed", "tokens": 16, "error": "out of memory"})
    errors = {r.x_value: r.error for r in found.rows() if r.metric_name == "step_time"}
    assert errors == {"8": "", "16": "out of memory", "32": "out of memory"}


FORMS = stepping.Form(documents=3), stepping.Form(rows=4, padding=0.2)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_packed_and_padded_batches(form):
    batch = form.batch(torch.arange(1, 49)[None])
    labelled = batch["labels"] != -100
    if form.documents > 1:
        assert batch["position_ids"].eq(0).sum() == 3 and labelled.sum() == 45
    else:
        assert batch["input_ids"].shape == (4, 12) and torch.equal(labelled, batch["attention_mask"] == 1)
        assert 0.1 < 1 - labelled.float().mean() < 0.3 and len(set(labelled.sum(1).tolist())) > 1
    assert form.masked


def varlen_in_pytorch(q, k, v, rows, scale):
    """What PyTorch's function computes, which wants a GPU."""
    parts = []
    for start, end in zip(rows.ends[:-1].tolist(), rows.ends[1:].tolist(), strict=True):
        mine = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    assert rows.longest == rows.ends.diff().max()
    return torch.cat(parts)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_peer_with_attention_over_rows_of_any_lengths_computes_the_same(form, monkeypatch):
    monkeypatch.setattr(varlen_peer, "varlen", lambda: varlen_in_pytorch)
    families.QWEN3.prepare("huggingface_varlen")
    losses = {}
    for provider in ("huggingface", "huggingface_varlen"):
        args = step_of(provider, "tiny", layers=2, weights="fp32", documents=form.documents, rows=form.rows, padding=form.padding)
        losses[provider] = steps.build(args).run(tokens=48, warmup=1, steps=2)["losses"]
    assert losses["huggingface_varlen"] == pytest.approx(losses["huggingface"], rel=1e-5)


def test_every_peer_takes_part_in_packed_batches_with_the_attention_that_is_best_at_them():
    for family in (families.QWEN3, families.QWEN3_MOE):
        assert {"huggingface_flex", "huggingface_varlen", "liger_flex", "liger_varlen", "bastile_sdpa"} < set(family.masked_providers)
    kinds = {name: families.attention_of(name) for name in families.MASKED}
    assert kinds["liger_varlen"] == varlen_peer.NAME and kinds["liger_flex"] == "flex_attention" and kinds["bastile"] is None


def test_compiled_steps_say_how_long_they_compiled():
    args = steps.parser("", ()).parse_args(["--tokens", "8", "--model", "tiny", "--rounds", "2"])
    found = step_results.Results("qwen3_step", args, gpu=GPU)
    for first in (9000.0, 3000.0):
        found.add("torch_compile", {"kind": "result", "tokens": 8, "ms": [2.0], "first_ms": first, "peak_gib": 1.0, "losses": []})
    rows = {r.metric_name: r for r in found.rows()}
    assert rows["compile_time"].y_value_50 == pytest.approx(8.998) and rows["step_time"].config["rounds"] == 2
    assert "2 ms · 1.0 GiB · compiled in 9 s" in tables.table("qwen3_models", found.rows())


def test_a_model_without_steps_is_refused():
    with pytest.raises(ValueError, match="model is deepseek_v3, expected one of qwen3_0.6b, "):
        steps.main(["--model", "deepseek_v3"])
