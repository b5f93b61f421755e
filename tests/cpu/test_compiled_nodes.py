"""The nodes of experts and of a mixer's projections in a graph: two operators each, and the bits of eager mode."""

import importlib

import pytest
import torch
from torch._dynamo.utils import counters

from tests import compile_checks as checks
from tests.cpu.conftest import from_sources
from tests.versions import needs_compiler

pytestmark = needs_compiler
HIDDEN, FEATURES, EXPERTS, WIDTH = 16, 8, 4, 6


def part_of(package, name):
    return importlib.import_module(f"{package.__name__}.shared.decoder.{name}")


def new(*shape, seed=0, trained=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).requires_grad_(trained)


def projections_of(package, *shapes, lora):
    """Linear layers, with `lora` frozen ones under an adapter each."""
    found = [(new(*shape, seed=i, trained=not lora), None) for i, shape in enumerate(shapes)]
    adapters = [(new(2, columns, seed=9), new(rows, 2, seed=8), None, 0.5) if lora else () for rows, columns in shapes]
    return [part_of(package, "projection").Projection(*one, *more) for one, more in zip(found, adapters, strict=True)]


def experts(package, kind):
    """(a function of x, the other leaves). kind: "Qwen3-MoE"; "GPT-OSS", whose experts have biases; or "Qwen3-Next", with a shared expert,
    adapters, and products that are made again."""
    sparse, outputs = part_of(package, "sparse"), part_of(package, "spec").Outputs()
    gpt_oss, lora = kind == "GPT-OSS", kind == "Qwen3-Next"
    norm, router, bias = new(HIDDEN, seed=1), new(EXPERTS, HIDDEN, seed=2), new(EXPERTS, seed=3) if gpt_oss else None
    shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH), *([(2 * WIDTH,), (HIDDEN,)] if gpt_oss else [])
    weights = [new(EXPERTS, *(shape[::-1] if gpt_oss else shape), seed=4 + i) for i, shape in enumerate(shapes)]
    options = sparse.ExpertOptions(True, True, 1.702, 7.0) if gpt_oss else sparse.DEFAULT
    o, *shared = projections_of(package, (HIDDEN, FEATURES), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH), lora=lora)
    gate = new(1, HIDDEN, seed=7)
    more = {"o": o, "recompute": lora, "shared": sparse.SharedExpert(gate, shared) if lora else None}

    def run(x):
        attended = x.flatten(0, 1)[:, :FEATURES].contiguous()
        of_router = sparse.Router(router, 2, True, bias, gpt_oss)
        return (sparse.norm_experts(x, norm, of_router, sparse.ExpertTensors(*weights), outputs, options, attended, **more),)

    parts = [part for one in (o, *(shared if lora else ())) for part in one[:4]]
    return run, [norm, router, bias, *weights, *parts, *([gate] if lora else [])]


def mixer(package, kind):
    """The same with the projections in front of a delta net."""
    norm, spec = new(HIDDEN, seed=1), part_of(package, "spec").Norm()
    projections = projections_of(package, (12, HIDDEN), (3, HIDDEN), lora=kind == "LoRA")
    norm_projections = part_of(package, "norm_projections").norm_projections
    return lambda x: norm_projections(x, norm, projections, spec), [norm, *(part for one in projections for part in one[:4])]


CASES = [("norm_experts", experts, "Qwen3-MoE"), ("norm_experts", experts, "GPT-OSS"), ("norm_experts", experts, "Qwen3-Next"),
         ("norm_projections", mixer, "plain"), ("norm_projections", mixer, "LoRA")]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "kind"), CASES, ids=[f"{name}, {kind}" for name, _, kind in CASES])
def test_a_node_is_two_operators_with_the_bits_of_eager_mode(all_operations, name, make, kind):
    """One graph for one length and one for all others, in which nobody has read how many tokens an expert gets."""
    run, leaves = make(all_operations, kind)
    leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    called, compiled = checks.operators_of(all_operations, run)
    counters.clear()
    for tokens in (3, 4, 7):
        found = []
        for function in (run, compiled):
            x = new(2, tokens, HIDDEN, seed=tokens)
            results = function(x)
            grads = torch.autograd.grad(sum(result.square().sum() for result in results), [x, *leaves])
            found.append([*results, *grads])
        assert all(map(torch.equal, *found))
    assert counters["stats"]["unique_graphs"] == 2 and called == [name, f"{name}_backward"] * 2
    if kind in ("GPT-OSS", "plain"):
        with torch.no_grad():
            assert all(map(torch.equal, run(x), compiled(x)))


def test_a_build_that_is_loaded_twice():
    """Its operators are those of the first loading, as in the second file of a test run that loads the package."""
    for _ in range(2):
        with from_sources("bastile_twice") as package:
            run, _ = mixer(package, "plain")
            _, compiled = checks.operators_of(package, run)
            x = new(2, 3, HIDDEN)
            found = [torch.autograd.grad(sum(result.square().sum() for result in function(x)), x) for function in (run, compiled)]
            assert torch.equal(*map(torch.cat, found))
