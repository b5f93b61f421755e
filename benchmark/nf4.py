"""Frozen weights in bitsandbytes' four bits, as QLoRA has them: what every provider trains adapters over with `--weights nf4`."""

from torch import nn

from .providers import require_modules


def in_nf4(model, device: str):
    """Return the model with bitsandbytes' layers for all linear layers but the head, as `BitsAndBytesConfig(load_in_4bit=True,
    bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)` loads it: products in bf16."""
    require_modules("bitsandbytes")
    import bitsandbytes as bnb

    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        dtype = linear.weight.dtype
        layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, device="meta")
        layer.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, compress_statistics=True, quant_type="nf4")
        layer.bias = linear.bias
        layer.compute_type_is_set = True
        model.set_submodule(name, layer.to(device))
    model.is_loaded_in_4bit = True  # which PEFT asks for
    return model
