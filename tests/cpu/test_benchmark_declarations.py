"""What the benchmark takes from the declarations of operations, suites, models and providers: nothing else lists them."""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch

from benchmark import harness, models, operations_rows, providers, records, registry, suites
from benchmark.operation import Case, Inputs, Operation, Random, Work, bytes_moved
from tests.benchmark_support import TINY, one_thread, sources  # noqa: F401

# All that a new operation's author writes, but for the link benchmark_clipped.py.
NEW_FILE = '''
"""Hidden states, clipped and scaled."""

from .liger_operations import declare
from .operation import Inputs, bytes_moved


def inputs(size, tokens, random) -> Inputs:
    shape = (tokens, size.hidden)
    leaves = (random.normal(*shape), random.normal(size.hidden, scale=0.1, shift=1.0))
    return Inputs(leaves, output_gradients=(random.normal(*shape),))


CLIPPED = declare(
    "clipped", "clipping", 50, "LigerClippingFunction",
    outputs=("y",), gradients=("dx", "dweight"),
    inputs=inputs,
    formula=lambda x, weight: x.clamp(-1, 1) * weight,
    work=bytes_moved(2, 3),  # x, y; dy, x, dx
)
'''.lstrip()


def run_python(*arguments, cwd) -> str:
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_new_operation_is_one_file(tmp_path):
    """Command line, rows of both schemas, table and plots know it."""
    folder = tmp_path / "benchmark"
    shutil.copytree(records.ROOT / "benchmark", folder, ignore=shutil.ignore_patterns("results", "__pycache__"), symlinks=True)
    (folder / "operations_clipping.py").write_text(NEW_FILE)
    script = folder / "benchmark_clipped.py"
    script.symlink_to("one_operation.py")
    options = ["--device", "cpu", "--ms", "1", "--rounds", "1", "--no-compile", "--results", "found"]
    sweep = ["--sweep-mode", "model_config", "--models", "qwen3_tiny,gpt_oss_tiny", "--bt", "8"]
    run_python(str(script), *options, *sweep, cwd=tmp_path)
    table = f"import runpy, sys; sys.argv[1:] = {['clipped', *options, '--model', 'tiny', '--tokens', '16']}\n"
    table += "runpy.run_module('benchmark', run_name='__main__')\n"
    table += "from benchmark import records, tables; from pathlib import Path; import dataclasses\n"
    table += "def published(r): return r.extra_benchmark_config_str.replace('qwen3_tiny', 'llama_3_8b')\n"
    table += "rows = records.read_all(Path('found/cpu'))\n"
    table += "rows = [dataclasses.replace(r, x_value='8192', extra_benchmark_config_str=published(r)) for r in rows]\n"
    table += "print(tables.table('liger_operations', rows))"
    assert "| clipping, forward + backward [" in run_python("-c", table, cwd=tmp_path)

    rows = records.read(tmp_path / "found/cpu/clipped.csv")
    speed = [r for r in rows if r.metric_name == "speed" and r.y_value_50]
    assert {(r.x_name, r.x_value) for r in speed} == {("tokens", "16"), ("model", "qwen3_tiny"), ("model", "gpt_oss_tiny")}
    assert {r.kernel_operation_mode for r in speed} == {"forward", "backward", "full"}
    assert {"torch", "floor"} <= {r.kernel_provider for r in speed}
    assert {f"error_{name}" for name in ("y", "dx", "dweight")} <= {r.metric_name for r in rows}

    theirs = records.read(tmp_path / "found/cpu" / records.LIGER_FILE, records.LigerRow)
    found = {(r.kernel_name, r.x_name, r.x_label, r.metric_unit) for r in theirs}
    assert found == {("clipped", "T", "sequence length", "ms"), ("clipped", "model", "model", "ms")}
    assert {r.kernel_operation_mode for r in theirs} == {"forward", "backward", "full"} and all(r.y_value_50 for r in theirs)


def test_the_new_file_is_short():
    assert len(NEW_FILE.splitlines()) <= 25


