"""The last screen: no line is wide or ends in blanks, a conversion is no rival, and commands stay whole."""

import pandas as pd
import pytest

from gemmpipe.core.data import Scalar
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.report.lines import Line, folded
from gemmpipe.report.results import product_results, run_figures
from gemmpipe.report.screen import (
    RunFacts,
    choice_lines,
    choose_again_line,
    command_lines,
    memory_option_lines,
    screen_lines,
    see_lines,
    short_config,
)

BLOCKSCALE = load_family("a8w8_blockscale")
CONVERTED = {"baseline": "torch", "baseline_config": '{"method":"bfloat16_convert"}', "libtype": "torch"}
DIRECT = {"baseline": "scaled_mm", "baseline_config": '{"use_fast_accum":false}', "libtype": "gluon"}
KNOBS = '{"BLOCK_SIZE_M":64,"BLOCK_SIZE_N":128,"BLOCK_SIZE_K":128,"GROUP_SIZE_M":1,"num_warps":4,"num_stages":3}'


def _products(*rows: tuple[int, float, float, dict[str, object]], gfx: str = "cpu_avx512") -> pd.DataFrame:
    key = {"N": 1280, "K": 8192, "dtype": "torch.float8_e4m3fn", "outdtype": "torch.bfloat16"}
    device = "NVIDIA H200" if gfx == "sm_90" else "AMD EPYC"
    shared = {"format": "", "gfx": gfx, "device": device, "kernelName": "k@1", "config": KNOBS, "near_ties": 0, **key}
    return product_results(
        pd.DataFrame([{**shared, "M": m, "us": us, "baseline_us": them, **more} for m, us, them, more in rows]),
        BLOCKSCALE,
    )


def _screen(products: pd.DataFrame, **facts: object) -> list[Line]:
    given = {"kernel": "a8w8_blockscale", "shapes": "list", "device": "AMD EPYC", "problems": len(products)}
    return screen_lines(
        RunFacts(**{**given, "duration": "done in 6.0 s", **facts}),  # type: ignore[arg-type]
        run_figures(products),
        products,
        BLOCKSCALE,
    )


MIXED = [(1, 50.0, 100.0, DIRECT), (64, 50.0, 80.0, DIRECT), (2, 90.0, 90.0, CONVERTED), (512, 80.0, 90.0, CONVERTED)]


@pytest.mark.parametrize("gfx", ["cpu_avx512", "sm_90"])
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_ends_in_blanks_or_exceeds_the_width(gfx: str, width: int) -> None:
    many = _products(*MIXED, *((m, 90.0, 99.0, CONVERTED) for m in range(65, 200, 7)), gfx=gfx)
    lines = [part.text for line in _screen(many) for part in folded(line, width)]
    lines += choice_lines(many, BLOCKSCALE, width, full=True)
    assert [line for line in lines if line != line.rstrip() or len(line) > width] == []


def test_a_choice_that_is_the_conversion_itself_has_no_speed_up() -> None:
    products = _products((1, 90.0, 90.0, CONVERTED), (64, 95.0, 95.0, CONVERTED))
    header, *rows = choice_lines(products, BLOCKSCALE, 120)
    assert "speed-up" not in header
    assert "library" not in header
    assert not any("1.00x" in row for row in rows)
    texts = [line.text for line in _screen(products)]
    (printed,) = [text for text in texts if "convert" in text]
    assert printed.strip() == "2 products (M 1, 64) that no library multiplies as stored: torch converts the operands"
    assert not any("speed-up over" in text for text in texts)


def test_speed_ups_over_a_conversion_are_in_parentheses_and_counted_apart() -> None:
    products = _products(*MIXED)
    header, *rows = choice_lines(products, BLOCKSCALE, 120)
    end = header.index("speed-up") + len("speed-up")
    assert [row[:end].split()[-1] for row in rows] == ["2.00x", "1.60x", "-", "(1.12x)"]
    (printed,) = [line.text for line in _screen(products) if "convert" in line.text]
    assert printed.strip() == (
        "2 products (M 2, 512) that no library multiplies as stored, not counted above: "
        "1.12x over torch on converted operands for 1, 1 stays with torch's conversion"
    )


