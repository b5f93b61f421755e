"""GPT-OSS: its layer of experts, and whole training steps on one GPU.

    python -m benchmark.benchmark_gpt_oss experts [--model gpt_oss_120b] [--tokens 2048,8192]
    python -m benchmark.benchmark_gpt_oss step [--layers 12] [--tokens 4096,8192]

The layer: transformers' `grouped_mm` (its default), Bastile, and as the floor the six grouped GEMMs alone; the experts are chosen
uniformly, or so that the first ones get most tokens. The step: random weights, batch 1, bf16, fused AdamW, no checkpointing, one
process a provider, in turns.
"""

import sys
from functools import partial
from types import SimpleNamespace

import torch

if not __package__:  # run as a file, or by `kernels benchmark`
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from . import models, providers, training
from .harness import Exact, Inputs, Operation, OperationBenchmark, Random, Work, parser, run

PACKAGE = "packages/gpt-oss"
ALPHA, LIMIT = 1.702, 7.0
TOKENS = (2048, 4096, 8192, 16384)
STEP_TOKENS = (2048, 4096, 8192, 16384)
LAYERS = 12  # of 24: with AdamW's states as many as fit into 141 GB
# transformers adds the gradients of the biases up in bf16: off by 2 to 5 % at 2048 and 8192 tokens of gpt-oss-20b on an H200, growing
# with the root of their number. What it computes is right, and what most people train with, so it is timed.
BIAS_BOUNDS = {"dgate_up_bias": 0.15, "ddown_bias": 0.15}
STEP_PROVIDERS = ("huggingface", "huggingface_flex", "liger_flex", "bastile", "bastile_adamw")


# ---------------------------------------------------------------- the experts
def inputs(size: models.Size, tokens: int, random: Random, skew: float = 0.0) -> Inputs:
    """hidden, scores, the weights and biases, and which experts. skew: the share of the first expert over that of the second, and so on,
    is a power law with this exponent."""
    noise = -torch.log(-torch.log(torch.rand(tokens, size.experts, generator=random.generator, device=random.device)))
    rank = torch.arange(1, size.experts + 1, device=random.device)
    expert = (noise - skew * rank.log()).topk(size.top_k, -1).indices
    hidden, width = size.hidden, size.intermediate
    leaves = (
        random.normal(tokens, hidden),
        random.normal(tokens, size.top_k).softmax(-1),
        random.normal(size.experts, hidden, 2 * width, scale=hidden**-0.5),
        random.normal(size.experts, width, hidden, scale=width**-0.5),
        # Gate and up on both sides of each clamp, far from where rounding decides.
        ((random.integers(3, size.experts, 2 * width) - 1) * 12).to(random.dtype),
        random.normal(size.experts, hidden),
    )
    return Inputs(leaves, (expert,), (random.normal(tokens, hidden),))


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """What GptOssExperts does between its projections."""
    g, u = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
    return (u + 1) * (g * torch.sigmoid(g * ALPHA))