def test_every_operation_has_a_file_that_runs_it_alone():
    """`python benchmark_<operation>.py`, for each of Liger-Kernel's names, too."""
    folder = records.ROOT / "benchmark"
    assert {path.readlink().name for path in folder.glob("*.py") if path.is_symlink()} == {"one_operation.py"}
    links = {path.stem.removeprefix("benchmark_") for path in folder.glob("benchmark_*.py") if path.is_symlink()}
    operations = registry.operations()
    assert [operation for name in sorted(links) for operation in registry.of_script(name)] == sorted(
        operations.values(), key=lambda operation: (operation.script or operation.name, list(operations).index(operation.name))
    )
    assert not {f"benchmark.benchmark_{name}" for name in links} & {module.__name__ for module in registry.modules()}
    assert {(operation.liger and operation.liger.name) or operation.name for operation in registry.of_suite(suites.LIGER)} <= links
    assert [operation.name for operation in registry.of_script("rms_norm")] == ["rms_norm", "q_norm"]
    with pytest.raises(ValueError, match="benchmark_q_norm.py is of no operation"):
        registry.of_script("q_norm")


def test_the_model_of_an_operation_is_its_suites_unless_the_command_line_says_otherwise():
    def names(suite, **options):
        given = {"sweep_mode": "token_length", "model": None, "models": None, "tokens": (16,), "bt": None} | options
        return [
            case.config["model"] for case in dataclasses.replace(operations_rows.SWIGLU, suite=suite).cases(argparse.Namespace(**given))
        ]

    assert names(suites.LIGER) == ["llama_3_8b"] and names(suites.QWEN3) == ["qwen3_8b"]
    assert names(suites.LIGER, model="deepseek_v3") == ["deepseek_v3"]
    assert names(suites.LIGER, sweep_mode="model_config") == list(models.LIGER)


def test_the_sizes_of_ligers_models():
    found = {name: (s.hidden, s.intermediate, s.vocab, s.heads, s.kv_heads, s.head_dim) for name, s in models.LIGER.items()}
    assert found == {
        "llama_2_7b": (4096, 11008, 32000, 32, 32, 128),
        "llama_3_8b": (4096, 14336, 128256, 32, 8, 128),
        "qwen2.5_7b": (3584, 18944, 152064, 28, 4, 128),
        "qwen2.5_14b": (5120, 13824, 152064, 40, 8, 128),
        "qwen2.5_72b": (8192, 29568, 152064, 64, 8, 128),
        "deepseek_v2_lite": (2048, 10944, 102400, 16, 16, 128),
        "deepseek_v3": (7168, 18432, 129280, 128, 128, 128),
    }
    titles = {name: models.title(name) for name in ("llama_3_8b", "qwen2.5_7b", "deepseek_v2_lite", "gpt_oss_20b", "qwen3_0.6b")}
    assert list(titles.values()) == ["Llama-3-8B", "Qwen2.5-7B", "DeepSeek-V2-Lite", "GPT-OSS-20B", "Qwen3-0.6B"]


def test_suites_name_models_that_exist():
    for suite in (suites.QWEN3, suites.GPT_OSS, suites.LIGER):
        assert {suite.model, *suite.models} <= models.SIZES.keys()


def over_columns(operation: Operation, args) -> list[Case]:
    return [Case(("columns", "columns", str(n)), {"shape": f"rows {rows}"}, (rows, n)) for rows in (2, 3) for n in (8, 16)]


def softmax(**changes) -> Operation:
    """An operation whose cases have nothing to do with a model."""
    declared = {
        "name": "softmax",
        "title": "softmax",
        "suite": suites.LIGER,
        "outputs": ("y",),
        "gradients": ("dx",),
        "inputs": lambda rows, n, random: Inputs((random.normal(rows, n),), output_gradients=(random.normal(rows, n),)),
        "formula": lambda x: x.softmax(-1),
        "formula_provider": "torch",
        "work": bytes_moved(2, 3),
        "sweeps": {"columns": over_columns},
        "shown": ("columns", "16"),
    }
    return Operation(**declared | changes)


