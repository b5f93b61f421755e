"""Layers without a row are captured where all of them are fused, and else refused with the reason."""


import pytest

from tests.capturing import Rerun, captured, compare, stand_in
from tests.cpu.test_frames import LAYER_NORMS, LAYERS, NORMS, ONE_BY_ONE, SECOND
from tests.cpu.test_recognised import LAYER, all_of, assert_same, fused
from tests.own_file import load_mine, source_of_other


@pytest.fixture
def mine(tmp_path, monkeypatch):
    return load_mine(tmp_path, monkeypatch)


@pytest.fixture
def package(decoders, monkeypatch):
    stand_in(decoders, monkeypatch)
    monkeypatch.setattr(Rerun, "together", 2)
    return decoders


def test_layers_that_are_read_are_replayed(package, mine):
    model, plain = captured(package, mine(source=source_of_other()))
    assert compare(model, plain) == 2 and compare(model, plain, seed=5) == 2
    assert "captured [2, 9]" in fused(package, model)
    model.model.layers[0].self_attn.reach = 3  # of what was read: the graph is another one
    plain.model.layers[0].self_attn.reach = 3
    compare(model, plain)
    expected = all_of(plain)
    assert_same(all_of(model), expected)
    package.reset()


WHY = {
    "parts that are called": ([(NORMS, LAYER_NORMS)], "first"),
    "more than their residual stream": (
        [(LAYER, LAYER.replace("return", "return (") + ",)"), ("**given)\n        return Base", "**given)[0]\n        return Base")],
        "return more",
    ),
    "layers that are transformers' own": (
        [("class OtterModel(", SECOND.replace("between + self.feed", "between - self.feed")), (LAYERS, ONE_BY_ONE)], "own"
    ),
}


@pytest.mark.parametrize("what", WHY)
def test_others_are_refused_with_the_reason(package, mine, what):
    changes, why = WHY[what]
    source = source_of_other()
    if any(source.count(old) != 1 for old, _ in changes):
        pytest.skip("another name of the cache")
    model = package.kernelize(mine(*changes, source=source))
    with pytest.raises(TypeError, match=why):
        package.capture(model, 2, 9)
