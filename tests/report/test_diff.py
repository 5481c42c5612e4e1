"""Comparison of choices: verdicts by interval, swapped sides, devices and timing methods kept apart."""

import csv
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped_tables
from gemmpipe.report.choices import Choice, ChoiceTable, key_columns, read_choices, read_sides
from gemmpipe.report.diff import FASTER, SAME, SLOWER, UNSURE, DiffRules, compare
from gemmpipe.report.diff_text import as_json, knobs_text, markdown_lines, note_lines, summary_line, text_lines

RULES = DiffRules()
SHIPPED = shipped_tables() / "a8w8_blockscale_tuned_gemm.csv"


def _choice(m: int = 4, time_us: float = 10.0, noise_pct: float | None = 1.0, **changes: str) -> Choice:
    facts = {"gfx": "sm_90", "cu_num": "132", "device": "NVIDIA H200", "policy": "graph cold", "run_id": "", **changes}
    config = facts.pop("config", '{"BLOCK_SIZE_M":64}')
    key = (("K", "8192"), ("M", str(m)), ("N", "1280"))
    return Choice(
        key=key, time_us=time_us, noise_pct=noise_pct, backend="gluon", kernel_name="g", config=config, **facts
    )


def _table(*choices: Choice, kernel: str = "") -> ChoiceTable:
    return ChoiceTable(name="a table", path=Path("table.csv"), kernel=kernel, choices=choices)


_TIMES = st.floats(min_value=0.5, max_value=1e6, allow_nan=False)
_NOISE = st.none() | st.floats(min_value=0, max_value=200, allow_nan=False)
_ROWS = st.dictionaries(st.integers(1, 4096), st.tuples(_TIMES, _NOISE, st.sampled_from("ab")), min_size=1, max_size=8)


def _of(rows: dict[int, tuple[float, float | None, str]], run_id: str) -> ChoiceTable:
    return _table(*(_choice(m, us, noise, run_id=run_id, config=winner) for m, (us, noise, winner) in rows.items()))


@given(rows=_ROWS)
def test_a_table_against_itself_is_all_same(rows: dict[int, tuple[float, float | None, str]]) -> None:
    side = _of(rows, "one")
    found = compare(side, side, RULES)
    assert found.counts == {FASTER: 0, SLOWER: 0, SAME: len(rows), UNSURE: 0}
    assert (found.new, found.lost, found.changed_winners, found.slower_by(0)) == ((), (), 0, [])
    assert all(each.speedup.mean == pytest.approx(1.0) for each in found.regimes)


@given(left=_ROWS, right=_ROWS)
def test_swapped_sides_swap_faster_and_slower(
    left: dict[int, tuple[float, float | None, str]], right: dict[int, tuple[float, float | None, str]]
) -> None:
    a, b = _of(left, "one"), _of(right, "two")
    forth, back = compare(a, b, RULES), compare(b, a, RULES)
    assert forth.counts[FASTER] == back.counts[SLOWER]
    assert forth.counts[SLOWER] == back.counts[FASTER]
    assert (forth.counts[SAME], forth.counts[UNSURE]) == (back.counts[SAME], back.counts[UNSURE])
    assert ({c.key for c in forth.new}, {c.key for c in forth.lost}) == (
        {c.key for c in back.lost},
        {c.key for c in back.new},
    )
    assert forth.changed_winners == back.changed_winners
    assert sum(forth.counts.values()) == len(set(left) & set(right))
    for line in text_lines(forth, 80, 5):
        assert len(line) <= 80 or line == summary_line(forth)


@pytest.mark.parametrize(
    ("after_us", "noise_pct", "verdict"),
    [
        (10.0, 0.1, SAME),
        (10.05, 0.1, SAME),
        (10.5, 1.0, SLOWER),
        (9.5, 1.0, FASTER),
        (10.5, 5.0, UNSURE),
        (10.5, None, UNSURE),  # 3 % are assumed on both sides
        (11.0, None, SLOWER),
        (1000.0, 400.0, SLOWER),  # noise above 90 % counts as 90 %
    ],
)
def test_a_verdict_follows_from_both_intervals(after_us: float, noise_pct: float | None, verdict: str) -> None:
    before, after = _choice(noise_pct=noise_pct, run_id="1"), _choice(time_us=after_us, noise_pct=noise_pct, run_id="2")
    (pair,) = compare(_table(before), _table(after), RULES).pairs
    assert pair.verdict == verdict
    assert pair.low <= pair.ratio <= pair.high


