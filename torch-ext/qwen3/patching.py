"""Where the layers go: on transformers' classes (`apply`), on one model (`kernelize`), or into the Hub's mapping (`mapping`).

Nothing here is imported before it is needed: the package loads without transformers, and only `mapping` needs `kernels`.
What a class or a module had before is kept on itself, so any loaded copy of this package can put it back, in any order.
"""

import gc
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import NamedTuple

from torch import nn

from . import layers
from .modeling import LAYER, LOSS_OPTIONS, OFF, OPTIONS, SAVED, output_with_metrics, rotary_pos_emb
from .warmup import clear_autotune_cache, warmup_all_kernels

__all__ = ["apply", "clear_autotune_cache", "get_patched_ops", "kernelize", "mapping", "reset", "warmup_all_kernels"]

# From, and up to but not including. From 5.23 on, transformers' gradient checkpointing stands inside a decoder layer's forward, and
# to replace that would switch it off.
TRANSFORMERS = (5, 17), (5, 23)
TRANSFORMERS_EXPECTED = ">=5.17,<5.23"
KERNELS_EXPECTED = ">=0.16.2,<0.18"
# Each transformers works with one minor version of kernels only.
PAIR = "'transformers>=5.18,<5.23' with 'kernels>=0.17.2,<0.18', or transformers 5.17 with kernels 0.16.2"
CUDA_CAPABILITIES = (80, 121)  # from, to: what kernels are built for
MODELING = "transformers.models.qwen3.modeling_qwen3"
ROTARY = "apply_rotary_pos_emb"
WRAPPED = "_original_forward"  # where accelerate keeps the forward that it wrapped for mixed precision
CALL_BEFORE = (
    "Call apply() or kernelize() before that: before Accelerator.prepare(), Trainer.train() and the making of a trainer of TRL; "
    "apply() before from_pretrained() with a tp_plan"
)
CLASSES = {
    "rms_norm": ("Qwen3RMSNorm", layers.RMSNorm),
    "swiglu": ("Qwen3MLP", layers.MLP),
    "fused_linear_cross_entropy": ("Qwen3ForCausalLM", layers.CausalLM),
    "decoder_layer": ("Qwen3DecoderLayer", layers.DecoderLayer),
}
OPERATIONS = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy", "decoder_layer")  # in the order of `apply`
HUB_NAMES = {  # of the layers; the last two belong to transformers, whose Qwen3 does not use them yet
    "RMSNorm": layers.RMSNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "Qwen3MLP": layers.MLP,
    "Qwen3DecoderLayer": layers.DecoderLayer,
    "Qwen3ForCausalLM": layers.CausalLM,
    "SwiGLUMLP": layers.SwiGLUMLP,
    "ForCausalLMLoss": layers.ForCausalLMLoss,
}


# transformers and kernels


