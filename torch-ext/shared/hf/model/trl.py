"""Puts `linear_log_probs` and `linear_divergence` where TRL's trainers call functions of their own on the hidden states and the head of
whatever model they train, and tells the decoder that they call which of its results they read, so that it can leave padding out.

TRL (1.16) binds them by name in several modules. An object with the same `apply` takes its place wherever TRL holds it, at once
where TRL is imported and else when it is, and hands the calls that ours does not serve to TRL's own. Nothing here imports TRL.

That takes a finder in `sys.meta_path`. To ask at the first forward pass instead whether TRL is there would be too late, or would never
happen:

- A trainer calls `add_fused_lm_head` when it is made. What that puts on the model knows which tokens have labels, and keeps them in a
  closure, so a decoder that runs in it can leave no padding out any more; and no later pass of that model can.
- These functions serve models of which no forward is ours: of families without a row, and in a process of which only another model was
  given to `kernelize`. None of their passes comes by here.
- What a user takes from TRL by name (`from trl.kernels import ...`) before a model has run would stay TRL's.
"""

import functools
import inspect
import sys
from importlib.abc import MetaPathFinder
from types import MethodType, ModuleType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from ...ops.linear_divergence import linear_divergence
from ...ops.linear_log_probs import linear_log_probs
from ...ops.log_probs import OUTPUTS
from ...runtime.device import PLAIN, is_transformed
from ..capture.asked_each_pass import answer_for_adapters
from ..family.options import entries_of
from ..parts.explanation import Reason, warn_once
from ..parts.texts import text_that_runs
from .causal_lm import shift
from .padding import only_labels_are_read

__all__ = ["PART", "USER", "is_imported", "options_of", "switch", "take_back", "why_not"]

ORIGINAL = "bastile_original"  # on what stands in TRL's function's place: that function
USER, NAME_THERE = "trl.trainer.utils", "_ChunkedLogProbFunction"  # where TRL's trainers call it
PART = "log-probabilities in TRL's trainers"
# Fingerprints of the texts of TRL's `add_fused_lm_head` whose forward reads of the decoder's results only those that predict a label.
READ_LABELS_ALONE = ("5b3f07c10f81e98d",)  # TRL 1.16
OPTIONS = ("recompute",)  # of `linear_log_probs`, which `apply` and `kernelize` take in a mapping
IGNORED = -100  # the label of a token that TRL's trainers leave out
_options: Dict[str, Any] = {}  # those of the last call
_of_loss: List[str] = []  # the options of a model's loss that the last `apply` was told


def why_theirs(hidden, weight, *others: Optional[torch.Tensor]) -> Optional[Reason]:
    """Why TRL's own function computes with a head, None where ours does."""
    if hasattr(weight, "ds_id"):
        return Reason("zero3", "DeepSpeed ZeRO-3 shards the head")
    for tensor in (hidden, weight, *others):
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return Reason("head", f"the head is a {type(tensor).__name__}")
        if tensor.device != weight.device:
            return Reason("head", f"the head is on {weight.device}, and what it is called with on {tensor.device}")
    if not weight.is_floating_point():
        return Reason("head", f"the head is {weight.dtype}")
    return None if torch.compiler.is_compiling() or not is_transformed() else Reason("call", "a transform of PyTorch is at work")


def _log_probs(original) -> Callable:
    def apply(hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, outputs=OUTPUTS[1:]):
        softcap = final_logit_softcapping
        if _of_loss and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _say_what_is_lost()
        known = all(name in OUTPUTS for name in outputs) and temperature > 0 and (softcap is None or softcap > 0)
        if not known or hidden.dim() != 2 or targets.dtype != torch.int64 or why_theirs(hidden, weight, bias, targets):
            return original.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)
        options = {"temperature": temperature, "softcap": softcap, "scale": logit_scale, **_options}
        found = linear_log_probs(hidden, weight, targets, bias, outputs=tuple(outputs), **options)
        mean = found.mean_logits  # TRL's has no gradient
        return found.log_probs, found.entropy, found.log_sum_sq_probs, None if mean is None else mean.detach(), found.is_top1

    return apply


