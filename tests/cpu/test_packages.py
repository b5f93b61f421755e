"""Every package of the repository: built from its own folder and what it shares, published to one Hub, loaded back, and its card true."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from tests.cpu.conftest import REPOSITORY as ROOT
from tests.cpu.conftest import assemble_cpu, write_no_kernels
from tests.documents import blocks
from tests.fake_driver import flip_a_bit
from tools import assemble, publish
from tools.card import IMAGE, card_values, fill_card, render_card
from tools.hub import HubServer
from tools.kernel_package import PackageError, layer_names, package_folders, public_names, read_package, whole_package
from tools.kernels_adapter import TESTED
from tools.stage import stage
from tools.targets import TARGETS, operations

FOLDERS = {read_package(folder).name: folder for folder in package_folders(root=ROOT)}
each = pytest.mark.parametrize("name", FOLDERS)


def built(folder: Path, name: str):
    """A package with both variants, without kernels."""
    assemble_cpu(folder, package=str(FOLDERS[name].relative_to(ROOT)))
    package = read_package(folder)
    write_no_kernels(package)
    shutil.copy(FOLDERS[name] / "CARD.md", folder)
    assemble.assemble(package, "cuda")
    fill_card(package)
    return package


def test_each_has_a_name_and_a_repository_of_its_own():
    packages = [read_package(folder) for folder in FOLDERS.values()]
    assert {"qwen3", "gpt-oss"} <= {p.name for p in packages}
    # A package's own name has dashes alone; the Hub's may be its module's.
    assert all(p.repo_id in (f"bastile/{p.name}", f"bastile/{p.module}") for p in packages)
    assert len({p.module for p in packages}) == len(packages)


@each
def test_a_build_is_whole(name, tmp_path):
    """What packages share lies in the build too, and no other package is looked for."""
    package = built(tmp_path, name)
    for variant in package.variants():
        files = [path for path in variant.rglob("*") if path.is_file()]
        assert not any(path.is_symlink() for path in variant.rglob("*"))
        assert {"ops", "runtime"} <= {path.parent.name for path in files if path.suffix == ".py"}
        for path in files:
            if path.suffix == ".py":
                compile(path.read_text(), str(path), "exec")
    others = [read_package(folder).module for other, folder in FOLDERS.items() if other != name]
    script = f"import sys; sys.path.insert(0, {str(package.build)!r}); import importlib; importlib.import_module('torch-cpu')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert not any((package.build / "torch-cpu" / other).exists() for other in others)


@each
def test_the_kernels_that_it_ships_are_in_kernel_src(name):
    for operation in operations(FOLDERS[name]):
        assert (ROOT / "kernel_src" / f"{operation}.py").is_file()


@each
def test_its_flake_and_its_card_are_its_own(name):
    package = read_package(FOLDERS[name])
    assert f"torch-ext/{package.module}/cubins" in (package.folder / "flake.nix").read_text()
    assert package.module in (package.folder / "CARD.md").read_text()


@each
def test_the_card_describes_every_layer_and_gpu(name, tmp_path):
    numbers = {f"{target[3:-1]}.{target[-1]}" for names in TARGETS.values() for target in names}
    package = built(tmp_path, name)
    text = render_card((FOLDERS[name] / "CARD.md").read_text(), card_values(package) | {"archs": sorted(numbers)})
    for layer in layer_names((package.sources / "layers.py").read_text(), "layers.py"):
        assert re.search(rf"^\| `{layer}` \| \S+", text, re.MULTILINE), layer
    for number in numbers:
        assert re.search(rf"^\| {re.escape(number)} \| \S+", text, re.MULTILINE), number
    used = set(re.findall(rf"\b{package.module}\.(\w+)", "".join(blocks(text, "python"))))
    assert used and used <= set(public_names((package.sources / "__init__.py").read_text(), "__init__.py"))


def test_all_are_published_at_once_and_their_cards_run(tmp_path):
    """`python -m tools.publish` in a repository of both, on one local Hub; then every block of the second card."""
    repository = tmp_path / "repository"
    built_at = {name: repository / FOLDERS[name].relative_to(ROOT) for name in FOLDERS}
    for name, folder in built_at.items():
        folder.mkdir(parents=True, exist_ok=True)
        built(folder, name)
    with HubServer() as hub:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "LOCAL_KERNELS", "BASTILE"))}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tools.publish", "--allow-dirty", "--allow-partial", "--token", hub.token]
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "bastile/qwen3" in done.stdout and "bastile/gpt-oss" in done.stdout
        again = publish.publish(
            built_at["gpt-oss"],
            endpoint=hub.endpoint,
            token=hub.token,
            allow_dirty=True,
            allow_partial=True,
            console=Console(file=io.StringIO()),
        )
        assert not again.commits
        code = "\n".join(blocks((built_at["gpt-oss"] / "build/CARD.md").read_text(), "python"))
        for name in ("qwen3", "decoders", "moe", "qwen3_5"):
            code += f"\nassert get_kernel('bastile/{name}', version=1, trust_remote_code=True).get_patched_ops() == []\n"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "['rms_norm', 'experts', 'rope', 'fused_linear_cross_entropy', 'decoder_layer', 'attention']" in done.stdout
        code = "\n".join(blocks((built_at["liger"] / "build/CARD.md").read_text(), "python"))
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@each
def test_it_says_that_it_is_typed(name):
    assert (read_package(FOLDERS[name]).sources / "py.typed").is_file()


def run_git(folder, *words):
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("name", ("qwen3", "gpt-oss"))
def test_a_staged_package_is_a_tree_that_kernel_builder_takes(name, tmp_path):
    """A git repository that holds all of it, with a card whose images are not missed, a lock and the architectures of the kernels."""
    folder = tmp_path / "package"
    left_out = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(FOLDERS[name] / "torch-ext", folder / "torch-ext", symlinks=True, ignore=left_out)
    for file in ("build.toml", "flake.nix", "flake.lock", "CARD.md"):
        shutil.copy(FOLDERS[name] / file, folder)
    package = read_package(folder)
    write_no_kernels(package)
    trees = []
    for _ in range(2 if name == "qwen3" else 1):
        staged = stage(package, tmp_path)
        trees.append(run_git(staged, "rev-parse", "HEAD"))
    assert len(set(trees)) == 1 and "staged from sources outside of git" in run_git(staged, "log", "-1", "--format=%s")
    assert run_git(staged, "status", "--porcelain") == ""
    listed = set(run_git(staged, "ls-files").splitlines())
    assert listed == {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file() and ".git" not in path.parts}
    assert {f"torch-ext/{package.module}/cubins/manifest.json", f"torch-ext/{package.module}/shared/__init__.py"} < listed
    values = dict(repo_id="r", functions=["f"], layers=[], has_benchmark=False, upstream=None, license="mit")
    assert not IMAGE.search(render_card((staged / "CARD.md").read_text(), values))
    (folder / "flake.lock").unlink()
    with pytest.raises(PackageError, match="flake.lock not found"):
        stage(package, tmp_path)


@each
def test_what_kernel_builder_reads_names_every_architecture_and_one_builder(name):
    found = tomllib.loads((FOLDERS[name] / "build.toml").read_text())["torch-noarch"]
    manifest = {"architectures": {host: list(names) for host, names in TARGETS.items()}}
    assert found["cuda_capabilities"] == assemble.architectures({"cubins/manifest.json": json.dumps(manifest).encode()})
    lock = json.loads((FOLDERS[name] / "flake.lock").read_text())
    assert lock == json.loads((ROOT / "flake.lock").read_text())
    nodes = lock["nodes"]
    assert nodes["root"]["inputs"] == {"kernel-builder": "kernel-builder"}
    assert "kernel-builder.url" in (FOLDERS[name] / "flake.nix").read_text()
    for node in nodes.values():
        inputs = [place if isinstance(place, list) else [place] for place in node.get("inputs", {}).values()]
        assert all(place[0] in nodes for place in inputs)
        assert node is nodes["root"] or (re.fullmatch("[0-9a-f]{40}", node["locked"]["rev"]) and node["locked"]["narHash"])


def test_a_second_wheel_holds_nothing_of_the_first_that_is_gone(tmp_path):
    """pip builds in the folder of the sources, and setuptools leaves build/lib there. What it holds of compiled kernels is compared with a
    digest when it is loaded, as in a build for the Hub; without kernels there is nothing to compare."""
    for name in ("pyproject.toml", "setup.py", "build.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "torch-ext", tmp_path / "torch-ext", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    gone = tmp_path / "torch-ext/shared/ops/gone.py"
    gone.write_text("")
    (tmp_path / "build/torch-cpu").mkdir(parents=True)
    names = []
    for folder in ("first", "second"):
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", tmp_path / folder]
        done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [wheel] = (tmp_path / folder).glob("*.whl")
        names.append(set(zipfile.ZipFile(wheel).namelist()))
        gone.unlink(missing_ok=True)
        write_no_kernels(whole_package(tmp_path))
    assert names[0] - names[1] == {"bastile/shared/ops/gone.py"}
    assert names[1] - names[0] == {"bastile/cubins/manifest.json", "bastile/metadata.json"}
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = runpy.run_path(str(tmp_path / "bastile/shared/runtime/artifacts.py"))
    assert found["Artifacts"](tmp_path / "bastile/cubins").architectures() == []
    flip_a_bit(tmp_path / "bastile/cubins/manifest.json")
    with pytest.raises(found["ArtifactError"], match="bastile/metadata.json lists"):
        found["Artifacts"](tmp_path / "bastile/cubins").architectures()
    assert {"bastile/py.typed", "bastile/shared/runtime/artifacts.py"} <= names[1]
    sources = {path.relative_to(ROOT / "torch-ext/shared") for path in (ROOT / "torch-ext/shared").rglob("*.py")}
    assert {f"bastile/shared/{path.as_posix()}" for path in sources} <= names[1]
    assert (tmp_path / "build/torch-cpu").is_dir()


def test_a_third_package_is_found_by_its_folder(tmp_path, monkeypatch, capsys):
    third = tmp_path / "packages/third"
    shutil.copytree(FOLDERS["gpt-oss"] / "torch-ext/gpt_oss", third / "torch-ext/third", symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    for file in ("build.toml", "CARD.md", "kernels.toml"):
        text = (FOLDERS["gpt-oss"] / file).read_text().replace('"gpt-oss"', '"third"').replace("bastile/gpt-oss", "bastile/third")
        (third / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert assemble.main(["--backend", "cpu"]) == 0
    assert capsys.readouterr().out == "assembled third: build/torch-cpu\n"
    assert (third / "build/torch-cpu/shared/ops/experts.py").is_file() and "bastile/third" in (third / "build/CARD.md").read_text()


ADAPTER = """
import importlib, sys, types
sys.modules["kernels"] = types.ModuleType("kernels")
sys.modules["kernels"].__path__ = []
if {changed}:
    sys.modules["kernels._rust"] = types.ModuleType("kernels._rust")
