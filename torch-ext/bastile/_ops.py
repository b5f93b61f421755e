"""The name space of the custom operators: that of the package, so that two copies of it live side by side in one process. A build
for the Hub replaces this file by one with a name of its own."""

import torch

NAMESPACE = __name__.rpartition(".")[0].replace(".", "_") + "_whole"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """`name` -> `namespace::name`."""
    return f"{NAMESPACE}::{op_name}"
