"""The operations, one file each: checks, autograd, what a tracer sees, and the same in plain PyTorch."""
