"""When something goes wrong outside: no memory, a process killed while it writes, no place to write, forks, copies, the end."""

import contextlib
import importlib.util
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from tests import op_cases as cases
from tests.cpu.conftest import REPOSITORY, assemble_cpu, load
from tests.models import Step, are_equal, random_tokens, tiny_model
from tests.modes import Operators
from tests.ops.common import leaf, randn
from tools import compiler, pack
from tools.assemble import assemble
from tools.kernel_package import read_package
from tools.targets import read_variants

FP32 = torch.float32


# ---------------------------------------------------------------- out of memory
def at_every_operation(work, step=1):
    """Runs work() with no memory for its first operation, for its second, and so on; yields after each failure."""

    def memory_ends(operator, args):
        if operators.count + 1 == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return True

    number = 1
    while True:
        failed = False
        try:
            with Operators(memory_ends) as operators:
                work()
        except torch.OutOfMemoryError:
            failed = True
        if not failed:
            assert operators.count < number
            return
        yield number
        number += step


@pytest.mark.parametrize("operation", cases.CASES)
def test_after_out_of_memory_an_operation_gives_the_same_as_ever(loaded_ops, operation):
    """Wherever it happens, in the forward or in the backward pass: inputs are as they were, and the next call is right."""
    found = cases.arguments(operation)
    before = {name: tensor.clone() for name, tensor in found.items()}
    results, _, gradients = cases.step(loaded_ops, operation, found)
    failures = 0
    for _ in at_every_operation(lambda: cases.step(loaded_ops, operation, found)):
        failures += 1
        assert all(torch.equal(found[name], before[name]) for name in found)
    assert failures > 5
    again, _, gradients_again = cases.step(loaded_ops, operation, found)
    assert all(map(torch.equal, again, results))
    for name, gradient in gradients.items():
        assert gradients_again[name] is gradient is None or torch.equal(gradients_again[name], gradient), name


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_out_of_memory_inside_a_chunk_keeps_nothing_and_a_smaller_batch_goes_on(loaded_ops, monkeypatch, reduction):
    """The buffer of the chunk is free again, and the gradients of an earlier step are untouched."""
    module = importlib.import_module(loaded_ops.linear_cross_entropy.__module__.replace("linear_cross_entropy", "linear_head"))
    monkeypatch.setattr(module, "plan_chunks", lambda *_: module.HeadChunks(4, FP32))
    hidden, weight = randn(11, 8, dtype=FP32, device="cpu"), leaf(randn(50, 8, dtype=FP32, device="cpu", seed=1))
    target = torch.arange(11)
    buffers = []
    empty = torch.empty

    def watched(*args, **options):
        tensor = empty(*args, **options)
        if args[0] == (4, 50):
            buffers.append(weakref.ref(tensor))
        return tensor

    def step(tokens):
        loaded_ops.linear_cross_entropy(hidden[:tokens], weight, target[:tokens], reduction=reduction).sum().backward()

    step(11)
    whole, weight.grad = weight.grad, None
    step(5)
    part = weight.grad.clone()
    monkeypatch.setattr(torch, "empty", watched)
    for _ in at_every_operation(lambda: step(11)):
        assert torch.equal(weight.grad, part), "a step that failed left part of a gradient behind"
        assert all(buffer() is None for buffer in buffers)
    assert torch.allclose(weight.grad, part + whole)
    weight.grad = None
    step(5)
    assert torch.equal(weight.grad, part)


def test_out_of_memory_in_a_model_is_caught_and_a_smaller_batch_goes_on(qwen3):
    model, tokens = qwen3.kernelize(tiny_model()), random_tokens(4, 17)
    small = Step(model, input_ids=tokens[:2], labels=tokens[:2])
    for _ in at_every_operation(lambda: Step(model, input_ids=tokens, labels=tokens), step=53):
        found = Step(model, input_ids=tokens[:2], labels=tokens[:2])
        assert are_equal(found, small)


# ---------------------------------------------------------------- killed while it writes
def killed(work, module, name, call):
    """Runs work() in a child that is killed (SIGKILL) instead of making its `call`th call of module.name. True when it was."""

    def child():
        original, calls = getattr(module, name), []

        def deadly(*args, **options):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(module, name, deadly)
        work()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("module", "name"), ((Path, "write_bytes"), (Path, "rename"), (shutil, "rmtree"), (Path, "write_text")), ids=str)
def test_a_killed_assembly_leaves_the_old_build_the_new_one_or_none(tmp_path, module, name):
    """Whatever `kernels` finds is whole, and the next run gives what an undisturbed one gives."""
    assemble_cpu(tmp_path)
    package, target = read_package(tmp_path), tmp_path / "build/torch-cpu"
    old = content(target)
    (tmp_path / "torch-ext/qwen3/layers.py").open("a").write("\n# changed\n")
    call, seen = 1, set()
    while killed(lambda: assemble(package, "cpu"), module, name, call):
        found = content(target) if target.exists() else None
        seen.add(found is None)
        assert found is None or found == old or load(tmp_path).layers  # whole: its digests are right
        call += 7 if name == "write_bytes" else 1
    assert call > 1
    assemble(package, "cpu")
    new = content(target)
    assert new.keys() == old.keys() and new != old and load(tmp_path).layers
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["torch-cpu"]


