"""Which family a table or a list of shapes is of, by its file's name: ours and aiter's, tuned and untuned."""

import re
from collections.abc import Mapping

from gemmpipe.family import Family

_GEMM = "_tuned_gemm"


def family_of_file_name(name: str, families: Mapping[str, Family]) -> str | None:
    """The key of the family whose table's name is the longest in the file's: `a4w4_blockscale_untuned_gemm_x.csv`.

    Lists of some models have the type behind (`llama70B_untuned_gemm_bf16.csv`). None where no name is in it.
    """
    word = re.sub(r"(?<![a-z0-9])untuned", "tuned", name.lower())
    stems: dict[str, str] = {}
    for key, family in families.items():
        stem = family.csv_name.removesuffix(".csv").lower()
        stems[stem] = key
        if stem.endswith(_GEMM):
            stems.setdefault(f"{_GEMM[1:]}_{stem.removesuffix(_GEMM)}", key)
    fit = [stem for stem in stems if re.search(rf"(^|[^a-z0-9]){re.escape(stem)}([^a-z0-9]|$)", word)]
    return stems[max(fit, key=len)] if fit else None
