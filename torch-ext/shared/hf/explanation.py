"""The table that `explain` makes: what of a model runs fused, and of the rest why it does not and what to do."""

from typing import Mapping, NamedTuple, Sequence, Tuple

Advice = Sequence[Tuple[str, str]]  # by a part of a reason: what to do about it; the first that is found counts


class Row(NamedTuple):
    """part: of a model; count: how many of it there are; fused: does it run fused; reason: why not, or what holds it back; advice."""

    part: str
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    fused: bool
    reason: str
    advice: str


class Explanation(NamedTuple):
    """What `explain` found: printed, a table."""

    rows: Tuple[Row, ...]

    def __str__(self) -> str:
        table = [("part", "layers", "fused", "why not", "what to do")]
        table += [(row.part, str(row.count), "yes" if row.fused else "no", row.reason, row.advice) for row in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def advice_of(reason: str, advice: Advice) -> str:
    return next((text for part, text in advice if part in reason), "")


def explanation_of(found: Mapping[Tuple[str, str], int], advice: Advice) -> Explanation:
    """Makes the table. found: how many there are of each part with a reason, "" where it runs fused."""
    rows = [Row(part, count, not reason, reason, advice_of(reason, advice) if reason else "") for (part, reason), count in found.items()]
    return Explanation(tuple(rows))
