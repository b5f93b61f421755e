"""Puts a package's layers on one model (`kernelize`), captures its layers, and explains which parts run fused."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ..attention.attention_choice import WITHOUT, register_attention, watch_attention
from ..capture import capture as graphs
from ..capture.when_told import let_go
from ..family import ownership
from ..family.families import LOSS, Families, Targets, names_of
from ..family.options import DEFAULTS, Settings
from ..family.versions import modeling_of, note, unfit_texts, why_left
from ..layer.offload import OFFLOADS
from ..layer.offload import switch as switch_offload
from ..layer.products import warn_of_no_layers
from ..model import trl
from ..model.causal_lm import SHAPE
from ..model.decoder_model import choosing_forward
from ..model.losses import put_losses_on, read_losses
from ..model.padding import KEEPS
from ..parts.binding import remember
from ..parts.explanation import Reason
from ..parts.hub import TRANSFORMERS_EXPECTED
from ..parts.modules import SAVED, is_marked, is_transformers_own, without_decorators
from ..say import explain as explanation
from . import patching
from .recognised import Recognised, decoders_in, put_norms, read_of, why_attention_stays
from .shapes import explanation as explain_shapes
from .shapes import put_on

__all__ = ["capture", "explain", "kernelize"]


def _attention_forward(targets: Targets, original):
    """A copy of the attention's forward that sees our rotary embedding under the global name that it calls.

    That name is all there is to replace: the function behind it serves every model of its kind in the process. Raises RuntimeError when
    it does not call that name itself.
    """
    own = is_transformers_own(original, targets.modeling, f"{targets.attention}.forward")
    if not own or ownership.ROTARY not in without_decorators(original).__code__.co_names:
        found = "is not transformers' own" if not own else f"does not call {ownership.ROTARY}"
        raise RuntimeError(
            f"rope cannot be put on one model: {targets.attention}.forward, defined in {ownership.name_of(original)}, {found}. "
            f"Use apply(), or install transformers{TRANSFORMERS_EXPECTED}"
        )
    modeling = sys.modules[targets.modeling]
    stranger, found = ownership.stranger(targets, ownership.ROTARY), getattr(modeling, ownership.ROTARY)
    if stranger:
        raise RuntimeError(f"rope cannot be put on one model: {stranger}, not transformers' own. Use apply(rope=False)")

    def rotary_of_one_model(q, k, cos, sin, unsqueeze_dim=1):
        current = getattr(modeling, ownership.ROTARY)
        rotate = targets.rotate if current is found or is_marked(current) else current  # else it was replaced meanwhile
        return rotate(q, k, cos, sin, unsqueeze_dim)

    return ownership.copy_with(original, {ownership.ROTARY: rotary_of_one_model})


class _Chosen(NamedTuple):
    """The parts of one model that a family's layers go on. forwards, modules: by operation."""

    targets: Targets
    forwards: Mapping[str, Callable]
    modules: Mapping[str, List[nn.Module]]


def _choose(family: patching.FoundFamily, model, attention) -> Optional[_Chosen]:
    """Finds the modules of a model that a family's layers go on, None where it has no such modules. Raises RuntimeError when the rotary
    embedding cannot be put on one model."""
    targets, unknown = family
    classes = {operation: ownership.class_for(targets, operation) for operation in targets.classes}
    classes["rope"] = ownership.class_of(targets, targets.attention)
    if not (attention and _has_any(model, classes["attention"])):
        del classes["attention"]
    modules = {
        operation: [m for m in model.modules() if cls and isinstance(m, cls) and ownership.defines_forward(type(m)) is cls]
        for operation, cls in classes.items()
    }
    shared = [operation for operation, (name, _) in targets.classes.items() if name in targets.elsewhere]
    if not any(found for operation, found in modules.items() if operation not in shared):
        return None
    for operation in (LOSS, *targets.optional):
        if operation in classes and not _has_any(model, classes[operation]):
            del modules[operation]
    modules = {operation: found for operation, found in modules.items() if operation not in unknown}
    forwards = {operation: targets.classes[operation][1].forward for operation in modules if operation != "rope"}
    if "rope" in modules:
        forwards["rope"] = classes["rope"] and _attention_forward(targets, ownership.original(classes["rope"], "forward"))
    return _Chosen(targets, forwards, modules)


