"""Every block and command of README.md, docs/*.md and CARD.md runs, and what they say of names, GPUs and versions is so.

Python blocks run on the CPU, each in a process of its own, with the real clients against a local Hub. A tiny checkpoint stands where
a block says Qwen/Qwen3-8B. Of commands that would build or measure for minutes it is checked that they exist with the flags shown.
"""

import ast
import contextlib
import inspect
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmark import tables
from tests.cpu.conftest import REPOSITORY as ROOT
from tests.cpu.conftest import assemble_cpu, made_once, write_no_kernels
from tests.integrations.trainers import tokenizer
from tests.patched import calls_of
from tests.versions import needs_decorators
from tools.assemble import assemble
from tools.card import card_values, fill_card, render_card
from tools.hub import HubServer
from tools.kernel_package import layer_names, public_names, read_package
from tools.publish import publish
from tools.targets import TARGETS

CARD = (ROOT / "CARD.md").read_text()
# The README and what it leads to: what is said is said in one of them.
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README, ALL_PAGES = PAGES["README.md"], "\n".join(PAGES.values())
DOCUMENTS = PAGES | {"CARD.md": CARD}
INTEGRATIONS = "docs/integrations.md"
MAKEFILE = (ROOT / "Makefile").read_text()
CHECKPOINT = "Qwen/Qwen3-8B"
GPU_ONLY = "if torch.cuda.is_available():"
SOURCES = ROOT / "torch-ext" / "qwen3"


# What the documents contain


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def python_blocks() -> dict[str, str]:
    """By document and number. A block that takes `qwen3` as given has in front what loads it in the README's first block."""
    first = "".join(line for line in blocks(README, "python")[0].splitlines(True) if not line.startswith("qwen3."))
    found = {}
    for name, text in DOCUMENTS.items():
        for number, block in enumerate(blocks(text, "python"), 1):
            needs_it = re.search(r"\bqwen3\.", block) and "get_kernel" not in block
            found[f"{name}-{number}"] = first + block if needs_it else block
    return found


PYTHON = python_blocks()
NOTEBOOK = "examples/finetune.ipynb"
ON_A_GPU = {f"{name}-as-on-a-gpu": block for name, block in PYTHON.items() if GPU_ONLY in block}


