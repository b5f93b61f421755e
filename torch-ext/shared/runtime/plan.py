"""Turns a recorded call into a Python function that does the same with other tensors. `print(plan)` shows it.

Looping over a list of steps would cost the host 0.3 to 1 us more for each step. The function does what the call did, except for what
has no effect on its results:

1. Where nothing is computed, everything is allocated first: a plan that finds an odd address then has launched nothing yet.
2. A view is made only where PyTorch sees it, as a result or in a computation. Kernels get addresses.
3. An allocation of which PyTorch sees a single view that reaches over all of it is made in the view's shape at once.
4. An allocation that nothing uses is not made.
5. Where something is computed, memory is freed after its last use: its tensors may be as large as all that the layer keeps.
"""

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import torch

from . import driver
from .layouts import Layout, of_compiled_graphs
from .recording import NO_SLOT, Allocate, Compute, RecordedLaunch, Recording, Slot, SlotList, Step, View

__all__ = ["Plan", "plan_of"]


def _allocates(make: Callable) -> bool:
    found = make((2, 3), (4, 1), torch.bfloat16)
    return (found.shape, found.stride(), found.dtype) == ((2, 3), (4, 1), torch.bfloat16) and not found.requires_grad


def _reinterprets(view: Callable) -> bool:
    source = torch.arange(12.0)[2:]
    return torch.equal(view(source, (2, 2), (3, 1), 1), torch.tensor([[3.0, 4.0], [6.0, 7.0]]))


_ALLOCATORS = {  # by the type of a device. A GPU's is not tried out, which would initialise CUDA before the user does
    "cpu": of_compiled_graphs("_empty_strided_cpu", _allocates),
    "cuda": of_compiled_graphs("_empty_strided_cuda", callable),
}
_reinterpreted = of_compiled_graphs("_reinterpret_tensor", _reinterprets)


class Plan:
    """Repeats what a recorded call did.

    body: called with the tensors of a call and their addresses, returns the results; None where a tensor that it made starts at an
    address that is no multiple of 16, where those of the recorded call did not. source: what it was compiled from, "" for any other
    function. distances: (i, j, bytes) of arguments that lay in one storage. device: of all tensors.
    """

    def __init__(self, body: Callable, distances: Sequence[Tuple[int, int, int]], device: torch.device, source: str = ""):
        self.body, self.distances, self.source = body, tuple(distances), source
        self.gpu = device.index if device.type == "cuda" else None

    def run(self, tensors: Sequence[torch.Tensor], addresses: List[int]):
        """Repeats the call with other tensors and returns the results; None where they do not match the plan."""
        if self.gpu is not None and driver.current_device() != self.gpu:  # on which the allocator makes tensors
            with torch.cuda.device(self.gpu):
                return self.run(tensors, addresses)
        for i, j, distance in self.distances:
            if addresses[j] - addresses[i] != distance:
                return None
        return self.body(tensors, addresses)

    def __str__(self) -> str:
        """The source, after the values that it names."""
        values = getattr(self.body, "__globals__", {}).items()
        named = [f"# {name} = {value!r}" for name, value in values if name[0] == "v" and name[1:].isdigit()]
        placed = [f"# argument {j} starts {distance} bytes after argument {i}" for i, j, distance in self.distances]
        return "\n".join([*named, *placed, self.source])


def plan_of(recording: Recording) -> Plan:
    """Compiles a recorded call."""
    layouts, steps, base = recording.layouts, recording.steps, recording.base
    arguments = range(recording.arguments)
    returned = {slot for slot in recording.results if slot != NO_SLOT}
    seen_by_pytorch = returned.union(*(step.reads for step in steps if isinstance(step, Compute)))
    launched_on = {slot for step in steps if isinstance(step, RecordedLaunch) for slot in step.reads}
    related = {slot for slot in returned if any(layouts[slot].overlaps(layouts[other]) for other in returned - {slot})}

    if not recording.computes:
        steps = sorted(steps, key=lambda step: not isinstance(step, Allocate))
    made_as = {step.result: _made_as(recording, step.result, seen_by_pytorch) for step in steps if isinstance(step, Allocate)}
    needless_views = set(made_as.values())
    steps = [s for s in steps if not isinstance(s, View) or (s.result in seen_by_pytorch and s.result not in needless_views)]
    used = {base(slot) for slot in returned}.union(*(_bases(recording, s) for s in steps if not isinstance(s, Allocate)))
    steps = [s for s in steps if not isinstance(s, Allocate) or s.result in used]

    last_use = {slot: number for number, step in enumerate(steps) for slot in _bases(recording, step)}
    staying = {base(slot) for slot in returned} | set(recording.constants) | set(arguments)
    holders: Dict[int, List[int]] = {}  # by base: the slots whose tensors keep its memory
    source = _Source(recording)
    for number, step in enumerate(steps):
        if step.result is not None:
            holders.setdefault(base(step.result), []).append(made_as.get(step.result, step.result))
        if isinstance(step, Allocate):
            source.allocate(made_as[step.result], step.result in launched_on)
        elif isinstance(step, View):
            source.view(step.result, step.result in related)
        elif isinstance(step, Compute):
            source.compute(step, step.result in launched_on)
        else:
            source.launch(step)
        dead = [slot for slot in _bases(recording, step) if last_use[slot] == number and slot not in staying]
        if dead and recording.computes:
            source.free([holder for slot in dead for holder in holders[slot]])
    return Plan(source.compiled(), recording.distances, recording.device, source.text())


