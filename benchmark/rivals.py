"""Peers that a table should have and has not: why, and what their own pages say. `<< rivals() >>` in docs/numbers.md.j2."""

from typing import NamedTuple


class Rival(NamedTuple):
    """name: of the peer. of: what it is a peer of. why: it was not run. published: by its makers, with the GPU; empty where
    they publish nothing comparable. beside: what stands in our tables for that work, or what it would take."""

    name: str
    of: str
    why: str
    published: str
    beside: str


RIVALS = (
    Rival(
        "Liger's head in CuTe DSL",
        "log-probabilities and losses of a head",
        "`nvidia-cutlass-dsl` and what it needs are larger than what could be carried to the machine",
        "H100, 8192 tokens, hidden size 4096, vocabulary 131072: 12.25 ms forward, 50.4 ms with the backward pass (Liger's benchmark page)",
        "scaled to the vocabulary of Qwen3-8B 14.2 and 58.4 ms: 4% ahead of Bastile without gradients, behind it with them",
    ),
    Rival(
        "NeMo AutoModel with Transformer Engine",
        "LoRA steps",
        "it wants a container of its own",
        "Llama-3-8B, rank 16, all projections, two rows of 4096 tokens on one H100: 12,473 tokens a second",
        "Qwen3-8B with LoRA at 8192 tokens on one H200, in [what people fine-tune with](#what-people-fine-tune-with)",
    ),
    Rival(
        '`experts_implementation="sonicmoe"`',
        "experts of transformers' models",
        "a kernel of the Hub that is compiled where it runs, by CuTe DSL, which was not there",
        "",
        "transformers' `grouped_mm`, its default, and Liger stand in the tables",
    ),
    Rival(
        "FlashAttention 2, 3 and 4 from the Hub",
        "packed and padded rows",
        "the machine has no network, and the builds for its torch are larger than what could be carried",
        "",
        "SDPA, FlexAttention and PyTorch's `varlen_attn` stand in the tables",
    ),
    Rival(
        "Unsloth under transformers 5.18 and newer",
        "TRL's trainers, checkpointed steps",
        "it pins transformers to 5.17 at most, and TRL to 1.15",
        "",
        "its steps were measured with the versions that it takes",
    ),
    Rival(
        "torchtitan with float8",
        "eight bits on several GPUs",
        "eight GPUs were not there",
        "Llama-3-8B on eight H100s: 6,667 tokens a second and GPU in bf16, 8,532 in float8 (1.28 ×)",
        "its layers are torchao's, which stand in [products in eight bits](#products-in-eight-bits) on one GPU",
    ),
)


def rivals() -> str:
    """Returns the table in Markdown."""
    rows = [f"| {each.name} | {each.of} | {each.why} | {each.published or '–'} | {each.beside} |" for each in RIVALS]
    return "\n".join(["| peer | of | why it was not run | what its makers publish | in these tables |", "|---|---|---|---|---|", *rows])
