"""Steps of a tiny Qwen3 with the layers and without."""

from torch import nn

from tests.models import Step, random_tokens

TOKENS = random_tokens(2, 33)
LABELS = TOKENS.clone()
LABELS[0, :7] = -100
LABELS[1, 20:] = -100


def compare(qwen3, model, **inputs):
    """(output without, output with the layers) of one step; asserts that losses and gradients are the same."""
    expected = Step(model, **inputs)
    qwen3.apply()
    found = Step(model, **inputs)
    qwen3.reset()
    found.assert_same(expected)
    return expected.output, found.output


def bound(qwen3, name, **attributes):
    """A module with the forward of one of the layers, as `kernels` binds it."""
    module = nn.Module()
    for key, value in attributes.items():
        setattr(module, key, value)
    return getattr(qwen3.layers, name).forward.__get__(module)
