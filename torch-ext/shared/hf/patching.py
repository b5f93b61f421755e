"""Puts a package's layers where they go: on transformers' classes (`patch_classes`), on one model (`kernelize`), or into the Hub's
mapping (`mapping`). Which layer stands in for what is a package's table of `Targets`, one for each model family that it serves; nothing
here belongs to one model.

Nothing here is imported before it is needed: the package loads without transformers, and only `mapping` needs `kernels`.
What a class or a module had before is kept on itself, so any loaded copy of this package can put it back, in any order.
"""

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from torch import nn

from . import capture as graphs
from . import explain as explanation
from . import trl
from .attention_choice import (
    WITHOUT,
    give_attention_back,
    ignore_new_models,
    leave_attention,
    note_new_models,
    register_attention,
    unregister_attention,
    watch_attention,
)
from .binding import BoundForward, bound_modules, remember
from .causal_lm import LOSS_OPTIONS, OPTIONS, output_with_metrics
from .checkpointing import KEEPS_ATTENTION, RECOMPUTES_MLP
from .experts import EXPERTS, experts_implementation
from .families import Families, Targets, hub_names_of, names_of
from .hub import PAIR, TRANSFORMERS_EXPECTED, kernels_library, kernels_wanted, mapping_of
from .modules import CAPTURED, LAYER, OFF, SAVED, for_class, is_marked, is_own_rotary, is_transformers_own, own_class
from .padding import KEEPS
from .versions import modeling_of, note, unknown_texts, why_left
from .wrapped import inside, put

ROTARY = "apply_rotary_pos_emb"
WRAPPED = "_original_forward"  # where accelerate keeps the forward that it wrapped for mixed precision
TOLD = KEEPS, KEEPS_ATTENTION, RECOMPUTES_MLP, WITHOUT  # on a module: what kernelize() was told of its model
CALL_BEFORE = (
    "Call apply() or kernelize() before that: before Accelerator.prepare(), Trainer.train() and the making of a trainer of TRL; "
    "apply() before from_pretrained() with a tp_plan"
)


# transformers and kernels


class _Family(NamedTuple):
    """A family on the installed transformers. unknown: of `versions.unknown_texts`."""

    targets: Targets
    modeling: Any
    unknown: Mapping[str, Tuple[str, ...]]


def _family(targets: Targets) -> _Family:
    """Prepares a family. Raises ImportError when transformers is absent, too old, or has no such family."""
    found = _Family(targets, modeling_of(targets), unknown_texts(targets))
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    for operation, (name, layer) in targets.classes.items():
        cls = own_class(found.modeling, name)
        original = None if cls is None or operation in found.unknown else _original(cls, "forward")
        if original is None or not is_transformers_own(original, targets.modeling, f"{name}.forward"):
            continue  # someone else's, which is kept
        for ours in (layer.forward, for_class(layer.forward)):
            _describe(ours, original)
    for output in (CausalLMOutputWithPast, MoeCausalLMOutputWithPast):
        output_with_metrics(output)  # torch.compile traces through no making of classes
    return found


def _unknown_of(families: Sequence[_Family], wanted=None) -> Dict[str, Dict[str, Tuple[str, ...]]]:
    """By family, what `versions.note` is to speak of. wanted: the operations that someone asked for, None for all."""
    return {
        family.targets.model: {name: texts for name, texts in family.unknown.items() if wanted is None or wanted.get(name)}
        for family in families
    }


# What stands where, and putting it back


def _current(owner, attribute):
    """What an attribute of a class or module is, inside transformers' wrappers for gradient checkpointing."""
    return inside(vars(owner)[attribute])


def _original(owner, attribute):
    """The same without us."""
    return vars(owner)[SAVED + attribute] if SAVED + attribute in vars(owner) else _current(owner, attribute)


def _describe(function, original):
    """Gives a forward of ours the annotations and the docstring of the one in whose place it stands: transformers reads them."""
    function.__annotations__, function.__doc__ = dict(original.__annotations__), original.__doc__


def _own_rotary(modeling):
    """What stands for the rotary embedding without us: a function, or the module that `kernels` makes of one; None where it is gone."""
    if SAVED + "rotary" in vars(modeling):
        return vars(modeling)[SAVED + "rotary"]
    return _original(modeling, ROTARY) if ROTARY in vars(modeling) else None


