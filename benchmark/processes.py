"""The processes that measure one provider, one a GPU, seen from their parent, which never touches a GPU."""

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from .stepping import MARK


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Group:
    """The processes that run one provider, one a GPU. All end when one fails or the time is over."""

    def __init__(self, script: str, arguments: list[str], gpus: int):
        port = str(free_port())
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(gpus)]
        self.processes = []
        for rank in range(gpus):
            environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(gpus), MASTER_ADDR="127.0.0.1")
            environment["MASTER_PORT"] = port
            # Without it the lengths of one process leave holes that the next length does not fit into.
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, script, *arguments]
            self.processes.append(subprocess.Popen(command, stdout=stdout, stderr=self.errors[rank], text=True, env=environment))
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.processes[0].stdout or ():
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
        while any(p.poll() is None for p in self.processes) and not self.failure() and time.monotonic() < end:
            time.sleep(0.1)
        failure = self.failure()
        self.end()  # a process whose partner died waits for it for ever
        if failure and not failed:
            yield {"kind": "failed", "tokens": 0, "error": failure}

    def failure(self) -> str:
        """Return how the first process that failed did, or ""."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                self.errors[rank].seek(0)
                lines = [line.strip() for line in self.errors[rank] if line.strip()]
                return f"process {rank} ended with {process.returncode}: {(lines or [''])[-1][:300]}"
        return ""

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
