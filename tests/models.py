"""Small models, and the comparison of their training steps. Tests of the layers and of patching use them on any device."""

import contextlib
import importlib

import numpy
import torch

from tests.ops.common import mesh_of_one
from tests.tolerances import assert_close, relative_error

IMAGE = 198  # token of `tiny_qwen3_5_with_vision`
VOCABULARY = 199


def tiny_config(**changes):
    """Two layers, odd vocabulary, untied."""
    from transformers import Qwen3Config

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return Qwen3Config(**{**sizes, **changes})


def tiny_model(dtype=torch.float32, cls=None, **changes):
    """In training mode, always with the same weights, with norms that are not all ones."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = (cls or Qwen3ForCausalLM)(tiny_config(**changes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).train()


def tiny_qwen3_5(dtype=torch.float32, width=16, config=None, cls=None, **changes):
    """Three delta nets and a layer with attention, in training mode, always with the same weights. width: of the nets' keys and values.
    config, cls: those of another model of the kind."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    model = (cls or Qwen3_5ForCausalLM)((config or Qwen3_5TextConfig)(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv1d" not in name:
            torch.nn.init.normal_(parameter, 0, 0.15)
    return model.to(dtype).train()


def tiny_qwen3_5_sparse(name, dtype=torch.float32, **changes):
    """Makes, as `tiny_qwen3_5` does, a Qwen3.5-MoE or a Qwen3-Next. name: of transformers' module."""
    kinds = "configuration", "modeling"
    configuration, modeling = (importlib.import_module(f"transformers.models.{name}.{kind}_{name}") for kind in kinds)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
    if name == "qwen3_next":
        config, cls = configuration.Qwen3NextConfig, modeling.Qwen3NextForCausalLM
    else:
        config, cls = configuration.Qwen3_5MoeTextConfig, modeling.Qwen3_5MoeForCausalLM
    return tiny_qwen3_5(dtype, config=config, cls=cls, **{**sizes, **changes})


def tiny_olmo_hybrid(**changes):
    """Makes, as `tiny_qwen3_5` does, an OLMo-Hybrid of two delta nets and two layers with attention."""
    from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM

    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "pad_token_id": 0}
    return tiny_qwen3_5(config=OlmoHybridConfig, cls=OlmoHybridForCausalLM, **{**kinds, **changes})


def tiny_qwen3_5_with_vision(name, **changes):
    """A Qwen3.5, or a Qwen3.5-MoE, of two layers behind a vision tower. name: of transformers' module."""
    kinds = "configuration", "modeling"
    configuration, modeling = (importlib.import_module(f"transformers.models.{name}.{kind}_{name}") for kind in kinds)
    prefix = "Qwen3_5Moe" if name == "qwen3_5_moe" else "Qwen3_5"
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], **changes}
    text = (tiny_qwen3_5_sparse(name, **changes) if name == "qwen3_5_moe" else tiny_qwen3_5(**changes)).config.to_dict()
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
             "num_position_embeddings": 16}  # fmt: skip
    tokens = {"image_token_id": IMAGE, "video_token_id": 197, "vision_start_token_id": 195, "vision_end_token_id": 196}
    torch.manual_seed(0)
    config = getattr(configuration, f"{prefix}Config")(text_config=text, vision_config=tower, **tokens)
    return getattr(modeling, f"{prefix}ForConditionalGeneration")(config).train()


# Ways to write to a tensor that its version does not count, as torch.distributed's broadcast, recv and all_reduce write to it.
UNCOUNTED = {
    "numpy": lambda tensor, value: numpy.copyto(tensor.numpy(), value),
    "data": lambda tensor, value: tensor.data.copy_(value),
    "dlpack": lambda tensor, value: torch.utils.dlpack.from_dlpack(tensor).copy_(value),
}


def write_uncounted(way, tensor, value):
    """Writes to a tensor in one of the ways of `UNCOUNTED`."""
    version = tensor._version
    UNCOUNTED[way](tensor, value)
    assert tensor._version == version and torch.equal(tensor, value)


