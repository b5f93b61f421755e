"""The layers of types without a row: one tiny model for each way in which a layer is put together, beside transformers' own."""

import pytest
import torch

from tests.any_model import VOCABULARY, tiny_of
from tests.models import Step
from tests.tolerances import relative_error
from tools.family_loss import names_of

# By what is particular of the layer: (type, the parts that run fused).
TINY = {
    "norms that are called": ("starcoder2", "q_proj, k_proj, v_proj, rotary"),
    "side by side, of one norm, angles of neighbours": ("cohere", "q_proj, k_proj, v_proj, rotary"),
    "side by side, a part of each head turned": ("phi", "q_proj, k_proj, v_proj, rotary"),
    "no other arguments": ("stablelm", "q_proj, k_proj, v_proj, rotary"),
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
    "cross-attention": ("mllama", "norm, gate_proj, up_proj, down_proj"),
}


@pytest.mark.parametrize("what", TINY)
def test_layers_are_those_of_transformers(decoders, what):
    kind, part = TINY[what]
    names = names_of("causal LM")
    if kind not in names:
        pytest.skip(f"this release has no {kind}")
    model = tiny_of(kind, names[kind])
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    expected = _all_of(model)
    decoders.kernelize(model)
    parts = {row.part for row in decoders.explain(model).rows if row.fused}
    assert any(each.startswith("read: ") for each in parts) and (not part or part in parts), decoders.explain(model)
    found = _all_of(model)
    for mine, other in zip(found[0], expected[0]):
        assert relative_error(mine.loss, other.loss) < 1e-6 and mine.gradients.keys() == other.gradients.keys()
        largest = max(float(gradient.norm()) for gradient in other.gradients.values())
        for name, gradient in other.gradients.items():
            assert float((mine.gradients[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-2 * largest), name
    assert torch.equal(found[1], expected[1])


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
    generated = model.generate(tokens[:, :6], max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.train()
    return steps, generated
