"""aiter's composable kernels (`ck`) and its assembly (`asm`), each under the `libtype` its tables know it by."""

from dataclasses import dataclass

from gemmpipe.backends.aiter_asm import Asm
from gemmpipe.backends.aiter_ck import Ck
from gemmpipe.family import Family, Implementation


@dataclass(frozen=True, kw_only=True)
class Aiter:
    """What aiter offers."""

    def implementations(self, family: Family) -> tuple[Implementation, ...]:
        """Both, whatever the family: they decide by the product."""
        return Ck(), Asm()
