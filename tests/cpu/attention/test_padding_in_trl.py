"""TRL's trainers read the decoder's results only where a token predicts a label, so padding is left out of it: with the same losses,
metrics, gradients and parameters. What else the trainers do: tests/integrations/preference.py."""

import contextlib
import importlib
import types

import pytest
import torch

from tests.attention_batches import LENGTHS, labels_of, module_of, padded
from tests.cpu.test_trl import part
from tests.integrations.common import model_on
from tests.integrations.preference import CASES, lora, make, other_family, train
from tests.models import tiny_model

utils = pytest.importorskip("trl.trainer.utils")
# One of each kind of loss, of padding and of reader. GRPO pads prompts before and completions after their tokens.
TRAINED = ("SFT", "SFT, LoRA", "SFT, DFT", "DPO, weighted", "DPO, LoRA", "KTO", "GRPO", "GRPO, entropy in the loss, LoRA",
           "GRPO, nothing counts", "RLOO", "SFT, capped logits")  # fmt: skip


# Trainers with a reference model, which they load with the implementation that the policy's configuration names.
REFERRING = {"DPO": {}, "KTO": {}, "GRPO": {"beta": 0.1, "per_device_train_batch_size": 8},
             "RLOO": {"beta": 0.1, "per_device_train_batch_size": 8}}  # fmt: skip


@contextlib.contextmanager
def decoded(package):
    """A list of (tokens that the decoder got, tokens of the batch), one entry a call in which a caller said what it reads."""
    module, found = module_of(package, "decoder_model"), []
    original = module.left_out_of_decoder

    def left_out(decoder, kwargs):
        given, seen = original(decoder, kwargs)
        if module_of(package, "padding").READ in vars(decoder):
            tokens = kwargs["attention_mask"].numel()
            found.append((tokens if seen is None else seen.numel(), tokens))
        return given, seen

    module.left_out_of_decoder = left_out
    try:
        yield found
    finally:
        module.left_out_of_decoder = original


@pytest.mark.parametrize("case", TRAINED)
def test_a_trainer_of_trl_trains_the_same_without_padding(request, chosen, case, tmp_path):
    kind, options = CASES[case]
    options = {**options, **({"per_device_train_batch_size": 8} if kind in ("GRPO", "RLOO") else {})}  # two prompts
    package = chosen("gemma2" if options.get("family") else "qwen3")[0]
    outcomes = []
    family, with_lora = options.pop("family", None), options.pop("lora", False)
    for ours in (False, True):
        model = other_family(family, "cpu") if family else model_on("cpu")
        model.save_pretrained(tmp_path / "model")
        model.config._name_or_path = str(tmp_path / "model")
        if ours:
            package.apply()
        with decoded(package) as tokens:
            given = {**options, "peft_config": lora()} if with_lora else options
            outcomes.append(train(kind, model, tmp_path, "cpu", **given))
    assert sum(seen for seen, _ in tokens) < sum(whole for _, whole in tokens)
    outcomes[1].assert_same(outcomes[0], "cpu")


