"""The forward of a causal LM, whose loss needs no logits, and its loss in the forms that transformers asks for."""

import dataclasses
import warnings
from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import nn

from ...ops.autograd import autocasts
from ...ops.cross_entropy import CrossEntropyOptions, LinearCrossEntropyOutput, cross_entropy_of_logits
from ...ops.linear_cross_entropy import linear_cross_entropy
from ..family.head import Head, Unmade, check_head
from ..parts.explanation import ADVICE, Reason, warn_once
from ..parts.facts import Path, follow
from ..parts.lookups import replaced_below
from ..parts.modules import OFF, SAVED, all_are_listened_to, is_transformers_own, original_forward, own_forward, why_not_own
from ..parts.weights import call_with, held, plain_weight, rows_of, sharded_weight, why_not_plain
from .padding import may_change, without_padding

__all__ = [
    "LOSS_OPTIONS", "OPTIONS", "SAID", "SHAPE", "causal_lm_forward", "causal_lm_loss", "causal_lm_loss_of_logits", "output_with_metrics",
    "shift", "why_logits_are_made",
]  # fmt: skip

NO_CHANGE = Head()
# On a causal LM whose forward was read (losses.py): of its `Flow`, head, vocabulary and takes_return_dict.
SHAPE = SAVED + "shape"
OF_ROWS = ("lm_head",), (), True  # the same of the models of a row
SAID = SAVED + "said"  # on a causal LM: the reasons for which it made logits, that the user was told
WANTED = ("loss", "model")  # reasons for logits that are the user's own wish: a loss or a forward of their own
LOSS_OPTIONS = SAVED + "loss_options"  # what apply() was told about the loss, on the class of the causal LM

TAKEN = ("source", "target")  # what transformers' loss calls its logits and labels, so that arguments of these names raise there

# Of the loss, beside transformers' own ignore_index, num_items_in_batch and shift_labels; see `linear_cross_entropy`.
OPTIONS = ("class_weight", "reduction", *(name for name in CrossEntropyOptions._fields if name != "ignore_index"))


def shift(labels, shift_labels, ignore_index):
    """[tokens]: for each token the label of the next one, or what the caller has shifted."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _on(device, options):
    """The options with their tensors on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _items(num_items_in_batch, kwargs):
    """The number of items under transformers' name, `num_items_in_batch`, or under that of `linear_cross_entropy`, `num_items`. Raises
    ValueError when it is given under both."""
    num_items = kwargs.get("num_items")
    if num_items is None or num_items_in_batch is None:
        return num_items_in_batch if num_items is None else num_items
    raise ValueError("num_items and num_items_in_batch are both given, expected one of them: they are two names of the same number")


def _like_items(found, num_items):
    """The result of a loss whose items are counted: DataParallel does it in a tensor of one element, and so is the loss then. It is no
    view: Trainer multiplies it in place, and autograd would forget the hook that FSDP1 has put on a view."""
    loss = found.loss if isinstance(found, LinearCrossEntropyOutput) else found
    if not isinstance(num_items, torch.Tensor) or loss.shape == num_items.shape:
        return found
    loss = loss.view(num_items.shape).clone()
    return found._replace(loss=loss) if isinstance(found, LinearCrossEntropyOutput) else loss


def causal_lm_loss(hidden, weight, bias, labels, /, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """transformers' `ForCausalLMLoss`, of what goes into the head instead of what comes out of it; float32 as that is.

    hidden: [..., features]; weight: [classes, features]; bias: [classes] or None. kwargs: `OPTIONS`, `num_items`, which
    is num_items_in_batch, and others, which are ignored, as in transformers. Returns what `linear_cross_entropy` returns.
    """
    num_items = _items(num_items_in_batch, kwargs)
    device = hidden.device.type
    autocast = autocasts(hidden.device)
    if autocast:
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (hidden, weight, bias))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = shift(labels, shift_labels, ignore_index).to(hidden.device)
    options = _on(hidden.device, {name: kwargs[name] for name in OPTIONS if name in kwargs})
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        found = linear_cross_entropy(hidden, weight, target, bias, ignore_index=ignore_index, num_items=num_items, **options)
    return _like_items(_in_float32(found) if hidden.dtype == torch.float64 else found, num_items)


