"""What to prebuild: a kernel, the promises about its arrays, its constants and its hints.

A `Variant` is one kernel compiled once for each architecture. Its array parameters carry *promises* (a row length, a
divisible stride, an aligned address). The compiler turns a promise into wider loads and fewer instructions, and nothing
in the driver checks it, so the same promises are written into the manifest and the launcher checks them before each launch.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import ArrayConstraint, CallingConvention, ConstantConstraint, KernelSignature, ScalarConstraint

VECTOR_BYTES = 16  # the widest load of one thread; what `aligned` promises about addresses and strides

DTYPES = {
    "bfloat16": ct.bfloat16,
    "float16": ct.float16,
    "float32": ct.float32,
    "float8_e4m3fn": ct.float8_e4m3fn,
    "int32": ct.int32,
    "int64": ct.int64,
}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int32": 4, "int64": 8}

FLOATS = ("bfloat16", "float16", "float32")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "e4m3", "int32": "i32", "int64": "i64"}

# Architectures on which nothing was measured; sm_90 is the H200's. There, further variants with the same promises compete with the
# one that is listed first, and `warmup_all_kernels` times them on the user's GPU (runtime/tuning.py). Every candidate costs a cubin
# for each architecture, so they are few, and in bf16 only.
UNMEASURED = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


@dataclass(frozen=True)
class Array:
    """An array parameter and what is promised about it.

    dtype: element type, a key of `DTYPES`.
    shape: one entry a dimension: a length that is promised, or None for any length.
    aligned: the address and every stride but the last are divisible by 16 bytes, and the last stride is 1.
        Without it only the last stride is promised (1), which every tensor that the operations pass has.
    divisible: one entry a dimension: the length is promised to be a multiple of it.
    at_least, at_most: one entry a dimension: the shortest and the longest length (None for any). The compiler does not need them, the
        kernel's own indices do.
    """

    dtype: str
    shape: tuple[int | None, ...]
    aligned: bool = True
    divisible: tuple[int, ...] = ()
    at_least: tuple[int, ...] = ()
    at_most: tuple[int | None, ...] = ()

    @property
    def vector(self) -> int:
        """Elements in one 16-byte load."""
        return VECTOR_BYTES // ITEM_BYTES[self.dtype]

    def describe(self) -> dict[str, Any]:
        """The promises as the manifest holds them (lengths and strides in elements, `align` in bytes)."""
        ndim = len(self.shape)
        step = self.vector if self.aligned else 1
        return {
            "kind": "array",
            "dtype": self.dtype,
            "align": VECTOR_BYTES if self.aligned else ITEM_BYTES[self.dtype],
            "shape": list(self.shape),
            "shape_divisible": list(self.divisible or (1,) * ndim),
            "shape_min": list(self.at_least or (1,) * ndim),
            **({"shape_max": list(self.at_most)} if self.at_most else {}),
            "stride": [None] * (ndim - 1) + [1],
            "stride_divisible": [step] * (ndim - 1) + [1],
        }

    def constraint(self) -> ArrayConstraint:
        d = self.describe()
        return ArrayConstraint(
            DTYPES[self.dtype],
            len(self.shape),
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=d["stride"],
            shape_constant=d["shape"],
            stride_divisible_by=d["stride_divisible"],
            shape_divisible_by=d["shape_divisible"],
            base_addr_divisible_by=d["align"],
        )


@dataclass(frozen=True)
class Scalar:
    """A run-time number: nothing is compiled for its value."""

    dtype: str

    def describe(self) -> dict[str, Any]:
        return {"kind": "scalar", "dtype": self.dtype}

    def constraint(self) -> ScalarConstraint:
        return ScalarConstraint(DTYPES[self.dtype])


FLOAT = Scalar("float32")
INT = Scalar("int32")


Params = dict[str, Array | Scalar | int]  # what a variant's parameters are, by name


@dataclass(frozen=True)
class PerArchitecture:
    """A hint that depends on the architecture: `default`, and another value on one."""

    default: int
    architecture: str
    value: int

    def __str__(self) -> str:
        return f"{self.default}.{self.architecture}_{self.value}"

    def by_target(self) -> ct.ByTarget:
        return ct.ByTarget(default=self.default, **{self.architecture: self.value})


@dataclass(frozen=True)
class Variant:
    """One kernel with its promises, constants and hints.

    kernel: the `ct.kernel` function. Its name is the kernel's name in the manifest.
    params: for each parameter of the function, in order, an `Array`, a `Scalar`, or the value of a `ct.Constant`.
    hints: compiler hints that replace those of the decorator (`occupancy`, `num_worker_warps`, ...): ints or `PerArchitecture`.
    targets: the architectures that get this variant, e.g. ("sm_90",); empty for all.
    spills: why this variant may spill registers, and on which architectures that was accepted; a spill without a reason fails the
        build, and so does a reason without a spill.

    Variants of one kernel that take the same arguments are listed with the preferred one first. Those whose promises are the very
    same compete where a GPU's own measurement decides: see `UNMEASURED`.
    """

    kernel: ct.kernel
    params: Mapping[str, Array | Scalar | int]
    hints: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    spills: str = ""

    def __post_init__(self) -> None:
        names = list(inspect.signature(self.kernel._pyfunc).parameters)
        if list(self.params) != names:  # constants in another order would be taken for each other
            raise ValueError(f"params of {self.kernel_name} are {', '.join(self.params)}, expected {', '.join(names)}, in this order")

    @property
    def kernel_name(self) -> str:
        return self.kernel._pyfunc.__name__

    @property
    def name(self) -> str:
        """A readable name, unique in the package: kernel, dtypes (u: unaligned), constants, hints."""
        arrays = [p for p in self.params.values() if isinstance(p, Array)]
        parts = [self.kernel_name, ".".join(SHORT[a.dtype] + ("" if a.aligned else "u") for a in arrays)]
        parts += [f"{k}{v}" for k, v in self.params.items() if isinstance(v, int)]
        lengths = sorted({n for a in arrays for n in a.shape if n is not None})
        parts += ["x".join(map(str, lengths))] if lengths else []
        parts += [f"{k}{v}" for k, v in sorted(self.hints.items())]
        return "-".join(parts)

    @property
    def symbol(self) -> str:
        return "bastile_" + self.kernel_name

    @property
    def waits(self) -> bool:
        """Whether the kernel itself waits for the launch before it (`ct.grid_dependency_control_wait` in its own body), so that its blocks
        may start while that one's last blocks run. What it reads before it waits must be older than the launch before it."""
        return "grid_dependency_control_wait" in self.kernel._pyfunc.__code__.co_names

    def hinted_kernel(self) -> ct.kernel:
        hints = {k: v.by_target() if isinstance(v, PerArchitecture) else v for k, v in self.hints.items()}
        return self.kernel.replace_hints(**hints) if hints else self.kernel

    def signature(self) -> KernelSignature:
        constraints = [
            ConstantConstraint(p) if isinstance(p, (bool, int)) else p.constraint() for p in self.params.values()
        ]
        return KernelSignature(constraints, CallingConvention.cutile_python_v2(), symbol=self.symbol)

    def describe(self) -> dict[str, Any]:
        """The manifest's entry for this variant, without the compiled images."""
        return {
            "name": self.name,
            "symbol": self.symbol,
            "parameters": [{"name": k, **p.describe()} for k, p in self.params.items() if not isinstance(p, (bool, int))],
            "constants": {k: p for k, p in self.params.items() if isinstance(p, (bool, int))},
            **({"waits": True} if self.waits else {}),
        }
