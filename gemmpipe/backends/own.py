"""A family's own kernels, by the label they carry."""

from dataclasses import dataclass

from gemmpipe.family import Family, Implementation


@dataclass(frozen=True, kw_only=True)
class Own:
    """The implementations in a family's folder that carry this label (`triton`, `gluon`, `skinny`, `sliced`)."""

    label: str

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """The family's implementations of this label; none is no error."""
        return tuple(found for found in family.implementations if found.label == self.label)
