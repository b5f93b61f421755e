"""Which releases of transformers the layers run with. What decides is not the number but the text of what a layer stands in for or relies
on: an operation whose texts are all among those of tested releases (`known_texts`) runs, if its row accounts for all that they read
(`accounted`). Any other one stays transformers' own."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ...runtime.torch_version import numbers_in
from ..parts.explanation import Reason, warn_once
from ..parts.fingerprint import fingerprints_in
from ..parts.hub import TRANSFORMERS_EXPECTED
from .accounted import Names, reads, unaccounted
from .known_texts import TESTED, TEXTS

__all__ = [
    "ADVICE", "Unfit", "by_argument", "changed_texts", "installed", "is_installed", "modeling_of", "note", "release", "unfit_texts",
    "what_is_left", "why_left",
]  # fmt: skip

Unknown = Mapping[str, Mapping[str, Tuple["Unfit", ...]]]  # by family, what `by_argument` returns
OLDEST = 5, 17
ACTIVATIONS = {"transformers.activations": tuple(TEXTS["transformers.activations"])}
# What an operation relies on in every family, beside the family's own classes: names by transformers' module.
SHARED: Mapping[str, Mapping[str, Tuple[str, ...]]] = {
    "swiglu": ACTIVATIONS,
    "experts": {**ACTIVATIONS, "transformers.integrations.moe": tuple(TEXTS["transformers.integrations.moe"])},
    "decoder_layer": {"transformers.modeling_layers": tuple(TEXTS["transformers.modeling_layers"])},
    "fused_linear_cross_entropy": {"transformers.loss.loss_utils": tuple(TEXTS["transformers.loss.loss_utils"])},
    "attention": {module: tuple(TEXTS[module]) for module in ("transformers.integrations.sdpa_attention", "transformers.masking_utils")},
}
ADVICE = f"install a newer release of this package, or transformers=={TESTED[-1]}"


class Text(NamedTuple):
    """A function or class of transformers: its module, and its name there."""

    module: str
    name: str


class Unfit(NamedTuple):
    """A text for which an operation stays transformers' own. reads: the attributes that the row does not account for; none where the text
    is that of no tested release."""

    name: str
    reads: Tuple[str, ...] = ()


def release() -> str:
    """The installed transformers. Raises ImportError when it is absent or older than any that works."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'") from error
    version = transformers.__version__
    if numbers_in(version) < OLDEST:
        advice = f"expected transformers{TRANSFORMERS_EXPECTED}. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'"
        raise ImportError(f"transformers is {version}, {advice}")
    return version


