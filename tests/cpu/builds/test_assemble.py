"""The assembly of a package: what ships, and what is refused."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.building import KERNELS, ONE, QUIET, ROOT, contents, copy_package, write
from tools import compile as compile_
from tools import compiler
from tools.assemble import assemble, sources
from tools.card import card_values
from tools.kernel_package import PackageError, package_folders, read_package
from tools.kernel_sources import source_digest
from tools.kernels_adapter import Build, Digest, DigestAlgorithm, Metadata

backends = pytest.mark.parametrize("backend", ("cuda", "cpu"))


def test_build_toml_is_what_kernels_expects():
    assert {str(backend) for backend in Build.open(ROOT).general.backends} == {"cuda", "cpu"}


@backends
def test_kernels_reads_the_metadata(assembled, backend):
    folder = assembled.build / f"torch-{backend}"
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("qwen3", 1, "MIT")
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    assert metadata.id.startswith(f"_qwen3_{backend}_") and metadata.id in (folder / "_ops.py").read_text()
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_what_build_toml_says_of_its_origin_is_kept(tmp_path):
    """In the metadata that `kernels` reads, and on the package's page."""
    copy_package(tmp_path)
    path = tmp_path / "build.toml"
    urls = {"upstream": "https://github.com/someone/kernels", "source": "https://github.com/someone/fork"}
    assert "upstream" not in path.read_text() and read_package(tmp_path).source is None
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    path.write_text(path.read_text().replace("\n[general.hub]", f"{lines}\n[general.hub]"))
    package = read_package(tmp_path)
    found = json.loads((assemble(package, "cpu") / "metadata.json").read_text())
    assert {name: found[name] for name in urls} == urls
    assert card_values(package)["upstream"] == urls["upstream"]


def test_the_architectures_are_those_that_were_built(assembled):
    archs = Metadata.read_from_file(assembled.build / "torch-cuda" / "metadata.json").backend.archs
    assert archs == ["8.0+PTX", "9.0a", "12.1a"]
    assert Metadata.read_from_file(assembled.build / "torch-cpu" / "metadata.json").backend.archs is None


def test_only_the_cuda_variant_has_kernels(assembled):
    cuda, cpu = (set(contents(assembled.build / f"torch-{backend}")) for backend in ("cuda", "cpu"))
    kernels = {"cubins/manifest.json"} | {f"cubins/{name}.cubins" for name in ("scale", "column_sum")}
    assert cuda - cpu == kernels and cpu < cuda


def test_every_file_has_an_extension_that_build_toml_names(assembled):
    allowed = {".py", ".json", ".cubins", ".typed"}
    for folder in package_folders(root=ROOT):
        pyext = tomllib.loads((folder / "build.toml").read_text())["torch-noarch"]["pyext"]
        assert {suffix[1:] for suffix in allowed} <= set(pyext)
    assert {Path(name).suffix for name in contents(assembled.build / "torch-cuda")} == allowed


@backends
def test_two_assemblies_are_the_same_bytes(assembled, tmp_path, backend):
    first = contents(assembled.build / f"torch-{backend}")
    shutil.copytree(assembled.folder, tmp_path / "elsewhere", symlinks=True, ignore=shutil.ignore_patterns("build"))
    again = assemble(read_package(tmp_path / "elsewhere"), backend)
    assert contents(again) == first
    assert contents(assemble(assembled, backend)) == first


def test_another_source_is_another_build(assembled, tmp_path):
    copy_package(tmp_path)
    ids = set()
    for text in ("", "# changed\n"):
        with (tmp_path / "torch-ext" / "qwen3" / "layers.py").open("a") as file:
            file.write(text)
        ids.add(Metadata.read_from_file(assemble(read_package(tmp_path), "cpu") / "metadata.json").id)
    assert len(ids) == 2


def test_a_cuda_variant_without_kernels_is_refused(tmp_path):
    copy_package(tmp_path)
    with pytest.raises(PackageError, match="has no manifest.json: compile the kernels first"):
        assemble(read_package(tmp_path), "cuda")


