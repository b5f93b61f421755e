"""The loss without logits of models of no row: which forwards are served is read from their texts, and what is served is what they say."""

import copy
import re
import warnings

import pytest
import torch

from tests.models import Step, compiled_step, random_tokens
from tests.tolerances import relative_error
from tests.versions import needs_compiler
from tools.family_loss import built

LOSS = "loss without logits"
TOKENS = random_tokens(2, 13)
MASK = torch.ones_like(TOKENS)
MASK[0, 9:] = 0
INPUTS = {"input_ids": TOKENS, "labels": TOKENS.where(MASK > 0, -100), "attention_mask": MASK, "use_cache": False}
# Pieces of the text of Llama's forward that every release has.
HEAD, DECODED, MAKES_HEAD = "self.lm_head(", "hidden_states = outputs.last_hidden_state\n", "config.vocab_size, bias=False)\n"
CALL = "self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)"
MADE = "        loss = None\n        if labels is not None:\n"
RETURNED = "            logits=logits,\n"


def then(*lines: str) -> tuple:
    """A change that adds statements between the logits and the loss."""
    return ((MADE, "".join(f"        {line}\n" for line in lines) + MADE),)


def decoded(line: str) -> tuple:
    return ((DECODED, f"{DECODED}        {line}\n"),)


def loss(text: str) -> tuple:
    return ((CALL, text),)


SERVED = {
    "as it is": (),
    "scaled": ((HEAD, f"0.3 * {HEAD}"),),
    "divided by what the model holds": then("logits = logits / self.config.num_attention_heads"),
    "capped": then("logits = torch.tanh(logits / 0.7) * 0.7"),
    "capped where the configuration says so": then("if (cap := self.config.hidden_size) is not None:",
                                                   "    logits = cap * torch.tanh(logits / cap)"),
    "in float32": then("logits = logits.to(torch.float32).contiguous() * 2"),
    "what the configuration leaves out": then("if self.config.mlp_bias:", "    logits = logits + 1"),
    "hidden states doubled": decoded("hidden_states = 2 * hidden_states"),
    "another norm": decoded("hidden_states = nn.functional.layer_norm(hidden_states, hidden_states.shape[-1:])"),
    "tokens left out": (*decoded("hidden_states = hidden_states[:, 1:]"), *loss(CALL.replace("=labels", "=labels[:, 1:]"))),
    "other labels": loss(CALL.replace("=labels", "=labels.roll(1, 1)")),
    "labels that are shifted already": loss(CALL.replace("labels=labels", "labels=None, shift_labels=labels")),
    "a loss without the caller's options": loss(CALL.replace(", **kwargs", "")),
    "a loss times two": loss(f"2 * {CALL}"),
    "another loss added": loss(f"{CALL} + hidden_states.pow(2).mean()"),
    "a head with a bias": ((MAKES_HEAD, "config.vocab_size, bias=True)\n"),),
    "a scaled head with a bias": ((MAKES_HEAD, "config.vocab_size, bias=True)\n"), (HEAD, f"0.3 * {HEAD}")),
    "a loop over something else": then("for index in range(2):", "    hidden_states = hidden_states + index"),
    "an error for some inputs": then("if input_ids is None and inputs_embeds is None:", "    raise ValueError('nothing')"),
}  # fmt: skip
REFUSED = {
    "logits and one": (then("logits = logits + 1"), "changes its logits in line .*: logits \\+ 1"),
    "logits times a tensor": (then("logits = logits * self.model.norm.weight.mean()"), "changes its logits"),
    "clamped": (then("logits = logits.clamp(-1, 1)"), "calls something else with its logits"),
    "cast to bfloat16": (then("logits = logits.to(torch.bfloat16)"), "calls something else with its logits"),
    "capped twice": (then("logits = torch.tanh(torch.tanh(logits))"), "calls something else with its logits"),
    "a token left out": (then("logits[..., 0] = -1e4"), "writes to its logits"),
    "classes left out": (then("logits = logits[..., :199]"), "uses its logits"),
    "dropout": (then("logits = nn.functional.dropout(logits, 0.0)"), "calls something else with its logits"),
    "only with images": (then("if position_ids is not None:", "    logits = logits.relu()"), "calls something else with its logits"),
    "another head sometimes": (then("logits = logits if self.training else hidden_states"), "does not give its loss the logits"),
    "in a loop": (then("for index in range(2):", "    logits = logits * 1"), "uses its logits"),
    "in a list": (then("both = [logits, logits]"), "uses its logits"),
    "kept": (then("self.last = logits"), "puts its logits"),
    "noted on itself": (then("self.passes = 1"), "writes to its logits, or to itself"),
    "itself passed on": (then("print(end='', *[None for _ in range(0)], file=None) or repr(self)"), "passes itself on"),
    "a function of its own": (then("made = lambda: logits"), "is not followed"),
    "two losses": (loss(f"{CALL} + {CALL}"), "returns without one call"),
    "a loss for some inputs": (loss(f"{CALL} if position_ids is None else hidden_states.sum()"), "returns without one call"),
    "a loss for others": (loss(f"(position_ids is None and {CALL}) or hidden_states.sum()"), "may call its loss or not"),
    "a z-loss": (loss(f"{CALL} + logits.logsumexp(-1).mean()"), "calls something else with its logits"),
    "PyTorch's loss": (loss("nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())"), "calls something else with its logits"),
    "a number of classes of its own": (loss(CALL.replace("self.config.vocab_size", "199")), "a number of classes that it does not hold"),
    "logits of another dtype for the loss": (loss(CALL.replace("logits=logits", "logits=logits.double()")), "calls something else"),
    "other logits for the loss": (loss(CALL.replace("=logits", "=hidden_states @ self.lm_head.weight.T")), "does not give its loss"),
    "detached": (((RETURNED, "            logits=logits.detach(),\n"),), "calls something else with its logits"),
    "a tuple": (then("if self.config.vocab_size > 3:", "    return (self.loss_function(logits, labels, self.config.vocab_size), logits)"),
                "uses its logits"),
}  # fmt: skip


