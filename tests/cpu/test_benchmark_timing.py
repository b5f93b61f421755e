"""How the benchmark times calls, without a GPU: the clock, the floor, memory, and Liger-Kernel's convention."""

import dataclasses

import pytest
import torch

from benchmark import command_line, floors, harness, liger_convention, memory, operations_rows, records, suites
from benchmark.operation import Case, Inputs, LigerConvention, timed_call
from benchmark.timing import Clock, Quantiles
from tests.benchmark_support import TINY, one_thread, sources  # noqa: F401


def refuses(*_):
    raise RuntimeError("only for sm_100")


def test_quantiles_and_a_failing_call():
    assert Quantiles.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Quantiles(3.0, pytest.approx(1.8), pytest.approx(4.2))
    found = Clock("cpu", milliseconds=0.1).measure({"good": [lambda: None], "bad": [refuses]})
    assert found["good"].median > 0 and isinstance(found["bad"], RuntimeError)


def test_calls_take_the_sets_of_buffers_in_turns():
    clock, called = Clock("cpu", "rotated"), []
    calls = [lambda n=n: called.append(n) for n in range(3)]
    clock.samples(calls, lambda: called.append("restored"), dataclasses.replace(clock.plan(calls[:1], lambda: None, 1), count=5))
    assert called[-6:] == ["restored", 0, 1, 2, 0, 1], "restored once: it would leave the buffers in the L2"


@pytest.mark.parametrize(("timing", "several"), (("device", False), ("wall", False), ("rotated", True), ("graph", True)))
def test_only_some_timings_need_several_sets(timing, several):
    inputs = Inputs((torch.ones(4),), (), (torch.ones(4),))
    sets = harness.buffer_sets(inputs, command_line.Settings(timing=timing))
    assert (len(sets) > 1) == several
    assert len({each.leaves[0].data_ptr() for each in sets}) == len(sets)


def test_the_floor_moves_the_bytes_of_the_work():
    operation = operations_rows.SWIGLU
    inputs = Inputs((torch.ones(8, dtype=torch.bfloat16),) * 2, (), (torch.ones(8, dtype=torch.bfloat16),))
    assert floors.floor_call(operation, inputs, "forward")().nbytes * 2 == operation.work(inputs, "forward").nbytes == 48
    own = dataclasses.replace(operation, floor=lambda inputs, mode: lambda: mode)
    assert floors.floor_call(own, inputs, "full")() == "full"


def test_memory_is_a_number_of_a_gpu():
    assert memory.peak_bytes(refuses, cuda=False) is None, "nor is the call made"


@pytest.mark.parametrize("mode", ("forward", "backward", "full", "no_grad_forward"))
def test_the_calls_of_each_mode(mode):
    x, dy = torch.tensor([2.0], requires_grad=True), torch.tensor([10.0])
    result = timed_call(lambda x: x * x, Inputs((x,), (), (dy,)), mode)()
    expected = {"forward": 4.0, "no_grad_forward": 4.0, "backward": 40.0, "full": 40.0}[mode]
    found = result[0] if isinstance(result, tuple) else result
    assert found.item() == expected and found.requires_grad == (mode == "forward") and x.grad is None


# Liger-Kernel's convention


def operation(**convention):
    declared = {"suite": suites.LIGER, "liger": LigerConvention(**convention), "formula_provider": "huggingface", "peers": {}}
    return dataclasses.replace(operations_rows.SWIGLU, **declared)


def leaves(*values) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], requires_grad=True) for value in values)


def test_gradients_add_up_as_in_ligers_scripts():
    """`.grad` of the first leaf is cleared before each call, the others grow; the graph of a backward pass is kept."""
    inputs = Inputs(leaves(2.0, 3.0), (), (torch.tensor([10.0]),))
    settings = command_line.Settings()
    calls = liger_convention.calls_of(operation(), torch.mul, inputs)
    liger_convention.milliseconds(calls["backward"], inputs.leaves[0], settings)
    assert inputs.leaves[0].grad.item() == 30.0 and inputs.leaves[1].grad.item() > 20.0
    assert not calls["no_grad_forward"]().requires_grad and calls["forward"]().item() == 6.0


