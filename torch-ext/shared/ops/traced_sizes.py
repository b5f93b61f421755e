"""What a graph of torch.compile or torch.export knows of its sizes, some of which vary."""

from .operators import constant_when_traced

__all__ = ["holds_for_all_sizes"]


@constant_when_traced
def _can_tell() -> bool:
    from torch._dynamo.trace_rules import manual_torch_name_rule_map as known

    return "torch.fx.experimental.symbolic_shapes.statically_known_true" in known


def holds_for_all_sizes(*conditions) -> bool:
    """Tells in a graph whether conditions hold for all sizes that it is for, without a guard; False where this torch cannot tell."""
    if not _can_tell():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    found = [statically_known_true(condition) for condition in conditions]  # a tracer makes a list of it, and no generator
    return all(found)
