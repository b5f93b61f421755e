"""Gradient checkpointing of transformers that keeps attention: the same gradients bit for bit, and attention runs once."""

import gc
import importlib
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.checkpoints import FLASH, IDS, INPUTS, REENTRANT, OnTheHost, assert_equal, forget_warnings, gradients, with_one_operator
from tests.compile_checks import with_adapters
from tests.models import tiny_model
from tests.modes import Operators
from tests.versions import set_checkpointing

PADDED = torch.ones_like(IDS)
PADDED[1, 9:] = 0


def model_of(package, keep, reentrant=False, lora=False, implementation="sdpa", **changes):
    model = tiny_model(num_hidden_layers=3, **{**with_one_operator(), **changes})
    model = package.kernelize(with_adapters(model, lora_dropout=0.1) if lora else model, keep_attention=keep)
    model.set_attn_implementation(implementation)  # ours is known once the model is kernelized
    set_checkpointing(model, use_reentrant=reentrant)
    model.enable_input_require_grads()
    return model


def kept_of(*tensors):
    return [kept for tensor in tensors for kept in getattr(tensor.untyped_storage(), "_bastile_kept_attention", ())]


@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
@REENTRANT
def test_gradients_are_those_of_full_checkpointing_and_attention_runs_once(qwen3, reentrant, lora):
    expected = gradients(model_of(qwen3, False, reentrant, lora), **INPUTS)
    model = model_of(qwen3, True, reentrant, lora)
    forget_warnings(qwen3)
    with Operators(FLASH) as runs, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = gradients(model, **INPUTS)
    assert_equal(found, expected)
    assert len(found) > 10 and runs.count == 3, "layers"
    assert_equal(gradients(model, **INPUTS), expected)


@REENTRANT
def test_attention_of_ours_runs_once(qwen3, monkeypatch, reentrant):
    expected = gradients(model_of(qwen3, False, reentrant, implementation="bastile"), **INPUTS, attention_mask=PADDED)
    operations, runs = importlib.import_module(f"{qwen3.__name__}.shared.ops.attention"), []
    forward = operations.attention_forward
    monkeypatch.setattr(operations, "attention_forward", lambda *args: runs.append(1) or forward(*args))
    assert_equal(gradients(model_of(qwen3, True, reentrant, implementation="bastile"), **INPUTS, attention_mask=PADDED), expected)
    assert len(runs) == 3


@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
def test_a_checkpoint_packs_one_tensor_for_a_node(qwen3, monkeypatch, lora):
    """The gradients are those of a model that is not checkpointed, in a second backward pass too."""
    packed = []
    monkeypatch.setitem(torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", packed.append)
    model, inputs = model_of(qwen3, False, lora=lora, implementation="bastile"), {**INPUTS, "attention_mask": PADDED}
    expected = gradients(model, **inputs)
    assert [each.numel() for each in packed] == [0] * 2 * 3 * 3, "in both runs, of 3 layers: attention and what is before and after it"
    torch.manual_seed(0)
    loss = model(**inputs, use_cache=False).loss
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_equal([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected[1:])
    model.gradient_checkpointing_disable()
    assert_equal(gradients(model, **inputs), expected)


@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
@REENTRANT
def test_nothing_of_a_pass_outlives_its_backward_pass(qwen3, reentrant, lora):
    model, inputs, counts = model_of(qwen3, False, reentrant, lora, "bastile"), {**INPUTS, "attention_mask": PADDED}, []
    for _ in range(4):
        gradients(model, **inputs)
        gc.collect()
        counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert counts[1] == counts[-1]


def test_another_default_dtype_in_the_second_run(qwen3):
    model = model_of(qwen3, False)
    expected = gradients(model, **INPUTS)
    loss = model(**INPUTS, use_cache=False).loss
    model.zero_grad()
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected[1:])


def other_parameter(layer):
    layer.mlp.up_proj.weight = torch.nn.Parameter(1.5 * layer.mlp.up_proj.weight.detach())


def other_data(layer):
    layer.mlp.up_proj.weight.data = 1.5 * layer.mlp.up_proj.weight.data


@pytest.mark.parametrize("change", (other_parameter, other_data))
def test_a_weight_that_changes_before_the_second_run(qwen3, change):
    """All of the second run reads the weights as they are then, as in transformers."""
    found = []
    for model in (model_of(qwen3, False), tiny_model(num_hidden_layers=3, **with_one_operator())):
        set_checkpointing(model, use_reentrant=False)
        loss = model(**INPUTS, use_cache=False).loss
        for layer in model.model.layers:
            change(layer)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6))


