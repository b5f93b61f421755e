"""The one table of tolerances: the largest relative error ||found - exact|| / ||exact|| against float64.

bf16 rounds to 8 bits: a result that is rounded once has an error of 1.7e-3, and one that was made from a rounded intermediate
(as Qwen3 itself does it) about 2.4e-3. fp16 has 11 bits, fp32 24.
"""

import torch

RELATIVE_ERROR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5, torch.float64: 1e-12}


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


def assert_close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, what: str = "result", factor: float = 1.0) -> None:
    """Fails with the worst element when the relative error exceeds the table's for `dtype` times `factor`."""
    error, bound = relative_error(found, exact), RELATIVE_ERROR[dtype] * factor
    if error <= bound:
        return
    difference = (found.detach().double().cpu() - exact.detach().double().cpu()).abs().flatten()
    worst = int(difference.nan_to_num(nan=float("inf")).argmax())
    raise AssertionError(
        f"{what} in {dtype}: relative error {error:.2e}, expected at most {bound:.1e}; worst at flat index {worst}: "
        f"{found.flatten()[worst].item():.6g}, expected {exact.flatten()[worst].item():.6g}"
    )
