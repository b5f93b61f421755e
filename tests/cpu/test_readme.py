"""Every block and command of README.md, docs/*.md and CARD.md runs.

Python blocks run on the CPU, each in a process of its own, with the real clients against a local Hub. A tiny checkpoint stands where
a block says Qwen/Qwen3-8B. Of commands that would build or measure for minutes it is checked that they exist with the flags shown.
"""

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.conftest import assemble_cpu, made_once, write_no_kernels
from tests.documents import INTEGRATIONS, MAKE, MODULES, NOTEBOOK, PAGES, PYTHON, README, ROOT, SOURCES, blocks, cells
from tests.integrations.trainers import tokenizer
from tests.versions import needs_decorators
from tools.assemble import assemble
from tools.card import fill_card
from tools.hub import HubServer
from tools.kernel_package import read_package
from tools.publish import publish

CHECKPOINT = "Qwen/Qwen3-8B"
GPU_ONLY = "if torch.cuda.is_available():"
ON_A_GPU = {f"{name}-as-on-a-gpu": block for name, block in PYTHON.items() if GPU_ONLY in block}


def dry_run(command: str) -> subprocess.CompletedProcess:
    """Its output is what a make command would run."""
    words = [word for word in shlex.split(command) if not re.match(r"HF_[A-Z]+=", word)]
    return subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)


def modules_and_flags(text: str) -> list[tuple[str, set[str]]]:
    """(module, flags) of each `python -m module --flag ...` in a text."""
    parts = re.split(r"\bpython3? -m ", text.replace("\\\n", " "))[1:]
    return [(part.split()[0].rstrip(")\"'"), set(re.findall(r"(?<!\S)--[a-z][a-z-]*", part.split("\n")[0]))) for part in parts]


def ours(module: str) -> bool:
    return module.split(".")[0] in ("tools", "benchmark", "tests")


# Running what they contain

RUNNER = r"""
import json, os, runpy, sys, tempfile, traceback

import peft, transformers.models.qwen3.modeling_qwen3  # once for all: every job is a fork of this process


def run(job):
    if "module" in job:
        sys.argv = [job["module"], "--help"]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    else:
        exec(compile(job["code"], job["name"], "exec"), {"__name__": "__main__"})


def status_of(job):
    try:
        run(job)
    except SystemExit as end:
        return int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    job = json.loads(line)
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = status_of(job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([status, output.read().decode(errors="replace")]), file=answers, flush=True)
"""