def _that_compute_losses(chosen: _Chosen) -> List[nn.Module]:
    return [module for loss in chosen.targets.losses for module in chosen.modules.get(loss, ())]


def _without_losses_of_others(family: patching.FoundFamily, model) -> patching.FoundFamily:
    """The family, whose unknown texts are not those of the losses of models of another class."""
    targets, unknown = family
    others = [loss for loss in targets.losses if not _has_any(model, ownership.class_for(targets, loss))]
    return family._replace(unknown={operation: names for operation, names in unknown.items() if operation not in others})


def _without_layers_that_were_read(family: patching.FoundFamily, read: Sequence[Recognised]) -> patching.FoundFamily:
    """The family, whose decoder layers have unknown texts no more where these have been read."""
    targets, unknown = family
    if all(type(found.layers[0]).__name__ != targets.classes["decoder_layer"][0] for found in read):
        return family
    return family._replace(unknown={operation: texts for operation, texts in unknown.items() if operation != "decoder_layer"})


def _has_any(model, cls) -> bool:
    return cls is not None and any(isinstance(module, cls) for module in model.modules())


def _subclasses_with_forwards(model, cls) -> List[str]:
    """The names of the classes of a model's modules that are subclasses of one and do not use its forward as it is."""
    modules = () if cls is None else (module for module in model.modules() if isinstance(module, cls))
    return [type(module).__name__ for module in modules if ownership.defines_forward(type(module)) is not cls]


def _without_others(chosen: _Chosen, model) -> Tuple[_Chosen, List[nn.Module]]:
    """(the choice without modules that have a forward of another library's or the user's, these modules). Raises RuntimeError where that
    leaves out a whole operation."""
    for module in _that_compute_losses(chosen):
        if ownership.other_owner(module):
            owner = ownership.other_owner(module)
            raise RuntimeError(f"this {type(module).__name__} has a forward that {owner} gave it. {ownership.CALL_BEFORE}")
    targets = chosen.targets
    others = [module for modules in chosen.modules.values() for module in modules if ownership.other_owner(module)]
    modules = {operation: [module for module in found if module not in others] for operation, found in chosen.modules.items()}
    for operation in {*targets.optional, "experts"}:  # tensor parallelism gives every module of experts a forward
        if operation in modules and chosen.modules[operation] and not modules[operation]:
            del modules[operation]
    missing = [operation for operation, found in modules.items() if not found]
    if missing:
        import transformers

        names = [targets.attention if operation == "rope" else targets.classes[operation][0] for operation in missing]
        strangers = filter(None, (ownership.stranger(targets, name) for name in names))
        subclasses = sorted({name for each in names for name in _subclasses_with_forwards(model, ownership.class_of(targets, each))})
        advice = f"Give it such layers, or install transformers{TRANSFORMERS_EXPECTED}"
        if subclasses:
            advice = f"{', '.join(subclasses)} has a forward of its own. If that calls super().forward(), use apply()"
        raise RuntimeError(
            f"{', '.join(missing)} cannot be put on this {type(model).__name__} (transformers {transformers.__version__}): it has no "
            f"{', '.join(names)} whose forward is transformers' own{''.join(f' ({text})' for text in strangers)}. {advice}"
        )
    return chosen._replace(modules=modules), others


