"""Decoders without a row choose our attention where they hand their masks on: Gemma 4, whose attention is called as it is."""

import ast
import importlib

import pytest
import torch

from tests.any_model import VOCABULARY
from tests.attention_batches import module_of
from tests.models import Step
from tests.ops.attention import exact_attention
from tests.ops.common import runtime_of
from tests.tolerances import assert_close, relative_error
from tools.family_loss import names_of

WINDOW, WIDE = 5, 32  # the window of the sliding layers, and the heads of the full ones
TOKENS = torch.randint(3, VOCABULARY - 20, (2, 13), generator=torch.Generator().manual_seed(1))


def gemma4(dtype=torch.float32, heads=16, wide=WIDE, window=WINDOW):
    """Ten layers, whose last five take their keys from those before, and each fifth of which sees all tokens."""
    names = names_of("causal LM")
    if "gemma4_text" not in names:
        pytest.skip("this release has no gemma4_text")
    import transformers

    types = ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(10)]
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size=64, intermediate_size=56, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=1, head_dim=heads, global_head_dim=wide, hidden_size_per_layer_input=16,
        layer_types=types, num_kv_shared_layers=5, use_double_wide_mlp=True, sliding_window=window, final_logit_softcapping=30.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).to(dtype).train()
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):  # scores are not divided: larger ones would be a choice of one key
            torch.nn.init.uniform_(parameter, 0.1, 0.2)
        elif parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture
def package(decoders, monkeypatch):
    """One whose kernels serve heads of 16 on every device, and `attended`: (the operation, the size of a head, the window) of each call."""
    choice, attention = module_of(decoders, "attention_choice"), module_of(decoders, "attention")
    monkeypatch.setattr(choice, "kernels_run_on", lambda *tensors: True)
    monkeypatch.setattr(choice, "takes_heads", lambda head_dim, **options: head_dim == 16)
    takes, attended = attention._takes, []
    monkeypatch.setattr(attention, "_takes", lambda q, *others: q.shape[3] == 16 and takes(q, *others))
    monkeypatch.setattr(attention, "wants_products", lambda q: q.shape[-1] == WIDE)
    for name in ("attention", "attention_by_products"):
        original = getattr(attention, name)

        def noted(q, k, v, plan, *rest, name=name, original=original, **options):
            attended.append((name, q.shape[-1], plan.window))
            return original(q, k, v, plan, *rest, **options)

        monkeypatch.setattr(attention, name, noted)
    monkeypatch.setattr(decoders, "attended", attended, raising=False)
    yield decoders
    decoders.reset()


def batches() -> dict:
    masks = {side: torch.ones_like(TOKENS) for side in ("whole", "left", "right", "both")}
    masks["left"][0, :4], masks["right"][1, 9:] = 0, 0
    masks["both"][0, :4], masks["both"][0, 10:] = 0, 0
    found = {name: {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS.where(mask > 0, -100)} for name, mask in masks.items()}
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None]
    return {**found, "packed": {"input_ids": TOKENS[:1], "labels": TOKENS[:1], "position_ids": positions}}


OURS = {("attention", 16, WINDOW), ("attention_by_products", WIDE, None)}


def with_adapters(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.1)
    return model


@pytest.mark.parametrize("how", ("plain", "adapters", "checkpointed"))
@pytest.mark.parametrize("batch", batches())
def test_it_is_transformers_attention(package, how, batch):
    models = []
    for ours in (False, True):
        model = gemma4()
        if ours:
            package.kernelize(model)
        if how == "checkpointed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        models.append(with_adapters(model) if how == "adapters" else model)
    given = {**batches()[batch], "use_cache": False}
    expected, found = (Step(model, **given) for model in models)
    assert relative_error(found.loss, expected.loss) < 1e-6 and found.gradients.keys() == expected.gradients.keys()
    largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-2 * largest), name
    assert set(package.attended) == OURS


def test_in_bf16(package):
    model, exact = gemma4(torch.bfloat16), gemma4(torch.bfloat16).float()
    package.kernelize(model)
    given = {**batches()["left"], "use_cache": False}
    found, expected = Step(model, **given), Step(exact, **given)
    assert set(package.attended) == OURS and relative_error(found.loss, expected.loss) < 1e-2
    assert max(relative_error(found.gradients[n], g) for n, g in expected.gradients.items() if "proj" in n and g.norm() > 1e-3) < 0.2


def test_generation_and_what_is_given_back(package):
    model, plain = gemma4().eval(), gemma4().eval()
    package.kernelize(model)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS[:, :6], **options), plain.generate(TOKENS[:, :6], **options))
    assert package.attended and model.model.config._attn_implementation == "bastile" and model.config._attn_implementation == "sdpa"
    assert all(layer.self_attn.config is model.model.config for layer in model.model.layers)
    package.reset()
    assert "forward" not in vars(model.model) and model.model.config is model.config
    assert all(layer.self_attn.config is model.config for layer in model.model.layers)


@pytest.mark.parametrize("kept", ("another one", "off", "hooks", "a forward of the user's"))
def test_what_keeps_transformers(package, kept):
    model = gemma4()
    if kept == "a forward of the user's":
        model.model.forward = type(model.model).forward.__get__(model.model)
        model.model.forward = (lambda original: lambda *args, **kwargs: original(*args, **kwargs))(model.model.forward)
    package.kernelize(model, attention=kept != "off")
    if kept == "another one":
        model.set_attn_implementation("eager")
    if kept == "hooks":
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    Step(model, **batches()["whole"], use_cache=False)
    assert not package.attended
    said = [row.reason for row in package.explain(model).rows if row.part == "attention"]
    assert bool(said) == (kept in ("another one", "hooks")), said