def test_kernels_older_than_their_source_are_not_assembled(cache, package, tmp_path, monkeypatch):
    """By what they are made of, not by the time of a file: a comment or a docstring makes no kernel older."""
    compile_.build(package, ONE, **QUIET)
    ignored = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(ROOT / "torch-ext" / "qwen3", package.sources, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    assemble(package, "cuda")
    write(tmp_path, monkeypatch, '"""A docstring."""\n# a comment\n' + KERNELS)
    assemble(package, "cuda")
    write(tmp_path, monkeypatch, KERNELS.replace("2.0", "3.0"))
    with pytest.raises(PackageError, match="source of tiny in kernel_src has changed since; compile the kernels first .make build"):
        assemble(package, "cuda")
    compile_.build(package, ONE, **QUIET)
    assemble(package, "cuda")
    with monkeypatch.context() as other:
        other.setattr(compiler, "compiler_version", lambda tileiras: "99.9")
        with pytest.raises(PackageError, match="was compiled by .*99.9.* is installed; compile"):
            assemble(package, "cuda")
    (package.folder / "kernels.toml").write_text('operations = ["tiny", "scale"]\n')
    with pytest.raises(PackageError, match="kernels.toml differ in scale; compile"):
        assemble(package, "cuda")


def test_a_change_of_what_a_kernel_imports_is_a_change_of_the_kernel(tmp_path, monkeypatch):
    """swiglu.sigmoid is a part of the experts' kernels, and nothing of the scale's."""
    operations = ("experts", "clamped_gate", "scale")
    before = {name: source_digest(name) for name in operations}
    (tmp_path / "swiglu.py").write_text((ROOT / "kernel_src" / "swiglu.py").read_text() + "\nOTHER = 1\n")
    spec = importlib.util.spec_from_file_location("kernel_src.swiglu", tmp_path / "swiglu.py")
    monkeypatch.setitem(sys.modules, "kernel_src.swiglu", importlib.util.module_from_spec(spec))
    assert [source_digest(name) == before[name] for name in operations] == [False, False, True]


@pytest.mark.parametrize("damage", ("another image", "a file more", "a file less", "no manifest", "half a manifest"))
def test_damaged_kernels_are_not_assembled(assembled, tmp_path, damage):
    shutil.copytree(assembled.folder, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("build"))
    cubins = tmp_path / "copy/torch-ext/qwen3/cubins"
    image = cubins / "scale.cubins"
    {
        "another image": lambda: image.write_bytes(b"?"),
        "a file more": lambda: (cubins / "other.cubins").write_bytes(b"?"),
        "a file less": image.unlink,
        "no manifest": (cubins / "manifest.json").unlink,
        "half a manifest": lambda: (cubins / "manifest.json").write_text((cubins / "manifest.json").read_text()[:1000]),
    }[damage]()
    with pytest.raises(PackageError, match="compile the kernels first"):
        assemble(read_package(tmp_path / "copy"), "cuda")


def test_a_variant_of_more_than_20_mib_is_refused(assembled, tmp_path):
    shutil.copytree(assembled.folder, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("build"))
    package = read_package(tmp_path / "copy")
    size = sum(map(len, sources(package, "cuda").values()))
    more = package.sources / "more.py"
    more.write_bytes(b"#" * (20 * 2**20 - size))
    assemble(package, "cuda")
    more.write_bytes(b"#" * (20 * 2**20 - size + 1))
    with pytest.raises(PackageError, match="has 20.0 MiB, expected at most 20. Prebuild fewer variants"):
        assemble(package, "cuda")


def test_a_link_to_a_file_of_others_is_not_assembled(tmp_path):
    """What it points to would be in everybody's download."""
    copy_package(tmp_path)
    package = read_package(tmp_path)
    (package.sources / "inside.py").symlink_to("layers.py")
    assert (assemble(package, "cpu") / "inside.py").is_file()
    (package.sources / "hosts.py").symlink_to("/etc/hosts")
    with pytest.raises(PackageError, match="hosts.py is a link to /etc/hosts, outside of the package"):
        assemble(package, "cpu")


def test_what_a_former_assembly_left_is_removed(assembled, tmp_path):
    copy_package(tmp_path)
    package = read_package(tmp_path)
    stale = assemble(package, "cpu") / "stale.py"
    stale.write_text("")
    (tmp_path / "build" / "torch-cpu.new").mkdir()
    (tmp_path / "build" / "torch-cpu.new" / "half.py").write_text("")
    assert not (assemble(package, "cpu") / "stale.py").exists()
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["torch-cpu"]


def test_the_commit_and_whether_it_was_clean_are_recorded(tmp_path):
    copy_package(tmp_path)
    (tmp_path / ".gitignore").write_text("build/\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()
    package = read_package(tmp_path)
    for dirty in (False, True):
        kernel = Metadata.read_from_file(assemble(package, "cpu") / "metadata.json").provenance.kernel
        assert (kernel.commit, kernel.dirty) == (commit, dirty)
        (tmp_path / "torch-ext" / "qwen3" / "layers.py").write_text("# changed\n")


SHIPPED = sorted([*(ROOT / "torch-ext").rglob("*.py"), *ROOT.glob("packages/*/torch-ext/**/*.py")])

LATER = {"transformers", "kernels", "liger_kernel"}  # what patching, and the back end inside Liger, look for when they are called

shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())


def imports(tree, inside=False):
    """(the names of modules that are not relative, whether inside a function) of every import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], inside
        yield from imports(node, inside or isinstance(node, (ast.FunctionDef, ast.Lambda)))


@shipped
def test_at_import_it_needs_torch_and_the_standard_library_alone(path):
    allowed = set(sys.stdlib_module_names) | {"torch"}
    for name, inside in imports(ast.parse(path.read_text())):
        assert name in allowed or (inside and name in LATER), f"imports {name}"


@shipped
def test_it_is_python_3_9(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            unions = [n for n in ast.walk(annotation) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr)]
            assert not unions, f"line {annotation.lineno}: X | Y is evaluated, and Python 3.9 cannot"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip":
            assert not node.keywords, f"line {node.lineno}: zip(strict=) is Python 3.10"
        assert not isinstance(node, ast.Match)


ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"transformers", "kernels", "cuda", "triton", "accelerate", "tools", "tests", "kernel_src"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import importlib, torch
qwen3 = importlib.import_module("torch-cpu")
x = torch.ones(2, 8, requires_grad=True)
qwen3.rms_norm(x, torch.ones(8)).sum().backward()
assert qwen3.get_patched_ops() == []
try:
    qwen3.apply()
except ImportError as error:
    print(error)
"""


def test_it_works_where_nothing_else_can_be_imported(package_folder):
    done = subprocess.run([sys.executable, "-c", ALONE, str(package_folder / "build")], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout
