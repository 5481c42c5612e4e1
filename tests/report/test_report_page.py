"""The page of a report: its sections, its size, and that no text of a run becomes markup."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import HOSTILE, SECTIONS, rewrite_journal, write_manifest, write_recorded_run

from gemmpipe.core.data import canonical_json
from gemmpipe.report.data import TimedTrial
from gemmpipe.report.html import MAX_BYTES, render
from gemmpipe.report.reading import read_run
from gemmpipe.report.tables import read_tables, table_source
from gemmpipe.report.trial_frame import ProblemTrials, memory_reason
from gemmpipe.report.trust import runner_up_ratio

NAME = "a8w8_blockscale_tuned_gemm.csv"


class Page(HTMLParser):
    """The elements of a page: sections, ids, scripts, attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[tuple[str, str]] = []
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self._script = dict(attrs).get("type") or ""
            self.scripts.append((self._script, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)

    def values(self, tag: str, name: str) -> list[str]:
        return [value for each, attribute, value in self.attributes if (each, attribute) == (tag, name)]


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    write_recorded_run(tmp_path)
    write_manifest(tmp_path)
    (tmp_path / "trials.csv").write_text(
        "problem,candidate,libtype,status,launches,error\np,c,triton,unsupported,0,no room: 300 KiB\n"
    )
    return tmp_path


def test_a_run_has_every_section_and_its_data_as_csv(recorded_run: Path) -> None:
    page = Page(render(read_run(recorded_run)))
    assert set(page.values("section", "id")) >= SECTIONS
    links = page.values("a", "data-csv")
    assert len(links) == len(set(links)) >= 10
    assert set(links) == {each for each in page.values("script", "id") if each.startswith("csv-")}
    for kind, text in page.scripts:
        if kind == "application/json":
            content = json.loads(text)
            assert isinstance(content, dict) or content.count("\n") >= 2, "a header and a row"
    assert [link for link in page.values("a", "href") if link.startswith("#product-")], "cells lead to candidates"


def test_a_table_has_the_sections_that_it_can_fill(h200_tables: Path) -> None:
    text = render(read_tables([table_source(h200_tables / NAME, None)]))
    page = Page(text)
    assert page.values("section", "id") == [
        "summary",
        "where",
        "time",
        "ties",
        "winners",
        "workload",
        "missing",
        "provenance",
    ]
    assert "this is no workload" in text.replace("so this", "this")
    assert "The lowest share of the floor: M " in text
    assert "gemmpipe report DIR" in text
    assert len(text.encode()) < 1_000_000


def test_a_page_loads_nothing_and_runs_one_script(recorded_run: Path) -> None:
    text = render(read_run(recorded_run))
    page = Page(text)
    (policy,) = [value for value in page.values("meta", "content") if "default-src" in value]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert [kind for kind, _ in page.scripts].count("") == 1
    assert not page.values("script", "src") + page.values("link", "href") + page.values("img", "src")
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_the_head_of_an_unfinished_run_has_the_number_of_its_problems(recorded_run: Path) -> None:
    data = read_run(recorded_run)
    assert f"(run, {data.state_word})" in render(replace(data, problems=len(data.products)))
    unsolved = replace(data, problems=len(data.products) + 1_000)
    expected = f"(run, {data.state_word}: {len(data.products):,} of {unsolved.problems:,} problems)"
    assert expected in render(unsolved)


def test_only_a_watched_page_is_loaded_again(recorded_run: Path) -> None:
    data = read_run(recorded_run)
    assert 'http-equiv="refresh"' not in render(data)
    assert '<meta http-equiv="refresh" content="5">' in render(data, refresh_s=5)


def _plain(page: Page) -> tuple[set[str], set[str]]:
    """The kinds of elements, and of attributes, that a page uses."""
    return set(page.tags), {f"{tag}.{name}" for tag, name, _ in page.attributes}


def test_hostile_names_stay_text(recorded_run: Path) -> None:
    before = Page(render(read_run(recorded_run)))
    for old in ('"backend":"triton"', '"backend":"gluon"'):
        rewrite_journal(recorded_run, old, f'"backend":{json.dumps(f"x{HOSTILE}")}')
    rewrite_journal(recorded_run, "num_warps", f"n{HOSTILE}".replace('"', '\\"'))
    rewrite_journal(recorded_run, "GPU-0", f"GPU{HOSTILE}".replace('"', '\\"'))
    rewrite_journal(recorded_run, "NVIDIA H200", f"H{HOSTILE}".replace('"', '\\"'))
    busy = {"name": HOSTILE, "wall_s": 2, "busy_s": {HOSTILE: 1.5}, "idle_s": 0.5}
    provenance = {HOSTILE: {HOSTILE: HOSTILE}}
    config = {"kernel": {"family": "a8w8_blockscale"}, HOSTILE: HOSTILE}
    names = {"unsolved": [HOSTILE], "undecided": [HOSTILE], "files": [HOSTILE], "pipeline": HOSTILE}
    write_manifest(recorded_run, resources=[busy], provenance=provenance, config=config, overrides=[HOSTILE], **names)
    row = f"p,c,{json.dumps(HOSTILE).replace(chr(92) + chr(34), chr(34) * 2)},unsupported,0,<b>: x\n"
    (recorded_run / "trials.csv").write_text(f"problem,candidate,libtype,status,launches,error\n{row}")
    data = read_run(recorded_run)
    assert len(data.trials) > 100, "the names are in the journal that is read"
    text = render(data)
    page = Page(text)
    assert set(page.tags) <= {*_plain(before)[0], "ul", "li", "details"}
    assert _plain(page)[1] <= {*_plain(before)[1], "ul.class"}
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert" not in text
    assert "<img" not in text


def test_cells_that_spreadsheets_run_have_an_apostrophe(recorded_run: Path) -> None:
    write_manifest(recorded_run, resources=[{"name": "=cmd()", "wall_s": 2, "busy_s": {"@x": 2}, "idle_s": 0}])
    page = Page(render(read_run(recorded_run)))
    (wall,) = [text for kind, text in page.scripts if kind and text.startswith('"resource,activity')]
    assert json.loads(wall).splitlines()[1].startswith("'=cmd(),'@x,")


@pytest.mark.slow
def test_a_table_of_many_rows_gives_a_page_below_the_limit(h200_tables: Path, tmp_path: Path) -> None:
    lines = (h200_tables / NAME).read_text().splitlines(keepends=True)
    path = tmp_path / NAME
    row = lines[1]
    many = [
        row.replace("sm_90,132,1,1280,8192", f"sm_90,132,{m},{n},8192", 1)
        for n in range(8, 2408, 8)
        for m in range(1, 41)
    ]
    path.write_text("".join([lines[0], *many]))
    data = read_tables([table_source(path, None)])
    assert len(data.products) == 12_000
    text = render(data)
    assert len(text.encode()) < MAX_BYTES
    assert "of 12,000 products" in text


@pytest.mark.slow
def test_a_run_of_many_trials_gives_a_page_below_the_limit(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=12, candidates=700)
    text = render(read_run(tmp_path))
    assert len(text.encode()) < MAX_BYTES
    assert len(Page(text).values("option", "value")) >= 4


def test_a_product_says_that_faster_candidates_need_more_memory(tmp_path: Path) -> None:
    """In the same terms as `gemmpipe show`, with the memory in the texts of the candidate."""
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    data = read_run(tmp_path)
    finals = sorted((each for each in data.trials if each.trial.stage == "bench"), key=lambda e: e.trial.time_us or 0)
    fastest, chosen = finals[0].trial, finals[1].trial
    copy = replace(finals[0], trial=replace(fastest, extra_weight_bytes=12 << 20))
    trials = [copy if each is finals[0] else each for each in data.trials]
    products = data.products.assign(libtype=chosen.candidate.backend, config=canonical_json(chosen.candidate.knobs))
    reason = memory_reason([copy.trial, chosen], products.to_dict("records")[0])
    assert "+12.0 MiB for the weight" in reason
    section = render(replace(data, trials=trials, products=products))
    assert f"<p>{reason}.</p>" in section
    assert re.search(r'data-tip="1\. [^"]*, \+12\.0 MiB for the weight"', section)
    assert reason not in render(data), "nothing is said where the fastest is the choice"


def test_library_methods_are_no_knobs_of_own_kernels(recorded_run: Path) -> None:
    rewrite_journal(recorded_run, '"backend":"gluon","knobs":{', '"backend":"torch","knobs":{"method":"mm",')
    text = render(read_run(recorded_run))
    section = text[text.index('<section id="knobs"') :].partition("</section>")[0]
    assert 'data-name="torch"' in text
    assert "num_warps" in section
    assert "method" not in section


def test_the_copy_of_scales_in_a_library_time_is_said(h200_tables: Path) -> None:
    text = render(read_tables([table_source(h200_tables / NAME, None)]))
    assert "this copy is in its time" in text
    plain = render(read_tables([table_source(h200_tables / "bf16_tuned_gemm.csv", None)]))
    assert "copies the scales" not in plain


def test_a_bar_of_several_processes_is_the_mean_of_one(recorded_run: Path) -> None:
    slots = {"name": "compile slots (4)", "wall_s": 40.0, "busy_s": {"compile": 24.0, "start": 0.1}, "idle_s": 15.9}
    write_manifest(recorded_run, resources=[slots])
    text = render(read_run(recorded_run))
    assert 'data-tip="compile slots (4): compile 6 s"' in text
    assert 'data-tip="compile slots (4): other 0.025 s"' in text


def test_near_ties_are_paired_by_round(tmp_path: Path) -> None:
    """Early rounds of a runner-up that left are compared with the same rounds of the choice, not with its median."""
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    data = read_run(tmp_path)
    (row,) = data.products.to_dict("records")
    chosen, other = [each.trial for each in data.trials if each.trial.stage == "bench"][:2]
    pair = [replace(chosen, samples_us=(10.0,) * 4 + (20.0,) * 4), replace(other, samples_us=(11.0,) * 4)]
    trials = [TimedTrial(trial=trial, t_s=None) for trial in pair]
    part = ProblemTrials(problem=row["problem"], search=[], finals=trials)
    row |= {"libtype": chosen.candidate.backend, "config": canonical_json(chosen.candidate.knobs)}
    row |= {"us": 15.0, "runner_up_us": 11.0, "noise_pct": 1.0, "runner_up": "other@1"}
    ratio, name = runner_up_ratio(row, part)
    assert (ratio.median, ratio.low, name) == (pytest.approx(1.1), pytest.approx(1.1), other.candidate.backend)
    assert runner_up_ratio(row, None)[0].median == pytest.approx(11 / 15)


def test_finalists_of_one_product_are_named_by_what_they_run(tmp_path: Path) -> None:
    write_recorded_run(tmp_path, problems=1)
    write_manifest(tmp_path)
    data = read_run(tmp_path)
    finals = [each.trial.candidate for each in data.trials if each.trial.stage == "bench"]
    _, _, rest = render(data).partition(">Finals by round")
    (names,) = re.findall(r'<div class="legend">(.*?)</div>', rest)[:1]
    shown = re.findall(r"</svg>([^<]+)</span>", names)
    assert len(shown) == len(set(shown)) == len(finals)
    for candidate in finals:
        knobs = candidate.knobs
        tile = "x".join(str(knobs[f"BLOCK_SIZE_{side}"]) for side in "MNK")
        assert any(name.startswith(f"{candidate.backend} {tile}") for name in shown)
