"""The benchmark as `kernels benchmark` runs it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark import benchmark_fsdp, benchmark_generate, benchmark_operations, kernels_cli, operations_rows, records, registry
from tests.benchmark_support import one_thread, sources  # noqa: F401
from tests.publishing import KERNELS
from tools.built import benchmark_files
from tools.kernel_package import read_package


def test_the_generation_benchmark_for_kernels_runs(qwen3):
    bench = benchmark_generate.Qwen3GenerateBenchmark()
    bench.kernel, bench.device = qwen3, "cpu"
    bench.setup()
    for name in ("prefill", "decode"):
        getattr(bench, f"benchmark_{name}")()
        assert torch.allclose(bench.out, getattr(bench, f"verify_{name}")(), atol=1e-2)


def test_every_file_has_a_class_for_kernels_benchmark():
    """`kernels benchmark` loads each file on its own and ends at the first that defines none."""
    cli = pytest.importorskip("kernels.cli.benchmark")
    scripts = cli.discover_benchmark_scripts("bastile", records.ROOT)
    assert {"benchmark_qwen3.py", "benchmark_fsdp.py", "benchmark_rms_norm.py"} <= {s.name for s in scripts}
    for script in scripts:
        found = cli.discover_benchmark_classes(script, records.ROOT)
        assert len(found) == 1 or script.name == "benchmark_operations.py"
        for cls in found:
            assert any(name.startswith("benchmark_") for base in cls.__mro__ for name in vars(base))
    assert issubclass(benchmark_fsdp.Qwen3ShardedStepBenchmark, kernels_cli.Benchmark)


def test_the_class_for_kernels_benchmark_runs(loaded):
    bench = type("SwiGLU", (kernels_cli.OperationBenchmark,), {"operation": operations_rows.SWIGLU})()
    bench.kernel, bench.device = loaded, "cpu"
    for name in ("forward", "full"):
        bench.setup()
        getattr(bench, f"benchmark_{name}")()
        assert torch.allclose(bench.out, getattr(bench, f"verify_{name}")(), atol=1e-2)


def operations_published() -> list[type]:
    """The classes of benchmark_operations.py."""
    found = vars(benchmark_operations).values()
    return [cls for cls in found if isinstance(cls, type) and cls.__module__ == benchmark_operations.__name__]


def test_every_file_of_qwen3s_operations_has_a_class_for_kernels_benchmark():
    """What is run alone by a file of its own is published with the others in one."""
    published = {cls.operation.script or cls.operation.name for cls in operations_published()}
    ours = [operation for operation in registry.operations().values() if operation.suite.package == "."]
    assert published - {"experts"} == {operation.script or operation.name for operation in ours}


def as_in_the_hubs_cache(folder: Path) -> Path:
    """Lay the files that are published as huggingface_hub lays a snapshot: each a link to a blob under another name."""
    snapshot, blobs = folder / "snapshots" / "0123abc", folder / "blobs"
    (snapshot / "benchmarks").mkdir(parents=True)
    blobs.mkdir()
    for source in benchmark_files(read_package(records.ROOT)).values():
        blob = blobs / hashlib.sha256(source.read_bytes()).hexdigest()
        blob.write_bytes(source.read_bytes())
        (snapshot / "benchmarks" / source.name).symlink_to(Path("../../../blobs") / blob.name)
    return snapshot


def test_kernels_benchmark_runs_every_file_of_a_snapshot(package_folder, tmp_path):
    """The real command, on tiny sizes: it compares each result with the formula's, and ends at the first that differs."""
    pytest.importorskip("tabulate")
    snapshot = as_in_the_hubs_cache(tmp_path)
    (snapshot / "build").symlink_to(package_folder / "build")
    command = [sys.executable, "-P", "-c", KERNELS, "benchmark", ".", "--iterations", "1", "--warmup", "0", "--output", "found.json"]
    done = subprocess.run(command, cwd=snapshot, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    results = {found["workload"]: found["verified"] for found in json.loads((snapshot / "found.json").read_text())["results"]}
    assert all(results.values())
    models_of = {
        "Qwen3StepBenchmark": ["step"],
        "Qwen3ShardedStepBenchmark": ["step"],
        "Qwen3LoRAStepBenchmark": ["step"],
        "Qwen3TrainerStepBenchmark": ["step"],
        "Qwen3OffloadedStepBenchmark": ["step"],
        "Qwen3PaddedStepBenchmark": ["step"],
        "Qwen3EightBitsStepBenchmark": ["step"],
        "Qwen3GenerateBenchmark": ["prefill", "decode"],
        "AdamWBenchmark": ["step"],
        "CallBenchmark": ["rms_norm"],
    }
    whole = {f"{name}.{workload}" for name, workloads in models_of.items() for workload in workloads}
    assert whole < set(results)
    assert {name.partition(".")[2] for name in set(results) - whole} == {"forward", "full"}
    assert len(operations_published()) == 10 and len(results.keys() - whole) == 2 * 10
    assert len(list((snapshot / "benchmarks").glob("benchmark_*.py"))) == 1 + len(models_of)
