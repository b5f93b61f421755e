"""The suites of operations: what a package ships, the model whose sizes it is measured at, and the table that shows it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Operations that are compared in one table.

    package: the folder of the build.toml of the package that ships them; tokens: of the row that the table shows. Unless the command line
    says otherwise: model and models are the sizes that they are measured at, in a sweep over tokens and in one over models; conventions
    how they are measured, "alone" with the floor, "liger" as Liger-Kernel's own scripts do; timing, of timing.py, is that of "alone". tiny:
    the model whose sizes a CPU gets.
    """

    name: str
    table: str
    package: str
    model: str
    models: tuple[str, ...]
    tokens: int = 8192
    conventions: tuple[str, ...] = ("alone",)
    timing: str = "device"
    tiny: str = "qwen3_tiny"


QWEN3 = Suite(
    name="qwen3",
    table="operations",
    package=".",
    model="qwen3_8b",
    models=("qwen3_0.6b", "qwen3_1.7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b"),
)
QWEN3_MOE = Suite(
    name="qwen3_moe",
    table="qwen3_moe_operations",
    package=".",
    model="qwen3_moe_30b_a3b",
    models=("qwen3_moe_30b_a3b", "qwen3_moe_235b_a22b"),
    tiny="qwen3_moe_tiny",
)
GPT_OSS = Suite(
    name="gpt_oss",
    table="gpt_oss_operations",
    package="packages/gpt-oss",
    model="gpt_oss_20b",
    models=("gpt_oss_20b", "gpt_oss_120b"),
    tiny="gpt_oss_tiny",
)
LIGER = Suite(
    name="liger",
    table="liger_operations",
    package="packages/liger",
    model="llama_3_8b",
    models=("llama_2_7b", "llama_3_8b", "qwen2.5_7b", "qwen2.5_14b", "qwen2.5_72b", "deepseek_v2_lite", "deepseek_v3"),
    conventions=("alone", "liger"),
    timing="rotated",
)
QWEN3_5 = Suite(
    name="qwen3_5",
    table="qwen3_5_operations",
    package="packages/qwen3_5",
    model="qwen3.5_9b",
    models=("qwen3.5_9b",),
    tiny="qwen3.5_tiny",
)
SUITES = (QWEN3, QWEN3_MOE, GPT_OSS, LIGER, QWEN3_5)
