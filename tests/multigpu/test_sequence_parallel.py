"""A row's tokens over two and four GPUs, with NCCL."""

from tests.integrations.sequence_parallel import *  # noqa: F403
from tests.integrations.sequence_parallel_libraries import *  # noqa: F403
