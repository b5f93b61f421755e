"""The table of which models train without logits: every type that transformers lists as a causal LM, or as a model of images and text.

`python -m tools.family_loss` prints it, and `--write docs/families.md` puts it there. Each type is built of its default configuration,
without memory; what is said of it is what `kernelize` and `explain` of `bastile/decoders` do and say.
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

SOURCES = Path(__file__).resolve().parent.parent / "packages" / "decoders" / "torch-ext"
START = "## Of each type\n\n"  # what follows it in the document is written here
PART = "loss without logits"
TABLES = {"causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "images and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"}


class Found(NamedTuple):
    """How a type of model is served. served: "row", or "read" from its forward, or "" where `reason` says why not; built: whether it could
    be built."""

    table: str
    kind: str
    served: str
    reason: str
    built: bool = True


def names_of(table: str) -> dict[str, str]:
    """The class's name by the type of the model. table: a key of `TABLES`."""
    from transformers.models.auto import modeling_auto

    return {kind: name if isinstance(name, str) else name[0] for kind, name in getattr(modeling_auto, TABLES[table]).items()}


def config_of(kind: str, cls: Any) -> Any:
    """The default configuration for a class; of a type that stands for a model with towers, that of its text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, wanted = CONFIG_MAPPING[kind](), cls.config_class
    parts = (getattr(config, name, None) for name in ("text_config", "decoder"))
    config = config if isinstance(config, wanted) else next((part for part in parts if isinstance(part, wanted)), config)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def built(kind: str, name: str, changes: Mapping[str, Any] = {}) -> Any:
    """A model of the default configuration with some changes, without memory. Raises whatever its class raises."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    config = config_of(kind, cls)
    for changed, value in changes.items():
        setattr(config, changed, value)
    with torch.device("meta"):
        return cls(config)


def found_of(package: Any, table: str, kind: str, name: str) -> Found:
    """Tells how the loss of one type is computed."""
    try:
        model = built(kind, name)
    except Exception as error:  # a default that does not fit itself, or a library that is not installed
        return Found(table, kind, "", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", built=False)
    try:
        package.kernelize(model)
    except (TypeError, RuntimeError):  # nothing of it is served, or not all of a family
        pass
    try:
        row = next((row for row in package.explain(model).rows if row.part == PART), None)
    except TypeError:
        row = None
    if row is None:
        return Found(table, kind, "", f"{name} has no loss of its labels' tokens, or no head that it names")
    of_row = not any("_bastile_shape" in vars(module) for module in model.modules())
    return Found(table, kind, ("row" if of_row else "read") if row.fused else "", row.reason)


def all_found(package: Any, kinds: list[str] | None = None) -> list[Found]:
    """Tells it of the types in `kinds`, or of all."""
    return [
        found_of(package, table, kind, name) for table in TABLES for kind, name in names_of(table).items() if not kinds or kind in kinds
    ]


def table_of(found: list[Found]) -> str:
    """The table as Markdown."""
    import transformers

    lines = [f"Of transformers {transformers.__version__}:", ""]
    lines += ["| | types | built here | loss without logits | of a row | read from the forward |", "|---|---|---|---|---|---|"]
    for table in TABLES:
        of_table = [each for each in found if each.table == table]
        counts = Counter(each.served for each in of_table)
        built_here, served = sum(each.built for each in of_table), counts["row"] + counts["read"]
        lines.append(f"| {table} | {len(of_table)} | {built_here} | {served} | {counts['row']} | {counts['read']} |")
    lines += ["", "| makes logits | why |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for each in found:
        if not each.served and each.built:
            reason = re.sub(r",? in line \d+", "", each.reason).replace("|", "\\|")
            reasons.setdefault(re.sub(r"^\w+\.forward ", "its forward ", reason), []).append(each.kind)
    lines += [f"| {', '.join(dict.fromkeys(kinds))} | {reason} |" for reason, kinds in reasons.items()]
    unbuilt = dict.fromkeys(each.kind for each in found if not each.built)
    said = f"Not built here, by the default configuration alone: {', '.join(unbuilt)}."
    lines += ["", *textwrap.wrap(said, 140, break_on_hyphens=False)] if unbuilt else []
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(prog="python -m tools.family_loss", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="types of models, by default all")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    given = parser.parse_args(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(SOURCES))
    table = table_of(all_found(importlib.import_module("decoders"), given.kinds))
    if given.write is None:
        print(table, end="")
        return
    text = given.write.read_text(encoding="utf-8")
    given.write.write_text(text.partition(START)[0] + START + table, encoding="utf-8")


if __name__ == "__main__":
    main()
