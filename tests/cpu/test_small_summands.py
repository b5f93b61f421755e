"""A bias, an adapter and a branch beside the MLP count where they are below the last place of the residual stream: each row rounds its sum
up or down, so they are there on average. Added to a sum that has been rounded they are lost in every row."""

import importlib

import pytest
import torch

from tests.ops.common import BF16, randn

TOKENS, HIDDEN, INNER = 4096, 32, 48
SMALL = 0.1  # beside a stream of 64 to 128, whose neighbours in bf16 are 0.5 apart


@pytest.mark.parametrize("tile", (0, 1024))
@pytest.mark.parametrize("what", ("bias", "adapter", "adapter's bias", "beside", "beside, bias"))
def test_on_average_the_sum_is_exact(bastile, what, tile):
    decoder = f"{bastile.__name__}.shared.decoder"
    nodes, projection, spec = (importlib.import_module(f"{decoder}.{name}") for name in ("nodes", "projection", "spec"))
    x = randn(TOKENS, HIDDEN, dtype=torch.float32, device="cpu")
    x = (x.clamp(-1, 1) * 60 + x.sign() * 66).to(BF16)
    gate, up, down = (randn(*shape, dtype=BF16, device="cpu", seed=i, scale=HIDDEN**-0.5)
                      for i, shape in enumerate(((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)), 1))  # fmt: skip
    small = torch.full((HIDDEN,), SMALL, dtype=BF16)
    zeros = torch.zeros(1, INNER, dtype=BF16), torch.zeros(HIDDEN, 1, dtype=BF16)
    last = {
        "bias": projection.Projection(down, small),
        "beside": projection.Projection(down),
        "beside, bias": projection.Projection(down, torch.zeros_like(small)),
        "adapter": projection.Projection(down, None, torch.full((1, INNER), 0.05, dtype=BF16), small[:, None], None, 1.0),
        "adapter's bias": projection.Projection(down, None, *zeros, small, 1.0),
    }[what]
    norm = torch.ones(HIDDEN, dtype=BF16)
    mlp = [projection.Projection(gate), projection.Projection(up), last]
    beside = what.startswith("beside")
    attention = [projection.Projection(small[:, None])] * beside  # small for each token, whatever attention makes
    attended = torch.ones(TOKENS, 1, dtype=BF16) if beside else None
    found = nodes.norm_mlp(x, norm, attention + mlp, spec.Outputs(parallel=beside), attended, dtype=BF16, tile=tile).double()
    y = torch.nn.functional.rms_norm(x.double(), (HIDDEN,), norm.double(), 1e-6)
    hidden = torch.nn.functional.silu(y @ gate.double().T) * (y @ up.double().T)
    added = 0.05 * hidden.sum(-1, keepdim=True) * small.double() if what == "adapter" else small.double().expand(x.shape)
    error = found - (x.double() + hidden @ down.double().T + added)
    lost = float((error * added).sum() / added.square().sum())  # as a share of what was added, 1 for all of it
    assert abs(lost) < 0.1