def row(package, model):
    (found,) = [row for row in package.explain(model).rows if row.part == LOSS]
    return found


@pytest.mark.parametrize("change", SERVED)
def test_what_a_forward_does_is_done_without_logits(decoders, mine, change):
    model = mine(*SERVED[change])
    inputs = {**INPUTS, "num_items_in_batch": 7}
    if change == "another norm" or "bias" in change:
        torch.nn.init.normal_(model.lm_head.weight, 0, 0.2)
    expected = Step(model, **inputs)
    decoders.kernelize(model)
    assert row(decoders, model).fused, row(decoders, model).reason
    found = Step(model, **inputs)
    found.assert_same(expected, 3)
    assert found.output.logits is None and expected.output.logits is not None
    kept = Step(model, **inputs, skip_logits=False)
    kept.assert_same(expected, 3)
    torch.testing.assert_close(kept.output.logits, expected.output.logits)


@pytest.mark.parametrize("change", REFUSED)
def test_a_forward_that_does_more_with_its_logits_is_left_alone(decoders, mine, change):
    changes, said = REFUSED[change]
    model = mine(*changes)
    expected = Step(model, **INPUTS)
    decoders.kernelize(model)
    found = row(decoders, model)
    assert not found.fused and "MineForCausalLM.forward" in found.reason
    assert re.search(said, found.reason) and " in line " in found.reason, found.reason
    Step(model, **INPUTS).assert_same(expected, 3)


# ---------------------------------------------------------------- what else happens to a model that is served so
def bert():
    """A causal LM whose head is within two other modules, and has a bias."""
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
    torch.nn.init.normal_(model.cls.predictions.bias)
    return model


def cohere():
    """A causal LM that multiplies its logits by a number that it holds."""
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**sizes, num_key_value_heads=1, logit_scale=0.3)).train()


models = pytest.mark.parametrize("make", (bert, cohere))
BATCH = {"input_ids": TOKENS, "labels": INPUTS["labels"], "attention_mask": MASK}
IGNORED = {"labels": TOKENS.where(MASK > 0, 5), "ignore_index": 5}


def without_key_biases(step: Step) -> Step:
    """The step without the gradients that the softmax takes away again."""
    step.gradients = {name: gradient for name, gradient in step.gradients.items() if not name.endswith("key.bias")}
    return step