def test_cases_of_any_shape(tmp_path):
    options = [*TINY[:2], *TINY[6:], "--results", str(tmp_path), "--modes", "forward"]
    rows = harness.main(softmax(), arguments=options)
    speed = {(r.x_name, r.x_value, r.config["shape"]) for r in rows if r.metric_name == "speed" and r.kernel_provider == "torch"}
    assert speed == {("columns", n, f"rows {rows}") for rows in (2, 3) for n in ("8", "16")}
    assert len(records.read(tmp_path / "cpu/softmax.csv")) == len(rows), "no shape replaces another"


def test_the_inputs_of_a_case_are_the_same_in_every_run():
    from benchmark.command_line import Settings

    first, second, other = (
        harness.draw_inputs(softmax(), case, Settings()) for case in (*[over_columns(None, None)[0]] * 2, over_columns(None, None)[2])
    )
    assert torch.equal(first.leaves[0], second.leaves[0]) and not torch.equal(first.leaves[0][:2], other.leaves[0][:2])


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"peers": {"ligher": None}}, "peers of softmax: ligher, expected some of huggingface"),
        ({"formula_provider": "pytorch"}, "formula_provider of softmax: pytorch"),
        ({"modes": ("forward", "bakward")}, "modes of softmax: bakward, expected some of forward, backward"),
        ({"bounds": {"dz": 1.0}}, "bounds of softmax: dz, expected some of y, dx"),
    ),
)
def test_a_misspelt_declaration_is_an_error(changes, text):
    with pytest.raises(ValueError, match=text):
        softmax(**changes)


def test_a_name_that_two_files_declare_is_an_error(monkeypatch):
    registry.operations.cache_clear()
    monkeypatch.setattr(registry, "modules", lambda: [types.SimpleNamespace(__name__="benchmark_a", A=softmax(), B=softmax())])
    with pytest.raises(ValueError, match="benchmark_a declares softmax, which another file declares as well"):
        registry.operations()
    monkeypatch.undo()
    registry.operations.cache_clear()
    assert len(registry.operations()) >= 9


def test_bytes_and_flops():
    inputs = Inputs((torch.zeros(4, 8, dtype=torch.bfloat16),))
    work = bytes_moved(2, 3)
    assert [work(inputs, mode).nbytes for mode in ("forward", "no_grad_forward", "backward", "full")] == [128, 128, 192, 320]
    assert bytes_moved(1, 1, lambda inputs: 7)(inputs, "full").nbytes == 14
    assert Work(nbytes=3_000_000).rate(1.0) == "3000 GB/s" and Work(flops=2_000_000_000).rate(1.0) == "2000 TFLOP/s"


def test_providers_take_part_in_the_order_of_their_table():
    operation = dataclasses.replace(operations_rows.SWIGLU, peers={"liger_cutile": None, "torch": None})
    assert operation.providers == ["huggingface", "torch", "torch_compile", "bastile", "liger_cutile"]
    assert operation.load("huggingface") is operation.formula
    with pytest.raises(providers.NotInstalled, match="swiglu has no provider torch_fused"):
        operation.load("torch_fused")


def test_inputs_are_copied_and_restored():
    random = Random("cpu", torch.float32, 3)
    given = Inputs((random.normal(2, 3),), (random.integers(5, 2),), (random.normal(2, 3, scale=2.0, shift=9.0),))
    work = given.copy()
    assert work.leaves[0].requires_grad and work.leaves[0].data_ptr() != given.leaves[0].data_ptr() and work.others == given.others
    work.leaves[0].data.zero_(), work.output_gradients[0].zero_()
    work.restore(given)
    assert torch.equal(work.leaves[0], given.leaves[0]) and torch.equal(work.output_gradients[0], given.output_gradients[0])
    exact = given.to_float64()
    assert exact.leaves[0].dtype == torch.float64 and exact.others[0].dtype == torch.int64 and given.nbytes == 48
    assert json.dumps(given.scaled(2.0).output_gradients[0].tolist()) == json.dumps((2 * given.output_gradients[0]).tolist())
