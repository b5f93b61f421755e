"""What runs fused, what does not and why, and whether it agrees with float64."""