def _in_float32(found):
    """A loss in the dtype that transformers' is in, whatever the model's."""
    if isinstance(found, LinearCrossEntropyOutput):
        floats = {name: value.float() for name, value in found._asdict().items() if value is not None and value.is_floating_point()}
        return found._replace(**floats)
    return found.float()


def causal_lm_loss_of_logits(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """Computes the loss from logits [..., vocab_size], in PyTorch and in float32."""
    num_items = _items(num_items_in_batch, kwargs)
    logits = logits.float().view(-1, vocab_size)
    target = shift(labels, shift_labels, ignore_index).to(logits.device)
    options = _on(logits.device, {name: kwargs[name] for name in OPTIONS if name in kwargs})
    if options:
        found = cross_entropy_of_logits(logits, target, ignore_index=ignore_index, num_items=num_items, **options)
        return _like_items(found, num_items)
    if num_items is None:
        return nn.functional.cross_entropy(logits, target, ignore_index=ignore_index)
    loss = nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    return loss / (num_items.to(loss.device) if isinstance(num_items, torch.Tensor) else num_items)


class _WithLoss:
    """A causal LM as its own forward sees it, except for the loss, which is ours, with options. found: what it returned."""

    def __init__(self, model, options):
        self.whole, self.options, self.found = model, options, None

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def loss_function(self, logits, labels, vocab_size, **kwargs):
        for name in filter(kwargs.__contains__, TAKEN):
            raise TypeError(f"{name} is an argument of this model's call, which its loss has no use for. Leave it out, or call it labels")
        self.found = self.loss(logits, labels, vocab_size, kwargs)
        return self.found.loss if isinstance(self.found, LinearCrossEntropyOutput) else self.found

    def loss(self, logits, labels, vocab_size, kwargs):
        return causal_lm_loss_of_logits(logits, labels, vocab_size, **{**self.options, **kwargs})


class _Headless(_WithLoss):
    """A `_WithLoss` whose head makes no logits: the loss takes the hidden states and the head's weight. of_family: what is done to
    logits before the loss, None for whatever the forward does. path: the attributes that lead to the head."""

    def __init__(self, model, options, of_family: Optional[Head], path: Path):
        super().__init__(model, options)
        self.of_family, self.path = of_family, path

    def __getattr__(self, name):
        return _on_the_way(self.whole, name, self.path)

    def loss(self, logits, labels, vocab_size, kwargs):
        if not isinstance(logits, Unmade):
            raise RuntimeError(f"the loss got a {type(logits).__name__}, expected what the head returned. Pass skip_logits=False")
        if self.of_family is not None:
            check_head(logits.done, self.of_family)
        made = self.of_family or logits.done
        head, options, scale = follow(self.whole, self.path), _with_softcap(self.options, made.softcap), made.scale
        hidden = logits.hidden if scale == 1 else logits.hidden * scale

        def loss_of(hidden, weight, bias):
            bias = bias if bias is None or scale == 1 else bias * scale
            return causal_lm_loss(hidden, weight, bias, labels, **{**options, **kwargs})

        weight = plain_weight(head, True)
        if weight is not None:
            return loss_of(hidden, weight, held(head, "bias"))
        return call_with(lambda hidden: loss_of(hidden, head.weight, None), head, hidden)


class _OnTheWay:
    """Stands in a model's forward for a module that the head is in, or for the head itself, and path is empty."""

    def __init__(self, module, path: Path):
        self.module, self.path = module, path

    def __getattr__(self, name):
        return _on_the_way(self.module, name, self.path)

    def __call__(self, *args, **kwargs):
        return original_forward(self.module)(self, *args, **kwargs) if self.path else Unmade(*args, **kwargs)


def _on_the_way(module, name: str, path: Path):
    """What a module has under a name, with a stand-in where that leads to the head."""
    found = getattr(module, name)
    return _OnTheWay(found, path[1:]) if path and name == path[0] else found


def _with_softcap(options, softcap: Optional[float]):
    """The options of the loss with the softcap that a model has of its own. Raises ValueError where one was given, too."""
    if softcap is None:
        return options
    if options.get("softcap") is not None:
        raise ValueError(f"softcap is {options['softcap']}, expected none: this model caps its logits itself, at {softcap}")
    return {**options, "softcap": softcap}


OUTPUTS: dict = {}  # by the class of a model's output: the same with metrics


def output_with_metrics(cls):
    """The class of a model's output, with a field for each of what `linear_cross_entropy` returns beside the loss."""
    if cls not in OUTPUTS:
        fields = [(name, Optional[torch.Tensor], None) for name in LinearCrossEntropyOutput._fields[1:]]
        made = OUTPUTS[cls] = dataclasses.make_dataclass(f"{cls.__name__}AndMetrics", fields, bases=(cls,))
        made.__module__ = __name__  # where pickle finds it
        globals()[made.__name__] = made
    return OUTPUTS[cls]


def why_loss_is_not_standard(model) -> Optional[Reason]:
    """Why what follows the logits is not transformers' causal LM loss in transformers' own forward; None when it is."""
    if OFF in model.__dict__:
        return Reason("model", "it was taken off after another library had wrapped the model's forward")
    loss = model.loss_function
    if not is_transformers_own(loss, "transformers.loss.loss_utils", "ForCausalLMLoss"):
        module, name = getattr(loss, "__module__", None) or "", getattr(loss, "__name__", "")
        other = module.startswith("transformers.") and is_transformers_own(loss, module, name)
        return Reason("loss", f"model.loss_function is transformers' {name}" if other else "model.loss_function is not transformers' own")
    replaced = replaced_below(loss)
    if replaced:
        return Reason("below", replaced)
    if SHAPE in model.__dict__:
        return None
    module = original_forward(model).__module__
    return None if module.startswith("transformers.") else Reason("model", f"the model's forward is defined in {module}")


def why_logits_are_wanted(model) -> Optional[Reason]:
    """Why a loss comes with logits in training mode, whatever the head is; None when it does not."""
    wanted = dict(getattr(model, LOSS_OPTIONS, ())).get("skip_logits")
    return None if wanted is None or wanted else Reason("skip_logits", f"apply() was given skip_logits={wanted}")


def why_head_is_not_plain(model) -> Optional[Reason]:
    """Why something other than PyTorch's own layer, sharded or not, stands between the hidden states and the logits; None if nothing."""
    path, vocabulary, _ = vars(model).get(SHAPE, OF_ROWS)
    for end in range(1, len(path)):
        module = follow(model, path[:end])
        if own_forward(module) is not type(module).forward:
            return why_not_own(module, ".".join(path[:end]))
    name, head = ".".join(path), follow(model, path)
    weight = plain_weight(head, True)
    if weight is None:
        weight = sharded_weight(head)
    if weight is None:
        reason = why_not_plain(head, True)
        assert reason is not None, "else its weight is plain"
        return reason.of(name)
    if all_are_listened_to():
        return Reason("hooks", "hooks listen to all modules of the process")
    expected = follow(model, vocabulary) if vocabulary else getattr(model.config, "text_config", model.config).vocab_size
    rows = rows_of(head, weight)
    said = ".".join(vocabulary) or "config.vocab_size"
    return None if rows == expected else Reason("model", f"{name} has {rows} rows, and {said} is {expected}")


def why_logits_are_made(model) -> Optional[Reason]:
    """Why a loss comes with logits in training mode; None where it does not. model: one with a forward of ours."""
    return why_loss_is_not_standard(model) or why_logits_are_wanted(model) or why_head_is_not_plain(model)


def _skips_logits(model, kwargs) -> bool:
    """Tells whether a call with labels is asked for a loss without logits. kwargs: of the call."""
    asked = kwargs.get("skip_logits", dict(getattr(model, LOSS_OPTIONS, ())).get("skip_logits"))
    return model.training if asked is None else asked


def _say_that_logits_are_made(model, reason: Reason, kwargs) -> None:
    """Warns, once for each model and reason, where a loss should need no logits and they are made. kwargs: of the call."""
    if torch.compiler.is_compiling() or not _skips_logits(model, kwargs):
        return
    said = vars(model).setdefault(SAID, set())
    if reason.text not in said:
        said.add(reason.text)
        advice = f". What to do: {ADVICE[reason.code]}" if ADVICE[reason.code] else ""
        warnings.warn(f"{type(model).__name__} makes all logits for its loss: {reason.text}{advice}", RuntimeWarning, stacklevel=3)


def _say_that_options_are_lost(model, labels) -> None:
    """Warns, once for the same options, where the loss of a training pass is not the model's own, which alone takes those of `apply`: a
    trainer that smooths labels, or a user, computes it from logits, or model.loss_function does."""
    lost = [name for name in dict(getattr(model, LOSS_OPTIONS, ())) if name != "skip_logits"]
    if not lost or torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    where = "a loss that is computed from logits" if labels is None else "a loss that is not the model's own"
    advice = "give the trainer's or the loss's own options, such as label_smoothing_factor"
    warn_once(f"{', '.join(lost)} of apply(fused_linear_cross_entropy=...) do not reach {where}: {advice}", stacklevel=4)


def causal_lm_forward(self, head: Optional[Head] = NO_CHANGE, /, labels=None, **kwargs):
    """Serves as the forward of a causal LM. Training with labels gives the loss without logits; everything else is the model's own forward.

    That forward runs in both cases: nothing of it is copied here, and every version of it keeps its own arguments.

    Args:
        head: what a model of this family makes of its logits before the loss; None for whatever its forward makes.
        kwargs: the other arguments of the model's forward; `OPTIONS`, which stand before what `apply` was given; and `skip_logits`: whether
            a loss comes without logits, in training mode by default.
    """
    forward = original_forward(self)
    reason = None if labels is None else why_loss_is_not_standard(self)
    if reason is not None and reason.code not in WANTED:
        _say_that_logits_are_made(self, reason, kwargs)
    if labels is None or reason is not None:
        _say_that_options_are_lost(self, labels)
        return forward(self, labels=labels, **kwargs)
    if "num_items" in kwargs:
        kwargs["num_items_in_batch"] = _items(kwargs.get("num_items_in_batch"), kwargs)
        del kwargs["num_items"]
    skip_logits, reason = _skips_logits(self, kwargs), why_head_is_not_plain(self)
    if reason is not None:
        _say_that_logits_are_made(self, reason, kwargs)
    options = dict(getattr(self, LOSS_OPTIONS, ()))
    for name in (*OPTIONS, "skip_logits"):
        if name in kwargs:
            options[name] = kwargs.pop(name)
    options.pop("skip_logits", None)
    path, _, takes_return_dict = vars(self).get(SHAPE, OF_ROWS)
    if skip_logits and reason is None:
        seen: _WithLoss = _Headless(self, options, head, path)
    elif options:
        skip_logits, seen = False, _WithLoss(self, options)
    else:
        return forward(self, labels=labels, **kwargs)
    return_dict, as_tuple = kwargs.get("return_dict"), False
    if takes_return_dict:
        as_tuple = not (getattr(self.config, "return_dict", True) if return_dict is None else return_dict)
        kwargs["return_dict"] = True
    # The layers of a model without a row may look at other tokens of a row in ways that only its own forward knows of.
    if skip_logits and SHAPE not in vars(self) and may_change(kwargs):
        ignore_index: Any = kwargs.get("ignore_index", options.get("ignore_index", -100))
        target = shift(labels, kwargs.get("shift_labels"), ignore_index)
        kwargs, places = without_padding(self, target, ignore_index, kwargs, options)
        if places is not None:
            more = kwargs["inputs_embeds"].shape[1] - places.numel()
            kwargs["shift_labels"] = nn.functional.pad(target[places], (0, more), value=ignore_index)[None]
    output = forward(seen, labels=labels, **kwargs)
    if skip_logits and seen.found is None:
        raise RuntimeError(f"{type(self).__name__}.forward calls no self.loss_function, expected it for labels. Pass skip_logits=False")
    cls, fields = type(output), dict(output)
    if skip_logits:
        fields["logits"] = None
    if isinstance(seen.found, LinearCrossEntropyOutput):
        cls = output_with_metrics(cls)
        fields.update(seen.found._asdict())
    output = cls(**fields)
    if not as_tuple:
        return output
    values = ((field.name, getattr(output, field.name)) for field in dataclasses.fields(output))
    # None stands where a tuple of transformers has logits, so that what comes after them is not taken for these.
    return tuple(value for name, value in values if value is not None or (skip_logits and name == "logits"))
