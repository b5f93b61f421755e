"""Models without a row are read: what their forwards compute is found whatever it is called, what no row can say is refused with its line,
and of models that were changed none is served as what it is not."""

import copy
import importlib
import sys
import warnings

import pytest
import torch

from tests.models import Step, random_tokens
from tests.own_file import FROM_A_FILE, source_of_mine, source_of_other
from tests.patched import calls_of

WHOLE = {
    "read: OtterDecoderLayer.forward": 2, "norm, to_q, to_k, to_v, rotary": 2, "o_proj": 2, "norm, both, back": 2, "loss without logits": 1,
}  # fmt: skip
FACTOR = 3
GRANITE = "transformers.models.granite.modeling_granite"
AS_USUAL = "device", "pack", "padding"  # of a model on the CPU, without a row


def step_of(model, **inputs) -> Step:
    tokens = random_tokens(2, 13)
    torch.manual_seed(1)  # of a dropout
    return Step(model, input_ids=tokens, labels=tokens, **{"use_cache": False, **inputs})


def padded() -> dict:
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    return {"attention_mask": mask}


def rows_of(package, model) -> list:
    return [row for row in package.explain(model).rows if "TRL" not in row.part]


def fused(package, model) -> dict:
    return {row.part: row.count for row in rows_of(package, model) if row.fused}


def said(package, model) -> str:
    return "\n".join(f"{row.part} {row.reason}" for row in rows_of(package, model))


@torch.no_grad()
def generated(model):
    """The logits of a prompt and of two tokens that follow it one by one."""
    tokens = random_tokens(2, 9)
    found = model(input_ids=tokens[:, :7], use_cache=True)
    logits = [found.logits]
    for i in (7, 8):
        found = model(input_ids=tokens[:, i : i + 1], past_key_values=found.past_key_values, use_cache=True)
        logits.append(found.logits)
    return torch.cat(logits, 1)


def all_of(model) -> tuple:
    """(steps in training and in evaluation, without padding and with it; logits of a generation)."""
    plain, with_padding = step_of(model.train()), step_of(model, **padded())
    evaluated = step_of(model.eval())
    return (plain, with_padding, evaluated), generated(model)


def assert_same(found, expected, factor=FACTOR) -> None:
    for mine, other in zip(found[0], expected[0]):
        mine.assert_same(other, factor)
    torch.testing.assert_close(found[1], expected[1], rtol=factor * 3e-5, atol=factor * 3e-6)


@pytest.mark.parametrize("name", (FROM_A_FILE, "transformers_modules.someone.otter.0a1b2c.modeling_otter"))
def test_a_decoder_of_nobodys(decoders, mine, name):
    model = mine(source=source_of_other(), name=name)
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert fused(decoders, model) == WHOLE and all(row.fused or row.code in AS_USUAL for row in rows_of(decoders, model))
    assert_same(all_of(model), expected)
    twin = copy.deepcopy(model)
    assert fused(decoders, twin.train()) == WHOLE
    assert_same(all_of(twin), expected)
    decoders.reset()
    assert not any("forward" in vars(module) or any("facts" in key for key in vars(module)) for module in model.modules())


@pytest.mark.parametrize("activation", ("relu2", "gelu", "gelu_pytorch_tanh", "silu", "gelu_new", "quick_gelu", "relu"))
def test_an_mlp_without_a_gate(decoders, mine, activation):
    """Of an activation that no row can say, the MLP is called."""
    model = mine(source=source_of_mine("Arcee"), hidden_act=activation)
    expected = all_of(model)
    decoders.kernelize(model.train())
    served = "norm, up_proj, down_proj" in fused(decoders, model)
    assert served == (activation not in ("quick_gelu", "relu")) and served != ("has the activation" in said(decoders, model))
    assert_same(all_of(model), expected)


def test_norms_of_heads_after_the_rotary_embedding(decoders, mine):
    model = mine(source=source_of_mine("HunYuanDenseV1", "hunyuan_v1_dense"))
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert fused(decoders, model)["norm, q_proj, k_proj, v_proj, rotary"] == 2
    assert_same(all_of(model), expected)


