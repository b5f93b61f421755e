"""Of files of models with a change, found by a seed, none is served as what it is not: results, gradients and generation are its own."""

import warnings

import pytest
import torch

from tests.changed_files import changed
from tests.cpu.test_recognised import all_of, assert_same, fused
from tests.own_file import source_of_mine, source_of_other

EACH = 16  # of the files that run at all
FACTOR = 30  # some changes leave a model in which rounding errors grow
FILES = ("Otter", "Llama", "Qwen3", "Gemma2", "Olmo2", "Granite")


def is_finite(results) -> bool:
    steps, logits = results
    return bool(logits.isfinite().all()) and all(g.isfinite().all() for step in steps for g in step.gradients.values())


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_served_as_what_it_is_or_not_at_all(decoders, mine, file):
    source = source_of_other() if file == "Otter" else source_of_mine(file)
    tried, whole = [], 0
    warnings.simplefilter("ignore")
    for what, text in changed(source, seed=20261128):
        try:
            model = mine(source=text, name=f"changed_{file.lower()}_{len(tried)}")
            expected = all_of(model)
        except Exception:  # of a file that does not run
            continue
        if not is_finite(expected):
            continue
        tried.append(what)
        decoders.kernelize(model.train())
        whole += any(part.startswith("read") for part in fused(decoders, model))
        try:
            assert_same(all_of(model), expected, FACTOR)
        except Exception as error:
            pytest.fail(f"{what}: {error}\n{decoders.explain(model.train())}")
        decoders.reset()
        if len(tried) == EACH:
            break
    print(f"{file}: {whole} of {EACH} have layers that are fused")
    assert len(tried) == EACH and 0 < whole < EACH and torch.is_grad_enabled()
