"""What a checkpoint's second run leaves out (ops/second_run.py): the same bits as without a checkpoint.

Two calls are in one checkpoint, so the second run needs what the first of them gives.
"""

import functools
import importlib

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.expert_adapters import BOTH, adapted_leaves, arguments_of
from tests.ops.experts import experts_inputs
from tests.ops.generated import generated
from tests.ops.projected_nodes import PLAIN, outputs, projections_of
from tests.ops.sparse_nodes import leaves_of

HIDDEN, INNER, TOKENS = 1024, 48, 5


def saves_products(ctx, operation, *args, **kwargs):
    """The policy of a selective checkpoint that keeps what every operation of PyTorch returns that has "mm" in its name."""
    return CheckpointPolicy.MUST_SAVE if "mm" in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, saves_products)
FORMS = {"not reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True},
         "selective": {"use_reentrant": False, "context_fn": selective}}  # fmt: skip


def _mlp(ops, autocast, parallel=False, ranks=(0, 5, 3, 4)):
    """(x, a function of it with the MLP's node, its other leaves). autocast, ranks: as of `check_projected_mlp`. parallel: beside
    attention."""
    kind = FP32 if autocast else BF16
    norm = leaf(randn(HIDDEN, dtype=kind, device=CPU, seed=1) + 1)
    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    projections, _ = projections_of(ops, [(HIDDEN, HIDDEN)] * parallel + list(shapes), autocast, 0.25, ranks=ranks)
    attended = leaf(randn(TOKENS, HIDDEN, dtype=BF16, device=CPU, seed=2)) if parallel else None
    spec = outputs(ops, 0.5)._replace(parallel=parallel)

    def run(x):
        return part_of(ops, "nodes").norm_mlp(x, norm, projections, spec, attended, dtype=BF16)

    return leaf(randn(TOKENS, HIDDEN, dtype=kind, device=CPU)), run, [norm, attended, *(part for one in projections for part in one[:5])]


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


def _adapted_experts(ops, tile=0):
    """The same with adapters on the experts. tile: of `norm_experts`."""
    leaves = adapted_leaves(BF16, CPU, TOKENS, 64, 24, 6, 8, BOTH, True, False)
    arguments, options = arguments_of(ops, leaves, 2, (2.0, 0.5), False)
    return leaves["x"], lambda x: part_of(ops, "sparse").norm_experts(x, *arguments[1:], tile=tile, **options), list(leaves.values())[1:]


def _operation(ops, name, **options):
    """The same with the MLP as an operation. name: of its file and function."""
    file, function = name.split(".")
    function = getattr(importlib.import_module(f"{ops.__name__}.shared.ops.{file}"), function)
    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    weights = [leaf(randn(*shape, dtype=BF16, device=CPU, seed=i, scale=shape[1] ** -0.5)) for i, shape in enumerate(shapes)]
    return leaf(randn(TOKENS, HIDDEN, dtype=BF16, device=CPU, seed=7)), lambda x: function(x, *weights, **options), weights


def _experts_alone(ops):
    """The same with the operation of experts."""
    expert, made, options = experts_inputs(CPU, BF16, TOKENS, 64, 24, 4, 2, gpt_oss=False)
    x, *others = map(leaf, made.values())
    return x, lambda x: ops.experts(x, expert, *others, **options), others


CALLS = {
    "MLP": functools.partial(_mlp, autocast=False),
    "MLP without adapters": functools.partial(_mlp, autocast=False, ranks=PLAIN),
    "MLP in fp32": functools.partial(_mlp, autocast=True),
    "MLP beside attention": functools.partial(_mlp, autocast=False, parallel=True),
    "experts": functools.partial(_experts, shared=False),
    "shared expert": functools.partial(_experts, shared=True),
    "adapted experts": _adapted_experts,
    "adapted experts in tiles": functools.partial(_adapted_experts, tile=2),
    "mlp alone": functools.partial(_operation, name="swiglu.mlp"),
    "mlp in shards": functools.partial(_operation, name="tiled_mlp.tiled_mlp", shards=2),
    "experts alone": _experts_alone,
}


