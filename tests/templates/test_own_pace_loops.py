"""The loops of own_pace.py, run instruction by instruction: every K block is added once, with its own scales.

A small interpreter of the PTX that they consist of: integers are computed, scales and products are names. Slots and
panels are filled as soon as they are waited for, but the first test of each finds it empty. Results of the compiled
kernels are checked on a GPU (test_scale_orders_on_gpu.py).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gemmpipe.templates.hopper import own_pace
from gemmpipe.templates.hopper.scale_panels import scale_panels
from gemmpipe.templates.hopper.waves import wave_part_columns

SCALE_BLOCK = 128
X_AT, W_AT, LOWS, HIGHS = 1 << 40, 1 << 41, 1 << 50, 1 << 51
INTEGERS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
    "and": lambda a, b: a & b,
    "shr": lambda a, b: a >> b,
    "mad": lambda a, b, c: a * b + c,
    "mul": lambda a, b: a * b,
    "cvt": lambda a: a,
    "bfe": lambda value, first, bits: value >> first & (1 << bits) - 1,
    "selp": lambda a, b, p: a if p else b,
    "shfl": lambda a, *_: a,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
}


@dataclass
class Machine:
    """Registers and memory of one thread: lane 0, row `row` of the tile."""

    stages: int
    block_m: int
    registers: dict[str, int | bool | str] = field(default_factory=dict)
    sums: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """By operand: (x's descriptor, scale) of each addition."""
    products: dict[str, list[int]] = field(default_factory=dict)
    """By letter of the registers: the descriptors of x whose products they are."""
    started: list[str] = field(default_factory=list)
    """Letters whose instructions are not committed."""
    flying: list[set[str]] = field(default_factory=list)
    tests: Counter[tuple[int, int]] = field(default_factory=Counter)
    released: list[int] = field(default_factory=list)

    def value(self, name: str) -> int | bool | str:
        """Of a register or a constant."""
        return int(name) if re.fullmatch(r"-?\d+", name) else self.registers[name]

    def address(self, text: str) -> int:
        """Of `[register + constant]`."""
        return sum(int(self.value(part)) for part in text.strip("[]").split(" + "))

    def step(self, text: str) -> None:
        """Run one instruction that is no branch."""
        code, _, rest = text.partition(" ")
        kind, operands = code.split(".")[0], [each.strip() for each in rest.split(",")]
        if code.startswith("wgmma"):
            self.multiply(code, rest)
        elif code.startswith("mbarrier.try_wait"):
            found = self.address(operands[1]), int(self.value(operands[2]))
            self.tests[found] += 1
            self.registers[operands[0]] = self.tests[found] > 1
        elif code.startswith("mbarrier.arrive"):
            self.released.append(self.address(operands[1]))
        elif kind == "ld":
            self.registers[operands[0]] = f"{code.split('.')[1]}@{self.address(operands[1])}"
        elif kind == "fma":
            product, at = operands[1][0], self.products[operands[1][0]]
            assert not any(product in group for group in self.flying), "the product is in flight"
            assert operands[0] == operands[3] and len(at) == 4 and at == [at[0] + 2 * i for i in range(4)]
            self.sums[operands[0]].append((at[0], str(self.value(operands[2]))))
        elif code == "mul.f32":
            self.registers[operands[0]] = " ".join(sorted(str(self.value(each)) for each in operands[1:]))
        elif kind == "setp":
            a, b = (int(self.value(each)) for each in operands[1:])
            self.registers[operands[0]] = COMPARISONS[code.split(".")[1]](a, b)
        elif code == "mov.f32" and operands[1].startswith("0f"):
            self.sums[operands[0]] = []
        elif code == "mov.f32":
            self.registers[operands[0]] = self.value(operands[1])
        else:
            self.registers[operands[0]] = INTEGERS[kind](*(self.value(each) for each in operands[1:]))

    def multiply(self, code: str, rest: str) -> None:
        """The instructions of products."""
        if "mma_async" in code:
            names, x, _, add, *_ = re.sub(r"\{(\w+),.*?\}", r"\1", rest).split(", ")
            letter = names[0]
            self.products[letter] = [*(self.products[letter] if self.value(add) else ()), int(self.value(x))]
            self.started.append(letter)
        elif "commit" in code:
            self.flying, self.started = [*self.flying, set(self.started)], []
        elif "wait_group" in code:
            kept = int(rest)
            self.flying = self.flying[len(self.flying) - kept :] if kept else []


def run(text: str, machine: Machine) -> None:
    """Run the PTX to its end."""
    pieces = re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1]).split(";")
    program, labels = list[str](), dict[str, int]()
    for piece in pieces:
        rest = piece.strip()
        while found := re.match(r"(\w+):\s*", rest):
            labels[found[1]] = len(program)
            rest = rest[found.end() :]
        program.append(rest)
    at = 0
    for _ in range(1_000_000):
        if at >= len(program):
            return
        line, at = program[at], at + 1
        if found := re.match(r"@(!?)(\w+) ", line):
            if bool(machine.registers[found[2]]) == bool(found[1]):
                continue
            line = line[found.end() :]
        if line.startswith("bra"):
            at = labels[line.split()[1]]
        elif line:
            machine.step(line)
    raise AssertionError("the loop does not end")


