"""`capture` without a shape: rows of padded and packed batches, whose lengths are rounded, have graphs for the most frequent sizes."""

import copy
import importlib
import warnings

import pytest
import torch

from tests.capturing import Rerun, assert_equal, batch, graphs_of, loss_of, one_family, whole
from tests.cpu.capture.test_capture_threads import started
from tests.tolerances import assert_close

SIZES = (40, 96, 52, 36)  # of rounded rows


def padded(seed, total=40, rows=3):
    """Options of a batch of some texts, of as many tokens as are rounded up to `total`, which lie elsewhere for each seed."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.full((rows,), total // rows)
    lengths[0] += int(torch.randint(0, 3, (1,), generator=random))
    lengths[1] -= int(torch.randint(0, 5, (1,), generator=random))
    lengths[-1] = total - int(torch.randint(0, 2, (1,), generator=random)) - int(lengths[:-1].sum())
    longest = int(lengths.max()) + seed % 3
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = batch(seed, mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


def packed(seed, total=40):
    first = 5 + seed % 17
    ids = batch(seed, (1, total))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat((torch.arange(first), torch.arange(total - first)))[None]}


def step(model, options, backward=True):
    loss = model(**options, use_cache=False).loss
    if backward:
        loss.backward()
    return loss


def gradients(model, options):
    model.zero_grad()
    step(model, options)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(model, plain, options):
    """How many graphs ran in a step of a model whose gradients are those of another one."""
    before = Rerun.replays
    assert_equal(gradients(model, options), gradients(plain, options))
    return Rerun.replays - before


def pair(package, model, **told):
    """The model, captured for all sizes, and the same without."""
    plain = copy.deepcopy(model)
    for m in (model, plain):
        package.kernelize(m)
        (m.get_base_model() if hasattr(m, "peft_config") else m).set_attn_implementation("bastile")
    return package.capture(model, **told), plain


def row_of(package, model):
    return next(row for row in package.explain(model).rows if row.part.startswith("captured: ") and "sizes" in row.part)


@pytest.fixture(params=("plain", "checkpointed", "lora"))
def made(request, tiny_model):
    """A function that makes a model that is trained in one of the ways."""

    def make(**options):
        model = tiny_model(attn_implementation="sdpa", **options)
        if request.param != "plain":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if request.param == "lora":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0))
        return model

    return make


def test_padded_batches_of_one_rounded_size(package, made):
    """Other documents, another number of tokens that is rounded to the same, and other shapes of the batch replay the same graphs."""
    model, plain = pair(package, made())
    for seed, graphs in enumerate((0, *[whole()] * 7)):
        assert compare(model, plain, padded(seed)) == graphs
    row = row_of(package, model)
    assert row.fused and row.part == "captured: 1 of 1 sizes, 100% of the passes, 0.0 GiB"


@one_family
def test_packed_rows(package, tiny_model):
    """With documents in position_ids, and in cu_seq_lens_q; the rows' lengths are rounded once four were seen."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for total in (33, 34, 35, 36):
        compare(model, plain, packed(0, total))
    found = [compare(model, plain, packed(seed, 39 + seed % 2)) for seed in range(6)]
    assert found == [0, *[whole()] * 5]
    for seed in range(4):
        options = packed(seed)
        bounds = torch.tensor([0, 5 + seed % 17, 40], dtype=torch.int32)
        del options["position_ids"]
        options.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        found.append(compare(model, plain, options))
    assert found[-1] == whole()


@one_family
def test_sizes_in_turn_share_the_memory(package, tiny_model):
    """While gradients of the one before lie in it, smaller ones after larger ones and the other way round."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for round_ in range(4):
        for m in (model, plain):
            m.zero_grad()
            before = Rerun.replays
            for number, total in enumerate(SIZES):
                step(m, padded(4 * round_ + number, total))
        assert Rerun.replays == before  # of the plain one
        assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))
    kinds = graphs_of(package, model).kinds.values()
    graphed = [kind.graphed[0] for kind in kinds]
    assert len(graphed) == len(SIZES)
    for gradients_of in zip(*(each.gradients for each in graphed)):
        assert len({gradient.data_ptr() for gradient in gradients_of}) == 1
    assert len({each.outputs[0].data_ptr() for each in graphed}) == 1, "those of 96, which began another pool, and which smaller ones use"
    assert len({each.x.data_ptr() for each in graphed}) == 1


@one_family
def test_a_larger_size_begins_another_pool(package, tiny_model):
    """A size that is hardly larger finds room. Those of the pool before are recorded again when they come; this happens a few times."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))

    def counts(total, passes):
        return [compare(model, plain, padded(seed, total)) for seed in range(passes)]

    assert counts(40, 2) == counts(52, 2) == [0, whole()]
    pools = {graphs_of(package, model)._pool}
    assert counts(40, 1) == [whole()] and len(pools | {graphs_of(package, model)._pool}) == 1
    for total in (88, 144, 224, 352, 576, 896):
        assert counts(total, 2) == [0, whole()]
        pools.add(graphs_of(package, model)._pool)
    assert len(pools) == 5 and counts(40, 2) == [whole(), whole()]


