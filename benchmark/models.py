"""The sizes of Qwen3 and GPT-OSS, from the configurations that Qwen and OpenAI publish."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool = False  # does the head share the embedding's weight
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    experts: int = 0  # with experts it is a GPT-OSS
    top_k: int = 0


FAMILIES = {"qwen3": "Qwen3", "gpt_oss": "GPT-OSS"}
SIZES = {
    "qwen3_0.6b": Size(1024, 3072, 28, 16, tied=True),
    "qwen3_1.7b": Size(2048, 6144, 28, 16, tied=True),
    "qwen3_4b": Size(2560, 9728, 36, 32, tied=True),
    "qwen3_8b": Size(4096, 12288, 36, 32),
    "qwen3_14b": Size(5120, 17408, 40, 40),
    "qwen3_32b": Size(5120, 25600, 64, 64),
}
GPT_OSS = {
    "gpt_oss_20b": Size(2880, 2880, 24, 64, head_dim=64, vocab=201088, experts=32, top_k=4),
    "gpt_oss_120b": Size(2880, 2880, 36, 64, head_dim=64, vocab=201088, experts=128, top_k=4),
}
# For smoke runs on a CPU.
TINY = {
    "qwen3_tiny": Size(64, 160, 2, 4, tied=True, kv_heads=2, head_dim=16, vocab=512),
    "gpt_oss_tiny": Size(64, 48, 2, 4, kv_heads=2, head_dim=16, vocab=512, experts=6, top_k=2),
}


def full_name(name: str) -> str:
    """`8b` and `qwen3_8b` are the same model. Raises ValueError for one that is not in the table."""
    name = name.lower()
    found = name if name.startswith(("qwen3_", "gpt_oss_")) else f"qwen3_{name}"
    if found not in SIZES | GPT_OSS | TINY:
        raise ValueError(f"model is {name}, expected one of {', '.join(SIZES | GPT_OSS | TINY)}")
    return found


def size(name: str) -> Size:
    return (SIZES | GPT_OSS | TINY)[full_name(name)]


def family(name: str) -> str:
    """One of `FAMILIES`."""
    return full_name(name).rpartition("_")[0]


def title(name: str, layers: int | None = None) -> str:
    """ "GPT-OSS-20B", or "GPT-OSS-20B with 12 of 24 layers"."""
    found, whole = f"{FAMILIES[family(name)]}-{full_name(name).rpartition('_')[2].upper()}", size(name).layers
    return found if layers in (None, whole) else f"{found} with {layers} of {whole} layers"


def configuration(name: str, layers: int | None = None):
    """A Qwen3Config or GptOssConfig of transformers."""
    from transformers import GptOssConfig, Qwen3Config

    s = size(name)
    if s.experts:
        return GptOssConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=layers or s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            num_local_experts=s.experts,
            num_experts_per_tok=s.top_k,
            use_cache=False,
        )
    return Qwen3Config(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers or s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=s.tied,
        use_cache=False,
    )
