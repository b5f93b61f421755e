"""Attention over documents packed into one row, over lengths and windows; with the sinks and windows of GPT-OSS; and with heads of 256.

Hugging Face is SDPA as transformers calls it: without a mask for one document, with a [tokens, tokens] mask for more of them and for
windows; and with sinks its eager attention, which holds every score. What says which tokens see which (mask, BlockMask, plan) is made once,
outside the timed part, as all layers of a step share it.
"""

import inspect
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import models
from .markdown import comparison, milliseconds, select
from .operation import MODE_TITLES, Case, Inputs, Operation, Random, Reference, Work
from .providers import NotInstalled
from .suites import GPT_OSS, QWEN3, QWEN3_5

TOKENS = (8192,)
DOCUMENTS = ("1", "8", "32", "uneven")
UNEVEN = (4, 8, 16, 32, 64, 3, 1)  # lengths of uneven documents, in shares of their sum
WINDOWS = ("128", "none")  # of GPT-OSS's layers in turn


def lengths_of(tokens: int, documents: str) -> list[int]:
    """Return the lengths of the documents of a row."""
    count = min(int(documents), tokens) if documents != "uneven" else len(UNEVEN)
    shares = UNEVEN if documents == "uneven" else (1,) * count
    ends = [tokens * sum(shares[: i + 1]) // sum(shares) for i in range(count)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def inputs(size: models.Size, tokens: int, documents: str, window: str, random: Random, sinks: bool = False) -> Inputs:
    """Draw q, k and v [tokens, heads, head_dim], and sinks [heads]; the others are cu_seqlens and the window, 0 for none."""
    shapes = [(tokens, heads, size.head_dim) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    leaves = tuple(random.normal(*shape) for shape in shapes) + ((random.normal(size.heads),) if sinks else ())
    ends = torch.tensor([0, *lengths_of(tokens, documents)]).cumsum(0).to(random.device, torch.int32)
    return Inputs(leaves, (ends, torch.tensor(int(window) if window != "none" else 0)), (random.normal(*shapes[0]),))


def once(cu_seqlens: torch.Tensor, name: str, make):
    """Return what `make()` made of these documents the first time."""
    if not hasattr(cu_seqlens, name):
        setattr(cu_seqlens, name, make())
    return getattr(cu_seqlens, name)


def document_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return [tokens]: the number of each token's document."""
    return torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff())


def mask_of(cu_seqlens: torch.Tensor, window: int) -> torch.Tensor:
    """Return [tokens, tokens]: which query sees which key."""
    document = document_of(cu_seqlens)
    t = torch.arange(len(document), device=document.device)
    distance = t[:, None] - t[None, :]
    return (document[:, None] == document[None, :]) & (distance >= 0) & (distance < (window or len(t)))


def whole_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [tokens, heads, head_dim] with a key head for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def sdpa(q, k, v, *rest):
    """Call SDPA as transformers does; with sinks, compute what its eager attention does."""
    *sinks, cu_seqlens, window = rest
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if sinks:
        return eager(q, k, v, sinks[0], once(cu_seqlens, "mask", lambda: mask_of(cu_seqlens, int(window))))
    if len(cu_seqlens) == 2 and not window:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mask = once(cu_seqlens, "mask", lambda: mask_of(cu_seqlens, int(window)))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out[0].transpose(0, 1)


def eager(q, k, v, sinks, mask):
    """Compute attention with sinks and hold every score, as transformers' eager attention of GPT-OSS does."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, torch.finfo(q.dtype).min)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v)[0].transpose(0, 1)


def of_varlen():
    """Return torch's own attention over documents (FlashAttention 2), which takes no groups."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotInstalled("torch.nn.attention.varlen is not in this torch") from error
    named = inspect.signature(varlen_attn).parameters

    def call(q, k, v, cu_seqlens, window):
        longest = once(cu_seqlens, "longest", lambda: int(cu_seqlens.diff().max()))
        if "window_size" in named:
            options: dict = {"window_size": (int(window) - 1 if window else -1, 0)}
        elif not window:
            options = {"is_causal": True}
        else:
            raise NotInstalled("this torch's varlen_attn has no windows")
        k, v = whole_heads(k, q.shape[1]), whole_heads(v, q.shape[1])
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)

    return call


