"""Run a PTX text of one program on the CPU, each warp as 32 lanes, and check what a GPU leaves undefined.

Faults are: a guard or an address that depends on what was never written; an access out of its operand, or not aligned;
an access to shared memory that a copy (cp.async) still writes; two accesses of different lanes, one of them a write,
that no barrier orders: bar.warp.sync within a warp, bar.sync in the program; a write outside the warp's regions.
A register or byte that was never written has a poison flag, which results take over from what they depend on.

The warps run one after the other, each up to the next bar.sync. Branches are those of a whole warp. Division and the
matrix instruction round once, which a GPU does not promise.
"""

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from ptx_memory import SHARED_BASE, Fault, Memory, Places, Region, Shared, Stamp, places
from ptx_values import VALUES, Flags, Lanes, bits_of, f32, from_halves

LANE = np.arange(32)
ALL: Flags = np.ones(32, bool)
NONE: Flags = np.zeros(32, bool)
MOST_STEPS = 200_000
WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64}


class Sums(NamedTuple):
    """Outputs [sums, threads], and which of them depend on nothing undefined."""

    values: NDArray[np.float32]
    defined: Flags


class Operand(NamedTuple):
    """A register or constant, some of them in braces, or an address: its register and offset."""

    names: tuple[str, ...]
    offset: int


class Instruction(NamedTuple):
    """An instruction: what it does, in which lanes (guard: a predicate, `!` before it), to which operands."""

    text: str
    name: str
    guard: str
    operands: tuple[Operand, ...]
    action: "Action"


class Warp:
    """A warp's registers, copies on the way, and place in the text."""

    def __init__(self, program: "Program", index: int, given: dict[str, Lanes], memory: Memory, shared: Shared) -> None:
        self.program, self.index, self.memory, self.shared = program, index, memory, shared
        self.values = {name: np.zeros(32, np.uint64) for name in program.masks} | program.constants | given
        self.poison = dict.fromkeys(program.masks, ALL) | dict.fromkeys([*program.constants, *given], NONE)
        self.at = self.epoch = self.steps = 0
        self.copies: list[tuple[Places, Flags]] = []
        self.groups: list[list[tuple[Places, Flags]]] = []

    def stamp(self, active: Flags) -> Stamp:
        """Threads, warp and time of an access now."""
        return Stamp((32 * self.index + LANE[active])[:, None], self.index, self.epoch, self.shared.phase)

    def write(self, name: str, bits: Lanes, poison: Flags, active: Flags) -> None:
        """Write a register in the active lanes."""
        bits = bits & self.program.masks[name]
        if active is not ALL:
            bits, poison = np.where(active, bits, self.values[name]), np.where(active, poison, self.poison[name])
        self.values[name], self.poison[name] = bits, poison

    def addresses(self, operand: Operand, active: Flags) -> Lanes:
        """The address of each active lane."""
        if (self.poison[operand.names[0]] & active).any():
            raise Fault("an address depends on what was never written")
        addresses: Lanes = self.values[operand.names[0]][active] + np.uint64(operand.offset)
        return addresses

    def advance(self) -> bool:
        """Run up to the next bar.sync (True) or to the end."""
        while self.at < len(self.program.instructions):
            instruction = self.program.instructions[self.at]
            self.at, self.steps = self.at + 1, self.steps + 1
            try:
                if self.steps > MOST_STEPS:
                    raise Fault(f"no end after {MOST_STEPS} instructions")
                active = self._active(instruction.guard)
                if not active.any():
                    continue
                instruction.action(self, instruction, active)
            except Fault as fault:
                raise Fault(f"warp {self.index}: {instruction.text}: {fault}") from None
            if instruction.name == "bar.sync":
                return True
        if self.copies or any(self.groups):
            raise Fault(f"warp {self.index} ends with copies that it never waited for")
        return False

    def _active(self, guard: str) -> Flags:
        if not guard:
            return ALL
        name = guard.removeprefix("!")
        if self.poison[name].any():
            raise Fault("the guard depends on what was never written")
        active = (self.values[name] != 0) ^ guard.startswith("!")
        return ALL if active.all() else active


Action = Callable[[Warp, Instruction, Flags], None]


