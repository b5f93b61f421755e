"""Summarises the kernels' machine code, for GPUs on which none of them has run: `python -m tools.machine_code [OPERATIONS]`.

Reads the cubins that a build left in .cache/cubins, compiles none, and writes kernel_src/machine_code.json; `python -m tools.compile
--record` does so of what it compiled. What is recorded of an operation stands until its source or the compiler changes, and what was not
in the cache is missing from the record. nvdisasm comes with Triton's wheel, or is on the PATH. Hosts differ in the code that launches
alone, so one host's cubins are read.
"""

import argparse
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import compiler
from tools.compiler import CACHE, ROOT, Job
from tools.elf import code_sections
from tools.kernel_package import package_folders
from tools.kernel_sources import source_digest
from tools.targets import TARGETS, BuildError, operations_of_all, read_variants, targets_of

RECORD = ROOT / "kernel_src" / "machine_code.json"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
# By what an instruction's name begins with. Bulk copies are those of the engine that copies whole tiles (from sm_90 on).
BULK = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
MATRIX = ("UTCHMMA", "UTCQMMA", "HGMMA", "QGMMA", "HMMA", "QMMA")  # the newest first
FIFTH = ("sm_100", "sm_103", "sm_110")  # whose tensor cores are of the fifth generation: UTC is to take GMMA's place
WAITS = ("WARPGROUP.DEPBAR", "UTCBAR")  # for what GMMA and UTC compute; the older ones write registers, and wait by these
LOADS = ("LDG", "LDGSTS")
WIDTH = re.compile(r"\.[US]?(8|16|32|64|128|256)\b")
WIDE = 128
AT_ONCE = 200  # cubins that one nvdisasm reads: half a second to start, and milliseconds a kernel
# Why kernels, by their function, fall behind their form on sm_90, on architectures whose names begin so.
REASONS = {
    (name, "sm_8"): "its rows promise no length, which a bulk copy need not know; without these each thread reads single elements"
    for name in ("general_rms_norm_backward", "general_add_rms_norm_backward")
}


class Shown(NamedTuple):
    """load: bits of the widest load from global memory, 0 for none; bulk: bulk copies; matrix: the newest matrix instruction, "" for none;
    products: how many of these; waits: how many waits for their results (as many of both: nothing overlaps)."""

    load: int
    bulk: int = 0
    matrix: str = ""
    products: int = 0
    waits: int = 0

    def __str__(self) -> str:
        """Returns the form in the record: "128", or "32+8 HGMMA 16/4"."""
        return f"{self.load}" + f"+{self.bulk}" * bool(self.bulk) + f" {self.matrix} {self.products}/{self.waits}" * bool(self.matrix)

    @classmethod
    def of(cls, text: str) -> "Shown":
        """Reads what `str` wrote."""
        reads, *rest = text.split()
        load, _, bulk = reads.partition("+")
        matrix, counts = rest or ("", "0/0")
        products, _, waits = counts.partition("/")
        return cls(int(load), int(bulk or 0), matrix, int(products), int(waits))

    @property
    def is_wide(self) -> bool:
        """Tells whether memory is read as wide as it can be."""
        return self.load >= WIDE or self.bulk > 0


Kernels = dict[str, dict[str, Shown]]  # {variant: {architecture: what its code shows}}


def shown_of(found: Mapping[str, int]) -> Shown:
    """Sums up how often each instruction stands in a kernel."""

    loads = [int((WIDTH.findall(name) or ["32"])[0]) for name in found if name.split(".")[0] in LOADS]
    bulk = sum(count for name, count in found.items() if name.startswith(BULK))
    matrix = next((kind for kind in MATRIX if any(name.split(".")[0] == kind for name in found)), "")
    products = sum(count for name, count in found.items() if name.split(".")[0] == matrix)
    waits = sum(count for name, count in found.items() if name.startswith(WAITS)) if matrix else 0
    return Shown(max(loads, default=0), bulk, matrix, products, waits)


def counted(text: str, ends: list[int]) -> list[Counter]:
    """Counts the instructions of nvdisasm's output by kernel. ends: the offset at which each kernel's code ends."""
    found, place = [Counter[str]() for _ in ends], 0
    for offset, name in INSTRUCTION.findall(text):
        while int(offset, 16) >= ends[place]:
            place += 1
        found[place][name] += 1
    return found


