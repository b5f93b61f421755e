"""The tables of model families that `bastile/decoders` and `bastile/moe` serve, made of their rows.

`python -m benchmark.tables --write packages/decoders/CARD.md` writes one.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "packages" / "decoders" / "torch-ext"  # whose folder shared has the rows of all packages
PLAIN = (True, False, True, False)  # which of its norms a layer of Llama's has
CALLED = {"self_attn": "attention", "mlp": "its MLP"}


def rows(served: str = "dense") -> tuple:
    """Returns the rows of a package, read from its sources. served: their file."""
    sys.path.insert(0, str(SOURCES))
    try:
        return importlib.import_module(f"decoders.shared.rows.{served}").SERVED.rows
    finally:
        sys.path.remove(str(SOURCES))


def beside_llama(family: Any) -> str:
    """Says what a family's layer and head have that Llama's have not."""
    norms, said = family.norms, []
    if tuple(name is not None for name in norms) != PLAIN:
        said.append("norms of the branches" if norms.inputs is None else "norms in front of the branches and of them")
    if family.centred:
        said.append(f"LayerNorms{f' with {family.offset:g} + weight' if family.offset else ''}")
    elif family.offset:
        said.append(f"norms with {family.offset:g} + weight")
    elif family.rounds == "last":
        said.append("norms that round last")
    after = " after the rotary embedding" if family.turned_first else ""
    said += {"head": [f"a norm of each head of q and k{after}"], "whole": ["a norm of all of q and of k"]}.get(family.qk_norm, [])
    said += ["packed gate and up"] if family.gated and len(family.gate_up) == 1 else []
    said += ["an MLP without a gate"] if not family.gated else []
    said += ["packed q, k and v"] if len(family.qkv) == 1 else []
    sparse = family.sparse
    said += [f"a router with experts{', and one more that every token goes to' if sparse.shared else ''}"] if sparse else []
    said += {"gelu_tanh": ["GELU"], "gelu": ["GELU"], "relu2": ["ReLU squared"]}.get(family.activation, [])
    said += ["rotary embedding of neighbours"] if family.rotary == "pairs" else []
    said += ["rotary embedding of a part of a head"] if family.partial else []
    said += ["layers without rotary embedding"] if family.turned or family.windowed else []
    absent = dict.fromkeys(path.rpartition(".")[2] for path in family.absent)
    said += [f"layers with {' or '.join(absent)} left as they are by `apply`, and read by `kernelize`"] if absent else []
    said += ["multiplied branches"] if family.multiplier else []
    said += ["queries scaled by position"] if family.position_scale else []
    said += ["a vision tower, left as it is"] if family.whole else []
    options = {option[0] for option in family.options}
    said += ["windows"] if "sliding_window" in options else []
    said += ["capped scores"] if "softcap" in options else []
    said += ["scaled logits"] if family.divisor else []
    said += ["capped logits"] if family.softcap else []
    uncapped = next((tower for tower in family.towers if family.softcap and not tower.capped), None)
    since = ".".join(map(str, uncapped.capped_since)) if uncapped else ""
    cap = f", whose logits have a cap since transformers {since}," if since else ", whose logits have no cap," if uncapped else ""
    which = "the other classes" if len(family.towers) > 1 else "the second class"
    said += [f"in {which}{cap} a vision tower, left as it is"] if family.towers else []
    said += [f"{CALLED[name]} called as it is, and what lies around it fused" for name in family.called]
    return ", ".join(said) or "–"


def heads(family: Any) -> str:
    """Says in how many kernels the queries and keys get from the projection to attention."""
    scaled = "; their scale in PyTorch" if family.position_scale else ""
    if "self_attn" in family.called:
        return "transformers' own"
    if family.qk_norm == "whole":
        return f"norms and rotary embedding in one kernel, in bf16 with the heads of released models; else a kernel for each{scaled}"
    if family.turned_first:
        return "rotary embedding in one kernel, then a norm's kernel for q and for k"
    lengths = " of 128 or 256" if family.offset else " of 128"
    if family.qk_norm == "head":
        return f"norms and rotary embedding in one kernel, heads{lengths}"
    return f"rotary embedding in one kernel{scaled}"


def moe_table() -> str:
    """Returns the table of families with experts."""
    return family_table("moe")


def family_table(served: str = "dense") -> str:
    """Returns a table as Markdown. served: the file of its rows."""
    lines = ["| family | transformers' class | beside what Llama's has | queries and keys |", "|---|---|---|---|"]
    for own in rows(served):
        family = own.family
        classes = ", ".join(f"`{name}`" for name in (family.causal_lm(), *(tower.name for tower in family.towers)))
        lines.append(f"| {family.model} | {classes} | {beside_llama(family)} | {heads(family)} |")
    return "\n".join(lines)
