"""The package, as `kernels` loads it."""

import contextlib
import fcntl
import importlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import heap, settled, whole
from tests.integrations.ranks import Ranks
from tests.op_cases import operations
from tests.ops.suite import suite
from tests.own_file import load_mine
from tools.targets import operations as operations_of

TOOLS = "BASTILE_TESTS_TOOLS"  # where tests.environments names the interpreter whose `kernels` the tools know
REPOSITORY = Path(__file__).resolve().parents[2]
# By the fixtures of the packages: the folders of their build.toml.
FOLDERS = {"qwen3": ".", "gpt_oss": "packages/gpt-oss", "liger": "packages/liger", "decoders": "packages/decoders",
           "moe": "packages/moe", "qwen3_5": "packages/qwen3_5"}  # fmt: skip
_file_of_last_test = None
_loadings = itertools.count()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    with heap.growing():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    whole.mark(items)
    settled.mark(items)


def pytest_runtest_setup(item):
    global _file_of_last_test
    heap.settle(always=item.path != _file_of_last_test)
    _file_of_last_test = item.path


def pytest_unconfigure():
    heap.unsettle()


@pytest.fixture(autouse=True)
def accelerate_begins_anew():
    """accelerate keeps what the first Accelerator of a process was given, and refuses others that are given something else."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def no_build_stays_registered():
    """A process has several builds: one that a test forgot would serve as the implementation of experts that the next test asks for."""
    yield
    interface = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    if interface is not None and "_bastile_offered" in vars(interface):
        delattr(interface, "_bastile_offered")
        interface._global_mapping.pop("bastile", None)


def in_force() -> set:
    """What the packages that are loaded have put in the place of transformers' own."""
    found = set()
    for name, module in [(name, module) for name, module in sys.modules.items() if "." not in name]:
        for targets in getattr(getattr(module, "__dict__", {}).get("_calls"), "families", ()):
            patching = sys.modules[f"{name}.shared.hf.install.patching"]
            for operation in targets.operations if targets.modeling in sys.modules else ():
                owner, attribute, ours = patching._target(targets, operation)
                if owner is not None and patching.ownership.current(owner, attribute) is patching.for_class(ours):
                    found.add((name, targets.model, operation))
    return found


@pytest.fixture(autouse=True)
def nothing_stays_in_force():
    """A test that leaves a package applied changes what the tests after it find, in whatever process they come to run. What one leaves in
    the place of TRL's functions is taken back."""
    before, finders = in_force(), [finder for finder in sys.meta_path if hasattr(finder, "bastile_trl")]
    yield
    for finder in [finder for finder in sys.meta_path if hasattr(finder, "bastile_trl") and finder not in finders]:
        sys.modules[type(finder).__module__].take_back()
    left = in_force() - before
    assert not left, f"this test left in force: {sorted(map(str, left))[:10]}"


