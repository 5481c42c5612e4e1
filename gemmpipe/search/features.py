"""Features of candidates for surrogates: knobs, an analytic time model on the problem, and facts of builds."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gemmpipe.core.data import BuildFacts, Candidate, Device, Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.family.roofline import roofline_or_reference

Array = npt.NDArray[np.float64]

_KNOB_LENGTH = 1.5  # length scale of a numeric knob, in doublings
_CATEGORY_LENGTH = 0.8  # of a non-numeric knob
_TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
_RAW_KNOBS = (*_TILE, "NUM_KSPLIT", "num_warps", "num_stages", "SWAP_AB")
_KNOB_LENGTHS = {"num_stages": 2.0, "GROUP_SIZE_M": 4.0}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SMEM_BYTES = 228 * 1024  # per SM or CU
_REGISTERS = 65536
_MAX_THREADS = 2048
_CACHE_SPEED = 2.0  # bytes of the last-level cache per byte of memory, in the same time
_LOOP_SLOWDOWN = 1.48  # peak rate over that of a tiled kernel's K loop; only ratios of rates order candidates
_LATENCY_S = 1.0e-6  # of one K step that is not overlapped
_START_S = 2.0e-6
_WARPS = 4  # of a math warpgroup (warp_specialised), where no knob sets the warps with a tile's accumulators
_INITIAL_SIZE = 64  # rows and columns of new arrays


@dataclass(kw_only=True, eq=False)
class FeatureEncoder:
    """Encodes knobs as columns, the same for all problems of a run; grows with new knobs and candidates."""

    columns: dict[str, int] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)
    """Candidate id -> its row in the arrays below; problems share candidates."""
    _knob_columns: Array = field(default_factory=lambda: np.zeros((_INITIAL_SIZE, _INITIAL_SIZE)))
    _raw: Array = field(default_factory=lambda: np.zeros((_INITIAL_SIZE, len(_RAW_KNOBS))))

    def encode(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """(knob columns in units of their length scales, raw knob values for the derived columns), by candidate."""
        rows = np.array([self._row(c) for c in candidates], dtype=np.int64)
        return self._knob_columns[rows, : len(self.columns)], self._raw[rows]

    def _row(self, candidate: Candidate) -> int:
        row_index = self._rows.get(candidate.id)
        if row_index is None:
            row_index = self._rows[candidate.id] = len(self._rows)
            row: dict[int, float] = {self._column(f"={candidate.backend}"): 1 / _CATEGORY_LENGTH}
            for name, value in candidate.items:
                self._set_column(row, name, value)
            self._knob_columns, self._raw = (
                _grown(self._knob_columns, row_index, len(self.columns)),
                _grown(self._raw, row_index, 0),
            )
            self._knob_columns[row_index, list(row)] = list(row.values())
            knobs = candidate.knobs
            groups = 1 if knobs.get("ONE_WARPGROUP") else 2
            warps = {"num_warps": _WARPS * groups}
            self._raw[row_index] = [_number({**warps, **knobs}.get(name)) for name in _RAW_KNOBS]
        return row_index

    def _set_column(self, row: dict[int, float], name: str, value: Scalar) -> None:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            row[self._column(f"{name}={value}")] = 1 / _CATEGORY_LENGTH
        elif name in _KNOB_LENGTHS and name != "GROUP_SIZE_M":
            row[self._column(name)] = value / _KNOB_LENGTHS[name]
        else:
            row[self._column(name)] = math.log2(max(value, 0.25)) / _KNOB_LENGTHS.get(name, _KNOB_LENGTH)

    def _column(self, name: str) -> int:
        return self.columns.setdefault(name, len(self.columns))


def _grown(rows: Array, row_index: int, columns: int) -> Array:
    """`rows`, doubled where needed to hold row `row_index` and `columns` columns."""
    missing = [
        0 if wanted <= have else max(have, wanted - have)
        for have, wanted in zip(rows.shape, (row_index + 1, columns), strict=True)
    ]
    return np.pad(rows, [(0, number) for number in missing]) if any(missing) else rows


def _number(value: Scalar) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureMatrix:
    """Features of the candidates of one problem; rows in the order of the candidates."""

    knob_columns: Array
    derived_columns: Array
    """Terms of the analytic model."""
    estimate: Array
    """log(us) by the analytic model; its mean where a knob that it needs is missing."""

    def take(self, rows: npt.NDArray[np.int64]) -> "FeatureMatrix":
        """The given rows."""
        return FeatureMatrix(
            knob_columns=self.knob_columns[rows],
            derived_columns=self.derived_columns[rows],
            estimate=self.estimate[rows],
        )

    def padded(self, columns: int) -> Array:
        """All columns, with the knob columns padded to `columns`."""
        rows, knob_columns = self.knob_columns.shape
        whole = np.zeros((rows, columns + self.derived_columns.shape[1]))
        whole[:, :knob_columns] = self.knob_columns
        whole[:, columns:] = self.derived_columns
        return whole


class FeatureCache:
    """Features of a problem's candidates, updated as facts of their builds become known during the search."""

    def __init__(
        self,
        encoder: FeatureEncoder,
        spec: GemmSpec,
        device: Device,
        candidates: Sequence[Candidate],
        builds: Mapping[str, Iterable[str]],
    ) -> None:
        self._spec, self._device = spec, device
        self._knob_columns, self._raw = encoder.encode(candidates)
        self._facts = np.full((len(candidates), 3), math.nan)
        """Maximum registers, spills and shared bytes over a candidate's builds; NaN if unknown."""
        self._unknown: dict[str, list[int]] = {}
        """Build id -> rows without its facts."""
        for row, candidate in enumerate(candidates):
            for build in builds.get(candidate.id, ()):
                self._unknown.setdefault(build, []).append(row)
        self._facts_read = 0
        self._matrix: FeatureMatrix | None = None

    def features(self, facts: Mapping[str, BuildFacts]) -> FeatureMatrix:
        """The current features; `facts` may only grow, in insertion order."""
        for build in itertools.islice(facts, self._facts_read, None):
            rows = self._unknown.pop(build, None)
            if rows is not None:
                self._facts[rows] = np.fmax(self._facts[rows], _fact_values(facts[build]))
                self._matrix = None
        self._facts_read = len(facts)
        if self._matrix is None:
            self._matrix = _analytic_features(self._spec, self._device, self._knob_columns, self._raw, self._facts)
        return self._matrix


