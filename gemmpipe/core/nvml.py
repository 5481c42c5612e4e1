"""Queries to NVIDIA's management library (NVML): limits of a GPU, its current state, other processes on it."""

import importlib.util
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gemmpipe.core.data import Device, Scalar

_LAG_US = 1_000_000


def limits(device: Device) -> Mapping[str, Scalar]:
    """The facts that are equal for devices with comparable times; clocks (MHz) and power cap (mW) if NVML has them."""
    facts: dict[str, Scalar] = {"name": device.name, "gfx": device.gfx, "cu_num": device.cu_num}
    handle = _handle(device)
    if handle is not None:
        import pynvml

        facts["most_sm_mhz"] = _query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
        facts["most_memory_mhz"] = _query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM)
        facts["power_cap_mw"] = _query(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return facts


def conditions(device: Device) -> Mapping[str, Scalar]:
    """Clocks (MHz), temperature (C), power (W) and number of processes on a GPU; None: unknown."""
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
    """Distinct names of this machine's GPUs; empty without NVML. Does not import torch."""
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
    """Detects other processes that use a GPU, in the one process of the run that has a context on it."""

    def __init__(self, device: Device) -> None:
        self._handle = _handle(device)
        self._since_us = time.time_ns() // 1000

    def detect(self) -> bool:
        """True if another process used the GPU since the last call, according to NVML.

        If NVML samples utilization per process, a process that only holds memory does not count; else its presence
        counts.
        """
        if self._handle is None:
            return False
        # The driver's samples lag behind: work in samples from before the last call may have lasted until now.
        since_us, self._since_us = self._since_us - _LAG_US, time.time_ns() // 1000
        import pynvml

        present = {p.pid for p in _query(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()}
        if len(present) <= 1:  # one of them is this process
            return False
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except pynvml.NVMLError_NotFound:  # no process did any work
            return False
        except pynvml.NVMLError:
            return True
        busy = {s.pid for s in samples if s.smUtil > 0} & present
        # In a container NVML may list this process under a PID of another namespace.
        return bool(busy - {os.getpid()}) if os.getpid() in present else len(busy) > 1


def _handle(device: Device) -> Any:
    """NVML's handle of the device; None without NVML."""
    if device.kind != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        uuid = device.uuid if device.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{device.uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None


def _query(function: Any, *arguments: object) -> Any:
    """The result of an NVML function, or None if this driver does not support it."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return function(*arguments)
    return None