def test_attention_that_is_asked_for_by_name_stays(package):
    """A model that is made when the package knows its decoder says so."""
    package.kernelize(gemma4())
    model = gemma4()
    model.set_attn_implementation("sdpa")
    package.kernelize(model)
    Step(model, **batches()["whole"], use_cache=False)
    assert not package.attended


DECODER = '''
def forward(self, inputs_embeds, attention_mask):
    kwargs = {"config": self.config, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
    make = create_causal_mask if self.plain else create_sliding_window_causal_mask
    mask = make(**kwargs)
    masks = {"full_attention": mask, "sliding_attention": create_sliding_window_causal_mask(**kwargs)}
    masks["other"] = mask
    for layer in self.layers:
        hidden_states = layer(hidden_states, attention_mask=masks[layer.kind])
    return hidden_states
'''
ATTENTION = '''
def forward(self, hidden_states, attention_mask):
    function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, weights = function(self, hidden_states, hidden_states, hidden_states, attention_mask, scaling=self.scaling)
    return self.o_proj(out), weights
'''


@pytest.mark.parametrize(
    ("text", "old", "new"),
    (
        (DECODER, "", ""),
        (DECODER, "masks[layer.kind])", "masks[layer.kind][:, :, :3])"),
        (DECODER, "masks[layer.kind])", "masks[layer.kind] + 1)"),
        (DECODER, "masks[layer.kind])", "masks[0])"),
        (DECODER, "    for layer", "    self.mask = mask\n    for layer"),
        (DECODER, "    for layer", "    mask = mask.clone()\n    for layer"),
        (DECODER, "    for layer", "    if mask is not None:\n        hidden_states = hidden_states + 1\n    for layer"),
        (DECODER, "return hidden_states", "return hidden_states, masks"),
        (DECODER, "= layer(", "= self.norm("),
        (DECODER, "create_", "make_"),
        (ATTENTION, "", ""),
        (ATTENTION, "attention_mask, scaling", "attention_mask[:, :, :3], scaling"),
        (ATTENTION, "    out,", "    if attention_mask is None:\n        return hidden_states\n    out,"),
        (ATTENTION, "ALL_ATTENTION_FUNCTIONS.get_interface", "self.functions.get_interface"),
    ),
)
def test_what_is_done_with_masks(decoders, text, old, new):
    reader = importlib.import_module(f"{decoders.__name__}.shared.hf.family.mask_reader")
    does_more = reader._decoder_does_more if text is DECODER else reader._attention_does_more
    assert does_more(ast.parse(text.replace(old, new) if old else text).body[0]) == bool(old)


@torch.no_grad()
def test_padding_behind_tokens_sees_them(package):
    """As in transformers, whose callers may read what a decoder without a row returns for padding."""
    model, plain = gemma4().eval(), gemma4().eval()
    package.kernelize(model)
    mask = torch.ones_like(TOKENS)
    mask[1, 10:] = 0
    found, expected = (each(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits for each in (model, plain))
    assert package.attended and relative_error(found, expected) < 1e-5


def test_the_plan_of_padding_that_sees(decoders):
    """Its limits say the same of queries and of keys, and its walks are those of the plan that has no such padding where there is none."""
    mask = torch.ones(3, 50, dtype=torch.long)
    mask[0, :7], mask[1, 31:], mask[2, :3], mask[2, 40:] = 0, 0, 0, 0
    for window in (None, 6):
        plan = decoders.AttentionPlan.with_padding_that_sees(mask, window)
        t = torch.arange(150)
        queries, keys = plan.limits[:2, :150], plan.limits[2:, :150]
        sees = (t >= queries[0][:, None]) & (t < queries[1][:, None])
        seen = ((t >= keys[0][:, None]) & (t < keys[1][:, None])).T
        rows, real = t // 50, mask.flatten().bool()
        wanted = (rows[:, None] == rows) & (t <= t[:, None]) & real[None, :] & ((t[:, None] - t < window) if window else True)
        assert torch.equal(sees, wanted)
        assert torch.equal(seen, wanted)
        whole = torch.ones(3, 50, dtype=torch.long)
        same = decoders.AttentionPlan.with_padding_that_sees(whole, window)
        other = decoders.AttentionPlan.from_padding_mask(whole, window=window)
        assert torch.equal(same.limits, other.limits) and torch.equal(same.walks, other.walks)


@pytest.mark.parametrize("window", (None, 20))
def test_the_kernels_walk_the_plan_of_padding_that_sees(interpreted_qwen3, window):
    """Forward and backward, as float64 does with the same mask; rows of more than a block, padding on either side."""
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, 70:], mask[1, :9], mask[1, 90:] = 0, 0, 0
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(200, n, 64, generator=generator).to(torch.bfloat16) for n in (2, 1, 1, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    t = torch.arange(200)
    seen = (t[:, None] // 100 == t // 100) & (t <= t[:, None]) & mask.flatten().bool() & (t[:, None] - t < (window or 200))
    plan = interpreted_qwen3.AttentionPlan.with_padding_that_sees(mask, window)
    out = interpreted_qwen3.attention(*leaves, plan)
    wanted, _ = exact_attention(*exact, seen, 0.125)
    found, expected = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, exact, dout.double())
    for name, mine, other in zip(("out", "dq", "dk", "dv"), (out, *found), (wanted, *expected), strict=True):
        assert_close(mine, other.detach(), torch.bfloat16, name)
    assert any("attention_backward_dkv" in name for name in runtime_of(interpreted_qwen3).launch.backend.launched)
