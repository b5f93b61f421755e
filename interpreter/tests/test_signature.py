"""Whether arrays of a launch share memory, as the interpreter finds it: against the bytes that each reaches."""

import random

import torch

from interpreter.signature import element_offsets, is_nested, overlap


def bytes_of(tensor) -> set[int]:
    return {int(offset) * tensor.itemsize + i for offset in element_offsets(tensor) for i in range(tensor.itemsize)}


def test_views_of_one_memory():
    """Any shape and strides, of two dtypes: two views, and two indices of one view."""
    draw, buffer, seen = random.Random(0), torch.zeros(1000, dtype=torch.bfloat16), set()

    def view():
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        strides = [draw.randint(0, 40) for _ in shape]
        memory = draw.choice((buffer, buffer.view(torch.float32)))
        return memory.as_strided(shape, strides, draw.randint(0, 15))

    for _ in range(500):
        a, b = view(), view()
        shared, apart = bool(bytes_of(a) & bytes_of(b)), element_offsets(a).unique().numel() == a.numel()
        assert overlap(a, b) == shared
        assert apart or not is_nested(a)
        seen |= {("shared", shared), ("nested", is_nested(a)), ("apart", apart)}
    assert len(seen) == 6
