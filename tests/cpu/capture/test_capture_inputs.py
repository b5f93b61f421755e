"""A captured model reads what its caller wrote into the tensors of an earlier pass, also where no version counts it, and in one pass."""

import sys

import pytest
import torch

from tests.capturing import SHAPE, Rerun, assert_equal, captured, compare, gradients, id_of, one_family, whole
from tests.models import UNCOUNTED, write_uncounted

POSITIONS = torch.arange(SHAPE[1]).expand(SHAPE)
ministral3 = pytest.mark.parametrize("family", (("ministral3", 1), ("ministral3", 2)), ids=id_of, indirect=True)


@pytest.mark.parametrize("way", UNCOUNTED)
@ministral3
def test_positions_that_are_written_between_passes(package, tiny_model, way):
    model, plain = captured(package, tiny_model())
    positions = POSITIONS.clone()
    for seed in range(3):
        write_uncounted(way, positions, POSITIONS + 5 * seed)
        assert compare(model, plain, seed, position_ids=positions) == (0 if seed == 0 else whole())


class Onward(torch.nn.Module):
    """A decoder layer that moves the positions of the layers after it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.step = layer, 0

    def forward(self, x, position_ids, **kwargs):
        found = self.layer(x, position_ids=position_ids, **kwargs)
        position_ids += self.step
        return found


@ministral3
@pytest.mark.parametrize("steps", ((0, 0, 0, 4, 0), (7, 4, 4, 4)), ids=("once recorded", "from the beginning"))
def test_positions_that_are_written_between_layers(package, tiny_model, steps):
    """PyTorch counts it. A graph of several layers has computed the next one's output by then."""
    model, plain = (package.kernelize(tiny_model(num_hidden_layers=3)) for _ in range(2))
    package.capture(model, *SHAPE)
    for m in (model, plain):
        m.model.layers[1] = Onward(m.model.layers[1])
    for seed, step in enumerate(steps):
        found = []
        for m in (model, plain):
            m.model.layers[1].step = step
            found.append(gradients(m, seed, position_ids=POSITIONS.clone()))
        assert_equal(*found)
    assert Rerun.replays


@ministral3
def test_positions_of_inference_mode(package, tiny_model):
    """Have no version. A data loader may have made them so."""
    model, plain = captured(package, tiny_model())
    with torch.inference_mode():
        positions = [POSITIONS + 5 * seed for seed in range(3)]
    for seed, each in enumerate(positions):
        assert compare(model, plain, seed, position_ids=each) == (0 if seed == 0 else whole())


@pytest.mark.parametrize("family", (("qwen3_5", 1), ("qwen3_5", 2)), ids=id_of, indirect=True)
@pytest.mark.parametrize("way", UNCOUNTED)
def test_documents_that_are_written_between_passes(package, tiny_model, way):
    model, plain = captured(package, tiny_model(num_hidden_layers=3, layer_types=["linear_attention"] * 2 + ["full_attention"]), (1, 30))
    bounds = torch.tensor([0, 12, 30], dtype=torch.int32)
    for seed in range(3):
        write_uncounted(way, bounds, torch.tensor([0, 12 + 7 * seed, 30], dtype=torch.int32))
        assert_equal(*(gradients(m, seed, shape=(1, 30), cu_seq_lens_q=given) for m, given in ((model, bounds), (plain, bounds.clone()))))
    assert Rerun.replays


def packed_and_padded(seed):
    """Options of a packed batch, and of a padded one, which differ from seed to seed."""
    packed, mask = POSITIONS.clone(), torch.ones(SHAPE, dtype=torch.int64)
    packed[1, 2 + seed :] -= 2 + seed
    mask[1, 3 + seed :] = 0
    return {"position_ids": packed}, {"attention_mask": mask}


@one_family
def test_documents_of_an_attention_that_no_plan_serves(package, tiny_model):
    """Such as one with dropout, here one that drops nothing: it would be recorded with the mask of one pass."""
    model, plain = (package.kernelize(tiny_model(attention_dropout=1e-12)) for _ in range(2))
    for m in (model, plain):
        m.set_attn_implementation("bastile")
    package.capture(model, *SHAPE)
    with pytest.warns(RuntimeWarning, match="cannot be captured .*attention asks for a mask of transformers"):
        for seed in range(3):
            for options in packed_and_padded(seed):
                assert compare(model, plain, seed, **options) == 0
    assert [bool(compare(model, plain, seed)) for seed in range(3)] == [False, True, True]


@pytest.mark.parametrize("family", (("gpt_oss", 1), ("gpt_oss", 2)), ids=id_of, indirect=True)
def test_documents_that_an_attention_with_sinks_finds(package, tiny_model):
    """In position_ids beside a mask of ones, where transformers looks for none; in layers with a window, and without."""
    model, plain = (package.kernelize(tiny_model(sliding_window=5)) for _ in range(2))
    for m in (model, plain):
        m.set_attn_implementation("bastile")
    package.capture(model, *SHAPE)
    for seed in range(3):
        packed, padded = packed_and_padded(seed)
        for options in (packed, {**packed, "attention_mask": torch.ones(SHAPE, dtype=torch.int64)}, padded):
            assert compare(model, plain, seed, **options) > 0 or seed == 0


@one_family
@pytest.mark.parametrize("packed", (False, True))
def test_a_window_that_changes_between_passes(package, tiny_model, packed):
    """In the configuration, from which transformers makes each pass's mask: the layers' plans may have the shapes of those before."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    model, plain = (package.kernelize(tiny_model(**windows)) for _ in range(2))
    for m in (model, plain):
        m.set_attn_implementation("bastile")
    package.capture(model, *SHAPE)
    options = packed_and_padded(0)[0] if packed else {}
    for window in (6, 3, 6):
        for m in (model, plain):
            m.config.sliding_window = window
        for seed in range(3):
            assert compare(model, plain, seed, **options) == whole() or seed == 0


@one_family
def test_a_window_that_changes_where_products_attend(package, tiny_model, monkeypatch):
    """As for heads that no kernel takes: which keys a product reads stands in the graph, a window's first ones among them."""
    of_package = f"{package.__name__}.shared"
    monkeypatch.setattr(sys.modules[f"{of_package}.ops.attention_products"], "ROWS", (2, 2))
    attention = sys.modules[f"{of_package}.hf.attention.attention"]
    for name, found in (("_takes", False), ("wants_products", True)):
        monkeypatch.setattr(attention, name, lambda *given, found=found: found)
    windows = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2}
    model, plain = (package.kernelize(tiny_model(**windows)) for _ in range(2))
    for m in (model, plain):
        m.set_attn_implementation("bastile")
    package.capture(model, *SHAPE)
    for window in (3, 6):
        for m in (model, plain):
            m.config.sliding_window = window
        assert [compare(model, plain, seed) for seed in range(3)] == [0, whole(), whole()]
