"""What the compiler reports of a cubin: registers, spilled bytes, threads and shared memory of its kernel."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

MARK = b"\x7fELF"
# Attributes of the section .nv.info of a cubin.
FRAME_SIZE = 0x11
MIN_STACK_SIZE = 0x12
REQUIRED_THREADS = 0x10
REGISTER_COUNT = 0x2F
SIZED_FORMAT = 4  # the value is preceded by its size


class Resources(NamedTuple):
    """registers: of a thread; stack: bytes of local memory a thread, which is what spills take; threads: of a block;
    shared: bytes of a block."""

    registers: int
    stack: int
    threads: int
    shared: int

    def blocks_per_multiprocessor(self, registers: int = 65536) -> int:
        """How many blocks fit by their registers alone."""
        return registers // (max(self.registers, 1) * self.threads)


class Code(NamedTuple):
    """machine: e_machine of the cubin; architecture: sm_90 or the like; host_machine: e_machine of the host's code in it, 0 without."""

    machine: int
    architecture: str
    host_machine: int


def _sections(elf: bytes) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    start = headers[names][4]
    for header in headers:
        name = elf[start + header[0] : elf.index(b"\0", start + header[0])].decode()
        # A section without bits in the file (shared memory) has a size only.
        yield name, header, elf[header[4] : header[4] + header[5]] if header[1] != 8 else b""


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(section):
        kind, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        value = section[at : at + size] if kind == SIZED_FORMAT else b""
        at += size if kind == SIZED_FORMAT else 0
        yield attribute, value


def _check(cubin: bytes) -> None:
    if cubin[:4] != MARK:
        raise ValueError("not a cubin: it does not start with the mark of an ELF file")


def code_of(cubin: bytes) -> Code:
    """Reads from the ELF file what its code is for. Raises ValueError when it is none."""
    _check(cubin)
    (machine,), (flags,) = struct.unpack_from("<H", cubin, 0x12), struct.unpack_from("<I", cubin, 0x30)
    host = next((section for name, _, section in _sections(cubin) if name == ".nv.host"), b"")
    start = host.find(MARK)
    host_machine = struct.unpack_from("<H", host, start + 0x12)[0] if start >= 0 else 0
    return Code(machine, f"sm_{flags >> 8 & 0xFF}", host_machine)


def code_sections(cubin: bytes) -> list[bytes]:
    """Reads the machine code of a cubin, one section a function. Raises ValueError when it is none."""
    _check(cubin)
    return [section for name, _, section in _sections(cubin) if name.startswith(".text")]


def resources(cubin: bytes) -> Resources:
    """Reads them from the ELF file. Raises ValueError when it is none."""
    _check(cubin)
    registers = stack = shared = 0
    threads = 128
    for name, header, section in _sections(cubin):
        if name.startswith(".nv.shared."):
            shared += header[5]
        if not name.startswith(".nv.info"):
            continue
        for attribute, value in _attributes(section):
            if attribute == REGISTER_COUNT:
                registers = max(registers, struct.unpack_from("<II", value)[1])
            elif attribute in (FRAME_SIZE, MIN_STACK_SIZE):
                stack = max(stack, struct.unpack_from("<II", value)[1])
            elif attribute == REQUIRED_THREADS:
                threads = struct.unpack_from("<III", value)[0]
    return Resources(registers, stack, threads, shared)
