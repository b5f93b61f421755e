"""The layers of types without a row: one tiny model for each way in which a layer is put together, beside transformers' own."""

import copy

import pytest
import torch

from tests.any_model import VOCABULARY, tiny_of
from tests.capturing import Rerun, captured, compare, stand_in
from tests.models import Step
from tests.patched import lora
from tests.tolerances import relative_error
from tools.family_loss import names_of

# By what is particular of the layer: (type, the parts that run fused).
TINY = {
    "norms without parameters": ("olmo", "norm, q_proj, k_proj, v_proj, rotary"),
    "side by side, of one norm, angles of neighbours": ("cohere", "norm, gate_proj, up_proj, down_proj"),
    "side by side, a part of each head turned, GELU written out": ("phi", "norm, fc1, fc2"),
    "SiLU as a function, attention without dropout, convolutions": ("lfm2", "norm, w1, w3, w2"),
    "side by side, a norm each, attention that is called": ("gpt_neox", "norm, dense_h_to_4h, dense_4h_to_h"),
    "heads that are turned where there is a window, or an attribute says so": ("cohere2_moe", "norm, q_proj, k_proj, v_proj, rotary"),
    "neighbours of one angle, in a part of each head": ("glm4v", "norm, q_proj, k_proj, v_proj, rotary"),
    "no other arguments, a gate behind a LayerNorm": ("stablelm", "norm, gate_proj, up_proj, down_proj"),
    "experts behind a LayerNorm": ("phimoe", "norm, q_proj, k_proj, v_proj, rotary"),
    "inputs of each layer, and a scale": ("gemma4_text", "norm, gate_proj, up_proj, down_proj"),
    "a scale": ("gemma4_unified_text", "norm, gate_proj, up_proj, down_proj"),
    "two classes, one without attention": ("jamba", "norm, gate_proj, up_proj, down_proj"),
    "two classes, norms in other places": ("olmo_hybrid", "norm, q_proj, k_proj, v_proj, rotary"),
    "results beside the stream": ("bamba", "norm, gate_proj, up_proj, down_proj"),
    "results of attention beside the stream": ("glm_moe_dsa", ""),
    "angles as complex numbers": ("llama4_text", ""),
    "three results of attention": ("jetmoe", ""),
    "other names of everything": ("recurrent_gemma", "norm, gate_proj, up_proj, down_proj"),
    "made with more than a configuration": ("moshi", ""),
    "a delta net in most layers": ("kimi_linear", "norm, gate_proj, up_proj, down_proj"),
    "attention's dropout under another name": ("mllama", "norm, q_proj, k_proj, v_proj, rotary"),
}
WITH_SHARED = "norm, router, experts, shared expert"
# Those with experts whose block is read: (type, the parts that run fused).
SPARSE = {
    "sigmoids, groups, a correction and a factor": ("glm4_moe", WITH_SHARED),
    "the same, of layers of which one is dense": ("dots1", WITH_SHARED),
    "the same, behind attention that is called": ("deepseek_v3", WITH_SHARED),
    "the same, without an expert for all tokens": ("mimo_v2_flash", "norm, router, experts"),
    "a factor of a softmax": ("deepseek_v2", WITH_SHARED),
    "a correction that the block hands on, added in fp32": ("hy_v3", WITH_SHARED),
    "a correction that the block hands on, logits in the model's dtype": ("minimax_m2", "norm, router, experts"),
    "a correction in a module of its own, of a softmax": ("ernie4_5_moe", WITH_SHARED),
    "sigmoids alone": ("flint", WITH_SHARED),
    "biases and groups": ("solar_open", WITH_SHARED),
    "windows in some layers, which alone turn their heads": ("exaone_moe", "norm, q_proj, k_proj, v_proj, rotary"),
}
WINDOW = 5  # which every sequence is longer than
ROUTERS = {"num_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "router_scaling_factor": 2.5, "norm_min": 0.6}


def tiny_model_of(kind):
    names = {**names_of("images and text"), **names_of("causal LM")}
    if kind not in names:
        pytest.skip(f"this release has no {kind}")
    model = tiny_of(kind, names[kind])
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if "weight" in module._parameters and type(getattr(module, "top_k", None)) is int:  # a router
            torch.nn.init.normal_(module.weight, generator=generator)
            vars(module).update({name: value for name, value in ROUTERS.items() if type(vars(module).get(name)) in (int, float)})
        for each in (module, getattr(module, "config", None)):
            if type(getattr(each, "sliding_window", None)) is int:
                each.sliding_window = WINDOW
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("correction_bias"):
            tensor.data.uniform_(-0.4, 0.4, generator=generator)
    return model


def check_same(found, expected, close=1e-5, loss=1e-6) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine.loss, other.loss) < loss and mine.gradients.keys() == other.gradients.keys()
        largest = max(float(gradient.norm()) for gradient in other.gradients.values())
        for name, gradient in other.gradients.items():
            error, norm = float((mine.gradients[name].double() - gradient.double()).norm()), float(gradient.double().norm())
            assert error <= close * max(norm, 1e-2 * largest), name


@pytest.mark.parametrize("what", (*TINY, *SPARSE))
def test_layers_are_those_of_transformers(request, what):
    kind, part = {**TINY, **SPARSE}[what]
    package = request.getfixturevalue("decoders" if what in TINY else "bastile")
    model = tiny_model_of(kind)
    expected = _all_of(model)
    package.kernelize(model)
    parts = {row.part for row in package.explain(model).rows if row.fused}
    assert any(each.startswith("read: ") for each in parts) and (not part or part in parts), package.explain(model)
    found = _all_of(model)
    check_same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("checkpoints", (False, True))
