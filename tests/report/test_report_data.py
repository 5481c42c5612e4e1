"""The data of a report: of runs in every state, of damaged journals, and of tables alone."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import rewrite_journal, write_manifest, write_recorded_run

from gemmpipe.cli.main import main
from gemmpipe.core.data import Candidate, Status, Trial
from gemmpipe.core.errors import UserError
from gemmpipe.journal import Journal
from gemmpipe.report.data import TABLE, Excluded, RunData
from gemmpipe.report.html import render
from gemmpipe.report.reading import read_run
from gemmpipe.report.remains import missing
from gemmpipe.report.run_folder import FINISHED, KILLED, RUNNING
from gemmpipe.report.tables import read_tables, table_source
from gemmpipe.report.trial_frame import by_problem, knob_effects

NAME = "a8w8_blockscale_tuned_gemm.csv"


def test_a_journal_alone_is_a_killed_run_with_provisional_choices(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=3, finals=2)
    data = read_run(tmp_path)
    assert data.state == KILLED
    assert data.problems == 3
    assert data.products["chosen_by"].tolist().count("finals") == 2
    assert data.products["chosen_by"].tolist().count("search") == 1
    assert "fastest valid candidate so far" in data.notes[0]
    assert "1 product by the times of the search" in data.notes[0]
    best = min(us for part in by_problem(data.trials).values() for us in part.times_us().values())
    assert data.products["us"].min() == best
    assert all(0 < share < 1 for share in data.products["share"]), "an H200 has a floor"


def test_a_journal_cut_in_the_middle_of_a_row(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=2)
    path = tmp_path / "trials.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    half = len(rows) // 2
    path.write_bytes(b"".join(rows[:half]) + rows[half][: len(rows[half]) // 2])
    data = read_run(tmp_path)
    assert data.state == KILLED
    assert 0 < len(data.trials) < len(rows)
    assert any("1 line of the journal could not be read" in note for note in data.notes)


def test_a_locked_journal_is_a_running_run(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    writer = Journal(tmp_path)
    assert read_run(tmp_path).state == RUNNING
    writer.close()
    assert read_run(tmp_path).state == KILLED


def test_a_run_that_is_running_names_its_device_and_is_not_resumed(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=0)
    writer = Journal(tmp_path)
    text = render(read_run(tmp_path), refresh_s=5)
    writer.close()
    assert "<h1>a8w8_blockscale on NVIDIA H200</h1>" in text
    assert "<b>0</b><span>trials so far</span>" in text
    assert "The journal has no trials yet." in text
    assert "resume=" not in text
    assert f"gemmpipe resume={tmp_path}" in render(read_run(tmp_path)), "killed"


def test_times_of_sessions_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("gemmpipe.journal.writer.time.monotonic", lambda: clock[0])
    write_recorded_run(tmp_path, problems=1, candidates=3)
    first = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])
    journal = Journal(tmp_path)
    for start in (1000.0, 5000.0):
        clock[0] = start
        journal.write("session", device=first["device"], pipeline="tune", overrides=[])
        for after in (2.5, 4.0):
            clock[0] = start + after
            trial = read_run(tmp_path).trials[0].trial
            journal.trial(trial)
    journal.close()
    data = read_run(tmp_path)
    assert [each.t_s for each in data.trials[-4:]] == [2.5, 4.0, 6.5, 8.0]
    assert data.sessions == 3
    assert data.has_times
    assert (data.state, data.wall_s) == (KILLED, 4.0), "of the last session, whenever the file was copied"


def test_a_journal_of_before_has_no_times(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    path = tmp_path / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "t"}) + "\n" for row in rows))
    data = read_run(tmp_path)
    assert not data.has_times
    assert data.trials
    assert all(each.t_s is None for each in data.trials)
    assert any("no times" in note for note in data.notes)


def test_candidates_with_more_weight_memory_are_no_choice_but_are_named(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    problem = read_run(tmp_path).trials[0].trial.problem
    journal = Journal(tmp_path)
    for candidate, us, extra in (
        (Candidate.of("torch", {"method": "copy"}), 0.5, 4096),
        (Candidate.of("same_size", {"method": "mm"}), 0.25, 4096),  # of a comparison: another product
        (Candidate.of("same_size", {"method": "empty"}), 0.125, 0),
        (Candidate.of("b", {}), 0.75, 0),
    ):
        samples = (us,) * 3
        journal.trial(
            Trial(
                stage="bench",
                problem=problem,
                candidate=candidate,
                status=Status.OK,
                launches=3,
                samples_us=samples,
                err_ratio=0.0,
                extra_weight_bytes=extra,
            )
        )
    journal.close()
    data = read_run(tmp_path)
    assert data.products["us"].tolist() == [0.75]
    (gated,) = data.gated
    assert (gated.backend, gated.time_us, gated.chosen_us, gated.extra_weight_bytes) == ("torch", 0.5, 0.75, 4096)


def test_a_manifest_is_read_with_its_resources(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    broken = [{"name": "x"}, {"name": "y", "wall_s": "soon", "busy_s": {}, "idle_s": 0}, 7]
    good = {"name": "cuda:0", "wall_s": 2, "busy_s": {"finals": 1.5}, "idle_s": 0.5}
    write_manifest(tmp_path, resources=[*broken, good], unsolved=["p <script>"], exit_code=1)
    data = read_run(tmp_path)
    assert data.state == FINISHED
    assert [(each.name, each.busy_s) for each in data.resources] == [("cuda:0", {"finals": 1.5})]
    assert data.unsolved == ["p <script>"]


@pytest.mark.parametrize(
    ("shapes", "captured"),
    [
        ({"_target_": "gemmpipe.sources.profile.TraceShapes"}, True),
        ({"_target_": "gemmpipe.sources.table.CsvShapes", "path": "gemmpipe_captured.csv"}, True),
        ({"_target_": "gemmpipe.sources.table.CsvShapes", "path": "mine.csv"}, False),
        ({"_target_": "gemmpipe.sources.model.source.ModelShapes"}, False),
        ("odd", False),
    ],
)
def test_only_recorded_calls_are_a_workload(tmp_path: Path, shapes: object, captured: bool) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=2)
    write_manifest(tmp_path, config={"kernel": {"family": "a8w8_blockscale"}, "shapes": shapes})
    assert read_run(tmp_path).captured is captured


def test_an_unknown_family_is_one_line_and_imports_nothing(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1, candidates=2)
    rewrite_journal(tmp_path, "a8w8_blockscale M=", "antigravity M=")
    write_manifest(tmp_path, config={"kernel": {"family": "antigravity"}})
    with pytest.raises(UserError, match="kernel family 'antigravity' is not known; pass --config-dir"):
        read_run(tmp_path)


def test_a_run_without_problems_has_no_report(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with pytest.raises(UserError, match="no problems in its journal yet"):
        read_run(tmp_path)


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.usefixtures("folder")
def test_a_run_that_times_nothing_is_one_line(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A list of problems and a merge: what they are left with is not left by a budget."""
    Path("a.csv").write_text("gfx,cu_num,M,N,K,libtype,us\nsm_90,132,1,64,64,torch,4\n")
    assert main(["capture", "kernel=a16w16", "shapes=csv", "shapes.path=a.csv"]) == 0
    assert main(["merge", "kernel=a16w16", "inputs=[a.csv]", "output=b.csv"]) == 0
    for pipeline in ("capture", "merge"):
        (run,) = Path("outputs/runs", pipeline).iterdir()
        capfd.readouterr()
        assert main([command, str(run)]) == 2
        reading, line = capfd.readouterr().err.splitlines()
        assert reading == f"{command}: reading {run}"
        assert line.startswith(f"gemmpipe: {run}: a run of {pipeline} times nothing (its tables: ")
        assert line.endswith("); expected one of tune or compare")