import tools.publish
"""


@pytest.mark.parametrize(("changed", "reason"), ((False, "No module named 'kernels._rust'"), (True, "cannot import name 'Build'")))
def test_a_kernels_that_is_absent_or_has_changed_is_named_with_the_cure(changed, reason):
    done = subprocess.run([sys.executable, "-c", ADAPTER.format(changed=changed)], cwd=ROOT, capture_output=True, text=True)
    assert reason in done.stderr and "pip install 'kernels==" in done.stderr.splitlines()[-1]


def test_the_private_part_of_kernels_is_imported_in_one_place():
    found = [path for folder in ("tools", "tests", "benchmark", "kernel_src", "torch-ext") for path in (ROOT / folder).rglob("*.py")]
    users = {path.relative_to(ROOT).as_posix() for path in found if re.search(r"^\s*(from|import) kernels\._rust", path.read_text(), re.M)}
    assert users == {"tools/kernels_adapter.py"}
    pinned = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"kernels==' in line)
    assert TESTED in pinned


def test_a_repository_without_packages(tmp_path):
    with pytest.raises(PackageError, match="holds no package"):
        package_folders(root=tmp_path)
    assert package_folders(tmp_path) == [tmp_path]


def test_one_repository_cannot_be_named_for_several_packages(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        publish.main(["--repo-id", "some-org/other"])
    assert f"--repo-id is for one package, and there are {len(FOLDERS)}; pass --package" in capsys.readouterr().err