def test_the_gate_counts_what_is_slower_for_certain() -> None:
    found = compare(_table(_choice(run_id="1")), _table(_choice(time_us=10.5, run_id="2")), RULES)
    assert len(found.slower_by(2)) == 1
    assert found.slower_by(4) == []  # 5 % slower, but at least 2.9 %


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H100"}, "devices NVIDIA H200 and NVIDIA H100"),
        ({"gfx": "gfx942", "cu_num": "304"}, "devices NVIDIA H200 and NVIDIA H200"),
        ({"policy": "replayed 2026-11-21"}, "timing methods 'graph cold' and 'replayed 2026-11-21'"),
    ],
)
def test_other_devices_and_methods_are_kept_apart_unless_asked(change: dict[str, str], reason: str) -> None:
    before, after = _table(_choice()), _table(_choice(**change))
    found = compare(before, after, RULES)
    assert found.pairs == ()
    assert [f"not compared: 1 product, {reason}; across=true compares them"] == text_lines(found, 120, 9)[4:]
    across = compare(before, after, DiffRules(across=True))
    assert len(across.pairs) == 1
    assert f"warning: 1 product compared across {reason}" in text_lines(across, 120, 9)


def test_a_row_without_a_name_of_its_device_is_of_any() -> None:
    assert len(compare(_table(_choice(device="")), _table(_choice()), RULES).pairs) == 1


def test_rows_are_paired_by_device() -> None:
    h200, h100 = _choice(), _choice(device="NVIDIA H100", cu_num="114", time_us=20.0)
    found = compare(_table(h200), _table(h100, h200), RULES)
    assert [pair.after for pair in found.pairs] == [h200]
    assert found.new == (h100,)


def test_other_kernels_are_refused() -> None:
    with pytest.raises(UserError, match="A is of kernel=a16w16, B of kernel=a8w8; expected one kernel"):
        compare(_table(_choice(), kernel="a16w16"), _table(_choice(), kernel="a8w8"), RULES)
    with pytest.raises(UserError, match="no timed row"):
        compare(_table(), _table(_choice()), RULES)


def test_the_shipped_table_is_read_with_its_intervals(h200_tables: Path) -> None:
    table = h200_tables / SHIPPED.name
    found = read_choices(str(table), "diff")
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(found.choices) == len(rows)
    first, row = found.choices[0], rows[0]
    assert dict(first.key) == {n: row[n].removeprefix("torch.") for n in ("M", "N", "K", "dtype", "outdtype")}
    low, high = float(row["ratio_low"]), float(row["ratio_high"])
    assert first.noise_pct == pytest.approx(100 * (high - low) / (high + low))
    assert first.rows == int(row["M"])


def test_shipped_is_the_table_with_products_in_common(tmp_path: Path) -> None:
    copy = tmp_path / "mine.csv"
    copy.write_text("".join(SHIPPED.read_text().splitlines(keepends=True)[:4]))
    mine, shipped = read_sides(str(copy), "shipped", "diff")
    assert shipped.path == SHIPPED
    found = compare(mine, shipped, RULES)
    assert (found.counts[SAME], len(found.lost)) == (3, 0)
    assert len(found.new) == len(shipped.choices) - 3


def test_shipped_is_found_for_a_run_with_an_output_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "selections.csv").write_text("".join(SHIPPED.read_text().splitlines(keepends=True)[:4]))
    manifest = {"config": {"kernel": {"family": "a8w8_blockscale"}}, "files": ["mine.csv"], "exit_code": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "trials.jsonl").write_text("")
    _, shipped = read_sides(str(tmp_path), "shipped", "diff")
    assert shipped.path == SHIPPED


