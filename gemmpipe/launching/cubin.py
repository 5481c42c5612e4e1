"""What an NVIDIA binary says of itself: registers and spills are in the ELF, so that no device need load it."""

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SIZED = 0x04  # a record of `.nv.info` whose half-word is the length of what follows
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
_WORD = 4


def resources(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers a thread, 32-bit words of a thread's stack frame, which are its spills) of the hungriest kernel.

    `.nv.info` holds a record (symbol, number) for each function. (None, None) for what is no such ELF.
    """
    found: dict[int, list[int]] = {_REGISTERS: [], _FRAME_SIZE: []}
    try:
        for attribute, payload in _records(next(data for name, data in _sections(cubin) if name == b".nv.info")):
            if attribute in found and len(payload) == 8:
                found[attribute].append(struct.unpack("<II", payload)[1])
    except (struct.error, ValueError, StopIteration):
        return None, None
    registers, frames = found[_REGISTERS], found[_FRAME_SIZE]
    return max(registers, default=None), max(frames) // _WORD if frames else None


def code(cubin: bytes) -> bytes:
    """The instructions of its kernels, without names, source lines and symbols. Raises ValueError or struct.error."""
    return b"".join(data for name, data in _sections(cubin) if name.startswith(b".text."))


def _sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and contents of each section. Raises ValueError or struct.error for what is no such ELF."""
    header = _HEADER.unpack_from(cubin)
    if header[0][:4] != b"\x7fELF":
        raise ValueError("no ELF")
    offset, size, count, names_at = header[6], header[11], header[12], header[13]
    sections = [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]
    if names_at >= count:
        raise ValueError("no names of sections")
    names = cubin[sections[names_at][4] :]
    for section in sections:
        yield names[section[0] : names.index(b"\0", section[0])], cubin[section[4] : section[4] + section[5]]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == _SIZED:
            yield attribute, info[place : place + length]
            place += length