# After a block that leaves its model patched: the forwards of the package that the model runs.
SEEN = """
import sys
modules = list(model.modules()) + [sys.modules["transformers.models.qwen3.modeling_qwen3"].apply_rotary_pos_emb]
forwards = [getattr(m, "forward", m) for m in modules]  # the rotary embedding may be a function
forwards = {getattr(forward, "__func__", forward) for forward in forwards}
packages = [m for name, m in sys.modules.items() if "qwen3_c" in name and name.endswith(".layers") and ".shared." not in name]
found = {f"{name}.forward" for m in packages for name, layer in vars(m).items() if getattr(layer, "forward", None) in forwards}
assert found, forwards
print("", *found)
"""
IMPORTED = """
print("bastile from", bastile.__file__)
"""
AS_UNDER_TORCHRUN = """
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
"""
# transformers' list of devices has no CPU.
AS_ON_A_GPU = """
from transformers.utils import kernel_config
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES = ["cpu"]
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The package, built for both backends (a torch that is made for CUDA loads that one, also without a GPU), without cubins."""

    def make(folder):
        assemble_cpu(folder)
        write_no_kernels(read_package(folder))
        for name in ("CARD.md", "README.md", "LICENSE", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        assemble(read_package(folder), "cuda")
        fill_card(read_package(folder))

    return made_once(tmp_path_factory, "both", make)


@pytest.fixture(scope="module")
def installed(package, tmp_path_factory) -> Path:
    """What `pip install .` installs, without the packages that it needs: they are here."""

    def make(folder):
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", folder]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, package], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "site", make)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    from tests.models import tiny_model

    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def jobs(package: Path, checkpoint: Path) -> list[dict]:
    card = blocks((package / "build/CARD.md").read_text(), "python")
    found = []
    for name, block in (PYTHON | ON_A_GPU).items():
        document, number, *gpu = name.split("-", 2)
        code = card[int(number) - 1] if document == "CARD.md" else block
        code = code.replace(CHECKPOINT, str(checkpoint))
        if gpu:
            assert ".cuda()" in code
            code = AS_ON_A_GPU + code.replace(GPU_ONLY, "if True:").replace(".cuda()", ".cpu()")
        if "init_device_mesh" in code:  # its model is a local name
            code = AS_UNDER_TORCHRUN + code
        elif "import bastile" in code:
            code += IMPORTED
        elif "model = " in code and ".reset()" not in code and GPU_ONLY not in code:
            code += SEEN
        found.append({"name": name, "code": code})
    code = "\n".join(cell for cell in cells("code") if not cell.startswith("%pip"))
    found.append({"name": NOTEBOOK, "code": code.replace("trl-internal-testing/tiny-Qwen3ForCausalLM", str(checkpoint))})
    texts = [*MODULES, *(dry_run(command).stdout for command in MAKE)]
    modules = dict.fromkeys(module for text in texts for module, _ in modules_and_flags(text) if ours(module))
    return found + [{"name": module, "module": module} for module in modules]


class Results:
    """(exit status, output) of a block, or of `python -m <module> --help` of a module that is named, by its name: each is run when it is
    first asked for."""

    def __init__(self, jobs: list[dict], environment: dict[str, str], folder: Path):
        self.jobs, self.found = {job["name"]: job for job in jobs}, {}
        self.errors = (folder / "errors").open("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.runner = subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, cwd=folder, **pipes)

    def __getitem__(self, name: str) -> tuple[int, str]:
        if name not in self.found:
            print(json.dumps(self.jobs[name]), file=self.runner.stdin, flush=True)
            if not select.select([self.runner.stdout], [], [], 300)[0]:
                self.runner.kill()
            answer = self.runner.stdout.readline()
            assert answer, f"{name} has not ended after 300 s, or ended its process: {(self.errors.seek(0), self.errors.read())[1]}"
            self.found[name] = tuple(json.loads(answer))
        return self.found[name]

    def close(self):
        self.runner.communicate()
        self.errors.close()


def new_home(home: Path) -> dict[str, str]:
    """The environment of a user with this cache, without a GPU and whatever this machine has set for the Hub and for us."""
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KERNELS_CACHE", "LOCAL_KERNELS", "BASTILE_STRICT")
    return {key: value for key, value in os.environ.items() if key not in unset} | {"HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def results(package, installed, checkpoint, tmp_path_factory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("hub")
    path = os.pathsep.join((str(installed), str(ROOT)))
    with HubServer() as hub:
        publish(package, endpoint=hub.endpoint, token=hub.token, allow_dirty=True, allow_partial=True)
        environment = new_home(folder / "home") | {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": path}
        with contextlib.closing(Results(jobs(package, checkpoint), environment, folder)) as found:
            yield found


def assert_ran(results, name: str) -> str:
    status, output = results[name]
    assert status == 0, output
    return output


OF_DECORATORS = ("docs/integrations.md-1", "docs/integrations.md-1-as-on-a-gpu", "CARD.md-3-as-on-a-gpu")  # mapping(), use_kernels


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_decorators if name in OF_DECORATORS else ()) for name in PYTHON | ON_A_GPU]
)
def test_a_block_runs(results, name):
    assert "RuntimeWarning" not in assert_ran(results, name)


def test_the_notebook_runs_from_top_to_bottom(results):
    """On a CPU, with a tiny model: the losses with and without are the same, and the adapters are loaded back."""
    output = assert_ran(results, NOTEBOOK)
    [(difference, loss)] = re.findall(r"largest difference of a loss: ([\d.]+) of ([\d.]+)", output)
    assert float(difference) <= 1e-3 and float(loss) > 1
    assert "loss without logits" in output


def test_the_installed_package_is_whole_and_the_one_that_was_imported(package, installed, results):
    (name,) = [name for name, block in PYTHON.items() if "import bastile" in block]
    assert f"bastile from {installed}" in assert_ran(results, name)
    folders = {"bastile": package / "torch-ext/bastile", "shared": package / "torch-ext"}
    files = {path: path.relative_to(top) for name, top in folders.items() for path in (package / "torch-ext" / name).rglob("*.*")}
    assert [path for path, name in files.items() if path.is_file() and not (installed / "bastile" / name).is_file()] == []


@needs_decorators
def test_transformers_configuration_reaches_every_layer(results):
    (name,) = [name for name in ON_A_GPU if name.startswith(INTEGRATIONS)]
    output = assert_ran(results, name)
    assert [layer for layer in ("RMSNorm", "RotaryPosEmb", "MLP", "DecoderLayer", "CausalLM") if f" {layer}.forward" not in output] == []


# With a cache that this process alone knows, where no proxy or other Hub answers: get_kernel(...), then its name or why there is none.
OFFLINE = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from kernels import get_kernel
try:
    print("found", get_kernel("bastile/qwen3", version=1, trust_remote_code=True).__name__)
except Exception as error:
    print("missing", type(error).__name__)
"""


def offline_after(code: str, endpoint: str, home: Path) -> str:
    """What a process without a network finds in the cache that `code` filled."""
    for each, where in ((code, endpoint), (OFFLINE, "http://127.0.0.1:9")):
        environment = new_home(home) | {"HF_ENDPOINT": where}
        done = subprocess.run([sys.executable, "-c", each], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_without_a_network_has_what_was_fetched_as_a_whole(package, tmp_path):
    """And not what `get_kernel` fetched, as the page says: where that has changed, so must the page."""
    (whole,) = [block for block in blocks(PAGES[INTEGRATIONS], "python") if "snapshot_download" in block]
    with HubServer() as hub:
        publish(package, endpoint=hub.endpoint, token=hub.token, allow_dirty=True, allow_partial=True)
        assert offline_after(whole, hub.endpoint, tmp_path / "whole").startswith("found ")
        assert offline_after(blocks(README, "python")[0], hub.endpoint, tmp_path / "part").startswith("missing ")


def check_modules(results, text: str) -> None:
    """Every module that a text runs exists and knows the flags."""
    for module, flags in modules_and_flags(text):
        if ours(module):
            unknown = flags - set(re.findall(r"--[a-z][a-z-]*", assert_ran(results, module)))
            assert not unknown, f"python -m {module} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("command", MAKE)
def test_a_make_command_exists(results, command):
    done = dry_run(command)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    check_modules(results, done.stdout)


@pytest.mark.parametrize("command", MODULES)
def test_a_python_command_exists(results, command):
    module = command.split()[2]
    if module == "bastile":  # the package itself, whose report test_self_check reads
        assert (SOURCES / "__main__.py").is_file()
        return
    assert ours(module)
    check_modules(results, command)