def commands() -> list[str]:
    """Every line of a shell block, and every `make ...` and `python ...` within the text."""
    found = []
    for text in DOCUMENTS.values():
        for block in blocks(text, "bash"):
            found += [line for line in block.splitlines() if line and not line.startswith("#")]
        found += re.findall(r"`((?:make|python) [^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return list(dict.fromkeys(found))


COMMANDS = commands()
MAKE = [command for command in COMMANDS if re.match(r"([A-Z_]+=\S+ )*make ", command)]
MODULES = [command for command in COMMANDS if command.startswith("python -m ")]
PIP = [command for command in COMMANDS if command.startswith("pip install ")]


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


def cells(kind: str) -> list[str]:
    """The sources of the notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"] if cell["cell_type"] == kind]


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
        self.runner = subprocess.Popen(
            [sys.executable, "-c", RUNNER],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

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


@pytest.fixture(scope="module")
def results(package, installed, checkpoint, tmp_path_factory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("hub")
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KERNELS_CACHE", "LOCAL_KERNELS", "BASTILE_STRICT")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    path = os.pathsep.join((str(installed), str(ROOT)))
    with HubServer() as hub:
        publish(package, endpoint=hub.endpoint, token=hub.token, allow_dirty=True, allow_partial=True)
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
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


def test_the_notebook_is_kept_without_results():
    found = json.loads((ROOT / NOTEBOOK).read_text())
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in found["cells"] if cell["cell_type"] == "code")
    first, *others = cells("code")
    assert not any("%pip" in cell for cell in others)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {r.name: str(r.specifier).removeprefix("==") for r in map(Requirement, project["optional-dependencies"]["dev"])}
    for requirement in map(Requirement, shlex.split(first)[3:]):
        assert requirement.name not in tested or requirement.specifier.contains(tested[requirement.name]), requirement


def test_the_installed_package_is_whole_and_the_one_that_was_imported(package, installed, results):
    (name,) = [name for name, block in PYTHON.items() if "import bastile" in block]
    assert f"bastile from {installed}" in assert_ran(results, name)
    sources = package / "torch-ext/bastile"
    shared = package / "torch-ext/shared"
    files = {path: path.relative_to(sources) for path in sources.rglob("*.*")} | {
        path: path.relative_to(shared.parent) for path in shared.rglob("*.*")
    }
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
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KERNELS_CACHE", "LOCAL_KERNELS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    for each, where in ((code, endpoint), (OFFLINE, "http://127.0.0.1:9")):
        command = [sys.executable, "-c", each]
        done = subprocess.run(command, env=environment | {"HF_ENDPOINT": where}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_without_a_network_has_what_was_fetched_as_a_whole(package, tmp_path):
    """And not what `get_kernel` fetched, as the page says: where that has changed, so must the page."""
    (whole,) = [block for block in blocks(PAGES[INTEGRATIONS], "python") if "snapshot_download" in block]
    with HubServer() as hub:
        publish(package, endpoint=hub.endpoint, token=hub.token, allow_dirty=True, allow_partial=True)
        assert offline_after(whole, hub.endpoint, tmp_path / "whole").startswith("found ")
        assert offline_after(blocks(README, "python")[0], hub.endpoint, tmp_path / "part").startswith("missing ")


def test_every_command_is_of_a_kind_that_is_tested():
    assert set(COMMANDS) == {*MAKE, *MODULES, *PIP}
    assert len(MAKE) > 10 and len(MODULES) > 4 and len(PIP) == 2


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
    if module == "bastile":  # the package itself, whose report test_explain reads
        assert (SOURCES / "__main__.py").is_file()
        return
    assert ours(module)
    check_modules(results, command)


@pytest.mark.parametrize("command", PIP)
def test_what_pip_installs_fits_the_tested_versions(installed, command):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {r.name: str(r.specifier).removeprefix("==") for r in map(Requirement, project["optional-dependencies"]["dev"])}
    for word in shlex.split(command)[2:]:
        if word.startswith("."):  # this repository: the fixture installed it
            assert set(re.findall(r"\w+", word)) <= set(project["optional-dependencies"])
        elif word.startswith("dist/"):  # what `make wheel` made
            assert "--wheel-dir dist" in MAKEFILE
        else:
            requirement = Requirement(word)
            assert requirement.specifier.contains(pinned[requirement.name])
            [served] = [r for r in map(Requirement, project["optional-dependencies"]["transformers"]) if r.name == requirement.name]
            assert set(served.specifier) <= set(requirement.specifier)  # a page may narrow it to what works whole


# What they say


def test_the_documents_name_every_make_target():
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)) - {"help"}
    named = {word for command in MAKE for word in command.split() if word in targets}
    assert named == targets


def test_the_documents_name_every_public_function_with_its_arguments(loaded):
    """In the tables: `name(argument, argument=default)`. What stands for `...` is named in the text."""
    shown = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", ALL_PAGES, re.MULTILINE))
    names = public_names((SOURCES / "__init__.py").read_text(), "__init__.py")
    assert shown.keys() == set(names) - {"layers"} and "`layers`" in ALL_PAGES
    for name, text in shown.items():
        parameters = list(inspect.signature(getattr(loaded, name)).parameters.values())
        arguments, more, _ = text.partition(", ...")
        given = ast.parse(f"def f({arguments}): pass").body[0].args
        expected = parameters[: len(given.args)] if more else parameters
        assert [a.arg for a in given.args] == [p.name for p in expected], name
        assert [ast.literal_eval(d) for d in given.defaults] == [p.default for p in expected if p.default is not p.empty], name
        assert [p.name for p in parameters[len(expected) :] if f"`{p.name}`" not in ALL_PAGES] == []


def test_the_layers_of_the_configuration_are_those_of_the_mapping(loaded):
    shown = dict(re.findall(r'"(\w+)": "(\w+)"', PAGES[INTEGRATIONS]))
    assert (
        shown.items()
        <= {name: layer.__name__ for name, layer in calls_of(loaded).families[0].hub_names.items()}.items()
    )
    assert set(shown.values()) == set(layer_names((SOURCES / "layers.py").read_text(), "layers.py")) - {
        "Experts",
        "MoeCausalLM",
        "MoeDecoderLayer",
        "MoeModel",
        "SwiGLUMLP",
        "ForCausalLMLoss",
    }


def test_gpus_are_those_that_are_built():
    built: dict[str, set[str]] = {}
    for host, names in TARGETS.items():
        for name in names:
            built.setdefault(f"{name[3:-1]}.{name[-1]}", set()).add(host)
    rows = re.findall(r"^\| (\d+\.\d) \| .+ \| ((?:x86_64|aarch64)[^|]*) \|$", PAGES[INTEGRATIONS], re.MULTILINE)
    assert {number: set(hosts.split(", ")) for number, hosts in rows} == built


def test_the_card_describes_every_layer_and_gpu(package):
    numbers = {f"{name[3:-1]}.{name[-1]}" for names in TARGETS.values() for name in names}
    text = render_card(CARD, card_values(read_package(package)) | {"archs": sorted(numbers)})
    for name in layer_names((SOURCES / "layers.py").read_text(), "layers.py"):
        assert re.search(rf"^\| `{name}` \| \S+", text, re.MULTILINE), name
    for number in numbers:
        assert re.search(rf"^\| {re.escape(number)} \| \S+", text, re.MULTILINE), number


def test_tested_versions_are_those_of_the_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"]["dev"]:
        name, _, version = requirement.partition("==")
        if name in ("torch", "transformers", "kernels"):
            assert re.search(rf"^\| {name} \|.*\b{re.escape(version)}\b", PAGES[INTEGRATIONS], re.MULTILINE)


def test_tables_show_what_was_measured():
    templates = {path: tables.template_of(path) for path in tables.documents()}
    found = {path: re.findall(r'<< table\("(\S+)"\) >>', made.read_text()) for path, made in templates.items() if made.exists()}
    shown = {name for names in found.values() for name in names}
    some = {"operations", "linear_cross_entropy", "qwen3_step", "first_step", "host", "gpt_oss_experts"}
    assert some <= shown <= set(tables.all_tables())
    pages = [name for path, names in found.items() if path.name != "CARD.md" for name in names]
    assert len(pages) == len(set(pages)), "each table stands in one place; a card, the first page from the Hub, may repeat one"


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_can_be_read_as_it_is(path):
    """No marks are left in it, and no line is too long for an editor but those of tables, and in a card what becomes a cell of one."""
    text = path.read_text()
    assert not re.findall(r"<!--|<<|>>", re.sub(r"`[^`\n]*`", "", text))
    assert [line for line in text.splitlines() if len(line) > 160 and not re.match(r'\|| +"\w+": "', line)] == []


def test_what_explain_prints_is_what_the_readme_shows(qwen3, monkeypatch):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.delitem(sys.modules, "trl.kernels.chunked_logprob", raising=False)  # it has a row where TRL is imported
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = qwen3.pack(qwen3.kernelize(Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=36, **sizes)).train()))
    model.model.layers[7].mlp.register_forward_hook(lambda *_: None)
    found = [line.split() for line in str(qwen3.explain(model)).splitlines() if not line.startswith("kernels on cpu")]
    assert [line.split() for line in blocks(README, "text")[0].splitlines()] == found


def test_kernels_own_benchmark_is_run_as_the_pages_say():
    """Of the branch that `tools.publish` writes."""
    command = r"kernels benchmark (bastile/qwen3|\{\{ repo_id \}\}) --branch v(1|\{\{ major \}\})-bench"
    texts = {path.parent: path.read_text() for path in ROOT.glob("packages/*/CARD.md")} | {ROOT: CARD}
    assert re.search(command, PAGES["docs/hub.md"])
    for folder, text in texts.items():  # the branch is there where a package has benchmarks
        assert bool(re.search(command, text)) == (folder / "benchmarks").is_dir(), folder
        assert "report(check=True)" in text, folder
    done = subprocess.run([Path(sys.executable).with_name("kernels"), "benchmark", "--help"], capture_output=True, text=True)
    assert "--branch" in done.stdout and "repo_id" in done.stdout, done.stderr


def anchors(text: str) -> set[str]:
    """What a link may name after `#`, as GitHub makes it of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", re.sub(r"`[^`\n]*`", "", DOCUMENTS[name])):
        if not target.startswith("https://"):
            path = (ROOT / name).parent.joinpath(target) if target else ROOT / name
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


def test_the_readme_is_short_and_leads_to_every_page():
    assert len(README.splitlines()) <= 150
    assert set(re.findall(r"\]\((docs/[^)#]+)\)", README)) == PAGES.keys() - {"README.md"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_belongs_to_one_machine(name):
    text = DOCUMENTS[name]
    assert not re.findall(r"(?<![\w.])(?:/work|/tmp|/home|/root|/mnt|/usr|/opt|~)/", text)
    assert not re.findall(r"index-url|find-links|trusted-host", text)
    hosts = set(re.findall(r"https?://([\w.-]+)", text))
    assert hosts <= {"127.0.0.1", "huggingface.co", "github.com", "arxiv.org", "docs.nvidia.com"}
