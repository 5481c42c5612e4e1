"""The outcome of a run for its listeners, from the files that the run wrote."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.core.files import MAX_MANIFEST_BYTES, read_object
from gemmpipe.core.paths import MANIFEST, SELECTIONS
from gemmpipe.core.signals import Interrupted
from gemmpipe.listeners import FINISHED, INTERRUPTED, Product, Regime, RunOutcome
from gemmpipe.report.results import COMPARABLE, product_results, regime_results

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.family import Family
    from gemmpipe.family.roofline import Roofline

_MAX_TABLE_BYTES = 20_000_000
"""Larger tables (all trials of a large run) stay out of the list of tables."""


def outcome_of(folder: Path, family: "Family", rooflines: "Mapping[str, Roofline]", exit_code: int) -> RunOutcome:
    """The outcome of a run that ended with an exit code. Raises UserError if its files cannot be read."""
    manifest = read_object(folder / MANIFEST, MAX_MANIFEST_BYTES) if (folder / MANIFEST).is_file() else {}
    provenance = _mapping(manifest.get("provenance"))
    products = _products(folder, family, rooflines)
    return RunOutcome(
        state=INTERRUPTED if exit_code == Interrupted.exit_code else FINISHED,
        exit_code=exit_code,
        wall_s=_number(manifest.get("wall_s")) or 0.0,
        stage_s={name.removesuffix("_s"): _number(s) or 0.0 for name, s in _mapping(manifest.get("account_s")).items()},
        device=str(provenance.get("device") or ""),
        versions={name: str(text) for name, text in _mapping(provenance.get("versions")).items()},
        products=() if products is None else _as_products(products, family),
        regimes=() if products is None else _as_regimes(products),
        unsolved=tuple(map(str, _list(manifest.get("unsolved")))),
        files=tuple(Path(str(name)).absolute() for name in _list(manifest.get("files"))),
        tables=_tables(folder),
    )


def _products(folder: Path, family: "Family", rooflines: "Mapping[str, Roofline]") -> "pd.DataFrame | None":
    """The results by product; None for a run that chose nothing."""
    import pandas as pd

    if not (folder / SELECTIONS).is_file():
        return None
    selections = pd.read_csv(folder / SELECTIONS)
    return product_results(selections, family, rooflines) if len(selections) else None


def _as_products(frame: "pd.DataFrame", family: "Family") -> tuple[Product, ...]:
    keys = [column.name for column in family.key_columns]
    return tuple(
        Product(
            problem=str(row["problem"]),
            key={name: value for name in keys if (value := _plain(row[name])) is not None},
            backend=str(row["libtype"]),
            config=str(row["config"]),
            time_us=float(row["us"]),
            library_us=_number(row["library_us"]) if is_compared else None,
            speedup=_number(row["speedup"]) if is_compared else None,
            floor_share=_number(row["floor_share"]),
            policy=str(_plain(row["policy"]) or ""),
        )
        for row in frame.to_dict("records")
        for is_compared in (row["library"] in COMPARABLE,)  # torch's conversion of the operands is no library's product
        if _number(row["us"])
    )


def _as_regimes(frame: "pd.DataFrame") -> tuple[Regime, ...]:
    return tuple(
        Regime(
            label=each.label,
            products=each.products,
            speedup=each.speedup.mean if each.speedup else None,
            floor_share=each.floor_share.mean if each.floor_share else None,
        )
        for each in regime_results(frame)
    )


def _tables(folder: Path) -> tuple[Path, ...]:
    """The manifest and the tables of a run, without those that are too large to upload."""
    found = [folder / MANIFEST, *sorted(folder.glob("*.csv"))]
    return tuple(path for path in found if path.is_file() and path.stat().st_size <= _MAX_TABLE_BYTES)


def _plain(value: object) -> object:
    """A number of pandas as one of Python, without a fraction as int; None for a missing value."""
    plain = value.item() if hasattr(value, "item") else value
    if plain is None or plain != plain:
        return None
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