def _fact_values(facts: BuildFacts) -> list[float]:
    return [math.nan if v is None else float(v) for v in (facts.registers, facts.spills, facts.shared_bytes)]


def _analytic_features(spec: GemmSpec, device: Device, knob_columns: Array, raw: Array, known: Array) -> FeatureMatrix:
    """The analytic model of a tiled product: waves of blocks, K steps bound by flops, bytes or latency."""
    m_tile, n_tile, k_tile, splits, warps, stages, swapped = (raw[:, i] for i in range(len(_RAW_KNOBS)))
    splits, stages = (np.where(np.isnan(a), b, a) for a, b in ((splits, 1), (stages, 3)))
    units, item = max(1, device.cu_num), _BYTES.get(spec.w_dtype, 1)
    roofline = roofline_or_reference(device.gfx, device.name)
    flops_per_s = roofline.flops_8_per_s / _LOOP_SLOWDOWN  # of operands of one byte
    cache_bytes_per_s = roofline.bytes_per_s * _CACHE_SPEED
    lanes = warps * device.warp_size
    sums = m_tile * n_tile / lanes  # accumulators per thread
    registers = np.where(np.isnan(known[:, 0]), np.minimum(255, 24 + 1.6 * sums), known[:, 0])
    shared = np.where(np.isnan(known[:, 2]), (m_tile + n_tile) * k_tile * item * (stages - 1), known[:, 2])
    spilled = np.where(np.isnan(known[:, 1]), sums > 160, known[:, 1] > 0).astype(np.float64)
    room = np.minimum(_SMEM_BYTES / (shared + 1024), np.minimum(_REGISTERS / (registers * lanes), _MAX_THREADS / lanes))
    at_once = np.maximum(1, np.floor(room))
    tiles = np.ceil(spec.m / m_tile) * np.ceil(spec.n / n_tile) * splits * max(1, spec.batch)
    rounds = np.ceil(tiles / (units * at_once))
    steps = np.ceil(spec.k / k_tile / splits)
    sharing = np.minimum(np.ceil(tiles / units), at_once)  # resident blocks per unit
    wide = np.maximum(np.where(swapped == 1, n_tile, m_tile), 64) * np.where(swapped == 1, m_tile, n_tile)
    flops_s = 2 * wide * k_tile * item / (flops_per_s / units) * sharing * np.where(spilled > 0, 8.0, 1.0)
    bytes_s = (m_tile + n_tile) * k_tile * item / (cache_bytes_per_s / units) * sharing
    step_s = 0.5 * flops_s + np.maximum(np.maximum(flops_s, bytes_s), _LATENCY_S / np.maximum(stages - 1, 1))
    floor_s = (spec.weight_elements + spec.m * spec.k) * item / roofline.bytes_per_s
    time_us = 1e6 * np.maximum(rounds * (steps * step_s + _START_S) + _START_S * (splits > 1), floor_s)
    estimate = np.log(time_us)
    fill = np.minimum(1, tiles / (rounds * units * at_once))
    terms = (np.log2(tiles) / 3, np.log2(rounds) / 2, np.log2(at_once) / 1.5, 2 * fill, spilled / 0.7)
    derived_columns = np.stack([*terms, np.log2(steps) / 3, np.log2(sums) / 2, estimate / 2], axis=1)
    known_rows = ~np.isnan(estimate)
    mean = float(estimate[known_rows].mean()) if known_rows.any() else 0.0
    return FeatureMatrix(
        knob_columns=knob_columns,
        derived_columns=np.where(np.isnan(derived_columns), 0.0, derived_columns),
        estimate=np.where(known_rows, estimate, mean),
    )