def test_a_shipped_table_without_a_common_product_is_named(tmp_path: Path) -> None:
    lines = SHIPPED.read_text().splitlines(keepends=True)[:2]
    first = next(csv.DictReader(lines))
    other = lines[1].replace(f"{first['cu_num']},{first['M']},", f"{first['cu_num']},77777,", 1)
    (tmp_path / "selections.csv").write_text(lines[0] + other)
    manifest = {"config": {"kernel": {"family": "a8w8_blockscale"}}, "files": ["mine.csv"], "exit_code": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "trials.jsonl").write_text("")
    with pytest.raises(UserError, match=rf"shipped: {SHIPPED.name}, \w+_h100.csv has no product in common with"):
        read_sides(str(tmp_path), "shipped", "diff")


@pytest.mark.parametrize("tag", ["", "_h100"])
def test_the_shipped_table_of_the_same_device_model_is_compared(tag: str, tmp_path: Path) -> None:
    """Two shipped tables of one kernel have products in common."""
    shipped = SHIPPED.with_name(f"{SHIPPED.stem}{tag}.csv")
    (tmp_path / SHIPPED.name).write_text("".join(shipped.read_text().splitlines(keepends=True)[:9]))
    _, found = read_sides(str(tmp_path / SHIPPED.name), "shipped", "diff")
    assert found.path == shipped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no columns 'us' and 'libtype'"),
        ("libtype,us\ntorch,1\n", "no key columns such as M, N, K"),
        ("M,N,K,libtype,us\n1,2,3,torch\n", ":2: 4 cells, expected 5"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "no.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_choices(str(tmp_path / "no.csv"), "diff")


def test_rows_without_a_time_are_left_out(tmp_path: Path) -> None:
    lines = [
        "gfx,cu_num,M,N,K,libtype,us,config",
        *(f"sm_90,132,{m},8,8,torch,{us},{{}}" for m, us in ((1, 5), (2, -1))),
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (choice,) = read_choices(str(tmp_path / "t.csv"), "diff").choices
    assert (choice.rows, choice.time_us, choice.noise_pct) == (1, 5.0, None)


_ROWS_OF_ONE_KEY = [("p", 20.0), ("p", 6.5), ("p shared_gpu", 1.0)]


@pytest.mark.parametrize("rows", [*itertools.permutations(_ROWS_OF_ONE_KEY)])
def test_of_rows_of_one_key_the_one_that_is_used_is_compared(
    rows: tuple[tuple[str, float], ...], tmp_path: Path
) -> None:
    header = "gfx,cu_num,M,N,K,libtype,us,config,policy,run_id,device\n"
    for name, found in (("one", [("p", 6.5)]), ("three", rows)):
        lines = (f"sm_90,132,4,8,8,torch,{us},{{}},{policy},r{us},NVIDIA H200\n" for policy, us in found)
        other_units = "sm_90,114,4,8,8,torch,30,{},p,r,NVIDIA H200\n"
        (tmp_path / f"{name}.csv").write_text("".join([header, *lines, other_units]))
    before, after = read_sides(str(tmp_path / "one.csv"), str(tmp_path / "three.csv"), "diff")
    assert before.choices == after.choices
    found = compare(before, after, RULES)
    assert (found.counts[SAME], found.new, found.lost, found.not_compared) == (2, (), (), ())


def test_the_row_of_a_bucket_does_not_compete_with_that_of_a_product(tmp_path: Path) -> None:
    header = "problem,format,bucket,gfx,cu_num,libtype,us,config,policy,M,N\n"
    rows = (f"p,{kind},{kind},sm_90,132,torch,{us},{{}},p,4,8\n" for kind, us in (("", 6.5), ("vllm", 1.0)))
    (tmp_path / "selections.csv").write_text("".join([header, *rows]))
    (choice,) = read_choices(str(tmp_path / "selections.csv"), "diff").choices
    assert choice.time_us == 6.5


def test_keys_of_runs_come_after_and_of_tables_before_the_results() -> None:
    assert key_columns(["gfx", "cu_num", "M", "N", "libtype", "us", "my_comment"]) == ["M", "N"]
    assert key_columns(["problem", "format", "gfx", "libtype", "us", "M", "N"]) == ["M", "N"]


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_none_is_cut(width: int) -> None:
    before = _table(*(_choice(m, 10.0) for m in (1, 4, 8)), _choice(16, policy="host"))
    after = _table(*(_choice(m, 12.0, run_id="b", config="{}") for m in (4, 8)), _choice(16), _choice(32))
    lines = text_lines(compare(before, after, RULES), width, 20)
    assert [line for line in lines if len(line) > width or line != line.rstrip()] == []
    text = " ".join(" ".join(lines).split())
    assert summary_line(compare(before, after, RULES)) in text
    assert "across=true compares them" in text


def test_sides_without_a_common_product_name_their_devices() -> None:
    there = _table(_choice(64, gfx="cpu", device="AMD EPYC"))
    text = "\n".join(text_lines(compare(_table(_choice(4)), there, RULES), 120, 20))
    assert "the sides have no product in common (NVIDIA H200; AMD EPYC)" in text


def test_a_large_speed_up_has_three_digits() -> None:
    lines = text_lines(compare(_table(_choice(4, 7520.0)), _table(_choice(4, 42.5)), RULES), 120, 20)
    assert any("177x" in line.split() for line in lines)
    assert not any("176.9" in line for line in lines)


def test_json_and_markdown_have_every_product_and_escape_names() -> None:
    bad = _choice(time_us=20.0, config='{"NAME":"<b>|x|</b>"}', run_id="2")
    found = compare(_table(_choice(run_id="1")), _table(bad), RULES)
    content = json.loads(as_json(found, 2.0))
    assert content["counts"] == {"faster": 0, "slower": 1, "same": 0, "unsure": 0}
    assert content["products"][0]["after_us"] == 20.0
    assert content["gate"] == {"fail_above_pct": 2.0, "failed": [dict(bad.key)]}
    text = "\n".join(markdown_lines(found, 9))
    assert "<b>" not in text
    assert "\\|x\\|" in text


def test_knobs_of_a_damaged_cell_are_left_out() -> None:
    assert knobs_text('{"BLOCK_SIZE_M":16,"BLOCK_SIZE_N":64,"num_warps":4,"method":"mm"}') == "16x64 w4 mm"
    assert knobs_text("[1]") == knobs_text("no json") == knobs_text("") == ""


@pytest.mark.parametrize("policies", [("host shared_cpu", "host shared_cpu"), ("graph shared_gpu", "graph shared_gpu")])
def test_times_of_a_shared_device_are_never_sure(policies: tuple[str, str]) -> None:
    """Other load is unknown: twice the time may be due to the machine, and a gate must not fail."""
    before, after = (_choice(4, us, policy=policy) for us, policy in zip((10.0, 500.0), policies, strict=True))
    found = compare(_table(before), _table(after), DiffRules())
    assert found.counts["unsure"] == 1
    assert found.slower_by(2) == []
    assert "1 product was timed while other processes used the device: unsure" in note_lines(found)


@pytest.mark.parametrize(
    ("gfx", "given_pct", "verdict"),
    [("sm_90", None, SLOWER), ("cpu_avx512", None, UNSURE), ("cpu_avx512", 3.0, SLOWER), ("sm_90", 30.0, UNSURE)],
)
def test_times_without_an_interval_on_a_cpu_are_less_sure(gfx: str, given_pct: float | None, verdict: str) -> None:
    before, after = _table(_choice(noise_pct=None, gfx=gfx)), _table(_choice(noise_pct=None, gfx=gfx, time_us=12.7))
    found = compare(before, after, DiffRules(default_noise_pct=given_pct))
    assert [pair.verdict for pair in found.pairs] == [verdict]
    assumed = given_pct or (3 if gfx == "sm_90" else 30)
    assert f"2 rows without an interval: {assumed:g} % noise assumed (default_noise)" in text_lines(found, 120, 9)
