"""compare: the lineup, the finals, the floor, the summary and the plot."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gemmpipe.backends import NO_SPACE
from gemmpipe.backends.deepgemm import DeepGemm
from gemmpipe.backends.quack import Quack
from gemmpipe.backends.same_size import SameSize
from gemmpipe.cli.main import main
from gemmpipe.core.data import Device
from gemmpipe.core.device import cpu_device
from gemmpipe.core.signals import OutOfTime
from gemmpipe.family import GemmSpec, Scaling
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.compare.plot import plot
from gemmpipe.stages.compare.stage import COMPARED
from gemmpipe.stages.compare.summary import lines, summarize

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


Compare = tuple[Path, str]


@pytest.fixture
def compare(folder: Path, capfd: pytest.CaptureFixture[str], own_locks: None) -> Callable[..., Compare]:
    """Runs `compare` with arguments; returns the run's folder and its output."""

    def run(*args: str, code: int = 0) -> Compare:
        capfd.readouterr()
        assert main(["compare", *args]) == code
        last = max(folder.glob("outputs/runs/compare/*"), key=lambda path: path.stat().st_mtime_ns)
        return last, capfd.readouterr().out

    return run


@pytest.mark.e2e
def test_on_a_cpu(folder: Path, compare: Callable[..., Compare]) -> None:
    args = ("kernel=a16w16", "shapes=list", ITEMS, "timer@stages.bench.timer=quick", "device=cpu")
    assert main([*args, "format=[csv]"]) == 0
    rates = "bytes_per_s:1e12,flops_16_per_s:1e15,flops_8_per_s:1e15,launch_us:0.01,measured:false"
    run_dir, text = compare(*args, f"+roofline.{cpu_device().gfx}={{{rates}}}")
    compared = pd.read_csv(run_dir / "compared.csv")
    assert compared["M"].tolist().count(4) == compared["M"].tolist().count(16) > 2
    timed = compared[compared["us"].notna()]
    assert {"tuned", "torch mm", "same_size mm"} <= set(timed["name"])
    assert timed["status"].eq("ok").all(), "all entries are timed in all rounds"
    tuned = timed[timed["name"] == "tuned"]
    assert tuned["over_tuned"].tolist() == [1.0, 1.0]
    assert compared["floor_us"].between(0.02, 0.04).all(), "64 x 128 by the given rates"
    assert timed["over_floor"].gt(1).all()
    assert "floor  its rates are derived from a specification, not measured" in text.splitlines()
    absent = compared[compared["us"].isna()].drop_duplicates("name").set_index("name")
    assert {"deepgemm", "quack", "same_size blockwise", "triton.autotune", "untuned", "own kernels"} <= set(
        absent.index
    )
    assert absent["status"].eq("unsupported").all()
    assert absent["error"]["triton.autotune"] == "no GPU: Triton tunes on one"
    assert max(len(line) for line in text.splitlines() if str(folder) not in line and "shapes=" not in line) <= 80
    for what, names in (
        ("without a GPU", {"quack", "triton.autotune", "untuned", "own kernels", "same_size rowwise"}),
        ("as not for these products on any device", {"deepgemm", "flashinfer", "same_size blockwise", "sglang"}),
    ):
        (printed,) = re.findall(rf"not timed,? {what}: (.*?) \(compared.csv has why\)", " ".join(text.split()))
        assert names <= set(printed.split(", "))
    assert absent["error"]["deepgemm"] == "not for this product: scales: 1x128 x 128x128 only"
    assert "tuned is the choice of the tables: " in text
    assert compared.groupby("problem")["fastest"].sum().tolist() == [1, 1]
    assert "fastest peer" not in text, "no peer ran: it would be the fastest library"
    assert set(timed["policy"]) <= {"host interleaved", "host interleaved shared_cpu"}
    assert "speed-up over fastest library: geomean (least) of problems" in text.splitlines()
    assert "unsupported" not in text.partition("geomean")[2], "what is not timed has its reason alone"
    assert "no GPU:" not in text
    regimes = pd.read_csv(run_dir / "regimes.csv")
    assert set(regimes["regime"]) == {"M 4 to 16"}
    assert regimes.set_index("name")["us_of"]["tuned"] == 2
    assert {"fastest library", "torch mm"} <= set(regimes["name"])
    assert json.loads((run_dir / "manifest.json").read_text())["exit_code"] == 0


