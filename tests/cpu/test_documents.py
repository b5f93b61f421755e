"""What README.md, docs/*.md and CARD.md say of names, GPUs, versions and each other is so, and they can be read as they are."""

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmark import tables
from tests.documents import CARD, COMMANDS, DOCUMENTS, INTEGRATIONS, MAKE, MODULES, NOTEBOOK, PAGES, README, ROOT, SOURCES, blocks, cells
from tests.patched import calls_of
from tools.kernel_package import layer_names, public_names
from tools.targets import TARGETS

ALL_PAGES = "\n".join(PAGES.values())
MAKEFILE = (ROOT / "Makefile").read_text()
PIP = [command for command in COMMANDS if command.startswith("pip install ")]
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PINNED = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in map(Requirement, OPTIONAL["dev"])}


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
    assert shown.items() <= {name: layer.__name__ for name, layer in calls_of(loaded).families[0].hub_names.items()}.items()
    others = {"Experts", "MoeCausalLM", "MoeDecoderLayer", "MoeModel", "SwiGLUMLP", "ForCausalLMLoss"}
    assert set(shown.values()) == set(layer_names((SOURCES / "layers.py").read_text(), "layers.py")) - others


def test_gpus_are_those_that_are_built():
    built: dict[str, set[str]] = {}
    for host, names in TARGETS.items():
        for name in names:
            built.setdefault(f"{name[3:-1]}.{name[-1]}", set()).add(host)
    rows = re.findall(r"^\| (\d+\.\d) \| .+ \| ((?:x86_64|aarch64)[^|]*) \|$", PAGES[INTEGRATIONS], re.MULTILINE)
    assert {number: set(hosts.split(", ")) for number, hosts in rows} == built


def test_tested_versions_are_those_of_the_environment():
    for name in ("torch", "transformers", "kernels"):
        assert re.search(rf"^\| {name} \|.*\b{re.escape(PINNED[name])}\b", PAGES[INTEGRATIONS], re.MULTILINE)


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


def test_the_notebook_is_kept_without_results():
    found = json.loads((ROOT / NOTEBOOK).read_text())
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in found["cells"] if cell["cell_type"] == "code")
    first, *others = cells("code")
    assert not any("%pip" in cell for cell in others)
    for requirement in map(Requirement, shlex.split(first)[3:]):
        assert requirement.name not in PINNED or requirement.specifier.contains(PINNED[requirement.name]), requirement


def test_every_command_is_of_a_kind_that_is_tested():
    assert set(COMMANDS) == {*MAKE, *MODULES, *PIP}
    assert len(MAKE) > 10 and len(MODULES) > 4 and len(PIP) == 2


@pytest.mark.parametrize("command", PIP)
def test_what_pip_installs_fits_the_tested_versions(command):
    for word in shlex.split(command)[2:]:
        if word.startswith("."):  # this repository, which test_readme.py installs
            assert set(re.findall(r"\w+", word)) <= set(OPTIONAL)
        elif word.startswith("dist/"):  # what `make wheel` made
            assert "--wheel-dir dist" in MAKEFILE
        else:
            requirement = Requirement(word)
            assert requirement.specifier.contains(PINNED[requirement.name])
            [served] = [r for r in map(Requirement, OPTIONAL["transformers"]) if r.name == requirement.name]
            assert set(served.specifier) <= set(requirement.specifier)  # a page may narrow it to what works whole
