"""A package with tiny kernels, what compiles them, and its assembled build."""

import shutil
import subprocess

import pytest

from tests.building import KERNELS, QUIET, ROOT, copy_package, write
from tools import compile as compile_
from tools import compiler
from tools.assemble import assemble
from tools.kernel_package import read_package


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of cubins."""
    monkeypatch.setattr(compiler, "CACHE", tmp_path / "cache")
    return compiler.CACHE


@pytest.fixture
def called(monkeypatch):
    """The architectures that `compile_image` calls the compiler for, as it happens. (cuda.tile calls it once a process, too, to see which
    bytecode it takes.)"""
    calls, run = [], subprocess.run

    def counting(command, **options):
        if "--host-arch" in command:
            calls.append(command[command.index("--gpu-name") + 1])
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counting)
    return calls


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one operation, `tiny`, whose kernels `write` changes."""
    folder = tmp_path / "package"
    (folder / "torch-ext" / "qwen3").mkdir(parents=True)
    shutil.copy(ROOT / "build.toml", folder)
    (folder / "kernels.toml").write_text('operations = ["tiny"]\n')
    write(tmp_path, monkeypatch, KERNELS)
    return read_package(folder)


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """A copy of the package, compiled for two architectures of each host from two operations, and both variants of it."""
    folder = tmp_path_factory.mktemp("assembled")
    copy_package(folder)
    package = read_package(folder)
    (folder / "kernels.toml").write_text('operations = ["scale", "column_sum"]\n')
    compile_.build(package, {"x86_64": ("sm_80", "sm_90"), "aarch64": ("sm_90", "sm_121")}, **QUIET)
    for backend in ("cuda", "cpu"):
        assemble(package, backend)
    return package
