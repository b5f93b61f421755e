"""Prints the row of a model family, made by comparing its forwards with those of families that are rows already.

    python -m tools.family_row transformers.models.seed_oss.modeling_seed_oss        prints the row, and what to add to the tests
    python -m tools.family_row transformers.models.seed_oss.modeling_seed_oss --add  and records the texts of its forwards

A part whose text is that of a row's, up to the names of classes, local variables and attributes, has the fields of that row, with its own
names. Of any other part the lines are shown that the nearest text of a row has not; such attention, or such an MLP, is `called`.
"""

import argparse
import ast
import difflib
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools import transformers_texts
from tools.family_table import rows
from tools.family_text import Module, Text, text_of
from tools.transformers_texts import installed_source

SERVED = ("dense", "moe", "qwen3", "gpt_oss")
ROTARY = ("apply_rotary_pos_emb", "rotate_half")
# The fields of a row that the text of each part decides, beside the paths in `absent`.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "norm": ("offset", "rounds"),
    "rotary": ("rotary", "partial", "narrow", "half_angles"),
    "attention": ("qk_norm", "qkv", "turned", "options", "position_scale"),
    "mlp": ("gate_up", "down", "act"),
    "layer": ("norms", "multiplier", "dropouts", "block"),
    "causal_lm": ("divisor", "softcap"),
    "experts' block": ("router", "shared"),
    "router": ("by_logits",),
}
NOT_DERIVED = ("model", "towers", "whole", "mixers")  # what is no decoder's, or a name for people
RENAMED = ("norm", "mlp", "layer", "experts' block")  # parts whose attributes may have other names
NEEDED = ("norm", "attention", "layer", "causal_lm")  # parts that every family has
FORMER = {"cache": "past_key_values"}  # of arguments that a release renamed
NO_TEXT = Text("", (), ())
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Derived(NamedTuple):
    """A row. family: of the fields that were derived; unknown: by the part, what differs between the nearest text of a row and its own;
    left: by the class, what its forward reads and the row does not account for; texts: names to record."""

    family: Any
    unknown: Mapping[str, list[str]]
    left: Mapping[str, tuple[str, ...]]
    texts: tuple[str, ...]


def families() -> list[Any]:
    """The rows of all packages whose layers have plain attention."""
    return list({own.family.modeling: own.family for name in SERVED for own in rows(name)}.values())


def classes_of(module: Module, prefix: str) -> dict[str, str]:
    """The class of each part. A layer's block is what it makes beside attention and norms: an MLP, one with experts, or either."""
    made = module.made(f"{prefix}DecoderLayer")
    found = {"norm": f"{prefix}RMSNorm", "attention": f"{prefix}Attention", "layer": f"{prefix}DecoderLayer"}
    found["causal_lm"] = f"{prefix}ForCausalLM"
    for name in (name for attribute, names in made.items() if "norm" not in attribute and attribute != "self_attn" for name in names):
        inner = module.made(name)
        if "experts" in inner:
            router = next((of[0] for attribute, of in inner.items() if attribute in ("gate", "router") and of), "")
            found |= {"experts' block": name, "router": router, "experts": inner["experts"][0]}
        elif name in module.classes and "Dropout" not in name:
            found.setdefault("mlp", name)
    return found


def parts_of(module: Module, prefix: str) -> dict[str, Text]:
    """The text of each part that the module defines."""
    classes = classes_of(module, prefix)
    nodes = {part: [module.method(classes[part])] for part in FIELDS if part in classes}
    nodes["rotary"] = [module.functions.get(name) for name in ROTARY]
    return {part: text_of([node for node in found if node], prefix) for part, found in nodes.items() if any(found)}


@functools.cache
def parts_of_row(modeling: str, prefix: str) -> dict[str, Text]:
    """`parts_of` a module that has a row."""
    return parts_of(Module(modeling), prefix)