@pytest.mark.parametrize("named", (None, "policy", "reference"))
@pytest.mark.parametrize("kind", REFERRING)
def test_a_reference_model_has_the_policy_s_attention(chosen, kind, named, tmp_path):
    """Ours, unless someone asked for another one by name: TRL's own question is not the user's."""
    package = chosen("qwen3")[0]
    package.apply()
    model = model_on("cpu")
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")
    options = dict(REFERRING[kind])
    if named == "policy":
        model.set_attn_implementation("sdpa")
    elif named == "reference":
        options["model_init_kwargs"] = {"attn_implementation": "sdpa"}
    trainer = make(kind, model, tmp_path, "cpu", [], **options)
    decoder = trainer.ref_model.model
    decoder(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert decoder.config._attn_implementation == ("bastile" if named is None else "sdpa")
    model.model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert model.model.config._attn_implementation == ("sdpa" if named == "policy" else "bastile")


def fused(model, batch, labels, **options):
    """The output of a model with TRL's head for a padded batch."""
    return model(**batch, labels=labels, fused_lm_head=True, **options)


@pytest.fixture
def with_head(chosen):
    """(package, a function that makes a model with TRL's head after apply())."""
    package, tiny = chosen("qwen3")

    def of(**changes):
        torch.manual_seed(0)
        model = tiny(**changes)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"))
        return model

    return package, of


FIELDS = ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def outcome(model, batch, labels):
    model.zero_grad(set_to_none=True)
    output = fused(model, batch, labels)
    (output.loss + output.entropy.sum() / 100).backward()
    return {name: getattr(output, name).detach() for name in FIELDS}, {name: p.grad.clone() for name, p in model.named_parameters()}


BATCHES = {
    "right": lambda: padded("right"),
    "left": lambda: padded("left"),
    "one row": lambda: padded("right", lengths=(7,)),
    "both": lambda: {name: torch.nn.functional.pad(value, (3, 0)) for name, value in padded("right").items()},
    "an empty row": lambda: {name: torch.cat((value, torch.zeros_like(value[:1]))) for name, value in padded("right").items()},
    "all masked": lambda: padded("right"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_every_field_and_gradient_is_trl_s(with_head, case):
    package, make = with_head
    batch = BATCHES[case]()
    labels = labels_of(batch)
    labels[labels.ne(-100).cumsum(1) == 1] = -100  # which a padded position may predict
    if case == "all masked":
        labels[:] = -100
    expected = outcome(make(), batch, labels)
    package.apply()
    model = make()
    with decoded(package) as tokens:
        found = outcome(model, batch, labels)
    real = int(batch["attention_mask"].sum())
    assert tokens == [(real, batch["input_ids"].numel())]
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=2e-5, atol=2e-5, msg=name)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("who", ("label", "hook", "switch", "router", "another text", "hidden states"))
def test_padding_stays_where_someone_could_tell(with_head, monkeypatch, who):
    package, make = with_head
    batch = padded("right")
    labels, options = labels_of(batch), {}
    if who == "another text":
        monkeypatch.setattr(part(package), "READ_LABELS_ALONE", ())
    package.apply(unpad=who != "switch")
    model = make()
    if who == "label":
        labels[1, -2] = 5
    elif who == "hook":
        model.model.norm.register_forward_hook(lambda *_: None)
    elif who == "hidden states":
        options["output_hidden_states"] = True
    elif who == "router":
        options["output_router_logits"] = None
        model.config.output_router_logits = True
    with decoded(package) as tokens, contextlib.suppress(AttributeError, TypeError):  # a dense model has no logits of a router
        fused(model, batch, labels, **{name: value for name, value in options.items() if value is not None})
    assert tokens == ([] if who == "another text" else [(batch["input_ids"].numel(),) * 2])


def test_the_decoder_alone_keeps_its_padding(with_head):
    """Called by anyone else, before and after a trainer's call, and when that has failed."""
    package, make = with_head
    batch = padded("right")
    expected = make().model(**batch, use_cache=False).last_hidden_state
    package.apply()
    model = make()
    for labels in (labels_of(batch), torch.zeros(1)):
        with contextlib.suppress(IndexError, RuntimeError):
            fused(model, batch, labels)
        torch.testing.assert_close(model.model(**batch, use_cache=False).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
        assert not any("labels_are_read" in name for name in vars(model.model))


def test_a_model_of_another_package_has_its_padding_left_out(chosen):
    """The last package that was applied has its head in TRL's place; each has its own decoders."""
    first, tiny = chosen("gemma2")
    second, _ = chosen("qwen3")
    first.apply()
    second.apply()
    model, batch = tiny(), padded("right")
    utils.add_fused_lm_head(model)
    with decoded(first) as tokens:
        fused(model, batch, labels_of(batch))
    assert tokens == [(sum(LENGTHS), batch["input_ids"].numel())]
    first.reset()


def test_what_trl_s_function_is_to_others_stays(qwen3):
    theirs = utils.add_fused_lm_head
    assert isinstance(theirs, types.FunctionType)
    qwen3.apply()
    held = [importlib.import_module(name).add_fused_lm_head for name in ("trl.trainer.utils", "trl.trainer.sft_trainer", "trl.trainer")]
    assert len(set(map(id, held))) == 1 and held[0] is not theirs and held[0].__doc__ == theirs.__doc__
    model = tiny_model()
    assert held[0](model) is None and model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1).shape == (1, 3)
    qwen3.reset()
    assert utils.add_fused_lm_head is theirs
