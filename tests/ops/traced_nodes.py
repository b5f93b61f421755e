"""The operators of a decoder layer in a graph, called without one: what the nodes of `projected_nodes` compute, in memory of their own."""

import contextlib
import functools
import importlib
import sys
from importlib.util import find_spec
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops import decoder_nodes, norm_projections, projected_nodes
from tests.ops.common import BF16, CPU, FP32, errors_in, leaf, on_cpu, randn
from tests.ops.decoder_nodes import part_of
from tests.ops.sparse_nodes import check_norm_experts
from tests.tolerances import assert_close

NODES = "norm_attention_inputs", "norm_mlp", "norm_experts", "norm_projections"


class Calls(TorchDispatchMode):
    """Records the calls of the nodes' operators of a package, (name, arguments), whose results must be as their fake functions promise and
    share no memory, and whose arguments must stay what they are."""

    def __init__(self, package):
        super().__init__()
        self.namespace, self.calls = importlib.import_module(f"{package.__name__}._ops").NAMESPACE, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1]
        ours = function.namespace == self.namespace and name.removesuffix("_backward") in NODES
        given = [arg.clone() for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)] if ours else []
        found = function(*args, **(kwargs or {}))
        if ours:
            args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            left = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
            assert all(map(torch.equal, left, given)), "an argument was written to"
            self.calls.append((name, args))
            with FakeTensorMode() as mode:
                faked = function(*tree_map_only(torch.Tensor, mode.from_tensor, args))
            assert len(found) == len(faked)
            for real, fake in zip(found, faked, strict=True):
                assert real.is_contiguous() and (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
            memory = [tensor.untyped_storage().data_ptr() for tensor in (*found, *tree_leaves(args)) if isinstance(tensor, torch.Tensor)]
            assert len(set(memory[: len(found)])) == len(found), "results share memory"
            assert not set(memory[: len(found)]) & set(memory[len(found) :]), "a result is in an argument's memory"
        return found


@contextlib.contextmanager
def traced(package):
    """Where nodes are computed as where a graph is traced, and their operators as where it runs; gives the calls of these."""
    import torch._dynamo  # noqa: F401  where this is imported first, inside of the patch, no graph finds is_compiling any more

    def is_compiling():
        return sys._getframe(1).f_globals["__name__"].endswith(".decoder.node")

    with mock.patch.object(torch.compiler, "is_compiling", is_compiling), Calls(package) as recorded:
        yield recorded.calls
    assert recorded.calls


def as_in_a_graph(check):
    """The check of the nodes of eager mode on those of a graph."""

    def checked(ops):
        with traced(ops):
            check(ops)

    return checked


def check_inputs_without_norms(ops):
    """v is then no part of what was projected, which the backward pass does not read."""
    spec, found = part_of(ops, "spec").Inputs(64), []
    for context in (contextlib.nullcontext(), traced(ops)):
        x, norm, *weights = (leaf(randn(*s, dtype=FP32, device=CPU, seed=len(s))) for s in ((2, 3, 128), (128,), *[(128, 128)] * 3))
        angles = [randn(1, 3, 64, dtype=FP32, device=CPU, seed=i) for i in range(2)]
        projections = [part_of(ops, "projection").Projection(weight) for weight in weights]
        with context:
            results = part_of(ops, "nodes").norm_attention_inputs(x, norm, projections, None, None, *angles, (2, 3), spec)
            sum((i + 1) * result.square().sum() for i, result in enumerate(results)).backward()
        found.append([*results, *[one.grad for one in (x, norm, *weights)]])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, FP32, "attention's inputs without norms of heads")


