"""The seconds of first launches in the finals of a comparison: a worker imports the engine, whose function compiles.

vLLM's `fused_experts` looks up its configuration in the launch, so that nothing compiles it before. Of the 112 s of
finals of 35 problems, 94 were checks, most of them its import and its kernels (H200, 2026-11-26).
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from gemmpipe.backends import engine_moe
from gemmpipe.backends.engine_compile import CompilesWhenCalled
from gemmpipe.core.data import Candidate, Device, Problem
from gemmpipe.core.errors import UserError
from gemmpipe.family import GemmSpec
from gemmpipe.formats.engine_json import Vllm, nearest_key
from gemmpipe.stages import Context
from gemmpipe.stages.finals_work import FinalsWork

# Fitted to the first launches of eight comparisons on H200s, 2026-11-26.
_IMPORT_S = 18.0
"""Until a worker has imported an engine: 13 to 16 on a machine that has read its files before, else 20 to 22."""
_KERNELS_S, _TILE_S, _LARGE_TILE = 2.4, 2.2, 128 * 256
"""Of both kernels of experts: the seconds of the smallest tiles, and what those of so many elements take longer."""
_LARGEST_M = 256
"""The largest M at which the configuration of an engine without a file changes."""
_TILE_WITHOUT_FILE = 64 * 128
_SCALES = 16
"""Triton compiles another kernel where a stride is a multiple of this, as are those of scales along K."""
_PRIOR_S, _KNOWN_S, _CACHED = 16.0, 5.0, 0.45
"""Seconds of kernels for which the expected time stands beside the measured one; those after which it is known whether
kernels are in Triton's cache, from a run before; and the share of their time below which they are."""
_LESS, _MORE = 0.8, 1.6  # both ends over the expected times, while it is not known


@dataclass(frozen=True, kw_only=True)
class FirstLaunch:
    """How much longer the first launch of an entry takes."""

    import_s: float
    compile_s: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.import_s + self.compile_s


def first_launches(
    entries: Mapping[Problem, Collection[Candidate]], context: Context
) -> dict[tuple[str, str], FirstLaunch]:
    """By (problem id, candidate id); `entries` in the order of the finals."""
    found: dict[tuple[str, str], FirstLaunch] = {}
    if context.device.kind != "cuda":
        return found
    # Workers that have timed problems of an earlier batch have imported the engine.
    imports = 0 if context.assignments else context.device_count
    experts = _ExpertKernels(context.device)
    for problem, candidates in entries.items():
        spec = context.family.spec(problem)
        engines = [c for c in dict.fromkeys(candidates) if _imports(c, spec, context)]
        for place, candidate in enumerate(engines):
            first = imports > 0 and place == 0
            imports -= first
            compile_s = experts.seconds(spec, spec.experts.topk) if spec.experts is not None else 0.0
            import_s = _IMPORT_S if first else 0.0
            found[problem.id, candidate.id] = FirstLaunch(import_s=import_s, compile_s=compile_s)
    return found


def _imports(candidate: Candidate, spec: GemmSpec, context: Context) -> bool:
    """True for an engine's Triton function, and for its experts; its CUTLASS and DeepGEMM products load at once."""
    found: object = context.implementation(candidate.backend)
    if not isinstance(found, CompilesWhenCalled):
        return False
    return spec.experts is not None or found.compiles_when_called(spec, candidate.knobs)


