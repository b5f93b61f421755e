"""generate() and the logits of inference: those of transformers."""

import pytest
import torch
import transformers

from tests.integrations.common import FACTOR, PAGES, WAYS, clear_choices, install, layers_run, model_on  # noqa: F401
from tests.models import random_tokens
from tests.tolerances import assert_close, relative_error

NEW = 12


def model_for_inference(device, dtype=torch.float32, **changes):
    return clear_choices(model_on(device, dtype, **changes))


def generated(model, device, prompt=None, **options):
    """Tokens, and the logits that they were chosen by."""
    prompt = random_tokens(2, 9) if prompt is None else prompt
    options = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True, **options}
    found = model.generate(prompt.to(device), return_dict_in_generate=True, output_logits=True, **options)
    return found.sequences, torch.stack(found.logits) if found.logits else None


def compare(qwen3, device, build=model_for_inference, how="kernelize", **options):
    expected, expected_logits = generated(build(device), device, **options)
    tokens, logits = generated(install(qwen3, build(device), how), device, **options)
    assert torch.equal(tokens, expected)
    if logits is not None:
        assert_close(logits, expected_logits, torch.float32, "logits", FACTOR[device])


@pytest.mark.integration("generate: dynamic and static cache, without cache")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "dynamic"}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_greedy_tokens(qwen3, device, how, options):
    compare(qwen3, device, how=how, **options)


@pytest.mark.integration("generate: a batch with left padding")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padding(qwen3, device, cache, attention):
    """Gives what the plain model gives, and each row what it gives alone without padding."""
    padding = torch.tensor([0, 4, 7])
    prompt = random_tokens(3, 9)
    mask = (torch.arange(9) >= padding[:, None]).long()
    options = {"prompt": prompt * mask, "attention_mask": mask.to(device), "cache_implementation": cache}

    def build(device):
        return model_for_inference(device, attn_implementation=attention)

    compare(qwen3, device, build, **options)
    model = install(qwen3, build(device))
    tokens, _ = generated(model, device, **options)
    for row, skipped in enumerate(padding.tolist()):
        alone, _ = generated(model, device, prompt=prompt[row : row + 1, skipped:])
        assert torch.equal(tokens[row, skipped:], alone[0])


@pytest.mark.integration("generate: beam search")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beam_search(qwen3, device, cache):
    compare(qwen3, device, num_beams=3, num_return_sequences=2, cache_implementation=cache)


def batched(model, prompts=(9, 3, 5)):
    """The tokens of `generate_batch`: requests of all lengths share a row, and a cache of pages."""
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)  # nothing ends it
    pages = transformers.generation.ContinuousBatchingConfig(**PAGES)
    requests = [row.tolist() for row in random_tokens(1, sum(prompts))[0].split(prompts)]
    found = model.generate_batch(requests, generation_config=options, continuous_batching_config=pages, progress_bar=False)
    results = [found[name] for name in sorted(found)]
    assert [(result.error, len(result.generated_tokens)) for result in results] == [(None, NEW)] * len(prompts), results
    return [result.generated_tokens for result in results]


@pytest.mark.integration("generate: continuous batching (generate_batch)")
@pytest.mark.parametrize("how", WAYS)
def test_continuous_batching(qwen3, device, how):
    expected = batched(model_for_inference(device))
    model = install(qwen3, model_for_inference(device), how)
    assert batched(model) == expected
    assert torch.equal(generated(model, device)[0], generated(model_for_inference(device), device)[0])


@pytest.mark.integration("generate: sampling on a fixed seed")
def test_sampling(qwen3, device):
    def sampled(model):
        torch.manual_seed(5)
        return generated(model, device, do_sample=True, top_k=20, temperature=0.7)[0]

    assert torch.equal(sampled(install(qwen3, model_for_inference(device))), sampled(model_for_inference(device)))


@pytest.mark.integration("generate: assisted decoding, prompt lookup")
@pytest.mark.parametrize("assistant", ["plain", "kernelized", "prompt lookup"])
def test_assisted_decoding(qwen3, device, assistant):
    """One sequence; the tokens are those of greedy decoding, whoever proposes them."""
    prompt = random_tokens(1, 9)
    expected, _ = generated(model_for_inference(device), device, prompt=prompt)
    options = {"prompt_lookup_num_tokens": 3}
    if assistant != "prompt lookup":
        helper = model_for_inference(device, num_hidden_layers=1)
        options = {"assistant_model": install(qwen3, helper) if assistant == "kernelized" else helper}
    tokens, _ = generated(install(qwen3, model_for_inference(device)), device, prompt=prompt, **options)
    assert torch.equal(tokens, expected)


@pytest.mark.integration("generate: in bf16 and fp16, logits within rounding")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_half_precision(qwen3, device, dtype):
    """Prefill and one-token steps on the same tokens: as far from fp32 as transformers' own."""
    tokens = random_tokens(2, 24).to(device)

    def logits(model):
        with torch.no_grad():
            prefill = model(input_ids=tokens[:, :16], use_cache=True)
            found, cache = [prefill.logits], prefill.past_key_values
            for position in range(16, 24):
                output = model(input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
                found.append(output.logits)
            return torch.cat(found, 1)

    exact = logits(model_for_inference(device, dtype).float())
    before = logits(model_for_inference(device, dtype))
    found = logits(install(qwen3, model_for_inference(device, dtype)))
    assert found.dtype == dtype
    mine, theirs = relative_error(found, exact), relative_error(before, exact)
    assert mine <= 1.25 * theirs + 1e-3, f"relative error {mine:.2e}, without the layers {theirs:.2e}"


@pytest.mark.integration("generate: between training steps")
def test_generating_while_training(qwen3, device):
    """In eval mode and back, as a callback that shows samples does; and in training mode."""
    model, plain = install(qwen3, model_on(device)), model_on(device)
    tokens = random_tokens(2, 9).to(device)
    for mode in (False, True):
        assert torch.equal(generated(model.train(mode), device)[0], generated(plain.train(mode), device)[0])
    assert model.train()(input_ids=tokens, labels=tokens).logits is None
