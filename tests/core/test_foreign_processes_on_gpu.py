"""Another process that uses the GPU is detected, and this process's own work is not taken for it."""

import os
import subprocess
import sys
import time

import pytest
import torch

from gemmpipe.core.device import gpu_device
from gemmpipe.core.nvml import ForeignProcesses, conditions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1", reason="other tests use the GPU: -n 0"),
]
_OTHER = """
import sys, torch
x = torch.ones(8192, 8192, device="cuda")
print("up", flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""


def _work(x: torch.Tensor) -> None:
    for _ in range(300):
        x @ x
    torch.cuda.synchronize()


def test_another_process_is_detected_while_it_works() -> None:
    device = gpu_device(0)
    x = torch.ones(8192, 8192, device="cuda")
    foreign = ForeignProcesses(device)
    if conditions(device)["sm_mhz"] is None:
        pytest.skip("NVML gives no data on this machine")
    _work(x)
    assert not foreign.detect(), "own work does not count"
    other = subprocess.Popen([sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        time.sleep(2)
        foreign.detect()
        time.sleep(1)
        _work(x)
        assert foreign.detect()
    finally:
        other.kill()
        other.communicate()
    time.sleep(3)
    foreign.detect()
    _work(x)
    assert not foreign.detect(), "it is gone"
