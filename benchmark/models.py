"""The sizes of the models as they are published, and those that Liger-Kernel's benchmarks name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Dimensions of a model. intermediate: of the MLP, or of one expert; tied: the head shares the embedding's weight; experts: 0 for a
    dense model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool = False
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    experts: int = 0
    top_k: int = 0


QWEN3 = {
    "qwen3_0.6b": Size(1024, 3072, 28, 16, tied=True),
    "qwen3_1.7b": Size(2048, 6144, 28, 16, tied=True),
    "qwen3_4b": Size(2560, 9728, 36, 32, tied=True),
    "qwen3_8b": Size(4096, 12288, 36, 32),
    "qwen3_14b": Size(5120, 17408, 40, 40),
    "qwen3_32b": Size(5120, 25600, 64, 64),
}
QWEN3_MOE = {
    "qwen3_moe_30b_a3b": Size(2048, 768, 48, 32, kv_heads=4, experts=128, top_k=8),
    "qwen3_moe_235b_a22b": Size(4096, 1536, 94, 64, kv_heads=4, experts=128, top_k=8),
}
GPT_OSS = {
    "gpt_oss_20b": Size(2880, 2880, 24, 64, head_dim=64, vocab=201088, experts=32, top_k=4),
    "gpt_oss_120b": Size(2880, 2880, 36, 64, head_dim=64, vocab=201088, experts=128, top_k=4),
}
# Of packages/decoders and packages/qwen3_5. published.py has the rest of the configurations.
DENSE = {
    "llama_3.1_8b": Size(4096, 14336, 32, 32, vocab=128256),
    "qwen2.5_7b": Size(3584, 18944, 28, 28, kv_heads=4, vocab=152064),
    "mistral_7b": Size(4096, 14336, 32, 32, vocab=32768),
    "phi_4": Size(5120, 17920, 40, 40, kv_heads=10, vocab=100352),
    "gemma_3_12b": Size(3840, 15360, 48, 16, tied=True, head_dim=256, vocab=262208),
    "smollm3_3b": Size(2048, 11008, 36, 16, tied=True, kv_heads=4, vocab=128256),
    "olmo_2_7b": Size(4096, 11008, 32, 32, kv_heads=32, vocab=100352),
    "qwen3_vl_8b": Size(4096, 12288, 36, 32),  # its text
}
QWEN3_5 = {"qwen3.5_9b": Size(4096, 12288, 32, 16, kv_heads=4, head_dim=256, vocab=248320)}
# Of packages/moe, and one without a row, which packages/decoders reads.
SPARSE = {
    "mixtral_8x7b": Size(4096, 14336, 32, 32, vocab=32000, experts=8, top_k=2),
    "glm_4.5_air": Size(4096, 1408, 46, 96, vocab=151552, experts=128, top_k=8),
}
GEMMA_4 = {"gemma_4_e2b": Size(1536, 6144, 35, 8, tied=True, kv_heads=1, head_dim=256, vocab=262144)}
# As Liger-Kernel's benchmarks have them: heads of 128 throughout, the MLP of the dense layers.
LIGER = {
    "llama_2_7b": Size(4096, 11008, 32, 32, kv_heads=32, vocab=32000),
    "llama_3_8b": DENSE["llama_3.1_8b"],
    "qwen2.5_7b": DENSE["qwen2.5_7b"],
    "qwen2.5_14b": Size(5120, 13824, 48, 40, vocab=152064),
    "qwen2.5_72b": Size(8192, 29568, 80, 64, vocab=152064),
    "deepseek_v2_lite": Size(2048, 10944, 27, 16, kv_heads=16, vocab=102400),
    "deepseek_v3": Size(7168, 18432, 61, 128, kv_heads=128, vocab=129280),
}
# For smoke runs on a CPU.
TINY = {
    "qwen3_tiny": Size(64, 160, 2, 4, tied=True, kv_heads=2, head_dim=16, vocab=512),
    "qwen3_moe_tiny": Size(64, 48, 2, 4, kv_heads=2, head_dim=16, vocab=512, experts=6, top_k=2),
    "gemma_tiny": Size(64, 160, 2, 4, tied=True, kv_heads=2, head_dim=16, vocab=512),
    "qwen3.5_tiny": Size(64, 160, 4, 4, kv_heads=2, head_dim=16, vocab=512),
    "qwen3_vl_tiny": Size(64, 160, 2, 4, kv_heads=2, head_dim=16, vocab=512),
    "mixtral_tiny": Size(64, 48, 2, 4, kv_heads=2, head_dim=16, vocab=512, experts=6, top_k=2),
    "glm_4.5_tiny": Size(64, 48, 2, 4, kv_heads=2, head_dim=16, vocab=512, experts=6, top_k=2),
    "gemma_4_tiny": Size(64, 96, 10, 4, tied=True, kv_heads=1, head_dim=16, vocab=512),
    "qwen3_host": Size(64, 512, 1, 4, tied=True, kv_heads=4, vocab=512),
    "gpt_oss_tiny": Size(64, 64, 2, 4, kv_heads=2, head_dim=16, vocab=512, experts=6, top_k=2),
}
SIZES = QWEN3 | QWEN3_MOE | GPT_OSS | DENSE | QWEN3_5 | SPARSE | GEMMA_4 | LIGER
WITH_TINY = SIZES | TINY
# How a family's name is written, by how its models' names begin; the first that fits counts.
FAMILIES = {"qwen3_moe_": "Qwen3", "qwen3_vl_": "Qwen3-VL", "qwen3_": "Qwen3", "gemma_4_": "Gemma-4"}
FAMILIES |= {"mixtral_": "Mixtral", "glm_": "GLM"}
FAMILIES |= {"gpt_oss_": "GPT-OSS", "llama_": "Llama", "qwen2.5_": "Qwen2.5", "deepseek_": "DeepSeek"}
FAMILIES |= {"mistral_": "Mistral", "phi_": "Phi", "gemma_": "Gemma", "smollm3_": "SmolLM3", "olmo_": "OLMo", "qwen3.5_": "Qwen3.5"}


def full_name(name: str) -> str:
    """Return the name in the table: `8b` and `qwen3_8b` are the same model. Raise ValueError for one that is not in the table."""
    name = name.lower()
    found = name if name.startswith(tuple(FAMILIES)) else f"qwen3_{name}"
    if found not in WITH_TINY:
        raise ValueError(f"model is {name}, expected one of {', '.join(WITH_TINY)}")
    return found


def size(name: str) -> Size:
    """Return the dimensions of a model. Raise ValueError for one that is not in the table."""
    return WITH_TINY[full_name(name)]


def family(name: str) -> str:
    """Return the family of a model, "qwen3", "gpt_oss" or "llama", say."""
    name = full_name(name)
    return next(prefix for prefix in FAMILIES if name.startswith(prefix)).rstrip("_")


def _written(part: str) -> str:
    return part.upper().replace("X", "x") if any(map(str.isdigit, part)) else part.capitalize()


def title(name: str, layers: int | None = None) -> str:
    """Return a model's name as it is written: "GPT-OSS-20B", "Qwen3-30B-A3B", or "GPT-OSS-20B with 12 of 24 layers"."""
    prefix, whole = f"{family(name)}_", size(name).layers
    parts = full_name(name).removeprefix(prefix).split("_")
    found = "-".join([FAMILIES[prefix], *(_written(part) for part in parts)])
    return found if layers in (None, whole) else f"{found} with {layers} of {whole} layers"
