"""What the host needs: microseconds a call of RMSNorm, of a decoder layer, of one with LoRA on all projections, and of an optimizer's step;
and where it is asked for, of a compiled model's forward and backward pass.

    python -m benchmark.benchmark_host [--model qwen3_0.6b] [--cases dense,lora,compiled]

Few tokens, so that the device always waits for the host. On a GPU with its kernels. On a CPU a stand-in takes the driver's place: every
call goes the whole way through the package, its choice of a kernel and the launch, and the launch does nothing; the layer is so small
that PyTorch's own products hardly count, and what is compared is one version of the package with another, on one machine.
"""

import ctypes
import importlib
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

if not __package__:  # run as a file
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    __package__ = Path(__file__).absolute().parent.name

from . import models, providers, published, records, rows
from .command_line import layers_parser, some_of
from .families import fill
from .kernels_cli import Benchmark
from .markdown import Table, by_provider, columns_of, select, times_faster
from .operation import Random
from .records import Row
from .report import log, message
from .suites import QWEN3
from .timing import Clock

PROVIDERS = ("huggingface", "torch_fused", "bastile", "bastile_adamw")
TOKENS, RANK, EPS = 64, 16, 1e-6
LAUNCHED = 2**20  # elements of the smallest parameter that our optimizer steps with a kernel of its own
REPEATS = 8
STAND_IN = "qwen3_host"  # of models.py: the layer that the stand-in takes
ROW, OF_STAND_IN = 1024, models.size(STAND_IN).hidden  # rows of the kernels that the stand-in launches with shorter ones


class StandIn:
    """Has the methods of the runtime's Driver, for CPU tensors: variants as they are built for sm_90, whose launches do everything but
    start a kernel. Those for rows of `ROW` elements take rows of `OF_STAND_IN`."""

    runs_on_cpu = True

    def __init__(self, package) -> None:
        try:
            from interpreter.backend import InterpretedArtifacts
        except ImportError as error:
            raise providers.NotInstalled(f"the stand-in reads kernel_src, for which {error.name} is not installed") from error
        runtime = types.SimpleNamespace(
            **{name: importlib.import_module(f"{package.__name__}.shared.runtime.{name}") for name in ("artifacts", "driver", "launch")}
        )
        files = sorted((records.ROOT / "kernel_src").glob("*.py"))
        operations = [path.stem for path in files if "\ndef variants(" in path.read_text(encoding="utf-8")]
        self.artifacts: Any = InterpretedArtifacts(runtime, operations)
        for variants in map(self.artifacts.variants, self.artifacts.kernels()):
            variants[:] = [variant._replace(parameters=tuple(map(_shortened, variant.parameters))) for variant in variants]
        runtime.driver.raw_stream = lambda device: 0
        runtime.driver.current_device = lambda: -1  # what a CPU tensor's get_device() gives
        # A function of C that takes whatever it is given and returns 0, which is CUDA_SUCCESS.
        self.cuda = types.SimpleNamespace(cuLaunchKernelEx=ctypes.CDLL("libm.so.6").fegetround)
        self.launch = runtime.driver.Launch
        runtime.launch.backend = self

    def architecture(self, device: int) -> str:
        return "sm_90"

    def machine(self, device: int) -> str:
        return "a stand-in"

    def elapsed(self, device: int, work: Callable[[], object]) -> float:
        work()
        return 1.0

    def multiprocessors(self, device: int) -> int:
        return 132

    def function(self, variant, architecture: str) -> ctypes.c_void_p:
        return ctypes.c_void_p(0)

    def prepare(self, variant, device: int, grid: tuple, arrays: list, integers: list):
        return self.launch(self, variant, device, grid, arrays, integers)


def _shortened(parameter):
    """Return a promise of rows of `ROW` elements as one of `OF_STAND_IN`."""
    shape = tuple(OF_STAND_IN if length == ROW else length for length in parameter.shape)
    divisible = tuple(min(d, n) if n == OF_STAND_IN else d for d, n in zip(parameter.shape_divisible, shape, strict=True))
    return parameter._replace(shape=shape, shape_divisible=divisible)


def package_of(device: str):
    """Return the package, on a CPU with the stand-in."""
    package = providers.package(QWEN3.package)
    launch: Any = importlib.import_module(f"{package.__name__}.shared.runtime.launch")
    if not device.startswith("cuda") and not isinstance(launch.backend, StandIn):
        launch.backend = StandIn(package)
    return package


