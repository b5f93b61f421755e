"""What every package ships, mounted as `<package>.shared`: the part that knows transformers (`hf`), the operations (`ops`), and what loads
and launches their kernels (`runtime`). Imports go that way only, and none goes back to a package, but for `_ops`, which a build makes.
"""