def find_nvdisasm() -> str:
    """Raises BuildError where there is none."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    found = str(beside) if beside and beside.exists() else shutil.which("nvdisasm")
    if found is None:
        raise BuildError("nvdisasm was not found. Install it with: pip install triton")
    return found


def read(images: list[bytes], architecture: str) -> list[Shown]:
    """Summarises cubins for one architecture. Raises BuildError where nvdisasm cannot read them."""
    model = architecture.replace("sm_", "SM") + "a" * (int(architecture[3:]) >= 90)  # what is for one GPU alone begins with sm_90
    found: list[Shown] = []
    for start in range(0, len(images), AT_ONCE):
        codes = [b"".join(code_sections(image)) for image in images[start : start + AT_ONCE]]
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(codes))
            file.flush()
            done = subprocess.run([find_nvdisasm(), "-ndf", "-b", model, file.name], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"nvdisasm, for {architecture}: {done.stderr.strip()[:300]}")
        ends = list(itertools.accumulate(map(len, codes)))
        found += map(shown_of, counted(done.stdout, ends))
    return found


def cached(names: Iterable[str], known: Mapping[str, Kernels], host: str = "x86_64") -> Iterator[tuple[Job, bytes]]:
    """Yields the cubins in the cache of the named operations, but for those that are known."""
    version = compiler.compiler_version(compiler.find_tileiras())
    for operation, variant in read_variants(list(names)):
        wanted = [name for _, name in targets_of(variant, {host: TARGETS[host]}) if name not in known[operation].get(variant.name, ())]
        bytecode = compiler.export(variant) if wanted else b""
        for architecture in wanted:
            job = Job(operation, variant, bytecode, host, architecture)
            path = CACHE / f"{job.key(version)}.cubin"
            if path.exists():
                yield job, path.read_bytes()


def read_record(path: Path = RECORD) -> dict:
    """{"compiler": its identity, "operations": {operation: {"source": digest, "kernels": {variant: {what is shown: architectures}}}}}."""
    return json.loads(path.read_text()) if path.exists() else {"compiler": {}, "operations": {}}


def _parsed(found: dict) -> Kernels:
    return {
        name: {architecture: Shown.of(text) for text, names in forms.items() for architecture in names.split()}
        for name, forms in found["kernels"].items()
    }


def kernels_of(recorded: dict, operation: str) -> Kernels:
    """Returns the record of an operation with its present source, empty if there is none."""
    found = recorded["operations"].get(operation, {})
    return _parsed(found) if found.get("source") == source_digest(operation) else {}


def record(images: Iterable[tuple[Job, bytes]], names: Iterable[str], path: Path = RECORD) -> None:
    """Reads the cubins that are not known yet, and writes down what they show. names: all operations that may stay in the record, one whose
    source has changed until it is read anew. What another compiler made is forgotten."""
    identity, recorded = compiler.compiler_identity(), read_record(path)
    if recorded["compiler"] != identity:
        recorded = {"compiler": identity, "operations": {}}
    known = {name: kernels_of(recorded, name) for name in names}
    new: dict[str, dict[tuple[str, str, str], bytes]] = {}
    for job, image in images:
        if job.architecture not in known[job.operation].get(job.variant.name, ()):
            new.setdefault(job.architecture, {})[job.operation, job.variant.name, job.architecture] = image
    for architecture, mine in new.items():
        for (operation, name, _), shown in zip(mine, read(list(mine.values()), architecture), strict=True):
            known[operation].setdefault(name, {})[architecture] = shown
    kept = {name: (found["source"], _parsed(found)) for name, found in recorded["operations"].items() if name in known}
    kept |= {name: (source_digest(name), kernels) for name, kernels in known.items() if kernels}
    path.write_text(_text(identity, kept))


def _text(identity: dict, operations: Mapping[str, tuple[str, Kernels]]) -> str:
    """JSON with a line a variant, whose architectures stand together where they show the same."""
    lines = []
    for operation, (source, found) in sorted(operations.items()):
        kernels = []
        for name, by_architecture in sorted(found.items()):
            forms: dict[str, list[str]] = {}
            for architecture, shown in sorted(by_architecture.items(), key=lambda each: int(each[0][3:])):
                forms.setdefault(str(shown), []).append(architecture)
            kernels.append(f"{json.dumps(name)}: {json.dumps({form: ' '.join(names) for form, names in forms.items()})}")
        body = ",\n ".join(kernels)
        lines.append(f'{json.dumps(operation)}: {{"source": {json.dumps(source)}, "kernels": {{\n {body}}}}}')
    body = ",\n".join(lines)
    return f'{{"compiler": {json.dumps(identity)}, "operations": {{\n{body}\n}}}}\n'


def function_of(variant: str) -> str:
    """The name of a variant's kernel."""
    return variant.partition("-")[0]