def test_one_speed_up_has_no_range() -> None:
    (line,) = [line.text for line in _screen(_products((8, 5.0, 10.0, DIRECT))) if "M <= 64" in line.text]
    assert line == "  M <= 64  2.00x  1 of 1"


def test_a_choice_that_is_the_library_itself_is_no_speed_up() -> None:
    itself = {**DIRECT, "libtype": "scaled_mm", "config": DIRECT["baseline_config"]}
    products = _products((1, 50.0, 100.0, DIRECT), (2, 70.0, 70.0, itself), (512, 80.0, 80.0, itself), gfx="sm_90")
    texts = [line.text for line in _screen(products)]
    (header,) = [place for place, text in enumerate(texts) if "(geomean, range, products)" in text]
    few, many = (texts[header + 1].split(), texts[header + 2].split())
    assert few[:6] == ["M", "<=", "64", "2.00x", "1", "of"]
    assert many[:7] == ["M", "257", "to", "1023", "-", "0", "of"]
    assert "  2 products (M 2, 512) stay with the library: its path is the fastest" in texts
    alone = _screen(_products((2, 70.0, 70.0, itself)))
    assert not any("speed-up over" in line.text for line in alone)
    assert any("1 product (M 2) stays with the library" in line.text for line in alone)


def test_a_wide_regime_fits_80_columns() -> None:
    rows = [(m, 50.0 / m, 100.0, {**DIRECT, "policy": "host shared_gpu"}) for m in range(65, 257)]
    lines = _screen(_products(*rows, gfx="sm_90"))
    assert [line.text for line in lines if "192 of 192  " in line.text and len(line.text) > 80] == []
    assert any("192 of 192" in line.text and "%" in line.text for line in lines)


def test_what_is_reused_and_what_is_unsolved_is_said() -> None:
    products = _products(*MIXED)
    assert "4 of 4 problems tuned already" in _screen(products, reused="a.csv")[1].text
    unsolved = _screen(products, problems=5, unsolved=["a8w8_blockscale M=1"])
    assert unsolved[1].text.startswith("4 of 5 problems tuned, every result checked")
    assert any("1 problem without a valid candidate" in line.text for line in unsolved)


def test_a_run_for_an_engine_alone_says_whether_all_was_timed() -> None:
    none = _products(*MIXED).head(0)
    assert _screen(none, problems=35)[1].text.startswith("35 problems: choices for ranges of M alone")
    assert _screen(none, problems=35, is_stopped=True)[1].text.startswith(
        "stopped before all of 35 problems were timed"
    )


def test_many_rows_are_the_best_and_the_worst_with_the_number_between() -> None:
    products = _products(*((m, 50.0, 50.0 + m, DIRECT) for m in range(1, 41)))
    lines = choice_lines(products, BLOCKSCALE, 120)
    assert [int(line.split()[0]) for line in lines[1:6]] == [40, 39, 38, 37, 36]
    assert lines[6].startswith("... 25 rows between")
    assert len(lines) == 1 + 5 + 1 + 10
    assert len(choice_lines(products, BLOCKSCALE, 120, full=True)) == 41


def test_the_next_commands_stay_whole_and_fill_the_lines() -> None:
    short = command_lines("last", 100, exports=["vllm"], shipped=True)
    assert [line.text for line in short] == [
        "see   gemmpipe show last; gemmpipe report last; gemmpipe diff last shipped",
        "      gemmpipe export last vllm",
    ]
    assert all(line.is_whole for line in short)
    folder = "outputs/runs/tune/2026-11-23_14-26-44-857784/0_a16w16_list"
    assert [line.text for line in command_lines(folder, 100)] == [
        f"see   gemmpipe show {folder}",
        f"      gemmpipe report {folder}",
    ]
    assert see_lines([], 80) == []