# ---------------------------------------------------------------- planted errors
_inputs, _mlp = projected_nodes.check_projected_attention_inputs, functools.partial(projected_nodes.check_projected_mlp, attended=True)
CHECKS = {
    "inputs_of_a_graph": as_in_a_graph(_inputs),
    "inputs_of_a_graph_autocast": as_in_a_graph(functools.partial(_inputs, autocast=True)),
    "inputs_of_a_graph_packed": as_in_a_graph(functools.partial(decoder_nodes.check_norm_attention_inputs, packed=True)),
    "inputs_of_a_graph_without_norms": check_inputs_without_norms,
    "mlp_of_a_graph": as_in_a_graph(_mlp),
    "mlp_of_a_graph_again": as_in_a_graph(functools.partial(_mlp, recompute=True)),
    "mlp_of_a_graph_alone": as_in_a_graph(decoder_nodes.CHECKS["norm_mlp_alone"]),
    "mlp_of_a_graph_autocast": as_in_a_graph(functools.partial(_mlp, autocast=True)),
    "experts_of_a_graph": as_in_a_graph(on_cpu(check_norm_experts, BF16, attended=True)),
    "experts_of_a_graph_again": as_in_a_graph(on_cpu(check_norm_experts, recompute=True, again=True, norms=("before", "behind"))),
    "experts_of_a_graph_shared": as_in_a_graph(on_cpu(check_norm_experts, shared=24, packed=True, again=True, frozen=("router",))),
    "projections_of_a_graph": as_in_a_graph(norm_projections.check_norm_projections),
    "projections_of_a_graph_autocast": as_in_a_graph(functools.partial(norm_projections.check_norm_projections, autocast=True)),
}
GRAPH, NODE, HALVES = "shared/decoder/graph.py", "shared/decoder/node.py", "shared/decoder/nodes.py"
MUTANTS = [
    *errors_in("shared/decoder/steps.py", "mlp_of_a_graph_alone", "wanted", ("gradient if need else None", "gradient")),
    *errors_in(HALVES, "inputs_of_a_graph", "_inputs", ("_replace(q=projected", "_replace(q=-projected")),
    *errors_in(HALVES, "inputs_of_a_graph", "_in_heads",
         ("v[:, (q.shape[2] + k.shape[2]) * q.shape[3] :]", "v[:, : k.shape[2] * q.shape[3]]")),
    *errors_in(HALVES, "inputs_of_a_graph", "_inputs_gradients", ("q, k, _ = in_heads", "k, q, _ = in_heads")),
    *errors_in(HALVES, "mlp_of_a_graph", "_saved", ("_replace(gate=both,", "_replace(gate=-both,")),
    *errors_in(HALVES, "mlp_of_a_graph", "_mlp_gradients", ("_replace(gate=gate, up=up)", "_replace(gate=up, up=gate)")),
    *errors_in(NODE, "experts_of_a_graph", "_gradients", ("tensor.clone() for", "tensor for"),
         ("if node.spends and (spent or form.in_graph)", "if node.spends and spent", "experts_of_a_graph_shared")),
    *errors_in(NODE, "inputs_of_a_graph_without_norms", "_once_each", ("results.append(tensor.contiguous())", "results.append(tensor)")),
    *errors_in(GRAPH, "inputs_of_a_graph", "in_graph_of",
         ("present[0].view_as(present[0])", "2 * present[0]"),
         ("*found[start_of(text) :])", "*[2 * one for one in found[start_of(text) :]])"),
         ("known.whole_of(values[", "-known.whole_of(values[", "inputs_of_a_graph_packed"),
         ("and i not in constant", "and i in constant"),
         ("tensors[max(place, 0)]", "tensors[abs(place)]", "mlp_of_a_graph")),
    *errors_in("shared/decoder/projection.py", "inputs_of_a_graph_autocast", "told_of",
         ("constant(projection.scaling)", "2 * constant(projection.scaling)")),
]  # fmt: skip


