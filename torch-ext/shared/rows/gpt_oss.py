"""GPT-OSS."""

from functools import partial

from ..decoder.sparse import ExpertOptions
from ..hf.family.families import LOSS, Family, Sparse
from ..hf.install.served import Served
from ..hf.install.warmup import Case, Sizes, warm_up
from ..hf.layer.decoder_layer import FusedLayer

__all__ = ["GPT_OSS", "SERVED"]

GPT_OSS = FusedLayer(
    Family(
        "GPT-OSS",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "GptOss",
        rounds="last",
        options=(("sliding_window", "sliding_window"), ("s_aux", "sinks")),
        sparse=Sparse(("GptOssMLP", "GptOssTopKRouter", "GptOssExperts"), "router", by_logits=True, router_indices=True),
        mlp=False,
        half_angles=True,
    )
)
SERVED = Served(
    rows=(GPT_OSS,),
    options=("rms_norm", "experts", "rope", LOSS, "decoder_layer", "attention", "unpad"),
    cases=(Case(GPT_OSS, Sizes(2880, 0, 64, 8, 64, 201088, angles=32, expert=2880, top_k=4, bias=True)),),  # 20B and 120B
    warm_up=partial(warm_up, options=ExpertOptions(transposed=True, interleaved=True, alpha=1.702, limit=7.0)),
)
