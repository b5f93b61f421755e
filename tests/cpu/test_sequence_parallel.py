"""Two and four processes on the CPU, with gloo, that share a row of tokens."""

from tests.integrations.sequence_parallel import *  # noqa: F403
from tests.integrations.sequence_parallel_libraries import *  # noqa: F403
