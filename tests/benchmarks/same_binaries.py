"""Compares the binaries of the shipped tables' winners before and after a change to the source of kernels.

    python tests/benchmarks/same_binaries.py record before.json     (in the checkout before the change)
    python tests/benchmarks/same_binaries.py carry before.json      (in the one after it)

A row of a tuned table holds the hash of its kernel's source. Where a change leaves every instruction of a winner as it
was, its time stands: `carry` writes the new hash. Rows whose code is another one now are listed, stay stale, and are to
be tuned again. Needs no GPU; use the version of Triton that the table was tuned with (its .meta.json says which).
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gemmpipe.core.data import Build, Device, Problem
from gemmpipe.core.device import arch_device
from gemmpipe.core.paths import shipped_tables, write_atomic
from gemmpipe.family import Family, Implementation, load_family, shipped_families
from gemmpipe.launch.build import compile_kernel, read_code
from gemmpipe.stages.rows import candidate_of
from gemmpipe.tables import store
from gemmpipe.tables.merge import Row
from gemmpipe.tables.recorded import source_hash_of


def winners(family: Family) -> Iterator[tuple[str, Row, Implementation, tuple[Build, ...], Device]]:
    """A row's name in both checkouts, the row, and the builds of its winner."""
    for row in store.read(shipped_tables() / family.csv_name, family):
        candidate, device = candidate_of(str(row["libtype"]), str(row["config"])), arch_device(str(row["gfx"]))
        own = next((i for i in family.implementations if i.label == candidate.backend), None)
        if own is None or not source_hash_of(row):
            continue
        key = tuple((column.name, row[column.name]) for column in family.key_columns)
        builds = own.builds(family.spec(Problem(family=family.name, key=key)), candidate.knobs, device)
        columns = zip(family.key_columns, key, strict=True)
        values = [value for column, (_, value) in columns if value is not None or not column.optional]
        yield json.dumps([device.gfx, values, row["libtype"], row["config"]]), row, own, builds, device


def digest(build: Build, device: Device) -> str:
    """Hash of the instructions and of the metadata of a launch."""
    kernel = compile_kernel(build, device)
    metadata = [kernel.metadata.shared, kernel.metadata.num_warps]
    return hashlib.sha256(read_code(kernel.asm["cubin"]) + json.dumps(metadata).encode()).hexdigest()


def digests(family: Family) -> dict[str, list[str]]:
    """By the row's name, one a build; builds that rows share are compiled once."""
    rows = list(winners(family))
    needed = {(build, device) for *_, builds, device in rows for build in builds}
    with ProcessPoolExecutor() as pool:
        found = {each: pool.submit(digest, *each) for each in needed}
        done = {each: future.result() for each, future in found.items()}
    return {name: [done[build, device] for build in builds] for name, _, _, builds, device in rows}


def carry(family: Family, before: dict[str, list[str]]) -> None:
    """Write the new name and hash into every row whose binaries are the same; say which are not."""
    path, now = shipped_tables() / family.csv_name, digests(family)
    text, stale = path.read_text(), 0
    names: dict[str, str] = {}
    for name, row, own, _, _ in winners(family):
        candidate = candidate_of(str(row["libtype"]), str(row["config"]))
        if not before.get(name) or not set(before[name]) <= set(now[name]):  # there may be further builds now
            stale += 1
            print("another binary:", family.name, name)
        else:
            names[str(row["kernelName"])] = own.kernel_name(candidate.knobs)
    # First whole names, as a kernel may have another one now; then the hash alone, which further columns may hold.
    for old, new in sorted(names.items(), reverse=True) + [(f"@{o}", f"@{n}") for o, n in hashes(names)]:
        text = text.replace(old, new)
    if not stale:
        write_atomic(path, text)
    printed = "left as it is" if stale else sorted(hashes(names))
    print(f"{family.name}: {len(now)} rows, {stale} with another binary; {printed}")


def hashes(names: dict[str, str]) -> set[tuple[str, str]]:
    """(before, now) of the hashes in these names."""
    return {(source_hash_of({"kernelName": old}), source_hash_of({"kernelName": new})) for old, new in names.items()}


def main() -> None:
    """As the module says."""
    verb, file = sys.argv[1], Path(sys.argv[2])
    families = [f for f in map(load_family, shipped_families()) if (shipped_tables() / f.csv_name).is_file()]
    if verb == "record":
        file.write_text(json.dumps({family.name: digests(family) for family in families}))
        return
    before = json.loads(file.read_text())
    for family in families:
        carry(family, before.get(family.name, {}))


if __name__ == "__main__":
    main()
