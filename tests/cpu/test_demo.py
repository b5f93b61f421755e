"""What the demo computes; the demo itself is run by `make demo`."""

import math
import shlex
import subprocess

import pytest
import torch

from tests.cpu.conftest import REPOSITORY
from tools import demo, demo_run


def result(losses, seconds=(9.0, 2.0, 2.0)):
    return demo.Result(tokens=100, losses=list(losses), seconds=list(seconds))


def test_differences_are_in_percent_and_not_a_number_counts_as_infinite():
    assert demo.differences(result([4.0, 2.0]), result([4.0, 2.01])) == pytest.approx([0.0, 0.5])
    assert demo.differences(result([4.0]), result([math.nan])) == [math.inf]
    with pytest.raises(ValueError):
        demo.differences(result([4.0]), result([4.0, 4.0]))


def test_the_first_step_does_not_count_for_the_speed():
    assert result([1, 1, 1]).tokens_per_second == 50
    assert result([1], [4.0]).tokens_per_second == 25


def test_batches_are_pieces_of_a_text_and_the_same_in_every_run():
    ids = torch.tensor(list(demo_run.text().encode()))
    assert len(ids) > 100_000
    first, again = (list(demo_run.batches(ids, demo_run.CPU, 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].shape == (demo_run.CPU.batch, demo_run.CPU.tokens) and not torch.equal(first[0], first[1])


@pytest.mark.parametrize(("goal", "variable", "module"), (("demo", "MODEL", "tools.demo"), ("test-transformers", "TESTS", "tests.upstream"),
                                                           ("bench-all", "RUNS", "benchmark.all")))
@pytest.mark.parametrize("value", ("model", "a folder/of models", "it's \"mine\" && $$(exit)"))
def test_make_hands_one_argument_on(goal, variable, module, value):
    done = subprocess.run(["make", "-n", goal, f"{variable}={value}"], cwd=REPOSITORY, capture_output=True, text=True)
    command = next(line for line in done.stdout.splitlines() if module in line)
    assert shlex.split(command)[-1] == value.replace("$$", "$"), done.stdout


def test_wrong_arguments(tmp_path, capsys):
    for arguments, said in ((["--steps", "0"], "--steps is 0"), (["--model", str(tmp_path)], "expected a folder with a config.json")):
        with pytest.raises(SystemExit):
            demo.main(arguments)
        assert said in capsys.readouterr().err


def test_a_run_that_fails_says_why(tmp_path):
    from rich.progress import Progress

    run = demo_run.Run(kernelized=False, device="no-such-device", steps=1)
    with pytest.raises(demo.DemoError, match="no-such-device"):
        demo.train(run, "http://127.0.0.1:1", tmp_path, Progress(disable=True))
