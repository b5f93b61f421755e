"""The table of what is served of every type that transformers lists as a causal LM, or as a model of images and text.

`python -m tools.family_loss` prints it, and `--write docs/families.md` puts it there. Each type is built of its default configuration,
without memory; what is said of it is what `kernelize` and `explain` of `bastile`, which has the rows of all packages, do and say.
"""

import argparse
import importlib
import os
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "packages" / "decoders" / "torch-ext"
START = "## Of each type\n\n"  # what follows it in the document is written here
PART = "loss without logits"
TABLES = {"causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "images and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"}


HALF_A_HEAD = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
# What the defaults of configurations leave out, as released models have it.
MISSING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 128}),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}),
    "nemotron": {"num_key_value_heads": 8},
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), {"head_dim": 128, "rope_parameters": HALF_A_HEAD}),
    "qwen3_omni_moe_thinker": {"head_dim": 128},
}
OPERATIONS = "RMSNorm", "MLP", "rotary embedding"
# What may become of a type's layers, the most first.
LEVELS = {
    "whole": "layers whole",
    "called": "layers, with parts that are called",
    "operations": "single operations of its layers",
    "": "nothing of its layers",
}


class Found(NamedTuple):
    """How a type of model is served. level: a key of `LEVELS`; row: whether a row of the table serves its layers, instead of what was read
    of them; layers: why a part of its layers is called, or they are not served. loss: whether its loss needs no logits, and else `reason`
    says why it does; read: whether it is read from the forward. built: whether it could be built, else `reason` says why not."""

    table: str
    kind: str
    reason: str
    level: str = ""
    row: bool = False
    layers: tuple[str, ...] = ()
    loss: bool = False
    read: bool = False
    built: bool = True


def names_of(table: str) -> dict[str, str]:
    """The class's name by the type of the model. table: a key of `TABLES`."""
    from transformers.models.auto import modeling_auto

    return {kind: name if isinstance(name, str) else name[0] for kind, name in getattr(modeling_auto, TABLES[table]).items()}


def config_of(kind: str, cls: Any) -> Any:
    """The default configuration for a class, with what that leaves out; of a type that stands for a model with towers, that of its text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, wanted = CONFIG_MAPPING[kind](), cls.config_class
    parts = (getattr(config, name, None) for name in ("text_config", "decoder"))
    config = config if isinstance(config, wanted) else next((part for part in parts if isinstance(part, wanted)), config)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    for name, value in MISSING.get(kind, {}).items():
        setattr(config.get_text_config(), name, value)
    return config


def built(kind: str, name: str, changes: Mapping[str, Any] = {}) -> Any:
    """A model of the default configuration, with what that leaves out and some changes, without memory. Raises whatever its class
    raises."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    config = config_of(kind, cls)
    for changed, value in changes.items():
        setattr(config, changed, value)
    with torch.device("meta"):
        return cls(config)


