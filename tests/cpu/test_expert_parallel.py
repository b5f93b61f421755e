"""Two and four processes on the CPU, with gloo, that share experts."""

from tests.integrations.expert_parallel import *  # noqa: F403
