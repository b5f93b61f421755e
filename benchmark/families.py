"""The families of models that whole training steps are measured of: what each provider does to transformers, and the model.

Every provider runs in a process of its own, because each replaces parts of transformers.
"""

import dataclasses
import functools
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import compiled_peer, models, published, routing, suites, unsloth_peer, varlen_peer
from .providers import EIGHT_BITS_OF_OURS, is_ours, package, require_modules

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "nf4": torch.bfloat16}  # nf4: what four bits are made of
DEVIATION = 0.02  # of every weight that is drawn
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
BRANCH_ENDS = ("o_proj.weight", "down_proj", "down_proj.weight")  # what they return is added to the residual
# What transformers calls the attention of the providers whose names end so; the others have its default.
ATTENTION = {"_flex": "flex_attention", "_varlen": varlen_peer.NAME}


USUAL = ("huggingface", "liger", "bastile", "bastile_adamw")
# Who takes part where a batch is packed or padded, which SDPA needs a dense mask for: every peer with the attention that is best at it.
MASKED = ("huggingface", "huggingface_flex", "huggingface_varlen", "liger", "liger_flex", "liger_varlen", "bastile_sdpa", "bastile")


@dataclass(frozen=True)
class Family:
    """What differs between the models.

    name: of models.family, and with _step or _fsdp of the results. package: the folder of its build.toml. providers: those that it is known
    for; step_providers, masked_providers (of packed and padded batches) and fsdp_providers: those that take part unless told otherwise.
    prepare(provider): puts a provider's layers into transformers, before a model is made. new_model(args, device) -> a model in training
    mode that is not filled; args has child, model, layers and device. tokens: the lengths of a step; layers: of the
    step on one GPU, None for all; packs: does Bastile train it packed? by_model: does Bastile go on each model, rather than on its classes?
    kinds: of the results that tables show.
    """

    name: str
    package: str
    providers: tuple[str, ...]
    prepare: Callable[[str], None]
    tokens: tuple[int, ...]
    new_model: Callable
    step_providers: tuple[str, ...] = USUAL
    masked_providers: tuple[str, ...] = MASKED
    fsdp_providers: tuple[str, ...] = USUAL
    layers: int | None = None
    packs: bool = False
    by_model: bool = False
    kinds: tuple[str, ...] = ("step", f"step_{routing.SKEWED}", "step_lora_16", "fsdp")


def attention_of(provider: str) -> str | None:
    """Return the implementation of attention that a provider asks transformers for by name, None for transformers' choice: Bastile's layers
    keep one that was asked for, so its own attention runs only where nothing was."""
    return next((name for end, name in ATTENTION.items() if provider.endswith(end)), None)


LEAST = "step_lora_16_attention_checkpointing"  # the way to train that takes least
# What providers of ours ask of `apply`.
OPTIONS: dict[str, dict[str, Any]] = {
    "bastile_recompute": {"recompute_mlp": True},
    "bastile_offload": {"offload": True, "recompute_mlp": 4096},
    "bastile_four_bits": {"offload": True},
    **dict.fromkeys(EIGHT_BITS_OF_OURS, {"products": "fp8"}),
    "bastile_keep_attention": {"keep_attention": True},
    "bastile_trl_head": {"log_probs": False},
}


def prepare(provider: str, folder: str, liger: tuple[str, ...]) -> None:
    """Put a provider's layers into transformers. folder: of our package's build.toml, "" where it goes on each model; liger: what Liger's
    functions that patch end in."""
    if provider.endswith("_varlen"):
        varlen_peer.prepare()
    if provider.endswith("_fla"):
        require_modules("fla")
    else:  # where it is installed, transformers takes its delta rule
        sys.modules["fla"] = None  # type: ignore[assignment]
    if provider in compiled_peer.RECIPES or provider.startswith("huggingface"):
        return
    if provider == "unsloth":
        unsloth_peer.prepare()
        return
    if is_ours(provider) and not folder:
        return
    if is_ours(provider):
        # An older build does not have all of these.
        package(folder).apply(attention=provider != "bastile_sdpa", **OPTIONS.get(provider, {}))
        return
    require_modules("liger_kernel", "triton")
    # Liger's default is Triton, but where CuTe DSL is installed its dispatcher takes that for some operations.
    implementations = {"liger_cutedsl": "cutedsl", "liger_cutile": "cutile"}
    implementation = implementations.get(provider)
    if implementation is None:
        os.environ["LIGER_KERNEL_IMPL_ROPE"] = "nvidia-triton"
    else:
        require_modules({"cutedsl": "cutlass", "cutile": "cuda.tile"}[implementation])
        os.environ["LIGER_KERNEL_IMPL"] = implementation
    import liger_kernel.transformers

    for name in liger:
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{name}")()


