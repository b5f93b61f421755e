"""Eight-bit floats: tiles that are loaded, stored and converted, and nothing else, as cuTile has them."""

import cuda.tile as ct
import pytest
import torch

from interpreter import interpret

KINDS = {torch.float8_e4m3fn: ct.float8_e4m3fn, torch.float8_e5m2: ct.float8_e5m2}
kinds = pytest.mark.parametrize("dtype", KINDS, ids=str)


@ct.kernel
def to_codes(x, y):
    ct.store(y, 0, ct.astype(ct.load(x, 0, 16), y.dtype))


@ct.kernel
def transposed(x, y):
    ct.store(y, (0, 0), ct.transpose(ct.load(x, (0, 0), (4, 8), padding_mode=ct.PaddingMode.ZERO)))


@ct.kernel
def doubled(x, y):
    codes = ct.load(x, 0, 16)
    ct.store(y, 0, codes + codes)


@kinds
def test_a_conversion_rounds_to_even_saturates_and_keeps_nan(dtype):
    top = torch.finfo(dtype).max
    small, large = [0.0, -0.0, 1.0625, 1.1875, -1.3], [top, -top, top * 1.01, top * 4, torch.inf, -torch.inf]
    x = torch.tensor([*small, *large, torch.nan, 2.0**-9, 1e-9, 3, 7])
    y = torch.zeros(16, dtype=dtype)
    interpret(to_codes, (1,), (x, y))
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.float().nan_to_num(), x.clamp(-top, top).to(dtype).float().nan_to_num())
    assert y[7:11].float().tolist() == [top, top, top, -top]


@kinds
def test_codes_go_back_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()][:240]
    for part in codes.split(16):
        x = torch.zeros(16)
        interpret(to_codes, (1,), (part.clone(), x))
        assert torch.equal(x, part.float())


@kinds
def test_tiles_of_codes_move_and_their_padding_is_zero(dtype):
    x, y = torch.randn(3, 8).to(dtype), torch.full((8, 4), torch.nan).to(dtype)
    interpret(transposed, (1,), (x, y))
    assert torch.equal(y[:, :3].view(torch.int8), x.t().contiguous().view(torch.int8))
    assert not y[:, 3].float().any()


@kinds
def test_codes_have_no_arithmetic(dtype):
    x = torch.ones(16).to(dtype)
    with pytest.raises(Exception, match="float8|dtype|implement"):
        interpret(doubled, (1,), (x, torch.zeros(16).to(dtype)))