def random_tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def tiny_gpt_oss(dtype=torch.float32, cls=None, attn_implementation="eager", **changes):
    """A GPT-OSS in training mode, always with the same weights; its experts' biases put the gates on both sides of the clamps."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
                            "truncate": False},
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = (cls or GptOssForCausalLM)._from_config(GptOssConfig(**{**sizes, **changes}), attn_implementation=attn_implementation)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("gate_up_proj_bias"):
            parameter.data.copy_(torch.randn_like(parameter).round().clamp(-1, 1) * 12)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        else:
            torch.nn.init.normal_(parameter)
    return model.to(dtype).train()


def tiny_qwen3_moe(dtype=torch.float32, cls=None, **changes):
    """A Qwen3-MoE in training mode, always with the same weights: two layers of experts and between them one without."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = (cls or Qwen3MoeForCausalLM)(Qwen3MoeConfig(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "experts" in name or "gate.weight" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype).train()


def own_attributes(layer) -> set:
    """The names that a layer class has beside those of torch.nn.Module: the Hub's rule allows few."""
    classes = (cls for cls in layer.__mro__ if cls not in torch.nn.Module.__mro__)
    return {key for cls in classes for key in vars(cls) if not key.startswith("__")}


def packed_groups(package, layer):
    """Whether one matrix holds the weights of q, k and v of a decoder layer, and whether one holds those of gate and up."""
    side_by_side = importlib.import_module(f"{package.__name__}.shared.ops.neighbours").side_by_side
    attention, mlp = layer.self_attn, layer.mlp
    groups = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return [side_by_side([next(linear.parameters()) for linear in group]) is not None for group in groups]


class Step:
    """What one forward and backward pass of a model gave: `output`, `loss`, and `gradients` by parameter. call: of the same parameters, in
    the model's place, as torch.compile gives it."""

    def __init__(self, model, call=None, **inputs):
        model.zero_grad()
        self.output = (model if call is None else call)(**inputs)
        self.loss = self.output[0] if isinstance(self.output, tuple) else self.output.loss
        self.loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def assert_same(self, expected, factor=1.0):
        """The loss and every gradient are those of another step, but for fp32's order of additions."""
        assert_close(self.loss, expected.loss, torch.float32, "loss", factor)
        assert self.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert self.gradients[name].dtype == gradient.dtype
            assert_close(self.gradients[name], gradient, torch.float32, name, factor)

    def assert_as_exact_as(self, other, exact, floor=1e-3, most=1.25):
        """Nowhere much farther from an exact step than another one is: two runs differ by as much as each errs.

        floor: of what is too little an error to be compared; by default for runs in bf16; most: times the other's error, for a gradient.
        """
        assert relative_error(self.loss, exact.loss) <= 2 * relative_error(other.loss, exact.loss) + floor
        for name, gradient in exact.gradients.items():
            mine, others = (relative_error(step.gradients[name], gradient) for step in (self, other))
            assert mine <= most * others + floor, f"{name}: relative error {mine:.2e}, without the layers {others:.2e}"


def are_equal(found: Step, expected: Step) -> bool:
    """Whether two steps have the same bits."""
    same = found.gradients.keys() == expected.gradients.keys() and torch.equal(found.loss, expected.loss)
    return same and all(torch.equal(found.gradients[name], gradient) for name, gradient in expected.gradients.items())


def compiled_whole(model):
    """A model that torch.compile makes one graph of."""
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compiled_step(model, **inputs) -> Step:
    """A step of a model that torch.compile makes one graph of."""
    return Step(model, compiled_whole(model), **inputs)


def check_compiled(model, expected: Step, factor=1.0, compiled=None, **inputs):
    """Compiled, a model's step is an expected one; the gradients within a factor of the tolerance. compiled: what stands for the model."""
    found = compiled_step(model, **inputs) if compiled is None else Step(model, compiled, **inputs)
    assert_close(found.loss, expected.loss, torch.float32, "loss")
    found.assert_same(expected, factor)


@contextlib.contextmanager
def sharded(model, inner=lambda layer: ()):
    """The model under FSDP2 on this process alone: classes become subclasses, weights are DTensors outside of a forward pass. inner: the
    modules of a layer that are units of their own."""
    from torch.distributed.fsdp import fully_shard

    with mesh_of_one() as mesh:
        for layer in model.model.layers:
            for module in (*inner(layer), layer):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        yield model


def whole(step: Step) -> Step:
    """The step, with whole gradients of sharded parameters."""
    step.gradients = {name: gradient.full_tensor() for name, gradient in step.gradients.items()}
    return step


def losses_of(model, optimizer, batches, **inputs) -> list[float]:
    """The losses of a training run, of a step for each batch."""
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, **inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_same_bits(model, **inputs):
    """Two runs with deterministic algorithms give the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (Step(model, **inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert are_equal(first, second)