# Of what file, changes of it, and whether its norms are a LayerNorm that a row can say.
LAYER_NORMS = {
    "PyTorch's": ("Starcoder2", (), True),
    "without a bias": ("Starcoder2", [(f"self.{name} = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)\n{end}",
                                       f"self.{name} = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, bias=False)\n{end}")
                                      for name, end in (("input_layernorm", "    "), ("post_attention_layernorm", "\n"))], True),
    "of one without a bias": ("Starcoder2", [("self.input_layernorm = nn.LayerNorm(config.hidden_size, eps",
                                              "self.input_layernorm = nn.LayerNorm(config.hidden_size, bias=False, eps")], True),
    "without a weight": ("Starcoder2", [("self.input_layernorm = nn.LayerNorm(config.hidden_size, eps",
                                         "self.input_layernorm = nn.LayerNorm(config.hidden_size, elementwise_affine=False, eps")], False),
    "1 + weight": ("Nemotron", (), True),
    "weight": ("Nemotron", [("self.weight + 1.0", "self.weight")], True),
    "2 + weight": ("Nemotron", [("self.weight + 1.0", "self.weight + 2.0")], False),
    "twice the bias": ("Nemotron", [("self.bias, self.eps", "self.bias + self.bias, self.eps")], False),
    "other epsilon": ("Nemotron", [("self.bias, self.eps", "self.bias, 1e-5")], False),
    "otherwise under autocast": ("Nemotron", [("_cast(args,", "_cast([*args[:2], 1.2 * args[2], *args[3:]],")], False),
    "RMSNorm": ("Nemotron", [("return F.layer_norm(*args)",
                              "return F.rms_norm(*[each for i, each in enumerate(args) if i != 3])")], False),
    "no parameters": ("Olmo", (), True),
    "no parameters, another epsilon": ("Olmo", [("eps=1e-5", "eps=1e-3")], True),
    "no parameters, thrice the epsilon": ("Olmo", [("eps=1e-5", "eps=1e-5 * 3")], False),
    "RMSNorm without parameters": ("Olmo", [("F.layer_norm(", "F.rms_norm("), ("None, None, eps", "None, eps")], False),
}


@pytest.mark.parametrize("kind", LAYER_NORMS)
def test_layer_norms(decoders, mine, kind):
    file, changes, served = LAYER_NORMS[kind]
    model = mine(*changes, source=source_of_mine(file), initializer_range=0.1)  # or scores hardly differ
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert served == (fused(decoders, model).get("norm, q_proj, k_proj, v_proj, rotary") == 2), said(decoders, model)
    assert_same(all_of(model), expected, 10)


MEAN = [("mean = hidden_states.mean(-1, keepdim=True)", "mean = 0.0")]  # without which a LayerNorm is an RMSNorm


@pytest.mark.parametrize("changes", ([], MEAN))
@pytest.mark.parametrize("hooked", (False, True))
def test_an_mlp_beside_attention(decoders, mine, hooked, changes):
    """Both read one norm. Where attention's last projection is called, its branch is added to the result of the MLP's node."""
    model = mine(*changes, source=source_of_mine("Cohere"), initializer_range=0.1)
    if hooked:
        model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *args: None)
    expected = all_of(model)
    decoders.kernelize(model.train())
    found = fused(decoders, model)
    assert found["norm, gate_proj, up_proj, down_proj"] == 2 and found["o_proj"] == 2 - hooked
    assert_same(all_of(model), expected, 10)


