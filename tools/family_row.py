"""Reads the row of a model family off the forwards of transformers' module, and records their texts.

    python -m tools.family_row transformers.models.mixtral.modeling_mixtral            prints the row
    python -m tools.family_row transformers.models.seed_oss.modeling_seed_oss --set residual_dropout=0
                                                                                       of a model with another configuration
    python -m tools.family_row transformers.models.mixtral.modeling_mixtral --add      and records the texts that it relies on

The model is that of its default configuration, without memory; what the row says is compared with its own layers on a small copy. What no
row can say is called, or stops it, and is printed with the line.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools import transformers_texts
from tools.family_loss import SOURCES, TABLES, built, names_of

NOT_READ = ("model", "towers")  # a name for people, and classes of other modules
CALLED_BY_NAME = ("apply_rotary_pos_emb", "rotate_half")


class Found(NamedTuple):
    """family: the row, whose model is its prefix. called: why parts of it are called, by the layer's attributes."""

    family: Any
    called: Mapping[str, str]


def part(package: Any, name: str) -> Any:
    return importlib.import_module(f"{package.__name__}.shared.hf.{name}")


def row_of_model(package: Any, model: Any) -> Found:
    """Reads the row of a model that is one of transformers', alone or with a vision tower. Raises `NotServed`."""
    recognised, facts = part(package, "install.recognised"), part(package, "parts.facts")
    decoders = recognised.decoders_in(model)
    if not decoders:
        raise facts.NotServed(f"{type(model).__name__} has no module with an embedding of tokens and layers, by their usual names")
    decoder = decoders[0]
    found, *others = recognised.recognise(decoder)
    if isinstance(found, recognised.Unread):
        raise facts.NotServed(found.why.text)
    if others or found.row.frame.then is not None or found.row.frame.returns is not None:
        raise facts.NotServed(f"the layers of {type(decoder).__name__} are of several kinds, or do more than a row can say")
    family = found.own.family
    name = type(decoder).__name__
    head = head_of(package, model)
    fields: dict[str, Any] = {**head, "decoder": "" if name == f"{family.prefix}Model" else name}
    alone = hasattr(sys.modules[family.modeling], f"{family.prefix}ForCausalLM")
    if not alone and type(model).__module__ == family.modeling:
        fields["whole"] = vision_of(package, model, decoder)
    arguments = part(package, "family.probes").argument_names(type(model).forward)
    fields["routed"] = "whole" not in fields and "output_router_logits" in arguments and "use_cache" not in arguments
    return Found(family._replace(model=family.prefix, **fields), found.row.called)


def head_of(package: Any, model: Any) -> dict[str, str]:
    """Reads off a causal LM's forward how it scales and caps its logits where the configuration asks for both: fields of a row."""
    flow_of, reads = part(package, "model.logits_flow").flow_of, part(package, "family.accounted").reads
    NotServed = part(package, "parts.facts").NotServed
    causal_lm = copy.copy(model)
    config, text = copy.deepcopy(model.config), ast.parse(transformers_texts.installed_source(type(model).__module__))
    for name in reads(text, type(model).__name__):
        owner, _, attribute = name.partition(".")
        of_text = getattr(config, "text_config", config)
        for each in (config, of_text):
            if owner == "config" and getattr(each, attribute, 0) is None:
                setattr(each, attribute, 1.0)
    vars(causal_lm)["config"] = config
    kinds = [(step.kind, step.path[-1] if step.path else "") for step in flow_of(causal_lm).steps]
    if not kinds:
        return {}
    if len(kinds) == 1 and kinds[0][0] == "over":
        return {"divisor": kinds[0][1]}
    if [kind for kind, _ in kinds] == ["over", "tanh", "times"] and kinds[0][1] == kinds[2][1]:
        return {"softcap": kinds[0][1]}
    raise NotServed(f"{type(model).__name__} does something else to its logits than a row can say: {kinds}")


def vision_of(package: Any, model: Any, decoder: Any) -> Any:
    """The `Vision` of a model whose decoder has no causal LM of its own."""
    argument_names = part(package, "family.probes").argument_names
    families, known = part(package, "family.families"), part(package, "model.vision").ARGUMENTS
    former = {"cache": "past_key_values"}
    names = tuple(former.get(name, name) for name in argument_names(type(model).forward))
    usual = tuple(name for name in known if name != "output_router_logits" or name in names)
    deepstack = "deepstack_visual_embeds" in argument_names(type(decoder).forward)
    return families.Vision(type(model).__name__, () if names == usual else names, deepstack=deepstack)


def texts_of(package: Any, family: Any) -> list[str]:
    """The names of the texts that a row relies on: forwards, the methods of their classes that they call, functions of the rotary
    embedding."""
    accounted = part(package, "family.accounted")
    tree = ast.parse(transformers_texts.installed_source(family.modeling))
    names = [*accounted.accounted(family), family.decoder or f"{family.prefix}Model"]
    found = []
    for name in dict.fromkeys(names):
        node = next((node for node in tree.body if getattr(node, "name", None) == name), None)
        methods = {each.name for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef)}
        found += [f"{name}.forward", *(f"{name}.{each}" for each in sorted(methods & accounted.reads(tree, name)))]
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [*found, *(name for name in (*CALLED_BY_NAME, *family.position_scale[:1]) if name in functions)]


def written(family: Any) -> str:
    """A row as it stands in a file of rows, with the fields that differ from Llama's."""
    defaults = type(family)._field_defaults
    said = [f"{name}={value!r}" for name, value in family._asdict().items() if name in defaults and value != defaults[name]]
    folder = family.modeling.split(".")[2]
    return f'row("{family.model}", "{family.prefix}", "{folder}"' + "".join(f", {each}" for each in said) + ")"


def model_of(module: str, changes: Mapping[str, Any]) -> Any:
    """The model without memory whose head is in a module of transformers, without a vision tower where there is one without."""
    import transformers

    for table in TABLES:
        kinds = {kind: name for kind, name in names_of(table).items() if getattr(transformers, name, None) is not None}
        found = [(kind, name) for kind, name in kinds.items() if getattr(transformers, name).__module__ == module]
        for kind, name in sorted(found, key=lambda each: not each[1].endswith("ForCausalLM")):
            return built(kind, name, changes)
    raise SystemExit(f"no type of transformers' lists of causal LMs, or of models of images and text, is in {module}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row and what is left out of it; 1 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="transformers' modeling module of the family")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of the configuration")
    parser.add_argument("--add", action="store_true", help="record the texts in every tested release")
    given = parser.parse_args(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SOURCES))
    package = importlib.import_module("decoders")
    changes = {name: json.loads(value) for name, _, value in (each.partition("=") for each in given.set)}
    try:
        found = row_of_model(package, model_of(given.module, changes))
    except part(package, "parts.facts").NotServed as error:
        print(f"no row: {error}")
        return 1
    print(written(found.family))
    for name, why in found.called.items():
        print(f"{name} is called as the module that it is: {why}")
    names = texts_of(package, found.family)
    for release in transformers_texts.tested():
        source = transformers_texts.source_in_wheel(release)(found.family.modeling)
        others = transformers_texts.fingerprints(source, names)
        here = transformers_texts.fingerprints(transformers_texts.installed_source(found.family.modeling), names)
        differ = [name for name in names if others[name] != here[name]]
        if differ:
            print(f"{release} says otherwise: {', '.join(differ)}")
    if given.add:
        return transformers_texts.main(["--add", found.family.modeling, *names])
    return 0


if __name__ == "__main__":
    sys.exit(main())
