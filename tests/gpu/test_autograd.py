"""What autograd relies on, with the real cubins: see tests/op_cases.py."""

import os
import subprocess
import sys

import pytest
import torch

from tests import op_cases as cases
from tests.gpu.conftest import ROOT
from tests.ops.common import FLOATS

DETERMINISTIC = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
from tests.models import Step, random_tokens, tiny_model

torch.use_deterministic_algorithms(True)
qwen3 = get_local_kernel(Path(sys.argv[1]), backend="cuda")
sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
model, tokens = qwen3.kernelize(tiny_model(torch.bfloat16, **sizes).cuda()), random_tokens(2, 129).cuda()
first, *others = [Step(model, input_ids=tokens, labels=tokens) for _ in range(4)]
for other in others:
    assert torch.equal(other.loss, first.loss)
    assert all(torch.equal(other.gradients[name], gradient) for name, gradient in first.gradients.items())
print("ok")
"""


@pytest.mark.parametrize("check", cases.AUTOGRAD_CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("operation", cases.OF_QWEN3_AND_GPT_OSS)
def test_autograd(ops, qwen3_5, gpt_oss, operation, dtype, check, monkeypatch):
    if check is cases.check_the_same_bits_on_every_run:
        # cuBLAS looks once for CUBLAS_WORKSPACE_CONFIG, so this cannot be asked of it any more; the whole model below is.
        monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    check(cases.operations(ops, qwen3_5, gpt_oss), operation, dtype, "cuda")


def test_a_model_gives_the_same_bits_on_every_run_with_deterministic_algorithms():
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC, str(ROOT)],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "BASTILE_STRICT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-2000:]
