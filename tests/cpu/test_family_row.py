"""Rows that are read off the forwards of transformers' own layers: those of the table come out as they were written by hand."""

import pytest

from tests.cpu.test_rows import MODELS
from tests.patched import calls_of
from tools import family_row

READ = [(fixture, name) for fixture in ("qwen3", "gpt_oss", "decoders", "moe") for name in MODELS[fixture]]


@pytest.mark.parametrize(("fixture", "name"), READ)
def test_a_row_is_what_its_forwards_compute(request, decoders, fixture, name):
    """Field by field, but for the family's name and for classes with vision towers in other modules."""
    rows = calls_of(request.getfixturevalue(fixture)).rows
    [written] = [own.family for own in rows if own.family.modeling == f"transformers.models.{name}.modeling_{name}"]
    read = family_row.row_of_model(decoders, MODELS[fixture][name]())
    left = dict.fromkeys(family_row.NOT_READ)
    assert read.family._asdict() | left == written._asdict() | left
    assert tuple(read.called) == written.called and all("forward" in why for why in read.called.values())


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_the_tool_prints_the_row_of_a_default_configuration(capsys, name):
    assert family_row.main([f"transformers.models.{name}.modeling_{name}"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith('row("') and ("softcap='final_logit_softcapping'" in said) == (name == "gemma3")


def test_the_tool_says_which_line_stopped_it(capsys):
    assert family_row.main(["transformers.models.doge.modeling_doge"]) == 1
    assert "DogeDecoderLayer.forward" in capsys.readouterr().out
