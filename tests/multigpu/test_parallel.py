"""Two processes with a GPU each, with NCCL."""

from tests.integrations.parallel import *  # noqa: F403