def huggingface(hidden, scores, gate_up, down, gate_up_bias, down_bias, expert):
    """transformers' `grouped_mm` implementation, with what it asks of a module."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    module = SimpleNamespace(
        gate_up_proj=gate_up,
        gate_up_proj_bias=gate_up_bias,
        down_proj=down,
        down_proj_bias=down_bias,
        num_experts=gate_up.shape[0],
        has_gate=True,
        has_bias=True,
        has_post_expert_norm=False,
        is_transposed=True,
        _is_expert_parallel=False,
        _apply_gate=gate,
    )
    return grouped_mm_experts_forward(module, hidden, expert, scores)


def exact(given: Inputs) -> Exact:
    """One expert after the other in float64."""
    wide = given.exact()
    hidden, scores, gate_up, down, gate_up_bias, down_bias = wide.leaves
    (expert,) = wide.others
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, k = torch.where(expert == e)
        y = gate(hidden[token] @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e]
        out = out.index_add(0, token, scores[token, k, None] * y)
    return Exact((out.detach(),), torch.autograd.grad(out, wide.leaves, wide.gradients))


def ours(kernel):
    def experts(hidden, scores, gate_up, down, gate_up_bias, down_bias, expert):
        options = {"transposed": True, "interleaved": True, "alpha": ALPHA, "limit": LIMIT}
        return kernel.experts(hidden, expert, scores, gate_up, down, gate_up_bias, down_bias, **options)

    return experts


def work(given: Inputs, mode: str) -> Work:
    """Two GEMMs forward and four backward, of three times hidden times width a row."""
    _, _, gate_up, down, *_ = given.leaves
    flops = 2 * given.others[0].numel() * (gate_up[0].numel() + down[0].numel())
    return Work(flops={"forward": 1, "full": 3}[mode] * flops)


def floor(given: Inputs, mode: str):
    """The grouped GEMMs alone, on rows that are sorted already."""
    hidden, _, gate_up, down, *_ = (t.detach() for t in given.leaves)
    (expert,) = given.others
    keys, order = torch.sort(expert.flatten())
    ends = torch.searchsorted(keys, torch.arange(gate_up.shape[0], device=keys.device), right=True).int()
    x = hidden[order // expert.shape[1]]
    y = given.gradients[0][order // expert.shape[1]]
    wide = torch._grouped_mm(x, gate_up, offs=ends)
    narrow = wide[:, : down.shape[1]].contiguous()
    mm = partial(torch._grouped_mm, offs=ends)

    def forward():
        mm(x, gate_up), mm(narrow, down)

    def full():
        forward()
        mm(y, down.transpose(1, 2)), mm(narrow.t(), y), mm(x.t(), wide), mm(wide, gate_up.transpose(1, 2))

    return {"forward": forward, "full": full}[mode]


def operation(name: str, title: str, skew: float) -> Operation:
    return Operation(
        name=name,
        title=title,
        outputs=("y",),
        gradients=("dhidden", "dscores", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias"),
        inputs=partial(inputs, skew=skew),
        formula=huggingface,
        ours=lambda _: ours(providers.package(PACKAGE)),
        loaders={},
        work=work,
        floor=floor,
        exact=exact,
        modes=("forward", "full"),  # a second backward pass over one forward pass has to do a GEMM again
        bounds=BIAS_BOUNDS,
        writes_inputs=False,
        file="gpt_oss_experts",
    )


UNIFORM = operation("experts_uniform", "GPT-OSS's experts, uniform routing", 0.0)
SKEWED = operation("experts_skewed", "GPT-OSS's experts, skewed routing", 1.0)


class ExpertsBenchmark(OperationBenchmark):
    """For `kernels benchmark`."""

    operation = UNIFORM

    def setup(self) -> None:
        gpu = self.device.startswith("cuda")
        random = Random(self.device, torch.bfloat16, self.seed or 0)
        given = inputs(models.size("gpt_oss_20b" if gpu else "gpt_oss_tiny"), 4096 if gpu else 32, random)
        hidden, scores, gate_up, down, gate_up_bias, down_bias = given.leaves
        # Small results, of gates that are as large as ever.
        small = (hidden, scores, gate_up, 0.01 * down, gate_up_bias, 0.01 * down_bias)
        self.inputs = Inputs(small, given.others, tuple(0.01 * t for t in given.gradients)).copy()
        self.reference_inputs = self.inputs.copy()
        self.function = ours(self.kernel)


def main_experts(arguments=None) -> list:
    p = parser("The layer of experts of GPT-OSS.")
    p.set_defaults(tokens=TOKENS, model="gpt_oss_20b", no_compile=True)
    return run([UNIFORM, SKEWED], p.parse_args(arguments))


# ---------------------------------------------------------------- the training step
def prepare(provider: str) -> None:
    """Puts a provider's layers into transformers, before a model is made."""
    if provider.startswith("bastile"):
        providers.package(PACKAGE).apply()
    elif provider == "liger_flex":
        providers.need("liger_kernel", "triton")
        from liger_kernel.transformers import apply_liger_kernel_to_gpt_oss

        apply_liger_kernel_to_gpt_oss()


def new_model(args, device: str):
    """A GptOssForCausalLM in training mode, to be filled. Eager attention, which is what transformers takes unless told otherwise, for
    "huggingface" alone; and on a CPU, where flex_attention has no backward pass."""
    from transformers import GptOssForCausalLM

    eager = args.child == "huggingface" or not args.device.startswith("cuda")
    with torch.device(device):
        configuration = models.configuration(args.model, args.layers)
        attention = "eager" if eager else "flex_attention"
        return GptOssForCausalLM._from_config(configuration, dtype=torch.bfloat16, attn_implementation=attention).train()


def build(args) -> training.Stepper:
    model = new_model(args, args.device)
    training.fill(model)
    optimizer = training.make_optimizer(model, args.device, args.child, PACKAGE)
    return training.Stepper(model, optimizer, args.device, model.config.vocab_size)


def main_step(arguments=None):
    p = training.parser("Training steps of GPT-OSS on one GPU.", STEP_TOKENS, STEP_PROVIDERS, STEP_PROVIDERS)
    p.set_defaults(model="gpt_oss_20b", layers=LAYERS)
    args = p.parse_args(arguments)
    if args.child:
        return training.child(args, build, prepare)
    return training.parent("gpt_oss_step", __file__, args)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["experts"]:
        return main_experts(arguments[1:])
    return main_step(arguments[1:] if arguments[:1] == ["step"] else arguments)


if __name__ == "__main__":
    main()
