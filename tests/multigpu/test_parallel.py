"""Two processes with a GPU each, with NCCL."""

from tests.integrations.fsdp import *  # noqa: F403
from tests.integrations.parallel import *  # noqa: F403
from tests.integrations.parallel_attention import *  # noqa: F403
from tests.integrations.parallel_eight_bits import *  # noqa: F403
from tests.integrations.parallel_qwen3_moe import *  # noqa: F403
