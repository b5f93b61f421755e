"""Parts of Markdown tables: which rows, how numbers are written, and why there is none."""

from collections import Counter
from collections.abc import Callable, Iterable

from . import models, providers
from .providers import FLOOR, PROVIDERS, is_ours
from .records import Row

ROUNDS = 3  # turns of the providers, each in a new process, that a row of training steps needs to stand without a note
NOT_MEASURED = "*Not measured yet.*"


def select(rows: Iterable[Row], **wanted) -> list[Row]:
    """Return the rows whose columns, or entries of their configuration, are as wanted."""

    def fits(row: Row) -> bool:
        config = row.config
        return all(getattr(row, name, config.get(name)) == value for name, value in wanted.items())

    return [row for row in rows if fits(row)]


def by_provider(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the newest row of each provider and of the floor, in the order of the providers."""
    found = {row.kernel_provider: row for row in rows}
    return {p: found[p] for p in (*PROVIDERS, FLOOR) if p in found}


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the providers that have rows, in their order."""
    return providers.in_order({row.kernel_provider for row in rows})


def in_order(values: Iterable[str]) -> list[str]:
    """Return each value once: numbers by their size, models by theirs, whatever else in front of them by name."""
    names = list(models.SIZES)
    return sorted(set(values), key=lambda v: (int(v), "") if v.isdigit() else (names.index(v) if v in names else 0, v))


class Notes:
    """Footnotes: why something was not measured, or not with the rest."""

    def __init__(self):
        self.texts: list[str] = []

    def cell(self, row: Row | None, show: Callable[[float], str]) -> str:
        """Return a row's median as `show` writes it, or a reference to the note that says why there is none."""
        if row is None:
            return ""
        if row.y_value_50 is not None:
            return show(row.y_value_50)
        if row.error == "out of memory":
            return row.error
        reason = row.error.replace("|", "/")
        return f"fails {self.reference(f'{title(row)}: {reason}')}"

    def reference(self, text: str) -> str:
        """Return a reference to a note, which is added where it is a new one."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n\n[{n}] {text}" for n, text in enumerate(self.texts, 1))


def stamp(row: Row) -> tuple[str, str]:
    """Return what rows that are compared have in common: Bastile's version and the host's processor."""
    return row.version, row.config.get("processor", "")


def rounds_of(row: Row) -> int | None:
    """Return how many turns a provider took, None where that was not recorded."""
    return row.config.get("rounds")


def origin(rows: list[Row]) -> str:
    """Return what rows of one stamp were measured with: every version of the peers, Bastile's, and the newest date."""
    rows = sorted(rows, key=lambda row: row.timestamp)
    known = {
        "driver": "driver",
        "processor": "",
        "torch": "torch",
        "triton": "triton",
        "transformers": "transformers",
        "liger": "liger-kernel",
        "unsloth": "unsloth",
        "trl": "trl",
    }
    found = {title: sorted({row.config[name] for row in rows if row.config.get(name)}) for name, title in known.items()}
    parts = [rows[-1].gpu_name, *(f"{title} {' and '.join(versions)}".strip() for title, versions in found.items() if versions)]
    unknown = "" if any(map(rounds_of, rows)) else " How many rounds the providers took was not recorded."
    return f"\n\n<sub>{', '.join(parts)}; Bastile {rows[-1].version}, {rows[-1].timestamp[:10]}.{unknown}</sub>"


class Table:
    """A table in Markdown: its first column is text, the others are numbers. Each line knows the rows that it shows, so a line that was not
    measured with most of the others, at their commit and on their host, gets a note that says so."""

    def __init__(self, *head: str):
        self.head, self.notes = head, Notes()
        self.lines: list[tuple[list[str], list[Row]]] = []

    def add(self, cells: list[str], rows: Iterable[Row]) -> None:
        """Add a line. rows: all that its cells were made of."""
        self.lines.append((cells, list(rows)))

    def _marked(self, cells: list[str], rows: list[Row], usual: tuple[str, str], recorded: bool) -> list[str]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.timestamp):
            found.setdefault(stamp(row), []).append(row)
        notes = []
        rounds = {rounds_of(row) or 0 for row in rows if row.y_value_50 and (recorded or rounds_of(row))}
        if rounds and min(rounds) < ROUNDS:
            said = " and ".join(str(n or "not recorded") for n in sorted(rounds))
            notes.append(self.notes.reference(f"Rounds: {said}, instead of {ROUNDS}."))
        if set(found) <= {usual}:
            return [" ".join([cells[0], *notes]).strip(), *cells[1:]]
        parts = []
        for (version, processor), mine in found.items():
            who = "" if len(found) == 1 else f"{', '.join(dict.fromkeys(title(row) for row in mine))} "
            parts.append(f"{who}with Bastile {version} on {mine[-1].timestamp[:10]}" + (f", {processor}" if processor else ""))
        notes.append(self.notes.reference(f"Measured apart: {'; '.join(parts)}."))
        return [" ".join([cells[0], *notes]).strip(), *cells[1:]]

    def text(self, remark: str = "") -> str:
        """Return the table, a remark, its notes and what it was measured with; "" for a table without lines."""
        rows = [row for _, mine in self.lines for row in mine]
        if not rows:
            return ""
        stamps = Counter(stamp(row) for row in sorted(rows, key=lambda row: row.timestamp, reverse=True))
        usual = stamps.most_common(1)[0][0]  # of equally many, the newest
        recorded = any(rounds_of(row) for row in rows if stamp(row) == usual)
        body = [self._marked(*line, usual, recorded) for line in self.lines]
        lines = [list(self.head), ["---"] + ["---:"] * (len(self.head) - 1), *body]
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return drawn + (f"\n\n{remark}" if remark else "") + str(self.notes) + origin([row for row in rows if stamp(row) == usual])