def function_and_dtypes(variant: str) -> str:
    """The part of a variant's name before its constants."""
    return variant.rpartition(variant.split("-", 2)[-1])[0]


def is_aligned(variant: str) -> bool:
    """Tells whether the first array of a variant, which it reads most of, promises where it begins."""
    return not variant.split("-")[1].split(".")[0].endswith("u")


def behind(mine: Shown, architecture: str, theirs: Shown) -> str:
    """Says which parts of a kernel's form on sm_90, `theirs`, its code for another architecture lacks; "" where it has all."""
    if theirs.matrix and not mine.matrix:
        return f"no matrix instruction, where sm_90 has {theirs.matrix}"
    if architecture in FIFTH and "GMMA" in theirs.matrix and not mine.matrix.startswith("UTC"):
        return f"{mine.matrix}, which is not the tensor core's of {architecture}, where sm_90 has {theirs.matrix}"
    if theirs.is_wide and not mine.is_wide:
        return f"loads of {mine.load} bits and no bulk copies, where sm_90 has {theirs.load} and {theirs.bulk}"
    return f"loads of {mine.load} bits, where sm_90 has {theirs.load}" if not mine.is_wide and mine.load < theirs.load else ""


def all_behind(kernels: Kernels) -> dict[tuple[str, str], str]:
    """Lists the kernels that fall behind their form on sm_90: {(variant, architecture): what is missing}. A variant without a build for
    sm_90 is compared with the weakest of the same function and dtypes that has one."""
    like: dict[str, list[Shown]] = {}
    for name, shown in kernels.items():
        if "sm_90" in shown:
            like.setdefault(function_and_dtypes(name), []).append(shown["sm_90"])
    found = {}
    for name, shown in kernels.items():
        peers = [shown["sm_90"]] if "sm_90" in shown else like.get(function_and_dtypes(name), [])
        for architecture, mine in shown.items():
            said = [behind(mine, architecture, theirs) for theirs in peers]
            if said and all(said):
                found[name, architecture] = said[0]
    return found


def reason_for(variant: str, architecture: str) -> str:
    """Why a kernel may fall behind; "" where no reason is listed."""
    return next((why for (name, start), why in REASONS.items() if name == function_of(variant) and architecture.startswith(start)), "")


def table() -> str:
    """Returns the record by architecture, in Markdown, with what has changed since as it was."""
    found: dict[str, dict[str, Shown]] = {}
    lacking = Counter[str]()
    for mine in map(_parsed, read_record()["operations"].values()):
        lacking.update(architecture for _, architecture in all_behind(mine))
        for name, by_architecture in mine.items():
            for architecture, shown in by_architecture.items():
                found.setdefault(architecture, {})[name] = shown
    head = ("compute capability", "kernels read", "128 bits or bulk copies", "narrower", "of any alignment", "tensor cores", "behind 9.0")
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    for architecture, kernels in sorted(found.items(), key=lambda each: int(each[0][3:])):
        aligned = [each.is_wide for name, each in kernels.items() if is_aligned(name)]
        kinds = Counter(each.matrix for each in kernels.values() if each.matrix)
        tensor = ", ".join(f"{kind} in {count}" for kind, count in kinds.most_common())
        counts = (len(kernels), sum(aligned), len(aligned) - sum(aligned), len(kernels) - len(aligned), tensor, lacking[architecture])
        lines.append((f"{architecture[3:-1]}.{architecture[-1]}", *map(str, counts)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def all_operations() -> list[str]:
    """The operations of every package."""
    return operations_of_all([Path(folder) for folder in package_folders(None)])


def main(arguments: list[str] | None = None) -> int:
    """Records what is in the cache, prints what falls behind, and returns how much of that has no reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.machine_code", description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", help="modules of kernel_src; default: those of every package")
    options = parser.parse_args(arguments)
    names = all_operations()
    recorded, identity = read_record(), compiler.compiler_identity()
    known = {name: kernels_of(recorded, name) if recorded["compiler"] == identity else {} for name in names}
    record(cached(options.operations or names, known), names)
    unlisted, recorded = 0, read_record()
    for operation in names:
        for (name, architecture), said in all_behind(kernels_of(recorded, operation)).items():
            why = reason_for(name, architecture)
            unlisted += not why
            print(f"{name} for {architecture}: {said}" + (f" ({why})" if why else ""))
    return int(unlisted > 0)


if __name__ == "__main__":
    sys.exit(main())
