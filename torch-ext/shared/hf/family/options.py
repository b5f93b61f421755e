"""The options of `apply`, and what each says; a package has those of its families, in an order of its own."""

import inspect
import textwrap
from typing import Any, Dict, Mapping, NamedTuple, Sequence, Union

from ...ops.arguments import fail
from .families import LOSS

__all__ = ["DEFAULTS", "Settings", "entries_of", "given", "signature_of", "switch_or_gib", "text_of"]

# What a package's `apply` says of an option that it has. Those that are no operation have a default of their own.
TEXTS = {
    "rms_norm": "the norms.",
    "swiglu": "the MLP, and the expert that every token goes to where there is one.",
    "experts": """the experts in grouped GEMMs, which the fused decoder layer joins with the router and the norm before it. An
            implementation that the user chose (`set_experts_implementation`) runs instead. `moe` is another name for it.""",
    "rope": "the rotary embedding.",
    LOSS: """the loss without logits, with the scale or the softcap of the family's head: a model in training mode that
            gets labels returns it and no logits. True, False, or a mapping of options, which stands for True: `ignore_index`,
            `class_weight`, `reduction`, `label_smoothing`, `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`,
            `return_z_loss`, `return_token_accuracy` and `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a
            loss comes without logits, in training mode by default. They hold for every call with labels, in eval mode too, unless the
            call itself has an argument of that name: model(input_ids=..., labels=..., label_smoothing=0.1). The results of the
            return_ options are in the model's output, as z_loss, token_accuracy and predicted_tokens.""",
    "decoder_layer": "the fused layer, which takes effect where the norms, the MLP and the rotary embedding that it joins are on.",
    "attention": """on a GPU, Bastile's attention from the model's next step on, where the model has the implementation that
            transformers chooses by default. Packed and padded batches, sliding windows and sinks run in Bastile's kernels, at the cost of
            the tokens that are seen, and documents packed into a row do not see each other; one sequence a row without padding goes to
            SDPA as before, and so do batches whose padding may be read. An implementation that was asked for by name is kept, as far as
            that can be told (docs/options.md).""",
    "gated_rms_norm": "the norm that follows a delta net, with its gate.",
    "delta_net": "convolution and gated delta rule; documents packed into a row do not see each other.",
    "unpad": """skips a batch's padding in the whole decoder if no result shows it: with that attention, a loss without logits, no cache
            (use_cache=False, as Trainer has it), no label at a padded position, and no hooks on the decoder's parts. It stays in a model
            with delta nets.""",
    "keep_attention": """with gradient checkpointing, each decoder layer's attention runs once, and the backward pass computes the rest
            of the layer again. Attention's output stays in memory, heads * head_dim numbers and a float32 a head for each token and layer.
            For Bastile's attention and PyTorch's ("sdpa") without dropout.""",
    "recompute_mlp": """True: without gradient checkpointing, the backward pass recomputes gate and up of the fused decoder layer's MLP,
            or of the experts, instead of keeping them, with the same bits. It saves 2 * intermediate_size numbers for each token and layer
            (of experts, for each token and expert that it goes to) and costs half of the products of the layer's forward pass. A number
            of tokens, a multiple of 16, such as 4096: in longer rows, checkpointed or not, the MLP or the experts compute that many at a
            time, so that a long row's peak does not grow with gate and up; the results are the same but for rounding.""",
    "log_probs": """TRL's trainers (1.16) compute their log-probabilities without logits, with every model of the process; a head that
            Bastile does not serve (sharded or quantised) goes to TRL's own function. {"recompute": False} keeps the logits of a trained
            head for the backward pass, for speed.""",
    "products": """"bf16", or "fp8": the products of a dense decoder layer's linear layers, their inputs' gradients and their weights'
            are multiplied in e4m3 where that is possible and pays; `explain` says where. Head, attention, adapters, experts and norms stay
            as they are. A product then has 28 dB, where bf16 has 55 (docs/options.md).""",
    "capture": """the first training pass captures the model's layers, for the lengths that recur, as `capture(model)` does: short steps no
            longer wait for the host (docs/options.md). True, or the GiB that the graphs may take. What cannot be captured runs as before,
            with a warning; `explain` says what is replayed.""",
    "offload": """with gradient checkpointing, the input of each decoder layer goes to pinned memory of the host while the layer runs, on
            a stream of its own, and comes back while the layer after it runs backward; with keep_attention, attention's output too. The
            results have the same bits. True, or the GiB that may be pinned: by default three quarters of what is free, shared among the
            ranks of a host; the rest goes to pageable memory, with a warning. Not under `capture`, which says so, nor `torch.compile`.""",
}
OTHER_NAMES = {"moe": "experts"}


class Settings(NamedTuple):
    """The options of `apply`, and of `kernelize`, that are no operations."""

    unpad: bool = True
    keep_attention: bool = False
    recompute_mlp: Union[bool, int] = False
    log_probs: Union[bool, Mapping[str, Any]] = True
    products: str = "bf16"
    offload: Union[bool, float] = False
    capture: Union[bool, float] = False


DEFAULTS = Settings()


APPLY = """Puts the layers on transformers' classes: models that exist and models loaded later use them. Call it before creating a trainer.

    After the call exactly the operations given as True are active. The last call wins, also over `kernelize`. `reset` undoes it, `explain`
    says what runs fused. Not thread-safe against a running forward pass.

    Families: {names}.

    Args:
{arguments}

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for unknown `products`, or in eight bits without the decoder layer.
        ImportError: when transformers is absent or its version does not fit.
    """


def signature_of(names: Sequence[str]) -> inspect.Signature:
    """The signature of an `apply` with these options, each by position or by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind, default=Settings._field_defaults.get(name, True)) for name in names])


def given(signature: inspect.Signature, args: tuple, kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Each option of a call of `apply`. Raises TypeError for one that does not exist, or is there twice."""
    names, more = list(signature.parameters), dict(kwargs)
    for other, name in OTHER_NAMES.items():
        if other in more and name in names and name not in more:
            more[name] = more.pop(other)
    try:
        bound = signature.bind(*args, **more)
    except TypeError as error:
        raise TypeError(f"apply(): {error}; its options are {', '.join(names)}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def switch_or_gib(name: str, value: Any, of_what: str) -> Union[bool, float]:
    """An option that is on, off, or a number of GiB. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (int, float)) or not value > 0:
        fail(name, repr(value), f"True, False, or the GiB {of_what}")
    return float(value)


def entries_of(name: str, value: Any, known: Sequence[str]) -> Dict[str, Any]:
    """The mapping that an option of `apply` may be; empty for True and False. Raises TypeError for an entry that does not exist."""
    found = dict(value) if isinstance(value, Mapping) else {}
    unknown = [str(each) for each in found if each not in known]
    if unknown:
        raise TypeError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return found


def text_of(names: Sequence[str], families: str) -> str:
    """The docstring of an `apply` with these options."""
    folded = textwrap.fill(families, 125, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return APPLY.format(names=folded, arguments="\n".join(f"        {name}: {TEXTS[name]}" for name in names))