def _modeling_qwen3():
    """transformers' module of Qwen3. Raises ImportError when it is absent or not as the layers expect it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'") from error
    version = transformers.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    advice = f"expected transformers{TRANSFORMERS_EXPECTED}. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'"
    if not TRANSFORMERS[0] <= numbers < TRANSFORMERS[1]:
        raise ImportError(f"transformers is {version}, {advice}")
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.qwen3 import modeling_qwen3

    for name, layer in CLASSES.values():
        cls = getattr(modeling_qwen3, name, None)
        if cls is None:
            raise ImportError(f"transformers {version} has no {name}, {advice}")
        found, expected = inspect.signature(_original(cls, "forward")), inspect.signature(layer.forward)
        if [(p.name, p.kind) for p in found.parameters.values()] != [(p.name, p.kind) for p in expected.parameters.values()]:
            where = _original(cls, "forward").__module__
            raise ImportError(f"transformers {version} has {name}.forward{found}, defined in {where}, {advice}")
    if not hasattr(modeling_qwen3, ROTARY):
        raise ImportError(f"transformers {version} has no {ROTARY}, {advice}")
    output_with_metrics(CausalLMOutputWithPast)  # torch.compile traces through no making of classes
    return modeling_qwen3


def _kernels():
    """The `kernels` library. Raises ImportError when it is absent or too old."""
    try:
        import kernels
    except ImportError as error:
        raise ImportError(f"kernels is not installed. Run: pip install 'kernels{KERNELS_EXPECTED}'") from error
    if not hasattr(kernels, "replace_kernel_forward_from_hub"):
        raise ImportError(
            f"kernels is {getattr(kernels, '__version__', 'of an unknown version')}, expected kernels{KERNELS_EXPECTED}. "
            f"Run: pip install 'kernels{KERNELS_EXPECTED}'"
        )
    return kernels


# What stands where, and putting it back


def _original(owner, attribute):
    """What an attribute of a class or module is without us."""
    return vars(owner).get(SAVED + attribute, vars(owner)[attribute])


def _target(modeling, operation):
    """(class or module, attribute, replacement) of an operation."""
    if operation != "rope":
        name, layer = CLASSES[operation]
        return getattr(modeling, name), "forward", layer.forward
    function = _original(modeling, ROTARY)
    if isinstance(function, nn.Module):  # `kernels` made it one, of a class of its own
        return type(function), "forward", layers.RotaryPosEmb.forward
    return modeling, ROTARY, rotary_pos_emb


def _patch(owner, attribute, replacement):
    if SAVED + attribute not in vars(owner):
        setattr(owner, SAVED + attribute, vars(owner)[attribute])
    setattr(owner, attribute, replacement)


def _restore(owner, attribute):
    if SAVED + attribute in vars(owner):
        setattr(owner, attribute, vars(owner)[SAVED + attribute])
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
    function = _function(state.get(_slot(module)))
    if function is None or _calls_ours(function) or _is_of_a_class(function, module):
        return ""
    return getattr(function, "__globals__", {}).get("__name__") or repr(function)


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
    state[slot] = MethodType(function, module)


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
    return getattr(forward, "__func__", forward)


def _is_ours(forward):
    """True for a bound forward of ours, also of another loaded copy of this package."""
    return forward is not None and getattr(_function(forward), LAYER, None) is _function(forward)


def _calls_ours(forward):
    """True for one of ours, and for a wrapper made with functools.wraps, which copies the mark: TRL's trainers put one on."""
    return getattr(_function(forward), LAYER, None) is not None


def _is_of_a_class(function, module):
    """True for the forward of a class, the module's or another, as `kernels` binds it; False for what was made for one module."""
    cls = sys.modules.get(getattr(function, "__module__", None))
    for name in getattr(function, "__qualname__", "").split(".")[:-1]:
        cls = getattr(cls, name, None)
    classes = (*type(module).__mro__, cls) if isinstance(cls, type) else type(module).__mro__
    return any(function in (vars(c).get("forward"), vars(c).get(SAVED + "forward")) for c in classes)


for _layer in HUB_NAMES.values():
    setattr(_layer.forward, LAYER, _layer.forward)