def check_second_run(ops, call, options):
    """call: of `CALLS`; options: of `FORMS`."""
    x, run, others = CALLS[call](ops)
    leaves = [x, *(tensor for tensor in others if tensor is not None)]

    def results(through):
        for tensor in leaves:
            tensor.grad = None
        torch.manual_seed(3)
        y = through(lambda x: run(run(x)), x)
        y.backward(randn(*y.shape, dtype=y.dtype, device=CPU, seed=9))
        return [y.detach(), *(tensor.grad for tensor in leaves)]

    expected = results(lambda function, x: function(x))
    try:
        found = results(functools.partial(checkpoint, **options))
    except RuntimeError as error:  # of a selective checkpoint: what it kept was written to
        raise AssertionError(f"{call}: {error}") from error
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine is None) == (wanted is None)
        assert wanted is None or torch.equal(mine, wanted), f"{call}: the second run of a checkpoint gives other bits"


# ---------------------------------------------------------------- planted errors
CHECKS = {
    f"{call}, {form}": functools.partial(check_second_run, call=call, options=options)
    for call in CALLS
    for form, options in FORMS.items()
}
_PRODUCTS = "shared/ops/products.py"
_NODES, _SPARSE, _SECOND = "shared/decoder/nodes.py", "shared/decoder/sparse.py", "shared/ops/second_run.py"
SAME = {
    "return total.copy_(torch.addmm(total, x, y, **factors))": "a copy more, of the same numbers",
    "factors = _factors(spec, tensors, given.layout.dtype)": "makes factors that nothing reads",
}
MUTANTS = [
    *errors_in(_SECOND, "MLP, reentrant", "_Finished.backward", ("return dout, None", "return 2 * dout, None")),
    *errors_in(_SECOND, "mlp alone, not reentrant", "_Finished.forward", ("return finish()", "return 2 * finish()")),
    *generated(_SECOND, "MLP, selective", "are_watched", kernels=False),
    *generated(_PRODUCTS, "mlp in shards, selective", "write_product", kernels=False),
    *generated(_PRODUCTS, "MLP, selective", "accumulate_product", kernels=False, same=SAME),
    *generated(_SPARSE, "adapted experts in tiles, not reentrant", "_finish", same=SAME),
    *generated("shared/ops/experts.py", "experts alone, not reentrant", "_Experts.forward"),
    *errors_in(_PRODUCTS, "MLP without adapters, selective", "write_product", ("if are_watched():", "if False:"), kernels=False),
    *errors_in(_NODES, "MLP, not reentrant", "_finish_mlp",
         ("stream_of(given, saved)", "2 * stream_of(given, saved)"),
         ("groups, started[0]", "groups, 2 * started[0]", "MLP in fp32, not reentrant"),
         ("given.tensors, stream_of", "given.tensors._replace(attended=None), stream_of", "MLP beside attention, not reentrant"),
         ("saved.made, given.whole)", "[-one for one in saved.made], given.whole)")),
    *errors_in(_NODES, "MLP, not reentrant", "_start_mlp",
         ("_mlp(given, fin", "_mlp(given._replace(tensors=given.tensors._replace(before=2 * given.tensors.before)), fin")),
    *errors_in(_SPARSE, "experts, not reentrant", "_start",
         ("_forward(given, ", "_forward(given._replace(tensors=given.tensors._replace(before=2 * given.tensors.before)), ")),
    *errors_in(_SPARSE, "experts, not reentrant", "_finish",
         ("saved.scores", "2 * saved.scores"),
         ("_replace(gate_up_a=None)", "_replace(down_a=None)", "adapted experts, not reentrant"),
         ("stream_of(given, saved)", "2 * stream_of(given, saved)"),
         ("saved.made, None)", "[-one for one in saved.made], None)", "shared expert, not reentrant"),
         ("started.scored, down)", "started.scored, None)", "shared expert, not reentrant")),
    *errors_in("shared/ops/swiglu.py", "mlp alone, not reentrant", "_MLP.forward",
         ("partial(_down, gate, up, down_weight)", "partial(_down, up, gate, down_weight)")),
    *errors_in("shared/ops/experts.py", "experts alone, not reentrant", "_Experts.forward",
         ("left = gate_up, expert, scores", "left = gate_up, expert, 2 * scores"),
         ("save_for_backward(*inputs, gate_up, *routing)", "save_for_backward(*inputs, 2 * gate_up, *routing)")),
]  # fmt: skip