# ---------------------------------------------------------------- in the tests of every operation
def _projections(package, new, shapes, kind, adapters, frozen) -> list:
    """Projections, of which every second one has an adapter, of all dtypes."""
    projection, found = part_of(package, "projection").Projection, []
    for i, (rows, columns) in enumerate(shapes):
        of_adapter = (torch.float32, new.dtype)[i % 4 // 2]
        parts = [new(rows, columns, seed=20 + i, dtype=kind) * columns**-0.5, None, None, None, None]
        if adapters and i % 2 == 0:
            parts[2:4] = new(4 + i, columns, seed=30 + i, dtype=of_adapter) * 0.1, new(rows, 4 + i, seed=40 + i, dtype=of_adapter) * 0.1
            parts[4] = None if i else new(rows, seed=50, dtype=of_adapter)
        leaves = [part if part is None or (frozen and not place) else part.requires_grad_() for place, part in enumerate(parts)]
        found.append(projection(*leaves, 0.5 + i))
    return found


@functools.cache
def _layers_of(package, new) -> list:
    """Calls of all operators, (name, arguments): plain, with adapters beside frozen weights, and over fp32 as under autocast."""
    nodes, spec = part_of(package, "nodes"), part_of(package, "spec")
    with traced(package) as calls:
        for kind, adapters, frozen in ((new.dtype, False, False), (new.dtype, True, True), (torch.float32, True, False)):
            x, norm = new(2, 3, 1024, dtype=kind).requires_grad_(), new(1024, seed=1, dtype=kind).requires_grad_(not frozen)
            heads, tables = ([new(*shape, 128, seed=2 + i, dtype=kind) for i in range(2)] for shape in ((), (1, 3)))
            three = _projections(package, new, [(512, 1024)] * 3, kind, adapters, frozen)
            results = nodes.norm_attention_inputs(x, norm, three, *heads, *tables, (2, 3), spec.Inputs(128), new.dtype)
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            for attended in (None, new(6, 256, seed=76).requires_grad_()):
                shapes = [(1024, 256)] * (attended is not None) + [(96, 1024)] * 2 + [(1024, 96)]
                all_of, recompute = _projections(package, new, shapes, kind, adapters, frozen), (attended is None) == adapters
                out = nodes.norm_mlp(x, norm, all_of, spec.Outputs(), attended, dtype=new.dtype, recompute=recompute)
                out.backward(torch.ones_like(out))
            if find_spec(f"{package.__name__}.shared.decoder.norm_projections"):  # the packages with layers that mix without attention
                two = _projections(package, new, [(96, 1024), (8, 1024)], kind, adapters, frozen)
                results = part_of(package, "norm_projections").norm_projections(x, norm, two, spec.Norm(), new.dtype)
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            if kind == new.dtype:
                _run_experts(package, new, x, norm, adapters, frozen)
    return calls


def _run_experts(package, new, x, norm, adapters, frozen) -> None:
    """With adapters after attention and beside the shared expert, without them GPT-OSS's."""
    sparse, of_gate = part_of(package, "sparse"), not adapters
    shapes = ((4, 1024, 48), (4, 24, 1024), (4, 48), (4, 1024)) if of_gate else ((4, 48, 1024), (4, 1024, 24))
    weights = [new(*shape, seed=60 + i) * shape[-1] ** -0.5 for i, shape in enumerate(shapes)]
    router = sparse.Router(new(4, 1024, seed=70) * 0.03, 2, True, new(4, seed=71) if of_gate else None, of_gate)
    options = sparse.ExpertOptions(True, True, 1.702, 7.0) if of_gate else sparse.DEFAULT
    for tensor in (*weights, router.weight):
        tensor.requires_grad_(not frozen)
    more = {}
    if adapters:
        o, *others = _projections(package, new, [(1024, 256), (40, 1024), (40, 1024), (1024, 40)], x.dtype, True, frozen)
        others[-1] = others[-1]._replace(adapter_bias=None)
        more = {"attended": new(6, 256, seed=76).requires_grad_(), "o": o, "shared": sparse.SharedExpert(new(1, 1024, seed=77), others)}
    arguments = x, norm, router, sparse.ExpertTensors(*weights), part_of(package, "spec").Outputs(), options
    out = sparse.norm_experts(*arguments, recompute=adapters, **more)
    out.backward(torch.ones_like(out))


def _calls_of(name, new):
    return lambda package: [args for called, args in _layers_of(package, new) if called == name]


OPERATORS = {name + end: functools.partial(_calls_of, name + end) for name in NODES for end in ("", "_backward")}