@one_family
def test_gradients_that_the_trainer_holds(package, tiny_model):
    """They are moved before another size writes where they lie."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for seed in range(3):
        for total in SIZES[:2]:
            compare(model, plain, padded(seed, total))
    held = {}
    for m in (model, plain):
        m.zero_grad()
        step(m, padded(7, SIZES[0]))
        held[m] = {name: parameter.grad for name, parameter in m.named_parameters()}
        loss = step(m, padded(8, SIZES[1]), backward=False)
    assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))
    loss.backward()


@one_family
def test_no_more_sizes_than_asked_for(package, tiny_model):
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"), sizes=2)

    def counts(total, passes):
        return [compare(model, plain, padded(seed, total)) for seed in range(passes)]

    assert counts(40, 4) == [0, whole(), whole(), whole()]
    assert counts(56, 3) == [0, whole(), whole()]
    assert counts(52, 5) == [0] * 5, "five times is less than twice as often as three times"
    assert row_of(package, model).part.startswith("captured: 2 of 3 sizes, 58% of the passes")
    assert counts(52, 2) == [0, whole()] and counts(56, 1) == [0] and counts(40, 1) == [whole()]
    assert row_of(package, model).part.startswith("captured: 2 of 3 sizes")


@one_family
def test_lengths_are_half_as_many(package, tiny_model):
    """A row gets up to an eighth of tokens of no text, whole or packed, in training alone."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for seed in range(2):
        compare(model, plain, padded(seed, 72))
    counts = []
    for options in (padded(5, 66), packed(5, 65), padded(7, 64)):
        for total in (33, 34, 35, 36):  # lengths of packed rows vary from here on
            model(**packed(0, total), use_cache=False)
        before = Rerun.replays
        found, expected = gradients(model, options), gradients(plain, options)
        counts.append(Rerun.replays - before)
        for name, gradient in expected.items():
            assert_close(found[name], gradient, gradient.dtype, name)
    assert counts == [whole(), whole(), 0]
    with torch.no_grad():
        assert_close(step(model, padded(5, 66), backward=False), step(plain, padded(5, 66), backward=False), torch.float32, "loss")


@one_family
def test_sizes_that_come_once(package, tiny_model):
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    assert [compare(model, plain, padded(0, total)) for total in SIZES] == [0] * 4
    row = row_of(package, model)
    assert not row.fused and row.code == "unrecorded"


@one_family
def test_graphs_that_take_too_much_memory(package, tiny_model, monkeypatch):
    """Another pool, which begins with the larger size, may have room; a size that alone takes too much runs as before, and says so."""
    capture = importlib.import_module(f"{package.__name__}.shared.hf.capture.capture")
    taken = {}  # by pools

    def take(pool, *error):
        total = tokens[-1]
        if total > taken.setdefault(pool, [0, 0])[0]:  # it finds no room in what smaller ones took
            taken[pool] = [total, taken[pool][1] + total * 2**24]
        pool.nbytes = taken[pool][1]

    monkeypatch.setattr(capture.GraphPool, "__exit__", take)
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"), memory=1.2)
    tokens = [0]

    def counts(total, passes):
        tokens.append(total)
        return [compare(model, plain, padded(seed, total)) for seed in range(passes)]

    assert counts(40, 3)[-1] == counts(64, 3)[-1] == whole()
    assert len(taken) == 2 and row_of(package, model).part.endswith("1.0 GiB")
    assert counts(40, 2) == [whole(), whole()], "recorded again at once, in the room that 64 needs"
    assert len(taken) == 2 and row_of(package, model).part.startswith("captured: 2 of 2 sizes")
    with pytest.warns(RuntimeWarning, match="graphs take 1.5 GiB with those of 1 rows of 96 tokens"):
        assert counts(96, 3) == [0, 0, 0]
    assert [counts(40, 1), counts(64, 1)] == [[whole()], [whole()]]
    rows = {row.part: row for row in package.explain(model).rows if row.part.startswith("captured")}
    assert rows["captured: other passes"].code == "memory"


@one_family
def test_two_forward_passes_before_their_backward_passes(package, tiny_model):
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for total in SIZES[:2]:
        for seed in range(3):
            compare(model, plain, padded(seed, total))
    for m in (model, plain):
        m.zero_grad()
        losses = [step(m, padded(number, total), backward=False) for number, total in enumerate(SIZES[:2] * 2)]
        sum(losses).backward()
    assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))
    assert compare(model, plain, padded(9)) == whole()


@one_family
def test_evaluation_and_new_weights_between_steps(package, tiny_model):
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for seed in range(3):
        compare(model, plain, padded(seed))
    for seed in range(3):
        with torch.no_grad():
            for m in (model, plain):
                m.eval()
            assert torch.equal(step(model, padded(seed), backward=False), step(plain, padded(seed), backward=False))
        other = tiny_model(attn_implementation="sdpa")
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        for m in (model, plain):
            m.train()
            m.load_state_dict(other.state_dict())
        assert compare(model, plain, padded(seed)) == whole()