def fields_of(part: str, family: Any) -> dict[str, Any]:
    """The fields of a family's row that the text of a part decides, by name."""
    if part in ("experts' block", "router"):
        found = {name: getattr(family.sparse, name) for name in FIELDS[part]}
    else:
        found = {name: getattr(family, name) for name in FIELDS[part]}
    of = {"attention": "self_attn", "experts' block": family.block}.get(part)
    paths = [path for path in family.absent if (path.partition(".")[0] == of if "." in path else part == "layer")]
    return {**found, "absent": tuple(paths)}


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A field's value with other names of attributes."""
    if isinstance(value, tuple):
        made = [renamed(each, names) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return ".".join(names.get(each, each) for each in value.split(".")) if isinstance(value, str) else value


def taken(part: str, text: Text, family: Any, other: Text) -> dict[str, Any] | None:
    """The fields that a part takes from a family's row, with its own names of attributes. None where the two texts differ, or where an
    attribute is renamed that no field of the row names."""
    fields = fields_of(part, family)
    new = {theirs: own for theirs, own in zip(other.names, text.names) if theirs != own}
    said = repr(list(fields.values()))
    may_rename = part in RENAMED and all(part == "norm" or f"'{theirs}'" in said for theirs in new)
    if text.shape != other.shape or (new and not may_rename):
        return None
    return {name: renamed(value, new) for name, value in fields.items()}


def derive(name: str, known: Sequence[Any], prefix: str = "") -> Derived:
    """Makes the row of a module. known: families whose rows may be taken; prefix: of the classes, by default that of a decoder layer."""
    module, found, unknown = Module(name), {"absent": ()}, {}
    prefix = prefix or next(cls.removesuffix("DecoderLayer") for cls in module.classes if cls.endswith("DecoderLayer"))
    others = [(family, parts_of_row(family.modeling, family.prefix)) for family in known if not family.mixers]
    for part, text in parts_of(module, prefix).items():
        same = [(family, texts[part]) for family, texts in others if part in texts and says(part, family)]
        fields = next(filter(None, (taken(part, text, *each) for each in same)), None)
        if fields is not None:
            found |= {**fields, "absent": (*found["absent"], *fields["absent"])}
            continue
        near = max(same, key=lambda each: difflib.SequenceMatcher(None, each[1].lines, text.lines).ratio(), default=(None, NO_TEXT))
        lines = difflib.unified_diff(near[1].lines, text.lines, getattr(near[0], "model", "nothing"), prefix, lineterm="", n=0)
        unknown[part] = [line for line in lines if line[:2] != "@@"]
    classes = classes_of(module, prefix)
    unknown |= {part: [f"{name} has no {classes[part]}"] for part in NEEDED if classes[part] not in module.classes}
    return with_signatures(module, prefix, found, unknown)


def says(part: str, family: Any) -> bool:
    """Tells whether a family's row says what a part computes: one that is called may compute anything."""
    if part in ("experts' block", "router"):
        return family.sparse is not None
    return {"attention": "self_attn", "mlp": family.block}.get(part) not in family.called and (part != "mlp" or family.mlp)


def with_signatures(module: Module, prefix: str, found: dict[str, Any], unknown: Mapping[str, list[str]]) -> Derived:
    """Adds what names and signatures decide, and looks for what no field accounts for."""
    accounted, made = (importlib.import_module(f"decoders.shared.hf.family.{name}") for name in ("accounted", "families"))
    classes, layer = classes_of(module, prefix), module.arguments(f"{prefix}DecoderLayer")
    router, shared, by_logits = (found.pop(name, default) for name, default in (("router", "gate"), ("shared", ""), ("by_logits", False)))
    called = [name for part, name in (("attention", "self_attn"), ("mlp", found.get("block", "mlp"))) if part in unknown]
    found["mlp"] = "mlp" in classes and "mlp" not in unknown
    if found["mlp"]:
        found["mlp_argument"] = module.arguments(classes["mlp"])[1]
        found["mlp_name"] = "" if classes["mlp"] == f"{prefix}MLP" else classes["mlp"]
        found["activation"] = activation(module)
    if "experts" in classes:
        indices = "router_indices" in module.arguments(classes["experts"])
        names = tuple(classes[part] for part in ("experts' block", "router", "experts"))
        found["sparse"] = made.Sparse(names, router, by_logits, shared, indices)
    causal_lm = module.arguments(classes["causal_lm"])
    decoder = module.made(classes["causal_lm"]).get("model", [""])[0]
    found |= {
        "norm_argument": (module.arguments(classes["norm"]) or ["", "hidden_states"])[1], "called": tuple(called),
        "takes": tuple(FORMER.get(name, name) for name in layer[1:]),
        "routed": "output_router_logits" in causal_lm and "use_cache" not in causal_lm,
        "decoder": "" if decoder == f"{prefix}Model" else decoder,
    }  # fmt: skip
    family = made.Family(prefix, module.name, prefix, **found)
    reads = {cls: accounted.reads(module.tree, cls) for cls in accounted.accounted(family) if cls in module.classes}
    texts = [f"{cls}.{name}" for cls, names in reads.items() for name in ("forward", *names) if module.method(cls, name)]
    texts += [f"{cls}.forward" for cls in (decoder, f"{prefix}Attention")] + list(ROTARY)
    return Derived(family, unknown, accounted.unaccounted(reads, accounted.accounted(family)), tuple(dict.fromkeys(texts)))


def activation(module: Module) -> str:
    """The name of an MLP's activation, by the default of the configuration."""
    tree = ast.parse(installed_source(module.name.replace("modeling", "configuration")))
    found = {node.target.id: str(node.value.value) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
             and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant)}  # fmt: skip
    name = found.get("hidden_activation", found.get("hidden_act", "silu"))
    return ACTIVATIONS.get(name, name)


def written(family: Any) -> str:
    """The row as rows/ have it."""
    fields = {name: value for name, value in family._asdict().items() if value != family._field_defaults.get(name, value)}
    options = "".join(f", {name}={value!r}" for name, value in fields.items())
    return f'row("{family.model}", "{family.prefix}", "{family.modeling.split(".")[2]}"{options})'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.family_row", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("module", help="such as transformers.models.seed_oss.modeling_seed_oss")
    parser.add_argument("--prefix", default="", help="of the classes, where a module has several decoder layers")
    parser.add_argument("--add", action="store_true", help="record the texts of its forwards, in every tested release")
    given = parser.parse_args(arguments)
    derived = derive(given.module, [family for family in families() if family.modeling != given.module], given.prefix)
    for part, lines in derived.unknown.items():
        print(f"no row has this {part}:", *lines, sep="\n    ")
    for cls, names in derived.left.items():
        print(f"no field accounts for {', '.join(names)} of {cls}.forward")
    print(written(derived.family))
    if given.add:
        return transformers_texts.main(["--add", given.module, *derived.texts])
    print("then: record its texts (--add), and give it a small model in NAMES or SPARSE, CHANGES and VARIANTS of tests/decoder_families.py")
    return int(bool(derived.unknown.keys() - {"attention", "mlp"} or derived.left))


if __name__ == "__main__":
    sys.exit(main())