def new_published(args, device: str):
    """Return the causal LM of a row of published.py in training mode, to be filled."""
    return published.new_model(args.model, args.layers, device, DTYPES[getattr(args, "weights", "bf16")], attention_of(args.child))


def new_gpt_oss(args, device: str):
    """Return a GptOssForCausalLM in training mode, to be filled. On a CPU flex_attention has no backward pass, so it runs transformers'
    choice, eager attention."""
    attention = attention_of(args.child) if args.device.startswith("cuda") else None
    return published.new_model(args.model, args.layers, device, attention=attention)


QWEN3 = Family(
    name="qwen3",
    package=suites.QWEN3.package,
    providers=("huggingface", "huggingface_flex", "huggingface_varlen", "torch_compile", "torchao", "torchao_rowwise",
               "liger", "liger_flex", "liger_varlen", "liger_cutedsl", "liger_cutile", "bastile", "bastile_adamw", "bastile_sdpa",
               "bastile_unpacked", "bastile_captured", "bastile_recompute", "bastile_keep_attention", "bastile_offload",
               *EIGHT_BITS_OF_OURS, "bastile_trl_head", "unsloth"),
    step_providers=("huggingface", "torch_compile", "liger", "bastile", "bastile_adamw"),
    prepare=functools.partial(prepare, folder=suites.QWEN3.package, liger=("qwen3", "qwen3_moe")),
    new_model=new_published,
    packs=True,
    tokens=(256, 512, 1024, 2048, 4096, 8192, 16384, 18432, 20480, 24576, 26624),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    package=suites.QWEN3_MOE.package,
    providers=("huggingface", "huggingface_flex", "huggingface_varlen", "liger", "liger_flex", "liger_varlen", "bastile",
               "bastile_adamw", "bastile_sdpa", "bastile_unpacked", "bastile_recompute"),
    prepare=functools.partial(prepare, folder=suites.QWEN3.package, liger=("qwen3", "qwen3_moe")),
    new_model=new_published,
    packs=True,
    tokens=(2048, 4096, 8192, 16384),
    layers=12,  # of 48: with AdamW's states as many as fit into 141 GB beside the activations
    kinds=("step", f"step_{routing.SKEWED}", "step_lora_16", LEAST, "fsdp"),
)
GPT_OSS = Family(
    name="gpt_oss",
    package=suites.GPT_OSS.package,
    providers=("huggingface", "huggingface_flex", "liger_flex", "bastile", "bastile_adamw", "bastile_four_bits", "bastile_flex"),
    step_providers=("huggingface", "huggingface_flex", "liger_flex", "bastile", "bastile_adamw"),
    masked_providers=("huggingface_flex", "liger_flex", "bastile"),
    fsdp_providers=("huggingface_flex", "liger_flex", "bastile", "bastile_adamw"),  # eager attention fits at the shortest lengths alone
    prepare=functools.partial(prepare, folder=suites.GPT_OSS.package, liger=("gpt_oss",)),
    new_model=new_gpt_oss,
    tokens=(2048, 4096, 8192, 16384),
    layers=12,  # of 24: with AdamW's states as many as fit into 141 GB
    kinds=("step", f"step_{routing.SKEWED}", "step_lora_16", LEAST, "fsdp"),
)
DENSE = Family(
    name="dense",
    package="packages/decoders",
    providers=("huggingface", "huggingface_flex", "huggingface_varlen", "torch_compile", "liger", "liger_flex", "liger_varlen", "bastile",
               "bastile_adamw", "bastile_sdpa", "bastile_unpacked", "bastile_captured", "bastile_recompute", "bastile_trl_head", "unsloth"),
    prepare=functools.partial(prepare, folder="packages/decoders", liger=tuple(row.liger for row in published.DENSE.values())),
    new_model=new_published,
    packs=True,
    tokens=(512, 4096, 8192),
    layers=12,
    kinds=("step", "step_lora_16"),
)
HYBRID = Family(
    name="qwen3_5",
    package="packages/qwen3_5",
    providers=("huggingface", "huggingface_fla", "liger", "liger_fla", "bastile", "bastile_adamw", "bastile_recompute"),
    step_providers=("huggingface", "huggingface_fla", "liger", "liger_fla", "bastile", "bastile_adamw"),
    masked_providers=("huggingface", "huggingface_fla", "liger", "liger_fla", "bastile"),
    fsdp_providers=("huggingface", "huggingface_fla", "bastile", "bastile_adamw"),
    prepare=functools.partial(prepare, folder="packages/qwen3_5", liger=tuple(row.liger for row in published.HYBRID.values())),
    new_model=new_published,
    tokens=(512, 4096, 8192),
    layers=8,  # of 32: two of them with attention
    kinds=("step", "step_lora_16"),
)
MIXTRAL = Family(
    name="mixtral",
    package="packages/moe",
    providers=("huggingface", "huggingface_flex", "liger", "liger_flex", "bastile", "bastile_adamw"),
    step_providers=("huggingface", "liger", "bastile"),
    masked_providers=("huggingface", "huggingface_flex", "liger", "liger_flex", "bastile"),
    fsdp_providers=(),
    prepare=functools.partial(prepare, folder="", liger=("mixtral",)),
    new_model=new_published,
    tokens=(2048, 8192),
    layers=2,
    by_model=True,
    kinds=("step",),
)
GLM = dataclasses.replace(
    MIXTRAL,
    name="glm",
    providers=("huggingface", "huggingface_flex", "bastile", "bastile_adamw"),  # Liger has nothing for it
    step_providers=("huggingface", "bastile"),
    masked_providers=("huggingface", "huggingface_flex", "bastile"),
    prepare=functools.partial(prepare, folder="", liger=()),
    layers=3,  # the first of them dense
)
GEMMA_4 = dataclasses.replace(
    MIXTRAL,
    name="gemma_4",
    package="packages/decoders",
    prepare=functools.partial(prepare, folder="", liger=("gemma4_text",)),
    layers=None,
    kinds=("step_lora_16",),
)
FAMILIES = {family.name: family for family in (QWEN3, QWEN3_MOE, GPT_OSS, DENSE, HYBRID, MIXTRAL, GLM, GEMMA_4)}
# By what models.family calls a model's.
MEASURED = FAMILIES | dict.fromkeys(published.DENSE, DENSE) | dict.fromkeys(published.HYBRID, HYBRID)


