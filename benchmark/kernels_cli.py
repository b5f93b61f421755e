"""What `kernels benchmark` runs: it loads every benchmark*.py by its path, and in it the classes of `Benchmark`."""

from argparse import Namespace

import torch

from . import providers
from .operation import Inputs, Operation, Random, as_tuple, timed_call
from .providers import NotInstalled

try:
    from kernels.benchmark import Benchmark
except ImportError:  # only `kernels benchmark` needs it

    class Benchmark:  # type: ignore[no-redef]
        """Stands in where `kernels` is not installed."""

        seed: int | None = None
        device: str = "cpu"


class OperationBenchmark(Benchmark):
    """An operation, forward and with its backward pass. A subclass names it.

    Results are small, because they are compared by an absolute tolerance.
    """

    seed = 0
    operation: Operation

    def shape(self, gpu: bool) -> tuple:
        """Return what `Operation.inputs` takes before `random`, on a GPU or a CPU: of the first case of the operation's first sweep."""
        operation = self.operation
        model, tokens = (operation.suite.model, 4096) if gpu else (operation.suite.tiny, 32)
        args = Namespace(sweep_mode=next(iter(operation.sweeps)), model=model, models=(model,), tokens=(tokens,), bt=tokens)
        return operation.cases(args)[0].arguments

    def setup(self) -> None:
        """Draw inputs, and take the function of the package that the command loaded, or of the operation's own where that has none."""
        random = Random(self.device, torch.bfloat16, self.seed or 0)
        self.inputs = self.small(self.operation.inputs(*self.shape(self.device.startswith("cuda")), random))
        self.reference_inputs = self.inputs.copy()
        self.function = self.load()

    def small(self, inputs: Inputs) -> Inputs:
        """Return inputs whose results are small."""
        return inputs.scaled(0.1)

    def load(self):
        """Return the function that is measured."""
        try:
            return self.operation.of_package(self.kernel)
        except NotInstalled:
            return self.operation.of_package(providers.package(self.operation.suite.package))

    def benchmark_forward(self) -> None:
        self.out = as_tuple(timed_call(self.function, self.inputs, "forward")())[0]

    def verify_forward(self) -> torch.Tensor:
        return as_tuple(timed_call(self.operation.formula, self.reference_inputs, "forward")())[0]

    def benchmark_full(self) -> None:
        self.out = timed_call(self.function, self.inputs, "full")()[0]

    def verify_full(self) -> torch.Tensor:
        return timed_call(self.operation.formula, self.reference_inputs, "full")()[0]