@functools.lru_cache(maxsize=None)
def installed() -> Tuple[int, ...]:
    """Major and minor number of the installed transformers, which is not imported for it; of the newest tested one when there is none."""
    # This runs while a package is imported, which may open no file, so the version comes from the name of the folder that pip made.
    for folder in filter(None, sys.path):
        try:
            names = os.listdir(folder)
        except OSError:  # an archive, or nothing
            continue
        for name in names:
            if name.startswith("transformers-") and name.endswith(".dist-info"):
                return numbers_in(name.partition("-")[2])
    try:
        return numbers_in(importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        return numbers_in(TESTED[-1])


def is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def modeling_of(targets, name: str) -> Any:
    """transformers' module of a class of a family. Raises ImportError when transformers is absent, too old, or has no such module."""
    version = release()
    try:
        return importlib.import_module(targets.module_of(name))
    except ModuleNotFoundError as error:
        advice = f"expected transformers{TRANSFORMERS_EXPECTED}. Run: pip install 'transformers=={TESTED[-1]}'"
        raise ImportError(f"transformers {version} has no {targets.model}, {advice}") from error


def texts_of(targets, operation: str) -> List[Text]:
    """What an operation of a family stands in for or relies on: forwards of its classes, functions of its module, and what is shared."""
    classes = [targets.classes[operation][0]] if operation in targets.classes else []
    if operation in ("rope", "attention"):
        classes.append(targets.attention)
    if operation == "decoder_layer":
        classes += targets.fused
    found = [Text(targets.module_of(name), f"{name}.forward") for name in classes]
    # What a forward calls of its own class, and the functions of the rotary embedding, have other names in every family: all that are
    # recorded count.
    recorded = [name for name in TEXTS.get(targets.modeling, ()) if not name.endswith(".forward")]
    wanted = ("", *classes) if operation == "rope" else classes
    found += [Text(targets.modeling, name) for name in recorded if name.rpartition(".")[0] in wanted]
    found += [Text(module, name) for module, shared in SHARED.get(targets.argument_of(operation), {}).items() for name in shared]
    if operation == "decoder_layer":
        parts = [part for part in ("rms_norm", "swiglu", "rope", "experts") if part in targets.operations]
        found += [text for part in parts for text in texts_of(targets, part)]
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=64)
def source_of(module: str) -> str:
    """The source of a module of the installed transformers, which is not imported for it; "" where there is none."""
    package = importlib.util.find_spec("transformers")
    folders = [] if package is None else package.submodule_search_locations or []
    for folder in folders:
        path = Path(folder, *module.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""


class _Module(NamedTuple):
    """A module of transformers. known: which of its texts are those of a tested release; reads: what the forwards of its classes read."""

    known: Mapping[str, bool]
    reads: Mapping[str, Names]


@functools.lru_cache(maxsize=64)
def _read(module: str, source: str) -> _Module:
    """Reads a module of transformers. Without a source no text is known, not even that something is absent."""
    texts = TEXTS.get(module, {})
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of a newer Python
        return _Module({}, {})
    found = fingerprints_in(tree, texts)
    known = {name: bool(source) and found.get(name) in of_name.values() for name, of_name in texts.items()}
    classes = [name.rpartition(".")[0] for name in texts if name.endswith(".forward")]
    return _Module(known, {cls: reads(tree, cls) for cls in classes})


def changed_texts(module: str) -> List[str]:
    """Lists what a module of transformers defines with another text than in every tested release."""
    return [name for name, known in _read(module, source_of(module)).known.items() if not known]


def unfit_texts(targets) -> Dict[str, Tuple[Unfit, ...]]:
    """Lists by operation the texts that have changed since every tested release, and those that read what the row does not account for:
    each of these operations has to stay transformers' own."""
    texts = {operation: texts_of(targets, operation) for operation in targets.operations}
    modules = {module: _read(module, source_of(module)) for module in {text.module for each in texts.values() for text in each}}
    left = {
        Text(module, f"{cls}.forward"): names
        for module, (_, found) in modules.items()
        for cls, names in unaccounted(found, targets.accounted).items()
        if targets.module_of(cls) == module
    }
    found = {}
    for operation, of_operation in texts.items():
        unknown = [Unfit(text.name) for text in of_operation if not modules[text.module].known.get(text.name)]
        found[operation] = (*unknown, *(Unfit(text.name, left[text]) for text in of_operation if text in left))
    return {operation: unfit for operation, unfit in found.items() if unfit}


def by_argument(targets, unfit: Mapping[str, Tuple[Unfit, ...]]) -> Dict[str, Tuple[Unfit, ...]]:
    """Groups the texts that `unfit_texts` found by the argument of `apply` that decides about their operation."""
    found: Dict[str, Tuple[Unfit, ...]] = {}
    for operation, texts in unfit.items():
        argument = targets.argument_of(operation)
        found[argument] = (*found.get(argument, ()), *texts)
    return found


def why_left(unfit: Sequence[Unfit]) -> Reason:
    """Says why an operation stays transformers' own. unfit: of its texts."""
    unknown = ", ".join(text.name for text in unfit if not text.reads)
    said = [f"transformers {release()} has an unknown text of {unknown}"] if unknown else []
    said += [f"the row does not account for {', '.join(text.reads)} of {text.name}" for text in unfit if text.reads]
    return Reason("texts", "; ".join(said)) if unknown else Reason("accounted", "; ".join(said))


def what_is_left(unknown: Unknown) -> str:
    """Says which operations stay transformers' own; "" for none."""
    said = []
    for model, of_model in unknown.items():
        if of_model:
            texts = dict.fromkeys(text for of_operation in of_model.values() for text in of_operation)
            names = ", ".join(text.name for text in texts if not text.reads)
            reasons = [f"{names} of {model} unknown"] if names else []
            reasons += [f"the row of {model} does not account for {', '.join(text.reads)} of {text.name}" for text in texts if text.reads]
            stay = "stays" if len(of_model) == 1 else "stay"
            said.append(f"{', '.join(reasons)}, so {', '.join(of_model)} {stay} transformers' own")
    return "; ".join(said)


def note(unknown: Unknown, stacklevel: int) -> None:
    """Warns of the operations that stay transformers' own; where there are none, once of a release that was not tested."""
    version, left = release(), what_is_left(unknown)
    if left:
        warnings.warn(f"transformers {version}: {left}. To change that, {ADVICE}", RuntimeWarning, stacklevel=stacklevel + 1)
    elif version not in TESTED:
        what = f"transformers {version} is not among the tested releases, {TESTED[0]} to {TESTED[-1]}"
        warn_once(f"{what}, but says the same wherever the layers rely on it", stacklevel + 2)
