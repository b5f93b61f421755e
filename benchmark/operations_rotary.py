"""Rotary embeddings of queries and keys, in the layouts that attention passes: Qwen3's, alone and with the norms before it, which is what
its attention does before the attention itself; Liger's of halves, of neighbouring pairs as in Llama 4, of three positions in Qwen2-VL."""

from functools import partial

import torch

from . import eager, providers
from .liger_operations import declare, implementations, with_eps
from .operation import Inputs, Limit, Operation, bytes_moved
from .suites import QWEN3

SHARES = (2, 3, 3)  # of eight parts of the frequencies: time, height, width


def q_and_k(size, tokens, random, *angles, views=True) -> Inputs:
    """Lay leaves as the projections write them, gradients as attention leaves them: [batch, tokens, heads, head_dim]."""
    shapes = [(1, tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads)]
    leaves, gradients = (tuple(random.normal(*shape) for shape in shapes) for _ in range(2))
    return Inputs(leaves, angles, tuple(g.transpose(1, 2) for g in gradients) if views else gradients)


def inputs(size, tokens, random) -> Inputs:
    return q_and_k(size, tokens, random, *(t.to(random.device, random.dtype) for t in eager.angles(tokens, size.head_dim)))


def of_views(rotate):
    """Call `rotate` with the views that attention makes of what the projections wrote."""
    return lambda q, k, cos, sin: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def bytes_of_q_and_k(inputs: Inputs) -> int:
    """Return the bytes of q and k together."""
    return sum(t.nbytes for t in inputs.output_gradients)


ROTARY = Operation(
    "rotary", "rotary", QWEN3, position=4,
    outputs=("q", "k"), gradients=("dq", "dk"),
    inputs=inputs,
    formula=of_views(eager.rotary),
    bastile=lambda package: of_views(providers.operation(package, "rotary")),
    peers=implementations("rope", "LigerRopeFunction", of_views),
    work=bytes_moved(2, 2, bytes_of_q_and_k),
)
ROPE = declare(
    "rope", "rotary", 16, "LigerRopeFunction", ours="rotary",
    outputs=("q", "k"), gradients=("dq", "dk"),
    inputs=inputs,
    formula=of_views(eager.rotary),
    call=of_views,
    work=ROTARY.work,
    limits=(Limit(8192, 0.88, peer=0.97),),
)


def norm_and_rotary_inputs(size, tokens, random) -> Inputs:
    made = inputs(size, tokens, random)
    weights = tuple(random.normal(size.head_dim, scale=0.1, shift=1.0) for _ in range(2))
    return Inputs(made.leaves + weights, made.others, made.output_gradients)


def in_turn(load_norm, load_rotary):
    """Run the two operations one after the other, as a library without the fusion does."""
    norm, rotate = load_norm(), load_rotary()

    def call(q, k, q_weight, k_weight, cos, sin):
        return rotate(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin)

    return call


NORMS = implementations("rms_norm", "LigerRMSNormFunction", with_eps)
ROTARIES = implementations("rope", "LigerRopeFunction")
QK_NORM_ROTARY = Operation(
    "qk_norm_rotary", "q/k-norm + rotary", QWEN3, position=5,
    outputs=("q", "k"), gradients=("dq", "dk", "dq_weight", "dk_weight"),
    inputs=norm_and_rotary_inputs,
    formula=eager.qk_norm_rotary,
    bastile=lambda package: with_eps(providers.operation(package, "qk_norm_rotary")),
    peers={provider: partial(in_turn, NORMS[provider], ROTARIES[provider]) for provider in NORMS},
    work=bytes_moved(2, 3, bytes_of_q_and_k),  # in, out; gradients in, in, gradients out
)


def inputs_of_pairs(size, tokens, random) -> Inputs:
    """Lay everything as [batch, tokens, heads, head_dim]; angles, one a pair, are of the drawn dtype until `frequencies`."""
    angle = random.normal(1, tokens, size.head_dim // 2).float()
    return q_and_k(size, tokens, random, torch.stack((angle.cos(), angle.sin()), -1), views=False)


def of_pairs(rotate):
    """Call `rotate` with the table as complex numbers, which a float64 copy of the inputs widens as it is."""
    return lambda q, k, table: rotate(q, k, torch.view_as_complex(table))


def rotate_pairs(q, k, frequencies):
    wide = torch.promote_types(q.dtype, torch.float32)
    turned = (torch.view_as_complex(x.to(wide).unflatten(-1, (-1, 2))) * frequencies[:, :, None] for x in (q, k))
    return tuple(torch.view_as_real(x).flatten(-2).to(q.dtype) for x in turned)


LLAMA4_ROPE = declare(
    "llama4_rope", "rotary of pairs", 18, "LigerLlama4RopeFunction", ours="rotary_complex",
    outputs=("q", "k"), gradients=("dq", "dk"),
    inputs=inputs_of_pairs,
    formula=of_pairs(rotate_pairs),
    call=of_pairs,
    work=bytes_moved(2, 2, bytes_of_q_and_k),
    limits=(Limit(8192, 0.85, peer=3.7),),
)


def sections_of(cos) -> list[int]:
    """Return how many frequencies belong to time, height and width, of tables that are as wide as a head."""
    return [share * cos.shape[-1] // 16 for share in SHARES]


def inputs_of_three(size, tokens, random) -> Inputs:
    """Give each token three positions of its own."""
    angle = random.normal(3, 1, tokens, size.head_dim // 2).float()
    angle = torch.cat((angle, angle), -1)
    return q_and_k(size, tokens, random, angle.cos().to(random.dtype), angle.sin().to(random.dtype))


def rotate_three(q, k, cos, sin, sections):
    """Compute apply_multimodal_rotary_pos_emb."""
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t.split(sections * 2, -1))], -1) for t in (cos, sin))
    return eager.rotary(q, k, cos, sin)


def of_three(rotate):
    """Call `rotate` with the views that attention makes of what the projections wrote, and the sections."""
    return lambda q, k, cos, sin: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, sections_of(cos))


QWEN2VL_MROPE = declare(
    "qwen2vl_mrope", "multimodal rotary", 17, "LigerQwen2VLMRopeFunction", ours="rotary_multimodal",
    outputs=("q", "k"), gradients=("dq", "dk"),
    inputs=inputs_of_three,
    formula=of_three(rotate_three),
    call=of_three,
    work=bytes_moved(2, 2, bytes_of_q_and_k),
    limits=(Limit(8192, 0.88, {"heads": 28, "kv_heads": 4}, peer=0.97),),
)
