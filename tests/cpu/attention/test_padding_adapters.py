"""Every tuner of the installed PEFT on a padded batch: losses and gradients are transformers' own, whether it sees the padding or not."""

import pytest
import torch

from tests.attention_batches import labels_of, loss_and_gradients, module_of, padded, tokens_of

peft = pytest.importorskip("peft")
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING  # noqa: E402

LENGTHS = (9, 2, 23, 7)
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]
# What the configuration of a tuner needs beside layers to adapt; None: it finds them itself.
NEEDS = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 4, "adapter_layers": 1},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CPT": {"cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"r": 0, "oft_block_size": 8},
    "POLY": {"n_tasks": 2},
    "ROAD": {"group_size": 16},
    "SHADOW": {"target_modules": None},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4, 5]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 20},
}
VARIANTS = {
    "dora": {"use_dora": True},
    "velora": {"velora_config": ("VeloraConfig", {"num_groups": 4, "scale": 0.5})},
    "kasa": {"kasa_config": ("KasaConfig", {})},
    "bdlora": {"use_bdlora": ("BdLoraConfig", {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"], "nblocks": 2,
                                               "match_strict": False})},
    "alora": {"alora_invocation_tokens": [5]},
    "qalora": {"use_qalora": True, "qalora_group_size": 8},
}  # fmt: skip


def config_of(kind, options, folder, base):
    """The configuration of a tuner with as little in it as it takes. base: makes a model without adapters, for X-LoRA's."""
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = cls.__dataclass_fields__
    found = {"num_virtual_tokens": 3} if "num_virtual_tokens" in known else {"target_modules": TARGETS}
    if kind.value == "XLORA":
        for name in "01":  # as PEFT numbers them
            model = base()
            torch.manual_seed(int(name))
            lora = config_of(peft.PeftType.LORA, {"init_lora_weights": False}, folder, base)
            peft.get_peft_model(model, lora).save_pretrained(folder / name)
        found = {"hidden_size": base().config.hidden_size, "adapters": {name: str(folder / name) for name in "01"}}
    found |= {"task_type": "CAUSAL_LM", **NEEDS.get(kind.value, {}), **options}
    if not found.keys() <= known.keys():
        pytest.skip(f"this PEFT's {cls.__name__} has no {', '.join(found.keys() - known.keys())}")
    for name, value in found.items():
        if isinstance(value, tuple):
            found[name] = getattr(peft.tuners.lora.config, value[0])(**value[1])
    try:
        return cls(**found)
    except ImportError as missing:  # AdaMSS wants scikit-learn
        pytest.skip(str(missing))


def step(make, config, batch):
    """(loss, gradients by name) of a model with an adapter whose weights are not zero, always the same."""
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return loss_and_gradients(model, **batch)


CASES = [pytest.param(kind, {}, id=kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING]
CASES += [pytest.param(peft.PeftType.LORA, options, id=name) for name, options in VARIANTS.items()]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("side", ("left", "right"))
def test_every_tuner_trains_as_without_us(chosen, monkeypatch, tmp_path, kind, options, side):
    package, make = chosen("llama")

    def base():
        return make(hidden_size=64, head_dim=16, use_cache=False)

    batch = padded(side, LENGTHS)
    first = batch["attention_mask"].cumsum(1) == 1
    batch["labels"] = labels_of(batch).masked_fill(first, -100)  # which a padded position would predict
    if kind.value in ("POLY", "MULTITASK_PROMPT_TUNING"):
        batch["task_ids"] = torch.tensor([0, 1, 0, 1])
    configs = [config_of(kind, options, tmp_path, base) for _ in range(2)]
    expected, gradients = step(base, configs[0], batch)
    package.apply(fused_linear_cross_entropy=kind.value != "CPT")  # which reads the logits of a call with labels
    tokens = tokens_of(package, monkeypatch)
    found, ours = step(base, configs[1], batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients and ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"
    assert module_of(package, "padding").rounded_length(sum(LENGTHS)) == sum(LENGTHS) + 1  # a token of no text, too
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[kind].__module__.split(".")[2]
    if tuner in module_of(package, "padding").TUNERS and not set(options) & {"velora_config", "alora_invocation_tokens"}:
        assert set(tokens) == {sum(LENGTHS) + 1}, "padding is kept though this tuner leaves each token to itself"
