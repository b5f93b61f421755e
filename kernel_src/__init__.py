"""The cuTile kernels of every package, one module an operation, and beside each kernel what is prebuilt of it."""
