"""The bytes and the products of each kernel of the gated delta rule, counted, beside what the rule cannot do without."""

from collections import defaultdict

import pytest
import torch

from interpreter import reductions
from interpreter.backend import InterpreterBackend
from tests.ops import gated_delta_rule as rule
from tests.ops.common import BF16

TOKENS, KEY_HEADS, HEADS, WIDTH, CHUNK = 128, 1, 2, rule.WIDTH, 64
# Bytes of a token: a row of all key heads and of all value heads in bf16, a row of a chunk's square, and its share of a chunk's state.
KEY, VALUE, SQUARE, STATE = KEY_HEADS * WIDTH * 2, HEADS * WIDTH * 2, HEADS * CHUNK * 2, HEADS * WIDTH * WIDTH * 2 // CHUNK
BYTES = {
    "delta_place_keys": 4 * KEY,
    "delta_place_values": 2 * VALUE,
    "delta_invert_bounded": KEY + SQUARE,
    "delta_prepare": 2 * KEY + VALUE + SQUARE + 2 * VALUE + SQUARE,
    "delta_walk": 2 * KEY + 2 * VALUE + SQUARE + VALUE,
    "delta_states": KEY + 2 * VALUE + VALUE + STATE,
    "delta_reverse": 2 * KEY + VALUE + SQUARE + VALUE + VALUE + STATE,
    "delta_scores": 2 * KEY + 2 * VALUE + 2 * STATE + KEY + 2 * KEY,
    "delta_inverse": KEY + 2 * VALUE + SQUARE + STATE + 2 * KEY + KEY + VALUE,
}
# Multiplications of a token and value head: a product with the chunk's other tokens over the width (NEAR), and one with a state (FAR).
NEAR, FAR = CHUNK * WIDTH, WIDTH * WIDTH
SQUARES = 5 * 2 * CHUNK * CHUNK  # of the inverse: two for each of five sizes of its blocks
PRODUCTS = {
    "delta_invert_bounded": NEAR + SQUARES,
    "delta_prepare": 3 * NEAR,
    "delta_walk": 3 * FAR + NEAR,
    "delta_states": 2 * FAR,
    "delta_reverse": 3 * FAR + NEAR,
    "delta_scores": 2 * FAR + 3 * NEAR,
    "delta_inverse": FAR + 7 * NEAR + 2 * CHUNK * CHUNK,
}
# Where sums are made in parts, G is made by its rows, and again by its columns; A^T dN is made for dv, and again for dk.
IN_PARTS = {
    "delta_gates": (KEY + 2 * VALUE + SQUARE + STATE + SQUARE + VALUE, FAR + 6 * NEAR + 2 * CHUNK * CHUNK),
    "delta_keys": (KEY + 2 * SQUARE + VALUE + STATE + 2 * KEY + KEY, FAR + 3 * NEAR),
}
KERNELS = {"sm_90": {name: (BYTES[name], PRODUCTS.get(name, 0)) for name in BYTES}}
KERNELS["sm_80"] = KERNELS["sm_90"] | {"delta_scores": (BYTES["delta_scores"], PRODUCTS["delta_scores"] + NEAR)} | IN_PARTS
del KERNELS["sm_80"]["delta_inverse"]
FORWARD = ("delta_place_keys", "delta_place_values", "delta_invert_bounded", "delta_prepare", "delta_walk")
BACKWARD = ("delta_place_keys", "delta_place_values", "delta_prepare", "delta_states", "delta_reverse", "delta_scores", "delta_inverse")
# Read q, k, v, and write the output and the inverses, which the backward pass needs; there read these and the output's gradient.
FLOORS = {FORWARD: 2 * KEY + 2 * VALUE + SQUARE, BACKWARD: 4 * KEY + 3 * VALUE + SQUARE}
MOST = {FORWARD: 4.2, BACKWARD: 6.8}  # times the floor's bytes, for two value heads a key head


@pytest.fixture
def counted(monkeypatch):
    """[(kernel, bytes of the rows and states that it was given, multiplications)] of each launch, in order."""
    launches, products = [], [0]
    product, prepare = reductions._product, InterpreterBackend.prepare

    def counting_product(x, y, dtype):
        products[0] += x.data.numel() * y.data.shape[-1]
        return product(x, y, dtype)

    def counting_prepare(self, variant, device, grid, arrays, integers):
        launch, parameters = prepare(self, variant, device, grid, arrays, integers), self.artifacts.sources[variant.name].params.values()
        dtypes = [p.dtype for p in parameters if not isinstance(p, int) and p.describe()["kind"] == "array"]
        sizes = [
            torch.Size(shape).numel() * (2 if dtype == "bfloat16" else 4)
            for (shape, _), dtype in zip(arrays, dtypes, strict=True)
            if len(shape) > 2 and shape[0] > 1  # no gates, and no states that are not carried
        ]

        def counting(*given):
            before = products[0]
            launch(*given)
            launches.append((variant.name.partition("-")[0], sum(sizes), products[0] - before))

        return counting

    monkeypatch.setattr(reductions, "_product", counting_product)
    monkeypatch.setattr(InterpreterBackend, "prepare", counting_prepare)
    return launches


@pytest.mark.parametrize("gpu", KERNELS)
def test_bytes_and_products(interpreted, counted, gpu):
    leaves = [x[None].requires_grad_() for x in rule.inputs_of(BF16, "cpu", TOKENS, KEY_HEADS, HEADS, WIDTH)]
    with rule.kernels_of(interpreted, gpu):  # a launch that another test prepared is not counted
        out, _ = rule.module_of(interpreted).gated_delta_rule(*leaves, l2_norm=True)
        forward = len(counted)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert tuple(name for name, *_ in counted[:forward]) == FORWARD
    assert tuple(name for name, *_ in counted[forward:]) == (BACKWARD if gpu == "sm_90" else (*BACKWARD[:-1], *IN_PARTS))
    found = defaultdict(set)
    for name, size, count in counted:
        found[name].add((size / TOKENS, count / (TOKENS * HEADS)))
    assert found == {name: {work} for name, work in KERNELS[gpu].items()}


@pytest.mark.parametrize("kernels", (FORWARD, BACKWARD), ids=("forward", "backward"))
def test_bytes_beside_the_floor(kernels):
    """A kernel that is added, or reads more, shows here."""
    assert sum(BYTES[name] for name in kernels) <= MOST[kernels] * FLOORS[kernels]