Shown = dict[str, dict[str, Row]]  # by metric and provider


def comparison(
    head: tuple[str, ...], cases: Iterable[tuple[tuple[str, ...], list[Row]]], shows: dict[str, Callable[[float], str]],
    floor: tuple[str, ...] = (), compares: dict[str, Callable[[Shown], str]] | str = "vs best peer", remark: str = "",
) -> str:
    """Return a table with a column for each provider, and how much faster Bastile is than the fastest peer.

    head: the titles of the columns before; cases: of each line the cells of these, and its rows; shows: by metric, how numbers are written,
    first of the one that is compared; floor: the titles of the floor's column and of that with Bastile's share of it, where there are any.
    compares: the titles of the last columns, and what is in them, or the title of one with how much faster Bastile is.
    """
    cases, compared = list(cases), next(iter(shows))
    names = columns_of(row for _, rows in cases for row in rows if row.metric_name == compared)
    last = {compares: faster(compared)} if isinstance(compares, str) else compares
    table = Table(*head, *map(providers.title, names), *floor, *last)
    for titles, rows in cases:
        found = {metric: by_provider(select(rows, metric_name=metric)) for metric in shows}
        times = found[compared]
        if not times:
            continue
        cells = [joined(*(table.notes.cell(found[metric].get(p), show) for metric, show in shows.items())) for p in names]
        bare = (table.notes.cell(times.get(FLOOR), shows[compared]), of_floor(times))[: len(floor)]
        line = [*titles, *cells, *bare, *(compare(found) for compare in last.values())]
        table.add(line, [row for each in found.values() for row in each.values()])
    return table.text(remark)


def faster(metric: str, ours: str = "bastile") -> Callable[[Shown], str]:
    """Return what says how much faster one of ours is than the fastest peer."""
    return lambda found: times_faster(found[metric], ours)


def title(row: Row) -> str:
    """Return who a row is of: a provider, or the floor."""
    return providers.title(row.kernel_provider)


def number(value: float) -> str:
    """Return a number with three digits, or as a whole one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(us: float) -> str:
    """Return microseconds in ms."""
    return f"{number(us / 1e3)} ms"


def gibibytes(mib: float) -> str:
    """Return MiB in GiB."""
    return f"{mib / 1024:.2f} GiB"


def joined(*parts: str) -> str:
    """Return the parts of a cell that are not empty."""
    return " · ".join(part for part in parts if part)


def share(part: Row | None, whole: Row | None) -> str:
    """Return part / whole in percent."""
    if part is None or whole is None or not part.y_value_50 or not whole.y_value_50:
        return ""
    return f"{part.y_value_50 / whole.y_value_50:.0%}"


def of_floor(found: dict[str, Row]) -> str:
    """Return the floor's time as a share of Bastile's. Where a provider was faster than the floor, as a copy's time varies by a few
    percent, that provider's is the least that the work needs."""
    least = min((row.y_value_50 for row in found.values() if row.y_value_50), default=None)
    mine = found.get("bastile")
    return f"{least / mine.y_value_50:.0%}" if FLOOR in found and least and mine and mine.y_value_50 else ""


def peers_of(found: dict[str, Row]) -> dict[str, float]:
    """Return the medians of those that are neither ours nor the floor, the fastest first."""
    known = {p: row.y_value_50 for p, row in found.items() if not is_ours(p) and p != FLOOR and row.y_value_50}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def times_faster(found: dict[str, Row], provider: str = "bastile", named: bool = False) -> str:
    """Return the fastest peer's time over that of Bastile, or of one of its forms. named: with that peer's name."""
    peers, mine = peers_of(found), found.get(provider)
    if not peers or mine is None or not mine.y_value_50:
        return ""
    best = next(iter(peers))
    return f"{peers[best] / mine.y_value_50:.2f} ×" + (f" ({providers.title(best)})" if named else "")
