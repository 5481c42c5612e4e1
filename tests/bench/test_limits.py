"""The benchmark of what a chip allows, without a GPU: its kernel, its contenders and its tables."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemmpipe.core.device import arch_device
from gemmpipe.core.spec import Scaling
from gemmpipe.family import Inputs, KernelDefaults, Weights
from gemmpipe.family.problem import make_problem
from gemmpipe.family.reference import product
from gemmpipe.templates.hopper.constraints import views_of_parts

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import limits
import limits_read
import limits_report
import peers

DEFAULTS = KernelDefaults(dtype=None, out_dtype=None, bias=None)
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.compile
@pytest.mark.parametrize("way", [limits_read.WAYS[0], limits_read.WAYS[-1]], ids=lambda way: way.name)
def test_each_thread_of_the_read_loads_16_bytes_at_once(way: limits_read.ReadWay) -> None:
    signature = {"src": "*i32", "sums": "*i32", "vectors": "i32", "part": "i32"}
    constants = {"VECTORS": way.step, "STAGES": way.stages}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(limits_read.read_part, signature, constants, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": way.warps}).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line or ".shared.global" in line]
    wide = [line for line in loads if ".v4" in line or "0x10" in line]
    assert len(wide) == len(loads) >= way.loads


@pytest.mark.parametrize("model", ["NVIDIA H200", H100])
@pytest.mark.parametrize("part", limits.PARTS)
def test_every_product_has_the_row_that_is_shipped_for_the_model(part: str, model: str) -> None:
    found = limits.cases(part, replace(arch_device("sm_90"), name=model), limits.arguments([part]), {})
    assert len(found) == len(limits.SIDES) * len(limits.ROWS[part].split(","))
    for case in found:
        taken = [each.name.split()[1] for each in case.products]
        assert taken == ["shipped"] or (not taken and not views_of_parts())  # Triton 3.8 lacks some of these tiles
        assert bool(case.layers) == (part == limits.LINEAR)


def test_the_two_models_have_choices_of_their_own() -> None:
    rows = [limits.shipped_rows(False, replace(arch_device("sm_90"), name=name)) for name in ("NVIDIA H200", H100)]
    common = {*rows[0]} & {*rows[1]}
    assert any(rows[0][key] != rows[1][key] for key in common)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scales_of_one_leave_the_operands(granularity: str) -> None:
    """The reference of a product without block scales is that of its fp8 operands."""
    problem = make_problem(limits.FAMILY, {"M": 5, "N": 128, "K": 256}, DEFAULTS, "sm_90", "test")
    scaling = Scaling(granularity=granularity)
    x, w = (torch.randn(rows, 256).to(torch.float8_e4m3fn) for rows in (5, 128))
    ones = {rows: limits.ones(rows, granularity, "cpu") for rows in (5, 128)}
    plain = replace(limits.FAMILY.spec(problem), x_scale=scaling, w_scale=scaling)
    inputs, weights = Inputs(x=x, x_scale=ones[5]), Weights(w=w, w_scale=ones[128])
    torch.testing.assert_close(product(plain, inputs, weights), x.float() @ w.float().t())


def row(part: str, m: int, contender: str, us: float | None) -> dict[str, str]:
    """A row of a product of 256 x 512 whose floor is 4 us."""
    state = {"sm_mhz": "1500", "power_w": "690.0", "device": H100, "note": "" if us else "no GPU"}
    sizes = {"part": part, "M": str(m), "N": "256", "K": "512", "floor_us": "4.000"}
    return {**sizes, "contender": contender, "us": f"{us:.3f}" if us else "", **state}


def test_the_table_of_reads(tmp_path: Path) -> None:
    rows = [row("read", 1, "ours shipped sliced {}", 6), row("read", 1, "read a", 8), row("read", 1, "read b", 5)]
    rows += [row("read", 128, "ours shipped gluon {}", 9), row("read", 128, "read b", 5), row("read", 1, "empty", 2)]
    rows += [row("read", 128, "tensor x", 6), row("read", 128, "tensor_fast x", None)]
    peers.append(tmp_path / "limits.csv", rows[:3], limits_report.FIELDS)
    peers.append(tmp_path / "limits.csv", rows[3:], limits_report.FIELDS)
    text = "\n".join(limits_report.lines(peers.read(tmp_path / "limits.csv"), ["read"]))
    assert "| read over floor | 1.250 (1.250 to 1.250) 1 | 1.250 (1.250 to 1.250) 1 |" in text
    assert "| ours over read | 1.200 (1.200 to 1.200) 1 | 1.800 (1.800 to 1.800) 1 |" in text
    assert "| ours over max(read, tensor) | - | 1.500 (1.500 to 1.500) 1 |" in text
    assert "fastest ways to read: 1 read b\n  1x256x512: floor 4.00, read 5.00, ours 6.00 us" in text
    assert "tensor_fast: 1 without a time: no GPU" in text
    assert "rates of the floor: derived" in text


def test_the_tables_of_large_products_and_of_layers() -> None:
    rows = [row("large", 512, "ours shipped gluon {}", 10), row("large", 512, "tensor x", 9.8)]
    rows += [row("large", 512, "deepgemm {1}", 12), row("large", 512, "deepgemm {2}", 10)]
    rows += [row("large", 512, "tensor_fast x", 9.5)]
    rows += [row("linear", 8, name, us) for name, us in (("ours a", 8), ("vllm b", 10), ("alone ours c", 5))]
    text = "\n".join(limits_report.lines(rows, limits.PARTS))
    assert "512x256x512 | 10.0 1500 690.0 | 1.000 0.971 0.950 0.980 - -" in text
    assert "less than tensor on 1 of 1 products" in text
    assert "less than tensor_fast on 0 of 1 products" in text
    assert "less than the faster of both on 0 of 1 products" in text
    assert "| vLLM's pair over ours | 1.250 (1.250 to 1.250) 1 |" in text
    assert "| vLLM's pair over our product alone | 2.000 (2.000 to 2.000) 1 |" in text


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        limits.arguments(["reads"])
    assert "part: reads: expected one of read, large, linear" in capsys.readouterr().err