def kernelize(families: Families, model, told: Settings = DEFAULTS, mode=None, attention=True, shapes=None):
    """Puts the layers on one model, in place, and returns it; see `kernelize` of a package. shapes: of a package that serves models without
    a row by what their layers compute, too, and the loss of any model."""
    if mode is not None and getattr(mode, "name", "") == "FALLBACK":
        raise ValueError("mode is Mode.FALLBACK, expected TRAINING or INFERENCE, with or without TORCH_COMPILE")
    noted = patching.noted_on_layers(told, attention)
    prepared = [patching.prepare(targets) for targets in families]
    patching.register(prepared)
    if shapes is not None:  # a tower may have a family's norms, behind a decoder without a row
        prepared = [family for family in prepared if _has_any(model, ownership.class_for(family.targets, "decoder_layer"))]
    pairs_of = [(family, _choose(family, model, attention)) for family in prepared]
    chosen = [each for _, each in pairs_of if each is not None]
    parts = shapes.parts(model) if shapes is not None and not chosen else []
    unread = not chosen or any("decoder_layer" in family.unknown for family, each in pairs_of if each is not None)
    read: List[Recognised] = []
    if shapes is not None:
        read = (shapes.layers if unread else shapes.layers_beside)(model)
    put_on(parts)
    others = {} if shapes is None else read_losses(model, patching.classes_with_losses([each.targets for each in chosen]))
    if not put_losses_on(others) and not chosen and not parts and not read:
        found = f"a {type(model).__name__} without any of transformers' {names_of(families)} layers"
        raise TypeError(f"model is {found}, expected a {names_of(families)} model")
    known = [_without_layers_that_were_read(family, read) for family, each in pairs_of if each is not None]
    note(patching.unknown_of([_without_losses_of_others(family, model) for family in known]), stacklevel=3)
    pairs = [_without_others(each, model) for each in chosen]
    ownership.warn_of_others([module for _, others in pairs for module in others], stacklevel=3)
    switch_offload(noted[OFFLOADS])
    for module in model.modules():
        let_go(module)
    of_read = {layer for each in read for layer in each.layers}
    kept = [layer for each in read for layer in shapes.put_on_layers(each, noted)]
    ownership.warn_of_others(kept, stacklevel=3)
    _tell_read_decoders(families, model, attention)
    for each, _ in pairs:
        for operation, modules in each.modules.items():
            forward = ownership.claim(each.forwards[operation], families)
            for module in modules:
                if module not in of_read:
                    ownership.bind(module, forward)
        for module in _that_compute_losses(each):
            vars(module)[KEEPS] = not told.unpad
        for module in each.modules.get("decoder_layer", ()):
            vars(module).update(noted)
        _tell_decoders(each, model, attention)
    of_families = [layer for each, _ in pairs for layer in each.modules.get("decoder_layer", ())]
    warn_of_no_layers(model, told.products, [*of_families, *of_read])
    for module in model.modules():
        if vars(module).get("_use_kernels"):  # transformers would kernelize it anew, with its own mapping, at each train() and eval()
            vars(module).update({"_use_kernels": False, SAVED + "use_kernels": True})
            remember(module)
    trl.switch(told.log_probs)
    return model


def _tell_decoders(chosen: _Chosen, model, attention):
    """Notes on the decoders of a model whether they may choose our attention."""
    decoder = ownership.class_for(chosen.targets, "attention")
    for module in model.modules():
        if decoder is not None and isinstance(module, decoder):
            watch_attention(module)
            vars(module)[WITHOUT] = not attention
            if not attention:
                ownership.unbind(module)


def _tell_read_decoders(families: Families, model, attention):
    """Gives decoders without a row our norms, and lets them choose our attention where all of their layers were read and their masks are
    handed on."""
    known = tuple(cls for targets in families if (cls := ownership.class_for(targets, "attention")) is not None)
    for decoder in decoders_in(model):
        if isinstance(decoder, known):
            continue
        put_norms(decoder)
        if ownership.other_owner(decoder) or why_attention_stays(decoder) is not None:
            continue
        register_attention(type(decoder), causal=False)
        ownership.bind(decoder, choosing_forward(decoder, partial(_layers_to_capture, families)))
        watch_attention(decoder).read = True
        vars(decoder)[WITHOUT] = not attention


def _modules_of(families: Families, model, operation):
    """[(family, module)] for the modules of a model that an operation has a layer for."""
    named = [(targets, targets.classes[operation][0]) for targets in families if operation in targets.classes]
    classes = [(targets, getattr(modeling_of(targets, name), name, ())) for targets, name in named]
    return [(targets, module) for module in model.modules() for targets, cls in classes if isinstance(module, cls)]


