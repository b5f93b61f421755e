"""The libraries that people train and run Qwen3 with, on the CPU."""

from tests.integrations.adapters import *  # noqa: F403
from tests.integrations.decoders import *  # noqa: F403
from tests.integrations.device_maps import *  # noqa: F403
from tests.integrations.eight_bit_weights import *  # noqa: F403
from tests.integrations.inference import *  # noqa: F403
from tests.integrations.lora import *  # noqa: F403
from tests.integrations.preference import *  # noqa: F403
from tests.integrations.qwen3_moe import *  # noqa: F403
from tests.integrations.trainers import *  # noqa: F403
