"""Of files of models with a change, found by a seed, none is served as what it is not: results, gradients and generation are its own."""

import copy
import warnings

import pytest
import torch

from tests.changed_files import KINDS, OF_EXPERTS, changed
from tests.cpu.test_recognised import all_of, assert_same, fused
from tests.own_file import source_of_mine, source_of_other
from tests.tolerances import RELATIVE_ERROR

EACH = 16  # of the files that run at all
FACTOR = 30  # some changes leave a model in which rounding errors grow
FILES = ("Otter", "Llama", "Qwen3", "Gemma2", "Olmo2", "Granite", "Arcee", "HunYuanDenseV1", "Starcoder2", "Nemotron", "Cohere")
FOLDERS = {"HunYuanDenseV1": "hunyuan_v1_dense"}


def is_finite(results) -> bool:
    steps, logits = results
    return bool(logits.isfinite().all()) and all(g.isfinite().all() for step in steps for g in step.gradients.values())


def assert_same_but_for_rounding(model, found, expected) -> None:
    """Results of a model that has its own layers again are those of before; where float32 is not enough to say so, as after a change by
    which scores hardly differ, they are as far from those in float64 as before."""
    try:
        assert_same(found, expected, FACTOR)
    except AssertionError:
        exact = all_of(copy.deepcopy(model).double())
        for mine, other, exactly in zip(found[0], expected[0], exact[0], strict=True):
            assert mine.gradients.keys() == other.gradients.keys()
            mine.assert_as_exact_as(other, exactly, FACTOR * RELATIVE_ERROR[torch.float32], most=2)
        assert_same(((), found[1]), ((), expected[1]), FACTOR)


def models_of(source, name, make, kinds=KINDS):
    """(what was changed, a model of the file, what `all_of` gives of it) of the first changes of a file with which it runs. make: of the
    text and a name, gives the model."""
    warnings.simplefilter("ignore")
    count = 0
    for what, text in changed(source, 20261128, kinds):
        try:
            model = make(text, f"changed_{name}_{count}")
            expected = all_of(model)
        except Exception:  # of a file that does not run
            continue
        # Scores whose squares overflow are left out.
        if is_finite(expected) and not (kinds == OF_EXPERTS and "right alone" in what and what.endswith("1e-20")):
            yield what, model, expected
            count += 1
        if count == EACH:
            return
    pytest.fail(f"{count} changes run, expected {EACH}")


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_served_as_what_it_is_or_not_at_all(decoders, mine, file):
    source = source_of_other() if file == "Otter" else source_of_mine(file, FOLDERS.get(file, ""))
    whole = 0
    for what, model, expected in models_of(source, file.lower(), lambda text, name: mine(source=text, name=name)):
        decoders.kernelize(model.train())
        whole += any(part.startswith("read") for part in fused(decoders, model))
        said = str(decoders.explain(model))
        try:
            found = all_of(model)
            decoders.reset()
            assert_same_but_for_rounding(model, found, expected)
        except Exception as error:
            pytest.fail(f"{what}: {error}\n{said}")
    print(f"{file}: {whole} of {EACH} have layers that are fused")
    assert 0 < whole < EACH and torch.is_grad_enabled()


# Families with experts: (prefix, sizes of a small model).
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24}
SPARSE = {
    "glm4_moe": ("Glm4Moe", {**DEEPSEEK, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "hy_v3": ("HYV3", {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0,
                                      "moe_norm_min": 0.5}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 2,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}  # fmt: skip


def without_rounding(results, expected) -> tuple:
    """Results without gradients of which all is rounding, such as those of a router whose scores are all one."""
    steps = []
    for step, other in zip(results[0], expected[0], strict=True):
        norms = {name: float(gradient.norm()) for name, gradient in other.gradients.items()}
        kept = {name: step.gradients[name] for name, norm in norms.items() if norm > 1e-6 * max(norms.values())}
        steps.append(copy.copy(step))
        steps[-1].gradients = kept
    return steps, results[1]


def with_scores(model, corrections=(-0.4, 0.4)):
    """The model with weights of its routers, and corrections, by which scores differ."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("gate.weight", "correction_bias")):
            tensor.data.uniform_(*((-0.4, 0.4) if "weight" in name else corrections), generator=generator)
    return model


@pytest.mark.parametrize("folder", SPARSE)
def test_a_changed_router_or_block_is_served_as_what_it_is_or_not_at_all(bastile, mine, folder):
    prefix, sizes = SPARSE[folder]
    whole = 0

    def make(text, name):
        return with_scores(mine(source=text, name=name, **sizes))

    for what, model, expected in models_of(source_of_mine(prefix, folder), folder, make, OF_EXPERTS):
        bastile.kernelize(model.train())
        served = any("experts" in part and part.startswith("norm") for part in fused(bastile, model))
        whole += served
        try:
            assert_same(without_rounding(all_of(model), expected), without_rounding(expected, expected), FACTOR)
        except Exception as error:
            pytest.fail(f"{what}: {error}\n{bastile.explain(model.train())}")
        bastile.reset()
    assert 0 < whole < EACH


@pytest.mark.parametrize(("fill", "served"), (('float("-inf")', True), ("0.0", False), ("-1.0", False)))
def test_what_stands_for_the_experts_of_other_groups(bastile, mine, fill, served):
    """A number above scores with a low correction has these experts chosen, as DeepSeek's first code and A.X K2's has it."""
    mask = "masked_fill(~score_mask.bool(), {})"
    change = mask.format('float("-inf")'), mask.format(fill)
    source = source_of_mine("Glm4Moe", "glm4_moe")
    model = with_scores(mine(change, source=source, name=f"mask_{len(fill)}", **SPARSE["glm4_moe"][1]), (-3.0, -1.0))
    expected = all_of(model)
    bastile.kernelize(model.train())
    assert any("experts" in part and part.startswith("norm") for part in fused(bastile, model)) == served
    assert_same(all_of(model), expected, FACTOR)


@pytest.mark.parametrize("top_k", (4, 5))
def test_more_experts_for_a_token_than_its_groups_have(bastile, mine, top_k):
    """DeepSeek-V2 scores the others by zero, as which it masks them."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 12, "v_head_dim": 12}
    sizes = {**DEEPSEEK, **heads, "num_key_value_heads": 4, "topk_method": "group_limited_greedy", "first_k_dense_replace": 0}
    source = source_of_mine("DeepseekV2", "deepseek_v2")
    model = with_scores(mine(source=source, name=f"top_{top_k}", **{**sizes, "num_experts_per_tok": top_k}))
    expected = all_of(model)
    bastile.kernelize(model.train())
    assert any("experts" in part and part.startswith("norm") for part in fused(bastile, model)) == (top_k == 4)
    assert (top_k == 4) != any("the groups that are chosen have 4 experts" in row.reason for row in bastile.explain(model).rows)
    assert_same(all_of(model), expected, FACTOR)