@pytest.mark.e2e
def test_own_kernels_of_the_finals_where_a_library_was_chosen(
    faulty_arguments: tuple[str, ...], compare: Callable[..., Compare], folder: Path
) -> None:
    """1 ms stays far below 5 ms on a busy machine, from where screening skips a candidate at larger M."""
    args = (*faulty_arguments, "space.PACE_MS=[1,60]", "stages.select.min_improvement_pct=0")
    assert main(args) == 0
    run_dir, text = compare(*args)
    compared = pd.read_csv(run_dir / "compared.csv").set_index(["M", "name"])
    for m in (8, 16):
        assert compared["libtype"][m, "tuned"] == "torch"
        assert compared["config"][m, "own kernels"] == '{"KIND":"right","PACE_MS":1}', "the faster one of the finals"
        assert compared["over_own"][m, "torch mm"] < 0.5
    assert "own kernels behind fastest library on 2 of 2 problems" in text
    assert "M=16 N=32 K=64: 0." in text
    assert re.search(r"tuned: 2 choices of \S+/tune/\S+, which took \d+ s for 2 problems", " ".join(text.split()))
    (manifest,) = folder.glob("outputs/runs/tune/*/manifest.json")
    manifest.write_text('{"wall_s": "a while"}')
    _, text = compare(*args)
    assert "tuned: 2 choices of" not in text, "a manifest without a time is no error"
    shutil.rmtree(next(folder.glob("outputs/runs/tune")))
    run_dir, text = compare(*args)
    lost = "not timed: own kernels: a library was chosen, and the journal of that run is not here"
    assert lost in " ".join(text.split())


@pytest.mark.e2e
def test_all_batches_have_one_summary(faulty_arguments: tuple[str, ...], compare: Callable[..., Compare]) -> None:
    items = "shapes.items=[{M: 8, N: 32, K: 64}, {M: 16, N: 16, K: 64}, {M: 16, N: 48, K: 64}]"
    run_dir, text = compare(*faulty_arguments, items, "batch=1", "space.PACE_MS=[0]")
    compared = pd.read_csv(run_dir / "compared.csv")
    assert not compared.duplicated(["problem", "name"]).any()
    assert compared["problem"].nunique() == 3
    assert len(pd.read_csv(run_dir / "trials.csv")) == compared["us"].notna().sum()
    assert text.count("as nothing is tuned here") == 1
    assert "tuned over the floor" not in text, "there is nothing to compare"
    untuned = "tuned: no row in output= or the tables in use; tune it first, or output= names its table"
    assert f"not timed: {untuned} (3 problems)" in " ".join(text.split())
    assert "time of a call, as nothing is tuned here: geomean (least to most)" in text
    assert re.search(r"fastest library +\d[\d.]* [um]s", text)


@pytest.mark.e2e
def test_a_stopped_comparison_resumes(
    faulty_arguments: tuple[str, ...], compare: Callable[..., Compare], monkeypatch: pytest.MonkeyPatch
) -> None:
    finals = Bench.run

    def stopped_after(*args: Any) -> Any:
        finals(*args)
        raise OutOfTime("stopped")

    monkeypatch.setattr(Bench, "run", stopped_after)
    run_dir, text = compare(*faulty_arguments, "space.PACE_MS=[1]")
    assert "compare: skipped; run again with resume=last (needs lineup)" in text, "unfinished finals are not compared"
    assert not (run_dir / "compared.csv").exists()
    monkeypatch.undo()
    again, text = compare(f"resume={run_dir}", faulty_arguments[0])
    assert again == run_dir
    assert "finished trials in" in text
    assert pd.read_csv(run_dir / "compared.csv")["us"].notna().any()


def _compared(rows: list[tuple[str, int, float | None, float | None]]) -> pd.DataFrame:
    """Rows of (name, M, over_tuned, over_own): `own kernels` and `tuned` take 10 us."""
    filled = {"N": 64, "K": 32, "unlike": False, "error": "no GPU: none", "over_floor": 1.5, "config": "{}"}
    whole = [
        {
            **filled,
            "problem": f"p{m}",
            "name": name,
            "M": m,
            "us": None if over is None else 10 * over,
            "status": "unsupported" if over is None else "ok",
            "over_tuned": over,
            "over_own": own,
            "library": name in ("a", "b"),
            "peer": over is not None and name not in ("tuned", "own kernels"),
            "libtype": name.split(" ")[0],
        }
        for name, m, over, own in rows
    ]
    return pd.DataFrame(whole, columns=list(COMPARED))