def test_a_killed_write_of_the_kernels_leaves_files_that_are_whole_or_refused(tmp_path, qwen3):
    """The manifest comes last: until then the files that changed do not fit it, and the runtime says so."""
    artifacts = importlib.import_module(f"{qwen3.__name__}.shared.runtime.artifacts")
    variants = read_variants(("scale", "column_sum"))
    targets = {artifacts.host(): ("sm_90",)}

    def files(text):
        jobs = [compiler.Job(operation, variant, b"", artifacts.host(), "sm_90") for operation, variant in variants]
        return pack.pack(read_package(REPOSITORY), variants, targets, {job: f"{text} {job.variant.name}".encode() for job in jobs})

    old, new, folder = files("old"), files("new"), tmp_path / "cubins"
    pack.write_folder(folder, old)
    call = 1
    while killed(lambda: pack.write_folder(folder, new), os, "replace", call):
        for name, data in old.items():
            assert (folder / name).read_bytes() in (data, new[name])
        if {name: (folder / name).read_bytes() for name in old} != old:
            with pytest.raises(artifacts.ArtifactError, match="is damaged: sha256"):
                artifacts.Artifacts(folder).verify()
        pack.write_folder(folder, old)
        call += 1
    assert call == len(new) + 1
    assert content(folder) == new
    artifacts.Artifacts(folder).verify()


@contextlib.contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes. Python ignores the signal, so it is an OSError, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_full_disk_what_was_there_stays(tmp_path):
    path = tmp_path / "cubins/swiglu.cubins"
    compiler.write_atomically(path, b"old" * 100)
    with full_disk(1000), pytest.raises(OSError):
        compiler.write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old" * 100
    assert [p.name for p in path.parent.glob("*.cubins")] == [path.name]


# ---------------------------------------------------------------- processes
def python(script, *arguments, **env):
    """Runs a script with the package's folder as its first argument. Its standard output; fails on an error or any complaint."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


TRAIN = """
import sys
from pathlib import Path
from kernels import get_local_kernel
import torch
qwen3 = get_local_kernel(Path(sys.argv[1]), backend="cpu")
from tests.models import Step, random_tokens, tiny_model
model, tokens = qwen3.kernelize(tiny_model()), random_tokens(2, 9)
step = Step(model, input_ids=tokens, labels=tokens)
"""


def test_it_trains_without_a_place_to_write(package_folder):
    """A home that is not writable (there even root cannot write), and files that cannot grow, as on a full disk."""
    places = {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "BASTILE_CACHE": "", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    script = f"""{TRAIN}
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
qwen3.apply()
qwen3.warmup_all_kernels()
qwen3.warmup_all_kernels(model)
qwen3.clear_autotune_cache()
again = Step(model, input_ids=tokens, labels=tokens)
assert torch.equal(step.loss, again.loss)
qwen3.reset()
sys.stdout.write("ok")
"""
    assert python(script, package_folder, **places) == "ok"


def test_at_the_end_of_the_interpreter_nothing_is_printed(package_folder):
    """With a graph that was never run backward, a compiled function, and transformers still patched."""
    script = f"""{TRAIN}
loss = model(input_ids=tokens, labels=tokens).loss
compiled = torch.compile(qwen3.swiglu, backend="aot_eager")
pending = compiled(*torch.ones(2, 3, 4, requires_grad=True))
qwen3.apply()
print("end")
"""
    assert python(script, package_folder) == "end\n"


class Rows(torch.utils.data.Dataset):
    """Rows that its workers compute with the package."""

    def __init__(self, qwen3):
        self.qwen3 = qwen3

    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((4,), float(i + 1), requires_grad=True)
        y = self.qwen3.rms_norm(x, torch.ones(4))
        self.qwen3.linear_cross_entropy(y[None], torch.ones(5, 4), torch.tensor([i % 5])).backward()
        return y.detach()


def test_forked_workers_of_a_dataloader_use_the_package_that_the_parent_loaded(qwen3):
    """After the parent has trained, which then goes on as if nothing had been."""
    model, tokens = qwen3.kernelize(tiny_model()), random_tokens(2, 9)
    expected = Step(model, input_ids=tokens, labels=tokens)
    loader = torch.utils.data.DataLoader(Rows(qwen3), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    batches = list(loader)
    assert torch.allclose(torch.cat(batches), torch.ones(8, 4))
    Step(model, input_ids=tokens, labels=tokens).assert_same(expected)


# ---------------------------------------------------------------- two of it
def copy_of_the_sources(name):
    """The package, loaded once more under another name."""
    folder = REPOSITORY / "torch-ext/qwen3"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py",
                                                  submodule_search_locations=[str(folder), str(folder.parent)])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_two_copies_of_the_sources_work_side_by_side():
    """Eager, compiled, and patching: the later one does not break the former."""
    first, second = copy_of_the_sources("first_copy"), copy_of_the_sources("second_copy")
    x, weight = randn(3, 16, dtype=FP32, device="cpu"), randn(16, dtype=FP32, device="cpu", seed=1)
    expected = first.rms_norm(x, weight)
    tokens = random_tokens(2, 9)
    plain = Step(tiny_model(), input_ids=tokens, labels=tokens)
    try:
        for copy in (second, first, second):
            torch._dynamo.reset()
            assert torch.equal(copy.rms_norm(x, weight), expected)
            assert torch.equal(torch.compile(copy.rms_norm, backend="aot_eager", fullgraph=True)(x, weight), expected)
            copy.apply()
            Step(tiny_model(), input_ids=tokens, labels=tokens).assert_same(plain)
            Step(copy.kernelize(tiny_model()), input_ids=tokens, labels=tokens).assert_same(plain)
    finally:
        first.reset()
        second.reset()
        for name in [name for name in sys.modules if name.split(".")[0] in ("first_copy", "second_copy")]:
            del sys.modules[name]
    Step(tiny_model(), input_ids=tokens, labels=tokens).assert_same(plain)
