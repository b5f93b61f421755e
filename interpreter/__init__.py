"""A tile interpreter: cuTile kernels on the CPU, with torch tensors in place of tiles, checking what a GPU does not check.

    interpret(kernel, grid, args)        # as ct.launch(stream, grid, kernel, args), on CPU tensors

It calls the kernel's own Python function, so a failure shows the kernel's line, and a breakpoint in a kernel works. What it
rounds, promotes and forbids follows cuTile 1.7; what it cannot know is how fast a kernel is, and the last bits of exp2 and sums.

Known differences from the compiler: a Python number that a loop carries (`x = 2.0` before a loop that assigns x) becomes a
float32 or int32 scalar there, and here stays a number that takes the dtype of the other operand; types are checked only where
a block passes; an undecorated helper reached through a module (`helpers.f(x)`) keeps Python's own range, min and max. Compiling
every variant finds the first two; `@ct.function` on the helper cures the third.

Not implemented: arithmetic on float8 (cuTile has none either), float4, mma_scaled, foreign pointers, dtype constructors
(`ct.int32(x)`; use ct.astype), directed rounding modes, acquire and release by a whole tile of atomics (taken as relaxed).
flush_to_zero is ignored.
"""

from .launch import interpret
from .tiles import InterpreterError

__all__ = ["interpret", "InterpreterError"]
