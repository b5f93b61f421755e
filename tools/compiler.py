"""One cubin: Tile IR bytecode from a variant of kernel_src, a cubin of it from tileiras, kept in .cache by what went into it."""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tools.targets import BuildError

if TYPE_CHECKING:
    from kernel_src.prebuild import Variant


ROOT = Path(__file__).resolve().parent.parent

CACHE = ROOT / ".cache" / "cubins"


@dataclass(frozen=True, eq=False)
class Job:
    """One cubin to make."""

    operation: str
    variant: "Variant"
    bytecode: bytes
    host: str
    architecture: str

    def flags(self) -> list[str]:
        """What the compiler is told beside the bytecode."""
        return ["--gpu-name", self.architecture, "-O3", "--host-arch", self.host, "--host-os", "linux"]

    def key(self, compiler: str) -> str:
        parts = (compiler, *self.flags(), hashlib.sha256(self.bytecode).hexdigest())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_tileiras() -> str:
    """The compiler: from the package nvidia-cuda-tileiras, or on the PATH. Raises BuildError."""
    try:
        for file in metadata.files("nvidia-cuda-tileiras") or ():
            if file.name == "tileiras":
                return str(file.locate())
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("tileiras")
    if found is None:
        raise BuildError("the compiler tileiras was not found. Install it with: pip install 'cuda-tile[tileiras]'")
    return found


def compiler_files(tileiras: str) -> list[Path]:
    """The compiler, and the ptxas and the libnvvm that it calls: beside it, in CUDA_HOME or CUDA_PATH, or on the PATH."""
    folder = Path(tileiras).resolve().parent
    roots = [folder.parent, *(Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))]
    libraries = ("lib/libnvvm.so.4", "nvvm/lib64/libnvvm.so", "nvvm/lib64/libnvvm.so.4")
    candidates = [Path(tileiras), *(root / name for root in roots for name in ("bin/ptxas", *libraries))]
    found = [path for path in (folder / "ptxas", *candidates) if path.is_file()]
    if not any(path.name == "ptxas" for path in found):
        found += [Path(path) for path in [shutil.which("ptxas")] if path]
    return list(dict.fromkeys(path.resolve() for path in found))


@functools.cache
def compiler_version(tileiras: str) -> str:
    """`13.4.92-8733d2ef6ae2` or the like, a part of every cubin's key: the version, and a digest of `compiler_files`.

    Each of them is a package of its own, and another ptxas makes other cubins of the same kernels.
    """
    text = subprocess.run([tileiras, "--version"], capture_output=True, text=True, check=True).stdout
    version = next((word.lstrip("V").rstrip(",") for word in text.split() if word.startswith("V") and word[1:2].isdigit()), text)
    content = hashlib.sha256()
    for path in compiler_files(tileiras):
        with path.open("rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    return f"{version}-{content.hexdigest()[:12]}"


def compiler_identity() -> dict[str, str]:
    """What the manifest says of the front end and of the compiler. Raises BuildError."""
    return {"cuda-tile": metadata.version("cuda-tile"), "tileiras": compiler_version(find_tileiras())}


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """Bytecode without the paths and line numbers of the sources, so that a moved clone or another comment compiles nothing again.

    The front end can leave them out, but `export_kernel` has no option for it. The cubins are the same bytes with and without.
    """
    from cuda.tile import _compile

    original = _compile._get_bytecode
    _compile._get_bytecode = lambda *args, **options: original(*args, **{**options, "anonymize_debug_info": True})
    try:
        yield
    finally:
        _compile._get_bytecode = original


def export(variant: "Variant") -> bytes:
    """Tile IR bytecode of a variant, the same for all architectures. Raises BuildError with the front end's message."""
    from cuda.tile.compilation import export_kernel

    out = io.BytesIO()
    try:
        with without_locations():
            export_kernel(variant.hinted_kernel(), [variant.signature()], out, gpu_code=None, output_format="tileir_bytecode")
    except Exception as error:
        raise BuildError(f"{variant.name}: {error}") from error
    return out.getvalue()


def compile_image(job: Job, tileiras: str, compiler: str) -> bytes:
    """The cubin of a job, from the cache or from the compiler. Raises BuildError."""
    kept = CACHE / f"{job.key(compiler)}.cubin"
    if kept.exists():
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "kernel.tileirbc", Path(folder) / "kernel.cubin"
        source.write_bytes(job.bytecode)
        done = subprocess.run([tileiras, source, "-o", output, *job.flags()], capture_output=True, text=True)
        if done.returncode or not output.exists():
            message = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            raise BuildError(f"{job.variant.name} for {job.architecture} on {job.host}: {message}")
        image = output.read_bytes()
    write_atomically(kept, image)
    return image


UMASK = os.umask(0)  # can only be read by setting it, and threads write files later
os.umask(UMASK)


def write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o666 & ~UMASK)  # a temporary file is its maker's alone
    os.replace(file.name, path)