def test_the_summary_is_by_regime() -> None:
    compared = _compared(
        [(name, m, 1.0, 1.0) for name in ("tuned", "own kernels") for m in (8, 64, 512)]
        + [("a", 8, 2.0, 2.0), ("a", 64, 0.5, 0.5), ("a", 512, 3.0, 3.0), ("b", 8, 4.0, 4.0), ("b", 512, 1.0, 1.0)]
        + [("c", 8, None, None)]
    )
    summed = summarize(compared, [64, 256]).set_index(["regime", "name"])
    assert list(dict.fromkeys(summed.index.get_level_values(0))) == ["M 8 to 64", "M 512"]
    row = summed.loc[("M 8 to 64", "a")]
    assert row["over_own"] == pytest.approx(1.0)
    assert (row["us_of"], row["over_own_least"], row["over_own_most"]) == (2, 0.5, 2.0)
    assert summed.loc[("M 8 to 64", "tuned")]["over_floor"] == pytest.approx(1.5)
    assert summed.loc[("M 512", "fastest library")]["over_tuned"] == 1.0, "b, not a"
    assert ("M 8 to 64", "c") not in summed.index
    text = "\n".join(lines(compared, summed.reset_index(), None, 80))
    assert "own kernels behind fastest library on 1 of 3 problems" in text
    assert "M=64 N=64 K=32: 0.500 (a 5.00 us)" in text
    assert "not timed: c: no GPU: none (1 problem)" in text
    assert "own kernels behind b on 0 of 2 problems" in lines(compared, summed.reset_index(), "b", 80)
    [race] = [line for line in text.splitlines() if line.startswith("  M 8 to 64  ") and " of " in line]
    assert " ".join(race.split()) == "M 8 to 64 1.00 (0.50) of 2 1 1.00 (0.50) of 2 1.50 (1.50) of 2"
    unknown = lines(compared, summed.reset_index(), "bb", 80)
    assert any(line.startswith("stages.compare.baseline: no entry named 'bb'") for line in unknown)
    untimed = lines(compared, summed.reset_index(), "c", 80)
    assert "stages.compare.baseline: 'c' was not timed, so own kernels are compared with none" in untimed


@pytest.mark.parametrize("width", [80, 40])
def test_the_tables_of_the_summary_fit_the_width(width: int) -> None:
    """Four regimes stand beside each other, or below, and have all names each time."""
    ms = (8, 16, 128, 200, 512, 600, 1024, 8192)
    compared = _compared(
        [(name, m, 1.0, 1.0) for name in ("tuned", "own kernels") for m in ms]
        + [("torch bfloat16_convert", m, 1 + m / 100, 1 + m / 100) for m in ms]
        + [("a", m, 1 / (1 + m / 1000), 1.5) for m in ms]
    )
    text = lines(compared, summarize(compared, [64, 256, 1000]), None, width)
    assert max(map(len, text)) <= width or width < 80
    tables = [line for line in text if line.startswith("  ") and "=" not in line]
    assert max(map(len, tables)) <= width
    for label in ("M 8 to 16", "M 128 to 200", "M 512 to 600", "M 1024 to 8192"):
        assert sum(label in line for line in tables) >= 2, "in both tables"
    assert sum("torch bfloat16_convert" in line for line in tables) == (2 if width == 80 else 4)
    (race,) = [" ".join(line.split()) for line in tables if "M 8 to 16 " in line and " of " in line][:1]
    assert race.startswith("M 8 to 16 1.50 (1.50) of 2")


def test_a_copy_of_the_weight_is_marked_and_says_why_it_does_not_count(tmp_path: Path) -> None:
    rows = [("tuned", 8, 1.0, None), ("a", 8, 1.5, None), ("c", 8, 1.2, None), ("torch float32_copy", 8, 0.2, None)]
    compared = _compared(rows)
    plain = "\n".join(lines(compared, summarize(compared, [64]), None, 80))
    assert " +" not in plain
    compared.loc[compared["name"] == "torch float32_copy", ["extra_weight_bytes", "peer"]] = [4096, False]
    text = lines(compared, summarize(compared, [64]), None, 80)
    printed = {line.split("  ")[1]: line.split()[-1] for line in text if line.startswith("  ")}
    assert printed["torch float32_copy +"] == "0.20"
    assert printed["fastest peer"] == "1.20", "not the copy, which is faster"
    (note,) = [line for line in text if line.startswith("  + ")]
    assert "keeps a copy of the weight" in note
    page = plot(compared.assign(p20_us=None, p80_us=None), tmp_path / "c.html", "cpu").read_text()
    assert ">torch float32_copy +<" in page
    assert "keeps a copy of the weight" in page


