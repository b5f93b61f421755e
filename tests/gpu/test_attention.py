"""Attention with the real cubins: against float64 and SDPA, and whole models through attn_implementation="bastile"."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests import attention_batches
from tests.models import tiny_gpt_oss, tiny_model
from tests.ops import attention as checks
from tests.ops.attention import Case, packed
from tests.tolerances import RELATIVE_ERROR, relative_error

from .conftest import ROOT

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = (300, 1, 64, 513, 146)
LARGE = (
    Case(1500, packed(700, 1, 300, 499), heads=8, kv_heads=2, head_dim=128, packed=True),
    Case(1500, packed(700, 1, 300, 499), heads=16, kv_heads=2, window=128, sinks=True, dtype=FP16),
    Case(1333, ((3, 800), (900, 1333)), heads=8, kv_heads=8, head_dim=128, dtype=FP16, causal=False),
    Case(1111, packed(1111), heads=8, kv_heads=1, sinks=True),
    Case(2049, packed(2049), heads=4, kv_heads=1, head_dim=128, window=1000),
)


@pytest.fixture(scope="module")
def operation(ops):
    return importlib.import_module(f"{ops.__name__}.shared.ops.attention")


# ---------------------------------------------------------------- the operation
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_attention(operation, case):
    checks.check_operation(operation, case, "cuda")


@pytest.mark.parametrize("case", checks.CASES, ids=str)
def test_kernels_read_a_plan_of_the_pytorch_path(operation, case):
    checks.check_plan_reference(operation, case, "cuda")


def test_plans(operation):
    checks.check_plans(operation, "cuda")


def test_packed_equals_apart(operation):
    checks.check_packed_equals_apart(operation, "cuda")


def worst(found, exact):
    """The largest error of a row of a head, and the error of all."""
    error = (found.double().cpu() - exact).flatten(0, -2).norm(dim=-1) if exact.dim() > 1 else (found.double().cpu() - exact).abs()
    return error.max(), error.norm()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_errors_are_no_larger_than_those_of_sdpa(operation, case):
    """Row by row too: the gradient of a query that sees few keys is a small difference, of which any bf16 attention rounds the terms."""
    x = checks.inputs_of(case, "cuda")
    if case.sinks:
        x = x._replace(sinks=x.sinks.to(case.dtype).to(x.sinks.dtype))  # SDPA takes them in its own dtype
    exact = checks.exact_results(case, x)
    plan = checks.plan_of(operation, case, "cuda")
    found, again = (checks.results_of(operation.attention, x, plan=plan, scale=case.scale) for _ in range(2))
    assert all(torch.equal(found[name], again[name]) for name in found), "two runs"
    for name, wanted in exact.items():
        assert relative_error(found[name], wanted) <= RELATIVE_ERROR[case.dtype], f"{name} of {case}"
    mask = checks.visible(case).cuda()
    real = mask.any(1)
    leaves = [t.detach()[real].requires_grad_() for t in x[:3]]
    wide = [t.repeat_interleave(case.heads // t.shape[1], 1).transpose(0, 1)[None] for t in leaves]
    mask = mask[real][:, real]
    if case.sinks:  # a key of zeros, whose scores the mask adds
        wide[1:] = [torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in wide[1:]]
        mask = torch.zeros(mask.shape, dtype=case.dtype, device="cuda").masked_fill(~mask, -torch.inf).expand(case.heads, -1, -1)
        mask = torch.cat((mask, x.sinks.to(case.dtype).view(-1, 1, 1).expand(-1, mask.shape[1], 1)), 2)
    out = scaled_dot_product_attention(*wide, attn_mask=mask)[0].transpose(0, 1)
    gradients = torch.autograd.grad(out, leaves, x.dout[real])
    for name, theirs in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        (row, every), (their_row, their_every) = worst(found[name][real], exact[name][real.cpu()]), worst(theirs, exact[name][real.cpu()])
        found_beside = f"{name}: {every:.2e} {row:.2e}, SDPA's {their_every:.2e} {their_row:.2e}"
        assert every <= 1.1 * their_every and row <= 1.5 * their_row, found_beside


def test_a_cuda_graph(operation):
    case = Case(700, packed(300, 400), heads=4, kv_heads=2, head_dim=128)
    x = checks.inputs_of(case, "cuda")
    cu_seqlens = torch.tensor([0, 300, 700], dtype=torch.int32, device="cuda")

    def run():
        return checks.results_of(operation.attention, x, cu_seqlens=cu_seqlens)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    expected = run()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- models
def qwen3_of(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model(BF16, **{**sizes, "num_hidden_layers": 3, **changes}).cuda()


def gpt_oss_of(**changes):
    return tiny_gpt_oss(BF16, **{"head_dim": 64, "hidden_size": 128, "sliding_window": 100, **changes}).cuda()


def documents():
    return [tokens.cuda() for tokens in attention_batches.documents(lengths=LENGTHS)]


def packed_batch():
    return {name: tensor.cuda() for name, tensor in attention_batches.packed(LENGTHS).items()}


def padded_batch(side="right"):
    return {name: tensor.cuda() for name, tensor in attention_batches.padded(side, LENGTHS).items()}


def gradients_of(model, batch, seen=None):
    model.zero_grad(set_to_none=True)
    logits = model(**batch, use_cache=False).logits
    logits = (logits if seen is None else logits[seen]).float()
    (logits * torch.sin(torch.arange(logits.numel(), device="cuda")).view(logits.shape)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


SLIDING = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}


@pytest.mark.parametrize("how", ("packed", "left", "right"))
@pytest.mark.parametrize("changes", ({}, SLIDING), ids=("full", "sliding"))
def test_a_model_is_as_exact_as_with_sdpa(qwen3, how, changes):
    batch = packed_batch() if how == "packed" else padded_batch(how)
    seen = batch["attention_mask"].bool() if "attention_mask" in batch else None
    model, exact = qwen3_of(**changes), qwen3_of(**changes).float()
    expected = gradients_of(exact, batch, seen)
    before = gradients_of(model, batch, seen)
    qwen3.apply()
    if how == "right":
        model.set_attn_implementation("bastile")  # which is not chosen where what attention returns for padding may be read
    after = gradients_of(model, batch, seen)
    assert model.model.config._attn_implementation == "bastile"
    for mine, theirs, wanted in zip(after, before, expected, strict=True):
        assert error(mine, wanted) <= 1.3 * error(theirs, wanted)
    qwen3.reset()
    assert model.model.config._attn_implementation == ("bastile" if how == "right" else "sdpa")


@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_packed_equals_the_documents_one_by_one(request, family):
    package = request.getfixturevalue(family)
    model = (qwen3_of if family == "qwen3" else gpt_oss_of)()
    package.apply()
    model.eval()
    with torch.no_grad():
        model(documents()[0][None])
        together = model(**packed_batch(), use_cache=False).logits[0].split(LENGTHS)
        for found, tokens in zip(together, documents(), strict=True):
            apart = model(tokens[None], use_cache=False).logits[0]
            assert error(found.float(), apart.float()) < 0.03
    assert model.model.config._attn_implementation == "bastile"


@pytest.mark.parametrize("family", ("qwen3", "gpt_oss"))
def test_padding_left_out_is_the_same_loss(request, family):
    """It is as far from float32 as with the padding; two bf16 runs of GPT-OSS, whose router turns roundings into other experts, are further
    apart."""
    package = request.getfixturevalue(family)
    batch = padded_batch()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    def step(model):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        return loss.detach().float(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])

    make = qwen3_of if family == "qwen3" else gpt_oss_of
    exact, found = step(make().float()), []
    for unpad in (False, True):
        model = make()
        package.apply(unpad=unpad)
        found.append(step(model))
        package.reset()
    (loss, gradient), (their_loss, their_gradient) = ([error(a, b) for a, b in zip(of, exact)] for of in reversed(found))
    assert loss < 1e-3 and their_loss < 1e-3 and gradient < 1.1 * their_gradient, (loss, their_loss, gradient, their_gradient)


@pytest.mark.parametrize("cache", (None, "static"))
def test_generation(qwen3, cache):
    batch = padded_batch("left")
    model = qwen3_of().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True, "output_logits": True}
    expected = model.generate(**batch, **options, return_dict_in_generate=True)
    qwen3.apply()
    found = model.generate(**batch, **options, return_dict_in_generate=True)
    assert error(found.logits[0].float(), expected.logits[0].float()) < 0.03


def test_compile(qwen3):
    model = qwen3.kernelize(qwen3_of())
    batch = packed_batch()
    expected = gradients_of(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    logits = compiled(**batch, use_cache=False).logits.float()
    assert error(logits, expected[0]) < 0.02


NOTHING_IS_COMPILED = """
import sys, torch
import transformers.models.gpt_oss.modeling_gpt_oss  # which asks whether there is a Triton, by importing it
from pathlib import Path
from kernels import get_local_kernel
sys.path.insert(0, sys.argv[1])
package = get_local_kernel(Path(sys.argv[1]) / "packages/gpt-oss", backend="cuda")
from tests.models import tiny_gpt_oss
package.apply()
model = tiny_gpt_oss(torch.bfloat16, attn_implementation=None, head_dim=64, hidden_size=128).cuda()
ids = torch.randint(1, 199, (2, 300), device="cuda")
compilers = {name for name in sys.modules if name.startswith(("triton", "torch._inductor"))}
model(input_ids=ids, labels=ids).loss.backward()
chosen, loaded = model.model.config._attn_implementation, {name for name in sys.modules if name.startswith(("triton", "torch._inductor"))}
assert chosen == "bastile", f"attention is {chosen!r}, expected the package's"
assert loaded == compilers, f"the step imported {sorted(loaded - compilers)}"
"""


def test_gpt_oss_compiles_nothing(tmp_path):
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    command = [sys.executable, "-c", NOTHING_IS_COMPILED, str(ROOT)]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