def make_layer(args, provider: str, rank: int = 0):
    """Return a model with one decoder layer, with adapters of a rank where it is not 0."""
    model = published.new_model(args.model, 1, args.device)
    fill(model)
    if providers.is_ours(provider):
        package_of(args.device).pack(model)
    if rank:
        providers.require_modules("peft")
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    if providers.is_ours(provider):
        package_of(args.device).kernelize(model)
    return model


def rms_norm(args, provider: str, grad: bool):
    """Return a call of RMSNorm of hidden states."""
    random, hidden = Random(args.device, torch.bfloat16, 0), models.size(args.model).hidden
    x, weight = random.normal(1, args.tokens, hidden).requires_grad_(grad), random.normal(hidden).requires_grad_(grad)
    if providers.is_ours(provider):
        function = providers.operation(package_of(args.device), "rms_norm")
    else:
        function = lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)  # noqa: E731
    return (lambda: function(x, weight, EPS)) if grad else torch.no_grad()(lambda: function(x, weight, EPS))


def layer_step(args, provider: str, rank: int):
    """Return a forward and backward pass of a decoder layer."""
    model = make_layer(args, provider, rank)
    base = model.get_base_model().model if rank else model.model
    layer, hidden = base.layers[0], models.size(args.model).hidden
    random = Random(args.device, torch.bfloat16, 0)
    x, dout = random.normal(1, args.tokens, hidden).requires_grad_(), random.normal(1, args.tokens, hidden)
    positions = torch.arange(args.tokens, device=args.device)[None]
    with torch.no_grad():
        angles = base.rotary_emb(x, positions)
    leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]

    def call():
        layer(x, attention_mask=None, position_embeddings=angles, position_ids=positions, past_key_values=None).backward(dout)
        for leaf in leaves:
            leaf.grad = None

    return call


def compiled_step(args, provider: str):
    """Return a forward and backward pass of a model of `--layers` layers under torch.compile."""
    model = published.new_model(args.model, args.layers, args.device)
    fill(model)
    if providers.is_ours(provider):
        package = package_of(args.device)
        package.pack(model)
        package.kernelize(model)
    ids = torch.arange(args.tokens, device=args.device)[None]
    torch._dynamo.reset()  # what was compiled for another provider counts towards a limit
    compiled = torch.compile(model, dynamic=False)

    def call():
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return call


def optimizer_step(args, provider: str, rank: int):
    """Return a step of the optimizer on as many parameters as `--layers` layers have: the weights just so large that they have a launch of
    their own, or adapters of a rank."""
    sizes, dtype = ([RANK * ROW] * 14, torch.float32) if rank else ([LAUNCHED] * 7 + [ROW] * 4, torch.bfloat16)
    parameters = [torch.nn.Parameter(torch.ones(size, device=args.device, dtype=dtype)) for size in sizes * args.layers]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if providers.is_ours(provider):
        return package_of(args.device).AdamW(parameters, lr=1e-5).step
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True).step


def thread_microseconds(call: Callable, calls: int) -> float:
    """Return the time that this thread computes for one call, the best of several runs: others may have the processor meanwhile."""
    for _ in range(20):
        call()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time() - start) / calls * 1e6)
    return best


@dataclass(frozen=True)
class Case:
    """What is called. title: of its row; providers: those that it has; make: of the command line and a provider, returns the call; asked:
    whether only `--cases` measures it."""

    title: str
    providers: tuple[str, ...]
    make: Callable[..., Callable]
    calls: int
    asked: bool = False


LAYER, OPTIMIZERS = ("huggingface", "bastile"), ("torch_fused", "bastile_adamw")
CASES = {
    "rms_norm": Case("RMSNorm, with gradients", LAYER, lambda args, p: rms_norm(args, p, True), 400),
    "rms_norm_no_grad": Case("RMSNorm, without", LAYER, lambda args, p: rms_norm(args, p, False), 400),
    "dense": Case("decoder layer, forward and backward", LAYER, lambda args, p: layer_step(args, p, 0), 40),
    "lora": Case("decoder layer with LoRA, forward and backward", LAYER, lambda args, p: layer_step(args, p, RANK), 40),
    "compiled": Case("{layers} layers under torch.compile, forward and backward", LAYER, compiled_step, 20, asked=True),
    "adamw": Case("AdamW, the parameters of {layers} layers", OPTIMIZERS, lambda args, p: optimizer_step(args, p, 0), 4),
    "adamw_lora": Case("AdamW, LoRA of {layers} layers", OPTIMIZERS, lambda args, p: optimizer_step(args, p, RANK), 4),
}


