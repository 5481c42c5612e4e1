"""The family of a table or a list of shapes by its file name: ours and aiter's, tuned and untuned."""

import re
from collections.abc import Mapping
from pathlib import Path

from gemmpipe.family import Family, load_family, shipped_families

_GEMM = "_tuned_gemm"


def family_of_file_name(name: str, families: Mapping[str, Family]) -> str | None:
    """The key of the family with the longest table name in the file name: `a4w4_blockscale_untuned_gemm_x.csv`.

    Lists of some models end with the type (`llama70B_untuned_gemm_bf16.csv`). None if it has no table's name.
    """
    lowered = re.sub(r"(?<![a-z0-9])untuned", "tuned", name.lower())
    stems: dict[str, str] = {}
    for key, family in families.items():
        stem = family.csv_name.removesuffix(".csv").lower()
        stems[stem] = key
        if stem.endswith(_GEMM):
            stems.setdefault(f"{_GEMM[1:]}_{stem.removesuffix(_GEMM)}", key)
    matching = [stem for stem in stems if re.search(rf"(^|[^a-z0-9]){re.escape(stem)}([^a-z0-9]|$)", lowered)]
    return stems[max(matching, key=len)] if matching else None


def is_table_file(name: str, table: str) -> bool:
    """True for a tuned table's own name, and with a model before or a tag after it: `<model>_<table>_<tag>.csv`."""
    stem = re.escape(Path(table).stem)
    return "untuned" not in name and re.fullmatch(rf"([^.].*_)?{stem}(_.*)?\.csv", name) is not None


def kernel_of_table_name(path: Path) -> str | None:
    """The shipped family that the table's name gives; None if commands that read it need `kernel=FAMILY`."""
    return family_of_file_name(path.name, {name: load_family(name) for name in shipped_families()})


def table_arguments(path: Path, family: Family) -> list[str]:
    """The arguments that name a table for `show` and `report`: its path, and its kernel where the name gives none."""
    return [str(path), *([] if kernel_of_table_name(path) == family.name else [f"kernel={family.name}"])]
