"""How an argument may lie in memory: functions of a tensor, which give the same numbers otherwise laid out."""

import torch


def strided(tensor):
    """Every second element of the last dimension."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def sliced(tensor):
    """A part of longer rows, whose length no vector load divides."""
    return torch.cat((tensor, *[tensor[..., :1]] * 3), -1)[..., : tensor.shape[-1]]


def transposed(tensor):
    """In memory, the dimensions are the other way round."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def misaligned(tensor):
    """Starts one element after a multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    start = 1 + (-memory.data_ptr() % 16) // tensor.element_size()
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def expanded(tensor):
    """Repeats the first numbers along the first dimension, stored once."""
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS = (strided, sliced, transposed, misaligned, expanded)
