"""The processes that measure one provider, one a GPU, seen from their parent, which never touches a GPU.

Each is new, so that what one provider does to transformers reaches no other. It is forked from a server that has imported what all of
them need (preloaded.py), because these imports take longer than the steps that are measured, and starts CUDA itself.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import runpy
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch

from .records import ROOT
from .stepping import MARK

NOT_INITIALIZED = 3  # what the driver answers before anything has started CUDA
# Without expandable segments the lengths of one process leave holes that the next length does not fit into.
DEFAULTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
FORKING = multiprocessing.get_context("forkserver")  # one server for all runs of this process
FORKING.set_forkserver_preload([f"{__package__}.preloaded"])


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Give this process environment variables for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cuda_was_started() -> bool:
    """Tell whether this process or the one that it was forked from has started CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return torch.cuda._is_in_bad_fork() or driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != NOT_INITIALIZED


def run_forked(script: str, arguments: list[str], variables: dict[str, str], output, errors: str, fresh: bool) -> None:
    """Run a script in a process that was just forked. output: the connection that takes its standard output, or None; errors: the file for
    the other. fresh: in an interpreter that has imported nothing; also taken where something imported has started CUDA."""
    os.dup2(output.fileno() if output else os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    if fresh or cuda_was_started():
        os.execve(sys.executable, [sys.executable, script, *arguments], variables)
    os.environ.clear()
    os.environ.update(variables)
    if count := variables.get("OMP_NUM_THREADS"):  # which was read when torch was imported
        torch.set_num_threads(int(count))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


class Group:
    """The processes that run one provider, one a GPU. All end when one fails or the time is over.

    fresh: each in a new interpreter, as a user's program starts, and as what replaces parts of transformers before they are imported needs.
    """

    def __init__(self, script: str, arguments: list[str], gpus: int, fresh: bool = False):
        port = str(free_port())
        self.errors = [tempfile.NamedTemporaryFile("w+") for _ in range(gpus)]
        self.processes = []
        self.output, written = multiprocessing.Pipe(duplex=False)
        variables = DEFAULTS | os.environ | {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(gpus):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (script, arguments, own, None if rank else written, self.errors[rank].name, fresh)
            process = FORKING.Process(target=run_forked, args=given)
            # Those of the server, which the first process starts: it must find this folder, and ask for GPUs without starting CUDA.
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            with environment(DEFAULTS | os.environ | {"PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
                process.start()
            self.processes.append(process)
        written.close()
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self.output.fileno())) as lines:
            for line in lines:
                if line.startswith(MARK):
                    self.lines.put(json.loads(line.removeprefix(MARK)))
        self.lines.put(None)

    def reports(self, deadline: float) -> Iterator[dict]:
        """Yield what the first process reports, then how the group ended where that is not its own report."""
        failed = False
        while True:
            try:
                report = self.lines.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self.end()
                    yield {"kind": "late"}
                    return
                if self.failure():
                    break
                continue
            if report is None:
                break
            failed = failed or report["kind"] == "failed"
            yield report
        end = time.monotonic() + 30
        while any(p.is_alive() for p in self.processes) and not self.failure() and time.monotonic() < end:
            time.sleep(0.1)
        failure = self.failure()
        self.end()  # a process whose partner died waits for it for ever
        if failure and not failed:
            yield {"kind": "failed", "tokens": 0, "error": failure}

    def failure(self) -> str:
        """Return how the first process that failed did, or ""."""
        for rank, process in enumerate(self.processes):
            if process.exitcode:
                self.errors[rank].seek(0)
                lines = [line.strip() for line in self.errors[rank] if line.strip()]
                return f"process {rank} ended with {process.exitcode}: {(lines or [''])[-1][:300]}"
        return ""

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
