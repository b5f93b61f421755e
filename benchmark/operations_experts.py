"""The layer of experts of GPT-OSS, and that of Qwen3-MoE: 128 experts of 768, of which each token goes to 8, in the sizes of Qwen3-30B-A3B.

transformers' `grouped_mm` (its default), Liger's fused experts for Qwen3, Bastile, and as the floor the six grouped GEMMs alone; the
experts are chosen uniformly, or so that the first ones get most tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import models, providers
from .markdown import Notes, Table, by_provider, columns_of, comparison, gibibytes, in_order, joined, milliseconds, select, times_faster
from .operation import MODE_TITLES, Inputs, Operation, Random, Reference, Work
from .step_tables import defensible, parts_of, routes, step_cells, step_groups
from .suites import GPT_OSS, QWEN3_MOE, Suite

ALPHA, LIMIT = 1.702, 7.0
# transformers adds the gradients of the biases up in bf16: off by 2 to 5 % at 2048 and 8192 tokens of gpt-oss-20b on an H200, growing
# with the root of their number. What it computes is right, and what most people train with, so it is timed.
BIAS_BOUNDS = {"dgate_up_bias": 0.15, "ddown_bias": 0.15}


def choice(size: models.Size, tokens: int, random: Random, skew: float) -> torch.Tensor:
    """Draw which experts each token goes to, [tokens, top-k]. skew: the share of the first expert over that of the second, and so on, is a
    power law with this exponent."""
    noise = -torch.log(-torch.log(torch.rand(tokens, size.experts, generator=random.generator, device=random.device)))
    rank = torch.arange(1, size.experts + 1, device=random.device)
    return (noise - skew * rank.log()).topk(size.top_k, -1).indices


@dataclass(frozen=True)
class Layer:
    """A family's layer of experts. gate(gate_up): between its projections; biased: whether these have biases, with weights that are
    [experts, in, out], else [experts, out, in]. options: of the package's function."""

    gate: Callable[[torch.Tensor], torch.Tensor]
    biased: bool
    options: Mapping[str, Any] = field(default_factory=dict)


def inputs(size: models.Size, tokens: int, random: Random, layer: Layer, skew: float = 0.0) -> Inputs:
    """Draw hidden, scores, the weights and biases, and which experts. skew: of `choice`."""
    expert = choice(size, tokens, random, skew)
    hidden, width, experts = size.hidden, size.intermediate, size.experts
    shapes = ((hidden, 2 * width), (width, hidden)) if layer.biased else ((2 * width, hidden), (hidden, width))
    leaves = [
        random.normal(tokens, hidden),
        random.normal(tokens, size.top_k).softmax(-1),
        random.normal(experts, *shapes[0], scale=hidden**-0.5),
        random.normal(experts, *shapes[1], scale=width**-0.5),
    ]
    if layer.biased:
        # Gate and up on both sides of each clamp, far from where rounding decides.
        leaves += [((random.integers(3, experts, 2 * width) - 1) * 12).to(random.dtype), random.normal(experts, hidden)]
    return Inputs(tuple(leaves), (expert,), (random.normal(tokens, hidden),))


