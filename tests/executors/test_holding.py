"""Devices are held alone, and those of one run are alike."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gemmpipe.conditions import Neighbours, conditions, limits
from gemmpipe.data import Device
from gemmpipe.device import cpu_device
from gemmpipe.errors import EnvironmentProblem
from gemmpipe.events import Event, Events
from gemmpipe.executors.holding import lock_path, locked_device, refuse_unlike
from gemmpipe.interrupt import Interrupted


def _after(calls: int) -> Callable[[], None]:
    """Raises Interrupted when called so often."""
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Interrupted("interrupted")

    return check


@pytest.mark.usefixtures("own_locks")
def test_who_waits_for_a_device_hears_the_user() -> None:
    device, heard = cpu_device(), []
    listener: list[Event] = heard
    with locked_device(device, Events(), _after(1)):
        with pytest.raises(Interrupted), locked_device(device, Events(listeners=[listener.append]), _after(2)):
            pytest.fail("two hold one device")
        assert [event.text for event in listener] == [
            f"waiting for {device.name}: another gemmpipe run is timing on it"
        ]
    with locked_device(device, Events(), _after(1)):
        assert lock_path(device).exists()


def test_a_lock_is_by_uuid(h200: Device) -> None:
    one, other = replace(h200, uuid="a", index=0), replace(h200, uuid="a", index=3)
    assert lock_path(one) == lock_path(other)
    assert lock_path(one) != lock_path(replace(h200, uuid="b"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "NVIDIA H100"}, "name NVIDIA H100 instead of NVIDIA H200"),
        ({"cu_num": 114}, "cu_num 114 instead of 132"),
        ({"gfx": "sm_100"}, "gfx sm_100 instead of sm_90"),
    ],
)
def test_devices_that_differ_are_refused(h200: Device, change: dict[str, object], said: str) -> None:
    alike = (h200, replace(h200, index=1, uuid="b"))
    refuse_unlike(alike)
    with pytest.raises(EnvironmentProblem, match=f"cuda:2 differs from cuda:0: {said}; tune them apart"):
        refuse_unlike((*alike, replace(h200, index=2, **change)))


def test_a_cpu_has_no_neighbours_to_know_of() -> None:
    cpu = cpu_device()
    assert set(conditions(cpu).values()) == {None}
    assert set(limits(cpu)) == {"name", "gfx", "cu_num"}
    assert not Neighbours(cpu).look()