def microseconds(args, name: str, provider: str) -> Any:
    """Return the time of a case's call, the exception that it raised, or None where something is not installed."""
    case, clock = CASES[name], Clock(args.device)
    try:
        call = case.make(args, provider)
        found = clock.host_microseconds(call, case.calls) if clock.cuda else thread_microseconds(call, case.calls)
        log(f"  {name:<18}{provider:<16}{found:.1f} us a call")
        return found
    except (providers.NotInstalled, ModuleNotFoundError) as error:
        log(f"  {name}, {provider}: left out, {error}")
        return None
    except Exception as error:
        log(f"  {name:<18}{provider:<16}{message(error)}")
        return error.with_traceback(None)
    finally:
        clock.clean()


def measure(args) -> list[Row]:
    """Return the rows of all cases. A provider at a time: Hugging Face's layer is the same object before and after `kernelize`.

    For seconds on end something else can slow a host down by half. So the cases are gone through once a round, and each call's best counts.
    """
    calls = [(name, provider) for name in args.cases for provider in CASES[name].providers if provider in args.providers]
    rounds = [[microseconds(args, *call) for call in calls] for _ in range(args.rounds)]
    driver, found = "" if args.device.startswith("cuda") else "a stand-in", []
    for (name, provider), *values in zip(calls, *rounds):
        if None in values:
            continue
        best = next((value for value in values if isinstance(value, Exception)), None) or min(values)
        row = rows.speed_row(args, "host", provider, "full", ("call", "call", name), best, tokens=args.tokens, driver=driver)
        row.metric_name = "host_time"
        found.append(row)
    rows.save_speeds(args, "host", found)
    return found


def table(found: list[Row]) -> str:
    """Return the host's microseconds by what is called."""
    found = select(found, kernel_name="host", metric_name="host_time")
    names = columns_of(found)
    table = Table("µs of host time", *map(providers.title, names), "speed vs best peer")
    for name in dict.fromkeys(row.x_value for row in found):
        mine = by_provider(select(found, x_value=name))
        ours = next((p for p in ("bastile", "bastile_adamw") if p in mine), "bastile")
        cells = [table.notes.cell(mine.get(p), lambda us: f"{us:.0f}") for p in names]
        title = CASES[name].title.format(layers=found[-1].config["layers"])
        table.add([title, *cells, times_faster(mine, ours)], mine.values())
    return table.text()


TABLES = {"host_time": table}


class CallBenchmark(Benchmark):
    """For `kernels benchmark`: a call so small that the host sets its time."""

    seed = 0

    def setup(self) -> None:
        self.x = torch.randn(1, 1024, device=self.device)
        self.weight = torch.randn(1024, device=self.device)

    def benchmark_rms_norm(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, 1e-6)

    def verify_rms_norm(self) -> torch.Tensor:
        return torch.nn.functional.rms_norm(self.x, (1024,), self.weight, 1e-6)


def main(arguments=None) -> list[Row]:
    """Measure, save and print the table."""
    p = layers_parser(__doc__.partition("\n")[0], "host", 50.0)
    p.set_defaults(model=None, layers=None)
    p.add_argument("--tokens", type=int, default=0, help=f"of a layer's input; without it {TOKENS}, or 8 on a CPU")
    p.add_argument("--cases", type=some_of(*CASES), default=tuple(name for name, case in CASES.items() if not case.asked),
                   help=f"of {', '.join(CASES)}")  # fmt: skip
    p.add_argument("--providers", type=some_of(*PROVIDERS), default=PROVIDERS, help=f"of {', '.join(PROVIDERS)}")
    args = p.parse_args(arguments)
    on_gpu = args.device.startswith("cuda")
    args.model = args.model or ("qwen3_0.6b" if on_gpu else STAND_IN)
    args.tokens = args.tokens or (TOKENS if on_gpu else 8)
    args.layers = args.layers or (28 if on_gpu else 2)
    driver = "" if on_gpu else ", with a stand-in driver"
    log(f"{models.title(args.model)}, {args.tokens} tokens, on {records.gpu_name(args.device)}{driver}")
    found = measure(args)
    log(table(found))
    return found


if __name__ == "__main__":
    main()
