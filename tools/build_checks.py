"""What is checked of compiled kernels: that they are code for their GPU and host, and that they need no more registers than they may."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tools.compiler import Job
from tools.elf import code_of, resources
from tools.targets import BuildError

if TYPE_CHECKING:
    from kernel_src.prebuild import Variant


CUDA_MACHINE = 0xBE  # e_machine of a cubin and of the hosts' code in it, ELF's numbers

HOST_MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}


def check_resources(images: dict[Job, bytes]) -> None:
    """Raises BuildError when kernels spill without a reason in their entries; names them all."""
    found = [(job, resources(image)) for job, image in images.items() if not job.variant.spills]
    spilling = [(job, report) for job, report in found if report.stack]
    if spilling:
        lines = [
            f"{job.variant.name} for {job.architecture} on {job.host}: {report.stack} bytes of stack, {report.registers} registers"
            for job, report in spilling
        ]
        raise BuildError(
            "kernels spill registers. Give them smaller tiles, more worker warps or less occupancy, or write the reason into the "
            "variant's `spills`:\n" + "\n".join(sorted(lines))
        )


def check_reasons(images: dict[Job, bytes]) -> None:
    """Raises BuildError when variants give a reason for spills and spill on none of the architectures."""
    spilling = {job.variant.name for job, image in images.items() if resources(image).stack}
    needless = {job.variant.name for job in images if job.variant.spills} - spilling
    if needless:
        raise BuildError("variants that spill nowhere give a reason for spills. Remove it:\n" + "\n".join(sorted(needless)))


def spills_of(images: dict[Job, bytes]) -> dict[str, dict[str, int]]:
    """The bytes that each variant with a reason for spills spills on each architecture, 0 included: {name: {architecture: bytes}}."""
    found: dict[str, dict[str, int]] = {}
    for job, image in images.items():
        if job.variant.spills:
            of_variant = found.setdefault(job.variant.name, {})
            of_variant[job.architecture] = max(resources(image).stack, of_variant.get(job.architecture, 0))
    return found


def check_spills(images: dict[Job, bytes], recorded: Mapping[str, Mapping[str, int]]) -> None:
    """Raises BuildError when a variant spills more than was recorded of it; names them all. A reason is for what it was given for."""
    lines = [
        f"{name} for {architecture}: {bytes_} bytes, recorded {recorded[name][architecture]}"
        for name, of_variant in spills_of(images).items()
        for architecture, bytes_ in of_variant.items()
        if bytes_ > recorded.get(name, {}).get(architecture, bytes_)
    ]
    if lines:
        advice = "Give them smaller tiles, or record it: python -m tools.compile --record"
        raise BuildError(f"kernels spill more registers than before. {advice}\n" + "\n".join(sorted(lines)))


def check_code(images: dict[Job, bytes]) -> None:
    """Raises BuildError when an image is code of another architecture or host: one would not load, the other would crash the process."""
    wrong = []
    for job, image in images.items():
        found = code_of(image)
        if (found.machine, found.architecture, found.host_machine) != (CUDA_MACHINE, job.architecture, HOST_MACHINES[job.host]):
            wrong.append(f"{job.variant.name} for {job.architecture} on {job.host}: {found}")
    if wrong:
        raise BuildError("the compiler made code for something else:\n" + "\n".join(sorted(wrong)))


def occupancy(variant: "Variant", architecture: str) -> int:
    """The hint of a variant, or of its kernel's decorator; 0 where there is none."""
    hint = variant.hints.get("occupancy")
    if hint is None:
        options = variant.hinted_kernel()._compiler_options.hints_by_target()
        return options.get(architecture, {}).get("occupancy") or options["default"].get("occupancy") or 0
    if isinstance(hint, int):
        return hint
    return hint.value if hint.architecture == architecture else hint.default


def check_occupancy(images: dict[Job, bytes]) -> None:
    """Raises BuildError when kernels have too many registers for the occupancy that they ask for; names them all."""
    missed = []
    for job, image in images.items():
        found, asked = resources(image), occupancy(job.variant, job.architecture)
        if not job.variant.spills and found.blocks_per_multiprocessor() < asked:
            missed.append(
                f"{job.variant.name} for {job.architecture} on {job.host}: {found.registers} registers, "
                f"{found.blocks_per_multiprocessor()} blocks, asked for {asked}"
            )
    if missed:
        raise BuildError("kernels have more registers than their occupancy allows:\n" + "\n".join(sorted(missed)))