UP, AFTER = "self.down_proj(self.act_fn(self.up_proj(x)))", "query_states = self.query_layernorm(query_states)"
TURN = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"
# Changes of Arcee's MLP and of Hunyuan's attention: (old, new).
CHANGED = {
    "twice": (UP, "self.down_proj(self.act_fn(self.act_fn(self.up_proj(x))))"),
    "a residual": (UP, "self.down_proj(self.act_fn(self.up_proj(x)) + self.up_proj(x))"),
    "a factor": (UP, "self.down_proj(self.act_fn(2.0 * self.up_proj(x)))"),
    "gated by itself": (UP, "self.down_proj(self.act_fn(self.up_proj(x)) * self.act_fn(self.up_proj(x)))"),
    "nothing behind": (UP, "self.act_fn(self.down_proj(self.up_proj(x)))"),
    "a norm of q alone": ("key_states = self.key_layernorm(key_states)", "pass"),
    "q before, k after": (TURN, "query_states = self.query_layernorm(query_states)\n        " + TURN),
    "turned again": (AFTER, AFTER + "\n        " + TURN),
    "v": (AFTER, AFTER + "\n        value_states = self.key_layernorm(value_states)"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_changes_of_these_are_called(decoders, mine, change):
    source = source_of_mine("Arcee") if CHANGED[change][0] == UP else source_of_mine("HunYuanDenseV1", "hunyuan_v1_dense")
    model = mine(CHANGED[change], source=source)
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert not {"norm, up_proj, down_proj", "norm, q_proj, k_proj, v_proj, rotary"} <= fused(decoders, model).keys()
    part = "mlp" if CHANGED[change][0] == UP else "self_attn"
    assert any(row.part == part and not row.fused for row in rows_of(decoders, model)), said(decoders, model)
    assert_same(all_of(model), expected, 10)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_in_half_precision(decoders, mine, dtype):
    model = mine(source=source_of_other()).to(dtype)
    decoders.kernelize(model)
    assert fused(decoders, model) == WHOLE


def test_without_memory_or_gradients(decoders, mine):
    """What kernelize() is called within does not reach the copy that it compares, and its random numbers are not the caller's."""
    model = mine(source=source_of_other())
    before = torch.random.get_rng_state()
    with torch.device("meta"), torch.inference_mode():
        decoders.kernelize(model)
    assert fused(decoders, model) == WHOLE and torch.equal(before, torch.random.get_rng_state())
    decoders.reset()
    nowhere = decoders.kernelize(mine(source=source_of_other()).to("meta"))
    assert "read: OtterDecoderLayer.forward" in fused(decoders, nowhere)


def test_checkpointed_and_compiled(decoders, mine):
    model = mine(source=source_of_other())
    expected = step_of(model)
    decoders.kernelize(model)
    tokens = random_tokens(2, 13)
    Step(model, torch.compile(model, backend="eager"), input_ids=tokens, labels=tokens).assert_same(expected, FACTOR)
    model.gradient_checkpointing_enable()
    step_of(model).assert_same(expected, FACTOR)


def test_a_class_of_a_release_that_is_not_recorded(decoders, monkeypatch):
    """Of a family with a row, whose layer has another text than those that are known."""
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = GraniteForCausalLM(GraniteConfig(**sizes, residual_multiplier=0.4, pad_token_id=0)).train()
    expected = step_of(model)
    versions = importlib.import_module(f"{decoders.__name__}.shared.hf.family.versions")
    others = dict.fromkeys((f"Granite{name}.forward" for name in ("DecoderLayer", "Attention", "MLP")), {"5.17.0": "another"})
    monkeypatch.setitem(versions.TEXTS, GRANITE, {**versions.TEXTS[GRANITE], **others})
    monkeypatch.setattr(versions, "_read", versions._read.__wrapped__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoders.kernelize(model)
    assert not any("decoder_layer" in str(each.message) for each in caught)
    found = fused(decoders, model)
    assert found["read: GraniteDecoderLayer.forward"] == 2 and found["norm, gate_proj, up_proj, down_proj"] == 2
    step_of(model).assert_same(expected, FACTOR)


# ---------------------------------------------------------------- what may not be served
LAYER = "return self.fourth(self.feed(self.third(between))) + between"
NORM = "return ((1.0 + self.weight.float()) * (wide * inverse)).type_as(stream)"
TURNED = "return quarter_turn(q) * sin + cos * q, k * cos + sin * quarter_turn(k)"
QKV = "q, k = apply_rotary_pos_emb(q, k, *position_embeddings)"
KNOWN = "if past_key_values is not None:"
# What acts only in some calls or configurations, which a comparison of numbers would not see: (change, what `explain` says).
HIDDEN = {
    "a sum": (LAYER, LAYER + " + 1.0", "OtterDecoderLayer.forward"),
    "a clamp": (NORM, NORM + ".clamp(-1e9, 1e9)", "calls something else"),
    "a clamp of the stream": (LAYER, LAYER.replace("between)))", "between))).clamp(-1e9, 1e9)"), "clamp"),
    "of long rows": (NORM, "if stream.shape[1] > 4096:\n            stream = stream * 2\n        " + NORM, "branches"),
    "of long rows, turned": (TURNED, "if q.shape[2] > 4096:\n        cos = cos * 2\n    " + TURNED, "branches"),
    "of a long batch": (LAYER, "between = between if len(between) < 64 else 2 * between\n        " + LAYER, "calls something else"),
    "without a mask": (LAYER, "between = 2 * between if attention_mask is None else between\n        " + LAYER, "attention_mask is None"),
    "without a cache": (KNOWN, "if past_key_values is None:\n            k = k * 2\n        " + KNOWN, "differs from its own forward"),
    "a cache elsewhere": ("k, v, self.layer_idx)", "k, v, self.layer_idx + 1)", "keeps its keys and values in another place"),
    "with a cache": ("k, v, self.layer_idx)", "k, v, self.layer_idx)\n            v = v * 2", "OtterAttention.forward"),
    "in evaluation": (LAYER, "between = between if self.training else between * 2\n        " + LAYER, "in training"),
    "with sdpa": (QKV, QKV + "\n        if self.config._attn_implementation == 'sdpa':\n            q = q * 2", "another implementation"),
    "a dropout": (LAYER, LAYER.replace("self.feed(self.third(between))", "nn.functional.dropout(self.feed(self.third(between)))"), "drop"),
    "no window": (", sliding_window=self.reach", "", None),
    "no positions": ("position_embeddings=None, **kwargs", "position_embeddings=None, position_ids=None, **kwargs", "hand the mask"),
    "in place": (LAYER, "old = between\n        between *= 2.0\n        " + LAYER.replace("+ between", "+ old"), "writes into a tensor"),
    "a seed": (LAYER, "torch.manual_seed(0)\n        " + LAYER, "OtterDecoderLayer.forward"),
}


def test_a_layer_may_return_a_tuple(decoders, mine):
    model = mine((LAYER, LAYER.replace("return", "return (") + ",)"), ("**given)\n        return Base", "**given)[0]\n        return Base"),
                 source=source_of_other())  # fmt: skip
    expected = all_of(model)
    decoders.kernelize(model.train())
    assert fused(decoders, model) == WHOLE
    assert_same(all_of(model), expected)


@pytest.mark.parametrize("change", HIDDEN)
def test_what_acts_in_some_calls_is_not_left_out(decoders, mine, change):
    old, new, why = HIDDEN[change]
    source = source_of_other()
    model = mine((old, new), source=source) if source.count(old) == 1 else pytest.skip("another name of the cache")
    before = all_of(model)
    decoders.kernelize(model.train())
    assert (fused(decoders, model).keys() == WHOLE.keys()) == (why is None)
    assert why is None or why in said(decoders, model), said(decoders, model)
    assert_same(all_of(model), before)


def test_an_argument_that_decides_runs_the_layers_own_forward(decoders, mine):
    model = mine(
        ("position_embeddings=None, **kwargs", "position_embeddings=None, louder=False, **kwargs"),
        (LAYER, "if louder:\n            return between * 2\n        " + LAYER),
        source=source_of_other(),
    )
    expected = [step_of(model), step_of(model, louder=True)]
    decoders.kernelize(model)
    assert fused(decoders, model) == WHOLE
    for found, other in zip((step_of(model), step_of(model, louder=True)), expected):
        found.assert_same(other, FACTOR)


def test_a_fact_that_changes_is_noticed(decoders, mine):
    asked = "self.is_causal = True", "self.is_causal, self.loud = True, False"
    model = mine(asked, (QKV, QKV + "\n        if self.loud:\n            q = q * 2"), source=source_of_other())
    decoders.kernelize(model)
    assert fused(decoders, model) == WHOLE
    for layer in model.model.layers:
        layer.self_attn.loud = True
    found = step_of(model)
    assert {row.code for row in rows_of(decoders, model) if row.part == "decoder layer"} == {"facts"}
    assert "self_attn.loud is True" in said(decoders, model)
    decoders.reset()
    found.assert_same(step_of(model))


PATCHES = {
    "a hook of a part": lambda model, module: model.model.layers[0].feed.register_forward_hook(lambda part, given, result: result * 2),
    "another class": lambda model, module: setattr(model.model.layers[0], "second", torch.nn.Identity()),
    "a forward of one module": lambda model, module: setattr(model.model.layers[0].feed, "forward", lambda stream: stream),
    "a function of the file": lambda model, module: setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k)),
    "a function below": lambda model, module: setattr(module, "quarter_turn", lambda x: x),
    "a class's forward": lambda model, module: setattr(module.OtterScale, "forward", lambda self, stream: stream),
}


@pytest.mark.parametrize("before", (True, False))
@pytest.mark.parametrize("patch", PATCHES)
def test_what_is_patched_runs(decoders, mine, patch, before):
    model = mine(source=source_of_other())
    if not before:
        decoders.kernelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        PATCHES[patch](model, sys.modules[FROM_A_FILE])
        if before:
            decoders.kernelize(model)
    found = step_of(model)
    decoders.reset()
    found.assert_same(step_of(model), FACTOR)


BACK = "self.back = nn.Linear("
FAILING = {
    "when it is made": (BACK, "if config.intermediate_size < 64:\n            raise SyntaxError('no')\n        " + BACK, "SyntaxError: no"),
    "when it is read": (QKV, QKV + "\n        if self.loud:\n            q = q * 2", "reads what its class computes"),
    "when it runs": (TURNED, "if q.shape[-1] == 16:\n        raise SyntaxError('mine')\n    " + TURNED, "does not run"),
}


@pytest.mark.parametrize("failing", FAILING)
def test_a_class_that_fails_leaves_its_model_as_it_is(decoders, mine, failing):
    """Whatever it raises while it is read."""
    old, new, why = FAILING[failing]
    loud = "    def in_heads(", "    loud = property(lambda self: 1 // (self.head_dim - 16))\n\n    def in_heads("
    model = mine((old, new), loud, source=source_of_other(), head_dim=12)
    expected = step_of(model)
    decoders.kernelize(model)
    assert why in said(decoders, model), said(decoders, model)
    step_of(model).assert_same(expected, FACTOR)


def test_served_models_are_not_read(decoders, monkeypatch):
    """It would take time, and change nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = calls_of(decoders)._shapes
    monkeypatch.setattr(type(shapes), "layers", lambda *given: pytest.fail("read"))
    sizes = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    decoders.kernelize(LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0)))


def test_each_decoder_of_a_model_is_explained(decoders, mine):
    from transformers import BartConfig, BartModel

    sizes = dict(d_model=48, vocab_size=100, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    both = torch.nn.ModuleList([mine(source=source_of_other()).model, BartModel(BartConfig(**sizes))])
    decoders.kernelize(both)
    assert "read: OtterDecoderLayer.forward" in fused(decoders, both)
    assert "layers of BartDecoder BartDecoderLayer.forward" in said(decoders, both)


def test_adapters_and_packed_documents(decoders, mine):
    """LoRA on the projections of a model that is read, and documents that follow each other in a row."""
    peft = pytest.importorskip("peft")
    model = mine(source=source_of_other())
    targets = peft.LoraConfig(target_modules=["to_q", "to_v", "o_proj", "both", "back"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(model, targets)
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None].expand(2, -1)
    expected = [step_of(model), step_of(model, position_ids=positions)]
    decoders.kernelize(model)
    assert fused(decoders, model).keys() >= WHOLE.keys() - {"loss without logits"}
    for found, other in zip((step_of(model), step_of(model, position_ids=positions)), expected):
        found.assert_same(other, FACTOR)


def test_no_layer_is_read_on_an_unknown_text_of_what_all_rely_on(decoders, mine, monkeypatch):
    recognised = importlib.import_module(f"{decoders.__name__}.shared.hf.install.recognised")
    monkeypatch.setattr(recognised, "changed_texts", lambda module: ["Layer.__call__"] if module.endswith("modeling_layers") else [])
    model = mine(source=source_of_other())
    decoders.kernelize(model)
    assert "an unknown text of Layer.__call__" in said(decoders, model) and fused(decoders, model) == {"loss without logits": 1}