def _target(targets: Targets, modeling, operation):
    """(class or module, attribute, replacement) of an operation; None for a class or function that is gone."""
    if operation != "rope":
        name, layer = targets.classes[operation]
        return own_class(modeling, name), "forward", layer.forward
    function = _own_rotary(modeling)
    if isinstance(function, nn.Module):  # `kernels` made it one, of a class of its own
        return type(function), "forward", targets.rotary.forward
    return None if function is None else modeling, ROTARY, targets.rotate


def _stranger(targets: Targets, modeling, name):
    """What stands where a class's forward was transformers' or ours, as text for a warning; "" for nothing. name: of the class, or
    that of the function for the rotary embedding."""
    current = vars(modeling)[name]
    if name == ROTARY:
        forward = type(current).forward if isinstance(current, nn.Module) else current
        return "" if is_marked(forward) or is_own_rotary(current, targets.modeling, ROTARY) else f"{name} is {_name_of(current)}"
    if current is not own_class(modeling, name):
        return f"{name} is {_name_of(current)}"
    return _class_stranger(current)


def _class_stranger(cls):
    """The same of the forward of a class of transformers'."""
    forward = inside(vars(cls).get("forward"))
    if is_marked(forward) or is_transformers_own(forward, cls.__module__, f"{cls.__qualname__}.forward"):
        return ""
    return f"{cls.__name__}.forward is {_name_of(forward)}"