@one_family
def test_a_hook_that_appears_later(package, tiny_model):
    """On a layer, or on a part of one: padding stays then, and the hook sees what it always sees."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for seed in range(3):
        compare(model, plain, padded(seed))
    seen = {model: [], plain: []}
    for place in (lambda m: m.model.layers[1], lambda m: m.model.layers[0].mlp):
        handles = [place(m).register_forward_hook(lambda module, args, output, m=m: seen[m].append(output.detach().clone())) for m in seen]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for seed in range(3):
                compare(model, plain, padded(seed))
        for handle in handles:
            handle.remove()
    assert len(seen[model]) == len(seen[plain]) == 6
    assert all(map(torch.equal, seen[model], seen[plain]))
    assert [compare(model, plain, padded(seed)) for seed in range(3)][-1] == whole()


@one_family
def test_a_second_thread(package, tiny_model):
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    for seed in range(3):
        compare(model, plain, padded(seed))
    found = []
    for m in (model, plain):
        m.zero_grad()
        loss = step(m, padded(4), backward=False)
        if m is model:
            with pytest.warns(RuntimeWarning, match="second thread"):
                started(lambda m=m: step(m, padded(5))).end()
        else:
            started(lambda m=m: step(m, padded(5))).end()
        loss.backward()
        found.append({name: parameter.grad for name, parameter in m.named_parameters()})
    assert_equal(*found)
    assert compare(model, plain, padded(6)) == 0


@one_family
def test_a_shape_beside_the_sizes(package, tiny_model):
    """Batches of the shape keep their padding, as without sizes."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    package.capture(model, 3, 30)
    for seed in range(3):
        found = [compare(model, plain, padded(seed)), None]
        ids = batch(seed, (3, 30))
        before = Rerun.replays
        for m in (model, plain):
            m.zero_grad()
            m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found[1] = Rerun.replays - before
        assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))
    assert found == [whole(), whole()]
    parts = [row.part for row in package.explain(model).rows if row.part.startswith("captured")]
    assert parts[0] == "captured [3, 30]" and parts[1].startswith("captured: 1 of 1 sizes")


@one_family
def test_rows_that_are_no_batches_of_ours(package, tiny_model):
    """Any shape that comes again has graphs, padded or not."""
    model, plain = pair(package, tiny_model(attn_implementation="sdpa"))
    before = Rerun.replays
    for seed in range(4):
        for m in (model, plain):
            m.zero_grad()
            loss_of(m, seed, (2, 11)).backward()
        assert_equal(*({name: parameter.grad for name, parameter in m.named_parameters()} for m in (model, plain)))
    assert Rerun.replays - before == 3 * whole()


def test_wrong_arguments(qwen3, monkeypatch):
    from tests.decoder_families import TRAINED

    capture = importlib.import_module(f"{qwen3.__name__}.shared.hf.capture.capture")
    monkeypatch.setattr(capture, "can_record", lambda device: True)
    model = TRAINED["qwen3"].tiny()
    for told in ({"sizes": 0}, {"sizes": 1.5}, {"batch": 2}, {"tokens": 3}):
        with pytest.raises(ValueError, match="positive int"):
            qwen3.capture(model, **told)
    for memory in (0, -1, "4"):
        with pytest.raises(ValueError, match="memory is .*expected GiB"):
            qwen3.capture(model, memory=memory)


def test_the_counts_are_halved_where_too_many_kinds_came(qwen3, monkeypatch):
    sizes = importlib.import_module(f"{qwen3.__name__}.shared.hf.capture.graph_sizes")
    monkeypatch.setattr(sizes, "KNOWN", 3)
    found = sizes.GraphSizes(1, 0)
    for key in "aaaabbc":
        found.choose((key,))
    assert found.chosen == {("a",)} and found.choose(("d",)) == sizes.Choice(False)
    assert dict(found.passes) == {("a",): 2, ("b",): 1, ("d",): 1}
    assert found.choose(("b",)) == sizes.Choice(False) and found.choose(("b",)) == sizes.Choice(False)
    assert found.choose(("b",)) == sizes.Choice(True, ("a",)) and found.chosen == {("b",)}


@pytest.mark.parametrize("shape", ((), (3, 14)), ids=("lengths", "shape"))
@pytest.mark.parametrize("family", (("qwen3", 2),), ids=("qwen3",), indirect=True)
def test_layers_inside_wrappers_are_known_to_be_captured(package, tiny_model, shape):
    """Rows get lengths that are few, and a batch of a captured shape keeps its padding, as without wrappers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    padding = importlib.import_module(f"{package.__name__}.shared.hf.model.padding")
    model = package.kernelize(tiny_model())
    layers = model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    package.capture(model, *shape)
    assert padding.lengths_are_captured(model.model) is not bool(shape)
    assert padding.is_wanted(model.model, torch.Size((3, 14))) is bool(shape)
    package.reset()
    assert not padding.lengths_are_captured(model.model) and not padding.is_wanted(model.model, torch.Size((3, 14)))
