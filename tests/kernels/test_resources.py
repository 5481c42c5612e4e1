"""Constraints compared with the compiler, for samples of every family's default space on four architectures.

Registers and spills come from the assembly (AMD) and from cuobjdump, which triton brings along (NVIDIA).
"""

import random
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
import yaml
from pairwise import SLOW

from gemmpipe.core.data import Device, Knobs
from gemmpipe.core.device import arch_device
from gemmpipe.family import Family, GemmSpec, Implementation, KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.launch.build import compile_kernel

ROOT = Path(__file__).parents[2]
ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")
FAMILIES = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py"))
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ACCEPTED = 3
"""Points compiled of each family's Triton kernel and architecture, of other kernels one."""
ALWAYS = {
    "a8w8": "sm_90",
}
"""Families whose first point is compiled always, for this architecture; the others, and all other points, are slow."""
UNSUPPORTED = 50


@dataclass(frozen=True, kw_only=True)
class Point:
    implementation: Implementation
    spec: GemmSpec
    device: Device
    knobs: Knobs
    reason: str | None

    def compile(self) -> tuple[int, int]:
        """(bytes of shared memory, spilled bytes or registers) of its largest build."""
        found = [(0, 0)]
        for build in self.implementation.builds(self.spec, self.knobs, self.device):
            kernel = compile_kernel(build, self.device)
            found.append((kernel.metadata.shared, spills(kernel, self.device)))
        return max(shared for shared, _ in found), max(spilled for _, spilled in found)


def spills(kernel: object, device: Device) -> int:
    assembly: dict[str, object] = kernel.asm  # type: ignore[attr-defined]
    if device.vendor == "amd":
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", str(assembly["amdgcn"])))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])  # type: ignore[arg-type]
        file.flush()
        dumped = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, check=True)
    return max(int(n) for n in re.findall(r"STACK:(\d+)", dumped.stdout.decode()))


def shipped_space(name: str) -> Space:
    axes = yaml.safe_load((ROOT / "conf" / "space" / f"{name}.yaml").read_text())
    entries = axes.pop("when", [])
    listed = [{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries]
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=tuple(listed), pinned=())


def keys_of(family: Family, m: int) -> dict[str, object]:
    """A problem of a model's size, with the columns of the family's key."""
    usual = {"M": m, "N": 1280, "K": 8192, "B": 4, "token": m, "model_dim": 2048, "inter_dim": 768}
    usual |= {"expert": 128, "topk": 8}
    return {column.name: usual[column.name] for column in family.key_columns if column.name in usual}


def points(name: str, gfx: str, m: int) -> list[Point]:
    """The default space on that architecture, each point once."""
    family, device, defaults = (
        load_family(name),
        arch_device(gfx),
        KernelDefaults(dtype=None, out_dtype=None, bias=None),
    )
    spec = family.spec(make_problem(family, keys_of(family, m), defaults, gfx, "test"))
    found: dict[object, Point] = {}
    for implementation in family.implementations:
        for raw in implementation.configs(spec, device, shipped_space(name)):
            knobs = implementation.normalise(spec, raw, device)
            reason = implementation.unsupported_reason(spec, knobs, device)
            point = Point(implementation=implementation, spec=spec, device=device, knobs=knobs, reason=reason)
            found.setdefault((implementation.label, tuple(sorted(knobs.items()))), point)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gfx", "drawn"),
    [
        pytest.param(name, gfx, drawn, marks=() if drawn == 0 and ALWAYS.get(name) == gfx else SLOW)
        for name in FAMILIES
        for gfx in ARCHES
        for drawn in range(ACCEPTED)
    ],
)
def test_supported_configs_fit_the_resources(name: str, gfx: str, drawn: int) -> None:
    draw = random.Random(f"{name} {gfx}")
    fit = [p for m in (16, 512) for p in points(name, gfx, m) if p.reason is None]
    if not fit:
        assert all(str(p.reason).startswith("compiler:") for m in (16, 512) for p in points(name, gfx, m))
        pytest.skip(f"nothing of {name} compiles for {gfx} with triton {triton.__version__}")
    by_label: dict[str, list[Point]] = {}
    for point in fit:
        by_label.setdefault(point.implementation.label, []).append(point)
    for label, listed in by_label.items():
        for point in draw.sample(listed, min(len(listed), ACCEPTED if label == "triton" else 1))[drawn : drawn + 1]:
            shared, _ = point.compile()
            assert shared <= point.device.shared_bytes, (label, dict(point.knobs))