def _decoder_layers(families: Families, model):
    """[(family, decoder layer)] of a model, or of what holds it (PEFT). Raises TypeError when it has none."""
    found = _modules_of(families, model, "decoder_layer")
    if not found:
        names = " or ".join(targets.classes["decoder_layer"][0] for targets in families)
        raise TypeError(f"model is a {type(model).__name__} without a {names}, expected a {names_of(families)} model")
    return found


def _causal_lms(families: Families, model):
    losses = dict.fromkeys(loss for targets in families for loss in targets.losses)
    return list(dict.fromkeys(module for loss in losses for _, module in _modules_of(families, model, loss)))


def capture(families: Families, model, *told):
    """Replays the decoder layers of a model as CUDA graphs, and returns it; told: the other arguments of `capture` of a package."""
    asked = {model, *_causal_lms(families, model), *(module for module in model.modules() if SHAPE in vars(module))}
    graphs.capture(_layers_to_capture(families, model), asked, *told)
    return model


def _layers_to_capture(families: Families, model) -> List[nn.Module]:
    """The layers of a model that `capture` replays. Raises TypeError where it has none, or ones that a graph might not repeat."""
    return _layers_that_were_read(model) or [layer for _, layer in _decoder_layers(families, model) if read_of(layer) is None]


def _layers_that_were_read(model) -> List[nn.Module]:
    """The layers of a model without a row, none where there are no such. Raises TypeError where a graph might not do what they do."""
    with_read = [decoder for decoder in decoders_in(model) if any(map(read_of, decoder.layers))]
    decoders = [each for each in with_read if all(read_of(layer) or not ownership.runs_ours(layer) for layer in each.layers)]
    if not decoders:
        return []
    whose = [read_of(layer) for decoder in decoders for layer in decoder.layers]
    rows = [own for own in whose if own is not None]
    called = dict.fromkeys(name for own in rows for name in own.family.called)
    why = "several decoders" if len(decoders) > 1 else "layers that are transformers' own" if len(rows) < len(whose) else ""
    if called and not why:
        why = f"parts that are called as the modules that they are ({', '.join(called)}), and may do what no graph repeats"
    if not why and any(own.frame.then is not None or own.frame.returns is not None for own in rows):
        why = "layers that return more than their residual stream, or do more to it"
    if why:
        raise TypeError(f"model is a {type(model).__name__} with {why}, expected layers that are fused whole. See explain(model)")
    return [layer for decoder in decoders for layer in decoder.layers]


def explain(families: Families, model, shapes=None):
    """Says which parts of a model run fused; see `explain` of a package. shapes: as of `kernelize`."""
    own = [targets for targets in families if _modules_of([targets], model, "decoder_layer")]
    losses = {} if shapes is None else read_losses(model, patching.classes_with_losses(own))
    if shapes is not None and not own:
        known = explain_shapes(shapes, model, ownership.runs_ours, losses)
        if known is not None:
            return known
    found = _decoder_layers(families, model)
    read = {layer: read_of(layer) for _, layer in found}
    left: Dict[str, Tuple[Reason, int]] = {}  # operation -> (why it is transformers' own, how many layers it would be in)
    for targets in families:
        count = sum(each is targets for each, _ in found)
        are_read = all(read[layer] for each, layer in found if each is targets)
        for operation, texts in unfit_texts(targets).items() if count else ():
            if operation in targets.losses and not _modules_of([targets], model, operation):
                continue
            if are_read and operation == "decoder_layer":
                continue
            operation = targets.argument_of(operation)
            before = left[operation][1] if operation in left else 0
            left[operation] = why_left(texts), before + count
    layers = [(layer, getattr(read[layer], "explain", targets.explain_layer)) for targets, layer in found]
    return explanation.explain(model, layers, [each for each in _causal_lms(families, model) if each not in losses], left, losses)
