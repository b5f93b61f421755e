"""The loss without logits of the types that transformers lists: one tiny model for each way in which a forward makes its logits, and which
types are served at all."""

import pytest
import torch

from tests.any_model import VOCABULARY, tiny_of
from tests.models import Step
from tests.tolerances import relative_error
from tools.family_loss import TABLES, all_found, found_of, names_of

CAUSAL, VISION = TABLES
# By what is particular of the forward, or of the head.
TINY = {
    "the router's logits returned": "flint-FlintForCausalLM",
    "the router's logits returned, in another class": "aria_text-AriaTextForCausalLM",
    "multiplied": "cohere-CohereForCausalLM",
    "multiplied in one line": "hyperclovax-HyperCLOVAXForCausalLM",
    "capped": "gemma4_text-Gemma4ForCausalLM",
    "capped in float32": "beam-BeamForCausalLM",
    "cast to float32": "mllama-MllamaForCausalLM",
    "cast before and after": "mamba-MambaForCausalLM",
    "a bias": "gptj-GPTJForCausalLM",
    "contiguous": "opt-OPTForCausalLM",
    "within two modules": "bert-BertLMHeadModel",
    "within a module, with a bias": "roberta-prelayernorm-RobertaPreLayerNormForCausalLM",
    "behind a module": "electra-ElectraForCausalLM",
    "named decoder": "modernbert-decoder-ModernBertDecoderForCausalLM",
    "named output_projection": "biogpt-BioGptForCausalLM",
    "named embed_out": "gpt_neox_japanese-GPTNeoXJapaneseForCausalLM",
    "return_dict of its own": "bloom-BloomForCausalLM",
    "hidden states returned, too": "moshi-MoshiForCausalLM",
    "a decoder with another name": "gpt2-GPT2LMHeadModel",
    "no cache in a pass with labels": "megatron-bert-MegatronBertForCausalLM",
    "a tower": "video_llava-VideoLlavaForConditionalGeneration",
    "a tower, and capped": "gemma4-Gemma4ForConditionalGeneration",
    "a tower that a row has for another text": "paligemma-PaliGemmaForConditionalGeneration",
    "an output with a name": "evolla-EvollaForProteinText2Text",
    "audio": "moss_transcribe_diarize-MossTranscribeDiarizeForConditionalGeneration",
}
# Of the release that these tests run with, by a reason that does not change from one to the next.
LEFT = {
    "bart": "logits.view", "xlm": "XLMPredLayer.forward", "musicgen": "capture_outputs", "blip-2": "OPTForCausalLM.forward",
    "blip": "arguments of its own named reduction", "t5gemma2": "transformers' ForMaskedLMLoss",
}  # fmt: skip


@pytest.mark.parametrize("what", TINY)
def test_losses_and_gradients_are_those_of_transformers(decoders, what):
    kind, _, name = TINY[what].rpartition("-")
    if kind not in names_of(CAUSAL) | names_of(VISION):
        pytest.skip(f"this release has no {kind}")
    model = tiny_of(kind, name)
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, 0, 0.1)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    tokens = torch.randint(3, VOCABULARY - 20, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}
    torch.manual_seed(5)  # of dropout that is no module
    expected = Step(model, **inputs)
    decoders.kernelize(model)
    (loss,) = [row for row in decoders.explain(model).rows if row.part == "loss without logits"]
    if kind == "paligemma" and "final_logit_softcapping" in loss.reason:
        pytest.skip("this release's PaliGemma caps its logits by what its text's configuration says, which is refused with the line")
    assert loss.fused
    torch.manual_seed(5)
    found = Step(model, **inputs)
    assert found.output.logits is None and expected.output.logits is not None
    assert found.output.keys() == expected.output.keys() - {"logits"}
    assert relative_error(found.loss, expected.loss) < 1e-6
    largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
    assert found.gradients.keys() == expected.gradients.keys()
    for parameter, gradient in expected.gradients.items():  # some are nothing but what the softmax takes away again
        difference = float((found.gradients[parameter] - gradient).norm())
        assert difference <= 5e-6 * max(float(gradient.norm()), 1e-2 * largest), (parameter, difference, float(gradient.norm()), largest)


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_to_transformers_has_a_reason(decoders, kind):
    table = CAUSAL if kind in names_of(CAUSAL) else VISION
    found = found_of(decoders, table, kind, names_of(table)[kind])
    if not found.built:
        pytest.skip(f"this release makes no {kind} of its own defaults: {found.reason}")
    assert not found.loss and LEFT[kind] in found.reason


def test_most_types_are_served(decoders):
    """Those that cannot be built are of defaults that do not fit each other."""
    found = all_found(decoders)
    for table, least in ((CAUSAL, 0.8), (VISION, 0.75)):
        built = [each for each in found if each.table == table and each.built]
        assert len(built) > 60 and sum(each.loss for each in built) > least * len(built)
    assert all(each.reason for each in found if not each.loss) and all(each.level == "whole" or each.layers for each in found if each.built)
