"""Numbers within the sentences of a document: `<!-- number: speed qwen3_step 512 -->1.35 ×<!-- /number -->` is made from the results.

    speed KERNEL TOKENS [PROVIDER [PEER]]
                                    the fastest peer's time, or that of this one, over that of Bastile, or of one of its forms
    operation KERNEL MODE X         the same of an operation
    less_memory KERNEL TOKENS       how much less memory Bastile takes than the leanest peer
    longest KERNEL PROVIDER         the most tokens that a provider's step was measured at
    longest_peer KERNEL             the same of the best peer

After them stand conditions on the rows, as model=qwen3_0.6b; without them it is the model of the suite, and of steps with all its layers
or else as many as were measured.
A quantity outside of tables, code and such marks is one that no row has.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from .markdown import by_provider, peers_of, select, stamp, times_faster
from .providers import is_ours
from .records import Row
from .step_tables import leanest, parts_of
from .suites import QWEN3

NUMBER = re.compile(r"(<!-- number: (.*?) -->)(.*?)(<!-- /number -->)", re.DOTALL)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
RATES = r"[GT]B/s|TFLOPS|TFLOP/s|tokens(?:/s| a second| per second)"
UNITS = rf"(?:%|×(?!\s*\d)|x\b(?!\s*\d)|-?fold\b|percent\b|times (?:as|faster|less)\b|(?:µs|us|ms|GiB|{RATES})\b)"
QUANTITY = re.compile(rf"(?<![\w.])\d[\d.,]*\s*{UNITS}")


class Said(NamedTuple):
    """Holds the text of a sentence and the rows that it compares."""

    text: str
    rows: tuple[Row, ...] = ()


def _times_faster(found: dict[str, Row], provider: str = "bastile") -> Said:
    text = times_faster(found, provider)
    return Said(text, (found[next(iter(peers_of(found)))], found[provider]) if text else ())


def _speed(rows: list[Row], tokens: str, provider: str = "bastile", peer: str = "") -> Said:
    found = parts_of(select(rows, x_value=tokens))[0]
    return _times_faster({name: row for name, row in found.items() if name in (provider, peer)} if peer else found, provider)


def _operation(rows: list[Row], mode: str, x: str) -> Said:
    return _times_faster(by_provider(select(rows, metric_name="speed", kernel_operation_mode=mode, x_value=x)))


def _less_memory(rows: list[Row], tokens: str) -> Said:
    memory = parts_of(select(rows, x_value=tokens))[1]
    ours, peer = memory.get("bastile"), leanest(memory)
    if not (ours and peer and ours.y_value_50 and peer.y_value_50):
        return Said("")
    return Said(f"{1 - ours.y_value_50 / peer.y_value_50:.0%}", (peer, ours))


def _lengths(rows: list[Row]) -> dict[str, int]:
    fits = [row for row in select(rows, metric_name="step_time") if row.y_value_50]
    return {p: max(int(row.x_value) for row in fits if row.kernel_provider == p) for p in by_provider(fits)}


def _longest(rows: list[Row], provider: str) -> Said:
    found = _lengths(rows)
    return Said(f"{found[provider]:,}" if provider in found else "")


def _longest_peer(rows: list[Row]) -> Said:
    return Said(f"{max((n for p, n in _lengths(rows).items() if not is_ours(p)), default=0):,}")


KINDS: dict[str, Callable[..., Said]] = {
    "speed": _speed,
    "operation": _operation,
    "less_memory": _less_memory,
    "longest": _longest,
    "longest_peer": _longest_peer,
}


def deepest(rows: list[Row]) -> list[Row]:
    """Return the steps of a model with all its layers, or else with the most that were measured."""
    layers = {row.config["layers"] for row in rows}
    return select(rows, layers=None if None in layers else max(layers, default=None))


def said(text: str, rows: list[Row]) -> Said:
    """Return what the results say. text: between "number:" and the end of its mark. Raise ValueError for what the results cannot say."""
    kind, kernel, *rest = text.split()
    conditions = {"model": QWEN3.model} | dict(word.split("=") for word in rest if "=" in word)
    arguments = [word for word in rest if "=" not in word]
    rows = select(rows, kernel_name=kernel, **conditions)
    found = KINDS[kind](deepest(rows) if kind != "operation" else rows, *arguments) if kind in KINDS else Said("")
    if not found.text:
        raise ValueError(f"number is {text!r}, which no row of the results says; expected one of {', '.join(KINDS)}, a kernel and tokens")
    return found


def number_of(text: str, rows: list[Row]) -> str:
    """Return the number of a mark. text, Raises: as `said`."""
    return said(text, rows).text


def apart(text: str, rows: list[Row]) -> list[str]:
    """Return the marks of a document that compare rows of several commits or hosts: a sentence has no notes that could say so."""
    return [spec for _, spec, *_ in NUMBER.findall(text) if len({stamp(row) for row in said(spec, rows).rows}) > 1]


def filled(text: str, rows: list[Row]) -> str:
    """Return a document with all its numbers made anew."""
    return NUMBER.sub(lambda mark: f"{mark[1]}{number_of(mark[2], rows)}{mark[4]}", text)


def stale(text: str, rows: list[Row]) -> list[str]:
    """Return the marks of a document whose numbers are not what the results say."""
    return [spec for _, spec, shown, _ in NUMBER.findall(text) if shown != number_of(spec, rows)]


def unsupported(text: str) -> list[str]:
    """Return the quantities of a document's sentences that no mark has. text: without its tables."""
    return [found[0] for found in QUANTITY.finditer(NUMBER.sub("", CODE.sub("", text)))]