def _bases(recording: Recording, step: Step) -> Set[int]:
    """Returns the bases whose memory a step reads, writes or allocates."""
    return {recording.base(slot) for slot in (*step.reads, step.result) if slot is not None}


def _made_as(recording: Recording, base: int, seen: Set[int]) -> int:
    """The only view of an allocation that is seen where it reaches over all of it, else the allocation itself."""
    views = [slot for slot in seen if recording.base(slot) == base]
    if len(views) == 1 and recording.layouts[views[0]].elements() == recording.layouts[base].elements():
        return views[0]
    return base


class _Source:
    """The lines of a plan's function.

    The tensor of slot 3 is the variable t3, and a3 is its address. Every value that is no integer has a name, v3: no text from elsewhere
    gets into the source.
    """

    def __init__(self, recording: Recording):
        self.recording = recording
        self.values: Dict[str, Any] = {}
        self.constants = {slot: self.named(tensor) for slot, tensor in recording.constants.items()}
        self.addresses = {slot: str(tensor.data_ptr()) for slot, tensor in recording.constants.items()}
        self.allocator = _ALLOCATORS.get(recording.device.type)
        self.lines = ["def body(tensors, addresses):"]
        for letter, whole in (("t", "tensors"), ("a", "addresses")):
            self.add(f"{''.join(f'{letter}{slot}, ' for slot in range(recording.arguments))} = {whole}")

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def named(self, value) -> str:
        name = f"v{len(self.values)}"
        self.values[name] = value
        return name

    def tensor(self, slot: int) -> str:
        return "None" if slot == NO_SLOT else self.constants.get(slot) or f"t{slot}"

    def laid_out(self, slot: int) -> Tuple[Layout, str]:
        layout = self.recording.layouts[slot]
        return layout, f"{tuple(layout.shape)}, {tuple(layout.stride)}"

    def allocate(self, slot: int, launched_on: bool) -> None:
        layout, shape_and_stride = self.laid_out(slot)
        dtype = self.named(layout.dtype)
        if self.allocator is None:
            device = self.named(self.recording.device)
            self.add(f"t{slot} = {self.named(torch.empty_strided)}({shape_and_stride}, dtype={dtype}, device={device})")
        else:
            self.add(f"t{slot} = {self.named(self.allocator)}({shape_and_stride}, {dtype})")
        if launched_on:
            self.take_address(slot, layout.base)

    def take_address(self, slot: int, base: int) -> None:
        self.add(f"a{base} = t{slot}.data_ptr()")
        self.add(f"if a{base} & 15: return None")

    def view(self, slot: int, related: bool) -> None:
        """related: whether the call returns it with others of its elements. Autograd must then know that they are the same."""
        layout, shape_and_stride = self.laid_out(slot)
        base = self.tensor(layout.base)
        if related or _reinterpreted is None:
            make, offset = self.named(torch.as_strided), f"{base}.storage_offset() + {layout.offset}"
        else:
            make, offset = self.named(_reinterpreted), str(layout.offset)
        self.add(f"t{slot} = {make}({base}, {shape_and_stride}, {offset})")

    def compute(self, step: Compute, launched_on: bool) -> None:
        given = [self.given(arg) for arg in step.args] + [f"{name}={self.given(value)}" for name, value in step.kwargs.items()]
        call = f"{self.named(step.function)}({', '.join(given)})"
        self.add(call if step.target == NO_SLOT else f"t{step.target} = {call}")
        if launched_on:
            self.take_address(step.target, step.target)

    def given(self, arg) -> str:
        if isinstance(arg, SlotList):
            return f"[{', '.join(map(self.given, arg))}]"
        return self.tensor(arg) if isinstance(arg, Slot) else self.named(arg)

    def launch(self, step: RecordedLaunch) -> None:
        found = [self.addresses.get(base, f"a{base}") + (f" + {offset}" if offset else "") for base, offset in step.arrays]
        self.add(f"{self.named(step.start)}([{', '.join(found)}], {self.named(step.floats)})")

    def free(self, slots: Sequence[int]) -> None:
        self.add("".join(f"t{slot} = " for slot in slots) + "None")

    def text(self) -> str:
        results, single = self.recording.results, self.recording.single
        return "\n".join([*self.lines, f"    return ({' '.join(self.tensor(slot) + ',' * (not single) for slot in results)})"])

    def compiled(self) -> Callable:
        exec(compile(self.text(), "<a replayed call>", "exec"), self.values)
        return self.values.pop("body")
