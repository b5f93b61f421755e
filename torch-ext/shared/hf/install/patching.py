"""Puts a package's layers where they go: on transformers' classes (`patch_classes`), or into the Hub's mapping (`mapping`); one_model.py
puts them on a single model. Which layer stands in for what is a package's table of `Targets`, one for each model family that it serves;
nothing here belongs to one model.

Nothing here is imported before it is needed: the package loads without transformers, and only `mapping` needs `kernels`.
What a class or a module had before is kept on itself, so any loaded copy of this package can put it back, in any order.
"""

import gc
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Dict, NamedTuple, Sequence, Set, Tuple

from torch import nn

from ...ops.arguments import fail
from ..attention.attention_choice import (
    WITHOUT,
    give_attention_back,
    ignore_new_models,
    leave_attention,
    note_new_models,
    register_attention,
    unregister_attention,
    watch_attention,
)
from ..capture import capture as graphs
from ..capture.asked_each_pass import answer_for_adapters, answer_for_class, take_back_from_adapters, take_back_from_class
from ..capture.when_told import CAPTURES, LEFT, let_go
from ..family import ownership
from ..family.experts import register_experts, unregister_experts
from ..family.families import LOSS, Families, Targets
from ..family.options import DEFAULTS, Settings, entries_of, switch_or_gib
from ..family.versions import Unfit, by_argument, modeling_of, note, unfit_texts
from ..layer import offload as offload_of
from ..layer.checkpointing import KEEPS_ATTENTION, RECOMPUTES_MLP, check_recompute
from ..layer.products import PRODUCTS, check_products
from ..layer.recognised_layer import FACTS
from ..model import trl
from ..model.causal_lm import LOSS_OPTIONS, OPTIONS, SAID, SHAPE, output_with_metrics
from ..model.padding import KEEPS
from ..parts.binding import bound_modules
from ..parts.hub import PAIR, kernels_library, kernels_wanted, mapping_of
from ..parts.lookups import own_rotary
from ..parts.modules import CAPTURED, OFF, SAVED, for_class, is_marked, is_transformers_own
from ..parts.wrapped import put

__all__ = [
    "FoundFamily", "classes_with_losses", "get_patched_ops", "mapping", "noted_on_layers", "patch_classes", "prepare", "register",
    "reset", "unknown_of",
]  # fmt: skip

# On a module: what kernelize() was told of its model, and what it said.
TOLD = KEEPS, KEEPS_ATTENTION, RECOMPUTES_MLP, PRODUCTS, offload_of.OFFLOADS, CAPTURES, LEFT, WITHOUT, SHAPE, SAID, FACTS


class FoundFamily(NamedTuple):
    """A family on the installed transformers. unknown: of `versions.unfit_texts`."""

    targets: Targets
    unknown: Mapping[str, Tuple[Unfit, ...]]


def prepare(targets: Targets) -> FoundFamily:
    """Prepares a family. Raises ImportError when transformers is absent, too old, or has no such family."""
    modules = [modeling_of(targets, name) for name, _ in targets.classes.values()]
    found = FoundFamily(targets, unfit_texts(targets))
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    for operation, (name, layer) in targets.classes.items():
        cls = ownership.class_for(targets, operation)
        original = None if cls is None or operation in found.unknown else ownership.original(cls, "forward")
        if original is None or not is_transformers_own(original, targets.module_of(name), f"{name}.forward"):
            continue  # another library's or the user's, which is kept
        for ours in (layer.forward, for_class(layer.forward)):
            ownership.describe(ours, original)
    of_family = [thing for module in modules for name, thing in vars(module).items() if name.endswith("CausalLMOutputWithPast")]
    for output in dict.fromkeys((CausalLMOutputWithPast, MoeCausalLMOutputWithPast, *of_family)):
        output_with_metrics(output)  # torch.compile traces through no making of classes
    return found


def unknown_of(families: Sequence[FoundFamily], wanted=None) -> Dict[str, Dict[str, Tuple[Unfit, ...]]]:
    """Lists, by family, what has unknown texts for `versions.note`. wanted: the arguments of `apply` that were asked for, None for all."""
    found = {targets.model: by_argument(targets, unknown) for targets, unknown in families}
    return {model: {name: texts for name, texts in left.items() if wanted is None or wanted.get(name)} for model, left in found.items()}


def _target(targets: Targets, operation):
    """(class or module, attribute, replacement) of an operation; None for a class or function that is gone."""
    if operation != "rope":
        return ownership.class_for(targets, operation), "forward", targets.classes[operation][1].forward
    modeling = sys.modules[targets.modeling]
    function = own_rotary(modeling)
    if isinstance(function, nn.Module):  # `kernels` made it one, of a class of its own
        return type(function), "forward", targets.rotary.forward
    return None if function is None else modeling, ownership.ROTARY, targets.rotate


