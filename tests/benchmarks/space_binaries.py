"""Compares the binaries of a sample of every family's default space, on four architectures, in two checkouts.

    python tests/benchmarks/space_binaries.py choose sample.json            (in one checkout)
    python tests/benchmarks/space_binaries.py record sample.json a.json     (in each)
    python tests/benchmarks/space_binaries.py compare a.json b.json

Equal are the instructions, the shared memory and the warps; names, line information and directives do not count. Needs
no GPU. A change to kernels that must not change code is checked so; `same_binaries.py` does it for tables' winners.
"""

import hashlib
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from gemmpipe.core.data import Device
from gemmpipe.core.device import arch_device
from gemmpipe.core.paths import shipped
from gemmpipe.family import Family, GemmSpec, KernelDefaults, load_family, shipped_families
from gemmpipe.family.problem import make_problem
from gemmpipe.family.space import Space
from gemmpipe.launch.build import compile_kernel, read_code

ARCHES = ("sm_90", "sm_100", "gfx942", "gfx950")
ROWS = (16, 512)
SIZES = {"N": 1280, "K": 8192, "B": 4, "model_dim": 2048, "inter_dim": 768, "expert": 128, "topk": 8}
PER_KERNEL = {"triton": 3}
"""Sampled configurations per family, architecture and kernel; 2 of other kernels."""

Entry = tuple[str, str, int, str, dict[str, Any]]
"""Family, architecture, M, kernel, knobs."""


def default_space(family: str) -> Space:
    """The space that a run without options has."""
    axes = yaml.safe_load((shipped("conf") / "space" / f"{family}.yaml").read_text())
    entries = axes.pop("when", [])
    listed = [{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()} for entry in entries]
    return Space(axes={k: tuple(v) for k, v in axes.items()}, when=tuple(listed), pinned=())


def spec_of(family: Family, gfx: str, m: int) -> GemmSpec:
    """A product of a model's size."""
    sizes = {**SIZES, "M": m, "token": m}
    key = {column.name: sizes[column.name] for column in family.key_columns if column.name in sizes}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    return family.spec(make_problem(family, key, defaults, gfx, "sample"))


def choose() -> list[Entry]:
    """Supported configurations, drawn with a fixed seed."""
    chosen: list[Entry] = []
    for name in shipped_families():
        family, space = load_family(name), default_space(name)
        for gfx in ARCHES:
            supported: dict[str, dict[tuple[int, str], None]] = {}
            device, draw = arch_device(gfx), random.Random(f"{name} {gfx}")
            for m in ROWS:
                spec = spec_of(family, gfx, m)
                for kernel in family.implementations:
                    for raw in kernel.configs(spec, device, space):
                        knobs = kernel.normalise(spec, raw, device)
                        if not kernel.unsupported_reason(spec, knobs, device) and kernel.builds(spec, knobs, device):
                            supported.setdefault(kernel.label, {})[m, json.dumps(dict(sorted(knobs.items())))] = None
            for label, found in supported.items():
                count = min(len(found), PER_KERNEL.get(label, 2))
                chosen += [(name, gfx, m, label, json.loads(knobs)) for m, knobs in draw.sample(list(found), count)]
    return chosen


def hashes(entry: Entry) -> list[str]:
    """One hash per build of a configuration, or the compiler's error."""
    name, gfx, m, label, given = entry
    family, device = load_family(name), arch_device(gfx)
    spec, kernel = spec_of(family, gfx, m), next(i for i in family.implementations if i.label == label)
    found = []
    for build in kernel.builds(spec, kernel.normalise(spec, given, device), device):
        try:
            compiled = compile_kernel(build, device)
        except Exception as error:  # noqa: BLE001 - a compiler's errors are of any type
            found.append(f"{type(error).__name__}: {error}"[:200])
            continue
        facts = json.dumps([compiled.metadata.shared, compiled.metadata.num_warps]).encode()
        found.append(hashlib.sha256(_instructions(compiled.asm, device) + facts).hexdigest())
    return found


def _instructions(asm: Any, device: Device) -> bytes:
    if device.vendor != "amd":
        return read_code(asm["cubin"])
    text = str(asm["amdgcn"])
    lines = (line.split(";")[0].strip() for line in text.splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith(".") and not line.endswith(":"))
    for symbol in set(re.findall(r"^\s*\.globl\s+(\S+)", text, re.MULTILINE)):
        code = code.replace(symbol, "KERNEL")
    return code.encode()


def compare(one: Path, other: Path) -> int:
    """Print equal binaries by architecture; 1 if any differs."""
    before, after = json.loads(one.read_text()), json.loads(other.read_text())
    total, equal = Counter[str](), Counter[str]()
    for (entry, old), (_, new) in zip(before, after, strict=True):
        total[entry[1]] += len(old)
        equal[entry[1]] += sum(a == b for a, b in zip(old, new, strict=True))
        if old != new:
            print("differs:", *entry)
    print(*(f"{gfx}: {equal[gfx]} of {total[gfx]} equal" for gfx in total), sep="; ")
    return int(equal != total)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["choose", out]:
            Path(out).write_text(json.dumps(choose()))
        case ["record", sample, out]:
            Path(out).write_text(json.dumps([(entry, hashes(entry)) for entry in json.loads(Path(sample).read_text())]))
        case ["compare", one, other]:
            sys.exit(compare(Path(one), Path(other)))
        case _:
            sys.exit(__doc__)