def test_weights_that_exist_while_their_layer_runs(qwen3):
    """Hooks that fetch and drop them, and a checkpoint whose second run goes to its end."""
    expected = gradients(model_of(qwen3, False), **INPUTS)
    model = model_of(qwen3, False)
    set_checkpointing(model, use_reentrant=False, early_stop=False)
    stored = {parameter: parameter.data.clone() for layer in model.model.layers for parameter in layer.parameters()}

    def switch(there):
        def hook(layer, *_):
            for parameter in layer.parameters():
                parameter.data = stored[parameter] if there else torch.full_like(stored[parameter], float("nan"))

        return hook

    for layer in model.model.layers:
        layer.register_forward_pre_hook(switch(True))
        layer.register_forward_hook(switch(False), always_call=True)
    assert_equal(gradients(model, **INPUTS), expected)


def test_a_second_run_with_another_adapter_is_an_error(qwen3):
    model = model_of(qwen3, False, lora=True)
    loss = model(**INPUTS, use_cache=False).loss
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    layer.merge()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="the second run of a checkpoint computed with other tensors"):
        loss.backward()


def test_hooks_that_are_no_functions(qwen3):
    model = model_of(qwen3, False)
    model.gradient_checkpointing_disable()
    expected = gradients(model, **INPUTS)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
        assert_equal(gradients(model, **INPUTS), expected)


def test_without_checkpointing_nothing_is_kept(qwen3):
    model = model_of(qwen3, True)
    model.gradient_checkpointing_disable()
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    gradients(model, **INPUTS)
    assert not kept_of(*seen)


def test_what_is_kept_goes_with_the_checkpoint(qwen3):
    model, seen = model_of(qwen3, True), []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    loss = model(**INPUTS, use_cache=False).loss
    assert len(kept_of(*seen)) == 1
    loss.backward()
    assert not kept_of(*seen), "the backward pass has used it"
    hook.remove()
    seen.clear()
    gc.collect()
    outputs = [model(**INPUTS, use_cache=False).loss for _ in range(2)]
    expected = gradients(model_of(qwen3, False), **INPUTS)
    model.zero_grad()
    for loss in outputs:  # two forward passes, then two backward passes
        loss.backward(retain_graph=True)
    for a, b in zip((p.grad for p in model.parameters()), expected[1:], strict=True):
        torch.testing.assert_close(a, 2 * b)