@models
@pytest.mark.parametrize(
    "given", ({}, {"num_items_in_batch": 7}, {"shift_labels": TOKENS.roll(-1, 1)}, {"return_dict": False}, IGNORED), ids="-".join
)
def test_arguments_of_a_call_go_where_the_forward_puts_them(decoders, make, given):
    model = make()
    expected = without_key_biases(Step(model, **{**BATCH, **given}))
    decoders.kernelize(model)
    found = without_key_biases(Step(model, **{**BATCH, **given}))
    found.assert_same(expected, 3)
    assert isinstance(found.output, tuple) == isinstance(expected.output, tuple)
    assert found.output[1] is None if isinstance(found.output, tuple) else found.output.logits is None
    if not given:
        by_position = without_key_biases(Step(model, lambda **_: model(TOKENS, MASK, labels=INPUTS["labels"])))
        by_position.assert_same(expected, 3)


@models
def test_options_of_the_loss_are_obeyed(decoders, make):
    model = make()
    options = {"label_smoothing": 0.1, "class_weight": torch.rand(199, generator=torch.Generator().manual_seed(0)), **IGNORED}
    with_logits = decoders.kernelize(copy.deepcopy(model))
    expected = without_key_biases(Step(with_logits, **{**BATCH, **options}, skip_logits=False))
    assert expected.output.logits is not None
    found = without_key_biases(Step(decoders.kernelize(model), **{**BATCH, **options}))
    found.assert_same(expected, 3)
    assert found.output.logits is None and not torch.allclose(found.loss, Step(model, **BATCH).loss)


def head_of(model):
    return model.get_output_embeddings()


def mean_lse(logits, labels, **_):
    return logits.float().logsumexp(-1).mean()


HINDRANCES = {
    "a hook on the head": (lambda model: head_of(model).register_forward_hook(lambda *_: None), "hooks listen to it"),
    "a forward of the head": (lambda model: setattr(head_of(model), "forward", head_of(model).forward), "replaced"),
    "another number of rows": (lambda model: setattr(model.config, "vocab_size", 398), "config.vocab_size is 398"),
    "a loss": (lambda model: setattr(model, "loss_function", mean_lse), "not transformers"),
}


@models
@pytest.mark.parametrize("what", HINDRANCES)
def test_what_the_user_puts_on_a_model_is_kept(decoders, make, what):
    put, reason = HINDRANCES[what]
    model = make()
    if what != "another number of rows":
        put(model)
        expected = without_key_biases(Step(model, **BATCH))
        decoders.kernelize(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = without_key_biases(Step(model, **BATCH))
        found.assert_same(expected, 3)
        assert found.output.logits is not None
    else:
        put(decoders.kernelize(model))
    assert reason in row(decoders, model).reason


def test_a_hook_on_what_holds_the_head_is_called(decoders):
    model, calls = decoders.kernelize(bert()), []
    model.cls.predictions.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(RuntimeWarning, match=r"cls.predictions has hooks"):
        found = Step(model, **BATCH)
    assert calls == [1] and found.output.logits is not None
    assert "cls.predictions has hooks" in row(decoders, model).reason


@models
def test_evaluation_and_reset_and_copies(decoders, make):
    model = make().eval()
    expected = model(**BATCH)
    decoders.kernelize(model)
    found = model(**BATCH)
    for mine, other in ((found.logits, expected.logits), (found.loss, expected.loss)):  # Cohere's branches are added in another order
        assert torch.equal(mine, other) if make is bert else relative_error(mine, other) < 1e-6
    assert model(**BATCH, skip_logits=True).logits is None
    copied = copy.deepcopy(model).train()
    assert copied(**BATCH).logits is None
    decoders.reset()
    assert not any("forward" in vars(module) or any(name.startswith("_bastile") for name in vars(module)) for module in model.modules())
    assert model.train()(**BATCH).logits is not None


def test_a_loss_inside_of_another_model(decoders):
    """Kosmos-2 gives its labels to the causal LM that it holds."""
    model = built("kosmos-2", "Kosmos2ForConditionalGeneration")
    decoders.kernelize(model)
    assert row(decoders, model).fused and "forward" in vars(model.text_model) and "forward" not in vars(model)


@needs_compiler
@models
def test_torch_compile(decoders, make):
    model = make()
    model.loss_type = "ForCausalLM"  # else transformers warns of BERT's in each pass, which breaks the graph
    expected = without_key_biases(Step(model, **BATCH))
    found = without_key_biases(compiled_step(decoders.kernelize(model), **BATCH))
    found.assert_same(expected, 3)
    assert found.output.logits is None