def test_what_lies_before_the_operation_is_made_once_and_differentiated_through():
    made = []

    def before(x, y):
        made.append(1)
        return x.exp(), y

    inputs = Inputs(leaves(0.0, 3.0), (), (torch.tensor([1.0]),))
    calls = liger_convention.calls_of(operation(before=before), torch.mul, inputs)
    calls["full"](), calls["full"]()
    assert made == [1] and inputs.leaves[0].grad.item() == 6.0, "two backward passes of 3 through exp(0)"


def test_what_lies_around_an_operation_and_the_outputs_that_count():
    inputs = Inputs(leaves(2.0, 3.0), (), (torch.tensor([1.0]), torch.tensor([100.0])))
    both = operation(around=lambda function: lambda x, y: (function(x, y) * 5, x * y), differentiated=1)
    liger_convention.calls_of(both, torch.mul, inputs)["full"]()
    assert inputs.leaves[0].grad.item() == 15.0, "nothing of the second output"


def test_rows_of_ligers_convention(tmp_path, monkeypatch):
    settings = command_line.Settings(dtype_name="bf16", results=tmp_path, modes=("forward",))
    seen = []
    monkeypatch.setattr(liger_convention, "milliseconds", lambda call, leaf, settings: seen.append(leaf.dtype) or Quantiles(2.0, 1.0, 3.0))
    from benchmark import models

    case = Case(("tokens", "tokens", "16"), {"model": "qwen3_tiny", "tokens": 16}, (models.size("tiny"), 16))
    ours = operation(name="swiglu_mlp", x_name="BT", x_label="B * T", dtype="fp32")
    functions = dict.fromkeys(("huggingface", "bastile"), ours.formula)
    rows = liger_convention.run_case(ours, case, settings, functions)
    (found,) = [r for r in records.read(tmp_path / "cpu" / records.LIGER_FILE, records.LigerRow) if r.kernel_provider == "huggingface"]
    assert (found.kernel_name, found.x_name, found.x_label, found.x_value, found.metric_unit) == ("swiglu_mlp", "BT", "B * T", "16", "ms")
    assert (found.y_value_50, found.y_value_20, found.y_value_80) == (2.0, 1.0, 3.0)
    assert found.config["dtype"] == "fp32" and "bastile" in found.config and set(seen) == {torch.float32}
    assert {r.kernel_provider for r in rows} == {"huggingface", "bastile"}


def test_a_provider_that_refuses_has_a_row_that_says_why():
    declared = operation(inputs=lambda random: Inputs(leaves(1.0, 2.0), (), (torch.ones(1),)))
    case, settings = Case(("columns", "columns", "2"), {}, ()), command_line.Settings(modes=("forward", "no_grad_forward"))
    rows = liger_convention.run_case(declared, case, settings, {"liger": refuses, "bastile": torch.mul})
    assert [(r.kernel_provider, r.kernel_operation_mode, r.error) for r in rows] == [
        ("liger", "forward", "RuntimeError: only for sm_100"),
        ("bastile", "forward", ""),
    ]


def test_a_provider_that_is_wrong_is_not_timed_by_ligers_convention_either():
    wrong = dataclasses.replace(operation(), peers={"liger": lambda: lambda gate, up: 1.1 * operations_rows.SWIGLU.formula(gate, up)})
    found = harness.main(wrong, arguments=[*TINY, "--modes", "forward", "--conventions", "liger"])
    theirs = [r for r in found if isinstance(r, records.LigerRow)]
    assert {r.kernel_provider for r in theirs} == {"huggingface", "bastile"}
    assert [r.y_value_50 for r in found if r.kernel_provider == "liger" and r.metric_name == "speed"] == [None]


def test_an_operation_that_does_not_say_how_is_left_out_aloud(capsys):
    assert harness.main(operations_rows.SWIGLU, arguments=[*TINY, "--conventions", "liger"]) == []
    assert "SwiGLU does not say how Liger-Kernel measures it, so it is left out there" in capsys.readouterr().out
    with pytest.raises(ValueError, match="swiglu does not say how Liger-Kernel measures it"):
        liger_convention.convention_of(operations_rows.SWIGLU)
