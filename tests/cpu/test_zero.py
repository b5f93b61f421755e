"""Two processes on the CPU, with gloo, under DeepSpeed."""

from tests.cpu.test_parallel import device_type, ranks  # noqa: F401
from tests.integrations.zero import *  # noqa: F403
