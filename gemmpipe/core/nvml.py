"""What NVIDIA's management library (NVML) says of a GPU: its limits, its state now, and who else uses it."""

import importlib.util
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gemmpipe.core.data import Device, Scalar

_LAG_US = 1_000_000


def limits(device: Device) -> Mapping[str, Scalar]:
    """What must be equal for times of two devices to be comparable; clocks (MHz) and power (W) where NVML tells."""
    facts: dict[str, Scalar] = {"name": device.name, "gfx": device.gfx, "cu_num": device.cu_num}
    handle = _handle(device)
    if handle is not None:
        import pynvml

        facts["most_sm_mhz"] = _query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
        facts["most_memory_mhz"] = _query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
        facts["power_cap_mw"] = _query(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return facts


def conditions(device: Device) -> Mapping[str, Scalar]:
    """Clocks (MHz), temperature (C), power (W) and processes on a GPU; None: not known."""
    state: dict[str, Scalar] = dict.fromkeys(("sm_mhz", "memory_mhz", "temperature_c", "power_w", "processes"))
    state["driver"] = None
    handle = _handle(device)
    if handle is not None:
        import pynvml

        state["driver"] = _query(pynvml.nvmlSystemGetDriverVersion)
        state["sm_mhz"] = _query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
        state["memory_mhz"] = _query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
        state["temperature_c"] = _query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        power_mw = _query(pynvml.nvmlDeviceGetPowerUsage, handle)
        state["power_w"] = None if power_mw is None else power_mw / 1000
        running = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        state["processes"] = None if running is None else len(running)
    return state


def product_names() -> tuple[str, ...]:
    """What NVML calls this machine's GPUs, each name once; nothing where it is not there. Imports no torch."""
    if importlib.util.find_spec("pynvml") is None:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return ()
    names = [_query(pynvml.nvmlDeviceGetName, handle) for handle in handles]
    return tuple(dict.fromkeys(str(name) for name in names if name))


class ForeignProcesses:
    """Notices other processes at work on a GPU, for the one process of ours that holds a context there."""

    def __init__(self, device: Device) -> None:
        self._handle = _handle(device)
        self._since_us = time.time_ns() // 1000

    def detect(self) -> bool:
        """Whether another process used the GPU since the last look, as far as NVML tells.

        Where NVML samples the use by process, a neighbour that only holds memory does not count; where it does not,
        its presence does.
        """
        if self._handle is None:
            return False
        # The driver's samples lag behind: what was done just before may have lasted until now.
        since_us, self._since_us = self._since_us - _LAG_US, time.time_ns() // 1000
        import pynvml

        present = {p.pid for p in _query(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()}
        if len(present) <= 1:  # one of them is this process
            return False
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except pynvml.NVMLError_NotFound:  # nobody did anything
            return False
        except pynvml.NVMLError:
            return True
        busy = {s.pid for s in samples if s.smUtil > 0} & present
        # Inside a container this process may stand there by a foreign number.
        return bool(busy - {os.getpid()}) if os.getpid() in present else len(busy) > 1


def _handle(device: Device) -> Any:
    """NVML's handle of the device; None where there is no NVML for it."""
    if device.kind != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        uuid = device.uuid if device.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{device.uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None


def _query(question: Any, *arguments: object) -> Any:
    """The answer, or None where this driver has none."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return question(*arguments)
    return None
