"""What the devices go through while they are timed: clocks, temperature, power and processes, every few seconds."""

import time

from gemmpipe.conditions import conditions
from gemmpipe.data import Device
from gemmpipe.journal import Journal

_EVERY_S = 5.0


class Weather:
    """Writes `conditions` rows into the journal; nothing for devices of which nothing is known."""

    def __init__(self, journal: Journal, devices: tuple[Device, ...]) -> None:
        self._journal = journal
        self._devices = tuple(device for device in devices if device.kind == "cuda")
        self._looked = -_EVERY_S

    def look(self) -> None:
        """Look, unless that was done just now."""
        if not self._devices or time.monotonic() - self._looked < _EVERY_S:
            return
        self._looked = time.monotonic()
        for device in self._devices:
            state = conditions(device)
            if any(value is not None for value in state.values()):
                self._journal.write("conditions", device=device.uuid or device.torch_name, **state)
