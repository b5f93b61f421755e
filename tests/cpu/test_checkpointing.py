"""Gradient checkpointing of transformers that keeps attention: the same gradients bit for bit, and attention runs once."""

import gc
import importlib
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.compile_checks import with_adapters
from tests.models import random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_moe
from tests.patched import lora as adapted
from tests.qwen3_moe_steps import EXPERTS
from tests.tolerances import assert_close

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def heads_that_run_as_one_operator():
    """Changes of a model's config with which PyTorch's attention on a CPU is `FLASH`: with torch 2.6 only of heads that are not grouped."""
    q, k = torch.ones(1, 2, 2, 8), torch.ones(1, 1, 2, 8)
    with Count(FLASH) as runs:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    return {} if runs.count else {"num_key_value_heads": 4}


class Count(TorchDispatchMode):
    """Counts the runs of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is self.operator
        return function(*args, **(kwargs or {}))


def model_of(package, keep, reentrant=False, lora=False, implementation="sdpa", **changes):
    model = tiny_model(num_hidden_layers=3, **{**heads_that_run_as_one_operator(), **changes})
    model = package.kernelize(with_adapters(model, lora_dropout=0.1) if lora else model, keep_attention=keep)
    model.set_attn_implementation(implementation)  # ours is known once the model is kernelized
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def gradients(model, **inputs):
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def kept_of(*tensors):
    return [kept for tensor in tensors for kept in getattr(tensor.untyped_storage(), "_bastile_kept_attention", ())]


@pytest.mark.parametrize("lora", (False, True), ids=("plain", "LoRA with dropout"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_gradients_are_those_of_full_checkpointing_and_attention_runs_once(qwen3, reentrant, lora):
    ids = random_tokens(2, 17)
    inputs = {"input_ids": ids, "labels": ids}
    expected = gradients(model_of(qwen3, False, reentrant, lora), **inputs)
    model = model_of(qwen3, True, reentrant, lora)
    importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation")._warned.clear()
    with Count(FLASH) as runs, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = gradients(model, **inputs)
    assert_equal(found, expected)
    assert len(found) > 10 and runs.count == 3, "layers"
    assert_equal(gradients(model, **inputs), expected)


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_attention_of_ours_runs_once(qwen3, monkeypatch, reentrant):
    ids = random_tokens(2, 17)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    expected = gradients(model_of(qwen3, False, reentrant, implementation="bastile"), **inputs)
    operations, runs = importlib.import_module(f"{qwen3.__name__}.shared.ops.attention"), []
    forward = operations.attention_forward
    monkeypatch.setattr(operations, "attention_forward", lambda *args: runs.append(1) or forward(*args))
    assert_equal(gradients(model_of(qwen3, True, reentrant, implementation="bastile"), **inputs), expected)
    assert len(runs) == 3


def gradients_and_kept(model, **inputs):
    """(what `gradients` gives, how many elements autograd keeps for the backward pass, those of the parameters left out)."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, []

    def keep(tensor):
        kept.append(0 if tensor.data_ptr() in parameters else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = gradients(model, **inputs)
    return found, sum(kept)


def trained(package, recompute, lora=False, **changes):
    model = tiny_model(num_hidden_layers=3, **changes)
    model = package.kernelize(with_adapters(model, lora_dropout=lora) if lora is not False else model, recompute_mlp=recompute)
    model.enable_input_require_grads()
    return model.train()


@pytest.mark.parametrize("lora", (False, 0.0, 0.1), ids=("plain", "LoRA", "LoRA with dropout"))
def test_the_mlp_is_made_again_with_the_same_bits_instead_of_kept(qwen3, lora):
    ids, models = random_tokens(2, 17), [trained(qwen3, recompute, lora) for recompute in (False, True)]
    found, kept = zip(*(gradients_and_kept(model, input_ids=ids, labels=ids) for model in models), strict=True)
    assert_equal(*found)
    assert kept[0] - kept[1] == 3 * 2 * ids.numel() * models[0].config.intermediate_size


class Widest(TorchDispatchMode):
    """The most rows that any result has whose rows are as long as gate or up, or both side by side."""

    def __init__(self, width):
        super().__init__()
        self.widths, self.rows = (width, 2 * width), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] in self.widths and result.shape[0] != 64:
                self.rows = max(self.rows, result.shape[0])
        return results