def found_of(package: Any, table: str, kind: str, name: str) -> Found:
    """Tells how one type is served."""
    try:
        model = built(kind, name)
    except Exception as error:  # a default that does not fit itself, or a library that is not installed
        return Found(table, kind, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", built=False)
    try:
        package.kernelize(model)
    except (TypeError, RuntimeError):  # nothing of it is served, or not all of a family
        pass
    try:
        rows = package.explain(model).rows
    except TypeError:
        rows = ()
    loss = next((row for row in rows if row.part == PART), None)
    read = any("_bastile_shape" in vars(module) for module in model.modules())
    without = f"{name} has no loss of its labels' tokens, or no head that it names"
    of_row = not any(row.part.startswith("read: ") for row in rows)
    level, layers = level_of(rows)
    return Found(table, kind, loss.reason if loss else without, level, of_row, layers, bool(loss and loss.fused), read)


def level_of(rows: Any) -> tuple[str, tuple[str, ...]]:
    """(a key of `LEVELS`, why parts of layers are called or the layers are not served) by the table of `explain`."""
    called = tuple(f"{row.part}: {row.reason}" for row in rows if row.code == "called" and row.part != PART)
    left = tuple(row.reason for row in rows if row.part == "decoder layer")
    others = tuple(f"some layers: {row.reason}" for row in rows if row.part.startswith("layers of ") and not row.fused)
    if called or any(row.fused and row.part.startswith("norm, ") for row in rows):
        return "called" if called or others else "whole", (*called, *left, *others)
    return "operations" if any(row.fused and row.part in OPERATIONS for row in rows) else "", left


def all_found(package: Any, kinds: list[str] | None = None) -> list[Found]:
    """Tells it of the types in `kinds`, or of all."""
    return [
        found_of(package, table, kind, name) for table in TABLES for kind, name in names_of(table).items() if not kinds or kind in kinds
    ]


def table_of(found: list[Found]) -> str:
    """The tables as Markdown."""
    import transformers

    lines = [f"Of transformers {transformers.__version__}:", ""]
    levels = list(LEVELS.values())
    lines += [f"| | types | built here | {' | '.join(levels)} | loss without logits |", "|---|---|---|" + "---|" * len(levels) + "---|"]
    for table in TABLES:
        of_table = [each for each in found if each.table == table and each.built]
        counts = Counter(each.level for each in of_table)
        numbers = [sum(each.table == table for each in found), len(of_table), *map(counts.get, LEVELS), sum(each.loss for each in of_table)]
        lines.append(f"| {table} | {' | '.join(str(number or 0) for number in numbers)} |")
    lines += ["", "| served | by | types |", "|---|---|---|"]
    for level, said in LEVELS.items():
        for by, row in (("a row", True), ("what was read", False)) if level in ("whole", "called") else (("", None),):
            for loss in (True, False):
                of_level = [each for each in found if each.built and (each.level, each.loss) == (level, loss)]
                kinds = [each.kind for each in of_level if row in (None, each.row)]
                alone = "the loss alone" if loss else "nothing"
                also = f"{said}{', and the loss' if loss else ''}" if level else alone
                lines += [f"| {also} | {by} | {', '.join(dict.fromkeys(kinds))} |"] if kinds else []
    lines += by_reason("calls, or leaves its layers", [(each.kind, why) for each in found if each.built for why in each.layers])
    lines += by_reason("makes logits", [(each.kind, each.reason) for each in found if each.built and not each.loss])
    unbuilt = dict.fromkeys(each.kind for each in found if not each.built)
    said = f"Not built here, by the default configuration alone: {', '.join(unbuilt)}."
    lines += ["", *textwrap.wrap(said, 140, break_on_hyphens=False)] if unbuilt else []
    return "\n".join(lines) + "\n"


def by_reason(title: str, pairs: list[tuple[str, str]]) -> list[str]:
    """A table of types by a reason, which has no number of a line. pairs: (type, reason)."""
    reasons: dict[str, dict[str, None]] = {}
    for kind, why in pairs:
        reason = re.sub(r",? in line \d+", "", why).replace("|", "\\|")
        reason = re.sub(r"^\w+ has no (module|rotary_emb)", r"it has no \1", re.sub(r"(^|: )\w+\.forward ", r"\1its forward ", reason))
        reasons.setdefault(reason, {})[kind] = None
    return ["", f"| {title} | why |", "|---|---|", *(f"| {', '.join(kinds)} | {reason} |" for reason, kinds in reasons.items())]


def main(arguments: list[str] | None = None) -> None:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(prog="python -m tools.family_loss", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="types of models, by default all")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    given = parser.parse_args(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "torch-ext"))
    table = table_of(all_found(importlib.import_module("bastile"), given.kinds))
    if given.write is None:
        print(table, end="")
        return
    text = given.write.read_text(encoding="utf-8")
    given.write.write_text(text.partition(START)[0] + START + table, encoding="utf-8")


if __name__ == "__main__":
    main()
