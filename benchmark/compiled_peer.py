"""transformers' layers under torch.compile, as they are or with torchao's products in eight bits: what a user of these would train."""

import torch
from torch import nn

from .providers import require_modules

# By provider: the recipe by which torchao scales, None for none.
RECIPES = {"torch_compile": None, "torchao": "tensorwise", "torchao_rowwise": "rowwise"}


def in_eight_bits(model, recipe: str):
    """Return the model with torchao's layers for all linear layers of its decoder that it can take: not the head, which its documents
    leave out, nor adapters."""
    require_modules("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_taken(module: nn.Module, name: str) -> bool:
        whole = isinstance(module, nn.Linear) and not (module.in_features % 16 or module.out_features % 16)
        return whole and "lm_head" not in name and "lora_" not in name

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=is_taken)


def compile_layers(model, *_) -> None:
    """Have torch.compile compile the decoder layer, once for all of them, and the loss, for the next batch's shape."""
    torch._dynamo.reset()  # what was compiled for another length counts towards a limit
    causal_lm = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in causal_lm.model.layers:
        layer.compile(dynamic=False)
    causal_lm.loss_function = torch.compile(type(causal_lm).loss_function.fget(causal_lm), dynamic=False)
