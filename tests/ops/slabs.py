"""The parts of what is too large for one launch: by the longest stride among its tensors, with the tables of each batch row. What whole
operations make of them is in tests/cpu/test_slabs.py."""

import importlib

import torch

from tests.ops.common import limit

SLAB = 400


def module_of(package, name):
    return importlib.import_module(f"{package.__name__}.shared.ops.{name}")


def apart(rows, step):
    """[rows, 8], of which each begins `step` elements after the one before."""
    return torch.arange(rows * step).view(rows, step)[:, :8]


def check_strides(name):
    """Checks the strides of the first tensor and of another."""

    def check(package):
        slabs = module_of(package, name).slabs
        with limit(package, name, "SLAB", SLAB):
            for steps in ((100, 8), (8, 100), (8, 8)):
                tensors = [apart(20, step) for step in steps]
                if name == "softmax":
                    parts = list(slabs(1, *tensors))
                else:
                    parts = [[tensor[part] for tensor in tensors] for part in slabs(*tensors)]
                for tensor, *pieces in zip(tensors, *parts, strict=True):
                    assert torch.equal(torch.cat(pieces), tensor)
                    assert all(piece.shape[0] * piece.stride(0) <= SLAB for piece in pieces), [piece.stride() for piece in pieces]

    return check


def check_tables(package):
    """Checks the tables of two batch rows, in parts of each."""
    x = torch.zeros(2, 10, 2, 8)
    tables = torch.arange(2 * 10 * 4.0).view(2, 10, 4)
    for table, rows in ((tables, tables.flatten(0, 1)), (tables[:1], torch.cat((tables[0], tables[0])))):
        with limit(package, "part_rotary", "SLAB", 64):
            parts = list(module_of(package, "part_rotary").token_slabs((x, x), (table,)))
        assert len(parts) == 6
        assert torch.equal(torch.cat([part for _, (part,) in parts]), rows)
    with limit(package, "part_rotary", "SLAB", 200):
        spread = torch.zeros(2, 10, 400)[..., :4]
        parts = list(module_of(package, "part_rotary").token_slabs((x[..., :1], x[..., :1]), (spread,)))
    assert all((part.shape[0] - 1) * part.stride(0) <= 200 for _, (part,) in parts), "a table is reached over too far"


def check_blocks(package):
    module = module_of(package, "neighborhood_attention")
    q = torch.zeros(6, 2, 4, 8)
    with limit(package, "neighborhood_attention", "GRID_YZ", 7):
        for dilation, most in ((1, 7), (2, 3), (3, 2), (7, 1)):
            parts = list(module._slabs((q, q), (torch.zeros(12, 4),), dilation))
            assert [part[0].shape[0] for part in parts] == [min(most, 6 - start) for start in range(0, 6, most)], dilation
            assert all(part[2].shape[0] == 2 * part[0].shape[0] for part in parts)


CHECKS = {"softmax": check_strides("softmax"), "rows": check_strides("rows"), "tables": check_tables, "blocks": check_blocks}
MUTANTS = (
    ("shared/ops/softmax.py", "slabs", "max(tensor.stride(0) for tensor in tensors)", "tensors[0].stride(0)", "softmax"),
    ("shared/ops/softmax.py", "slabs", "max(tensor.stride(0) for tensor in tensors)", "tensors[-1].stride(0)", "softmax"),
    ("shared/ops/rows.py", "slabs", "*[r.stride(0) for r in rows]", "rows[0].stride(0)", "rows"),
    ("shared/ops/rows.py", "slabs", "*[r.stride(0) for r in rows]", "rows[-1].stride(0)", "rows"),
    ("shared/ops/rows.py", "slabs", "most // 4 * 4 or most", "most + 1", "rows"),
    ("shared/ops/part_rotary.py", "token_slabs", "t.select(-3, row % t.shape[-3])", "t.select(-3, 0)", "tables"),
    ("shared/ops/part_rotary.py", "token_slabs", "[..., part, :] for t", "[..., :step, :] for t", "tables"),
    ("shared/ops/part_rotary.py", "token_slabs", ", *[t.stride(-2) for t in tables])", ")", "tables"),
    ("shared/ops/neighborhood_attention.py", "_slabs", "GRID_YZ // dilation", "GRID_YZ", "blocks"),
    ("shared/ops/neighborhood_attention.py", "_slabs", "x[heads * start :", "x[start :", "blocks"),
)