def test_many_candidates_of_a_backend_are_one_entry() -> None:
    tiles = [(f"deepgemm {columns}", m, 1 + columns / m, columns / m) for columns in range(1, 8) for m in (8, 64)]
    compared = _compared([("own kernels", 8, 1.0, 1.0), ("a", 8, 1.5, 2.0), ("few x", 8, 1.2, 3.0), *tiles])
    summed = summarize(compared, [16]).set_index(["regime", "name"])
    assert set(summed.index.get_level_values(1)) == {
        *("own kernels", "a", "few x", "deepgemm, its fastest", "fastest library", "fastest peer")
    }
    fastest = summed.loc[("M 8", "deepgemm, its fastest")]
    assert [fastest["us_of"], fastest["over_own"], fastest["us"]] == pytest.approx([1, 1 / 8, 10 * (1 + 1 / 8)])
    assert summed.loc[("M 8", "fastest peer")]["over_tuned"] == pytest.approx(1 + 1 / 8)
    assert summed.loc[("M 8", "fastest library")]["over_tuned"] == pytest.approx(1.5)
    text = "\n".join(lines(compared, summed.reset_index(), "fastest peer", 80))
    assert "own kernels behind fastest peer on 2 of 2 problems" in text
    assert "M=8 N=64 K=32: 0.125 (deepgemm 1 11.2 us)" in text


def test_a_backends_label_is_enough_for_its_only_path() -> None:
    compared = _compared([("tuned", 8, 1.0, 1.0), ("own kernels", 8, 1.0, 1.0), ("lib fast", 8, 2.0, 2.0)])
    assert "own kernels behind lib fast on 0 of 1 problem" in lines(compared, summarize(compared, [64]), "lib", 80)
    both = _compared([("tuned", 8, 1.0, 1.0), ("lib fast", 8, 2.0, 2.0), ("lib slow", 8, 3.0, 3.0)])
    text = lines(both, summarize(both, [64]), "lib", 80)
    assert "stages.compare.baseline: 'lib' has several paths; expected one of lib fast, lib slow" in text


def test_reasons_that_differ_in_a_number_are_reported_once() -> None:
    compared = _compared([("tuned", 8, 1.0, 1.0), ("lib", 1, None, None), ("lib", 2, None, None)])
    compared.loc[compared["us"].isna(), "error"] = ["alignment: M=1 is odd", "alignment: M=2 is too small"]
    assert "not timed: lib: alignment: M=1 is odd, or similar (2 problems)" in lines(
        compared, summarize(compared, [64]), None, 80
    )


def test_the_cost_of_a_tuner_is_reported() -> None:
    compared = _compared([(name, m, 1.0, 1.0) for name in ("tuned", "triton.autotune") for m in (8, 64)])
    compared.loc[compared["name"] == "triton.autotune", ["tuning_s", "tried", "of", "compiled"]] = [10.0, 25, 900, 20]
    text = lines(compared, summarize(compared, [64]), None, 80)
    assert (
        "triton.autotune: chose in 20 s, 10.0 s and 25 of 900 configurations per problem (median), 40 compiled;"
        " cut short by backend.autotune.limit_s on 2 of 2"
    ) in text


def _plotted(names: Sequence[tuple[str, float | None]]) -> pd.DataFrame:
    rows = [
        {"M": m, "N": n, "K": 64, "name": name, "us": 10.0 * m, "floor_us": 5.0 * m, "tuning_s": seconds}
        for m in (1, 8)
        for n in (16, 32)
        for name, seconds in names
        if (name, n) != ("tuned", 32)
    ]
    absent = {"p20_us": None, "p80_us": None, "over_tuned": None}
    return pd.DataFrame(rows).assign(**absent, unlike=False, problem="p", policy="", error="")


def test_a_plot_has_a_chart_per_product_and_the_floor(tmp_path: Path) -> None:
    compared = _plotted([("tuned", None), ("triton.autotune", 10.0)])
    text = plot(compared, tmp_path / "c.html", "H200").read_text()
    assert ">16 x 64</h3>" in text
    assert ">32 x 64</h3>" in text
    assert 'data-name="floor"' in text
    assert "triton.autotune (chosen in 40 s)" in text


