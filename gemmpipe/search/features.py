"""What a surrogate sees of a candidate: its knobs, what they mean on this problem, and facts of its builds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gemmpipe.data import BuildFacts, Candidate, Device, Scalar
from gemmpipe.family import GemmSpec

Array = npt.NDArray[np.float64]

_WORD = 1.5  # the length over which a knob that doubles changes the time much, in doublings
_CHOICE = 0.8  # between two values of a knob that is no number
_TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
_RAW = (*_TILE, "NUM_KSPLIT", "num_warps", "num_stages", "SWAP_AB")
_LENGTHS = {"num_stages": 2.0, "GROUP_SIZE_M": 4.0}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SMEM_BYTES = 228 * 1024  # of one SM or CU, which its blocks share
_REGISTERS = 65536
_LANES = 2048
_DRAM_BPS, _CACHE_BPS, _FLOPS = 4.3e12, 8.6e12, 1.0e15  # an H200, 2026-11; only their ratios order candidates
_LATENCY_S = 1.0e-6  # of one K step that nothing hides
_START_S = 2.0e-6


@dataclass(kw_only=True, eq=False)
class Vocabulary:
    """The columns that knobs make, the same for every problem of a run; grows with what is seen."""

    columns: dict[str, int] = field(default_factory=dict)
    _rows: dict[str, tuple[dict[int, float], tuple[float, ...]]] = field(default_factory=dict)
    _facts: dict[tuple[str, ...], tuple[float, float, float]] = field(default_factory=dict)
    """By the builds of a candidate, when all of them are known."""

    def of(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """(knob columns divided by their lengths, the raw values of the knobs that derived columns need)."""
        known = [self._row(c) for c in candidates]
        words = np.zeros((len(known), len(self.columns)))
        for i, (row, _) in enumerate(known):
            for column, value in row.items():
                words[i, column] = value
        return words, np.array([raw for _, raw in known], dtype=np.float64).reshape(len(known), len(_RAW))

    def facts(self, builds: tuple[str, ...], facts: Mapping[str, BuildFacts]) -> tuple[float, float, float]:
        """(registers, spills, shared bytes) of the hungriest of a candidate's builds; NaN where nothing is known."""
        found = self._facts.get(builds)
        if found is None:
            found = _facts(builds, facts)
            if all(build in facts for build in builds):
                self._facts[builds] = found
        return found

    def _row(self, candidate: Candidate) -> tuple[dict[int, float], tuple[float, ...]]:
        found = self._rows.get(candidate.id)
        if found is None:
            row: dict[int, float] = {self._column(f"={candidate.backend}"): 1 / _CHOICE}
            for name, value in candidate.items:
                self._put(row, name, value)
            knobs = dict(candidate.items)
            found = self._rows[candidate.id] = (row, tuple(_number(knobs.get(name)) for name in _RAW))
        return found

    def _put(self, row: dict[int, float], name: str, value: Scalar) -> None:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            row[self._column(f"{name}={value}")] = 1 / _CHOICE
        elif name in _LENGTHS and name != "GROUP_SIZE_M":
            row[self._column(name)] = value / _LENGTHS[name]
        else:
            row[self._column(name)] = math.log2(max(value, 0.25)) / _LENGTHS.get(name, _WORD)

    def _column(self, name: str) -> int:
        return self.columns.setdefault(name, len(self.columns))


def _number(value: Scalar) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class Sight:
    """Candidates of one problem as a surrogate sees them; rows in the order of the candidates."""

    words: Array
    meaning: Array
    """Columns of what the knobs mean on this problem."""
    estimate: Array
    """log(us) by the model below; its mean where it has no answer."""

    def take(self, places: npt.NDArray[np.int64]) -> "Sight":
        """Some of the rows."""
        return Sight(words=self.words[places], meaning=self.meaning[places], estimate=self.estimate[places])

    def wide(self, columns: int) -> Array:
        """All columns, the words padded to so many."""
        missing = columns - self.words.shape[1]
        return np.hstack([np.pad(self.words, ((0, 0), (0, missing))), self.meaning])