def assemble_cpu(folder: Path, extra: str = "", package: str = ".") -> Path:
    """Builds the CPU variant from a copy of the sources in `folder`. extra: code that makes it a build of its own. package: the
    folder of its build.toml in this repository."""
    if TOOLS in os.environ:
        environment = {name: value for name, value in os.environ.items() if name != TOOLS}
        call = "import sys, pathlib; from tests.cpu.conftest import assemble_cpu as f; f(pathlib.Path(sys.argv[1]), *sys.argv[2:])"
        subprocess.run([os.environ[TOOLS], "-c", call, str(folder), extra, package], env=environment, cwd=REPOSITORY, check=True)
        return folder
    from tools.assemble import assemble
    from tools.kernel_package import read_package

    shutil.copy(REPOSITORY / package / "build.toml", folder)
    left_out = shutil.ignore_patterns("__pycache__", "cubins")
    shutil.copytree(REPOSITORY / package / "torch-ext", folder / "torch-ext", symlinks=True, ignore=left_out)
    copied = read_package(folder)
    if extra:
        with (copied.sources / "layers.py").open("a") as file:
            file.write(extra)
    assemble(copied, "cpu")
    return folder


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this run's tests that the first process to need it makes; the others wait, and only read it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, ready = base / f"once-{name}", base / f"once-{name}.ready"
    with (base / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed at it
            folder.mkdir()
            make(folder)
            ready.touch()
    return folder


def assembled_once(tmp_path_factory, name: str, extra: str = "", package: str = ".") -> Path:
    """The folder of a package that `assemble_cpu` builds, once for all processes of this run."""
    return made_once(tmp_path_factory, name, lambda folder: assemble_cpu(folder, extra, package))


def write_no_kernels(package) -> None:
    """Gives a package the manifest of a build without kernels, where its compiled ones would be."""
    from tools.pack import pack, write_folder

    write_folder(package.sources / "cubins", pack(package, [], {}, {}))


def kernels_of(package: str) -> list:
    """The operations of kernel_src that a package ships. package: the folder of its build.toml in this repository."""
    return operations_of(REPOSITORY / package)


def load(folder: Path):
    from kernels import get_local_kernel

    return get_local_kernel(folder, backend="cpu")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A function that loads a small Llama of a file under a module's name, with pieces of the text replaced."""
    return load_mine(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def package_folder(tmp_path_factory) -> Path:
    """A folder with build/torch-cpu."""
    return assembled_once(tmp_path_factory, "package")


@pytest.fixture(scope="session")
def loaded(package_folder):
    return load(package_folder)


@pytest.fixture
def qwen3(loaded):
    """The loaded package. Whatever a test patches is put back."""
    yield loaded
    loaded.reset()


def package_fixtures(name: str, package: str):
    """Makes three fixtures for a package of this repository: `<name>_folder`, with build/torch-cpu, `loaded_<name>`, loaded from there, and
    `<name>`, the same, which puts back whatever a test patches. package: the folder of its build.toml."""

    @pytest.fixture(scope="session", name=f"{name}_folder")
    def folder(tmp_path_factory) -> Path:
        return assembled_once(tmp_path_factory, name, package=package)

    @pytest.fixture(scope="session", name=f"loaded_{name}")
    def loaded_once(request):
        return load(request.getfixturevalue(f"{name}_folder"))

    @pytest.fixture(name=name)
    def put_back(request):
        found = request.getfixturevalue(f"loaded_{name}")
        yield found
        found.reset()

    return folder, loaded_once, put_back


gpt_oss_folder, loaded_gpt_oss, gpt_oss = package_fixtures("gpt_oss", "packages/gpt-oss")
decoders_folder, loaded_decoders, decoders = package_fixtures("decoders", "packages/decoders")
moe_folder, loaded_moe, moe = package_fixtures("moe", "packages/moe")
qwen3_5_folder, loaded_qwen3_5, qwen3_5 = package_fixtures("qwen3_5", "packages/qwen3_5")


@contextlib.contextmanager
def from_sources(name: str):
    """The package that pip installs, from its sources, under a name of its own: torch.compile keeps modules by their names."""
    sources = REPOSITORY / "torch-ext" / "bastile"
    spec = importlib.util.spec_from_file_location(name, sources / "__init__.py", submodule_search_locations=[str(sources)])
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    yield package
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture(scope="module", name="whole")
def loaded_from_sources():
    with from_sources(f"bastile_front_{next(_loadings)}") as package:
        yield package


@pytest.fixture
def bastile(whole):
    yield whole
    whole.reset()


@pytest.fixture(scope="session")
def liger_folder(tmp_path_factory) -> Path:
    return assembled_once(tmp_path_factory, "liger", package="packages/liger")


@pytest.fixture(scope="session")
def liger(liger_folder):
    """The package for Liger's users, loaded."""
    return load(liger_folder)


@pytest.fixture(scope="session")
def other_build(tmp_path_factory):
    """Another build of the package, loaded beside the first."""
    return load(assembled_once(tmp_path_factory, "other", "\n# another build\n"))


# Every operation that packages share, also those that Qwen3's does not ship.
OPERATION_FILES = sorted((REPOSITORY / "torch-ext/shared/ops").glob("[a-z]*.py"))
ALL_OPERATIONS = "".join(f"from .shared.ops import {path.stem} as _  # noqa\n" for path in OPERATION_FILES)
ALL_OPERATIONS += "from .shared.decoder import norm_projections as _  # noqa\n"  # a node that Qwen3 does not need


@pytest.fixture(scope="session")
def all_operations(tmp_path_factory):
    """A build of its own that holds every operation."""
    return load(assembled_once(tmp_path_factory, "all", "\n" + ALL_OPERATIONS))


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """A build of its own whose kernels the interpreter runs."""
    from interpreter.backend import InterpreterBackend
    from tests.mutants import OPERATIONS
    from tests.ops.common import runtime_of

    package = load(assembled_once(tmp_path_factory, "interpreted", "\n# run by the interpreter\n" + ALL_OPERATIONS))
    runtime = runtime_of(package)
    runtime.launch.backend = InterpreterBackend(runtime, OPERATIONS)
    return package


@pytest.fixture
def replay(interpreted):
    """The module of `interpreted` that replays calls, with no plan so far."""
    next(iter(importlib.import_module(f"{interpreted.__name__}.shared.runtime.tuning").tuner.kernels)).forget()
    return importlib.import_module(f"{interpreted.__name__}.shared.runtime.replay")


@pytest.fixture
def column_sum(interpreted):
    """An operation of `interpreted` that is one launch."""
    return importlib.import_module(f"{interpreted.__name__}.shared.ops.arrays").column_sum


@pytest.fixture
def interpreted_qwen3(interpreted):
    """Returns `interpreted`. Whatever a test patches is put back."""
    yield interpreted
    interpreted.reset()


@pytest.fixture
def interpret():
    """A function of a loaded package and names of operations, whose kernels the interpreter then runs until the test ends; it returns
    what runs them."""
    from interpreter.backend import interpreting
    from tests.ops.common import runtime_of

    with contextlib.ExitStack() as stack:
        yield lambda package, names: stack.enter_context(interpreting(runtime_of(package), names))


@pytest.fixture
def loaded_ops(all_operations):
    """Every operation by its name, in PyTorch."""
    return operations(all_operations)


@pytest.fixture(params=("pytorch", "kernels"))
def ops(request, all_operations):
    """Every operation by its name, in PyTorch and in the interpreted kernels."""
    return operations(all_operations if request.param == "pytorch" else request.getfixturevalue("interpreted"))


@pytest.fixture(params=("pytorch", "kernels"))
def suite_ops(request, all_operations, interpret):
    """The operations of the package for Liger's users, and those of a head, which have no room in it, in PyTorch and in the interpreted
    kernels of that package and of heads."""
    if request.param == "kernels":
        interpret(all_operations, [*kernels_of("packages/liger"), "log_probs", "head_divergence"])
    return suite(all_operations)


@pytest.fixture
def device():
    """Where tests.integrations put their models."""
    return "cpu"


@pytest.fixture(scope="session")
def device_type():
    return "cpu"


@pytest.fixture(scope="module")
def ranks(package_folder):
    """Two processes on the CPU, with gloo, for the tests of one file: each group of processes that a test makes leaves gloo threads that
    wake a hundred times a second as long as its process lives."""
    found = Ranks("cpu", package_folder)
    yield found
    found.close()