def gate_of_gpt_oss(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute what GptOssExperts does between its projections."""
    g, u = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
    return (u + 1) * (g * torch.sigmoid(g * ALPHA))


def gate_of_qwen3(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute what Qwen3MoeExperts does between its projections."""
    g, u = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def of_huggingface(hidden, scores, gate_up, down, *rest, layer: Layer):
    """Call transformers' `grouped_mm` implementation, with what it asks of a module."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    *biases, expert = rest
    module: Any = SimpleNamespace(
        gate_up_proj=gate_up,
        down_proj=down,
        num_experts=gate_up.shape[0],
        has_gate=True,
        has_bias=layer.biased,
        has_post_expert_norm=False,
        is_transposed=layer.biased,
        _is_expert_parallel=False,
        _apply_gate=layer.gate,
        **dict(zip(("gate_up_proj_bias", "down_proj_bias"), biases)),
    )
    return grouped_mm_experts_forward(module, hidden, expert, scores)


def of_liger():
    """Load the function of Liger-Kernel's fused experts."""
    function = providers.liger("ops.fused_moe", "LigerFusedMoEFunction")
    return lambda hidden, scores, gate_up, down, expert: function.apply(hidden, gate_up, down, expert.int(), scores)


def of_package(package, layer: Layer):
    """Return the package's function for a family's gate and layouts."""

    def experts(hidden, scores, gate_up, down, *rest):
        *biases, expert = rest
        return package.experts(hidden, expert, scores, gate_up, down, *biases, **layer.options)

    return experts


def reference(given: Inputs, layer: Layer) -> Reference:
    """Compute one expert after the other in float64."""
    exact = given.to_float64()
    hidden, scores, gate_up, down, *biases = exact.leaves
    (expert,) = exact.others
    if not layer.biased:
        gate_up, down = gate_up.mT, down.mT
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(expert == e)
        gate_up_bias, down_bias = (bias[e] for bias in biases) if biases else (0.0, 0.0)
        y = layer.gate(hidden[token] @ gate_up[e] + gate_up_bias) @ down[e] + down_bias
        out = out.index_add(0, token, scores[token, k, None] * y)
    return Reference((out.detach(),), torch.autograd.grad(out, exact.leaves, exact.output_gradients))


def work(given: Inputs, mode: str) -> Work:
    """Count two GEMMs forward and four backward, of three times hidden times width a row."""
    _, _, gate_up, down, *_ = given.leaves
    flops = 2 * given.others[0].numel() * (gate_up[0].numel() + down[0].numel())
    return Work(flops={"forward": 1, "full": 3}[mode] * flops)


def floor(given: Inputs, mode: str, transposed: bool = True):
    """Return the grouped GEMMs alone, on rows that are sorted already. transposed: whether the weights are [experts, in, out]."""
    hidden, _, gate_up, down, *_ = (t.detach() for t in given.leaves)
    (expert,) = given.others
    if not transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    keys, order = torch.sort(expert.flatten())
    ends = torch.searchsorted(keys, torch.arange(gate_up.shape[0], device=keys.device), right=True).int()
    x = hidden[order // expert.shape[1]]
    y = given.output_gradients[0][order // expert.shape[1]]
    projected = torch._grouped_mm(x, gate_up, offs=ends)
    gated = projected[:, : down.shape[1]].contiguous()
    mm = partial(torch._grouped_mm, offs=ends)

    def forward():
        mm(x, gate_up), mm(gated, down)

    def full():
        forward()
        mm(y, down.transpose(1, 2)), mm(gated.t(), y), mm(x.t(), projected), mm(projected, gate_up.transpose(1, 2))

    return {"forward": forward, "full": full}[mode]


def operation(layer: Layer, suite: Suite, name: str, position: int, routing: str, skew: float, **declared) -> Operation:
    """Declare a layer with one routing. declared: more of `Operation`."""
    biases = ("dgate_up_bias", "ddown_bias") if layer.biased else ()
    return Operation(
        f"{name}_{routing}", f"experts, {routing} routing", suite, position=position, script=name,
        outputs=("y",), gradients=("dhidden", "dscores", "dgate_up", "ddown", *biases),
        inputs=partial(inputs, layer=layer, skew=skew),
        formula=partial(of_huggingface, layer=layer),
        bastile=partial(of_package, layer=layer),
        compiled=False,
        work=work,
        floor=partial(floor, transposed=layer.biased), floor_title="bare grouped GEMMs",
        reference=partial(reference, layer=layer),
        modes=("forward", "full"),  # a second backward pass over one forward pass has to do a GEMM again
        writes_inputs=False,
        tokens=(2048, 4096, 8192, 16384),
        **declared,
    )


OF_GPT_OSS = Layer(gate_of_gpt_oss, True, {"transposed": True, "interleaved": True, "alpha": ALPHA, "limit": LIMIT})
gpt_oss = partial(operation, OF_GPT_OSS, GPT_OSS, "experts", bounds=BIAS_BOUNDS, file="gpt_oss_experts")
UNIFORM, SKEWED = gpt_oss(1, "uniform", 0.0), gpt_oss(2, "skewed", 1.0)
OF_QWEN3 = Layer(gate_of_qwen3, False)
qwen3 = partial(operation, OF_QWEN3, QWEN3_MOE, "qwen3_experts", peers={"liger": of_liger}, file="qwen3_moe_experts")
QWEN3_UNIFORM, QWEN3_SKEWED = qwen3(1, "uniform", 0.0), qwen3(2, "skewed", 1.0)


def layer_rows(rows: list) -> list:
    """Return the rows of the layer that tables show."""
    return [row for row in select(rows, dtype="bf16", timing="device") if row.kernel_name in (UNIFORM.name, SKEWED.name)]


def experts_table(rows: list) -> str:
    """Return the table of the layer by model, pass, routing and tokens."""
    rows, cases = layer_rows(rows), []
    for model in in_order(row.config["model"] for row in select(rows, metric_name="speed")):
        for mode in UNIFORM.modes:
            for layer in (UNIFORM, SKEWED):
                mine = select(rows, kernel_name=layer.name, model=model, kernel_operation_mode=mode)
                title = f"{models.size(model).experts} {layer.title.removesuffix(' routing')}, {MODE_TITLES.get(mode, mode)}"
                for tokens in in_order(row.x_value for row in select(mine, metric_name="speed")):
                    cases.append(((title, tokens), select(mine, x_value=tokens)))
    shows, bare = {"speed": milliseconds, "memory": gibibytes}, ("bare GEMMs", "Bastile: of the GEMMs")
    return comparison(("layer, routing, pass", "tokens"), cases, shows, bare, remark=bias_errors(rows))


def layer_cells(rows: list, names: list[str], notes: Notes) -> tuple[dict, dict, list[str]]:
    """Return of one size and pass the speed and the memory of each provider, and the cells that show both."""
    found, memory = (by_provider(select(rows, metric_name=name)) for name in ("speed", "memory"))
    return found, memory, [joined(notes.cell(found.get(p), milliseconds), notes.cell(memory.get(p), gibibytes)) for p in names]


def bias_errors(rows: list) -> str:
    """Return what the bounds of the benchmark's own let pass."""
    errors = [row for name in BIAS_BOUNDS for row in select(rows, metric_name=f"error_{name}")]
    worst = {p: max(row.y_value_50 or 0 for row in select(errors, kernel_provider=p)) for p in columns_of(errors)}
    text = ", ".join(f"{providers.title(p)} {error:.1%}" for p, error in worst.items())
    return f"The largest relative error of a bias's gradient, against float64: {text}." if text else ""


def summary(rows: list) -> str:
    """Return GPT-OSS in short: the layer forward and backward, and the steps, at one number of tokens."""
    tokens = str(GPT_OSS.tokens)
    layer = layer_rows(select(rows, x_name="tokens", x_value=tokens, kernel_operation_mode="full", dtype="bf16"))
    of_steps = [row for row in rows if row.kernel_name in ("gpt_oss_step", "gpt_oss_fsdp")]
    steps = defensible(select(of_steps, x_name="tokens", x_value=tokens, kernel_operation_mode="full", dtype="bf16"))
    names = columns_of(select(layer, metric_name="speed") + select(steps, metric_name="step_time"))
    table = Table(f"{tokens} tokens", *map(providers.title, names), "vs best peer")
    for model in in_order(row.config["model"] for row in layer):
        for each in (UNIFORM, SKEWED):
            found, memory, cells = layer_cells(select(layer, kernel_name=each.name, model=model), names, table.notes)
            title = f"{models.size(model).experts} {each.title}"
            table.add([title, *cells, times_faster(found)], [*found.values(), *memory.values()])
    for title, mine in step_groups(steps):
        found, memory = parts_of(mine)
        line = [f"step of {title}", *step_cells(mine, names, table.notes), times_faster(found)]
        table.add(line, [*found.values(), *memory.values()])
    return table.text(routes(steps))


TABLES = {"gpt_oss_experts": experts_table, "gpt_oss": summary}