def _divergence(original) -> Callable:
    def apply(
        student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature=1.0,
        student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0, teacher_final_logit_softcapping=None
    ):  # fmt: skip
        student, teacher = (student_hidden, student_weight, student_bias), (teacher_hidden, teacher_weight, teacher_bias)
        caps = student_final_logit_softcapping, teacher_final_logit_softcapping
        known = temperature > 0 and 0.0 <= beta <= 1.0 and all(cap is None or cap > 0 for cap in caps)
        known = known and student_hidden.dim() == 2 and not torch.compiler.is_compiling()  # ours would make all logits there
        if not known or why_theirs(*student, *teacher) or hasattr(teacher_weight, "ds_id"):
            numbers = beta, temperature, student_logit_scale, caps[0], teacher_logit_scale, caps[1]
            return original.apply(*student, *teacher, *numbers)
        return tuple(
            linear_divergence(
                student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, beta=beta,
                temperature=temperature, softcap=caps[0], scale=student_logit_scale, teacher_softcap=caps[1],
                teacher_scale=teacher_logit_scale,
            )
        )  # fmt: skip

    return apply


def _fused_head(original) -> Callable:
    def add_fused_lm_head(model, *args, **options):
        original(model, *args, **options)
        answer_for_adapters()
        bound = vars(model)["forward"]  # which `ownership.runs_ours` finds here

        @functools.wraps(bound.__func__)
        def forward(self, *args, **kwargs):
            theirs = bound.__func__
            labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
            if args or not kwargs.get("fused_lm_head") or (labels is None and shifted is None) or torch.compiler.is_compiling():
                return theirs(self, *args, **kwargs)
            with only_labels_are_read(self, shift(labels, shifted, IGNORED), IGNORED):
                return theirs(self, **kwargs)

        model.forward = MethodType(forward, model)

    text = text_that_runs(original, "add_fused_lm_head")
    return add_fused_lm_head if text is not None and text.fingerprint in READ_LABELS_ALONE else original


class FunctionOfTRL(NamedTuple):
    """A function of TRL's: the module that defines it, its name, and what makes ours of it. arguments: its own, or by default those of its
    forward, which are the context and what ours takes."""

    module: str
    name: str
    ours: Callable
    arguments: Tuple[str, ...] = ()

    def takes(self) -> Tuple[str, ...]:
        return self.arguments or ("ctx", *inspect.signature(self.ours(None)).parameters)


PLACES = (
    FunctionOfTRL("trl.kernels.chunked_logprob", "ChunkedLogProbFunction", _log_probs),
    FunctionOfTRL("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", _divergence),
    FunctionOfTRL(USER, "add_fused_lm_head", _fused_head, ("model", "temperature", "cast_lm_head_to_fp32", "outputs")),
)


def _applied(original) -> Callable:
    """What TRL calls of a function: `apply` of an autograd function, any other itself."""
    return getattr(original, "apply", original)


class StandIn:
    """What TRL's modules hold in a function's place. Several loaded packages may have put it there: `apply` is the last one's."""

    def __init__(self, original):
        setattr(self, ORIGINAL, original)
        self.__doc__ = original.__doc__
        self.owners: Dict[str, Callable] = {}
        self.apply = _applied(original)

    def __call__(self, *args, **kwargs):
        return self.apply(*args, **kwargs)

    def __getattr__(self, name):
        if name == ORIGINAL:
            raise AttributeError(name)
        return getattr(getattr(self, ORIGINAL), name)

    def __mro_entries__(self, bases) -> tuple:
        """Makes TRL's own class the base of a class that names this object as one."""
        return (getattr(self, ORIGINAL),)

    def give(self, owner: str, function: Callable) -> None:
        self.owners.pop(owner, None)
        self.owners[owner] = self.apply = function

    def take(self, owner: str) -> bool:
        """Returns whether a package is left."""
        self.owners.pop(owner, None)
        self.apply = next(reversed(list(self.owners.values())), _applied(getattr(self, ORIGINAL)))
        return bool(self.owners)


def _modules() -> List[ModuleType]:
    names = [name for name in list(sys.modules) if name.startswith("trl")]  # a process may have ten thousand others
    found = [sys.modules.get(name) for name in names if name.partition(".")[0] == "trl"]
    return [module for module in found if module is not None]


def _bind(pairs: Sequence[Tuple[Any, Any]]) -> None:
    """Replaces the first object of each pair by the second in every module of TRL that holds it."""
    replaced = {id(old): new for old, new in pairs if old is not new}
    for module in _modules() if replaced else ():
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def _say_what_is_lost() -> None:
    """Warns that a trainer of TRL computes a loss of its own."""
    what = "do not reach TRL's trainers, which compute their losses from log-probabilities"
    advice = "give the trainer's own options, such as label_smoothing_factor"
    warn_once(f"{', '.join(_of_loss)} of apply(fused_linear_cross_entropy=...) {what}: {advice}", stacklevel=4)


