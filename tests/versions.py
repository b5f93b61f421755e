"""What differs between the versions of transformers and torch that the tests run with."""

import inspect

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3 import modeling_qwen3

# transformers leaves its decorators for `kernels` out where `kernels` is not of the version that it wants.
DECORATORS = isinstance(modeling_qwen3.apply_rotary_pos_emb, torch.nn.Module)
needs_decorators = pytest.mark.skipif(not DECORATORS, reason="this transformers does not work with this kernels")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
needs_compiler = pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 traces neither transformers' models nor our named tuples")
# From 5.23 on, gradient checkpointing stands in a wrapper around the forward of a decoder layer's class.
WRAPS_FORWARDS = "__call__" not in vars(GradientCheckpointingLayer)


def forward_of(cls):
    """The forward that a class of transformers calls in the end, which its wrapper for gradient checkpointing closes over."""
    function = vars(cls)["forward"]
    while inspect.isfunction(function) and function.__globals__["__name__"] == GradientCheckpointingLayer.__module__:
        if "forward" not in function.__code__.co_freevars:
            break
        function = inspect.getclosurevars(function).nonlocals["forward"]
    return function


def cell_of(cls):
    """The cell in which transformers' wrapper around a class's forward holds that; None where there is no wrapper."""
    function = vars(cls)["forward"]
    return dict(zip(function.__code__.co_freevars, function.__closure__ or ())).get("forward") if WRAPS_FORWARDS else None


def set_checkpointing(model, on=True, **options):
    """Switches gradient checkpointing of a model on or off. options: of torch.utils.checkpoint."""
    name = "activation" if WRAPS_FORWARDS else "gradient"
    switch = getattr(model, f"{name}_checkpointing_{'enable' if on else 'disable'}")
    switch(*([options] if on and options else []))
