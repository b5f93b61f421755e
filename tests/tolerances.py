"""The one table of tolerances: the largest relative error ||found - exact|| / ||exact|| against float64.

A row, which is a vector along the last dimension, may err by ROW times as much, of its own norm or of the average row's where that is
larger: few wrong numbers in a large tensor hide in its norm.

bf16 rounds to 8 bits: a result that is rounded once has an error of 1.7e-3, and one that was made from a rounded intermediate
(as Qwen3 itself does it) about 2.4e-3. fp16 has 11 bits, fp32 24.
"""

import torch

RELATIVE_ERROR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5, torch.float64: 1e-12}
ROW = 4.0


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact|| in float64; infinite when found is not finite where exact is."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    assert found.shape == exact.shape, f"shape {list(found.shape)}, expected {list(exact.shape)}"
    if exact.numel() == 0:
        return 0.0
    if not torch.isfinite(found).all():
        return float("inf")
    scale = exact.norm()
    return float((found - exact).norm() / scale) if scale > 0 else float(found.norm())


def row_error(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, int]:
    """The largest error of a row in the norm of that row or of the average one, and which row it is; 0 where there is one row."""
    if exact.dim() < 2 or exact.numel() == 0 or exact.numel() == exact.shape[-1]:
        return 0.0, 0
    found, exact = (tensor.detach().double().cpu().reshape(-1, exact.shape[-1]) for tensor in (found, exact))
    scale = exact.norm(dim=1).clamp(min=float(exact.norm()) / exact.shape[0] ** 0.5)
    errors = (found - exact).norm(dim=1) / scale.where(scale > 0, torch.ones_like(scale))
    worst = int(errors.argmax())
    return float(errors[worst]), worst


def assert_close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, what: str = "result", factor: float = 1.0) -> None:
    """Fails with the worst element when the relative error of the whole or of a row exceeds the table's for `dtype` times `factor`."""
    error, bound = relative_error(found, exact), RELATIVE_ERROR[dtype] * factor
    of_row, row = row_error(found, exact) if error <= bound else (0.0, 0)
    if error <= bound and of_row <= ROW * bound:
        return
    difference = (found.detach().double().cpu() - exact.detach().double().cpu()).abs()
    if error <= bound:
        difference, what = difference.reshape(-1, exact.shape[-1]), f"row {row} of {what}"
        found, exact = (tensor.detach().reshape(-1, exact.shape[-1])[row] for tensor in (found, exact))
        difference, error, bound = difference[row], of_row, ROW * bound
    worst = int(difference.flatten().nan_to_num(nan=float("inf")).argmax())
    raise AssertionError(
        f"{what} in {dtype}: relative error {error:.2e}, expected at most {bound:.1e}; worst at flat index {worst}: "
        f"{found.flatten()[worst].item():.6g}, expected {exact.flatten()[worst].item():.6g}"
    )