def _patch(owner, attribute, replacement):
    if SAVED + attribute not in vars(owner):
        setattr(owner, SAVED + attribute, ownership.current(owner, attribute))
    put(owner, attribute, for_class(replacement))


def _restore(owner, attribute):
    """Puts back what `_patch` replaced, unless something else has been put over it since."""
    state, current = vars(owner), ownership.current(owner, attribute)
    if SAVED + attribute in state and (is_marked(current) or current is state[SAVED + attribute]):
        put(owner, attribute, state[SAVED + attribute])
        delattr(owner, SAVED + attribute)


def _live_modules(families: Families):
    """Lists every module of the process. A module's own forward hides its class's, and nothing lists the modules that have one."""
    rotaries = [own_rotary(sys.modules[targets.modeling]) for targets in families if targets.modeling in sys.modules]
    known = [*bound_modules(), *(rotary for rotary in rotaries if isinstance(rotary, nn.Module))]
    found = {id(module): module for module in known}  # gc.freeze() hides modules from the next line
    found.update((id(thing), thing) for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    # A constructor or a copy that failed may leave a module behind that `nn.Module.__init__` never reached.
    return [module for module in found.values() if "_modules" in vars(module)]


def register(families: Sequence[FoundFamily]):
    """Makes attn_implementation="bastile" a choice, with what is known of the masks of these families, and experts_implementation."""
    for targets, unknown in families:
        if "attention" not in unknown:
            whole = ownership.class_for(targets, "attention")
            register_attention(*([whole] if whole is not None else []))
            note_new_models(__name__)
    if not any("experts" in family.unknown for family in families):
        register_experts()


def noted_on_layers(told: Settings, attention: Any) -> Dict[str, Any]:
    """Returns the values that `Settings` puts on decoder layers or their class. Raises for a wrong option before anything is changed.
    attention: whether that operation is wanted."""
    check_products(told.products)
    trl.options_of(told.log_probs)
    recomputes, offloads = check_recompute(told.recompute_mlp), switch_or_gib("offload", told.offload, "of host memory that may be pinned")
    captures = switch_or_gib("capture", told.capture, "that the graphs may take")
    if captures and not attention:
        fail("capture", repr(told.capture), "False without attention: the forward that chooses it captures the layers")
    noted = {KEEPS_ATTENTION: bool(told.keep_attention), RECOMPUTES_MLP: recomputes, CAPTURES: captures}
    return {**noted, PRODUCTS: told.products, offload_of.OFFLOADS: offloads}


def patch_classes(families: Families, wanted, told: Settings = DEFAULTS):
    """Puts the layers on transformers' classes, of which exactly those are active afterwards whose operations are wanted.

    Args:
        wanted: an entry for each operation of the families, True or False; that of `fused_linear_cross_entropy` may be a mapping of options
            of the loss, which stands for True.
        told: the other options of `apply`.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for unknown products, or ones that no layer would make.
        ImportError: when transformers is absent or its version does not fit.
    """
    noted = noted_on_layers(told, wanted.get("attention", True))
    needed = dict.fromkeys(name for targets in families for name in ("decoder_layer", *targets.needs))
    off = [name for name in needed if not wanted.get(name, True)]
    if told.products != "bf16" and off:
        fail("products", repr(told.products), f"'bf16' without {', '.join(off)}: the fused decoder layer makes them")
    options = entries_of(LOSS, wanted[LOSS], ("ignore_index", *OPTIONS, "skip_logits"))
    found = [prepare(targets) for targets in families]
    note(unknown_of(found, wanted), stacklevel=4)
    register(found)
    modules = _without_other_packages(families, _live_modules(families))
    for targets, unknown in found:
        other = ownership.holder(targets, families)
        if other:
            kept = "and its options stay. To change them, call reset() of that package first"
            warnings.warn(f"{targets.model} is served by the package {other} already, {kept}", RuntimeWarning, stacklevel=4)
            continue
        for loss in targets.losses:
            _tell_causal_lm(ownership.class_for(targets, loss), options, told.unpad)
        layer = ownership.class_for(targets, "decoder_layer")
        if layer is not None:
            for name, value in noted.items():
                setattr(layer, name, value)
            offload_of.switch(noted[offload_of.OFFLOADS])
        _forget_what_one_model_was_told(targets, modules)
        _watch_decoders(targets, modules)
        said = {name: wanted[targets.argument_of(name)] for name in targets.operations}
        asked = {name: isinstance(each, Mapping) or bool(each) for name, each in said.items()}
        asked["decoder_layer"] = asked.get("decoder_layer", False) and all(asked[name] for name in targets.needs)
        on = {name: asked[name] and name not in unknown for name in asked}
        _patch_family(targets, on, modules)
        for cls in classes_with_losses([targets]):
            (answer_for_class if any(on.values()) else take_back_from_class)(cls)
    answer_for_adapters()
    trl.switch(told.log_probs, options)


def _without_other_packages(families: Families, modules):
    """Lists the modules without those to which another package gave a forward of their own."""
    return [module for module in modules if not ownership.other_package(ownership.forward_on(module), families)]


def _tell_causal_lm(causal_lm, options, unpad):
    """Notes on the class of a causal LM, None where it is gone, what `apply` was told about it."""
    if causal_lm is None:
        return
    if options:
        setattr(causal_lm, LOSS_OPTIONS, options)
    elif LOSS_OPTIONS in vars(causal_lm):
        delattr(causal_lm, LOSS_OPTIONS)
    setattr(causal_lm, KEEPS, not unpad)


def _forget_what_one_model_was_told(targets: Targets, modules):
    """Removes what `kernelize` noted on single models: `apply` decides for them too."""
    classes = tuple(filter(None, (ownership.class_for(targets, name) for name in (*targets.losses, "decoder_layer", "attention"))))
    for module in modules:
        if isinstance(module, classes):
            let_go(module)
            for name in TOLD:
                vars(module).pop(name, None)


def _watch_decoders(targets: Targets, modules):
    """Makes the existing decoders notice when an implementation of attention is asked for by name."""
    decoder = ownership.class_for(targets, "attention")
    for module in modules:
        if decoder is not None and isinstance(module, decoder) and "config" in vars(module):
            watch_attention(module)


def _patch_family(targets: Targets, wanted, modules):
    """Puts the wanted layers of one family on its classes, and takes the others off. modules: all of the process."""
    for name in targets.fused if wanted.get("decoder_layer") else ():
        stranger = ownership.stranger(targets, name)
        if stranger:
            _warn_of_stranger(stranger, "decoder_layer", stacklevel=5)
    for operation, on in wanted.items():
        (_put_on if on else _take_off)(targets, operation, modules)


def _put_on(targets: Targets, operation, modules):
    """Puts the layer of one operation where it goes, unless something that is not transformers' own is there."""
    modeling = sys.modules[targets.modeling]
    owner, attribute, replacement = _target(targets, operation)
    stranger = ownership.stranger(targets, ownership.ROTARY if operation == "rope" else targets.classes[operation][0])
    if stranger:
        _warn_of_stranger(stranger, operation, stacklevel=6)
    if owner is None or (stranger if owner is modeling or operation == "rope" else ownership.class_stranger(owner)):
        return
    if operation == "rope" and owner is not modeling:  # or a function that wraps it later hides it
        setattr(modeling, SAVED + "rotary", own_rotary(modeling))
    _patch(owner, attribute, replacement)
    _bind_hidden(owner, replacement, modules)


def _take_off(targets: Targets, operation, modules):
    """Takes the layer of one operation off its class and off every module that has it."""
    owner, attribute, _ = _target(targets, operation)
    if owner is None:
        return
    _restore(owner, attribute)
    classes = owner
    if operation == "rope":
        rotary = own_rotary(sys.modules[targets.modeling])
        classes = (type(rotary), *filter(None, [ownership.class_of(targets, targets.attention)]))
    for module in modules:
        if isinstance(module, classes):
            ownership.unbind(module)
            leave_attention(module)


def _warn_of_stranger(stranger, operation, stacklevel):
    """Warns that what the user or another library has put on transformers' module or class stays there."""
    what = f"{stranger}, not transformers' own: it is kept, and {operation} leaves it alone"
    warnings.warn(what, RuntimeWarning, stacklevel=stacklevel + 1)


def classes_with_losses(families: Families) -> tuple:
    """The classes whose losses the rows of families are for."""
    return tuple(filter(None, (ownership.class_for(targets, loss) for targets in families for loss in targets.losses)))


def _bind_hidden(owner, replacement, modules):
    """Binds a replacement to modules whose own forward hides their class's, e.g. the former one that `kernels` binds as its fallback."""
    others = []
    for module in modules:
        if not isinstance(owner, type) or not isinstance(module, owner):
            continue
        if ownership.forward_on(module) is None:
            vars(module).pop(OFF, None)  # what was around our forward is gone
        elif ownership.defines_forward(type(module)) is owner:
            if ownership.other_owner(module):
                others.append(module)
            else:
                ownership.bind(module, replacement)
    ownership.warn_of_others(others, stacklevel=7)


def reset(families: Families):
    """Puts back what a package replaced; see `reset` of a package."""
    trl.take_back()
    take_back_from_adapters()
    offload_of.take_back()
    imported = [targets for targets in families if targets.modeling in sys.modules]
    if not imported and not bound_modules():
        return
    modules = _without_other_packages(families, _live_modules(imported))
    for targets in imported:
        if not ownership.holder(targets, families):
            _reset_classes(targets)
    for module in modules:
        state = vars(module)
        graphs.release(module)
        state.pop(CAPTURED, None)
        slots = ownership.slot_of(module), ownership.WRAPPED
        if SAVED + "replaced" in state or any(ownership.calls_ours(state.get(name)) for name in slots):
            ownership.unbind(module)
        if state.pop(SAVED + "use_kernels", False):
            state["_use_kernels"] = True
        give_attention_back(module)
        for name in (*TOLD, graphs.AS_TOLD):
            state.pop(name, None)
    unregister_experts(modules)
    unregister_attention(modules)
    ignore_new_models(__name__)


def _reset_classes(targets: Targets):
    """Puts back what was on the classes and functions of one family."""
    for cls in classes_with_losses([targets]):
        take_back_from_class(cls)
    for operation in (*targets.classes, "rope"):
        owner, attribute, _ = _target(targets, operation)
        if owner is None:
            continue
        _restore(owner, attribute)
        if LOSS_OPTIONS in vars(owner):
            delattr(owner, LOSS_OPTIONS)
        if SAVED + "decorated" in vars(owner):
            for name in ("kernel_layer_name", "kernel_condition", SAVED + "decorated"):
                if name in vars(owner):
                    delattr(owner, name)
        kept = SAVED + attribute  # stays where another forward, which may call ours, is on top
        for name in [name for name in vars(owner) if name.startswith(SAVED) and name != kept]:  # what apply() noted there
            delattr(owner, name)
    vars(sys.modules[targets.modeling]).pop(SAVED + "rotary", None)


def get_patched_ops(families: Families):
    """Lists the operations that are on transformers' classes, of every family that has them, by the names of the arguments of `apply`."""
    found: Dict[str, bool] = {}
    for targets in families:
        imported = targets.modeling in sys.modules
        for operation in targets.operations:
            owner, attribute, ours = _target(targets, operation) if imported else (None, "", None)
            on = owner is not None and ownership.current(owner, attribute) is for_class(ours)
            argument = targets.argument_of(operation)
            found[argument] = found.get(argument, True) and on
    return [operation for operation, on in found.items() if on]


def mapping(families: Families, mode=None, named: Mapping[str, type] = {}):
    """Makes the mapping of a package's layers for `kernels`; see `mapping` of a package. named: as of `Interface`."""
    found, kernels = [prepare(targets) for targets in families], kernels_library()
    note(unknown_of(found), stacklevel=3)
    register(found)
    left: Set[str] = set()
    for targets, unknown in found:
        without = [targets.rotary if operation == "rope" else targets.classes[operation][1] for operation in unknown]
        left.update(name for name, layer in targets.hub_names.items() if layer in without)
        for operation, (name, layer) in targets.classes.items():
            cls = ownership.class_of(targets, name)
            if cls is not None and operation not in unknown and not hasattr(cls, "kernel_layer_name"):
                names = targets.hub_names
                kernels.replace_kernel_forward_from_hub(cls, name if name in names else next(n for n in names if names[n] is layer))
                setattr(cls, SAVED + "decorated", True)
    modelings = [sys.modules[family.targets.modeling] for family in found if "rotary_pos_emb" in family.targets.hub_names]
    if not all(isinstance(own_rotary(modeling), nn.Module) for modeling in modelings):
        import transformers

        warnings.warn(
            f"transformers {transformers.__version__} does not work with kernels {getattr(kernels, '__version__', '?')}, so "
            f"kernels.kernelize() leaves the rotary embedding as it is, and use_kernels=True does nothing or raises. It wants "
            f"{kernels_wanted()}. Install that, or {PAIR}; or use this package's apply() or kernelize(model), which need no kernels",
            RuntimeWarning,
            stacklevel=3,
        )
    offered = {**{name: layer for targets in families for name, layer in targets.hub_names.items()}, **named}
    return mapping_of({name: layer for name, layer in offered.items() if name not in left}, mode)
