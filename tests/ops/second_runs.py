"""The nodes of a decoder layer in a checkpoint, whose second run is in the backward pass: the same bits as without one.

Two of them are in one checkpoint, so the second run needs what the first of them gives.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.projected_nodes import outputs, projections_of
from tests.ops.sparse_nodes import leaves_of

HIDDEN, INNER, TOKENS = 1024, 48, 5
FORMS = {"not reentrant": False, "reentrant": True}


def _mlp(ops, autocast):
    """(x, a function of it with the MLP's node, its other leaves). autocast: as of `check_projected_mlp`."""
    kind = FP32 if autocast else BF16
    norm = leaf(randn(HIDDEN, dtype=kind, device=CPU, seed=1) + 1)
    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    projections, _ = projections_of(ops, shapes, autocast, 0.25)

    def run(x):
        return part_of(ops, "nodes").norm_mlp(x, norm, projections, outputs(ops, 0.5), dtype=BF16)

    return leaf(randn(TOKENS, HIDDEN, dtype=kind, device=CPU)), run, [norm, *(part for one in projections for part in one[:5])]


def _experts(ops, shared):
    """(x, a function of it with the node of experts, its other leaves). shared: with an expert for every token."""
    sparse, spec = part_of(ops, "sparse"), part_of(ops, "spec")
    leaves = leaves_of(BF16, CPU, TOKENS, HIDDEN, 20, 6)
    x, norm, router, *weights = leaves.values()
    projections, expert = [], None
    if shared:
        leaves["score_gate"] = leaf(randn(1, HIDDEN, dtype=BF16, device=CPU, seed=5, scale=HIDDEN**-0.5))
        projections, _ = projections_of(ops, [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)], False, 0.25, ranks=(0, 5, 3, 4))
        projections[2] = projections[2]._replace(adapter_bias=None)
        expert = sparse.SharedExpert(leaves["score_gate"], projections)
    arguments = sparse.Router(router, 2, True), sparse.ExpertTensors(*weights), spec.Outputs(before=spec.Norm(0.5))

    def run(x):
        return sparse.norm_experts(x, norm, *arguments, shared=expert)

    return x, run, [*list(leaves.values())[1:], *(part for one in projections for part in one[:5])]


NODES = {
    "mlp": functools.partial(_mlp, autocast=False),
    "mlp in fp32": functools.partial(_mlp, autocast=True),
    "experts": functools.partial(_experts, shared=False),
    "shared expert": functools.partial(_experts, shared=True),
}


def check_second_run(ops, node, reentrant):
    """node: of `NODES`."""
    x, run, others = NODES[node](ops)
    leaves = [x, *(tensor for tensor in others if tensor is not None)]

    def results(call):
        for tensor in leaves:
            tensor.grad = None
        torch.manual_seed(3)
        y = call(lambda x: run(run(x)), x)
        y.backward(randn(*y.shape, dtype=y.dtype, device=CPU, seed=9))
        return [y.detach(), *(tensor.grad for tensor in leaves)]

    expected = results(lambda function, x: function(x))
    found = results(functools.partial(checkpoint, use_reentrant=reentrant))
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine is None) == (wanted is None)
        assert wanted is None or torch.equal(mine, wanted), f"{node}: the second run of a checkpoint gives other bits"


# ---------------------------------------------------------------- planted errors
CHECKS = {
    f"{node}, {name}": functools.partial(check_second_run, node=node, reentrant=reentrant)
    for node in NODES
    for name, reentrant in FORMS.items()
}
_NODES, _SPARSE = "shared/decoder/nodes.py", "shared/decoder/sparse.py"
MUTANTS = [
    *errors_in(_NODES, "mlp, reentrant", "Finished.backward", ("return dout, None", "return 2 * dout, None")),
    *errors_in(_NODES, "mlp, not reentrant", "norm_mlp",
         ("None, total.reshape", "None, 2 * total.reshape"),
         ("total.reshape(-1, x.shape[-1]), hidden, down", "total.reshape(-1, x.shape[-1]), 2 * hidden, down", "mlp in fp32, not reentrant"),
         ("hidden, made = rest", "hidden, made = rest[0], [-one for one in rest[1]]")),
    *errors_in(_NODES, "mlp, not reentrant", "_NormMLP.forward", ("else total).view(x.shape)", "else total).view(x.shape) * 2")),
    *errors_in(_NODES, "mlp, not reentrant", "_mlp_start",
         ("mlp_start(layout.spec, tensors,", "mlp_start(layout.spec, tensors._replace(before=2 * before),")),
    *errors_in(_SPARSE, "experts, not reentrant", "_finish",
         ("gate_up, expert, scores, weights.down", "gate_up, expert, 2 * scores, weights.down"),
         ("_summed(total.reshape", "_summed(2 * total.reshape"),
         ("shared(found)", "pass", "shared expert, not reentrant")),
    *errors_in(_SPARSE, "experts, not reentrant", "_NormExperts.forward", ("return total.view(x.shape)", "return 2 * total.view(x.shape)")),
]  # fmt: skip