def _live_modules():
    """Every module there is. A forward of its own hides the one of its class, and nobody else knows which modules have one."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def _defines_forward(cls):
    return next(c for c in cls.__mro__ if "forward" in vars(c))


# For every model


def apply(rms_norm=True, swiglu=True, rope=True, fused_linear_cross_entropy=True, decoder_layer=True):
    """Puts the layers on transformers' Qwen3 classes: models that exist and models made later use them.

    After the call exactly the operations given as True are active. With `fused_linear_cross_entropy` a model in training mode
    that gets labels returns the loss and no logits. `decoder_layer` fuses across the others, so it takes effect where `rms_norm`,
    `swiglu` and `rope` are all on. Not thread-safe against a running forward pass.

    fused_linear_cross_entropy: True, False, or a mapping of options of the loss, which stands for True: `ignore_index`,
    `class_weight`, `reduction`, `label_smoothing`, `softcap`, `lse_square_scale`, `use_token_scaling`, `accum_dtype`,
    `return_z_loss`, `return_token_accuracy` and `return_predicted_tokens` of `linear_cross_entropy`, and `skip_logits`: whether a
    loss comes without logits, in training mode by default. They hold for every call with labels, in eval mode too, unless the
    call itself has an argument of that name: model(input_ids=..., labels=..., label_smoothing=0.1). What the return_ options
    ask for is in the model's output, under the names z_loss, token_accuracy and predicted_tokens.

    Raises TypeError for an option that does not exist, ImportError when transformers is absent or its version does not fit.
    """
    options = _loss_options(fused_linear_cross_entropy)
    modeling = _modeling_qwen3()
    causal_lm = modeling.Qwen3ForCausalLM
    if options:
        setattr(causal_lm, LOSS_OPTIONS, options)
    elif LOSS_OPTIONS in vars(causal_lm):
        delattr(causal_lm, LOSS_OPTIONS)
    wanted = {
        "rms_norm": rms_norm,
        "swiglu": swiglu,
        "rope": rope,
        "fused_linear_cross_entropy": isinstance(fused_linear_cross_entropy, Mapping) or fused_linear_cross_entropy,
        "decoder_layer": decoder_layer and rms_norm and swiglu and rope,
    }
    modules = _live_modules()
    for operation, on in wanted.items():
        owner, attribute, replacement = _target(modeling, operation)
        if on:
            _patch(owner, attribute, replacement)
            _bind_hidden(owner, replacement, modules)
        else:
            _restore(owner, attribute)
            classes = (type(_original(modeling, ROTARY)), modeling.Qwen3Attention) if operation == "rope" else owner
            for module in modules:
                if isinstance(module, classes):
                    _unbind(module)


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
    _warn_of_others(others, stacklevel=3)


def reset():
    """Puts everything back: transformers' classes and functions, and every module that has a forward of ours.

    Also undoes what `kernelize`, `mapping` and `kernels.kernelize` with our mapping did. Does nothing where nobody imported them.
    """
    modeling = sys.modules.get(MODELING)
    if modeling is None:
        return
    for operation in (*CLASSES, "rope"):
        owner, attribute, _ = _target(modeling, operation)
        _restore(owner, attribute)
        if LOSS_OPTIONS in vars(owner):
            delattr(owner, LOSS_OPTIONS)
        if SAVED + "decorated" in vars(owner):
            for name in ("kernel_layer_name", "kernel_condition", SAVED + "decorated"):
                if name in vars(owner):
                    delattr(owner, name)
    for module in _live_modules():
        state = vars(module)
        if SAVED + "replaced" in state or any(_calls_ours(state.get(name)) for name in (_slot(module), WRAPPED)):
            _unbind(module)
        if state.pop(SAVED + "use_kernels", False):
            state["_use_kernels"] = True


def get_patched_ops():
    """The operations that `apply` has put on transformers' classes, by the names of its arguments."""
    modeling = sys.modules.get(MODELING)
    if modeling is None:
        return []
    targets = {operation: _target(modeling, operation) for operation in OPERATIONS}
    return [operation for operation, (owner, attribute, ours) in targets.items() if vars(owner)[attribute] is ours]


# For one model


