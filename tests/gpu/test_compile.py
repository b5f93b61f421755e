"""torch.compile through Inductor, torch.export, opcheck and CUDA graphs, with the real cubins."""

import time

import pytest
import torch
import torch._inductor.config

from tests import compile_checks as checks
from tests.gpu.conftest import PACKAGES
from tests.models import tiny_model
from tests.op_cases import OF_QWEN3_AND_GPT_OSS, operations
from tests.ops.common import FLOATS

DEVICE = "cuda"
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128}


@pytest.mark.parametrize(("name", "dtype"), checks.operators_in(FLOATS, kernels=True), ids=str)
def test_operators(request, name, dtype):
    package = next(each for each in map(request.getfixturevalue, PACKAGES) if name in checks.custom_operators(each))
    checks.check_operator(package, name, DEVICE, dtype)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_self_check_compiles_whole(request, name):
    checks.check_compiled_self_checks(request.getfixturevalue(name), DEVICE, torch.bfloat16)


@pytest.mark.parametrize("operation", OF_QWEN3_AND_GPT_OSS)
def test_operations_compile_whole_and_once_for_all_lengths(ops, qwen3_5, gpt_oss, operation):
    checks.check_compiled_operation(operations(ops, qwen3_5, gpt_oss), operation, DEVICE, "inductor")


@pytest.mark.parametrize("options", ({"dynamic": True}, {}, {"mode": "reduce-overhead"}), ids=str)
def test_a_model_compiles_whole_and_once_for_all_lengths(ops, options):
    """With reduce-overhead, CUDA graphs are recorded for each length, and compiled for none anew.

    On a GPU torch's attention is compiled apart for lengths that are multiples of 8, so the plain model sets the number of graphs.
    """
    lengths = (65, 66, 129) if options.get("mode") else (65, 66, 129, 200, 257)
    inputs = [torch.randint(1, SIZES["vocab_size"], (2, length), device=DEVICE) for length in lengths]
    plain = checks.graphs_of(tiny_model(num_hidden_layers=2, **SIZES).to(DEVICE), inputs, **options)
    model = tiny_model(num_hidden_layers=2, **SIZES)
    assert checks.check_compiled_model(ops, DEVICE, lengths=lengths, model=model, recompiles=plain > 1, **options) <= plain


def test_a_deep_model_compiles_in_the_time_of_transformers_own(ops):
    """Of 36 layers, forward and backward. `-s` prints the seconds of both."""
    ids, seconds = torch.randint(1, 1000, (1, 64), device=DEVICE), {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in ("ours", "transformers' own"):
            model = tiny_model(torch.bfloat16, num_hidden_layers=36, **{**SIZES, "hidden_size": 256, "intermediate_size": 512}).to(DEVICE)
            model = ops.kernelize(model) if name == "ours" else model
            torch._dynamo.reset()
            start = time.monotonic()
            torch.compile(model, fullgraph=True, dynamic=False)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            seconds[name] = time.monotonic() - start
    print({name: f"{each:.0f} s" for name, each in seconds.items()})
    assert seconds["ours"] <= 1.5 * seconds["transformers' own"]


@pytest.mark.parametrize("form", checks.FORMS)
def test_what_people_train_compiles_whole_and_once_for_all_lengths(ops, form):
    if checks.FORMS[form][2] is not None:
        pytest.importorskip("peft")
    checks.check_compiled_form(ops, form, DEVICE, "inductor", (64, 128, 200), SIZES)


@pytest.mark.parametrize("strict", (False, True), ids=("as it runs", "strict"))
def test_export(ops, strict):
    checks.check_exported_model(ops, DEVICE, strict, step=8)


def test_a_whole_training_step_is_a_cuda_graph(ops):
    """Forward, backward and optimizer of a kernelized model, captured once and replayed on other tokens: every loss is that of the
    same training without a graph, within what cuBLAS's other workspace in a graph changes, and two such trainings have the same bits."""

    def trainer():
        model = ops.kernelize(tiny_model(torch.bfloat16, num_hidden_layers=2, **SIZES).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        ids = torch.zeros(2, 256, dtype=torch.int64, device=DEVICE)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            return loss

        return ids, step

    batches = [torch.randint(0, 8192, (2, 256), generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(8)]
    expected = []
    ids, step = trainer()
    for batch in batches:
        ids.copy_(batch)
        expected.append(step().item())

    def replayed():
        ids, step = trainer()
        found = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in batches[:3]:  # what is made once: the optimizer's state, cuBLAS's workspaces, the loaded kernels
                ids.copy_(batch)
                found.append(step().item())
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for batch in batches[3:]:
            ids.copy_(batch)
            graph.replay()
            found.append(loss.item())
        return found

    found = replayed()
    assert found == pytest.approx(expected, rel=1e-3)
    assert replayed() == found
