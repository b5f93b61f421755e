"""Where the rows of a mixture of experts are."""

import importlib

import torch

from tests.ops.common import errors_in, on_cpu
from tests.ops.generated import generated


def chosen(pairs, experts, absent=0.2, seed=0):
    """Experts of pairs, of which a share are none: ids next to the range, and far from it."""
    generator = torch.Generator().manual_seed(seed)
    expert = torch.randint(0, experts, (pairs,), generator=generator)
    none = torch.tensor([-1, experts, -(2**40), 2**40, 2**32, experts + 3])
    others = none[torch.randint(0, len(none), (pairs,), generator=generator)]
    return torch.where(torch.rand(pairs, generator=generator) < absent, others, expert)


def sorted_pairs(expert, experts):
    """(order, position, ends) of a list of ids, one pair after the other."""
    rows: list = [[] for _ in range(experts)]
    for pair, e in enumerate(expert):
        if 0 <= e < experts:
            rows[e].append(pair)
    order = [pair for of_expert in rows for pair in of_expert]
    position = {pair: row for row, pair in enumerate(order)}
    ends = torch.tensor([len(of_expert) for of_expert in rows]).cumsum(0).tolist()
    order += [pair for pair, e in enumerate(expert) if not 0 <= e < experts]
    return order, [position.get(pair, len(expert)) for pair in range(len(expert))], ends


def check_route(ops, device, tokens, experts, top_k, absent=0.2):
    """Every pair has the row that a stable sort gives it, however the ids lie in memory."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.routing")
    expert = chosen(tokens * top_k, experts, absent).view(tokens, top_k)
    order, position, ends = sorted_pairs(expert.flatten().tolist(), experts)
    plain = expert.to(device)
    every_second = torch.stack((plain, plain), -1)[..., 0]
    columns_first, at_odd_address = plain.t().contiguous().t(), torch.cat((plain.flatten()[:1], plain.flatten()))[1:].view(plain.shape)
    for ids in (plain, every_second, columns_first, at_odd_address):
        found = module.route(ids, experts)
        assert found.order.dtype == torch.int64 and found.position.dtype == found.ends.dtype == torch.int32
        assert found.position.shape == expert.shape
        assert found.ends.tolist() == ends, "ends"
        assert found.order.tolist() == order, "order"
        assert found.position.flatten().tolist() == position, "position"


def check_row_blocks(ops, device, counts, height, absent=0):
    """Every row of an expert is in one block, the blocks of an expert lie side by side, and the surplus ones are empty."""
    module = importlib.import_module(f"{ops.__name__}.shared.ops.routing")
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows = int(ends[-1]) + absent
    blocks, stops = module.row_blocks(ends.to(device), rows, height)
    assert blocks.dtype == stops.dtype == torch.int32
    assert blocks.shape == (3, -(-rows // height) + len(counts))
    expected, expected_stops, end = [], [], 0
    for number, count in enumerate(counts):
        expected += [(number, first, end + count) for first in range(end, end + count, height)]
        end += count
        expected_stops.append(len(expected))
    found = list(zip(*blocks.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert all(0 <= number < len(counts) and first >= last for number, first, last in found[len(expected) :])
    assert stops.tolist() == expected_stops


# On both sides of a chunk of pairs, of a tile of chunks, and of what the kernels have room for; 600 experts are more.
CASES = (
    dict(tokens=1, experts=1, top_k=1),
    dict(tokens=64, experts=128, top_k=2),
    dict(tokens=43, experts=100, top_k=3),
    dict(tokens=33, experts=129, top_k=4),
    dict(tokens=40, experts=512, top_k=10),
    dict(tokens=9, experts=5, top_k=2, absent=1.0),
    dict(tokens=420, experts=257, top_k=10, absent=0.0),
    dict(tokens=17, experts=600, top_k=2),
)
BLOCKS = (
    dict(counts=[3, 0, 130, 1], height=32),
    dict(counts=[0, 0, 256, 0], height=128, absent=70),
    dict(counts=[0], height=128, absent=3),
    dict(counts=[(7 * i) % 90 for i in range(200)], height=64),
    dict(counts=[1] * 600, height=16),
)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "route": on_cpu(check_route, 90, 40, 3),
    "route_many": on_cpu(check_route, 420, 257, 10),
    "blocks": on_cpu(check_row_blocks, [3, 0, 130, 1], 32, 5),
    "blocks_many": on_cpu(check_row_blocks, [(7 * i) % 90 for i in range(130)], 32),
}
MUTANTS = [
    *generated("kernel_src/routing.py", "blocks", "expert_blocks"),
    *generated("kernel_src/routing.py", "route", "expert_order goes_to"),
    *generated("kernel_src/routing.py", "route_many", "expert_sums"),
    *generated("shared/ops/routing.py", "blocks", "row_blocks_reference", kernels=False),
    *errors_in("kernel_src/routing.py", "route", "expert_counts", ("(chunk, ct.arange", "(0, ct.arange")),
    *errors_in("shared/ops/routing.py", "route", "route", ("-(-rows // chunk)", "rows // chunk")),
    *errors_in("shared/ops/routing.py", "route", "route_reference",
         ("position[order] =", "position[:] ="),
         ("right=True", "right=False"),
         ("flat < experts, position", "flat <= experts, position"),
         ("stable=True", "stable=True, descending=True"), kernels=False),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
GPU_TESTS = {"routing": ("test_routes", "test_blocks_of_rows")}
