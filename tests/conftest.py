"""What holds for every test, before anything is imported that reads the environment."""

import os

from tests import numerics

# Of a machine whose owner wants no network or no telemetry. huggingface_hub reads them once, at its import; then it refuses the local Hub
# of a test too, or lets `kernels` send an illegal header.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
for _name in OFFLINE:
    os.environ.pop(_name, None)


def pytest_generate_tests(metafunc):
    numerics.parametrize(metafunc)