@pytest.mark.parametrize("checkpoints", (None, False, True), ids=("", "checkpoints", "reentrant ones"))
@pytest.mark.parametrize("lora", (False, 0.0), ids=("plain", "LoRA"))
def test_an_mlp_in_tiles_is_the_same_but_for_rounding_and_as_wide_as_a_tile(qwen3, lora, checkpoints):
    """hidden_size is 64: no result of so many rows is of the tokens."""
    ids, found, rows = random_tokens(2, 17), [], []
    for recompute in (False, 16):
        model = trained(qwen3, recompute, lora)
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
        with Widest(model.config.intermediate_size) as widest:
            found.append(gradients(model, input_ids=ids, labels=ids))
        rows.append(widest.rows)
    assert rows == [ids.numel(), 16]
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other, torch.float32, "gradient of a model whose MLPs are in tiles")
    model = trained(qwen3, 1024, lora)
    assert_equal(gradients(model, input_ids=ids, labels=ids), found[0]) if checkpoints is None else None


class Rows(TorchDispatchMode):
    """The most rows that any result has beside those of all tokens."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.most = tokens, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[0] % self.tokens == 0 and result.shape[1] > 16:
                self.most = max(self.most, result.shape[0])
        return results


@pytest.mark.parametrize("checkpoints", (None, False, True), ids=("", "checkpoints", "reentrant ones"))
@pytest.mark.parametrize("of", ("plain", "LoRA", "four bits"))
def test_experts_in_tiles_are_the_same_but_for_rounding_and_have_the_rows_of_a_tile(gpt_oss, of, checkpoints):
    """3 experts a token: of 67 tokens 201 rows, unless they come in tiles."""
    ids, found, most = random_tokens(1, 67), [], []
    for recompute in (False, 16):
        model = tiny_gpt_oss(intermediate_size=32)
        model = model if of == "plain" else adapted(model, target_modules=["q_proj"], target_parameters=EXPERTS)
        model = gpt_oss.kernelize(gpt_oss.four_bits(model) if of == "four bits" else model, recompute_mlp=recompute)
        model.enable_input_require_grads()
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
        with Rows(67) as rows:
            found.append(gradients(model, input_ids=ids, labels=ids))
        most.append(rows.most)
        (row,) = [row for row in gpt_oss.explain(model).rows if "tiles" in row.part] or [None]
        assert row is None if recompute is False else (row.part, row.fused, row.count) == ("experts in tiles of 16 tokens", True, 2)
    assert most == [201, 67]
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other, torch.float32, "gradient of a model whose experts are in tiles")


def test_explain_says_what_is_in_tiles(qwen3):
    def said(model, options, what="MLP"):
        rows = {row.part: row for row in qwen3.explain(qwen3.kernelize(model, **options)).rows}
        row = rows[f"{what} in tiles of 512 tokens"]
        return row.fused, row.code, row.reason

    assert said(tiny_model(), {"recompute_mlp": 512}) == (True, "", "")
    assert said(with_adapters(tiny_model(), lora_dropout=0.1), {"recompute_mlp": 512})[1:] == ("tiles", "its adapters have dropout")
    model = tiny_qwen3_moe(mlp_only_layers=[])
    assert said(model, {"recompute_mlp": 512}, "experts") == (True, "", "")
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda *_: None)
    assert said(model, {"recompute_mlp": 512}, "experts")[1:] == ("tiles", "the layer has no experts in a fused node")
    assert "tiles" not in str(qwen3.explain(qwen3.kernelize(tiny_model(), recompute_mlp=True)))
    for wrong in (-16, 0, 8, "all", 16.0):
        with pytest.raises(ValueError, match="recompute_mlp is .*, expected True, False, or the tokens of a tile, a multiple of 16"):
            qwen3.kernelize(tiny_model(), recompute_mlp=wrong)


def test_the_experts_are_made_again_with_the_same_bits_instead_of_kept(qwen3):
    ids = random_tokens(2, 17)
    models = [qwen3.kernelize(tiny_qwen3_moe(num_hidden_layers=3), recompute_mlp=recompute).train() for recompute in (False, True)]
    found, kept = zip(*(gradients_and_kept(model, input_ids=ids, labels=ids) for model in models), strict=True)
    assert_equal(*found)
    config, sparse = models[0].config, [hasattr(layer.mlp, "experts") for layer in models[0].model.layers]
    widths = [config.num_experts_per_tok * config.moe_intermediate_size if each else config.intermediate_size for each in sparse]
    assert any(sparse) and kept[0] - kept[1] == 2 * ids.numel() * sum(widths)


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_a_checkpointed_layer_makes_its_mlp_again_once(qwen3, reentrant):
    """The run in the backward pass keeps gate and up for the little while until they are read."""
    ids = random_tokens(2, 17)
    runs = []
    for recompute in (False, True):
        model = trained(qwen3, recompute)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with Count(torch.ops.aten.mm.default) as products:
            gradients(model, input_ids=ids, labels=ids)
        runs.append(products.count)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("kind", ("plain", "LoRA", "experts"))
def test_the_last_product_of_a_layer_is_made_again_only_where_the_checkpoint_asks_for_a_result(qwen3, monkeypatch, kind, reentrant):
    """One that is not reentrant stops its second run when everything is saved again, as it does in transformers' own layers."""
    ids = random_tokens(2, 17)
    layers = 3
    model = tiny_qwen3_moe(num_hidden_layers=layers) if kind == "experts" else tiny_model(num_hidden_layers=layers)
    model = qwen3.kernelize(with_adapters(model) if kind == "LoRA" else model).train()
    expected = gradients(model, input_ids=ids, labels=ids)
    runs = []
    second_run = importlib.import_module(f"{qwen3.__name__}.shared.ops.second_run")
    forward = second_run._Finished.forward
    monkeypatch.setattr(second_run._Finished, "forward", staticmethod(lambda *args: runs.append(1) or forward(*args)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(gradients(model, input_ids=ids, labels=ids), expected)
    assert len(runs) == (layers if reentrant else 0)


def test_recomputing_is_for_what_was_told_so_and_goes_with_reset(qwen3):
    ids, models = random_tokens(2, 17), [trained(qwen3, recompute) for recompute in (True, False)]
    kept = [gradients_and_kept(model, input_ids=ids, labels=ids)[1] for model in models]
    assert kept[0] < kept[1]
    qwen3.reset()
    qwen3.apply(recompute_mlp=True)
    model = tiny_model(num_hidden_layers=3).train()
    model.enable_input_require_grads()
    for recompute in (True, False):
        qwen3.apply(recompute_mlp=recompute)
        assert gradients_and_kept(model, input_ids=ids, labels=ids)[1] == kept[not recompute]
    qwen3.reset()
    assert not [name for cls in type(model.model.layers[0]).__mro__ for name in vars(cls) if name == "_bastile_recomputes_mlp"]


@pytest.mark.parametrize("part", ("mlp", "mlp.down_proj"))
def test_an_mlp_that_is_not_fused_is_kept_with_a_warning(qwen3, part):
    """The MLP, or a part of it, has a hook."""
    importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation")._warned.clear()
    ids, model = random_tokens(2, 17), trained(qwen3, True)
    for layer in model.model.layers:
        layer.get_submodule(part).register_forward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match="recompute_mlp: the MLP of this Qwen3DecoderLayer is not fused") as warned:
        gradients(model, input_ids=ids, labels=ids)
    assert len([w for w in warned if "recompute_mlp" in str(w.message)]) == 1
    with torch.no_grad():
        model(input_ids=ids)


def test_without_checkpointing_nothing_is_kept(qwen3):
    ids = random_tokens(2, 17)
    model = model_of(qwen3, True)
    model.gradient_checkpointing_disable()
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    gradients(model, input_ids=ids, labels=ids)
    assert not kept_of(*seen)


def test_what_is_kept_goes_with_the_checkpoint(qwen3):
    ids = random_tokens(2, 17)
    model, seen = model_of(qwen3, True), []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert len(kept_of(*seen)) == 1
    loss.backward()
    assert not kept_of(*seen), "the backward pass has used it"
    hook.remove()
    seen.clear()
    gc.collect()
    outputs = [model(input_ids=ids, labels=ids, use_cache=False).loss for _ in range(2)]
    expected = gradients(model_of(qwen3, False), input_ids=ids, labels=ids)
    model.zero_grad()
    for loss in outputs:  # two forward passes, then two backward passes
        loss.backward(retain_graph=True)
    for a, b in zip((p.grad for p in model.parameters()), expected[1:], strict=True):
        torch.testing.assert_close(a, 2 * b)


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_two_passes_over_the_same_input_with_other_masks_do_not_meet(qwen3, reentrant):
    """The first layer's input is one tensor in both."""
    ids = random_tokens(2, 17)

    def passes(keep):
        model = model_of(qwen3, keep, reentrant)
        embedded = model.model.embed_tokens(ids).detach().requires_grad_()
        losses = []
        for start in (0, 5):
            mask = torch.ones_like(ids)
            mask[:, :start] = 0
            losses.append(model(inputs_embeds=embedded, labels=ids, attention_mask=mask, use_cache=False).loss)
        (losses[0] + 2 * losses[1]).backward()
        return [embedded.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_equal(passes(True), passes(False))


@pytest.mark.parametrize("implementation", ("sdpa", "bastile"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_several_passes_over_one_input(qwen3, reentrant, implementation):
    """A reference model's pass, R-Drop's two, one for each adapter: their losses go backward together, or not at all."""
    ids = random_tokens(2, 17)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0

    def passes(keep):
        model = model_of(qwen3, keep, reentrant, implementation=implementation)
        embedded = model.model.embed_tokens(ids).detach().requires_grad_()
        inputs = {"inputs_embeds": embedded, "labels": ids, "attention_mask": mask, "use_cache": False}
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
    ids = random_tokens(2, 17)
    found = []
    for keep in (False, True):
        model = model_of(qwen3, keep)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        embedded = model.model.embed_tokens(ids)
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x, model=model: model.model(inputs_embeds=x, use_cache=False).last_hidden_state, embedded, use_reentrant=False
        )
        hidden.sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)


class OnTheHost(torch.autograd.Function):
    """Checkpoints as Unsloth and axolotl do: the input is held on the CPU."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x.detach().clone())
        return function(x)

    @staticmethod
    def backward(ctx, dout):
        x = ctx.saved_tensors[0].clone().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, dout)
        return None, x.grad


def with_packed_tensors(function, x):
    """Checkpoints as `gradient_checkpointing_enable(offload=True)` does, and whoever calls a model within `save_on_cpu`."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("kind", (OnTheHost.apply, with_packed_tensors), ids=("Unsloth's", "offload=True"))
def test_a_checkpoint_of_a_copy_computes_attention_again_and_says_so_once(qwen3, kind):
    importlib.import_module(f"{qwen3.__name__}.shared.hf.parts.explanation")._warned.clear()
    ids, found = random_tokens(2, 17), []
    for keep in (False, True):
        model = model_of(qwen3, keep)
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = kind
        with warnings.catch_warnings(record=True) as said, Count(FLASH) as runs:
            warnings.simplefilter("always")
            found.append(gradients(model, input_ids=ids, labels=ids))
        texts = [str(warning.message) for warning in said if "keep_attention" in str(warning.message)]
        assert len(texts) == keep and all("offload=True" in text for text in texts) and runs.count == 6
    assert_equal(*found)


def run_of_first_layer(model, x):
    """A call of a decoder layer, whose arguments but x are the same objects in every call."""
    decoder = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    angles = decoder.rotary_emb(x, torch.arange(x.shape[1])[None])
    return lambda: decoder.layers[0](x, position_embeddings=angles, attention_mask=None)


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
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


@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
def test_inference_mode(qwen3, reentrant):
    """Whose tensors have no version, while the model is in training mode."""
    ids = random_tokens(2, 17)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error", RuntimeWarning)
        found, expected = (model_of(qwen3, keep, reentrant)(input_ids=ids, use_cache=False).logits for keep in (True, False))
    assert torch.equal(found, expected)


def test_dropout_in_attention_computes_it_again(qwen3):
    ids = random_tokens(2, 17)
    inputs = {"input_ids": ids, "labels": ids}
    found, expected = (gradients(model_of(qwen3, keep, attention_dropout=0.2), **inputs) for keep in (True, False))
    assert_equal(found, expected)


def test_an_attention_that_cannot_be_kept_is_warned_of_once(qwen3):
    ids = random_tokens(2, 17)
    inputs = {"input_ids": ids, "labels": ids}
    expected = gradients(model_of(qwen3, False, implementation="eager"), **inputs)
    model = model_of(qwen3, True, implementation="eager")
    with pytest.warns(RuntimeWarning, match="keep_attention has no effect with attn_implementation='eager'") as warned:
        assert_equal(gradients(model, **inputs), expected)
    assert len([w for w in warned if "keep_attention" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        gradients(model, **inputs)


def test_an_attention_of_pytorchs_that_is_no_kernel_is_computed_again(qwen3, monkeypatch):
    """Does what torch 2.6 does on a CPU for grouped heads: the same gradients, and a warning that does not advise what is in force."""
    shared = f"{qwen3.__name__}.shared"
    importlib.import_module(f"{shared}.hf.parts.explanation")._warned.clear()
    monkeypatch.setattr(importlib.import_module(f"{shared}.ops.recorded"), "_ASKS", {})
    ids = random_tokens(2, 17)
    inputs = {"input_ids": ids, "labels": ids}
    expected = gradients(model_of(qwen3, False, num_key_value_heads=2), **inputs)
    with pytest.warns(RuntimeWarning, match="keep_attention: attn_implementation='sdpa' ran as several .* Use 'bastile', or another torch"):
        assert_equal(gradients(model_of(qwen3, True, num_key_value_heads=2), **inputs), expected)


def test_apply_and_reset(qwen3):
    ids = random_tokens(2, 17)
    inputs = {"input_ids": ids, "labels": ids}
    qwen3.apply(keep_attention=True)
    try:
        model = tiny_model(num_hidden_layers=2, **heads_that_run_as_one_operator())
        model.gradient_checkpointing_enable()
        counts = []
        for keep in (True, False):
            qwen3.apply(keep_attention=keep)
            with Count(FLASH) as runs:
                gradients(model, **inputs)
            counts.append(runs.count)
        assert counts == [2, 4]
    finally:
        qwen3.reset()
    assert not [name for cls in type(model.model.layers[0]).__mro__ for name in vars(cls) if name == "_bastile_keeps_attention"]
