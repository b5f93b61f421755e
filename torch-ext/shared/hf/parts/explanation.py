"""The table that `explain` makes: which parts of a model run fused and, for the others, why not and what to do."""

import warnings
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from ...runtime.device import why_no_kernels

__all__ = ["ADVICE", "MIXERS", "Explanation", "Reason", "explanation_of", "losses_of_others", "no_kernels", "warn_once"]

# What to do about a reason, by its code; "" where there is nothing to do.
ADVICE = {
    "trl_head": "nothing for its trainers, which make no logits; for other losses call apply() or kernelize() before creating one",
    "trl": "call apply() or kernelize(model) with log_probs=True",
    "head": "load the head as plain floating point weights, or accept that TRL's trainers compute with it themselves",
    "device": "move the model to a CUDA device",
    "kernels": "",
    "row": "nothing: what computes something that no row can say runs as it is, and its known parts run separately",
    "shape": "",
    "unpatched": "call apply(), or kernelize(model)",
    "texts": "install a newer release of this package, or the newest transformers that it was tested with",
    "accounted": "have the row say what these do (docs/maintainers.md), or take it out of the table",
    "zero3": "make whole decoder layers its unit: deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])",
    "hooks": "remove the hooks, or accept that these parts are called separately",
    "checkpointing": "pass gradient_checkpointing_kwargs={'use_reentrant': False} and no other options, and leave offload out",
    "offload": "call model.gradient_checkpointing_enable(), which keeps each layer's input alone",
    "cache": "set model.config.use_cache = False for training",
    "changing": "keep adapters, hooks and weights where they are between training steps",
    "threads": "train the model in one thread; reset() and capture() make graphs anew",
    "unrecorded": "run two training passes of this shape",
    "uncaptured": "make the model one that capture(model) takes, or leave capture out",
    "memory": "capture(model, memory=...), in GiB, or sizes= for fewer of them",
    "call": "",
    "bias": "nothing: a linear layer with a bias is called as it is",
    "adapters": "activate one adapter, or merge the others",
    "variant": "plain LoRA (no DoRA) is fused",
    "adapter": "",
    "autocast": "train in the dtype of the weights, or in float32 weights under autocast",
    "dtype": "load the model in one dtype",
    "tensor": "",
    "skip_logits": "leave skip_logits out of the options of the loss",
    "inside": "",
    "forward": "nothing: its loss is computed from all logits, as without this package",
    "facts": "set it before kernelize(), or call kernelize() again",
    "class": "train the text's own model, such as MistralForCausalLM, where a batch has no images",
    "loss": "leave model.loss_function as it is, or pass the options of the loss to apply()",
    "below": "put back what the name stood for, or accept that it is called where transformers calls it",
    "apart": "call pack(model)",
    "views": "nothing: FSDP or DeepSpeed lays the weights of a unit out",
    "named": 'model.set_attn_implementation("bastile") for attention of ours',
    "replaced": "call apply() or kernelize() before accelerate, TRL or others wrap the model",
    "default": "put transformers' own function back, or leave attention to it; every other part is fused",
    "parallel": "nothing: every other part is fused",
    "called": "nothing: what lies around it is fused",
    "padding": "pack the texts, or sort them by length",
    "eight_bits": "nothing: these products are in bf16",
    "tiles": "adapters without dropout, products in bf16 and a dense MLP are computed in tiles",
    "node": "have that part fused, and this one is too",
    "model": "",
}


# The names that messages give to the modules that mix a layer's tokens, by attribute.
MIXERS = {"linear_attn": "delta net", "self_attn": "attention with its gate"}


class Reason(NamedTuple):
    """Why a part of a model is not fused. code: its kind, a key of `ADVICE`; text: what is said of this part."""

    code: str
    text: str

    def of(self, name: str) -> "Reason":
        """Returns the reason with the name of the part that it is about."""
        return Reason(self.code, f"{name}: {self.text}")


_warned: set = set()


def warn_once(text: str, stacklevel: int = 3) -> None:
    """Warns of what this process has not been warned of. stacklevel: as of `warnings.warn`, counted from here."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)


def no_kernels(device: torch.device) -> Optional[Reason]:
    """Why the prebuilt kernels do not run on a device; None where they do."""
    text = why_no_kernels(device)
    return Reason("device" if device.type != "cuda" else "kernels", text) if text else None


def losses_of_others(model: torch.nn.Module, causal_lms: Sequence[torch.nn.Module]) -> Mapping[torch.nn.Module, str]:
    """Says who else computes a loss in a model: of a causal LM within a class of transformers', which calls it for its logits, that class;
    and every other module with a head. causal_lms: those whose loss is known."""
    found: Dict[torch.nn.Module, str] = {}
    for module in model.modules():
        name, of_transformers = type(module).__name__, type(module).__module__.startswith("transformers.")
        text = f"{name} makes all logits and computes its loss from them" if of_transformers else f"{name} computes its loss itself"
        if module not in causal_lms and "lm_head" in module._modules:
            found.setdefault(module, text)
        for part in module.modules() if of_transformers and causal_lms else ():
            if part in causal_lms and part is not module:
                found.setdefault(part, text)
    return found


Found = Mapping[Tuple[str, Optional[Reason]], int]  # how many there are of each part with a reason, None where it runs fused


class ExplainedPart(NamedTuple):
    """part: of a model; count: how many of it there are; fused: whether it runs fused; reason: why not, or what holds it back; advice;
    code: of the reason, a key of `ADVICE`."""

    part: str
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    fused: bool
    reason: str
    advice: str
    code: str = ""


class Explanation(NamedTuple):
    """What `explain` found: printed, a table."""

    rows: Tuple[ExplainedPart, ...]

    def __str__(self) -> str:
        table = [("part", "layers", "fused", "why not", "what to do")]
        table += [(row.part, str(row.count), "yes" if row.fused else "no", row.reason, row.advice) for row in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def explanation_of(found: Found, advice: Mapping[str, str] = ADVICE) -> Explanation:
    """Makes the table. advice: by the codes of the reasons."""
    rows = []
    for (part, reason), count in found.items():
        said = ("", "", "") if reason is None else (reason.text, advice[reason.code], reason.code)
        rows.append(ExplainedPart(part, count, reason is None, *said))
    return Explanation(tuple(rows))