def _attention_forward(original):
    """A copy of Qwen3Attention's forward that sees our rotary embedding under the global name that it calls.

    That name is all there is to replace: the function behind it serves every Qwen3 in the process. Raises RuntimeError when
    it does not call that name itself.
    """
    if ROTARY not in getattr(getattr(original, "__code__", None), "co_names", ()):
        raise RuntimeError(
            f"rope cannot be put on one model: Qwen3Attention.forward, defined in {original.__module__}, does not call {ROTARY}. "
            f"Use apply(), or install transformers{TRANSFORMERS_EXPECTED}"
        )
    names = {name: value for name, value in original.__globals__.items() if name != "__name__"}  # torch.compile would look it up there
    copy = FunctionType(
        original.__code__, {**names, ROTARY: rotary_pos_emb}, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__module__, copy.__qualname__, copy.__doc__ = original.__module__, original.__qualname__, original.__doc__
    setattr(copy, LAYER, copy)
    return copy


def kernelize(model, mode=None):
    """Puts the layers on one model, in place, and returns it. Other models, also later ones, are left alone.

    model: a Qwen3 of transformers, with or without a head, alone or inside another module (PEFT). mode: a `kernels.Mode`;
    the layers serve all of them, so it changes nothing. For torch.nn.DataParallel use `apply`: its replicas would call the
    forwards of the model that they were copied from.

    A part whose forward someone else replaced (tensor parallelism does it with q_norm and k_norm) keeps that, with a warning.

    Raises TypeError when the model has no Qwen3 layers, RuntimeError when not all operations could be put on it, and
    ImportError when transformers is absent or its version does not fit.
    """
    if mode is not None and getattr(mode, "name", "") == "FALLBACK":
        raise ValueError("mode is Mode.FALLBACK, expected TRAINING or INFERENCE, with or without TORCH_COMPILE")
    modeling = _modeling_qwen3()
    targets = {operation: (getattr(modeling, name), layer.forward) for operation, (name, layer) in CLASSES.items()}
    attention = modeling.Qwen3Attention
    targets["rope"] = (attention, _attention_forward(_original(attention, "forward")))
    chosen = {
        operation: [module for module in model.modules() if isinstance(module, cls) and _defines_forward(type(module)) is cls]
        for operation, (cls, _) in targets.items()
    }
    if not any(chosen.values()):
        raise TypeError(f"model is a {type(model).__name__} without any of transformers' Qwen3 layers, expected a Qwen3 model")
    if not any(isinstance(module, modeling.Qwen3ForCausalLM) for module in model.modules()):
        del chosen["fused_linear_cross_entropy"]
    for module in chosen.get("fused_linear_cross_entropy", ()):
        if _other_owner(module):
            raise RuntimeError(f"this {type(module).__name__} has a forward that {_other_owner(module)} gave it. {CALL_BEFORE}")
    others = [module for modules in chosen.values() for module in modules if _other_owner(module)]
    chosen = {operation: [module for module in modules if module not in others] for operation, modules in chosen.items()}
    missing = [operation for operation, modules in chosen.items() if not modules]
    if missing:
        import transformers

        names = ", ".join(targets[operation][0].__name__ for operation in missing)
        raise RuntimeError(
            f"{', '.join(missing)} cannot be put on this {type(model).__name__} (transformers {transformers.__version__}): it has no "
            f"{names} whose forward is transformers' own. Give it such layers, or install transformers{TRANSFORMERS_EXPECTED}"
        )
    _warn_of_others(others, stacklevel=2)
    for operation, modules in chosen.items():
        for module in modules:
            _bind(module, targets[operation][1])
    for module in model.modules():
        if vars(module).get("_use_kernels"):  # transformers would kernelize it anew, with its own mapping, at each train() and eval()
            vars(module).update({"_use_kernels": False, SAVED + "use_kernels": True})
    return model


class LoadedLayer(NamedTuple):
    """A layer of this copy of the package in the form in which `kernels` asks for one: nothing is downloaded or imported again."""

    package: str
    layer_name: str

    def load(self):
        return getattr(layers, self.layer_name)

    def __str__(self):
        return f"`{self.package}`, layer `{self.layer_name}`"


def mapping(mode=None):
    """The layers for `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`, for CPUs and for GPUs of compute
    capability 8.0 to 12.1. mode: the only `kernels.Mode` that they are for; by default they are for all.

    Also gives the Hub's names to those of transformers' Qwen3 classes that have none, so `kernels.kernelize` finds them.
    Warns when it cannot find all: where transformers and `kernels` do not fit, it passes the rotary embedding by.

    Raises ImportError when transformers or `kernels` is absent or its version does not fit.
    """
    modeling, kernels = _modeling_qwen3(), _kernels()
    for operation, hub_name in (
        ("rms_norm", "RMSNorm"),
        ("swiglu", "Qwen3MLP"),
        ("decoder_layer", "Qwen3DecoderLayer"),
        ("fused_linear_cross_entropy", "Qwen3ForCausalLM"),
    ):
        cls = getattr(modeling, CLASSES[operation][0])
        if not hasattr(cls, "kernel_layer_name"):
            kernels.replace_kernel_forward_from_hub(cls, hub_name)
            setattr(cls, SAVED + "decorated", True)
    if not isinstance(_original(modeling, ROTARY), nn.Module):
        import transformers

        warnings.warn(
            f"transformers {transformers.__version__} does not work with kernels {getattr(kernels, '__version__', '?')}, so "
            "kernels.kernelize() leaves the rotary embedding as it is. Use this package's apply() or kernelize(model), or install "
            f"{PAIR}",
            RuntimeWarning,
            stacklevel=2,
        )
    low, high = CUDA_CAPABILITIES
    cuda = kernels.Device("cuda", kernels.CUDAProperties(low, high))
    found = {}
    for hub_name, layer in HUB_NAMES.items():
        repository = LoadedLayer(layers.__name__, layer.__name__)
        entry = repository if mode is None else {mode: repository}
        found[hub_name] = {"cpu": entry, cuda: entry}
    return found