def of_flex():
    """Return FlexAttention, compiled, with a BlockMask of the documents; sinks are a sigmoid of the log-sum-exp, as in transformers."""
    if not torch.cuda.is_available():
        raise NotInstalled("FlexAttention has no backward pass on a CPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention, dynamic=False)

    def blocks(cu_seqlens, window):
        document, reach = document_of(cu_seqlens), int(window) or int(cu_seqlens[-1])

        def rule(_batch, _head, i, j):
            return (document[i] == document[j]) & (i >= j) & (i - j < reach)

        return create_block_mask(rule, None, None, len(document), len(document), device=cu_seqlens.device)

    def call(q, k, v, *rest):
        *sinks, cu_seqlens, window = rest
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        options = {"block_mask": once(cu_seqlens, "blocks", lambda: blocks(cu_seqlens, window)), "enable_gqa": True}
        if not sinks:
            return flex(q, k, v, **options)[0].transpose(0, 1)
        out, lse = flex(q, k, v, return_lse=True, **options)  # type: ignore[arg-type]
        return (out * torch.sigmoid(lse - sinks[0][None, :, None])[..., None].to(out.dtype))[0].transpose(0, 1)

    return call


def of_package(package):
    """Return the package's function with a plan that is made once."""

    def call(q, k, v, *rest):
        *sinks, cu_seqlens, window = rest
        make = partial(package.AttentionPlan.from_cu_seqlens, cu_seqlens, q.shape[0], window=int(window) or None)
        return package.attention(q, k, v, once(cu_seqlens, "plan", make), sinks=sinks[0] if sinks else None)

    return call


def reference(given: Inputs) -> Reference:
    """Compute one head of one document after the other in float64."""
    exact = given.to_float64()
    cu_seqlens, window = exact.others
    q, k, v, *sinks = exact.leaves
    gradients = [torch.zeros_like(x) for x in exact.leaves]
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        rows = slice(start, end)
        mask = mask_of(torch.tensor([0, end - start], device=q.device), int(window))
        for head in range(q.shape[1]):
            places = [(rows, head), (rows, head // group), (rows, head // group), *([(head,)] if sinks else [])]
            leaves = [x[place].detach().requires_grad_() for x, place in zip(exact.leaves, places, strict=True)]
            scores = (leaves[0] @ leaves[1].T * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
            if sinks:
                scores = torch.cat([scores, leaves[3].expand(len(scores), 1)], -1)
            found = scores.softmax(-1)[:, : end - start] @ leaves[2]
            out[rows, head] = found.detach()
            for total, place, part in zip(
                gradients, places, torch.autograd.grad(found, leaves, exact.output_gradients[0][rows, head]), strict=True
            ):
                total[place] += part
    return Reference((out,), tuple(gradients))


def work(given: Inputs, mode: str) -> Work:
    """Count two matrix products of what is seen forward, and five backward."""
    cu_seqlens, window = given.others
    seen = 0
    for length in cu_seqlens.diff().tolist():
        reach = min(int(window) or length, length)
        seen += reach * (reach + 1) // 2 + (length - reach) * reach
    _, heads, head_dim = given.leaves[0].shape
    return Work(flops={"forward": 2, "backward": 5, "full": 7}[mode] * 2 * seen * heads * head_dim)


def floor(given: Inputs, mode: str):
    """Return one square GEMM of as many floating-point operations."""
    q = given.leaves[0]
    side = max(int((work(given, mode).flops / 2) ** (1 / 3)) // 64 * 64, 64)
    a, b = (torch.randn(side, side, device=q.device, dtype=q.dtype) for _ in range(2))
    return lambda: a @ b


def over_documents(documents, windows, operation: Operation, args) -> list[Case]:
    """Return a case for each number of tokens, way to part them, and window."""
    model = models.full_name(args.model or operation.suite.model)
    found = []
    for tokens in args.tokens or operation.tokens:
        for parts in documents:
            for window in windows:
                config = {"model": model, "tokens": tokens, "window": window}
                found.append(Case(("documents", "documents", parts), config, (models.size(model), tokens, parts, window)))
    return found


def declare(name, title, suite, position, documents, windows, sinks, tokens) -> Operation:
    """Declare attention with or without sinks."""
    sweep = partial(over_documents, documents, windows)
    peers = {"torch_flex": of_flex} if sinks else {"torch_varlen": of_varlen, "torch_flex": of_flex}
    return Operation(
        name, title, suite, position=position, script="attention",
        outputs=("out",), gradients=("dq", "dk", "dv", *(("dsinks",) if sinks else ())),
        inputs=partial(inputs, sinks=sinks),
        formula=sdpa,
        bastile=of_package,
        peers=peers,
        compiled=False,
        work=work,
        floor=floor, floor_title="one GEMM of the same FLOPs",
        reference=reference,
        modes=("forward", "full"),
        writes_inputs=False,
        tokens=tokens,
        sweeps={"token_length": sweep, "model_config": sweep},
        shown=("documents", "8" if not sinks else "1"),
    )


ATTENTION = declare("attention", "attention, 8 documents", QWEN3, 8, DOCUMENTS, ("none",), False, TOKENS)
SINKS = declare("sink_attention", "attention with sinks", GPT_OSS, 8, ("1", "8"), WINDOWS, True, (4096, 8192))
WIDE = declare("wide_attention", "attention with heads of 256", QWEN3_5, 4, ("1", "8"), ("none",), False, TOKENS)


def table(rows: list) -> str:
    """Return attention alone, forward and backward, by the documents and windows of a row, of as many tokens as other operations."""
    rows, cases = select(rows, metric_name="speed", dtype="bf16", timing="device"), []
    for operation in (ATTENTION, SINKS, WIDE):
        for mode in operation.modes:
            case = {"model": operation.suite.model, "tokens": operation.suite.tokens}
            mine = select(rows, kernel_name=operation.name, kernel_operation_mode=mode, **case)
            title = f"{operation.title.partition(', ')[0]}, {MODE_TITLES.get(mode, mode)}"
            for documents, window in dict.fromkeys((row.x_value, row.config["window"]) for row in mine):
                cases.append(((title, documents, window), select(mine, x_value=documents, window=window)))
    head = f"{QWEN3.tokens} tokens", "documents", "window"
    return comparison(head, cases, {"speed": milliseconds}, ("floor", "Bastile: of the floor"))


TABLES = {"attention": table}
