"""The name space of the custom operators. A build for the Hub replaces this file by one with a name of its own."""

import torch

NAMESPACE = "bastile_moe"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """`name` -> `namespace::name`."""
    return f"{NAMESPACE}::{op_name}"
