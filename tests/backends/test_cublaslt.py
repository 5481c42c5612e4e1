"""`cublaslt` without a GPU: reasons if it is unavailable, and its queries to a stand-in of the library.

The stand-in has the functions of nvmath-python's `nvmath.bindings.cublasLt` with their signatures and computes on the
CPU; test_cublaslt_on_gpu tests the real one.
"""

import ctypes
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
import torch

from gemmpipe.backends import NO_SPACE, cublaslt
from gemmpipe.backends import cublaslt_api as library
from gemmpipe.backends.cublaslt import CublasLt
from gemmpipe.backends.cublaslt_api import ATTRIBUTES
from gemmpipe.core.data import Candidate, Device
from gemmpipe.core.device import arch_device, cpu_device
from gemmpipe.family import Family, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import error_ratio

NAMES = {number: name for name, (number, _) in ATTRIBUTES.items()}
TILES, STAGES, OPTIONS = tuple(range(600)), tuple(range(1, 40)), 75


class NotSupported(Exception):
    """cuBLASLtError."""


class StandIn:
    """One algorithm, 66, that claims 600 tiles, 39 stage counts and 76 options, and takes tile + splits <= 40."""

    cuBLASLtError = NotSupported

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.descriptors: dict[int, dict[int, int]] = {}
        self.layouts: dict[int, tuple[int, ...]] = {}

    def get_version(self) -> int:
        return 130100

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        assert (compute_type, scale_type) == (68, 0)
        return self._new(self.descriptors, {})

    def matrix_layout_create(self, kind: int, rows: int, cols: int, ld: int) -> int:
        return self._new(self.layouts, (kind, rows, cols, ld))

    def _new(self, held: dict, value: object) -> int:
        self.calls["handles"] += 1
        held[self.calls["handles"]] = value
        return self.calls["handles"]

    def matmul_desc_destroy(self, desc: int) -> None:
        del self.descriptors[desc]

    def matrix_layout_destroy(self, layout: int) -> None:
        del self.layouts[layout]

    def matmul_desc_set_attribute(self, desc: int, attr: int, buf: int, size: int) -> None:
        self.descriptors[desc][attr] = int.from_bytes(ctypes.string_at(buf, size), "little")

    def matmul_preference_create(self) -> int:
        return 1

    def matmul_preference_destroy(self, pref: int) -> None:
        self.calls["preferences"] += 1

    def matmul_preference_set_attribute(self, pref: int, attr: int, buf: int, size: int) -> None:
        assert (attr, size) in ((1, 8), (5, 4), (6, 4), (7, 4), (8, 4))

    def matmul_algo_init(self, handle: int, *types_and_id: int) -> None:
        *types, algo_id, address = types_and_id
        assert len(types) == 6
        if algo_id != 66:
            raise NotSupported("CUBLAS_STATUS_NOT_SUPPORTED")
        self._store(address, dict.fromkeys(ATTRIBUTES, 0) | {"algo_id": algo_id, "NUM_KSPLIT": 1})

    def _store(self, address: int, values: dict[str, int]) -> None:
        packed = (ctypes.c_uint64 * 8).from_address(address)
        for place, name in enumerate(list(ATTRIBUTES)[:8]):
            packed[place] = values[name]
        packed[0] |= values["cluster_shape_id"] << 32

    def _load(self, address: int) -> dict[str, int]:
        packed = (ctypes.c_uint64 * 8).from_address(address)
        found = {name: packed[place] for place, name in enumerate(list(ATTRIBUTES)[:8])}
        return {**found, "algo_id": packed[0] & 0xFFFFFFFF, "cluster_shape_id": packed[0] >> 32}

    def matmul_algo_config_get_attribute(self, algo: int, attr: int, buf: int, size: int, written: int) -> None:
        ctypes.memmove(buf, self._load(algo)[NAMES[attr]].to_bytes(size, "little"), size)

    def matmul_algo_config_set_attribute(self, algo: int, attr: int, buf: int, size: int) -> None:
        value = int.from_bytes(ctypes.string_at(buf, size), "little")
        self._store(algo, {**self._load(algo), NAMES[attr]: value})

    def matmul_algo_cap_get_attribute(self, algo: int, attr: int, buf: int, size: int, written: int) -> None:
        if attr in (6, 13):
            values = TILES if attr == 6 else STAGES
            ctypes.memmove(buf, (ctypes.c_uint32 * len(values))(*values), 4 * len(values))
            ctypes.c_size_t.from_address(written).value = 4 * len(values)
        else:
            ctypes.c_uint32.from_address(buf).value = {0: 1, 7: OPTIONS}[attr]

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        *_, count, results, found = arguments
        assert count >= 8
        self.matmul_algo_init(0, *[0] * 6, 66, results)
        self._store(results, {**self._load(results), "tile_id": 10, "stages_id": 35})
        ctypes.c_int.from_address(found).value = 1

    def matmul_algo_check(self, handle: int, desc: int, *rest: int) -> None:
        self.calls["checks"] += 1
        *layouts, algo, result = rest
        assert len(layouts) == 4
        assert layouts[2] == layouts[3]
        values = self._load(algo)
        if values["tile_id"] + values["NUM_KSPLIT"] > 40 or values["stages_id"] != 35 or values["cluster_shape_id"] > 4:
            raise NotSupported("CUBLAS_STATUS_NOT_SUPPORTED")
        library._Result.from_address(result).workspace_bytes = 1 << (18 + values["NUM_KSPLIT"])

    def matmul(self, handle: int, desc: int, *rest: int) -> None:
        alpha, w, w_layout, x, x_layout, beta, _, _, out, out_layout, _algo, _workspace, _workspace_bytes, stream = rest
        assert (ctypes.c_float.from_address(alpha).value, ctypes.c_float.from_address(beta).value) == (1.0, 0.0)
        assert stream == 77
        assert self.descriptors[desc][3] == 1  # A is transposed
        left, right = self._matrix(w, w_layout), self._matrix(x, x_layout)
        product = left.T @ right
        if 17 in self.descriptors[desc]:
            product *= ctypes.c_float.from_address(self.descriptors[desc][17]).value
            product *= ctypes.c_float.from_address(self.descriptors[desc][18]).value
        kind, rows, columns, ld = self.layouts[out_layout]
        if 8 in self.descriptors[desc]:
            assert self.descriptors[desc][7] == 4
            product += self._values(self.descriptors[desc][8], kind, rows)[:, None]
        target = torch.from_numpy(product.T.copy()).to(_TORCH[kind])
        ctypes.memmove(out, target.data_ptr(), target.numel() * target.element_size())
        assert (rows, columns, ld) == (*product.shape, rows)

    def _matrix(self, address: int, layout: int) -> numpy.ndarray:
        kind, rows, columns, ld = self.layouts[layout]
        return self._values(address, kind, ld * columns).reshape(columns, ld).T[:rows]

    def _values(self, address: int, kind: int, count: int) -> numpy.ndarray:
        dtype = _TORCH[kind]
        raw = bytearray(ctypes.string_at(address, count * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype).float().numpy()


_TORCH = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn}


