"""What Liger's operations should reach: every declaration runs, and the table says what is missed."""

import dataclasses
import json

import pytest
import torch

from benchmark import floors, limits, operations_norms, records, registry, suites
from benchmark.operation import Limit, Random, as_tuple
from tests.benchmark_support import one_thread  # noqa: F401

TINY = {"hidden": 64, "intermediate": 96, "vocab": 512, "heads": 4, "kv_heads": 2, "head_dim": 32}
OPERATIONS = registry.of_suite(suites.LIGER)
NAMES = (
    "liger_rms_norm fused_add_rms_norm layer_norm group_norm poly_norm dyt softmax sparsemax liger_swiglu geglu rope llama4_rope "
    "qwen2vl_mrope cross_entropy kl_div jsd tvd "
    "fused_linear_cross_entropy fused_linear_jsd tiled_geglu tiled_swiglu fused_neighborhood_attention"
).split()


def tiny(limit: Limit) -> Limit:
    images = limit.inputs and operations_norms.images(2, 64, 8, 8)
    return dataclasses.replace(limit, tokens=16, checked=12, size=TINY, inputs=images)


def test_all_of_ligers_operations_have_limits():
    assert {operation.name for operation in OPERATIONS} == set(NAMES) and len(NAMES) == 22
    for operation in OPERATIONS:
        assert operation.limits and operation.liger and "liger" in operation.providers and "bastile" in operation.providers, operation.name
        titles = [limit.title for limit in operation.limits]
        assert len(set(titles)) == len(titles) and all(0 < limit.share <= 1 for limit in operation.limits), titles


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_package_computes_what_the_formula_does(operation):
    inputs = tiny(operation.limits[-1]).draw(operation, 12, Random("cpu", torch.float32, 0)).copy()
    arguments = (*inputs.leaves, *inputs.others)
    ours, exact = (as_tuple(function(*arguments)) for function in (operation.load("bastile"), operation.formula))
    assert len(ours) == len(operation.outputs)
    for results in zip(ours, exact, strict=True):
        torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
    gradients = [torch.autograd.grad(out, inputs.leaves, inputs.output_gradients or None) for out in (ours, exact)]
    assert len(gradients[0]) == len(operation.gradients)
    for results in zip(*gradients, strict=True):
        torch.testing.assert_close(*results, rtol=2e-3, atol=1e-4)
    assert operation.work(inputs, "full").rate(1.0)
    for mode in operation.modes:
        floors.floor_call(operation, inputs, mode)()


def test_one_command_measures_and_says_what_is_missed(tmp_path, monkeypatch, capsys):
    operation = next(operation for operation in OPERATIONS if operation.name == "group_norm")
    few = dataclasses.replace(operation, limits=tuple(map(tiny, operation.limits[:2])))
    monkeypatch.setattr(registry, "operations", lambda: {"group_norm": few})
    monkeypatch.setattr(limits, "HOST_CALLS", 1)
    limits.main(["--device", "cpu", "--ms", "1", "--rounds", "1", "--no-compile", "--results", str(tmp_path)])
    text = capsys.readouterr().out
    rows = records.read(tmp_path / "cpu" / "limits.csv")
    assert {r.x_value for r in rows} == {limit.title for limit in few.limits}
    found = {(r.kernel_provider, r.metric_name) for r in rows}
    assert found >= {("bastile", "speed"), ("floor", "speed"), ("torch", "speed"), ("bastile", "host_time")}
    assert text.count("%!") == 2, text  # a CPU's PyTorch is far from a copy
    assert "geometric mean over 0 operations" in text


def row(provider, us, metric="speed", dtype="bf16", operation="dyt"):
    limit = next(o for o in OPERATIONS if o.name == operation).limits[0]
    config = json.dumps({"dtype": dtype})
    return records.Row(operation, provider, "full", metric, "us", "shape", "shape", limit.title, us, us, us, config, "GPU", "", "")


def test_the_table_takes_the_fastest_peer_and_ligers_mean():
    operations = [o for o in OPERATIONS if o.name in ("dyt", "geglu")]
    rows = [row("floor", 80.0), row("bastile", 100.0), row("torch", 400.0), row("torch_compile", 150.0), row("liger", 200.0)]
    rows += [row("bastile", 55.0, "host_time")]
    rows += [row("floor", 100.0, operation="geglu"), row("bastile", 100.0, operation="geglu"), row("liger", 800.0, operation="geglu")]
    lines = limits.table(rows, operations).splitlines()
    cells = next(line for line in lines if line.startswith("dyt")).split()
    assert "80%!" in cells and "1.50!" in cells and "torch_compile" in cells and "2.00" in cells and "55" in cells
    assert "100%" in next(line for line in lines if line.startswith("geglu"))
    assert lines[-1].endswith("over 2 operations, times as fast as Liger: 4.00")
