"""MLPs and experts that are made again in the backward pass, or in tiles: the same gradients, and what is not kept."""

import importlib

import pytest
import torch

from tests.checkpoints import IDS, INPUTS, REENTRANT, assert_equal, forget_warnings, gradients
from tests.compile_checks import with_adapters
from tests.models import random_tokens, tiny_gpt_oss, tiny_model, tiny_qwen3_moe
from tests.modes import Operators
from tests.patched import lora as adapted
from tests.qwen3_moe_steps import EXPERTS
from tests.tolerances import assert_close
from tests.versions import set_checkpointing


def gradients_and_kept(model):
    """(what `gradients` gives, how many elements autograd keeps for the backward pass, those of the parameters left out)."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, []

    def keep(tensor):
        kept.append(0 if tensor.data_ptr() in parameters else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = gradients(model, **INPUTS)
    return found, sum(kept)


def trained(package, recompute, lora=False, **changes):
    model = tiny_model(num_hidden_layers=3, **changes)
    model = package.kernelize(with_adapters(model, lora_dropout=lora) if lora is not False else model, recompute_mlp=recompute)
    model.enable_input_require_grads()
    return model.train()


@pytest.mark.parametrize("lora", (False, 0.0, 0.1), ids=("plain", "LoRA", "LoRA with dropout"))
def test_the_mlp_is_made_again_with_the_same_bits_instead_of_kept(qwen3, lora):
    models = [trained(qwen3, recompute, lora) for recompute in (False, True)]
    found, kept = zip(*(gradients_and_kept(model) for model in models), strict=True)
    assert_equal(*found)
    assert kept[0] - kept[1] == 3 * 2 * IDS.numel() * models[0].config.intermediate_size


def rows_of(counts):
    """The rows of a matrix that counts. counts: a function of its rows and columns."""
    return lambda tensor: tensor.shape[0] if tensor.dim() == 2 and counts(*tensor.shape) else 0


@pytest.mark.parametrize("checkpoints", (None, False, True), ids=("", "checkpoints", "reentrant ones"))
@pytest.mark.parametrize("lora", (False, 0.0), ids=("plain", "LoRA"))
def test_an_mlp_in_tiles_is_the_same_but_for_rounding_and_as_wide_as_a_tile(qwen3, lora, checkpoints):
    """Results as long as gate or up, or both side by side. hidden_size is 64: no result of so many rows is of the tokens."""
    found, rows = [], []
    for recompute in (False, 16):
        model = trained(qwen3, recompute, lora)
        if checkpoints is not None:
            set_checkpointing(model, use_reentrant=checkpoints)
        width = model.config.intermediate_size
        with Operators(sizes=rows_of(lambda rows, columns, width=width: columns in (width, 2 * width) and rows != 64)) as operators:
            found.append(gradients(model, **INPUTS))
        rows.append(operators.largest)
    assert rows == [IDS.numel(), 16]
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other, torch.float32, "gradient of a model whose MLPs are in tiles")
    model = trained(qwen3, 1024, lora)
    assert_equal(gradients(model, **INPUTS), found[0]) if checkpoints is None else None


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
            set_checkpointing(model, use_reentrant=checkpoints)
        with Operators(sizes=rows_of(lambda rows, width: rows % 67 == 0 and width > 16)) as operators:
            found.append(gradients(model, input_ids=ids, labels=ids))
        most.append(operators.largest)
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
    models = [qwen3.kernelize(tiny_qwen3_moe(num_hidden_layers=3), recompute_mlp=recompute).train() for recompute in (False, True)]
    found, kept = zip(*(gradients_and_kept(model) for model in models), strict=True)
    assert_equal(*found)
    config, sparse = models[0].config, [hasattr(layer.mlp, "experts") for layer in models[0].model.layers]
    widths = [config.num_experts_per_tok * config.moe_intermediate_size if each else config.intermediate_size for each in sparse]
    assert any(sparse) and kept[0] - kept[1] == 2 * IDS.numel() * sum(widths)


@REENTRANT
def test_a_checkpointed_layer_makes_its_mlp_again_once(qwen3, reentrant):
    """The run in the backward pass keeps gate and up for the little while until they are read."""
    runs = []
    for recompute in (False, True):
        model = trained(qwen3, recompute)
        set_checkpointing(model, use_reentrant=reentrant)
        with Operators(torch.ops.aten.mm.default) as products:
            gradients(model, **INPUTS)
        runs.append(products.count)
    assert runs[0] == runs[1]


@REENTRANT
@pytest.mark.parametrize("kind", ("plain", "LoRA", "experts"))
def test_the_last_product_of_a_layer_is_made_again_only_where_the_checkpoint_asks_for_a_result(qwen3, monkeypatch, kind, reentrant):
    """One that is not reentrant stops its second run when everything is saved again, as it does in transformers' own layers."""
    layers = 3
    model = tiny_qwen3_moe(num_hidden_layers=layers) if kind == "experts" else tiny_model(num_hidden_layers=layers)
    model = qwen3.kernelize(with_adapters(model) if kind == "LoRA" else model).train()
    expected = gradients(model, **INPUTS)
    runs = []
    second_run = importlib.import_module(f"{qwen3.__name__}.shared.ops.second_run")
    forward = second_run._Finished.forward
    monkeypatch.setattr(second_run._Finished, "forward", staticmethod(lambda *args: runs.append(1) or forward(*args)))
    set_checkpointing(model, use_reentrant=reentrant)
    model.enable_input_require_grads()
    assert_equal(gradients(model, **INPUTS), expected)
    assert len(runs) == (layers if reentrant else 0)


def test_recomputing_is_for_what_was_told_so_and_goes_with_reset(qwen3):
    models = [trained(qwen3, recompute) for recompute in (True, False)]
    kept = [gradients_and_kept(model)[1] for model in models]
    assert kept[0] < kept[1]
    qwen3.reset()
    qwen3.apply(recompute_mlp=True)
    model = tiny_model(num_hidden_layers=3).train()
    model.enable_input_require_grads()
    for recompute in (True, False):
        qwen3.apply(recompute_mlp=recompute)
        assert gradients_and_kept(model)[1] == kept[not recompute]
    qwen3.reset()
    assert not [name for cls in type(model.model.layers[0]).__mro__ for name in vars(cls) if name == "_bastile_recomputes_mlp"]


@pytest.mark.parametrize("part", ("mlp", "mlp.down_proj"))
def test_an_mlp_that_is_not_fused_is_kept_with_a_warning(qwen3, part):
    """The MLP, or a part of it, has a hook."""
    forget_warnings(qwen3)
    model = trained(qwen3, True)
    for layer in model.model.layers:
        layer.get_submodule(part).register_forward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match="recompute_mlp: the MLP of this Qwen3DecoderLayer is not fused") as warned:
        gradients(model, **INPUTS)
    assert len([w for w in warned if "recompute_mlp" in str(w.message)]) == 1
    with torch.no_grad():
        model(input_ids=IDS)
