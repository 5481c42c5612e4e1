"""Ranks that torchrun starts, themselves or through another launcher, count their products as the launcher would."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_UNBUFFERED = "-u"  # what torchrun gives every Python that it starts first
_CAPTURE = ("-m", "gemmpipe.capture")


@contextmanager
def counted_when_launched() -> Iterator[None]:
    """Within the block a rank is started as `python -u -m gemmpipe.capture script`; where it counts, the variable says.

    A command that is no Python of torchrun's (`--no-python`) is started as it is.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.launcher.api import elastic_launch

    before: Any = elastic_launch.__call__

    def launch(self: Any, *args: Any) -> Any:
        if args[:1] == (_UNBUFFERED,) and args[1 : 1 + len(_CAPTURE)] != _CAPTURE:
            args = (_UNBUFFERED, *_CAPTURE, *args[1:])
        return before(self, *args)

    setattr(elastic_launch, "__call__", launch)  # noqa: B010  mypy knows it as a method
    try:
        yield
    finally:
        setattr(elastic_launch, "__call__", before)  # noqa: B010
