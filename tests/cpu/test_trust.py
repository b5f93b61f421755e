"""What the package touches: nothing at import but its own files, and afterwards nothing but them.

Python's audit hooks see every file, socket, process and library that Python code opens. tests/cpu/runtime/test_artifacts.py has the digests
of what goes to the driver, tests/cpu/publishing/test_hub.py what the local Hub refuses.
"""

import json
import platform
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.cpu.conftest import REPOSITORY
from tools import compiler, pack, targets
from tools.kernel_package import read_package
from tools.kernels_adapter import hash_files

IMAGE = b"\x7fELF".ljust(64, b"\0")  # the header of an ELF file without segments and sections
WATCHED = """
    import json, os, sys
    import torch
    sys.path[:0] = [REPOSITORY, os.path.dirname(FOLDER)]
    sys.dont_write_bytecode = True
    own = os.path.realpath(FOLDER) + os.sep
    events = []

    @torch.library.custom_op("audit::warm_up", mutates_args=())
    def warm_up(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    warm_up.register_fake(lambda x: x)

    def watch(event, args):
        # compile, exec, import, marshal and object.* are what importing its own modules consists of
        if event.split(".")[0] in ("compile", "exec", "import", "marshal", "object", "code", "sys", "builtins", "gc", "cpython"):
            return
        if event in ("os.listdir", "os.scandir", "open") and os.path.realpath(os.fsdecode(args[0] or ".")).startswith(own):
            return
        if event in ("os.listdir", "open") and own.startswith(os.path.realpath(os.fsdecode(args[0] or "."))):
            return  # a folder above, while the module is looked for
        if event == "os.listdir" and args[0] in sys.path:
            return  # the same, where something has changed since it was looked into last
        if event == "ctypes.dlopen" and args[0] == "libnvidia-ml.so.1":
            return  # by it a PyTorch that is built for GPUs counts them
        events.append([event, repr(args)[:200]])

    sys.addaudithook(watch)
"""


def events_of(script, folder):
    """What a script does after `watch` is in place, as [event, arguments]."""
    head = f"FOLDER, REPOSITORY, IMAGE = {str(folder)!r}, {str(REPOSITORY)!r}, {IMAGE!r}\n"
    script = head + textwrap.dedent(WATCHED) + textwrap.dedent(script) + "\nprint(json.dumps(events))\n"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(package_folder, tmp_path_factory):
    """The package, with two files of kernels."""
    folder = shutil.copytree(package_folder / "build/torch-cpu", tmp_path_factory.mktemp("trust") / "watched")
    variants, host = targets.read_variants(("scale", "column_sum")), platform.machine()
    images = {compiler.Job(operation, variant, b"", host, "sm_90"): IMAGE for operation, variant in variants}
    pack.write_folder(folder / "cubins", pack.pack(read_package(REPOSITORY), variants, {host: ("sm_90",)}, images))
    described = json.loads((folder / "metadata.json").read_text())
    described["digest"]["files"] = hash_files(folder)
    (folder / "metadata.json").write_text(json.dumps(described))
    return folder


def test_importing_it_opens_its_own_files_and_nothing_else(folder):
    """No other file, no socket, no process, no library."""
    assert events_of("import watched", folder) == []


def test_its_operations_open_nothing_else(folder):
    script = """
        import watched
        x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        head = torch.randn(9, 8, requires_grad=True)
        y, total = watched.add_rms_norm(watched.swiglu(x, x), watched.rms_norm(x, weight), weight)
        watched.linear_cross_entropy(watched.mlp(y, head, head, torch.randn(8, 9)) + total, head, torch.tensor([1, 2, 3])).backward()
        watched.get_patched_ops(), watched.reset(), watched.warmup_all_kernels()
    """
    assert events_of(script, folder) == []


def test_of_its_kernels_it_opens_its_own_files_and_the_drivers_library(folder):
    script = """
        import watched
        from watched.shared.runtime.driver import DriverError
        from watched.shared.runtime.launch import backend
        backend.artifacts.verify()
        [variant] = [v for v in backend.artifacts.variants("column_sum")][:1]
        assert backend.artifacts.image(variant, "sm_90") == IMAGE
        try:
            backend.version()
        except DriverError:
            pass  # this machine has none
    """
    assert [event for event in events_of(script, folder) if event[0] != "ctypes.dlsym"] == [["ctypes.dlopen", "('libcuda.so.1',)"]]


def test_the_hook_sees_what_it_is_there_to_see(folder):
    """Else an empty list would say nothing."""
    script = """
        import ctypes, socket, subprocess
        open("/etc/hostname", "rb").close()
        socket.socket().close()
        subprocess.run(["/bin/true"])
        ctypes.CDLL(None)
    """
    seen = {event for event, _ in events_of(script, folder)}
    assert {"open", "socket.__new__", "subprocess.Popen", "ctypes.dlopen"} <= seen
