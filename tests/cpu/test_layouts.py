"""Whether tensors are laid out as others were, by torch.compile's guards and without them."""

import importlib

import pytest
import torch
from torch import nn


@pytest.fixture(params=("guards", "no guards"))
def layouts(request, loaded, monkeypatch):
    found = importlib.import_module(f"{loaded.__name__}.shared.runtime.layouts")
    if request.param == "guards":
        assert found.guards([torch.ones(2)]) is not None
    else:
        monkeypatch.setattr(found, "TensorGuards", None)
    return found


def tensors():
    return [nn.Parameter(torch.ones(4, 8)), torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4).t(), torch.ones(())]


def resized(tensor):
    return tensor.resize_(2, 8)


def data_of(new):
    """`.data = new` of a tensor that stays the same object."""

    def change(tensor):
        tensor.data = new
        return tensor

    return change


CHANGES = {
    "shape": lambda t: torch.ones(8, 4),
    "dimensions": lambda t: t[None],
    "dtype": lambda t: t.float(),
    "strides": lambda t: torch.ones(8, 4, dtype=t.dtype).t(),
    "device": lambda t: t.to("meta"),
    "sign turned": lambda t: torch._neg_view(t),
    "type": lambda t: nn.Parameter(t),
    "sparse": lambda t: t.to_sparse(),
    "resized": resized,
    "a part of it": data_of(torch.ones(2, 8, dtype=torch.bfloat16)),
    "data of another dtype": data_of(torch.ones(4, 8)),
    "data of other strides": data_of(torch.ones(8, 4, dtype=torch.bfloat16).t()),
    "data with its sign turned": data_of(torch._neg_view(torch.ones(4, 8, dtype=torch.bfloat16))),
}


def test_others_of_the_same_layout_are_the_same(layouts):
    same = layouts.same_as(tensors())
    for _ in range(2):
        assert same(tensors())
    first = tensors()
    first[1].data = first[1].data.clone()
    first[1].add_(1)
    assert same(first)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(layouts, change):
    same, found = layouts.same_as(tensors()), tensors()
    assert same(found)
    found[1] = CHANGES[change](found[1])
    assert not same(found)


def test_another_number_of_tensors_is_noticed(layouts):
    same = layouts.same_as(tensors())
    assert not same(tensors()[:-1]) and not same([*tensors(), torch.ones(())]) and not same([])


def test_a_tensor_may_come_twice(layouts):
    one = torch.ones(3)
    assert layouts.same_as([one, one])([one, one])
    assert not layouts.same_as([one, one])([one, torch.ones(4)])


def test_another_form_of_the_guards_is_not_relied_on(layouts, monkeypatch):
    class Other:
        def __init__(self, *tensors):
            pass

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Other)
    assert layouts.of_compiled_graphs("TensorGuards", layouts._tells_apart) is None


def test_tensors_without_strides_are_told_apart(layouts):
    sparse = torch.eye(3).to_sparse()
    assert layouts.same_as([sparse])([sparse]) and not layouts.same_as([sparse])([torch.eye(3)])
