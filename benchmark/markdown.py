"""Parts of Markdown tables: which rows, how numbers are written, and why there is none."""

from collections.abc import Callable, Iterable

from . import models, providers
from .providers import FLOOR, PROVIDERS, is_ours
from .records import Row

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


def markdown(head: list[str], body: list[list[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Notes:
    """Footnotes: why something was not measured."""

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
        text = f"{providers.title(row.kernel_provider)}: {row.error.replace('|', '/')}"
        if text not in self.texts:
            self.texts.append(text)
        return f"fails [{self.texts.index(text) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n\n[{n}] {text}" for n, text in enumerate(self.texts, 1))


def origin(rows: list[Row]) -> str:
    """Return what the numbers were measured with: all versions, of ours in the order of their measurements, and the newest date."""
    rows = sorted(rows, key=lambda row: row.timestamp)
    known = {"driver": "driver", "torch": "torch", "transformers": "transformers", "liger": "liger-kernel"}
    found = {title: sorted({row.config[name] for row in rows if row.config.get(name)}) for name, title in known.items()}
    parts = [rows[-1].gpu_name, *(f"{title} {' and '.join(versions)}" for title, versions in found.items() if versions)]
    ours = dict.fromkeys(row.version for row in rows)
    return f"\n\n<sub>{', '.join(parts)}; Bastile {', '.join(ours)}, {rows[-1].timestamp[:10]}.</sub>"


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


def times_faster(found: dict[str, Row], provider: str = "bastile") -> str:
    """Return the fastest peer's time over that of Bastile, or of one of its forms."""
    peers = [r.y_value_50 for p, r in found.items() if not is_ours(p) and p != FLOOR and r.y_value_50]
    mine = found.get(provider)
    return f"{min(peers) / mine.y_value_50:.2f} ×" if peers and mine and mine.y_value_50 else ""
