"""GPT-OSS as a row of the table of families."""

from .shared.hf.decoder_layer import FusedLayer
from .shared.hf.families import Family, Sparse

GPT_OSS = FusedLayer(
    Family(
        "GPT-OSS",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "GptOss",
        rounds="last",
        options=(("sliding_window", "sliding_window"), ("s_aux", "sinks")),
        sparse=Sparse(("GptOssMLP", "GptOssTopKRouter", "GptOssExperts"), "router", by_logits=True),
        mlp=False,
    )
)