def _warn(text: str) -> None:
    version = getattr(sys.modules.get("trl"), "__version__", "?")
    warn_once(f"TRL {version}: {text}. Its trainers keep their own. Expected trl>=1.16", stacklevel=4)


def _put(module: ModuleType) -> List[Tuple[Any, Any]]:
    """Returns what a module of TRL defines with ours for it, where it is as expected, for `_bind`."""
    if module.__name__ == USER and not hasattr(module, NAME_THERE):
        _warn(f"{USER} has no {NAME_THERE}, in whose place log_probs=True puts a faster one")
    place = next((place for place in PLACES if place.module == module.__name__), None)
    if place is None:
        return []
    found: Any = getattr(module, place.name, None)
    original = getattr(found, ORIGINAL, found)
    arguments = () if original is None else tuple(inspect.signature(getattr(original, "forward", original)).parameters)
    if arguments != place.takes():
        what = f"has no {place.name}" if original is None else f"has {place.name} with the arguments {', '.join(arguments)}"
        _warn(f"{place.module} {what}, where {', '.join(place.takes())} are expected")
        return []
    stand_in = found if hasattr(found, ORIGINAL) else StandIn(original)
    stand_in.give(__name__, place.ours(original))
    return [(found, stand_in)]


class _WhenImported(MetaPathFinder):
    """Calls `_put` after the import of the module in which TRL defines the functions. Each loaded package has one. It asks the finders
    behind it, so the package whose call was the last, whose finder is in front, puts its functions there last."""

    bastile_trl = True  # by which another loaded package finds it

    def __init__(self) -> None:
        self.asking: set = set()  # the modules that it is looking for: a finder behind it may ask all others in turn

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.asking or all(fullname != place.module for place in PLACES):
            return None
        behind = [finder for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(finder, "find_spec")]
        self.asking.add(fullname)
        try:
            spec = next((spec for spec in (finder.find_spec(fullname, path, target) for finder in behind) if spec is not None), None)
        finally:
            self.asking.remove(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if self in sys.meta_path:
                _bind(_put(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _WhenImported()


def put() -> None:
    """Puts ours in TRL's place, now or when TRL is imported."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    sys.meta_path.insert(0, _finder)
    _bind([pair for name in {USER, *(place.module for place in PLACES)} & sys.modules.keys() for pair in _put(sys.modules[name])])


def take_back() -> None:
    """Gives TRL its own back, unless another loaded package has put its own there."""
    _of_loss.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _bind([(stand_in, getattr(stand_in, ORIGINAL)) for stand_in in _stand_ins() if not stand_in.take(__name__)])


def _leave() -> None:
    """Leaves TRL its own, whichever loaded packages have put theirs there."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "bastile_trl", False)]
    stand_ins = _stand_ins()
    for stand_in in stand_ins:
        for owner in list(stand_in.owners):
            stand_in.take(owner)
    _bind([(stand_in, getattr(stand_in, ORIGINAL)) for stand_in in stand_ins])


def _stand_ins() -> List[Any]:
    """Returns the `StandIn` objects that TRL's modules hold now. Modules that have not been imported hold none."""
    found = [getattr(sys.modules.get(place.module), place.name, None) for place in PLACES]
    return [each for each in found if hasattr(each, ORIGINAL)]


def options_of(log_probs: Union[bool, Mapping]) -> Dict[str, Any]:
    """The mapping of the option `log_probs`, as of `entries_of`."""
    return entries_of("log_probs", log_probs, OPTIONS)


def switch(log_probs: Union[bool, Mapping], of_loss: Optional[Mapping] = None) -> None:
    """Puts ours in TRL's place or, for False, leaves TRL its own: for the whole process, so also where another loaded package had put its
    own there. A mapping of options stands for True. of_loss: the options of a model's loss that are in force from now on, None for those
    that were."""
    options = options_of(log_probs)
    if of_loss is not None:
        _of_loss[:] = of_loss
    _options.clear()
    _options.update(options)
    (put if log_probs or isinstance(log_probs, Mapping) else _leave)()


def is_imported() -> bool:
    """Tells whether TRL's trainers are imported."""
    return PLACES[0].module in sys.modules


def why_not(model) -> Optional[Reason]:
    """Why TRL's trainers call their own function with a model's head, None where they call ours. TRL is imported."""
    place = PLACES[0]
    if not hasattr(getattr(sys.modules[place.module], place.name, None), ORIGINAL):
        return Reason("trl", "TRL's own function")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or type(weight).__name__ == "DTensor":  # which TRL gathers first
        return None
    return why_theirs(weight, weight)
