"""A package with tiny kernels, and what the tests of its build share."""

import importlib.util
import shutil
import sys
from pathlib import Path

from rich.console import Console

from tools import compiler, targets
from tools.compiler import Job

ROOT = Path(__file__).resolve().parents[1]

ONE = {"x86_64": ("sm_90",)}

QUIET = {"console": Console(quiet=True), "workers": 2}

KERNELS = """
import cuda.tile as ct
from kernel_src.prebuild import Array, Variant

Const = ct.Constant[int]


@ct.kernel
def first(x, TILE: Const):
    ct.scatter(x, ct.arange(TILE, dtype=ct.int32), ct.full((TILE,), 1.0, dtype=ct.float32), check_bounds=True)


@ct.kernel
def second(x, TILE: Const):
    ct.scatter(x, ct.arange(TILE, dtype=ct.int32), ct.full((TILE,), 2.0, dtype=ct.float32), check_bounds=True)


def variants():
    x = Array("float32", (None,))
    for tile in (64, 128):
        yield Variant(first, {"x": x, "TILE": tile})
        yield Variant(second, {"x": x, "TILE": tile})
"""


def write(tmp_path, monkeypatch, source):
    """Makes the source the module kernel_src.tiny."""
    path = tmp_path / "tiny.py"
    path.write_text(source)
    importlib.invalidate_caches()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    spec = importlib.util.spec_from_file_location("kernel_src.tiny", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_src.tiny", module)
    spec.loader.exec_module(module)
    return module


def variant_of(operation, name):
    """The first variant of an operation whose name starts so."""
    return next(variant for _, variant in targets.read_variants([operation]) if variant.name.startswith(name))


def image_of(variant, host="x86_64", architecture="sm_90"):
    tileiras = compiler.find_tileiras()
    job = Job("any", variant, compiler.export(variant), host, architecture)
    return compiler.compile_image(job, tileiras, compiler.compiler_version(tileiras))


def cubins_folder(package):
    return package.folder / "torch-ext" / "qwen3" / "cubins"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kept(cache):
    return {path.name: path.read_bytes() for path in cache.glob("*.cubin")}


def copy_package(folder):
    shutil.copy(ROOT / "build.toml", folder)
    shutil.copytree(ROOT / "torch-ext", folder / "torch-ext", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
