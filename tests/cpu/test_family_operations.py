"""The operations that families other than Qwen3 and GPT-OSS need, against float64, in PyTorch and through the interpreter."""

import copy
import importlib

import pytest
import torch

from tests.cpu.conftest import kernels_of as kernels_of_package
from tests.decoder_families import tiny
from tests.models import Step, random_tokens
from tests.modes import new_memory_is_nan
from tests.ops.common import FLOATS, runtime_of

# The file in tests/ops -> the files of kernel_src whose kernels it runs.
OPERATIONS = {
    "residual_norm": ("residual_norm", "double_tile_norms", "general_rms_norm", "column_sum"),
    "gated_rms_norm": ("gated_rms_norm", "column_sum"),
    "gated_output": ("gated_output",),
    "head_norm_rotary": (
        "head_norm_rotary", "row_norm_rotary", "column_sum", "general_rms_norm", "rotary", "mrope", "llama4_rope",
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernels", (False, True), ids=("pytorch", "kernels"))
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(all_operations, interpret, name, kernels, dtype):
    ran = interpret(all_operations, OPERATIONS[name]).launched if kernels else []
    failures = []
    with new_memory_is_nan():
        for case, check in importlib.import_module(f"tests.ops.{name}").all_cases(all_operations, "cpu", (dtype,)):
            try:
                check()
            except AssertionError as error:
                failures.append(f"{case}: {error}")
    assert not failures, "\n".join(failures)
    if kernels:
        files = [name, "row_norm_rotary"] if (name, dtype) == ("head_norm_rotary", torch.bfloat16) else [name]
        own = {k for k in runtime_of(all_operations).launch.backend.artifacts.kernels() if k in set().union(*map(kernels_of, files))}
        assert own <= {variant.split("-")[0] for variant in ran}, "a kernel of these files did not run"


def kernels_of(name: str) -> set:
    """The kernels that a file of kernel_src prebuilds."""
    return {variant.kernel_name for variant in importlib.import_module(f"kernel_src.{name}").variants()}


# The kernels that a family's own norms and rotary embedding come to in one training step.
KERNELS = {
    "llama": {"general_rms_norm_forward", "general_add_rms_norm_forward", "general_rms_norm_apply", "general_add_rms_norm_backward"},
    "granite": {"scaled_add_norm_forward", "general_rms_norm_apply", "general_add_rms_norm_backward"},
    "olmo2": {"norm_add_forward", "general_rms_norm_backward"},
    "gemma3_text": {"norm_add_norm_forward", "norm_add_forward", "general_rms_norm_apply", "general_add_rms_norm_backward",
                    "head_norm_rotary_forward", "head_norm_rotary_backward"},
    "glm4": {"norm_add_norm_forward", "norm_add_forward", "general_rms_norm_apply", "llama4_rope"},
    "phi3": {"mrope_any"},
    "ernie4_5": {"llama4_rope"},
}  # fmt: skip
HEADS = {"gemma3_text": 128}  # of a length that has kernels


@pytest.mark.parametrize(
    ("name", "head_dim", "reason"),
    (
        ("llama", 12, "there is no kernel for heads of 12"), ("llama", 64, ""), ("phi3", 96, ""), ("gemma3_text", 256, ""),
        ("gemma2", 256, ""), ("gemma2", 128, ""), ("gemma2", 96, "there is no kernel for heads of 96 whose scores are capped"),
    ),
)
def test_explain_says_where_attention_has_no_kernel(decoders, interpret, name, head_dim, reason):
    interpret(decoders, kernels_of_package("packages/decoders"))
    model = decoders.kernelize(tiny(name, head_dim=head_dim, num_hidden_layers=1, attn_implementation=None))
    found = [row.reason for row in decoders.explain(model).rows if row.part == "attention"]
    assert len(found) == bool(reason) and all(reason in text for text in found)


@pytest.mark.parametrize(("name", "kv_heads"), (("olmo2", 16), ("olmo3", 8)))
def test_a_step_with_norms_of_whole_rows_runs_in_one_kernel(decoders, interpret, name, kv_heads):
    """In bf16, which alone has such a kernel, and for 16 heads of q and of k; another number of heads takes the operations one by one."""
    model = tiny(name, torch.bfloat16, hidden_size=192, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=kv_heads,
                 head_dim=128, attn_implementation="eager")  # fmt: skip
    tokens = random_tokens(1, 5)
    exact, before = (Step(m, input_ids=tokens, labels=tokens, use_cache=False) for m in (copy.deepcopy(model).double(), model))
    ran = interpret(decoders, kernels_of_package("packages/decoders")).launched
    decoders.kernelize(model)
    Step(model, input_ids=tokens, labels=tokens, use_cache=False).assert_as_exact_as(before, exact)
    own = {variant.split("-")[0] for variant in ran if variant.startswith("row_norm_rotary")}
    assert own == (kernels_of("row_norm_rotary") if kv_heads == 16 else set())


@pytest.mark.parametrize("packed", (True, False))
def test_gradients_of_turned_heads_go_where_a_packed_projection_reads_them(decoders, interpret, monkeypatch, packed):
    """They are not made first and copied then."""
    heads, made = importlib.import_module(f"{decoders.__name__}.shared.decoder.heads"), []
    backward = heads.rotary_backward
    monkeypatch.setattr(heads, "rotary_backward", lambda *given: made.append(given) or backward(*given))
    interpret(decoders, kernels_of_package("packages/decoders"))
    model, tokens = decoders.kernelize(tiny("llama", num_hidden_layers=1)), random_tokens(1, 5)
    if packed:
        decoders.pack(model)
    Step(model, input_ids=tokens, labels=tokens, use_cache=False)
    assert len(made) == (0 if packed else 1)


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_of_a_family_runs_in_kernels(decoders, interpret, name):
    def step_of(model):
        tokens = random_tokens(1, 5)
        return Step(model, input_ids=tokens, labels=tokens, use_cache=False)

    model = tiny(name, hidden_size=192, head_dim=HEADS.get(name, 12), num_hidden_layers=1, attn_implementation="eager")
    expected = step_of(model)
    ran = interpret(decoders, kernels_of_package("packages/decoders")).launched
    decoders.kernelize(model)
    step_of(model).assert_same(expected, 3)
    found = {variant.split("-")[0] for variant in ran}
    assert KERNELS[name] <= found, KERNELS[name] - found
