"""Which passes get graphs where lengths vary: those of the kinds that come most often."""

from collections import Counter
from typing import NamedTuple, Optional, Set

__all__ = ["GraphSizes"]

MORE = 2  # times as often has a kind to come as the rarest one with graphs, to take its place
KNOWN = 4096  # kinds that are counted; beyond, all counts are halved


class Choice(NamedTuple):
    """chosen: whether a kind may have graphs; instead_of: the kind that has to give its own up for it, None for none."""

    chosen: bool
    instead_of: Optional[tuple] = None


class GraphSizes:
    """Counts passes by their kinds. limit: kinds that may have graphs at a time; nbytes: of the memory that all graphs may take."""

    def __init__(self, limit: int, nbytes: int):
        self.limit, self.nbytes = limit, nbytes
        self.passes: Counter = Counter()
        self.chosen: Set[tuple] = set()

    def choose(self, key: tuple) -> Choice:
        """Counts a pass of a kind."""
        if key not in self.passes and len(self.passes) >= KNOWN:
            self.passes = Counter({kind: max(n // 2, 1) for kind, n in self.passes.items() if n > 1 or kind in self.chosen})
        self.passes[key] += 1
        count, rarest = self.passes[key], None
        if key in self.chosen:
            return Choice(True)
        if len(self.chosen) >= self.limit:
            rarest = min(self.chosen, key=self.passes.__getitem__)
            if count < MORE * self.passes[rarest]:
                return Choice(False)
            self.chosen.remove(rarest)
        self.chosen.add(key)
        return Choice(True, rarest)
