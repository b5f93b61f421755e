"""Two processes on the CPU, with gloo, under DeepSpeed."""

from tests.integrations.zero import *  # noqa: F403
