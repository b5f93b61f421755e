"""The choice between prebuilt candidates: measured in the warm-up by a clock of the test's own, remembered on disk, and never in the way.

The kernels are run by the interpreter, as those of an H200 where nothing else is said: there RMSNorm's backward has two candidates.
"""

import errno
import importlib
import json
import os
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from interpreter.backend import InterpreterBackend, forget_launches
from tests.cpu.conftest import assemble_cpu, load
from tests.ops import rms_norm, rotary
from tests.ops.common import runtime_of
from tests.patched import calls_of

OPERATIONS = ("column_sum", "rms_norm", "rotary", "qk_norm_rotary", "swiglu", "cross_entropy", "linear_cross_entropy", "scale", "adamw",
              "log_probs", "attention", "attention_plan", "experts", "routing", "grouped_gemm")  # fmt: skip
DEFAULT = "rms_norm_backward-bf16.bf16.bf16.bf16.f32.f32-TILE4096-TAIL0-LATENCY3-4096-occupancy2"
OTHER = DEFAULT.replace("LATENCY3", "LATENCY1")
MACHINE = "interpreter of sm_90"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return load(assemble_cpu(tmp_path_factory.mktemp("tuned"), "\n# whose kernels are timed\n"))


@pytest.fixture
def runtime(package, tmp_path, monkeypatch):
    """The modules of the package, without a choice made. seconds: what a launch of a variant takes; timed: the variants timed."""
    found = runtime_of(package)
    for name in ("runtime.tuning", "hf.install.warmup"):
        setattr(found, name.rpartition(".")[2], importlib.import_module(f"{package.__name__}.shared.{name}"))
    monkeypatch.setenv("BASTILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(found.tuning, "WORKING_SET", 1)
    monkeypatch.setattr(found.tuning, "ROUNDS", 3)
    monkeypatch.setattr(found.tuning, "TOKENS", 1)
    monkeypatch.setattr(found.tuning, "TIMED_TOKENS", (3, 2))
    # column_sum has no candidates, and interpreting it would take most of the time.
    of_norms = importlib.import_module(f"{package.__name__}.shared.ops.rms_norm_kernels")
    monkeypatch.setattr(of_norms, "column_sum", lambda partial, dtype: partial.sum(0).to(dtype))
    found.seconds, found.timed = {}, []

    def norm_alone(tokens):
        x, weight = (torch.ones(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((tokens, 4096), (4096,)))
        package.rms_norm(x, weight).sum().backward()

    found.norm_alone = norm_alone
    found.launch.backend = backend_of(found, "sm_90")
    new_process(found)
    yield found
    new_process(found)


def backend_of(runtime, gpu):
    def clock(name):
        runtime.timed.append(name)
        return runtime.seconds.get(name, 1e-5)

    return InterpreterBackend(runtime, OPERATIONS, gpu=gpu, clock=clock)


def new_process(runtime):
    """Forgets what a new process would not know."""
    kernels = runtime.tuning.tuner.kernels
    runtime.tuning.tuner.__init__()
    runtime.tuning.tuner.kernels = kernels
    forget_launches(runtime)
    runtime.launch.backend.launched.clear()
    runtime.timed.clear()


def warm_up(runtime, run=None):
    """The warnings of a warm-up, of RMSNorm alone where nothing else is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.tuning.warm_up(run or runtime.norm_alone, "cpu")
    return [str(warning.message) for warning in caught]


def launched(runtime, package):
    """The variant that RMSNorm's backward launches; its results are right."""
    runtime.launch.backend.launched.clear()
    rms_norm.check_rms_norm(package, "cpu", torch.bfloat16, (3, 4096))
    (name,) = (name for name in runtime.launch.backend.launched if name.startswith("rms_norm_backward"))
    return name


def cached(runtime):
    return json.loads(runtime.tuning.cache_file().read_text())


# ---------------------------------------------------------------- what is launched
def test_without_a_warm_up_the_default_is_launched_and_nothing_is_timed(runtime, package):
    """Whatever the file says: a run that does not warm up is the same everywhere."""
    runtime.seconds[OTHER] = 1e-6
    warm_up(runtime)
    new_process(runtime)
    assert launched(runtime, package) == DEFAULT
    assert not runtime.timed


def test_the_warm_up_finds_the_fastest_and_the_next_process_only_reads(runtime, package):
    runtime.seconds[OTHER] = 4e-6
    assert launched(runtime, package) == DEFAULT
    assert warm_up(runtime) == []
    assert launched(runtime, package) == OTHER
    times = cached(runtime)["machines"][MACHINE][DEFAULT]
    assert times == {DEFAULT: pytest.approx(10.0), OTHER: pytest.approx(4.0)}
    before = runtime.tuning.cache_file().read_bytes()
    new_process(runtime)
    assert warm_up(runtime) == [] and not runtime.timed
    assert launched(runtime, package) == OTHER
    assert runtime.tuning.cache_file().read_bytes() == before


@pytest.mark.parametrize(("seconds", "chosen"), ((9.9e-6, DEFAULT), (9.7e-6, OTHER), (2e-5, DEFAULT)))
def test_a_gain_that_may_be_noise_does_not_displace_the_default(runtime, package, seconds, chosen):
    runtime.seconds[OTHER] = seconds
    warm_up(runtime)
    assert launched(runtime, package) == chosen


def test_candidates_are_timed_in_turns_on_copies(runtime, monkeypatch):
    """On as many as no cache holds; what the operation works on is not written to."""
    monkeypatch.setattr(runtime.tuning, "WORKING_SET", 3 * 64)
    seen = []
    launches = [lambda places, floats, name=name: seen.append((name, *places, *floats)) for name in "ab"]
    clock = iter([9.0, 9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 6.0])
    times = runtime.tuning.measure(launches, [x := torch.ones(16).view(4, 4)[:, :2]], (0.5,), lambda work: work() and next(clock))
    assert [name for name, *_ in seen] == list("aaaaaabbbbbb") * 4
    assert times == [pytest.approx(2e6 / 6), pytest.approx(6e6 / 6)]
    assert len({place for _, place, _ in seen}) == 6 and x.data_ptr() not in {place for _, place, _ in seen}


def candidates_of(runtime):
    """default -> the others, of a B200, which is the GPU from then on."""
    runtime.launch.backend = backend_of(runtime, "sm_100")
    found: dict = {}
    artifacts = runtime.launch.backend.artifacts
    for variant in (v for kernel in artifacts.kernels() for v in artifacts.variants(kernel)):
        if "sm_100" not in variant.images:
            continue
        asked_for = tuple(variant.constants.get(name) for name in ("BACKWARD", "WEIGHTS", "TRANSPOSED", "MORE", "CAPPED"))
        found.setdefault((variant.symbol, variant.parameters, asked_for), []).append(variant.name)
    return {default: others for default, *others in found.values() if others}


def test_every_candidate_is_right(runtime, package):
    """Each candidate built for a B200, named the fastest by the file, agrees with float64."""
    candidates = candidates_of(runtime)
    times = {default: {default: 9.0, **dict.fromkeys(others, 1.0)} for default, others in candidates.items()}
    put(runtime, json.dumps({"format": 1, "machines": {"interpreter of sm_100": times}}))
    assert warm_up(runtime) == [] and not runtime.timed
    for length in (1024, 2048, 2560, 4096, 5120):
        rms_norm.check_rms_norm(package, "cpu", torch.bfloat16, (3, length))
        rms_norm.check_add_rms_norm(package, "cpu", torch.bfloat16, (3, length))
    for heads in (32, 40):
        rotary.check_qk_norm_rotary(package, "cpu", torch.bfloat16, 1, 3, heads, 8, 128)
    rms_norm.check_rms_norm(package, "cpu", torch.bfloat16, (37, 128))
    assert {name for others in candidates.values() for name in others} <= set(runtime.launch.backend.launched)


def test_the_warm_up_of_a_model_times_all_its_candidates(package, runtime, monkeypatch):
    """The whole family's warm-up times all there are. Nothing is computed here."""
    names, candidates = [], candidates_of(runtime)
    monkeypatch.setattr(runtime.launch.backend, "prepare", lambda variant, *_: lambda *_: names.append(variant.name))
    monkeypatch.setattr(runtime.launch.backend, "elapsed", lambda device, work: work() and 1e-5)
    for name, zeros in (("empty", torch.zeros), ("empty_like", torch.zeros_like)):  # PyTorch reads where rows are; nothing has written it
        monkeypatch.setattr(torch, name, zeros)
    monkeypatch.setattr(runtime.warmup, "TOKENS", 1)
    for case in calls_of(package).served[0].cases:
        small = case._replace(sizes=case.sizes._replace(intermediate=2048, vocabulary=16))
        warm_up(runtime, partial(calls_of(package).warm_up, "cpu", torch.bfloat16, small))
    found = cached(runtime)["machines"]["interpreter of sm_100"]
    assert {default: {*times} for default, times in found.items()} == {d: {d, *others} for d, others in candidates.items()}
    assert {name for others in candidates.values() for name in others} <= set(names)


@pytest.mark.parametrize(("gpu", "timed"), (("sm_90", {"rms_norm_backward"}), ("sm_120", {"rms_norm_forward", "rms_norm_backward"})))
def test_only_candidates_with_an_image_for_this_gpu_are_timed(runtime, gpu, timed):
    runtime.launch.backend = backend_of(runtime, gpu)
    warm_up(runtime)
    assert timed == {name.split("-")[0] for name in runtime.timed}
    assert set(cached(runtime)["machines"]) == {f"interpreter of {gpu}"}


# ---------------------------------------------------------------- the file
def put(runtime, content):
    path = runtime.tuning.cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def machines(times, machine=MACHINE):
    return json.dumps({"format": 1, "machines": {machine: {DEFAULT: times}}})


DAMAGED = {
    "empty": "",
    "truncated": '{"format": 1, "mach',
    "binary": b"\xff\xfe\x00",
    "a list": "[]",
    "another format": '{"format": 2, "machines": {}}',
    "no machines": '{"format": 1}',
    "machines of another kind": '{"format": 1, "machines": {"a": 3}}',
    "no time": machines({DEFAULT: "fast", OTHER: 1.0}),
    "not a number": machines({DEFAULT: 1.0, OTHER: float("nan")}),
    "a negative time": machines({DEFAULT: 1.0, OTHER: -1.0}),
    "a truth": machines({DEFAULT: 1.0, OTHER: True}),
    "a number of 400 digits": machines({DEFAULT: 10**400, OTHER: 1.0}),
    "a time that overflows": machines({DEFAULT: 1.0, OTHER: 1e308}),
    "a number of 5000 digits": '{"format": 1, "machines": {"a": {"b": {"c": ' + "9" * 5000 + "}}}}",
    "deeply nested": "[" * 100_000,
    "a number for measurements": json.dumps({"format": 1, "machines": {MACHINE: {DEFAULT: 1.0}}}),
    "other candidates": machines({DEFAULT: 2.0, "of another build": 1.0}),
    "one candidate": machines({OTHER: 1.0}),
    "the default alone": machines({DEFAULT: 1.0}),
    "one candidate more": machines({DEFAULT: 2.0, OTHER: 2.0, "of another build": 1.0}),
    "a folder": None,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_makes_no_sense_is_ignored_with_one_warning(runtime, package, content):
    if content is None:
        runtime.tuning.cache_file().mkdir(parents=True)
    else:
        put(runtime, content)
    runtime.seconds[OTHER] = 1e-6
    told = warm_up(runtime) + warm_up(runtime)
    assert len(told) == 1 and str(runtime.tuning.cache_file()) in told[0] and "BASTILE_CACHE" in told[0]
    assert launched(runtime, package) == OTHER and runtime.timed
    if content is not None:
        assert set(cached(runtime)["machines"][MACHINE][DEFAULT]) == {DEFAULT, OTHER}
        new_process(runtime)
        assert warm_up(runtime) == [] and not runtime.timed


def test_measurements_of_other_machines_stay_and_do_not_count(runtime, package):
    path = put(runtime, machines({DEFAULT: 9.0, OTHER: 1.0}, machine="another GPU"))
    assert warm_up(runtime) == []
    assert launched(runtime, package) == DEFAULT and runtime.timed
    found = cached(runtime)["machines"]
    assert found["another GPU"] == {DEFAULT: {DEFAULT: 9.0, OTHER: 1.0}} and set(found) == {"another GPU", MACHINE}
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def test_the_file_keeps_the_latest_machines(runtime):
    put(runtime, json.dumps({"format": 1, "machines": {str(i): {} for i in range(40)}}))
    warm_up(runtime)
    assert list(cached(runtime)["machines"]) == [*map(str, range(9, 40)), MACHINE]


def test_what_another_process_measured_first_counts_in_all(runtime, package, monkeypatch):
    """Each measures for itself, as both found no file; the one that writes later adopts what is there."""
    tuner = runtime.tuning.tuner
    save = tuner._save
    monkeypatch.setattr(tuner, "_save", lambda: (put(runtime, machines({DEFAULT: 9.0, OTHER: 1.0})), save()))
    warm_up(runtime)
    assert runtime.timed and launched(runtime, package) == OTHER
    assert cached(runtime)["machines"][MACHINE][DEFAULT] == {DEFAULT: 9.0, OTHER: 1.0}


def test_writers_and_readers_at_once_never_see_half_a_file(runtime):
    tuning, path = runtime.tuning, runtime.tuning.cache_file()
    many = {f"machine {i}": {DEFAULT: {DEFAULT: 1.0, OTHER: 2.0}} for i in range(20)}

    def write(i):
        for _ in range(50):
            tuning._write(path, many)

    def read(i):
        return [len(tuning._read(path)) for _ in range(200)]

    tuning._write(path, many)
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write, i) for i in range(2)]
        reading = [pool.submit(read, i) for i in range(2)]
        assert [future.result() for future in writing] == [None] * 2
        assert {count for future in reading for count in future.result()} == {20}
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def failing(error):
    return mock.Mock(side_effect=error)


@pytest.mark.parametrize("obstacle", ("a file in the folder's place", "no space", "no home"))
def test_a_place_that_cannot_be_written_costs_one_warning(runtime, package, tmp_path, monkeypatch, obstacle):
    if obstacle == "no space":
        monkeypatch.setattr(runtime.tuning.os, "replace", failing(OSError(errno.ENOSPC, "No space left on device")))
    elif obstacle == "no home":
        monkeypatch.delenv("BASTILE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", failing(RuntimeError("Could not determine home directory.")))
    else:
        (tmp_path / "cache").write_text("")
    runtime.seconds[OTHER] = 1e-6
    told = warm_up(runtime) + warm_up(runtime)
    assert len(told) == 1 and "BASTILE_CACHE" in told[0]
    assert launched(runtime, package) == OTHER
    assert not [entry for entry in tmp_path.rglob("tuning*") if entry.is_file()]
    package.clear_autotune_cache()
    assert launched(runtime, package) == DEFAULT


def test_forgetting_is_on_disk_and_in_memory(runtime, package):
    runtime.seconds[OTHER] = 1e-6
    warm_up(runtime)
    assert launched(runtime, package) == OTHER
    package.clear_autotune_cache()
    assert not runtime.tuning.cache_file().exists()
    assert launched(runtime, package) == DEFAULT
    runtime.seconds[OTHER] = 1e-3
    warm_up(runtime)
    assert launched(runtime, package) == DEFAULT
    package.clear_autotune_cache()
    package.clear_autotune_cache()


def test_a_file_that_cannot_be_removed_is_an_error(runtime, package):
    runtime.seconds[OTHER] = 1e-6
    warm_up(runtime)
    runtime.tuning.cache_file().unlink()
    runtime.tuning.cache_file().mkdir()
    with pytest.raises(OSError, match="tuning.json"):
        package.clear_autotune_cache()
    assert launched(runtime, package) == DEFAULT


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize(("enough", "warned"), ((2, 0), (0, 1)))
def test_where_the_memory_is_short_fewer_tokens_are_timed_or_none(runtime, package, enough, warned):
    def tight(tokens):
        if tokens > max(enough, 1):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        runtime.norm_alone(tokens)

    runtime.seconds[OTHER] = 1e-6
    told = warm_up(runtime, tight)
    assert len(told) == warned and all("too little free memory" in text for text in told)
    assert launched(runtime, package) == (DEFAULT if warned else OTHER)


# ---------------------------------------------------------------- what a measurement holds for
def test_a_measurement_holds_for_one_gpu_driver_and_build(runtime, tmp_path, monkeypatch):
    driver = importlib.import_module(runtime.launch.__name__.replace("launch", "driver"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA B{index}00")
    names = []
    for kernels in ({}, {"a": []}):
        manifest = {"architectures": {}, "files": {}, "streams": {}, "parameters": [], "kernels": kernels}
        manifest["format"] = runtime.artifacts.FORMAT
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        for version in (13000, 13010):
            found = driver.Driver(runtime.artifacts.Artifacts(tmp_path))
            monkeypatch.setattr(found, "version", lambda version=version: version)
            names += [found.machine(2), found.machine(3)]
    assert len(set(names)) == 8
    assert names[0].startswith("NVIDIA B200, CUDA 13.0, ") and names[2].startswith("NVIDIA B200, CUDA 13.1, ")
    assert len(names[0].rsplit(" ", 1)[1]) == 64


def test_the_gpu_is_timed_by_its_own_clock_while_the_host_runs_ahead(runtime, monkeypatch):
    driver, calls = importlib.import_module(runtime.launch.__name__.replace("launch", "driver")), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        record = synchronize = lambda self: calls.append("event")

        def elapsed_time(self, end):
            return 250.0

    cuda = types.SimpleNamespace(Event=Event, _sleep=lambda cycles: calls.append("wait"), device=lambda index: warnings.catch_warnings())
    monkeypatch.setattr(torch, "cuda", cuda)
    assert driver.Driver(None).elapsed(0, lambda: calls.append("work")) == 0.25
    assert calls == ["wait", "event", "work", "event", "event"]


def test_the_cache_lies_where_it_is_asked_for(runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BASTILE_CACHE", "~/mine")
    assert runtime.tuning.cache_file() == tmp_path / "mine" / "tuning.json"
    monkeypatch.delenv("BASTILE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert runtime.tuning.cache_file() == tmp_path / ".cache" / "bastile" / "tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "xdg"))
    assert runtime.tuning.cache_file() == tmp_path / "xdg" / "bastile" / "tuning.json"
