"""Two GPUs under DeepSpeed."""

from tests.integrations.zero import *  # noqa: F403
