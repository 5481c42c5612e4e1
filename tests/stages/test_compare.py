"""compare: who is lined up, what is timed to the end, the floor, the summary and the plot."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from gemmpipe.backends import NO_SPACE
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.same_size import SameSize
from gemmpipe.cli.main import main
from gemmpipe.data import Device
from gemmpipe.family import GemmSpec, Scaling
from gemmpipe.stages.compare import summary
from gemmpipe.stages.plotting import plot

ITEMS = "shapes.items=[{M: [4, 16], N: 64, K: 128}]"
FP8 = "float8_e4m3fn"
BLOCKS = GemmSpec(
    m=3,
    n=256,
    k=256,
    x_dtype=FP8,
    w_dtype=FP8,
    out_dtype="bfloat16",
    x_scale=Scaling(granularity="block", block=(1, 128)),
    w_scale=Scaling(granularity="block", block=(128, 128)),
)
WIDE = GemmSpec(m=3, n=64, k=64, x_dtype="bfloat16", w_dtype="bfloat16", out_dtype="bfloat16")


@pytest.mark.usefixtures("own_locks")
def test_on_a_cpu(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("kernel=a16w16", "shapes=list", ITEMS, "timer@stages.bench.timer=quick", "device=cpu")
    assert main([*words, "format=[csv]"]) == 0
    assert main(["compare", *words]) == 0
    [path] = folder.glob("outputs/runs/compare/*/compared.csv")
    compared = pd.read_csv(path)
    assert compared["M"].tolist().count(4) == compared["M"].tolist().count(16) > 2
    names = set(compared["name"])
    assert {"tuned", "torch mm", "same_size mm"} <= names
    assert not names & {"deepgemm", "quack", "same_size blockwise"}, "what is not there, or cannot be, is left out"
    tuned = compared[compared["name"] == "tuned"]
    assert tuned["ratio_to_tuned"].tolist() == [1.0, 1.0]
    assert compared["status"].eq("ok").all(), "everyone is timed to the end"
    assert compared["floor_us"].isna().all(), "no rates are known of a CPU"
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert manifest["exit_code"] == 0
    assert (folder / "outputs/tuned").is_dir()


def test_the_summary_is_by_regime() -> None:
    rows = [
        {"problem": f"p{m}", "M": m, "name": name, "libtype": lib, "us": us, "over_floor": over}
        for m, own, library in ((8, 10.0, 20.0), (64, 10.0, 5.0), (512, 8.0, 8.0))
        for name, lib, us, over in (
            ("tuned", "triton", own, 1.5),
            ("tuned, own kernels", "triton", own, 1.5),
            ("scaled_mm", "scaled_mm", library, None),
        )
    ]
    lines = summary(pd.DataFrame(rows), [64], None, ["scaled_mm"])
    assert lines[1].split() == [
        *["0", "<", "M", "<=", "64", "1.000", "(0.500", "to", "2.000,", "2", "problems,", "median", "1.250)"],
        *["1.500", "(1.500", "to", "1.500,", "2", "problems,", "median", "1.500)"],
    ]
    assert "1.000 (1.000 to 1.000, 1 problems" in lines[2]
    named = summary(pd.DataFrame(rows), [64], "nobody", ["scaled_mm"])
    assert " - " in named[1], "an unknown path gives no ratio"


def test_a_plot_has_a_panel_a_product_and_the_floor(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rows = [
        {"M": m, "N": n, "K": 64, "name": "tuned", "us": 10.0 * m, "floor_us": 5.0 * m}
        for m in (1, 8)
        for n in (16, 32)
    ]
    text = plot(pd.DataFrame(rows), tmp_path / "c.html", "H200").read_text()
    assert "N=16 K=64" in text
    assert "N=32 K=64" in text
    assert '"floor"' in text


@pytest.mark.parametrize(("backend", "spec"), [(DeepGemm(), BLOCKS), (Quack(), WIDE)])
def test_third_parties_say_why_they_are_absent(backend: DeepGemm | Quack, spec: GemmSpec, h200: Device) -> None:
    assert "not installed" in str(backend.unavailable(h200))
    assert "no NVIDIA GPU" in str(backend.unavailable(replace(h200, kind="hip")))
    (point,) = backend.points(spec, h200, NO_SPACE)
    assert backend.normalise(spec, point, h200) == {}
    assert backend.misfit(spec, {}, h200) is None
    assert backend.misfit(WIDE if spec is BLOCKS else BLOCKS, {}, h200)
    assert backend.misfit(replace(spec, out_dtype="float32"), {}, h200)


def test_products_of_the_same_size(h200: Device) -> None:
    backend = SameSize()
    fit = [str(p["method"]) for p in backend.points(BLOCKS, h200, NO_SPACE) if not backend.misfit(BLOCKS, p, h200)]
    assert fit == ["mm", "rowwise", "tensorwise", "blockwise", "empty"], "three rows are padded to four"
    assert backend.misfit(WIDE, {"method": "blockwise"}, h200)
    cpu = replace(h200, kind="cpu", gfx="cpu_avx2")
    assert [p["method"] for p in backend.points(WIDE, cpu, NO_SPACE) if not backend.misfit(WIDE, p, cpu)] == ["mm"]


def test_files_that_are_not_there_are_refused(refusal: Callable[..., str]) -> None:
    words = ("compare", "kernel=a8w8_blockscale", "shapes=list", "shapes.items=[[8,256,256]]", "device=cpu")
    assert "stages.lineup.vllm: nowhere: no such file" in refusal(*words, "stages.lineup.vllm=[nowhere]")