def measured() -> list[str]:
    """Return the models whose steps are measured."""
    return [name for name in models.SIZES if models.family(name) in MEASURED]


def family_of(model: str) -> Family:
    """Return the family of a model. Raise ValueError for a model whose steps are not measured."""
    name = models.family(model)
    if name not in MEASURED:
        raise ValueError(f"model is {model}, expected one of {', '.join(measured())}")
    return MEASURED[name]


def make_model(name: str, layers: int | None, device: str, dtype: torch.dtype = torch.bfloat16):
    """Return a Qwen3ForCausalLM in training mode with random weights that depend on nothing but the parameters' names."""
    model = published.new_model(name, layers, device, dtype)
    fill(model)
    return model


def fill(model, part: str = "", kind: str = routing.UNIFORM) -> None:
    """Draw all parameters of a model. part: those alone whose name has it; kind: of the routing, for a model with experts."""
    for name, parameter in model.named_parameters():
        if part in name:
            fill_parameter(name, parameter, model.config.get_text_config(), kind)


@torch.no_grad()
def fill_parameter(name: str, parameter: torch.Tensor, config, kind: str = routing.UNIFORM) -> None:
    """Draw a weight from its name; make a norm's weight 1, and a bias or a sink 0. config: of the model; kind: of the routing, for which
    embedding, ends of branches and routers of a model with experts are drawn as routing.py says."""
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    experts, top_k = routing.experts_of(config)
    if not name.endswith("weight") and (parameter.dim() == 1 or name.endswith("bias")):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 1.0 if experts and "embed_tokens" in name else DEVIATION, generator=generator)
        if experts and name.endswith(BRANCH_ENDS):
            parameter *= routing.branch_scale(config.num_hidden_layers)
        if kind == routing.SKEWED and name.endswith(ROUTERS):
            parameter *= routing.row_lengths(experts, top_k).to(parameter)[:, None]


def make_optimizer(model, device: str, provider: str, folder: str = "."):
    """Return PyTorch's fused AdamW, or for a provider with "adamw" in its name that of our package. folder: of its build.toml."""
    adamw = package(folder).AdamW if provider.endswith("_adamw") else torch.optim.AdamW
    return adamw([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-5, fused=device.startswith("cuda"))