def test_attention_drops_what_its_own_attribute_says(bastile, checkpoints):
    model = tiny_model_of("mllama")
    if checkpoints:
        model.gradient_checkpointing_enable()
    without = step_of(model)
    for module in model.modules():
        if type(vars(module).get("dropout")) in (int, float):
            module.dropout = 0.3
    expected = step_of(model)
    assert relative_error(without.loss, expected.loss) > 1e-4, "nothing is dropped"
    bastile.kernelize(model, attention=False, keep_attention=checkpoints)
    assert not any(row.code == "called" for row in bastile.explain(model).rows)
    check_same([step_of(model)], [expected])


def test_attention_that_is_called_is_not_kept_and_says_so(bastile):
    model = tiny_model_of("deepseek_v3")
    expected = step_of(model)
    model.gradient_checkpointing_enable()
    bastile.kernelize(model, keep_attention=True)
    with pytest.warns(RuntimeWarning, match=r"keep_attention: the \w+ of this \w+DecoderLayer is not fused"):
        check_same([step_of(model)], [expected])


def _all_of(model) -> tuple:
    """(steps without padding, with it on the left and on the right; the tokens that are generated)."""
    tokens = torch.randint(3, VOCABULARY - 20, (2, 11), generator=torch.Generator().manual_seed(1))
    masks = [torch.ones_like(tokens) for _ in range(3)]
    masks[1][0, :3], masks[2][1, 8:] = 0, 0
    steps = []
    for mask in masks:
        torch.manual_seed(5)  # of dropout that is no module
        steps.append(Step(model.train(), input_ids=tokens, attention_mask=mask, labels=tokens.where(mask > 0, -100), use_cache=False))
    model.eval()
    # RecurrentGemma of transformers 5.17 looks in its cache for an attention layer, which two layers do not have.
    cached = "attention" in getattr(model.config, "layers_block_type", ("attention",))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": cached}
    generated = model.generate(tokens[:, :6], **options)
    model.train()
    return steps, generated


# Of which nothing is called: with experts, and with an MLP beside attention behind one LayerNorm.
WHOLE = "glm4_moe", "hy_v3", "minimax_m2", "ernie4_5_moe", "flint", "cohere", "phi", "olmo", "glm4v"
MLPS = "norm, gate_proj, up_proj, down_proj", "norm, fc1, fc2", "norm, gate_up_proj, down_proj"
WAYS = "checkpointed", "packed", "recomputed", "adapters", "adapters of experts", "compiled"


def step_of(model, called=None, seed=1, **inputs):
    tokens = torch.randint(3, VOCABULARY - 20, (2, 11), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(5)
    return Step(model, called, input_ids=tokens, labels=tokens, use_cache=False, **inputs)


def _adapted(model, way):
    shared = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if type(part) is torch.nn.Linear} - {"lm_head"})
    names = [name for name, _ in model.named_parameters() if "layers.1." in name and name.endswith(("experts.gate_up_proj", "gate.weight"))]
    more = {"target_parameters": [".".join(name.split(".")[-2:]) for name in names]} if way != "adapters" else {}
    return lora(model, target_modules=shared, **more)


def _is_block(part: str) -> bool:
    return "experts" in part or part in MLPS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", WHOLE)
def test_experts_in_every_way_of_training(bastile, kind, way):
    model = tiny_model_of(kind)
    inputs = {"position_ids": torch.cat((torch.arange(4), torch.arange(7)))[None].expand(2, -1)} if way == "packed" else {}
    if way.startswith("adapters"):
        model = _adapted(model, way)
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    expected, weights = step_of(model, **inputs), {name: weight.clone() for name, weight in model.state_dict().items()}
    bastile.kernelize(model, recompute_mlp=way == "recomputed")
    rows = bastile.explain(model).rows
    assert any(_is_block(row.part) and row.fused for row in rows) and not any(row.code == "called" for row in rows), rows
    found = step_of(model, torch.compile(model, backend="eager") if way == "compiled" else None, **inputs)
    check_same([found], [expected])
    after = model.state_dict()
    assert after.keys() == weights.keys() and all(torch.equal(after[name], weight) for name, weight in weights.items())
    bastile.reset()
    check_same([step_of(model, **inputs)], [expected], 0, 1e-9)


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_layers_in_half_precision_are_as_exact_as_before(bastile, kind):
    model = tiny_model_of(kind).bfloat16()
    for module in model.modules():  # the choice of all leaves none to rounding
        if type(getattr(module, "top_k", None)) is int:
            module.top_k, module.topk_group = 4, getattr(module, "num_group", 1)
    exact, before = ([step_of(each, seed=seed) for seed in range(8)] for each in (copy.deepcopy(model).float(), model))
    bastile.kernelize(model)
    assert any(_is_block(row.part) and row.fused for row in bastile.explain(model).rows)
    found = [step_of(model, seed=seed) for seed in range(8)]
    for name in (name for name, gradient in exact[0].gradients.items() if gradient.numel() > 24):
        mine, other = (
            sum(relative_error(one.gradients[name], right.gradients[name]) ** 2 for one, right in zip(steps, exact, strict=True)) ** 0.5
            for steps in (found, before)
        )
        assert mine <= 1.25 * other + 1e-3, (name, mine, other)


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_layers_that_are_read_are_captured(bastile, monkeypatch, kind):
    stand_in(bastile, monkeypatch)
    monkeypatch.setattr(Rerun, "together", 2)
    model, plain = captured(bastile, tiny_model_of(kind))
    graphs = 4 if kind == "flint" else 2  # whose layers are of two kinds
    assert compare(model, plain) == graphs and compare(model, plain, seed=5) == graphs