class FirstLaunchPace:
    """The time left of finals in which kernels compile, corrected by that of the problems that are done.

    A comparison that is repeated finds its kernels in Triton's cache. Both ends are stated until that is known.
    """

    def __init__(
        self,
        launches: Mapping[tuple[str, str], FirstLaunch],
        work: FinalsWork,
        pending: Mapping[str, Collection[Candidate]],
        devices: int,
        now: float,
    ) -> None:
        """`pending`: the open finalists of each problem, none of which is timed."""
        self._work, self._devices = work, devices
        self._import_s, self._compile_s = dict.fromkeys(pending, 0.0), dict.fromkeys(pending, 0.0)
        for (problem, _), launch in launches.items():
            self._import_s[problem] += launch.import_s
            self._compile_s[problem] += launch.compile_s
        self._other_s = {
            name: work.left_s({name: these}) - self._import_s[name] - self._compile_s[name]
            for name, these in pending.items()
        }
        self._open = set(pending)
        self._measured_s = self._measured_expected_s = 0.0
        self._done_at = now

    def measure(
        self, pending: Mapping[str, Collection[Candidate]], now: float
    ) -> tuple[float | None, tuple[float, float] | None]:
        """The seconds left at the last result, and both ends now; None where nothing compiles, or it is known."""
        if not any(self._compile_s.values()):
            return None, None
        done = self._open - pending.keys()
        if done:
            self._take(done, (now - self._done_at) * self._devices)
            self._open -= done
            self._done_at = now
        compile_s = sum(self._compile_s[name] for name in self._open)
        import_s = sum(self._import_s[name] for name in self._open)
        other_s = sum(self._other_s[name] for name in self._open)
        left_s = (other_s + import_s + self._pace * compile_s) / self._devices
        if not compile_s or self._measured_expected_s >= _KNOWN_S:
            return left_s, None
        spent_s = now - self._done_at
        least_s = max(other_s, other_s + import_s - spent_s * self._devices) / self._devices
        return left_s, (_LESS * least_s, _MORE * max(least_s, left_s - spent_s))

    def _take(self, done: Collection[str], spent_s: float) -> None:
        """Take the time of problems; one in which the engine was imported tells little of its kernels."""
        expected_s = sum(self._compile_s[name] for name in done)
        if expected_s and not any(self._import_s[name] for name in done):
            self._measured_s += max(0.0, spent_s - sum(self._other_s[name] for name in done))
            self._measured_expected_s += expected_s

    @property
    def _pace(self) -> float:
        """The time of kernels over the expected one."""
        measured_s, expected_s = self._measured_s, self._measured_expected_s
        if expected_s >= _KNOWN_S and measured_s < _CACHED * expected_s:
            return measured_s / expected_s
        return (_PRIOR_S + measured_s) / (_PRIOR_S + expected_s)


class _ExpertKernels:
    """The kernels of vLLM's experts that were launched so far: equal configurations compile once."""

    def __init__(self, device: Device) -> None:
        self._device, self._format = device, Vllm(device_name=None)
        self._launched: set[Hashable] = set()

    def seconds(self, spec: GemmSpec, topk: int) -> float:
        """The seconds in which a launch compiles those that are new: one for each of the two products."""
        configuration, tile = self._configuration(spec)
        block = spec.w_scale.block[1] if spec.w_scale is not None and spec.w_scale.granularity == "block" else 0
        second: Hashable = (configuration, topk, spec.w_dtype, block)
        first = (second, bool(block) and spec.k // block % _SCALES == 0)
        new = {second, first} - self._launched
        self._launched |= new
        return len(new) / 2 * (_KERNELS_S + _TILE_S * tile / _LARGE_TILE)

    def _configuration(self, spec: GemmSpec) -> tuple[Hashable, int]:
        """The configuration that vLLM looks up, or what it depends on without a file; and the elements of its tile."""
        try:
            known = self._format.entries(spec, self._device, engine_moe.folders("vllm"))
        except UserError:  # an invalid file of the engine's, which its own launch reports
            known = {}
        if not known:
            return min(spec.m, _LARGEST_M), _TILE_WITHOUT_FILE
        knobs = known[nearest_key(known, spec.m)]
        return tuple(sorted(knobs.items(), key=str)), _size(knobs.get("BLOCK_SIZE_M")) * _size(
            knobs.get("BLOCK_SIZE_N")
        )


def _size(knob: object) -> int:
    return knob if isinstance(knob, int) else 0