def _table(*paths: Path) -> RunData:
    return read_tables([table_source(path, None) for path in paths])


def test_the_shipped_table_has_speed_ups_floors_and_provenance(h200_tables: Path) -> None:
    data = _table(h200_tables / NAME)
    rows = (h200_tables / NAME).read_text().count("\n") - 1
    assert (data.state, len(data.products), data.problems) == (TABLE, rows, rows)
    assert data.products["device"].unique().tolist() == ["NVIDIA H200"]
    assert (data.products["share"].astype(float) < 1.0).all(), "nothing is faster than the floor"
    assert data.products["speedup"].notna().all()
    assert set(data.provenance) >= set(data.products["run_id"].unique())
    assert not data.trials


def test_two_tables_of_one_kernel_are_told_apart_by_device(h200_tables: Path, tmp_path: Path) -> None:
    shipped, other = h200_tables / NAME, tmp_path / NAME
    other.write_text(shipped.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    data = _table(shipped, other)
    assert any(text.endswith(", NVIDIA H100") for text in data.products["shape"])
    assert data.products["shape"].nunique() == 2 * _table(shipped).products["shape"].nunique()


def test_shapes_of_experts_name_each_type_once(h200_tables: Path) -> None:
    path = h200_tables / "tuned_fmoe.csv"
    data = _table(path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    types = {"torch.bfloat16": "bfloat16", "torch.float8_e4m3fn": "float8_e4m3fn, per_1x128"}
    sizes = ("model_dim", "inter_dim", "expert", "topk")
    wanted = {f"{' x '.join(row[name] for name in sizes)}, {types[row['q_dtype_w']]}" for row in rows}
    assert set(data.products["shape"]) == wanted
    assert len(wanted) > 10
    assert "model_dim x inter_dim x expert x topk" in render(data)


def _copied_with(table: Path, to: Path, *changes: dict[str, str], extra: str = "") -> RunData:
    """The data of a table with its first row once for each of `changes`, and an `extra` column."""
    with table.open(newline="") as stream:
        first = next(csv.DictReader(stream))
    with (to / NAME).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*first, *([extra] if extra else [])])
        writer.writeheader()
        writer.writerows({**first, **change} for change in changes)
    return _table(to / NAME)


