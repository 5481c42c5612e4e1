"""Every winner of the shipped tables launched through its entry point, on operands of its size."""

import pytest
import torch

from gemmpipe import runtime
from gemmpipe.core.data import Device, Problem
from gemmpipe.core.device import gpu_device
from gemmpipe.core.paths import shipped_tables
from gemmpipe.family import Family, Inputs, Weights, load_family
from gemmpipe.family.reference import error_ratio
from gemmpipe.tables import store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def problems(family: Family, device: Device) -> list[Problem]:
    rows = store.read(shipped_tables() / family.csv_name, family)
    keys = [
        tuple((column.name, row[column.name]) for column in family.key_columns)
        for row in rows
        if row["gfx"] == device.gfx and row["cu_num"] == device.cu_num
    ]
    return [Problem(family=family.name, key=key) for key in keys]


def call(family: Family, weights: Weights, inputs: Inputs) -> torch.Tensor:
    product = getattr(runtime, family.entry_point)
    if weights.w_scale is None:
        return product(inputs.x, weights.w)
    return product(inputs.x, weights.w, inputs.x_scale, weights.w_scale)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", ["a16w16", "a8w8_blockscale"])
def test_every_shipped_winner_is_right_at_run_time(name: str) -> None:
    """Twice with other operands: the next call must not depend on the contents of the workspace."""
    family, device = load_family(name), gpu_device(0)
    listed = problems(family, device)
    if not listed:
        pytest.skip(f"no rows of {device.gfx} with {device.cu_num} multiprocessors are shipped")
    generator = torch.Generator(device=device.torch_name).manual_seed(5)
    wrong = []
    for problem in listed:
        spec = family.spec(problem)
        weights = family.make_weights(spec, generator)
        for _ in range(2):
            inputs = family.make_inputs(spec, generator)
            out = call(family, weights, inputs)
            ratio = error_ratio(out, family.reference(spec, inputs, weights), *family.tolerance(spec))
            if ratio >= 0.01:
                wrong.append((problem.id, round(float(ratio), 3)))
    assert not wrong, f"{len(wrong)} of {2 * len(listed)} calls, first {wrong[:3]}"
    assert set(runtime.dispatch_report().values()) == {"exact"}
