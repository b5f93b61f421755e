"""Where the rows of a mixture of experts are: (token, expert) pairs sorted by expert, all of it on the device."""

from typing import NamedTuple, Tuple

import torch


class Routing(NamedTuple):
    """Where the rows are. Computed on the device, and the host knows the shapes only.

    order: [rows] int64, the (token, expert) pair of each row, token * top-k + k. position: [tokens, top-k] int32, the row of each
    pair; the number of rows where the expert is not here. ends: [experts] int32, the row after each expert's last one.
    """

    order: torch.Tensor
    position: torch.Tensor
    ends: torch.Tensor


def route(expert: torch.Tensor, experts: int) -> Routing:
    """expert: [tokens, top-k]; ids outside [0, experts) belong to no expert here, and their rows come last."""
    flat = expert.reshape(-1).clamp(-1, experts) % (experts + 1)
    rows = flat.shape[0]
    # Two bytes instead of eight are a quarter of the radix sort's passes.
    keys = flat.to(torch.int16 if experts < 2**15 else torch.int32)
    keys, order = torch.sort(keys, stable=True)
    numbers = torch.arange(experts, device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    position = torch.empty(rows, dtype=torch.int32, device=keys.device)
    position[order] = torch.arange(rows, dtype=torch.int32, device=keys.device)
    position = torch.where(flat < experts, position, rows)
    return Routing(order, position.view(expert.shape), ends)


def row_blocks(ends: torch.Tensor, rows: int, height: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Blocks of up to `height` rows of one expert: [3, blocks] int32, each one's expert, first row and end; and [experts]
    int32, the block after each expert's last one. There are a few more blocks than needed; they are empty."""
    experts = ends.shape[0]
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    count = (ends - starts + (height - 1)) // height
    stops = torch.cumsum(count, 0, dtype=torch.int32)
    shift = starts - (stops - count) * height
    number = torch.arange(-(-rows // height) + experts, dtype=torch.int32, device=ends.device)
    expert = torch.searchsorted(stops, number, right=True, out_int32=True)
    expert = expert.clamp(max=experts - 1)  # the surplus blocks begin after its end
    return torch.stack((expert, shift[expert] + number * height, ends[expert])), stops