def test_a_name_has_the_colour_of_the_legend_in_every_chart(tmp_path: Path) -> None:
    """Also where a product lacks the first names: a colour belongs to the name, not to its place."""
    names = ["tuned", "torch mm", "onednn float32_packed", "torch float32_copy", "same_size mm", "other"]
    text = plot(_plotted([(name, None) for name in names]), tmp_path / "c.html", "cpu").read_text()
    marks = re.findall(r'class="(?:swatch|line|dots) (c\w+ d\d)"[^>]*data-name="([^"]+)"', text)
    classes = {name: {each for each, of in marks if of == name} for name in names}
    assert all(len(each) == 1 for each in classes.values()), classes
    assert len(set.union(*classes.values())) == len(names), classes


@pytest.mark.parametrize(("backend", "spec"), [(DeepGemm(), BLOCKS), (Quack(), WIDE)])
def test_third_parties_give_a_reason_for_absence(backend: DeepGemm | Quack, spec: GemmSpec, h200: Device) -> None:
    assert "not installed" in str(backend.unavailable(h200))
    assert "no NVIDIA GPU" in str(backend.unavailable(replace(h200, kind="hip")))
    (point,) = backend.configs(spec, h200, NO_SPACE)
    assert backend.normalise(spec, point, h200) == {}
    assert backend.unsupported_reason(spec, {}, h200) is None
    assert backend.unsupported_reason(WIDE if spec is BLOCKS else BLOCKS, {}, h200)
    assert backend.unsupported_reason(replace(spec, out_dtype="float32"), {}, h200)


def test_products_of_the_same_size(h200: Device) -> None:
    backend = SameSize()
    fit = [
        str(p["method"])
        for p in backend.configs(BLOCKS, h200, NO_SPACE)
        if not backend.unsupported_reason(BLOCKS, p, h200)
    ]
    assert fit == ["mm", "rowwise", "tensorwise", "blockwise", "empty"], "three rows are padded to four"
    assert backend.unsupported_reason(WIDE, {"method": "blockwise"}, h200)
    several = replace(BLOCKS, batch=4)
    fit = [p for p in backend.configs(several, h200, NO_SPACE) if not backend.unsupported_reason(several, p, h200)]
    assert fit == [{"method": "empty"}], "every family has the floor"
    cpu = replace(h200, kind="cpu", gfx="cpu_avx2")
    assert [
        p["method"] for p in backend.configs(WIDE, cpu, NO_SPACE) if not backend.unsupported_reason(WIDE, p, cpu)
    ] == ["mm"]


def test_missing_files_are_refused(refusal: Callable[..., str]) -> None:
    args = ("compare", "kernel=a8w8_blockscale", "shapes=list", "shapes.items=[[8,256,256]]", "device=cpu")
    assert "stages.lineup.vllm: nowhere: no such file" in refusal(*args, "stages.lineup.vllm=[nowhere]")


def test_an_impossible_baseline_is_an_error_before_anything_runs(refusal: Callable[..., str]) -> None:
    args = ("compare", "kernel=a8w8_blockscale", "shapes=list", "shapes.items=[[8,256,256]]", "device=cpu")
    text = refusal(*args, "stages.compare.baseline=same_size blokwise", "backend=[torch]")
    assert text.startswith("stages.compare.baseline: no entry named 'same_size blokwise'")
    assert "did you mean 'torch'?" in refusal(*args, "stages.compare.baseline=torhc", "backend=[torch]")


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        ("stages.lineup.own=bare.csv", "stages.lineup.own: bare.csv has no row for cpu_"),
        ("stages.lineup.own=elsewhere.csv", "stages.lineup.own: elsewhere.csv has no row for cpu_"),
        ("stages.lineup.own=gone.csv", "stages.lineup.own: gone.csv: no such file or folder"),
        ("stages.lineup.vllm=[empty]", "stages.lineup.vllm: empty: no JSON file there"),
    ],
)
def test_an_invalid_lineup_is_an_error_before_anything_runs(
    folder: Path, refusal: Callable[..., str], arg: str, text: str
) -> None:
    columns = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us,config\n"
    (folder / "empty").mkdir()
    (folder / "bare.csv").write_text(columns)
    (folder / "elsewhere.csv").write_text(
        columns + "sm_90,132,4,64,128,False,bfloat16,bfloat16,False,False,torch,4,{}\n"
    )
    assert refusal("compare", "kernel=a16w16", "shapes=list", ITEMS, "device=cpu", arg).startswith(text)