def machine_of(tile: tuple[int, int, int], blocks: int, slot: int, edge: int, in_panels: bool, panel: int) -> Machine:
    """With the operands of multiply_at_own_pace: from this slot on, with scales of the columns before `edge`."""
    block_m, columns, stages = tile
    width = wave_part_columns(columns)
    sums, step = block_m // 128 * columns // 2, width // 2
    given = [X_AT, W_AT, LOWS, HIGHS, slot % stages, slot // stages % 2, blocks, edge, 0]
    given += [panel * (4 // own_pace.unrolled(columns))] if in_panels else []
    registers: dict[str, int | bool | str] = {f"${sums + i * step}": each for i, each in enumerate(given)}
    return Machine(stages, block_m, {**registers, "global_smem": 0, "%laneid": 0})


FORMS = [
    *[(128, 64, 8, two) for two in (False, True)],
    *[(128, 96, 7, two) for two in (False, True)],
    *[(128, 112, 6, two) for two in (False, True)],
    *[(128, 128, 5, two) for two in (False, True)],
    *[(128, 144, 6, False), (128, 160, 5, False), (128, 192, 4, False), (256, 128, 3, False)],
]


@pytest.mark.parametrize(("block_m", "columns", "stages", "two"), FORMS)
@pytest.mark.parametrize("in_panels", [False, True])
def test_every_k_block_is_added_once_with_its_own_scales(
    block_m: int, columns: int, stages: int, two: bool, in_panels: bool
) -> None:
    tile, parts, lines = (block_m, columns, stages), columns // wave_part_columns(columns), stages * block_m * 128
    text = str(own_pace.loop_asm(columns, parts, block_m, stages, 0, SCALE_BLOCK, in_panels, False, two))
    bars = lines + own_pace.scale_lines(block_m, stages) * own_pace.line_bytes()
    empties, lows = bars + own_pace.line_bytes(), own_pace.low_columns(columns, SCALE_BLOCK)
    for blocks in (4, 8, 12, 20) if in_panels else (1, 2, 3, 4, 5, 7, 8, 9, 13):
        slot, panel, low = blocks * 3, blocks // 4 * 3, lows[blocks % len(lows)]
        machine = machine_of(tile, blocks, slot, low if low < columns else columns, in_panels, panel)
        run(text, machine)
        slots = [(slot + k) % stages for k in range(blocks)]
        assert sorted(machine.sums) == sorted(f"${i}" for i in range(block_m // 128 * columns // 2))
        for target, additions in machine.sums.items():
            wave, i = divmod(int(target[1:]), columns // 2)
            assert [x for x, _ in additions] == [X_AT + 8 * block_m * each + 512 * wave for each in slots]
            row = 64 * wave + 8 * (i // 2 % 2)
            for k, (_, scale) in enumerate(additions):
                w = (LOWS if i // 4 * 8 < low else HIGHS) + 4 * k
                place = 4 * (slots[k] * block_m + row)
                if in_panels:
                    place = 16 * ((panel + k // 4) % scale_panels() * block_m + row) + 4 * (k % 4)
                assert scale == " ".join(sorted((f"shared@{lines + place}", f"global@{w}"))), (target, k)
        expected = Counter(empties + 8 * each for each in slots)
        if in_panels:
            first = empties + own_pace.line_bytes() - 8 * scale_panels()
            expected += Counter(first + 8 * ((panel + i) % scale_panels()) for i in range(blocks // 4))
        assert Counter(machine.released) == expected
        parity = {(bars + 8 * ((slot + k) % stages), (slot + k) // stages % 2) for k in range(blocks)}
        waited = {each for each in machine.tests if each[0] < empties}
        assert waited == parity