def test_the_table_of_memory_has_the_gain_of_each_limit() -> None:
    rows = [
        {"problem": "a", "us": 50.0, "chosen_us": 100.0, "speedup": 2.0, "extra_weight_bytes": 4096},
        {"problem": "a", "us": 10.0, "chosen_us": 100.0, "speedup": 10.0, "extra_weight_bytes": 8192},
        {"problem": "b", "us": 12.5, "chosen_us": 100.0, "speedup": 8.0, "extra_weight_bytes": 4096},
    ]
    options = pd.DataFrame([{**row, "extra_weight_pct": round(row["extra_weight_bytes"] / 20.48)} for row in rows])
    title, head, *lines = memory_option_lines(options, 3, 120)
    assert title == "faster with more memory for weights (stages.select.max_extra_weight_pct=LIMIT): 2 of 3 problems"
    assert head.split()[0] == "LIMIT"
    # 200 %: 2x and 8x; 400 %: 10x, and 8x as before.
    assert [" ".join(line.split()) for line in lines] == [
        "200 2 problems 4.00x (2.00x to 8.00x) 100 us -> 25.0 us +4.00 KiB",
        "400 2 problems 8.94x (8.00x to 10.0x) 100 us -> 11.2 us +4.00 KiB to +8.00 KiB",
    ]
    assert all(len(line) <= 70 for line in memory_option_lines(options, 3, 70)[1:])
    little = {"problem": "a", "us": 9.999, "chosen_us": 100.0, "speedup": 10.001, "extra_weight_bytes": 16384}
    more = pd.concat([options, pd.DataFrame([{**little, "extra_weight_pct": 800}])])
    assert memory_option_lines(more, 3, 120) == [title, head, *lines], "800 % would say the same as 400 %"
    assert memory_option_lines(None, 1, 120) == []
    assert choose_again_line(more, ["reuse=last"]) == (
        "  choose with 200, without timing: "
        "gemmpipe reuse=last 'chain=[select,merge]' stages.select.max_extra_weight_pct=200"
    )
    assert choose_again_line(None, ["reuse=last"]) == choose_again_line(options[:0], ["reuse=last"]) == ""


def test_knobs_are_spelled_for_people() -> None:
    assert short_config(KNOBS) == "64x128x128 group 1 warps 4 stages 3"
    assert short_config('{"method":"mm","split":2}') == "mm split=2"
    assert short_config("[1]") == short_config("{") == ""


def test_experts_that_differ_in_their_routing_show_it() -> None:
    family = load_family("fmoe")
    sizes: dict[str, Scalar] = {"token": 16, "model_dim": 64, "inter_dim": 32, "expert": 8, "topk": 2}
    shared = {"format": "", "gfx": "sm_90", "device": "NVIDIA H200", "kernelName": "k@1", "config": KNOBS}
    rows = []
    for routing in ("uniform", None):
        defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
        key = dict(make_problem(family, {**sizes, "routing": routing}, defaults, "sm_90", "case").key)
        rows.append({**shared, **key, "us": 50.0, "baseline_us": 100.0, "near_ties": 0, **DIRECT})
    both, alone = (choice_lines(product_results(pd.DataFrame(each), family), family, 120) for each in (rows, rows[:1]))
    place = both[0].index("routing")
    assert [line[place:].split()[0] for line in both[1:]] == ["uniform", "-"]
    assert "routing" not in alone[0]


def test_the_choice_is_not_cut_for_sizes_that_are_the_same_in_all_rows() -> None:
    """Without a terminal a table has 80 columns, and with routings the sizes of experts take most of them."""
    family = load_family("fmoe")
    sizes: dict[str, Scalar] = {"token": 4, "model_dim": 1024, "inter_dim": 2048, "expert": 32, "topk": 8}
    shared = {"format": "", "gfx": "sm_90", "device": "NVIDIA H200", "kernelName": "k@1", "config": KNOBS}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    rows = []
    for routing in ("uniform", "/".join(["0.25"] * 32)):
        key = dict(make_problem(family, {**sizes, "routing": routing}, defaults, "sm_90", "case").key)
        rows.append({**shared, **key, "us": 50.0, "baseline_us": 100.0, "near_ties": 0, **DIRECT, "libtype": "triton"})
    products = product_results(pd.DataFrame(rows), family)
    narrow, wide = (choice_lines(products, family, width) for width in (80, 120))
    assert all("  triton 64x128x128 group 1" in line and len(line) <= 80 for line in narrow[1:])
    assert {"token", "routing", "time", "speed-up", "choice"} <= set(narrow[0].split())
    assert set(sizes) <= set(wide[0].split())
