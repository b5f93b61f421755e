"""Numbers within the sentences of a document: `<< speed("qwen3_step", 8192) >>` in its template is made from the results.

model is by default that of the suite; of steps, those with all its layers count, or else with as many as were measured.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from .markdown import by_provider, peers_of, select, stamp, times_faster
from .providers import is_ours
from .records import Row
from .step_tables import leanest, parts_of
from .suites import QWEN3

NO_SENTENCE = re.compile(r"^```.*?^```$|`[^`\n]*`|<<.*?>>", re.DOTALL | re.MULTILINE)  # code, and what is made from the results
RATES = r"[GT]B/s|TFLOPS|TFLOP/s|tokens(?:/s| a second| per second)"
UNITS = rf"(?:%|×(?!\s*\d)|x\b(?!\s*\d)|-?fold\b|percent\b|times (?:as|faster|less)\b|(?:µs|us|ms|GiB|{RATES})\b)"
QUANTITY = re.compile(rf"(?<![\w.])\d[\d.,]*\s*{UNITS}")


class Said(NamedTuple):
    """Holds the text of a number, "" where no row says it, and the rows that it compares."""

    text: str
    rows: tuple[Row, ...] = ()


def _steps(rows: list[Row], kernel: str, model: str) -> list[Row]:
    """Return the steps of a model with all its layers, or else with the most that were measured."""
    rows = select(rows, kernel_name=kernel, model=model)
    layers = {row.config["layers"] for row in rows}
    return select(rows, layers=None if None in layers else max(layers, default=None))


def _times_faster(found: dict[str, Row], ours: str = "bastile") -> Said:
    text = times_faster(found, ours)
    return Said(text, (found[next(iter(peers_of(found)))], found[ours]) if text else ())


def speed(rows: list[Row], kernel: str, tokens: int, ours: str = "bastile", peer: str = "", model: str = QWEN3.model) -> Said:
    """Return the time of the fastest peer, or of `peer`, over that of Bastile, or of one of its forms, for a training step."""
    times, _ = parts_of(select(_steps(rows, kernel, model), x_value=str(tokens)))
    return _times_faster({name: row for name, row in times.items() if name in (ours, peer)} if peer else times, ours)


def operation(rows: list[Row], kernel: str, mode: str, x: int | str, model: str = QWEN3.model) -> Said:
    """Return the time of the fastest peer over that of Bastile for an operation."""
    wanted = {"metric_name": "speed", "kernel_operation_mode": mode, "x_value": str(x)}
    return _times_faster(by_provider(select(rows, kernel_name=kernel, model=model, **wanted)))


def memory(rows: list[Row], kernel: str, tokens: int, ours: str = "bastile", model: str = QWEN3.model) -> Said:
    """Return how much less or more memory a training step takes with Bastile, or one of its forms, than with the leanest peer."""
    _, taken = parts_of(select(_steps(rows, kernel, model), x_value=str(tokens)))
    mine, peer = taken.get(ours), leanest(taken)
    if not (mine and peer and mine.y_value_50 and peer.y_value_50):
        return Said("")
    less = 1 - mine.y_value_50 / peer.y_value_50
    return Said(f"{abs(less):.0%} {'less' if less >= 0 else 'more'}", (peer, mine))


def peak(rows: list[Row], kernel: str, tokens: int, ours: str = "bastile", model: str = QWEN3.model) -> Said:
    """Return the most memory that a training step takes with Bastile, or one of its forms, in GiB."""
    _, taken = parts_of(select(_steps(rows, kernel, model), x_value=str(tokens)))
    mine = taken.get(ours)
    return Said(f"{mine.y_value_50:.1f} GiB", (mine,)) if mine and mine.y_value_50 else Said("")


def longest(rows: list[Row], kernel: str, provider: str = "", model: str = QWEN3.model) -> Said:
    """Return the most tokens that a step of a provider, or of the best peer, was measured at."""
    fits = [row for row in select(_steps(rows, kernel, model), metric_name="step_time") if row.y_value_50]
    tokens = [int(row.x_value) for row in fits if (row.kernel_provider == provider if provider else not is_ours(row.kernel_provider))]
    return Said(f"{max(tokens):,}" if tokens else "")


def numbers(rows: list[Row], apart: list[str]) -> dict[str, Callable[..., str]]:
    """Return the functions above, of these rows, by name; each raises ValueError where no row says the number.

    apart: gets a complaint for each number that compares rows of several commits or hosts: a sentence has no notes that could say so.
    """

    def called(function: Callable[..., Said], *arguments, **options) -> str:
        what = f"{function.__name__}({', '.join([*map(repr, arguments), *(f'{name}={value!r}' for name, value in options.items())])})"
        found = function(rows, *arguments, **options)
        if not found.text:
            raise ValueError(f"{what} is a number that no row of the results says; measure it, or correct the kernel, tokens or model")
        if len({stamp(row) for row in found.rows}) > 1:
            apart.append(f"{what} compares rows of several commits or hosts")
        return found.text

    return {function.__name__: functools.partial(called, function) for function in (speed, operation, memory, peak, longest)}


def unsupported(text: str) -> list[str]:
    """Return the quantities in a document's sentences that are not made from results. text: its template."""
    return [found[0] for found in QUANTITY.finditer(NO_SENTENCE.sub("", text))]
