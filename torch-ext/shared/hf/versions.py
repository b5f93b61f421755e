"""Which releases of transformers the layers run with. What decides is not the number but the text of what a layer stands in for or relies
on: an operation whose texts are all among those of tested releases (`known_texts`) runs, any other one stays transformers' own."""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from .families import argument_of
from .fingerprint import fingerprints
from .hub import TRANSFORMERS_EXPECTED
from .known_texts import TESTED, TEXTS

Unknown = Mapping[str, Mapping[str, Tuple[str, ...]]]  # by family, what `unknown_texts` found
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
_noted: set = set()  # releases that `note` said were not tested


class Text(NamedTuple):
    """A function or class of transformers: its module, and its name there."""

    module: str
    name: str


def release() -> str:
    """The installed transformers. Raises ImportError when it is absent or older than any that works."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'") from error
    version = transformers.__version__
    if _major_and_minor(version) < OLDEST:
        advice = f"expected transformers{TRANSFORMERS_EXPECTED}. Run: pip install 'transformers{TRANSFORMERS_EXPECTED}'"
        raise ImportError(f"transformers is {version}, {advice}")
    return version


def _major_and_minor(version: str) -> Tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


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
                return _major_and_minor(name.partition("-")[2])
    try:
        return _major_and_minor(importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        return _major_and_minor(TESTED[-1])


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
    # The functions that the rotary embedding and the experts are made of have other names in every family: all that are recorded count.
    functions = [name for name in TEXTS.get(targets.modeling, ()) if not name.endswith(".forward")]
    if operation in ("rope", "experts"):
        found += [Text(targets.modeling, name) for name in functions if ("." in name) == (operation == "experts")]
    found += [Text(module, name) for module, shared in SHARED.get(argument_of(operation), {}).items() for name in shared]
    if operation == "decoder_layer":
        parts = [part for part in ("rms_norm", "swiglu", "rope", "experts") if part in targets.operations]
        found += [text for part in parts for text in texts_of(targets, part)]
    return list(dict.fromkeys(found))


def source_of(module: str) -> str:
    """The source of a module of the installed transformers, which is not imported for it; "" where there is none."""
    package = importlib.util.find_spec("transformers")
    folders = [] if package is None else package.submodule_search_locations or []
    for folder in folders:
        path = Path(folder, *module.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""


@functools.lru_cache(maxsize=64)
def _known(module: str, source: str) -> Mapping[str, bool]:
    """Which of the texts of a module are those of a tested release. Without a source none is, not even that something is absent."""
    texts = TEXTS.get(module, {})
    try:
        found: Mapping[str, str] = fingerprints(source, texts)
    except SyntaxError:  # of a newer Python
        found = {}
    return {name: bool(source) and found.get(name) in of_name.values() for name, of_name in texts.items()}


def unknown_texts(targets) -> Dict[str, Tuple[str, ...]]:
    """Lists the names of what has another text in the installed release than in every tested one, by operation: each of these has to stay
    transformers' own."""
    texts = {operation: texts_of(targets, operation) for operation in targets.operations}
    modules = {text.module for of_operation in texts.values() for text in of_operation}
    known = {module: _known(module, source_of(module)) for module in modules}
    found = {name: tuple(text.name for text in of_name if not known[text.module].get(text.name)) for name, of_name in texts.items()}
    return {operation: names for operation, names in found.items() if names}


def why_left(names) -> str:
    """Why an operation stays transformers' own. names: of its texts that are unknown."""
    return f"transformers {release()} has an unknown text of {', '.join(names)}"


def what_is_left(unknown: Unknown) -> str:
    """Says which operations stay transformers' own; "" for none."""
    said = []
    for model, of_model in unknown.items():
        if of_model:
            names = ", ".join(dict.fromkeys(name for texts in of_model.values() for name in texts))
            operations = list(dict.fromkeys(map(argument_of, of_model)))
            stay = "stays" if len(operations) == 1 else "stay"
            said.append(f"{names} of {model} unknown, so {', '.join(operations)} {stay} transformers' own")
    return "; ".join(said)


def note(unknown: Unknown, stacklevel: int) -> None:
    """Warns of the operations that stay transformers' own; where there are none, once of a release that was not tested."""
    version, left = release(), what_is_left(unknown)
    if left:
        warnings.warn(f"transformers {version}: {left}. To change that, {ADVICE}", RuntimeWarning, stacklevel=stacklevel + 1)
    elif version not in TESTED and version not in _noted:
        _noted.add(version)
        what = f"transformers {version} is not among the tested releases, {TESTED[0]} to {TESTED[-1]}"
        warnings.warn(f"{what}, but says the same wherever the layers rely on it", RuntimeWarning, stacklevel=stacklevel + 1)
