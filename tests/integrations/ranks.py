"""Processes that work together, one a rank: gloo on the CPU, NCCL with a GPU for each.

They are started once for many tests and run checks by their names.
"""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

from tests.heap import settle

WORLD = 2
TIMEOUT_S = 120  # of one check
# What takes a process seconds to import. On the CPU one process imports it, of which the others are forks; a GPU's must not be forked.
PRELOADED = ("torch.distributed.fsdp", "transformers.trainer", "transformers.models.qwen3.modeling_qwen3", "peft", "kernels")


@dataclass
class Rank:
    """What a check gets: its number, its device, the loaded package, a mesh of all ranks, and how many there are."""

    rank: int
    device: str  # "cpu" or "cuda"
    qwen3: ModuleType
    mesh: object
    world: int = WORLD

    @property
    def own_device(self) -> str:
        return "cpu" if self.device == "cpu" else f"cuda:{self.rank}"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _work(rank: int, world: int, device: str, package: Path, port: int, connection) -> None:
    """The life of a process: runs each check that arrives, answers with "" or a traceback, ends when nothing more can come."""
    number = str(rank)
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TOKENIZERS_PARALLELISM": "false", "BASTILE_STRICT": "1"}
    import torch
    import torch.distributed as dist
    from kernels import get_local_kernel
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=TIMEOUT_S))
    qwen3 = get_local_kernel(package, backend=device)
    here = Rank(rank, device, qwen3, init_device_mesh(device, (world,)), world)
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            check = inspect.unwrap(getattr(importlib.import_module(module), name))
            settle()
            check(here, *arguments)
            connection.send("")
        except BaseException:
            connection.send(traceback.format_exc())
        finally:
            qwen3.reset()


class Ranks:
    """The processes of a device. A check that fails ends them all, because its partners may wait for it; the next starts new ones."""

    def __init__(self, device: str, package: Path, world: int = WORLD):
        self.device, self.package, self.world = device, package, world
        self.processes: list = []

    def start(self) -> None:
        context, port = multiprocessing.get_context("forkserver" if self.device == "cpu" else "spawn"), _free_port()
        context.set_forkserver_preload(list(PRELOADED))
        self.connections = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, self.device, self.package, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, check, *arguments) -> None:
        """Runs a function of a module in every process, as check(rank, *arguments). Raises AssertionError with what went wrong."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # of a process that ended: said below
                connection.send((check.__module__, check.__name__, arguments))
        waiting = dict(zip(self.connections, range(self.world)))
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            failure = "" if ready else f"no answer within {TIMEOUT_S} s"
            for connection in ready:
                try:
                    failure = failure or connection.recv()
                except (EOFError, OSError):
                    failure = "the process ended, see its output"
                rank = waiting.pop(connection)
                if failure:
                    break
            if failure:
                self.stop()
                raise AssertionError(f"rank {rank if ready else sorted(waiting.values())}: {failure}")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def close(self) -> None:
        """Lets the processes end in order."""
        if self.processes:
            for connection in self.connections:
                connection.close()
            for process in self.processes:
                process.join(10)
        self.stop()


def in_each_process(check):
    """Makes a test of a check, which each process of the fixture `ranks` runs: with its `Rank`, and then the arguments of the test."""
    first, *others = inspect.signature(check).parameters.values()

    @functools.wraps(check)
    def test(ranks, **given):
        ranks.run(check, *(given[parameter.name] for parameter in others))

    test.__signature__ = inspect.Signature([first.replace(name="ranks"), *others])  # what pytest gives it
    return test
