"""Attention by matrix products, for heads that no kernel takes."""

import importlib

import pytest
import torch

from tests.ops.attention_products import CASES, check_products


@pytest.mark.parametrize("given", CASES, ids=str)
@pytest.mark.parametrize("queries", (5, 64))
def test_it_is_attention(loaded, given, queries):
    check_products(loaded, given, queries)


def test_how_many_queries_there_are_at_once(loaded, monkeypatch):
    """No more scores than memory is to hold, however long a row is; a window is short."""
    module = importlib.import_module(f"{loaded.__name__}.shared.ops.attention_products")
    monkeypatch.setattr(module, "SCORES", 8 * 40 * 16)
    monkeypatch.setattr(module, "ROWS", (4, 32))
    limits = torch.zeros(4, 64, dtype=torch.int32)
    for window, expected in ((None, 10), (4, 17)):
        pieces = list(module._pieces(limits, torch.zeros(64, 8, 2), module.Reach(1, window=window)))
        assert pieces[0].queries == slice(0, expected), window
        assert pieces[-1].queries.stop == 64 and all(8 * piece.keys.stop * expected >= 0 for piece in pieces)


def test_what_it_refuses(loaded):
    module = importlib.import_module(f"{loaded.__name__}.shared.ops.attention_products")
    q = torch.zeros(6, 1, 4)
    for causal, tokens, rows in ((False, 6, 1), (True, 5, 1), (True, 6, 4)):
        plan = loaded.AttentionPlan(torch.tensor([[0], [tokens]], dtype=torch.int32), tokens, causal)
        with pytest.raises(ValueError, match="plan is of"):
            module.attention_by_products(q, q, q, plan, module.Reach(rows))
    assert not module.wants_products(q), "on a CPU there are no kernels to do better than"
