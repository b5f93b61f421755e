"""The products of projections in eight bits, in a forward and a backward pass."""

import importlib

import torch

from tests.ops.common import BF16, errors_in, on_cpu
from tests.ops.generated import generated

LEAST, MOST = 27.0, 40.0  # dB of a product in e4m3 beside float64; what is beyond was not multiplied in eight bits


def decibels(found, exact):
    return float(20 * torch.log10(exact.norm() / (found.double() - exact).norm()))


def like_a_large_model(tokens, hidden, inner, device):
    """(x, weight, dy) of three projections: channels of the residual stream that stick out, a first token that does, SwiGLU's massive
    activations and its heavy tails, losses of tokens that differ by orders."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    channels = torch.exp(0.5 * normal(hidden))
    channels[:4] *= 40
    x = normal(tokens, hidden) * channels
    x[0] *= 30
    normed = x / x.square().mean(1, keepdim=True).sqrt() * (1 + 0.5 * normal(hidden)).abs()
    gate, up = normal(tokens, inner) * 2 * torch.exp(0.3 * normal(inner)), normal(tokens, inner) * torch.exp(0.3 * normal(inner))
    activated = torch.nn.functional.silu(gate) * up
    activated[0, :3] = torch.tensor([900.0, -1500.0, 400.0])
    losses = torch.exp(1.5 * normal(tokens, 1))
    dout = normal(tokens, hidden) * losses * torch.exp(0.5 * normal(hidden)) * 1e-5
    dinner = normal(tokens, inner) * losses * normal(tokens, inner).square() * 1e-5
    attended = normal(tokens, hidden) * torch.exp(0.7 * normal(hidden))

    def weight(rows, columns):
        return normal(rows, columns) / columns**0.5 * torch.exp(0.2 * normal(rows, 1))

    found = (normed, weight(inner, hidden), dinner), (activated, weight(hidden, inner), dout), (attended, weight(hidden, hidden), dout)
    return [[tensor.to(device, BF16) for tensor in each] for each in found]


def products_of(ops, x, weights, dy, bias=None, whole=None, out=None):
    """(y, dx, dw of all weights) of projections of one input. whole: the weights, where they lie side by side; out: where y goes."""
    names = ("decoder.projection", "decoder.eight_bits", "ops.quantised")
    projection, module, quantised = (importlib.import_module(f"{ops.__name__}.shared.{name}") for name in names)
    group = projection.Group([projection.Projection(weight) for weight in weights], BF16, eight=True)
    forward = module.EightBits(group, weights, whole)
    y = torch.cat(forward.forward(x, bias, True, out), 1)
    forward.begin(quantised.quantise_rows(x))
    assert torch.equal(torch.cat(forward.forward(x[:0], bias, True, out), 1).nan_to_num(), y.nan_to_num()), "of codes"
    finish = module.EightBits(group, weights, whole)
    finish.scales = forward.scales
    assert torch.equal(torch.cat(finish.forward(quantised.quantise_rows(x).codes, bias, True, out), 1).nan_to_num(), y.nan_to_num())
    apart = torch.cat(forward.forward(x, bias, False, None), 1)
    assert torch.equal(apart.nan_to_num(), y.nan_to_num()), "products of their own"
    assert out is None or torch.equal(out, y)
    wanted, found = [True] * len(weights), []
    for of_dy in (dy, quantised.quantise_rows(dy)):
        backward = module.EightBits(group, weights, whole)
        backward.scales = forward.scales
        dx = backward.input_gradient(of_dy, weights_follow=True)
        found.append((dx, torch.cat(backward.weight_gradients(of_dy, x, wanted))))
        assert backward._dy is None, "codes are kept"
        dw = torch.cat(backward.weight_gradients(of_dy, x, wanted))
        found.append((backward.input_gradient(of_dy), dw))
        assert backward._dy is None, "codes are kept"
    for each in found[1:]:
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[0], each, strict=True))
        assert same, "of codes, or in another order"
    return y, *found[0]


def check_products(ops, device, tokens, which, bias=False):
    hidden = 128 if torch.device(device).type == "cpu" else 512  # a CPU multiplies scaled tensors number by number
    x, weight, dy = like_a_large_model(tokens, hidden, 2 * hidden, device)[which]
    x = x * 2.0**24  # so that a scale of another factor would not do
    offset = weight[:, 3] * 2.0**29 if bias else None
    found = products_of(ops, x, [weight], dy, offset)
    exact = x.double() @ weight.double().t(), dy.double() @ weight.double(), dy.double().t() @ x.double()
    if offset is not None:
        exact = exact[0] + offset.double(), *exact[1:]
    for name, mine, wanted in zip(("y", "dx", "dw"), found, exact, strict=True):
        assert mine.dtype == BF16 and mine.is_contiguous()
        assert LEAST <= decibels(mine, wanted) < (MOST + 20 * bias), f"{name}: {decibels(mine, wanted):.1f} dB"


def check_parts(ops, device):
    """Several projections of one input, side by side in memory or not, have the bits of one with all rows."""
    x, weight, dy = like_a_large_model(48, 64, 256, device)[0]
    expected = products_of(ops, x, [weight], dy)
    parts, bias = list(weight.split([128, 96, 32])), weight[:, 0].contiguous()
    biased = products_of(ops, x, [weight], dy, bias)
    assert not torch.equal(biased[0], expected[0])
    for wanted, options in ((expected, {}), (expected, {"whole": weight}), (expected, {"out": torch.empty_like(expected[0])}),
                            (biased, {"bias": bias})):  # fmt: skip
        for one, other in zip(products_of(ops, x, [part.clone() for part in parts], dy, **options), wanted, strict=True):
            assert torch.equal(one, other), options.keys()


def check_odd_inputs(ops, device):
    """A NaN and an infinity make NaN of their row of y, and of nothing else."""
    x, weight, _ = like_a_large_model(64, 128, 256, device)[0]
    dy = x[:, :1] * weight[:, 0]
    expected = products_of(ops, x, [weight], dy)[0]
    others = torch.arange(64, device=device) != 5
    for odd in (torch.nan, torch.inf, -torch.inf):
        wrong = x.clone()
        wrong[5, 7] = odd
        y = products_of(ops, wrong, [weight], dy)[0]
        assert y[5].isnan().all() and torch.equal(y[others], expected[others])


def check_odd_gradients(ops, device):
    """They are seen in their row of dx, and in the gradients of the weights."""
    x, weight, dy = like_a_large_model(64, 128, 256, device)[0]
    for odd in (torch.nan, torch.inf):
        wrong = dy.clone()
        wrong[5, 7] = odd
        _, dx, dw = products_of(ops, x, [weight], wrong)
        assert not dx[5].isfinite().any() and not dw[7].isfinite().any() and dx[6].isfinite().all()


def check_zero_rows(ops, device):
    """Tokens without a gradient, and those of padding, do not count for the scale of all."""
    x, weight, dy = like_a_large_model(64, 128, 256, device)[0]
    dy[32:], x[40:] = 0, 0
    y, dx, dw = products_of(ops, x, [weight], dy)
    assert decibels(dw, dy.double().t() @ x.double()) >= LEAST
    assert not y[40:].any() and not dx[32:].any()


def check_codes(ops, device):
    """Weights that are kept in codes: their numbers are near, and products of the codes have the bits of products of these numbers."""
    projection, quantised = (importlib.import_module(f"{ops.__name__}.shared.{name}") for name in ("decoder.projection", "ops.quantised"))
    x, weight, dy = like_a_large_model(48, 64, 256, device)[0]
    weight[128:224] *= 2.0**-5  # a scale of its own would be another one
    weight[7, 9] = -2.0 * weight.abs().max()
    for rows in ([256], [128, 96, 32]):
        parts = weight.split(rows)
        codes, scale = quantised.quantise_together(parts)
        kept = [projection.EightBitWeight(each.view(torch.uint8), scale) for each in codes]
        dense = [each.dense(BF16) for each in kept]
        for each, part, found in zip(codes, parts, dense, strict=True):
            assert torch.equal(found.double(), each.double() * scale.double()), "no number of bf16 is between two of these"
            error, exact = (found.double() - part.double()).abs(), part.double().abs()
            assert (error <= torch.maximum(exact * 2.0**-4, scale.double() * 2.0**-10)).all(), "more than half of the last bit is lost"
        expected, found = products_of(ops, x, dense, dy), products_of(ops, x, kept, dy)
        joined = products_of(ops, x, kept, dy, whole=torch.cat(codes))
        assert all(torch.equal(one, other) for each in (found, joined) for one, other in zip(each, expected, strict=True))
        assert LEAST <= decibels(found[1], dy.double() @ torch.cat(dense).double())
    # Scales that differ, as those of a checkpoint may, give the numbers and products that these stand for.
    alone = [quantised.quantise_together([part]) for part in parts]
    kept = [projection.EightBitWeight(codes[0], scale) for codes, scale in alone]
    assert len({float(scale) for _, scale in alone}) > 1
    dense = [each.dense(BF16) for each in kept]
    (expected, _, _), (y, dx, _) = products_of(ops, x, dense, dy), products_of(ops, x, kept, dy)
    assert torch.equal(y, expected) and LEAST <= decibels(dx, dy.double() @ torch.cat(dense).double())
    joined = products_of(ops, x, kept, dy, whole=torch.cat([each.codes for each in kept]))
    assert torch.equal(joined[0], y) and torch.equal(joined[1], dx)


# ---------------------------------------------------------------- planted errors
CHECKS = {
    "products_of_codes": on_cpu(check_codes),
    "products_in_eight_bits": on_cpu(check_products, 52, 0),
    "products_of_an_activation": on_cpu(check_products, 64, 1),
    "products_with_a_bias": on_cpu(check_products, 64, 2, True),
    "products_of_parts": on_cpu(check_parts),
    "products_of_odd_inputs": on_cpu(check_odd_inputs),
    "products_of_odd_gradients": on_cpu(check_odd_gradients),
    "products_of_zero_rows": on_cpu(check_zero_rows),
}
MUTANTS = [
    *generated("shared/decoder/eight_bits.py", "products_of_parts", "EightBits.forward", kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_codes", "_write_rows",
         ("out.scales.copy_(weight.scale)", "out.scales.fill_(1.0)"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_codes", "EightBits._scales_of_rows",
         ("weight.scale.expand", "self.weights[0].scale.expand"), kernels=False),
    *errors_in("shared/ops/quantised.py", "products_of_codes", "quantise_together",
         ("largest.amax", "largest.amin"),
         (".abs()", ""), kernels=False),
    *errors_in("shared/ops/quantised.py", "products_of_codes", "dense_of", (".mul_(scale)", ""), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_parts", "EightBits.begin",
         ("self._w.rows(start, start + weight.shape[0])", "self._w.rows(0, weight.shape[0])"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_in_eight_bits", "EightBits.begin",
         ("self._x.scales, self._w.scales", "self._x.scales, self._x.scales"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_parts", "EightBits.forward",
         ("True, bias, out)", "True, None, out)"),
         ("True, bias, out)", "True, bias, None)"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_in_eight_bits", "EightBits._of_gradient",
         ("found if again else None", "found"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_parts", "EightBits.input_gradient",
         ("Quantised(self._codes, scales)", "Quantised(self._codes, scales.flip(0))", "products_of_codes"),
         ("else scales.amax", "else self.scales[0].amax", "products_in_eight_bits"),
         (".amax(0, keepdim=True)", ".amin(0, keepdim=True)", "products_in_eight_bits"),
         ("found.codes, w.codes, found.scales, w.scales", "found.codes, w.codes, found.scales.amax(0, keepdim=True), w.scales[:1]",
          "products_in_eight_bits"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_of_parts", "EightBits._write_transposed",
         ("out.codes[:, start:stop]", "out.codes[:, : weight.shape[0]]"),
         ("[1][start:stop]", "[1][: weight.shape[0]]", "products_of_codes"), kernels=False),
    *errors_in("shared/decoder/eight_bits.py", "products_in_eight_bits", "EightBits.weight_gradients",
         ("self.scales[0])", "self.scales[1])"),
         ("quantise_transposed(x, x_top)", "quantise_transposed(x, dy_top)"),
         ("dy_top, x_top) if", "x_top, x_top) if"), kernels=False),
]  # fmt: skip