def test_products_without_a_floor_do_not_hide_the_share_of_the_others(h200_tables: Path, tmp_path: Path) -> None:
    data = _copied_with(h200_tables / NAME, tmp_path, {}, {"gfx": "cpu_avx512", "device": "a CPU", "M": "2"})
    assert sum(share is not None and share > 0 for share in data.products["share"]) == 1
    text = render(data)
    assert re.search(r"<b>\d\d %</b><span>share of the floor, geometric mean</span>", text)
    assert "over the products of all 2 devices together" in text


def test_times_of_launches_back_to_back_are_said(h200_tables: Path, tmp_path: Path) -> None:
    policies = ("graph cold interleaved", "graph cold interleaved separate", "host interleaved")
    changes = ({"M": str(m), "policy": policy} for m, policy in enumerate(policies, 1))
    text = render(_copied_with(h200_tables / NAME, tmp_path, *changes))
    assert "1 product timed with launches of one kernel back to back" in text
    assert "back to back" not in render(_table(h200_tables / NAME))


def test_of_rows_of_one_key_the_one_that_is_used_is_reported(h200_tables: Path, tmp_path: Path) -> None:
    slow, fast, shared = {"us": "20"}, {"us": "6.5"}, {"us": "1", "policy": "graph shared_gpu"}
    data = _copied_with(h200_tables / NAME, tmp_path, slow, fast, shared, {**slow, "cu_num": "114"})
    assert (data.problems, sorted(data.products["us"])) == (2, [6.5, 20.0])
    assert f"{NAME}: 2 rows left out: another row of the same key has precedence." in data.notes


def test_each_device_model_that_rows_of_one_key_name_keeps_its_own(h200_tables: Path, tmp_path: Path) -> None:
    rows = [{"device": device, "us": us} for device in ("NVIDIA H100", "NVIDIA H200") for us in ("9", "7")]
    data = _copied_with(h200_tables / NAME, tmp_path, *rows)
    assert sorted(zip(data.products["device"], data.products["us"], strict=True)) == [
        ("NVIDIA H100", 7.0),
        ("NVIDIA H200", 7.0),
    ]


def test_the_row_of_a_bucket_does_not_replace_that_of_a_product(h200_tables: Path, tmp_path: Path) -> None:
    data = _copied_with(
        h200_tables / NAME, tmp_path, {"us": "6.5", "format": ""}, {"us": "1", "format": "vllm"}, extra="format"
    )
    assert data.products["us"].tolist() == [6.5]
    assert not any("left out" in note for note in data.notes if note.startswith(NAME))


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path) -> None:
    odd = tmp_path / "shopping.csv"
    odd.write_text("milk,eggs\n1,2\n")
    with pytest.raises(UserError, match=r"no table's name; expected kernel=FAMILY, or a name such as"):
        table_source(odd, None)
    with pytest.raises(UserError, match=r"shopping.csv:1: "):
        read_tables([table_source(odd, "a16w16")])


