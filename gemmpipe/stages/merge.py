"""The last stage: from selections to the artifacts that engines load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.formats import Target
from gemmpipe.stages import Context, Stage

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Merge(Stage):
    """Gives every format the problems' own selections and those of its buckets; the format stores them."""

    needs: ClassVar[tuple[str, ...]] = ("selections",)
    gives: ClassVar[tuple[str, ...]] = ("artifacts",)
    sees_all_of: ClassVar[tuple[str, ...]] = ("selections",)  # a default file holds the commonest of all shapes

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """A table of `format` and `file`. Raises UserError for an artifact that was broken by hand, which stays."""
        import pandas as pd

        selections = tables["selections"]
        target = Target(
            folder=context.output,
            device=context.device,
            run_id=context.run_id,
            provenance=context.provenance,
            events=context.events,
        )
        written: list[dict[str, str]] = []
        for name, each in context.formats:
            mine = selections[selections["format"].fillna("").isin(["", name])]
            for path in each.write(context.family, mine, target):
                context.events.emit("line", f"merge: {name}: {path}")
                written.append({"format": name, "file": str(path)})
        return {"artifacts": pd.DataFrame(written, columns=["format", "file"])}