def _name_of(thing):
    """Where a function, class or module comes from. functools.wraps copies names, but not the code."""
    if isinstance(thing, nn.Module):
        thing = type(thing)
    module = getattr(thing, "__globals__", {}).get("__name__") or getattr(thing, "__module__", None)
    code = getattr(thing, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", None) or getattr(thing, "__qualname__", None) or repr(thing)
    return f"{module}.{name}" if module else name


def _patch(owner, attribute, replacement):
    if SAVED + attribute not in vars(owner):
        setattr(owner, SAVED + attribute, _current(owner, attribute))
    put(owner, attribute, for_class(replacement))


def _restore(owner, attribute):
    """Puts back what `_patch` replaced, except where someone has put a thing of theirs over ours since."""
    state, current = vars(owner), _current(owner, attribute)
    if SAVED + attribute in state and (is_marked(current) or current is state[SAVED + attribute]):
        put(owner, attribute, state[SAVED + attribute])
        delattr(owner, SAVED + attribute)


def _slot(module):
    """The attribute that hides the class's forward on one module: accelerate's hooks stand in `forward` and call the other."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _other_owner(module):
    """Who gave this one module its forward: accelerate, TRL, transformers' tensor parallelism, the user. "" for nobody, and where
    that forward calls ours. One of ours in its place would drop what it does."""
    state = vars(module)
    if WRAPPED in state:
        return "" if _calls_ours(state[WRAPPED]) else "accelerate (mixed precision)"
    function = inside(_function(state.get(_slot(module))))
    cls = _defines_forward(type(module))
    if function is None or function in (_current(cls, "forward"), vars(cls).get(SAVED + "forward")):  # `kernels` binds it so
        return "" if SAVED + "forward" in vars(cls) and function is vars(cls)[SAVED + "forward"] else _of(_class_stranger(cls))
    return "" if _calls_ours(function) else getattr(function, "__globals__", {}).get("__name__") or repr(function)


def _of(stranger):
    """Who is behind what `_class_stranger` says."""
    return stranger.partition(" is ")[2]


def _warn_of_others(modules, stacklevel):
    """Warns of modules that keep the forward that someone else gave them."""
    for (name, owner), count in Counter((type(module).__name__, _other_owner(module)) for module in modules).items():
        what = f"{name} keeps the forward that {owner} gave it ({count} in this process)"
        warnings.warn(f"{what}. {CALL_BEFORE}", RuntimeWarning, stacklevel=stacklevel + 1)


def _bind(module, function):
    """Gives one module a forward of ours, in front of its class's."""
    state, slot = vars(module), _slot(module)
    previous = state.get(slot)
    state.pop(OFF, None)
    if WRAPPED in state or (_calls_ours(previous) and not _is_ours(previous)):
        return  # what is wrapped is ours already
    if not _is_ours(previous):
        state.setdefault(SAVED + "replaced", (slot, previous))
    state[slot] = BoundForward(function, module)


def _unbind(module):
    """Takes a forward of ours off one module, whether `_bind` or `kernels` put it there, or accelerate wrapped it."""
    state = vars(module)
    bound = SAVED + "replaced" in state
    slot, previous = state.pop(SAVED + "replaced", (_slot(module), None))
    forward = state.get(slot)
    if not _is_ours(forward):  # someone else's by now
        if bound or _calls_ours(forward) or _calls_ours(state.get(WRAPPED)):
            state[OFF] = True
        return
    if previous is not None:
        state[slot] = previous
    elif slot == "forward":
        del state[slot]
    else:
        state[slot] = MethodType(type(module).forward, module)


def _function(forward):
    return getattr(forward, "bound_function", None) or getattr(forward, "__func__", forward)


def _is_ours(forward):
    """True for a bound forward of ours, also of another loaded copy of this package."""
    return forward is not None and getattr(_function(forward), LAYER, None) is _function(forward)


def _calls_ours(forward):
    """True for one of ours, and for a wrapper made with functools.wraps, which copies the mark: TRL's trainers put one on."""
    return getattr(_function(forward), LAYER, None) is not None


def _live_modules(families: Families):
    """Every module there is. A forward of its own hides the one of its class, and nobody else knows which modules have one."""
    rotaries = [_own_rotary(sys.modules[targets.modeling]) for targets in families if targets.modeling in sys.modules]
    known = [*bound_modules(), *(rotary for rotary in rotaries if isinstance(rotary, nn.Module))]
    found = {id(module): module for module in known}  # gc.freeze() hides modules from the next line
    found.update((id(thing), thing) for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return list(found.values())


def _defines_forward(cls):
    """The class whose forward a class has; transformers' wrapper around an inherited one does not count."""
    having = [c for c in cls.__mro__ if "forward" in vars(c)]
    pairs = zip(having, [*having[1:], None])
    return next(c for c, after in pairs if after is None or _current(c, "forward") is not _current(after, "forward"))


# For every model


def _register(families: Sequence[_Family]):
    """Makes attn_implementation="bastile" a choice, with what is known of the masks of these families, and experts_implementation."""
    for targets, modeling, unknown in families:
        if "attention" not in unknown:
            whole = own_class(modeling, targets.classes["attention"][0])
            register_attention(*([whole] if whole is not None else []))
            note_new_models(__name__)
    if not any("experts" in family.unknown for family in families):
        _register_experts()


def patch_classes(families: Families, wanted, unpad=True, keep_attention=False, recompute_mlp=False, log_probs=True):
    """Puts the layers on transformers' classes, of which exactly those are active afterwards whose operations are wanted.

    wanted: an entry for each operation of the families, True or False; of `fused_linear_cross_entropy` it may be a mapping of options of
    the loss, which stands for True. log_probs: whether TRL's trainers get ours too (trl.py).

    Raises TypeError for an option that does not exist, ImportError when transformers is absent or its
    version does not fit.
    """
    options = _loss_options(wanted["fused_linear_cross_entropy"])
    found = [_family(targets) for targets in families]
    note(_unknown_of(found, wanted), stacklevel=3)
    _register(found)
    modules = _live_modules(families)
    for targets, modeling, unknown in found:
        _tell_causal_lm(own_class(modeling, targets.classes["fused_linear_cross_entropy"][0]), options, unpad)
        layer = own_class(modeling, targets.classes["decoder_layer"][0]) if "decoder_layer" in targets.classes else None
        if layer is not None:
            setattr(layer, KEEPS_ATTENTION, bool(keep_attention))
            setattr(layer, RECOMPUTES_MLP, bool(recompute_mlp))
        _forget_what_one_model_was_told(targets, modeling, modules)
        asked = {name: isinstance(wanted[name], Mapping) or bool(wanted[name]) for name in targets.operations}
        on = {name: asked[name] and name not in unknown for name in asked}
        _patch_family(targets, modeling, on, modules)
    trl.switch(bool(log_probs))


def _tell_causal_lm(causal_lm, options, unpad):
    """Notes on the class of a causal LM, None where it is gone, what `apply` was told about it."""
    if causal_lm is None:
        return
    if options:
        setattr(causal_lm, LOSS_OPTIONS, options)
    elif LOSS_OPTIONS in vars(causal_lm):
        delattr(causal_lm, LOSS_OPTIONS)
    setattr(causal_lm, KEEPS, not unpad)


def _forget_what_one_model_was_told(targets: Targets, modeling, modules):
    """What `apply` says now is for the models, too, that `kernelize` was told something else of."""
    told = [targets.classes[name][0] for name in ("fused_linear_cross_entropy", "decoder_layer", "attention") if name in targets.classes]
    classes = tuple(_found(*(own_class(modeling, name) for name in told)))
    for module in modules:
        if isinstance(module, classes):
            for name in TOLD:
                vars(module).pop(name, None)


def _patch_family(targets: Targets, modeling, wanted, modules):
    """Puts the layers of one family on its classes, and takes those off that are not wanted. modules: of the process."""
    for name in targets.fused if wanted.get("decoder_layer") else ():
        stranger = _stranger(targets, modeling, name)
        if stranger:
            _warn_of_stranger(stranger, "decoder_layer", stacklevel=4)
    for operation, on in wanted.items():
        owner, attribute, replacement = _target(targets, modeling, operation)
        if on:
            stranger = _stranger(targets, modeling, ROTARY if operation == "rope" else targets.classes[operation][0])
            if stranger:
                _warn_of_stranger(stranger, operation, stacklevel=4)
            if owner is not None and not (stranger if owner is modeling or operation == "rope" else _class_stranger(owner)):
                if operation == "rope" and owner is not modeling:  # or nobody finds it again behind a function of someone else's
                    setattr(modeling, SAVED + "rotary", _own_rotary(modeling))
                _patch(owner, attribute, replacement)
                _bind_hidden(owner, replacement, modules)
        elif owner is not None:
            _restore(owner, attribute)
            classes = (type(_own_rotary(modeling)), *_found(own_class(modeling, targets.attention))) if operation == "rope" else owner
            for module in modules:
                if isinstance(module, classes):
                    _unbind(module)
                    leave_attention(module)


def _warn_of_stranger(stranger, operation, stacklevel):
    """Warns that what someone has put on transformers' module or class stays there."""
    what = f"{stranger}, not transformers' own: it is kept, and {operation} leaves it alone"
    warnings.warn(what, RuntimeWarning, stacklevel=stacklevel + 1)


def _found(*things):
    return [thing for thing in things if thing is not None]


def _loss_options(given):
    """The mapping of `apply`'s `fused_linear_cross_entropy`; empty for True and False."""
    options = dict(given) if isinstance(given, Mapping) else {}
    known = ("ignore_index", *OPTIONS, "skip_logits")
    unknown = [str(name) for name in options if name not in known]
    if unknown:
        raise TypeError(f"fused_linear_cross_entropy has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return options


def _bind_hidden(owner, replacement, modules):
    """The same on modules whose own forward hides their class's, e.g. the former one that `kernels` binds as its fallback."""
    others = []
    for module in modules:
        if not isinstance(owner, type) or not isinstance(module, owner):
            continue
        if _slot(module) not in vars(module):
            vars(module).pop(OFF, None)  # what was around our forward is gone
        elif _defines_forward(type(module)) is owner:
            if _other_owner(module):
                others.append(module)
            else:
                _bind(module, replacement)
    _warn_of_others(others, stacklevel=5)


def reset(families: Families):
    """Puts back what a package replaced; see `reset` of a package."""
    trl.take_back()
    imported = [targets for targets in families if targets.modeling in sys.modules]
    if not imported:
        return
    modules = _live_modules(imported)
    for targets in imported:
        _reset_classes(targets, sys.modules[targets.modeling])
    for module in modules:
        state = vars(module)
        graphs.release(module)
        state.pop(CAPTURED, None)
        if SAVED + "replaced" in state or any(_calls_ours(state.get(name)) for name in (_slot(module), WRAPPED)):
            _unbind(module)
        if state.pop(SAVED + "use_kernels", False):
            state["_use_kernels"] = True
        give_attention_back(module)
        for name in TOLD:
            state.pop(name, None)
    _unregister_experts(modules)
    unregister_attention(modules)
    ignore_new_models(__name__)


def _reset_classes(targets: Targets, modeling):
    """Puts back what was on the classes and functions of one family."""
    for operation in (*targets.classes, "rope"):
        owner, attribute, _ = _target(targets, modeling, operation)
        if owner is None:
            continue
        _restore(owner, attribute)
        if LOSS_OPTIONS in vars(owner):
            delattr(owner, LOSS_OPTIONS)
        if SAVED + "decorated" in vars(owner):
            for name in ("kernel_layer_name", "kernel_condition", SAVED + "decorated"):
                if name in vars(owner):
                    delattr(owner, name)
        kept = SAVED + attribute  # stays where someone's forward, which may call ours, is on top
        for name in [name for name in vars(owner) if name.startswith(SAVED) and name != kept]:  # what apply() noted there
            delattr(owner, name)
    vars(modeling).pop(SAVED + "rotary", None)


def _experts_interface():
    """transformers' table of implementations of experts, or None where it has none or nobody has imported it."""
    return getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)


def _register_experts():
    """Makes experts_implementation="bastile" a choice when a model is loaded."""
    interface = _experts_interface()
    if interface is not None:
        registered = vars(interface).get(SAVED + "experts", {})
        setattr(interface, SAVED + "experts", {**registered, __name__: experts_implementation})  # of every loaded package that did so
        interface.register(EXPERTS, experts_implementation)


def _unregister_experts(modules):
    """Takes the choice back, unless another package offers it too or a model has been given it: that goes on asking for it."""
    interface = _experts_interface()
    registered = {} if interface is None else dict(vars(interface).get(SAVED + "experts", {}))
    if registered.pop(__name__, None) is None:
        return
    if not registered and any(_asks_for_our_experts(module) for module in modules):
        return
    if registered:
        setattr(interface, SAVED + "experts", registered)
        interface.register(EXPERTS, list(registered.values())[-1])
    else:
        delattr(interface, SAVED + "experts")
        interface._global_mapping.pop(EXPERTS, None)


def _asks_for_our_experts(module) -> bool:
    return getattr(vars(module).get("config"), "_experts_implementation", None) == EXPERTS


def get_patched_ops(families: Families):
    """Lists the operations that are on transformers' classes, of every family that has them, by the names of the arguments of `apply`."""
    found: Dict[str, bool] = {}
    for targets in families:
        modeling = sys.modules.get(targets.modeling)
        for operation in targets.operations:
            owner, attribute, ours = (None, "", None) if modeling is None else _target(targets, modeling, operation)
            found[operation] = found.get(operation, True) and owner is not None and _current(owner, attribute) is for_class(ours)
    return [operation for operation, on in found.items() if on]


# For one model


def _attention_forward(targets: Targets, original):
    """A copy of the attention's forward that sees our rotary embedding under the global name that it calls.

    That name is all there is to replace: the function behind it serves every model of its kind in the process. Raises RuntimeError when
    it does not call that name itself.
    """
    own = is_transformers_own(original, targets.modeling, f"{targets.attention}.forward")
    if not own or ROTARY not in original.__code__.co_names:
        found = "is not transformers' own" if not own else f"does not call {ROTARY}"
        raise RuntimeError(
            f"rope cannot be put on one model: {targets.attention}.forward, defined in {_name_of(original)}, {found}. "
            f"Use apply(), or install transformers{TRANSFORMERS_EXPECTED}"
        )
    modeling = sys.modules[targets.modeling]
    stranger, found = _stranger(targets, modeling, ROTARY), getattr(modeling, ROTARY)
    if stranger:
        raise RuntimeError(f"rope cannot be put on one model: {stranger}, not transformers' own. Use apply(rope=False)")

    def rotary_of_one_model(q, k, cos, sin, unsqueeze_dim=1):
        current = getattr(modeling, ROTARY)
        rotate = targets.rotate if current is found or is_marked(current) else current  # else someone else's by now
        return rotate(q, k, cos, sin, unsqueeze_dim)

    names = {name: value for name, value in original.__globals__.items() if name != "__name__"}  # torch.compile would look it up there
    copy = FunctionType(
        original.__code__, {**names, ROTARY: rotary_of_one_model}, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__module__, copy.__qualname__ = original.__module__, original.__qualname__
    _describe(copy, original)
    setattr(copy, LAYER, copy)
    return copy


class _Chosen(NamedTuple):
    """What of one model a family's layers go on. forwards, modules: by operation."""

    targets: Targets
    modeling: Any
    forwards: Mapping[str, Callable]
    modules: Mapping[str, List[nn.Module]]


def _choose(family: _Family, model, attention) -> Optional[_Chosen]:
    """Finds the modules of a model that a family's layers go on, None where it has no such modules. Raises RuntimeError when the rotary
    embedding cannot be put on one model."""
    targets, modeling, unknown = family
    classes = {operation: own_class(modeling, name) for operation, (name, _) in targets.classes.items()}
    classes["rope"] = own_class(modeling, targets.attention)
    if not (attention and _has_any(model, classes["attention"])):
        del classes["attention"]
    modules = {
        operation: [module for module in model.modules() if cls and isinstance(module, cls) and _defines_forward(type(module)) is cls]
        for operation, cls in classes.items()
    }
    if not any(modules.values()):
        return None
    for operation in ("fused_linear_cross_entropy", *targets.optional):
        if not _has_any(model, classes[operation]):
            del modules[operation]
    modules = {operation: found for operation, found in modules.items() if operation not in unknown}
    forwards = {operation: targets.classes[operation][1].forward for operation in modules if operation != "rope"}
    if "rope" in modules:
        forwards["rope"] = classes["rope"] and _attention_forward(targets, _original(classes["rope"], "forward"))
    return _Chosen(targets, modeling, forwards, modules)


def _has_any(model, cls) -> bool:
    return cls is not None and any(isinstance(module, cls) for module in model.modules())


def _subclasses_with_forwards(model, cls) -> List[str]:
    """The names of the classes of a model's modules that are subclasses of one and do not use its forward as it is."""
    modules = () if cls is None else (module for module in model.modules() if isinstance(module, cls))
    return [type(module).__name__ for module in modules if _defines_forward(type(module)) is not cls]


def _without_others(chosen: _Chosen, model) -> Tuple[_Chosen, List[nn.Module]]:
    """The same without modules that someone else gave a forward, and these. Raises RuntimeError where that leaves out a whole operation."""
    for module in chosen.modules.get("fused_linear_cross_entropy", ()):
        if _other_owner(module):
            raise RuntimeError(f"this {type(module).__name__} has a forward that {_other_owner(module)} gave it. {CALL_BEFORE}")
    targets, modeling = chosen.targets, chosen.modeling
    others = [module for modules in chosen.modules.values() for module in modules if _other_owner(module)]
    modules = {operation: [module for module in found if module not in others] for operation, found in chosen.modules.items()}
    for operation in targets.optional:  # tensor parallelism gives every module of experts a forward
        if operation in modules and chosen.modules[operation] and not modules[operation]:
            del modules[operation]
    missing = [operation for operation, found in modules.items() if not found]
    if missing:
        import transformers

        names = [targets.attention if operation == "rope" else targets.classes[operation][0] for operation in missing]
        strangers = _found(*(_stranger(targets, modeling, name) or None for name in names))
        subclasses = sorted({name for each in names for name in _subclasses_with_forwards(model, own_class(modeling, each))})
        advice = f"Give it such layers, or install transformers{TRANSFORMERS_EXPECTED}"
        if subclasses:
            advice = f"{', '.join(subclasses)} has a forward of its own. If that calls super().forward(), use apply()"
        raise RuntimeError(
            f"{', '.join(missing)} cannot be put on this {type(model).__name__} (transformers {transformers.__version__}): it has no "
            f"{', '.join(names)} whose forward is transformers' own{''.join(f' ({text})' for text in strangers)}. {advice}"
        )
    return chosen._replace(modules=modules), others


def kernelize(
    families: Families, model, mode=None, attention=True, unpad=True, keep_attention=False, recompute_mlp=False, log_probs=True
):  # fmt: skip
    """Puts the layers on one model, in place, and returns it; see `kernelize` of a package."""
    if mode is not None and getattr(mode, "name", "") == "FALLBACK":
        raise ValueError("mode is Mode.FALLBACK, expected TRAINING or INFERENCE, with or without TORCH_COMPILE")
    prepared = [_family(targets) for targets in families]
    _register(prepared)
    pairs_of = [(family, _choose(family, model, attention)) for family in prepared]
    chosen = [each for _, each in pairs_of if each is not None]
    if not chosen:
        found = f"a {type(model).__name__} without any of transformers' {names_of(families)} layers"
        raise TypeError(f"model is {found}, expected a {names_of(families)} model")
    note(_unknown_of([family for family, each in pairs_of if each is not None]), stacklevel=3)
    pairs = [_without_others(each, model) for each in chosen]
    _warn_of_others([module for _, others in pairs for module in others], stacklevel=3)
    for each, _ in pairs:
        for operation, modules in each.modules.items():
            for module in modules:
                _bind(module, each.forwards[operation])
        for module in each.modules.get("fused_linear_cross_entropy", ()):
            vars(module)[KEEPS] = not unpad
        for module in each.modules.get("decoder_layer", ()):
            vars(module).update({KEEPS_ATTENTION: bool(keep_attention), RECOMPUTES_MLP: bool(recompute_mlp)})
        _tell_decoders(each, model, attention)
    for module in model.modules():
        if vars(module).get("_use_kernels"):  # transformers would kernelize it anew, with its own mapping, at each train() and eval()
            vars(module).update({"_use_kernels": False, SAVED + "use_kernels": True})
            remember(module)
    trl.switch(bool(log_probs))
    return model


def _tell_decoders(chosen: _Chosen, model, attention):
    """Notes on the decoders of a model whether they may choose our attention."""
    decoder = own_class(chosen.modeling, chosen.targets.classes["attention"][0])
    for module in model.modules():
        if decoder is not None and isinstance(module, decoder):
            watch_attention(module)
            vars(module)[WITHOUT] = not attention
            if not attention:
                _unbind(module)


def _modules_of(families: Families, model, operation):
    """[(family, module)] for the modules of a model that an operation has a layer for."""
    classes = [(targets, getattr(modeling_of(targets), targets.classes[operation][0], ())) for targets in families]
    return [(targets, module) for module in model.modules() for targets, cls in classes if isinstance(module, cls)]


def _decoder_layers(families: Families, model):
    """[(family, decoder layer)] of a model, or of what holds it (PEFT). Raises TypeError when it has none."""
    found = _modules_of(families, model, "decoder_layer")
    if not found:
        names = " or ".join(targets.classes["decoder_layer"][0] for targets in families)
        raise TypeError(f"model is a {type(model).__name__} without a {names}, expected a {names_of(families)} model")
    return found


def _causal_lms(families: Families, model):
    return [module for _, module in _modules_of(families, model, "fused_linear_cross_entropy")]


def capture(families: Families, model, batch, tokens):
    """Replays the decoder layers of a model as CUDA graphs, and returns it; see `capture` of a package."""
    graphs.capture([layer for _, layer in _decoder_layers(families, model)], _causal_lms(families, model), batch, tokens)
    return model


def explain(families: Families, model):
    """Says what of a model runs fused; see `explain` of a package."""
    found = _decoder_layers(families, model)
    left: Dict[str, Tuple[str, int]] = {}  # operation -> (why it is transformers' own, how many layers it would be in)
    for targets in families:
        count = sum(each is targets for each, _ in found)
        for operation, names in unknown_texts(targets).items() if count else ():
            left[operation] = why_left(names), left.get(operation, ("", 0))[1] + count
    return explanation.explain(model, [(layer, targets.explain_layer) for targets, layer in found], _causal_lms(families, model), left)


def mapping(families: Families, mode=None):
    """Makes the mapping of a package's layers for `kernels`; see `mapping` of a package."""
    found, kernels = [_family(targets) for targets in families], kernels_library()
    note(_unknown_of(found), stacklevel=3)
    _register(found)
    left: Set[str] = set()
    for targets, modeling, unknown in found:
        without = [targets.rotary if operation == "rope" else targets.classes[operation][1] for operation in unknown]
        left.update(name for name, layer in targets.hub_names.items() if layer in without)
        for operation, (name, layer) in targets.classes.items():
            cls = own_class(modeling, name)
            if cls is not None and operation not in unknown and not hasattr(cls, "kernel_layer_name"):
                names = targets.hub_names
                kernels.replace_kernel_forward_from_hub(cls, name if name in names else next(n for n in names if names[n] is layer))
                setattr(cls, SAVED + "decorated", True)
    named = [family.modeling for family in found if "rotary_pos_emb" in family.targets.hub_names]
    if not all(isinstance(_own_rotary(modeling), nn.Module) for modeling in named):
        import transformers

        warnings.warn(
            f"transformers {transformers.__version__} does not work with kernels {getattr(kernels, '__version__', '?')}, so "
            f"kernels.kernelize() leaves the rotary embedding as it is, and use_kernels=True does nothing or raises. It wants "
            f"{kernels_wanted()}. Install that, or {PAIR}; or use this package's apply() or kernelize(model), which need no kernels",
            RuntimeWarning,
            stacklevel=3,
        )
    return mapping_of({name: layer for name, layer in hub_names_of(families).items() if name not in left}, mode)