def test_effects_of_knobs_are_of_the_best_with_each_value(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=2)
    parts = by_problem(read_run(tmp_path).trials)
    effects = dict(knob_effects(parts.values()))
    assert "BLOCK_SIZE_N" in effects
    for values in effects.values():
        assert all(each.slowdown >= 1 for each in values)
        assert sum(each.wins for each in values) >= 1
    name, value = "num_warps", effects["num_warps"][0].value
    ratios = []
    for part in parts.values():
        times = part.times_us()
        having = [us for candidate, us in times.items() if str(candidate.knobs.get(name)) == value]
        ratios.append(min(having) / min(times.values()))
    expected = (ratios[0] * ratios[1]) ** 0.5
    assert effects["num_warps"][0].slowdown == pytest.approx(expected)


def test_gains_with_more_weight_memory_are_read_from_the_run(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=2)
    write_manifest(tmp_path)
    names = read_run(tmp_path).products["problem"].tolist()
    header = "problem,libtype,config,us,chosen_us,extra_weight_bytes,extra_weight_pct"
    rows = [
        f"{names[0]},torch,{{}},4.0,8.0,1024,100",
        f"{names[0]},torch,{{}},2.0,8.0,2048,200",
        f"{names[1]},onednn,{{}},1.0,8.0,64,7",
        f"{names[1]},onednn,{{}},soon,8.0,64,7",
    ]
    (tmp_path / "memory_options.csv").write_text("\n".join([header, *rows, ""]))
    data = read_run(tmp_path)
    assert [(each.problem, each.time_us, each.limit_pct) for each in data.gated] == [
        (names[1], 1.0, 7),
        (names[0], 2.0, 200),
    ]
    text = render(data)
    assert "stages.select.max_extra_weight_pct=200" in text
    assert "2 products with a faster candidate that takes more weight memory than allowed" in text
    where = text[text.index('<section id="where"') :].partition("</section>")[0]
    table = where.partition("=LIMIT): 2 of 2 products")[2].replace("&gt;", ">")
    cells = re.findall("<td[^>]*>(.*?)</td>", table)
    assert cells[:2] == ["7", "1 problem"]
    assert cells[5:10] == [
        "100",
        "2 problems",
        "4.00x  (2.00x to 8.00x)",
        "8.00 us -> 2.00 us",
        "+64 B to +1.00 KiB",
    ]
    assert cells[10:] == ["200", "2 problems", "5.66x  (4.00x to 8.00x)", "8.00 us -> 1.41 us", "+64 B to +2.00 KiB"]


def test_products_that_a_budget_left_are_told_with_the_command_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / """it's a "test" dir"""
    folder.mkdir()
    write_recorded_run(folder, problems=3)
    write_manifest(folder)
    data = read_run(folder)
    rows = data.products.head(1).rename(columns={"library_us": "baseline_us"})
    rows.assign(format="", policy="graph").to_csv(folder / "selections.csv", index=False)
    data = read_run(folder)
    assert (data.state, data.problems, len(data.products)) == (FINISHED, 3, 1)
    printed = [each for each in missing(data) if each[0] == "timing"]
    [(_, left, command)] = printed
    assert left == "2 products left by the run's budget"
    assert shlex.split(command) == ["gemmpipe", f"resume={folder}"]


@pytest.mark.parametrize(
    ("command", "reason", "change"),
    [
        (
            "gemmpipe tune kernel=a8w8 'backend=[deepgemm]' output=t",
            "no NVIDIA GPU",
            "kernel=a8w8 'backend=[deepgemm]'",
        ),
        ("gemmpipe tune backend=quack", "the package quack", "kernel=a8w8_blockscale backend=quack"),
        ("gemmpipe 'broken", "the package quack", "kernel=a8w8_blockscale"),
        ("gemmpipe tune backend=quack", "no GPU: Triton compiles for GPUs", None),
        ("gemmpipe tune backend=quack", "not for this product: scales", None),
    ],
)
def test_the_doctor_is_asked_about_the_backends_of_the_run(
    command: str, reason: str, change: str | None, tmp_path: Path
) -> None:
    write_recorded_run(tmp_path, problems=1)
    lost = Excluded(backend="quack", reason=reason, status="unsupported", count=1, example=reason)
    data = replace(read_run(tmp_path), command=command, excluded=[lost])
    (found,) = [each for what, _, each in missing(data) if what == "candidates of quack"]
    other = "tune on a GPU" if reason.startswith("no GPU") else ""
    assert found == (f"gemmpipe doctor {change}" if change else other)
