"""A family's own kernels, by their label."""

from dataclasses import dataclass

from gemmpipe.family import Family, Implementation


@dataclass(frozen=True, kw_only=True)
class Own:
    """The implementations in a family's folder with this label (`triton`, `gluon`, `skinny`, `sliced`)."""

    label: str

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """The family's implementations with this label; may be empty."""
        return tuple(found for found in family.implementations if found.label == self.label)
