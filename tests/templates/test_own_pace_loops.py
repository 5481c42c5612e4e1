"""The loops of own_pace.py, run instruction by instruction: every K block is added once, with its own scales.

A small interpreter of the PTX that they consist of: integers are computed, scales and products are names. It is strict:
a slot or a panel is full only after a test that found it so, mostly the second one, and only while the loader may have
filled it; a product starts with the slot's own operands, in registers whose last product is added, behind a
fence; a slot is released in turn, when its product is finished. The compiled kernels' results are checked on a GPU
(test_scale_orders_on_gpu.py).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gemmpipe.templates.hopper import own_pace, own_pace_memory
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
    "shl": lambda a, b: a << b,
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tile, the slot and the panel with which it begins, and where the loop finds its barriers."""

    block_m: int
    columns: int
    stages: int
    two: bool
    in_panels: bool
    blocks: int
    slot: int
    panel: int
    low: int

    @property
    def waves(self) -> int:
        """Of a warpgroup."""
        return max(1, self.block_m // 128)

    @property
    def scales(self) -> int:
        """The address of x's scales, behind the slots of x."""
        return self.stages * self.block_m * 128

    @property
    def fulls(self) -> int:
        """The address of the slots' barriers."""
        return self.scales + own_pace_memory.scale_lines(self.block_m, self.stages) * own_pace_memory.line_bytes()

    def full(self, k: int) -> tuple[int, int]:
        """(barrier, phase) of a K block's slot."""
        use, slot = divmod(self.slot + k, self.stages)
        return self.fulls + 8 * slot, use % 2

    def panel_full(self, k: int) -> tuple[int, int]:
        """(barrier, phase) of the panel that a K block's scales are in."""
        use, panel = divmod(self.panel + k // 4, scale_panels())
        return self.fulls + 2 * own_pace_memory.line_bytes() - 16 * scale_panels() + 8 * panel, use % 2

    def scale_names(self, k: int, wave: int, i: int) -> str:
        """The scales of element i of a wave's product of a K block."""
        row, slot = 64 * wave + 8 * (i // 2 % 2), (self.slot + k) % self.stages
        place = 4 * (slot * self.block_m + row)
        if self.in_panels:
            place = 16 * ((self.panel + k // 4) % scale_panels() * self.block_m + row) + 4 * (k % 4)
        of_w = (LOWS if i // 4 * 8 < self.low else HIGHS) + 4 * k
        return " ".join(sorted((f"shared@{self.scales + place}", f"global@{of_w}")))

    def text(self) -> str:
        """The PTX."""
        parts = self.columns // wave_part_columns(self.columns)
        sizes = (self.columns, parts, self.block_m, self.stages, 0, SCALE_BLOCK)
        return str(own_pace.loop_asm(*sizes, self.in_panels, False, self.two))

    def operands(self) -> dict[str, int]:
        """Those of multiply_at_own_pace; an edge at the end of the tile where all columns are before it."""
        given = [
            X_AT,
            W_AT,
            LOWS,
            HIGHS,
            self.slot % self.stages,
            self.slot // self.stages % 2,
            self.blocks,
            self.low,
            0,
        ]
        given += [self.panel * own_pace.iterations_of_a_panel(self.columns, self.two)] if self.in_panels else []
        first, step = self.waves * self.columns // 2, wave_part_columns(self.columns) // 2
        return {f"${first + i * step}": each for i, each in enumerate(given)}


@dataclass
class Machine:
    """A lane of a warp, mostly lane 0: its registers, and what its instructions have done."""

    case: Case
    registers: dict[str, int | bool | str]
    sums: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """By operand: (K block, scale) of each addition."""
    products: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By letter of the registers: (K block, wave) of the product in them."""
    steps: int = 0
    """Instructions of the product that is being started."""
    fenced: bool = False
    flying: list[str] = field(default_factory=list)
    """Letters of the products in flight, the oldest first."""
    started: int = 0
    """Products."""
    added: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Additions by product."""
    full: set[tuple[str, int]] = field(default_factory=set)
    """Slots and panels, by K block, that a test found full."""
    tests: Counter[tuple[str, int]] = field(default_factory=Counter)
    fetched: set[int] = field(default_factory=set)
    """Addresses of w's scales that were fetched into the cache."""
    released: int = 0
    panels_released: int = 0

    @property
    def block(self) -> int:
        """The K block whose product starts next."""
        return self.started // self.case.waves

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
        elif code.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            self.registers[operands[0]] = self.test(self.address(operands[1]), int(self.value(operands[2])))
        elif code.startswith("mbarrier.arrive"):
            self.release(self.address(operands[1]))
        elif kind == "ld":
            if code.startswith("ld.shared"):
                assert ("slot", self.block) in self.full, "x's scales are read before the slot is full"
                assert not self.case.in_panels or ("panel", self.block // 4) in self.full
            self.registers[operands[0]] = f"{code.split('.')[1]}@{self.address(operands[1])}"
        elif kind == "prefetch":
            self.fetched.add(self.address(rest))
        elif kind == "fma":
            self.add(*operands)
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

    def test(self, barrier: int, phase: int) -> bool:
        """Whether the next slot or panel is full: mostly not at its first test, and only if the loader had room."""
        case, k = self.case, self.block
        assert k < case.blocks, "a test after the last K block"
        if (barrier, phase) == case.full(k):
            of, room = ("slot", k), k - self.released < case.stages
        else:
            assert (barrier, phase) == case.panel_full(k)
            of, room = ("panel", k // 4), k // 4 - self.panels_released < scale_panels()
        self.tests[of] += 1
        assert self.tests[of] < 100, "what is waited for cannot be filled"
        if found := room and (self.tests[of] > 1 or (of[0] == "slot" and k % 3 == 1)):
            self.full.add(of)
        return found

    def release(self, barrier: int) -> None:
        """A slot's, in turn, after its product; or a panel's, after its last scales are read."""
        case = self.case
        slot, panel = (case.full(self.released)[0] + own_pace_memory.line_bytes(), 0)
        if case.in_panels:
            panel = case.panel_full(4 * self.panels_released)[0] + 8 * scale_panels()
        if barrier == slot:
            assert self.started >= case.waves * (self.released + 1)
            assert all(self.products[letter][0] != self.released for letter in self.flying), "its product is in flight"
            self.released += 1
        else:
            assert barrier == panel
            assert self.started >= case.waves * (4 * self.panels_released + 4)
            self.panels_released += 1

    def add(self, target: str, product: str, scale: str, again: str) -> None:
        """An addition to the sums."""
        k, wave = self.products[product[0]]
        assert product[0] not in self.flying, "the product is in flight"
        assert target == again == f"${int(product[1:]) + wave * self.case.columns // 2}"
        self.added[k, wave] += 1
        self.sums[target].append((k, str(self.value(scale))))

    def multiply(self, code: str, rest: str) -> None:
        """The instructions of products."""
        if "fence" in code:
            self.fenced = True
        elif "mma_async" in code:
            self.start(*re.sub(r"\{(\w+),.*?\}", r"\1", rest).split(", "))
        elif "commit" in code:
            assert self.steps == 4
            self.steps, self.started, self.fenced = 0, self.started + 1, False
        elif "wait_group" in code:
            self.flying = self.flying[max(0, len(self.flying) - int(rest)) :]

    def start(self, first: str, x: str, w: str, accumulate: str, *_: str) -> None:
        """An instruction of a product, which covers a quarter of its K block."""
        case, (k, wave), letter = self.case, divmod(self.started, self.case.waves), first[0]
        assert self.fenced
        assert ("slot", k) in self.full, "the slot is not full yet"
        slot = (case.slot + k) % case.stages
        assert self.value(x) == X_AT + 8 * case.block_m * slot + 512 * wave + 2 * self.steps
        assert self.value(w) == W_AT + 8 * case.columns * slot + 2 * self.steps
        assert bool(self.value(accumulate)) == (self.steps > 0)
        if self.steps == 0:
            assert letter not in self.flying
            assert letter not in self.products or self.added[self.products[letter]] == case.columns // 2
            self.products[letter] = k, wave
            self.flying.append(letter)
        assert self.products[letter] == (k, wave)
        self.steps += 1


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


def check(case: Case) -> None:
    """Run a case; every K block of every wave is added once to every sum."""
    machine = Machine(case, {**case.operands(), "global_smem": 0, "%laneid": 0})
    run(case.text(), machine)
    assert (machine.started, machine.released) == (case.blocks * case.waves, case.blocks)
    assert machine.panels_released == (case.blocks // 4 if case.in_panels else 0)
    edges = any(low < case.columns for low in own_pace.low_columns(case.columns, SCALE_BLOCK))
    fetches = not (edges and case.two and case.block_m > 64)
    assert machine.fetched == (set() if not fetches else {LOWS, HIGHS} if edges else {LOWS})
    assert sorted(machine.sums) == sorted(f"${i}" for i in range(case.waves * case.columns // 2))
    for target, additions in machine.sums.items():
        wave, i = divmod(int(target[1:]), case.columns // 2)
        assert additions == [(k, case.scale_names(k, wave, i)) for k in range(case.blocks)], target


FORMS = [
    *[(64, columns, stages, True) for columns, stages in ((32, 12), (64, 13), (80, 11), (96, 10), (128, 7))],
    *[(128, columns, stages, two) for columns, stages in ((32, 10), (64, 8), (80, 8)) for two in (False, True)],
    *[(128, columns, stages, two) for columns, stages in ((96, 7), (112, 6), (128, 5)) for two in (False, True)],
    *[(128, 144, 6, False), (128, 160, 5, False), (128, 192, 4, False), (256, 128, 3, False)],
]


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 56, 144, 300])
@pytest.mark.parametrize("edges", [False, True])
def test_the_lanes_fetch_the_scales_of_a_tile_and_no_others(blocks: int, edges: bool) -> None:
    tile = own_pace._Tile(64, 96 if edges else 64, 8, False, True)
    sizes = {"block_m": 64, "columns": 96, "stages": 7, "two": True, "in_panels": False}
    case, fetched = Case(**sizes, blocks=blocks, slot=0, panel=0, low=96), set[int]()
    for lane in range(32):
        machine = Machine(case, {"left": blocks, "lows": LOWS, "highs": HIGHS, "%laneid": lane})
        run(f"{{ {own_pace._fetch_w_scales(tile, edges)} }}", machine)
        fetched |= machine.fetched
    firsts, sectors = (LOWS, HIGHS) if edges else (LOWS,), range(0, min(4 * blocks, 32 * 32), 32)
    assert fetched == {first + at for first in firsts for at in sectors}


@pytest.mark.parametrize(("block_m", "columns", "stages", "two"), FORMS)
@pytest.mark.parametrize("in_panels", [False, True])
def test_every_k_block_is_added_once_with_its_own_scales(
    block_m: int, columns: int, stages: int, two: bool, in_panels: bool
) -> None:
    lows = own_pace.low_columns(columns, SCALE_BLOCK)
    for blocks in (4, 8, 12, 20) if in_panels else (1, 2, 3, 4, 5, 8, 13):
        sizes = {"block_m": block_m, "columns": columns, "stages": stages, "two": two, "in_panels": in_panels}
        check(Case(**sizes, blocks=blocks, slot=blocks * 3, panel=blocks // 4 * 3, low=lows[blocks % len(lows)]))