class Program:
    """A parsed text: instructions, places of labels, masks of the registers' widths, constants.

    A text with an instruction that is not supported raises NotImplementedError.
    """

    def __init__(self, text: str, sums: int, given: int) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.masks = {f"${i}": np.uint64(2**32 - 1) for i in range(sums)}
        self.constants = {"global_smem": np.full(32, SHARED_BASE, np.uint64)}
        self._known = {*self.constants, *(f"${i}" for i in range(sums + given))}
        for part in text.strip().removeprefix("{").removesuffix("}").split(";"):
            self._parse(part.strip())

    def _parse(self, text: str) -> None:
        while label := re.match(r"(\w+):\s*", text):
            self.labels[label[1]] = len(self.instructions)
            text = text[label.end() :]
        if text.startswith(".reg"):
            self._declare(text)
        elif text:
            guard, name, rest = re.fullmatch(r"(?:@(!?\w+)\s+)?(\S+)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
            if name not in ACTIONS:
                raise NotImplementedError(text)
            operands = tuple(self._operand(each, name) for each in re.findall(r"\{.*?\}|\[.*?\]|[^\s,]+", rest))
            self.instructions += [Instruction(text, name, guard or "", operands, ACTIONS[name])]

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(maxsplit=2)
        for name, count in re.findall(r"(\w+)(?:<(\d+)>)?", names):
            for each in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self.masks[each] = np.uint64(2 ** WIDTHS[kind.removeprefix(".")] - 1)
                self._known.add(each)

    def _operand(self, text: str, instruction: str) -> Operand:
        names, _, offset = text.strip("[]").partition("+") if text.startswith("[") else (text.strip("{}"), "", "")
        operand = Operand(tuple(name.strip() for name in names.split(",")), int(offset or 0))
        for name in operand.names:
            if name not in self._known and instruction != "bra.uni":
                bits = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
                self.constants[name] = np.full(32, bits % 2**64, np.uint64)
        return operand


def run(
    text: str,
    sums: int,
    operands: Sequence[int | Places],
    warps: int,
    memory: Memory,
    shared_bytes: int,
    regions: Sequence[Region] = (),
) -> Sums:
    """Run the text: `sums` outputs ($0, ...) in fp32, then operands: one value, or one for each thread."""
    program = Program(text, sums, len(operands))
    shared = Shared(shared_bytes, warps, regions)
    columns = [np.broadcast_to(np.asarray(each, np.int64), 32 * warps).view(np.uint64) for each in operands]
    each_warp = []
    for index in range(warps):
        lanes = slice(32 * index, 32 * index + 32)
        given = {f"${sums + i}": column[lanes] for i, column in enumerate(columns)}
        each_warp += [Warp(program, index, given, memory, shared)]
    with np.errstate(all="ignore"):
        while any(waiting := [warp.advance() for warp in each_warp]):
            if not all(waiting):
                raise Fault("some warps end while others wait in bar.sync")
            shared.phase += 1
    outputs = [[warp.values[f"${i}"] for warp in each_warp] for i in range(sums)]
    poison = [[warp.poison[f"${i}"] for warp in each_warp] for i in range(sums)]
    return Sums(f32(np.array(outputs)).reshape(sums, -1), ~np.array(poison).reshape(sums, -1))


def _value(function: Callable[..., Lanes]) -> Action:
    def act(warp: Warp, instruction: Instruction, active: Flags) -> None:
        target, *sources = (operand.names[0] for operand in instruction.operands)
        poison = np.logical_or.reduce([warp.poison[name] for name in sources])
        warp.write(target, function(*(warp.values[name] for name in sources)), poison, active)

    return act


def _move(warp: Warp, instruction: Instruction, active: Flags) -> None:
    """Move 32 bits, also from or to two registers of 16."""
    targets, sources = (operand.names for operand in instruction.operands)
    bits, poison = warp.values[sources[0]], warp.poison[sources[0]]
    if len(sources) == 2:
        bits, poison = bits | (warp.values[sources[1]] << np.uint64(16)), poison | warp.poison[sources[1]]
    for i, name in enumerate(targets):
        warp.write(name, bits >> np.uint64(16 * i), poison, active)


def _whole(action: Action) -> Action:
    """The action of an instruction that all lanes of a warp execute."""

    def act(warp: Warp, instruction: Instruction, active: Flags) -> None:
        if active is not ALL:
            raise Fault("not all lanes of the warp execute it")
        action(warp, instruction, active)

    return act


def _branch(warp: Warp, instruction: Instruction, active: Flags) -> None:
    warp.at = warp.program.labels[instruction.operands[0].names[0]]


def _barrier(warp: Warp, instruction: Instruction, active: Flags) -> None:
    warp.epoch += 1


def _load(warp: Warp, instruction: Instruction, active: Flags) -> None:
    """Load 32 bits for each register, of global or shared memory."""
    targets, source = instruction.operands
    size, addresses = 4 * len(targets.names), warp.addresses(source, active)
    poison = np.zeros((32, len(targets.names)), bool)
    if ".shared" in instruction.name:
        at = places(addresses, SHARED_BASE, size, len(warp.shared.bytes))
        loaded = warp.shared.read(at, warp.stamp(active))
        poison[active] = ~warp.shared.defined[at].reshape(len(at), -1, 4).all(2)
    else:
        loaded = warp.memory.read(addresses, size)
    words = np.zeros((32, len(targets.names)), np.uint64)
    words[active] = np.ascontiguousarray(loaded).view(np.uint32)
    for i, name in enumerate(targets.names):
        warp.write(name, words[:, i], poison[:, i], active)


def _store(warp: Warp, instruction: Instruction, active: Flags) -> None:
    """Store 32 bits of each register in shared memory; what is undefined stays so."""
    target, sources = instruction.operands
    shared, names = warp.shared, sources.names
    at = places(warp.addresses(target, active), SHARED_BASE, 4 * len(names), len(shared.bytes))
    shared.check_write(at, warp.stamp(active))
    words = np.stack([warp.values[name][active] for name in names], 1).astype(np.uint32)
    shared.bytes[at] = words.view(np.uint8).reshape(at.shape)
    shared.defined[at] = np.repeat(np.stack([~warp.poison[name][active] for name in names], 1), 4, 1)
    shared.writes.record(at, warp.stamp(active))


def _copy(warp: Warp, instruction: Instruction, active: Flags) -> None:
    """Start a copy from global to shared memory."""
    target, source, size = instruction.operands
    count, shared = int(size.names[0]), warp.shared
    at = places(warp.addresses(target, active), SHARED_BASE, count, len(shared.bytes))
    shared.check_write(at, warp.stamp(active))
    shared.bytes[at] = warp.memory.read(warp.addresses(source, active), count)
    shared.pending[at] = shared.defined[at] = True
    warp.copies += [(at, active)]


def _commit(warp: Warp, instruction: Instruction, active: Flags) -> None:
    warp.groups += [warp.copies]
    warp.copies = []


def _wait(warp: Warp, instruction: Instruction, active: Flags) -> None:
    """Wait for all groups of copies but the last few: the lanes that copied see them now, others after a barrier."""
    done = max(0, len(warp.groups) - int(instruction.operands[0].names[0]))
    for at, lanes in (copy for group in warp.groups[:done] for copy in group):
        warp.shared.pending[at] = False
        warp.shared.writes.record(at, warp.stamp(lanes))
    warp.groups = warp.groups[done:]


def _shuffle(kind: str) -> Action:
    def act(warp: Warp, instruction: Instruction, active: Flags) -> None:
        target, source, distance = (operand.names[0] for operand in instruction.operands[:3])
        by = warp.values[distance].astype(np.int64)
        lanes = (LANE ^ by if kind == "bfly" else by) % 32
        warp.write(target, warp.values[source][lanes], warp.poison[source][lanes] | warp.poison[distance], active)

    return act


def _fragment(warp: Warp, names: Sequence[str], kind: str) -> tuple[NDArray[np.float64], Flags]:
    """The matrix [8 or 16, K 16] that a warp's registers hold, and which rows are poison."""
    tall = len(names) // 2
    matrix, poison = np.zeros((8 * tall, 16)), np.zeros(8 * tall, bool)
    for i, name in enumerate(names):
        rows, columns = LANE // 4 + 8 * (i % tall), LANE % 4 * 2 + 8 * (i // tall)
        matrix[rows[:, None], columns[:, None] + np.arange(2)] = from_halves(warp.values[name], kind)
        np.logical_or.at(poison, rows, warp.poison[name])
    return matrix, poison


def _multiply(kind: str) -> Action:
    def act(warp: Warp, instruction: Instruction, active: Flags) -> None:
        targets, left, right, addends = (operand.names for operand in instruction.operands)
        (a, a_poison), (b, b_poison) = _fragment(warp, left, kind), _fragment(warp, right, kind)
        products, poison, results = a @ b.T, a_poison[:, None] | b_poison, []
        for i, name in enumerate(addends):
            at = LANE // 4 + i // 2 * 8, LANE % 4 * 2 + i % 2
            results += [(bits_of(products[at] + f32(warp.values[name])), poison[at] | warp.poison[name])]
        for name, (bits, undefined) in zip(targets, results, strict=True):
            warp.write(name, bits, undefined, active)

    return act


ACTIONS: dict[str, Action] = {
    **{name: _value(function) for name, function in VALUES.items()},
    **{
        f"ld.{where}{n}.{t}": _load for where, n, t in product(("global", "shared"), ("", ".v2", ".v4"), ("b32", "f32"))
    },
    **{f"st.shared{n}.{t}": _store for n, t in product(("", ".v2", ".v4"), ("b32", "f32"))},
    **{f"shfl.sync.{kind}.b32": _whole(_shuffle(kind)) for kind in ("idx", "bfly")},
    **{f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32": _whole(_multiply(t)) for t in ("f16", "bf16")},
    "mov.b32": _move,
    "bra.uni": _whole(_branch),
    "bar.sync": _whole(_barrier),
    "bar.warp.sync": _whole(_barrier),
    "cp.async.cg.shared.global": _copy,
    "cp.async.commit_group": _whole(_commit),
    "cp.async.wait_group": _whole(_wait),
}
"""What each instruction does."""
