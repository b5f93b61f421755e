"""What a run prints."""

import torch

from .operation import Work
from .providers import FLOOR, is_ours
from .records import Row


def log(text: str = "") -> None:
    """Print a line at once."""
    print(text, flush=True)


def message(error: BaseException) -> str:
    """Return an exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")


def print_speeds(work: Work, mode: str, rows: list[Row]) -> None:
    """Print one line a provider: time, rate, share of the floor, how many times faster than the best of the peers, memory."""
    speed = {r.kernel_provider: r for r in rows if r.metric_name == "speed"}
    memory = {r.kernel_provider: r.y_value_50 for r in rows if r.metric_name == "memory"}
    floor = speed[FLOOR].y_value_50 if FLOOR in speed else None
    peers = [r.y_value_50 for p, r in speed.items() if not is_ours(p) and p != FLOOR and r.y_value_50]
    log(f"  {mode:<16}{'us':>10}{'20%':>10}{'80%':>10}{'rate':>14}{'of floor':>10}{'vs best peer':>14}{'MiB':>9}")
    for provider, row in speed.items():
        if row.y_value_50 is None:
            log(f"  {provider:<16}{row.error}")
            continue
        us = row.y_value_50
        share = f"{floor / us:.1%}" if floor else ""
        versus = f"{min(peers) / us:.2f} x" if peers and provider != FLOOR else ""
        mib = f"{memory[provider]:.0f}" if provider in memory else ""
        log(f"  {provider:<16}{us:>10.1f}{row.y_value_20:>10.1f}{row.y_value_80:>10.1f}{work.rate(us):>14}{share:>10}{versus:>14}{mib:>9}")
