"""What goes wrong on a real GPU: no memory, damaged or foreign images, forks, and the end of the interpreter."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.gpu.conftest import ROOT
from tests.ops.common import leaf, randn

BUILD = ROOT / "build/torch-cuda"


def python(script, folder=ROOT, **env):
    """Runs a script that has loaded the package as `qwen3`. (exit status, standard output, standard error)"""
    head = f"""
import sys, warnings
from pathlib import Path
import torch
from kernels import get_local_kernel
qwen3 = get_local_kernel(Path({str(folder)!r}), backend="cuda")
x, weight = torch.ones(8, 1024, device="cuda", dtype=torch.bfloat16), torch.ones(1024, device="cuda", dtype=torch.bfloat16)
"""
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        env={**os.environ, "BASTILE_STRICT": "", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.strip(), done.stderr


# ---------------------------------------------------------------- out of memory
def test_out_of_memory_inside_a_chunk_is_caught_and_a_smaller_batch_goes_on(ops):
    """The process may take a little more than what there is. Until it fits, the batch is halved; then the step is right."""
    classes, features = 151936, 256
    weight = leaf(randn(classes, features, dtype=torch.bfloat16, device="cuda", seed=1, scale=features**-0.5))
    hidden = randn(8192, features, dtype=torch.bfloat16, device="cuda")
    target = torch.arange(8192, device="cuda")
    ops.linear_cross_entropy(hidden[:512], weight, target[:512]).backward()  # the kernels and cuBLAS's workspace are there
    # With gradients: without them no logits are rounded, and the loss differs in the fifth digit.
    expected = [ops.linear_cross_entropy(hidden[:n], weight, target[:n]).item() for n in (8192, 4096, 2048, 1024, 512, 256)]
    weight.grad = None
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Room for the gradient and half of the logits of a chunk.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2 * weight.numel() + 2048 * classes) / total)
    tokens, failures = 8192, 0
    try:
        while True:
            try:
                loss = ops.linear_cross_entropy(hidden[:tokens], weight, target[:tokens])
                loss.backward()
                break
            except torch.OutOfMemoryError:
                failures += 1
                assert weight.grad is None
                tokens //= 2
        assert failures and tokens >= 256
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = loss.item(), weight.grad.clone()
    assert found[0] == pytest.approx(expected[failures], rel=1e-5)
    weight.grad = None
    ops.linear_cross_entropy(hidden[:tokens], weight, target[:tokens]).backward()
    assert torch.equal(weight.grad, found[1])


# ---------------------------------------------------------------- damaged and foreign images
def spoilt(tmp_path, spoil):
    """A copy of the build in which `spoil(manifest, data of column_sum's file)` has changed both; the digest fits what it returns."""
    folder = tmp_path / "build/torch-cuda"
    shutil.copytree(BUILD, folder)
    path = folder / "cubins/manifest.json"
    manifest = json.loads(path.read_text())
    [name] = [name for name in manifest["files"] if name == "column_sum.cubins"]
    data = spoil(manifest, (folder / "cubins" / name).read_bytes())
    (folder / "cubins" / name).write_bytes(data)
    manifest["files"][name] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(manifest))
    seal(folder)
    return tmp_path


def seal(folder):
    """Writes the digests of what lies in a build into its metadata, which would be refused first otherwise."""
    path = folder / "metadata.json"
    found = json.loads(path.read_text())
    digest = found["digest"]
    for name in digest["files"]:
        digest["files"][name] = base64.b64encode(hashlib.new(digest["algorithm"], (folder / name).read_bytes()).digest()).decode()
    path.write_text(json.dumps(found))


def image_of_another_gpu(manifest, data):
    major, minor = torch.cuda.get_device_capability()
    other = next((name for name in manifest["architectures"]["x86_64"] if name not in (f"sm_{major}{minor}", "sm_80")), None)
    if other is None:
        pytest.skip("the build is for this GPU alone: make build")
    streams = manifest["streams"]["column_sum.cubins"]["x86_64"]
    for places in (streams, *(variant["images"]["x86_64"] for variant in manifest["kernels"]["column_sum"])):
        places[f"sm_{major}{minor}"] = places[other]
    return data


USE = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        y = qwen3.rms_norm(x, weight)
assert torch.equal(y, torch.ones_like(y)), y
print(len(caught), *[str(w.message) for w in caught])
"""


def test_an_image_that_the_driver_refuses_is_said_once_and_pytorch_takes_its_place(tmp_path):
    folder = spoilt(tmp_path, image_of_another_gpu)
    code, out, errors = python(USE, folder)
    assert code == 0, errors
    assert out.startswith("1 Bastile's kernels do not run on cuda:0") and "column_sum" in out and "CUDA error" in out
    code, _, errors = python(USE, folder, BASTILE_STRICT="1")
    assert code != 0 and "KernelsUnavailable" in errors


def flipped(data):
    return bytes([data[0] ^ 1]) + data[1:]


def cut_short(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize("damage", (flipped, cut_short), ids=lambda f: f.__name__)
def test_a_damaged_file_of_images_is_said_once_and_pytorch_takes_its_place(tmp_path, damage):
    """The driver never sees it: it would read past the end of an image that is too short."""
    shutil.copytree(BUILD, tmp_path / "build/torch-cuda")
    path = tmp_path / "build/torch-cuda/cubins/swiglu.cubins"
    path.write_bytes(damage(path.read_bytes()))
    seal(tmp_path / "build/torch-cuda")
    code, out, errors = python(USE, tmp_path)
    assert code == 0, errors
    assert out.startswith("1 ") and "swiglu.cubins is damaged: sha256" in out and "download it again" in out


# ---------------------------------------------------------------- processes
def test_forked_workers_of_a_dataloader_leave_the_parents_gpu_alone():
    """They have the package and no GPU; the parent goes on training."""
    script = """
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, i):
                return qwen3.rms_norm(torch.full((4,), float(i + 1)), torch.ones(4))

        def step():
            a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
            qwen3.rms_norm(a, b).sum().backward()
            return b.grad

        first = step()
        rows = torch.cat(list(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)))
        assert torch.allclose(rows, torch.ones(8, 4))
        assert torch.equal(step(), first)
        print("ok")
    """
    code, out, errors = python(script, BASTILE_STRICT="1")
    assert code == 0 and out == "ok", errors


def test_at_the_end_of_the_interpreter_nothing_is_printed():
    """With a graph that was never run backward, and launches that are still under way."""
    script = """
        pending = qwen3.rms_norm(x.requires_grad_(), weight)
        big = torch.ones(1 << 16, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(50):
            big = qwen3.swiglu(big, big)
        print("end")
    """
    code, out, errors = python(script, BASTILE_STRICT="1")
    assert (code, out, errors) == (0, "end", "")
