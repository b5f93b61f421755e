"""Experts over two and four GPUs, with NCCL."""

from tests.integrations.expert_parallel import *  # noqa: F403
