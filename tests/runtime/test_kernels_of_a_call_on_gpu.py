"""The number of kernels per call of a shipped winner, by the device's profiler."""

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gemmpipe import runtime
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import Family, load_family
from gemmpipe.family.operands import in_memory_order
from gemmpipe.tables import store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FAMILIES = ("a16w16", "a8w8", "a8w8_blockscale")
OVERHEAD = ("Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Lazy Function Loading")
"""The profiler's own work, which it reports next to the kernels."""
MOST = 40
"""Rows per family: the profiler takes about 50 ms per call."""


def _own(family: Family) -> list[store.Row]:
    """Shipped rows of this device with one of our kernels, spread over the table."""
    device, path = gpu_device(0), shipped_tables() / family.csv_name
    labels = {implementation.label for implementation in family.implementations}
    rows = [
        row
        for row in (store.read(path, family) if path.is_file() else ())
        if (row["gfx"], row["cu_num"]) == (device.gfx, device.cu_num) and row["libtype"] in labels
    ]
    return rows[:: max(1, len(rows) // MOST)]


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_a_winner_of_ours_is_one_kernel(name: str) -> None:
    family, device = load_family(name), gpu_device(0)
    rows = _own(family)
    if not rows:
        pytest.skip("no such row is shipped for this device")
    function = getattr(runtime, family.entry_point)
    generator = torch.Generator(device=device.torch_name).manual_seed(5)
    more = []
    for row in rows:
        problem = family.problem(tuple((column.name, row[column.name]) for column in family.key_columns))
        spec = family.spec(problem)
        weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
        for order in spec.x_scale_orders:
            scale = inputs.x_scale
            if scale is not None and spec.x_scale is not None and spec.x_scale.granularity == "block":
                scale = in_memory_order(scale, order)
            scales = () if scale is None else (scale, weights.w_scale)
            options = {} if weights.bias is None else {"bias": weights.bias}
            for _ in range(2):
                function(inputs.x, weights.w, *scales, **options)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                function(inputs.x, weights.w, *scales, **options)
                torch.cuda.synchronize()
            found = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
            kernels = [name for name in found if name not in OVERHEAD]
            if len(kernels) != 1:
                more.append((problem.id, order, kernels))
    assert set(runtime.dispatch_report().values()) == {"exact"}
    assert not more, f"{len(more)} calls, the first {more[:3]}"