@pytest.mark.parametrize(
    ("m", "name"),
    [
        (300, "a16w16"),
        *(pytest.param(m, name, marks=SLOW) for m, name in ((1, "a16w16"), (1, "a8w8_blockscale"))),
        pytest.param(300, "a8w8_blockscale", marks=SLOW),
        *(pytest.param(m, "a4w4_blockscale", marks=SLOW) for m in (1, 300)),
    ],
)
def test_a_row_without_knobs_names_a_kernel_that_compiles_for_a_workstation_gpu(name: str, m: int) -> None:
    family, device = load_family(name), arch_device("gfx1201")
    options = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    spec = family.spec(make_problem(family, keys_of(family, m), options, device.gfx, "test"))
    for implementation in family.implementations:
        knobs = implementation.knobs_from_row({}, spec, device)
        if implementation.label not in ("triton", "skinny"):
            continue
        assert knobs is not None, implementation.label
        point = Point(implementation=implementation, spec=spec, device=device, knobs=knobs, reason=None)
        assert implementation.unsupported_reason(spec, knobs, device) is None
        shared, _ = point.compile()
        assert shared <= device.shared_bytes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gfx", ARCHES)
def test_unsupported_configs_do_not_fit_the_resources(gfx: str) -> None:
    """Of 50 configs unsupported for lack of memory or registers at most four compile within both.

    Configs that are unsupported for another reason (e.g. splits of a tile that would deadlock) do compile.
    """
    draw, unsupported = random.Random(2), []
    for name in FAMILIES:
        for m in (1, 64, 512, 4096):
            listed = [p for p in points(name, gfx, m) if str(p.reason).startswith(("shared memory", "registers"))]
            unsupported += draw.sample(listed, min(len(listed), 25))
    fitted = []
    for point in draw.sample(unsupported, UNSUPPORTED):
        try:
            shared, spilled = point.compile()
        except Exception:  # noqa: BLE001  (any compile error: it does not fit)
            continue
        if shared <= point.device.shared_bytes and not spilled:
            fitted.append((point.device.gfx, point.spec.x_dtype, dict(point.knobs), point.reason))
    assert len(fitted) <= 4, fitted


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("a16w16", (256, 128)),
        pytest.param("a8w8", (128, 256), marks=SLOW),
        pytest.param("batched_bf16", (256, 128), marks=SLOW),
    ],
)
def test_a_sum_in_tensor_memory_may_be_as_large_as_the_registers(name: str, tile: tuple[int, int]) -> None:
    """On sm_100 alone 256 values per thread compile without a second sum or splits, almost without spills."""
    wanted = {"BLOCK_SIZE_M": tile[0], "BLOCK_SIZE_N": tile[1], "num_warps": 4, "NUM_KSPLIT": 1, "num_stages": 2}

    listed = (p for p in points(name, "sm_100", 4096) if p.implementation.label == "triton" and p.reason is None)
    point = next(p for p in listed if wanted.items() <= p.knobs.items() and not p.knobs.get("SWAP_AB"))
    hopper = point.implementation.unsupported_reason(point.spec, point.knobs, arch_device("sm_90"))
    assert str(hopper).startswith("registers: 256")
    _, spilled = point.compile()
    assert spilled <= 64


def test_gathered_rows_and_second_sums_need_registers_next_to_the_sum() -> None:
    for name in ("fmoe", "a8w8_blockscale"):
        reasons = [str(p.reason) for p in points(name, "sm_100", 4096)]
        assert any(reason.startswith("registers: 256") for reason in reasons), name