class StandInLibrary(library.CublasLtLibrary):
    def __init__(self, lt: StandIn) -> None:
        self.lt, self.handle = lt, 1  # type: ignore[assignment]


CACHED = (library.version, library.library, library.algorithms, library._configured, cublaslt._import_problem)


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for function in CACHED:
        function.cache_clear()
    stand_in = StandIn()
    opened = StandInLibrary(stand_in)
    monkeypatch.setattr(library, "bindings", lambda: stand_in)
    monkeypatch.setattr(cublaslt, "bindings", lambda: stand_in)
    for module in (library, cublaslt):
        monkeypatch.setattr(module, "library", lambda index: opened)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: 77, raising=False)
    yield stand_in
    for function in (library.version, library.algorithms, library._configured, cublaslt._import_problem):
        function.cache_clear()


@pytest.fixture
def h200() -> Device:
    return arch_device("sm_90")


def _spec(family: Family, m: int, n: int, k: int, **overrides: object):
    given = {"dtype": None, "out_dtype": None, "bias": None, **overrides}
    return family.spec(make_problem(family, {"M": m, "N": n, "K": k}, KernelDefaults(**given), "sm_90", "test"))  # type: ignore[arg-type]


def test_without_the_package_or_the_hardware_it_offers_nothing(h200: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, spec = CublasLt(), _spec(load_family("a16w16"), 16, 64, 128)
    assert "no NVIDIA GPU" in str(backend.unavailable(cpu_device()))

    def missing() -> None:
        raise ImportError("No module named 'nvmath'")

    monkeypatch.setattr(cublaslt, "bindings", missing)
    cublaslt._import_problem.cache_clear()
    assert backend.unavailable(h200) == "the package nvmath is not installed: pip install 'gemmpipe[cublaslt]'"
    assert backend.configs(spec, h200, NO_SPACE) == backend.configs(spec, cpu_device(), NO_SPACE) == ()
    cublaslt._import_problem.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ({}, 1),
        ({"dtype": "float16", "bias": True}, 1),
        ({"out_dtype": "float32", "bias": True}, 1),
        ({"dtype": "float8_e4m3fn"}, 2),
    ],
)
def test_algorithms_are_listed_checked_and_called(
    overrides: dict[str, object], count: int, lt: StandIn, h200: Device
) -> None:
    family, backend = load_family("a16w16"), CublasLt()
    spec = _spec(family, 6, 48, 64, **overrides)
    points = [dict(point) for point in backend.configs(spec, h200, NO_SPACE)]
    assert len({Candidate.of("cublaslt", point) for point in points}) == len(points)
    assert 20 * count < len(points) <= library.MAX_ALGORITHMS * count
    assert points[0]["tile_id"] == 10, "the library's proposals come first"
    assert {point["algo_id"] for point in points} == {66}
    assert {point["NUM_KSPLIT"] for point in points} >= {1, 2, 5}
    generator = torch.Generator().manual_seed(2)
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    for point in points[:: len(points) // 4]:
        assert backend.unsupported_reason(spec, point, h200) is None
        out = torch.full((spec.m, spec.n), float("nan"), dtype=getattr(torch, spec.out_dtype))
        prepared = backend.prepare(spec, weights, point)
        launch = backend.bind(spec, point, h200, inputs, prepared, out)
        assert error_ratio(launch(), family.reference(spec, inputs, weights), *family.tolerance(spec)) == 0
    del launch
    assert lt.descriptors == lt.layouts == {}, "every descriptor is given back"


def test_listing_makes_a_bounded_number_of_queries(lt: StandIn, h200: Device) -> None:
    spec = _spec(load_family("a8w8"), 16, 64, 128, dtype="float8_e4m3fn")
    assert list(CublasLt().configs(spec, h200, NO_SPACE))
    assert lt.calls["checks"] <= 2 * library._MAX_CHECKS, "of 600 * 39 * 76 * 11 that it claims, for either sum"


def test_unsupported_products(lt: StandIn, h200: Device) -> None:
    family, backend = load_family("a16w16"), CublasLt()
    spec = _spec(family, 6, 48, 64)
    (point,) = backend.configs(replace(spec, n=44), h200, NO_SPACE)
    assert (
        backend.unsupported_reason(replace(spec, n=44), point, h200)
        == "alignment: N=44 and K=64 must be multiples of 8"
    )
    assert "types: int8" in str(backend.unsupported_reason(replace(spec, x_dtype="int8", w_dtype="int8"), {}, h200))
    assert "output type" in str(backend.unsupported_reason(replace(spec, out_dtype="float16"), {}, h200))
    assert "batch" in str(backend.unsupported_reason(replace(spec, batch=2), {}, h200))
    sound = dict(next(iter(backend.configs(spec, h200, NO_SPACE))))
    assert backend.unsupported_reason(spec, {**sound, "tile_id": 400}, h200) == "algorithm: CUBLAS_STATUS_NOT_SUPPORTED"
    large = {**sound, "NUM_KSPLIT": 12}
    assert backend.unsupported_reason(spec, large, h200) == "workspace: 1024 MiB, at most 32"


def test_the_version_is_in_the_name_and_decides_at_run_time(lt: StandIn, h200: Device) -> None:
    from gemmpipe.runtime.select import UnusableRow, usable_candidate

    family, backend = load_family("a16w16"), CublasLt()
    spec = _spec(family, 6, 48, 64)
    point = dict(next(iter(backend.configs(spec, h200, NO_SPACE))))
    name = backend.kernel_name(point)
    assert name == "cublaslt_66_tile10_stages35@130100"
    row = {"M": 6, "libtype": "cublaslt", "config": json.dumps(point), "kernelName": name}
    assert usable_candidate(family, row, spec, h200).candidate == Candidate.of("cublaslt", point)
    with pytest.raises(UnusableRow, match="130100 here, the row was tuned with 120800"):
        usable_candidate(family, {**row, "kernelName": name.replace("130100", "120800")}, spec, h200)
    with pytest.raises(UnusableRow, match="cublaslt has no magic"):
        usable_candidate(family, {**row, "config": json.dumps({**point, "magic": 1})}, spec, h200)