@REENTRANT
def test_two_passes_over_the_same_input_with_other_masks_do_not_meet(qwen3, reentrant):
    """The first layer's input is one tensor in both."""

    def passes(keep):
        model = model_of(qwen3, keep, reentrant)
        embedded = model.model.embed_tokens(IDS).detach().requires_grad_()
        losses = []
        for start in (0, 5):
            mask = torch.ones_like(IDS)
            mask[:, :start] = 0
            losses.append(model(inputs_embeds=embedded, labels=IDS, attention_mask=mask, use_cache=False).loss)
        (losses[0] + 2 * losses[1]).backward()
        return [embedded.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_equal(passes(True), passes(False))


@pytest.mark.parametrize("implementation", ("sdpa", "bastile"))
@REENTRANT
def test_several_passes_over_one_input(qwen3, reentrant, implementation):
    """A reference model's pass, R-Drop's two, one for each adapter: their losses go backward together, or not at all."""

    def passes(keep):
        model = model_of(qwen3, keep, reentrant, implementation=implementation)
        embedded = model.model.embed_tokens(IDS).detach().requires_grad_()
        inputs = {"inputs_embeds": embedded, "labels": IDS, "attention_mask": PADDED, "use_cache": False}
        with torch.no_grad():
            model(**inputs)
        model(**inputs)
        assert not kept_of(embedded), "no backward pass will come"
        losses = [model(**inputs).loss for _ in range(3)]
        assert len(kept_of(embedded)) == 3 * keep
        (losses[2] + 2 * losses[0]).backward()
        del losses
        assert not kept_of(embedded)
        return [embedded.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_equal(passes(True), passes(False))


def test_a_second_backward_pass_and_an_outer_checkpoint_are_right(qwen3):
    found = []
    for keep in (False, True):
        model = model_of(qwen3, keep)
        loss = model(**INPUTS, use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        embedded = model.model.embed_tokens(IDS)
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x, model=model: model.model(inputs_embeds=x, use_cache=False).last_hidden_state, embedded, use_reentrant=False
        )
        hidden.sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


def with_packed_tensors(function, x):
    """Checkpoints as `gradient_checkpointing_enable(offload=True)` does, and whoever calls a model within `save_on_cpu`."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("kind", (OnTheHost.apply, with_packed_tensors), ids=("Unsloth's", "offload=True"))
def test_a_checkpoint_of_a_copy_computes_attention_again_and_says_so_once(qwen3, kind):
    forget_warnings(qwen3)
    found = []
    for keep in (False, True):
        model = model_of(qwen3, keep)
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = kind
        with warnings.catch_warnings(record=True) as said, Operators(FLASH) as runs:
            warnings.simplefilter("always")
            found.append(gradients(model, **INPUTS))
        texts = [str(warning.message) for warning in said if "keep_attention" in str(warning.message)]
        assert len(texts) == keep and all("offload=True" in text for text in texts) and runs.count == 6
    assert_equal(*found)


def run_of_first_layer(model, x):
    """A call of a decoder layer, whose arguments but x are the same objects in every call."""
    decoder = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    angles = decoder.rotary_emb(x, torch.arange(x.shape[1])[None])
    return lambda: decoder.layers[0](x, position_embeddings=angles, attention_mask=None)


@REENTRANT
def test_runs_that_are_alike_do_not_meet(qwen3, reentrant):
    """Of one tensor and with the same arguments, such as angles that are kept: their dropouts differ, or the weights by then."""

    def passes(keep):
        model = model_of(qwen3, keep, reentrant, lora=True)
        x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        run = run_of_first_layer(model, x)
        torch.manual_seed(0)
        outputs = [run() for _ in range(3)]
        for output in outputs:
            output.square().sum().backward()
        with torch.no_grad():
            left = run()
            model.get_submodule("base_model.model.model.layers.0.self_attn.v_proj.base_layer").weight.mul_(2)
        outputs += [left, run()]
        outputs[-1].square().sum().backward()
        return [*outputs, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_equal(passes(True), passes(False))


def test_an_input_that_was_written_to_is_another_one(qwen3):
    """A checkpoint may run again with the tensor itself."""

    def runs(keep):
        model, found = model_of(qwen3, keep), []
        x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))

        def as_it_is_now(function, x):
            class Again(torch.autograd.Function):
                @staticmethod
                def forward(ctx, given):
                    return function(x)

                @staticmethod
                def backward(ctx, dout):
                    with torch.enable_grad():
                        found.append(function(x))
                    return dout

            return Again.apply(x.detach().requires_grad_())

        model.model.layers[0]._gradient_checkpointing_func = as_it_is_now
        found.append(run_of_first_layer(model, x)())
        x.mul_(2)
        found[0].sum().backward()
        return found

    found = runs(True)
    assert_equal(found, runs(False))
    assert not torch.equal(*found)


@REENTRANT
def test_inference_mode(qwen3, reentrant):
    """Whose tensors have no version, while the model is in training mode."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error", RuntimeWarning)
        found, expected = (model_of(qwen3, keep, reentrant)(input_ids=IDS, use_cache=False).logits for keep in (True, False))
    assert torch.equal(found, expected)


def test_dropout_in_attention_computes_it_again(qwen3):
    found, expected = (gradients(model_of(qwen3, keep, attention_dropout=0.2), **INPUTS) for keep in (True, False))
    assert_equal(found, expected)


def test_an_attention_that_cannot_be_kept_is_warned_of_once(qwen3):
    expected = gradients(model_of(qwen3, False, implementation="eager"), **INPUTS)
    model = model_of(qwen3, True, implementation="eager")
    with pytest.warns(RuntimeWarning, match="keep_attention has no effect with attn_implementation='eager'") as warned:
        assert_equal(gradients(model, **INPUTS), expected)
    assert len([w for w in warned if "keep_attention" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        gradients(model, **INPUTS)


def test_an_attention_of_pytorchs_that_is_no_kernel_is_computed_again(qwen3, monkeypatch):
    """Does what torch 2.6 does on a CPU for grouped heads: the same gradients, and a warning that does not advise what is in force."""
    shared = f"{qwen3.__name__}.shared"
    importlib.import_module(f"{shared}.hf.parts.explanation")._warned.clear()
    monkeypatch.setattr(importlib.import_module(f"{shared}.ops.recorded"), "_ASKS", {})
    expected = gradients(model_of(qwen3, False, num_key_value_heads=2), **INPUTS)
    with pytest.warns(RuntimeWarning, match="keep_attention: attn_implementation='sdpa' ran as several .* Use 'bastile', or another torch"):
        assert_equal(gradients(model_of(qwen3, True, num_key_value_heads=2), **INPUTS), expected)


def test_apply_and_reset(qwen3):
    qwen3.apply(keep_attention=True)
    try:
        model = tiny_model(num_hidden_layers=2, **with_one_operator())
        model.gradient_checkpointing_enable()
        counts = []
        for keep in (True, False):
            qwen3.apply(keep_attention=keep)
            with Operators(FLASH) as runs:
                gradients(model, **INPUTS)
            counts.append(runs.count)
        assert counts == [2, 4]
    finally:
        qwen3.reset()
    assert not [name for cls in type(model.model.layers[0]).__mro__ for name in vars(cls) if name == "_bastile_keeps_attention"]