def see(
    vocabulary: Vocabulary,
    spec: GemmSpec,
    device: Device,
    candidates: Sequence[Candidate],
    builds: Mapping[str, Iterable[str]],
    facts: Mapping[str, BuildFacts],
) -> Sight:
    """Candidates of a problem with what is known of their builds by now."""
    words, raw = vocabulary.of(candidates)
    known = np.array([vocabulary.facts(tuple(builds.get(c.id, ())), facts) for c in candidates])
    known = known.reshape(len(candidates), 3)
    return _sight(spec, device, words, raw, known)


def _facts(builds: Iterable[str], facts: Mapping[str, BuildFacts]) -> tuple[float, float, float]:
    """(registers, spills, shared bytes) of the hungriest build; NaN where nothing is known."""
    found = [facts[b] for b in builds if b in facts]
    columns = [[f.registers for f in found], [f.spills for f in found], [f.shared_bytes for f in found]]
    return tuple(max((float(v) for v in c if v is not None), default=math.nan) for c in columns)  # type: ignore[return-value]


def _sight(spec: GemmSpec, device: Device, words: Array, raw: Array, known: Array) -> Sight:
    """A model of a tiled product (waves of blocks, K steps bound by flops, bytes or latency), and its terms."""
    m_tile, n_tile, k_tile, splits, warps, stages, swapped = (raw[:, i] for i in range(len(_RAW)))
    splits, warps, stages = (np.where(np.isnan(a), b, a) for a, b in ((splits, 1), (warps, 4), (stages, 3)))
    units, item = max(1, device.cu_num), _BYTES.get(spec.w_dtype, 1)
    lanes = warps * device.warp_size
    sums = m_tile * n_tile / lanes  # accumulators a thread
    registers = np.where(np.isnan(known[:, 0]), np.minimum(255, 24 + 1.6 * sums), known[:, 0])
    shared = np.where(np.isnan(known[:, 2]), (m_tile + n_tile) * k_tile * item * (stages - 1), known[:, 2])
    spilled = np.where(np.isnan(known[:, 1]), sums > 160, known[:, 1] > 0).astype(np.float64)
    room = np.minimum(_SMEM_BYTES / (shared + 1024), np.minimum(_REGISTERS / (registers * lanes), _LANES / lanes))
    at_once = np.maximum(1, np.floor(room))
    tiles = np.ceil(spec.m / m_tile) * np.ceil(spec.n / n_tile) * splits * max(1, spec.batch)
    rounds = np.ceil(tiles / (units * at_once))
    steps = np.ceil(spec.k / k_tile / splits)
    sharing = np.minimum(np.ceil(tiles / units), at_once)  # blocks that one unit works on
    wide = np.maximum(np.where(swapped == 1, n_tile, m_tile), 64) * np.where(swapped == 1, m_tile, n_tile)
    flops_s = 2 * wide * k_tile * item / (_FLOPS / units) * sharing * np.where(spilled > 0, 8.0, 1.0)
    bytes_s = (m_tile + n_tile) * k_tile * item / (_CACHE_BPS / units) * sharing
    step_s = 0.5 * flops_s + np.maximum(np.maximum(flops_s, bytes_s), _LATENCY_S / np.maximum(stages - 1, 1))
    floor_s = (spec.weight_elements + spec.m * spec.k) * item / _DRAM_BPS
    time_us = 1e6 * np.maximum(rounds * (steps * step_s + _START_S) + _START_S * (splits > 1), floor_s)
    estimate = np.log(time_us)
    fill = np.minimum(1, tiles / (rounds * units * at_once))
    terms = (np.log2(tiles) / 3, np.log2(rounds) / 2, np.log2(at_once) / 1.5, 2 * fill, spilled / 0.7)
    meaning = np.stack([*terms, np.log2(steps) / 3, np.log2(sums) / 2, estimate / 2], axis=1)
    told = ~np.isnan(estimate)
    mean = float(estimate[told].mean()) if told.any() else 0.0
    return Sight(
        words=words, meaning=np.where(np.isnan(meaning), 0.0, meaning), estimate=np.where(told, estimate, mean)
    )
