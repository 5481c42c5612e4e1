"""`gemmpipe merge`, typed as a user types it: ours and aiter's tables, errors, reports, sidecars."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pairwise import few

from gemmpipe.cli.main import main
from gemmpipe.family import load_family
from gemmpipe.tables import store

HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
AITER = f"""{HEADER},_tag
gfx942,304,1,3072,1536,ck,8,0,6.6154,one,1.43,714.43,0.0,
gfx942,304,2,3072,1536,ck,8,0,0,placeholder,0,0,0.0,slow
gfx942,304,4,3072,1536,ck,8,0,9.5,three,1.43,714.43,0.5%,mine
"""
OLD = """cu_num,m, n ,k,libtype,us,kernelName
304,4,3072,1536,cktile,9.25,other
304,2,3072,1536,cktile,7,real
80,4,3072,1536,ck,19.5,three
"""
BLOCKSCALE = "a8w8_blockscale_tuned_gemm"


@pytest.fixture
def tables(folder: Path) -> tuple[Path, Path]:
    one, other = folder / f"{BLOCKSCALE}_dsv3.csv", folder / "old.csv"
    one.write_text(AITER)
    other.write_text(OLD)
    return one, other


def _rows(path: str) -> list[dict[str, object]]:
    return [dict(row) for row in store.read(Path(path), load_family("a8w8_blockscale"))]


@pytest.mark.usefixtures("tables")
def test_aiters_tables_are_united_and_every_conflict_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in Path.cwd().glob("*.csv")}
    assert main(["merge", f"inputs=[{BLOCKSCALE}_dsv3.csv,old.csv]", "kernel=a8w8_blockscale", "output=c.csv"]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    assert [(row["cu_num"], row["M"], row["kernelName"], row["_tag"]) for row in _rows("c.csv")] == [
        (80, 4, "three", None),
        (304, 1, "one", None),
        (304, 2, "real", None),
        (304, 4, "other", None),
    ]
    report = Path("c.csv.merge.txt").read_text()
    assert "2 without a time" not in report
    for printed in (
        f"c.csv: 4 rows, from 6 of {BLOCKSCALE}_dsv3.csv, old.csv; left out: 1 slower, 1 without a time",
        "gfx942/304 M=2 N=3072 K=1536 dtype=float8_e4m3fnuz outdtype=bfloat16: kept old.csv:3 (cktile real 7.00 us), "
        f"dropped {BLOCKSCALE}_dsv3.csv:3 (ck placeholder 0 us): us is 0.0: not a measured time",
        "dropped a8w8_blockscale_tuned_gemm_dsv3.csv:4 (ck three 9.50 us): slower under the same policy",
    ):
        assert printed in report
        assert printed in out
    assert "old.csv: 3 rows (2 gfx942/304, 1 gfx942/80); missing columns filled: gfx, dtype, outdt" in out
    assert "unknown columns kept: _tag" in out
    assert {name: Path(name).read_bytes() for name in before} == before, "an input is never rewritten"


@pytest.mark.usefixtures("tables")
def test_twice_and_in_another_order_is_the_same_file(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["merge", "kernel=a8w8_blockscale"]
    assert main([*arguments, f"inputs=[{BLOCKSCALE}_dsv3.csv,old.csv]", "output=c.csv"]) == 0
    once = Path("c.csv").read_bytes()
    assert main([*arguments, f"inputs=[{BLOCKSCALE}_dsv3.csv,old.csv]", "output=c.csv"]) == 0
    assert Path("c.csv").read_bytes() == once
    assert main([*arguments, f"inputs=[old.csv,{BLOCKSCALE}_dsv3.csv]", "output=sub/d.csv"]) == 0
    assert Path("sub/d.csv").read_bytes() == once
    # Rows of the output take part: none is lost.
    assert main([*arguments, "inputs=old.csv", "output=c.csv"]) == 0
    assert Path("c.csv").read_bytes() == once
    assert "already there" in capfd.readouterr().out
    # A glob may find the output of the time before.
    assert main([*arguments, "inputs=[*.csv]", "output=c.csv"]) == 0
    assert Path("c.csv").read_bytes() == once


def test_the_kernel_is_told_by_the_table(folder: Path, plans: list[object]) -> None:
    (folder / "dsv3_bf16_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,us\n")
    (folder / "any.csv").write_text("gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,us\n")
    for name in ("dsv3_bf16_tuned_gemm.csv", "any.csv"):
        assert main(["merge", f"inputs=[{name}]", "output=c.csv"]) == 0
    assert [plan.family.name for plan in plans] == ["a16w16", "a16w16"]  # type: ignore[attr-defined]


def test_our_tables_keep_their_product_and_its_provenance(
    h200_tables: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = h200_tables / "bf16_tuned_gemm.csv"
    rows = store.read(source, load_family("a16w16"))
    assert main(["merge", f"inputs=[{source}]", "output=c.csv"]) == 0
    merged = store.read(Path("c.csv"), load_family("a16w16"))
    assert len(merged) == len(rows)
    assert {row["device"] for row in merged} == {"NVIDIA H200"}
    runs = json.loads(Path("c.csv.meta.json").read_text())["runs"]
    assert {row["run_id"] for row in merged} == set(runs)
    assert f"export GEMMPIPE_CONFIG_A16W16={folder / 'c.csv'}" in capfd.readouterr().out


def test_times_of_a_table_that_names_no_run_have_its_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "old.csv").write_text("gfx,cu_num,M,N,K,libtype,us\ncpu_avx512,2,1,64,128,torch,4\n")
    line = "gfx,cu_num,M,N,K,libtype,us,policy,run_id\ncpu_avx512,2,2,64,128,torch,5,host interleaved,r7\n"
    (folder / "new.csv").write_text(line)
    merge = ["merge", "kernel=a16w16"]
    assert main([*merge, "inputs=[old.csv,new.csv]", "output=c.csv"]) == 0
    assert main([*merge, "inputs=[c.csv]", "output=d.csv"]) == 0
    runs = {row["M"]: row["run_id"] for row in store.read(Path("d.csv"), load_family("a16w16"))}
    assert runs == {1: "file:old.csv", 2: "r7"}
    shown = {}
    for arguments in ("", " m=1", " m=2"):
        capfd.readouterr()
        assert main(f"show d.csv kernel=a16w16{arguments}".split()) == 0
        shown[arguments] = " ".join(capfd.readouterr().out.split())
    assert "1 row with times read from old.csv: how they were measured is not known." in shown[""]
    assert "time read from old.csv, which names no run; how it was measured is not known" in shown[" m=1"]
    assert "time of run r7; measured as host interleaved" in shown[" m=2"]


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("arguments", "printed"),
    few(
        [
            (["output=c.csv"], "inputs: missing; expected tuned tables, as in 'inputs=[a.csv,b.csv]'"),
            (["inputs=odl.csv"], "inputs: no file 'odl.csv'; did you mean 'old.csv'?"),
            (
                ["inputs=old.csv,old.csv"],
                "inputs: no file 'old.csv,old.csv'; several are written 'inputs=[old.csv,old.csv",
            ),
            (["inputs=[x*.csv]"], "inputs: no file 'x*.csv'"),
            (["inputs=."], "inputs: '.' is a folder, expected a CSV file (or './*.csv')"),
            (["inputs=[old.csv]"], "kernel: missing, and the name of old.csv has none; expected kernel= one of a16"),
            (
                ["inputs=[*_dsv3.csv,bf16_tuned_gemm.csv]"],
                "is a table of a8w8_blockscale, bf16_tuned_gemm.csv one of a16",
            ),
            (
                ["inputs=[*_dsv3.csv]", "kernel=a16w16"],
                "_dsv3.csv is by its name a table of a8w8_blockscale; leave kernel= out, or rename it",
            ),
            (["inputs=[bad.csv]", "kernel=a16w16"], "bad.csv:2: column M: 'x', expected a whole number"),
            ([f"inputs=[{BLOCKSCALE}_dsv3.csv]", "output=link.csv"], "_dsv3.csv' is also the output; expected another"),
            (
                ["inputs=[*_dsv3.csv]", "output=c.csv", "format.csv.file=d.csv"],
                "names a table, and so does format.csv.file",
            ),
            (["inputs=[*_dsv3.csv]", "output=c.csv", "format=[vllm]"], "names a table, and format=[csv] is not chosen"),
            (["table=old.csv", "kernel=a16w16"], "table: cannot be combined with inputs=, which this pipeline"),
            (["inputs=/dev/zero", "kernel=a16w16"], "/dev/zero: not a regular file"),
            (["inputs=c.csv.merge.txt", "output=c.csv", "kernel=a16w16"], "'c.csv.merge.txt' is written together with"),
        ],
        0,
        2,
        4,
        6,
        8,
        10,
        12,
        14,
    ),
)
def test_a_mistake_is_one_line(arguments: list[str], printed: str, folder: Path, refusal: Callable[..., str]) -> None:
    (folder / "bf16_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,us\n")
    (folder / "c.csv.merge.txt").write_text("gfx,cu_num,M,N,K,us\nsm_90,132,1,2,3,4\n")
    (folder / "bad.csv").write_text("gfx,cu_num,M,N,K,us\nsm_90,132,x,2,3,4\n")
    os.symlink(folder / f"{BLOCKSCALE}_dsv3.csv", folder / "link.csv")
    assert printed in refusal("merge", *arguments)
    assert not (folder / "c.csv").exists()


@pytest.mark.usefixtures("folder")
def test_the_errors_of_the_reference_are_those_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Both ways: each is printed, and the page has no other."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "tables.md").read_text()
    _, _, table = page.partition("| error | line |\n|---|---|\n")
    listed = re.findall(r"\| `([^`]*)` \|$", table.partition("\n\n")[0], re.MULTILINE)
    header = "gfx,cu_num,M,N,K,libtype,us\n"
    for name in ("a.csv", "b.csv", "c.csv", "bf16_tuned_gemm.csv"):
        Path(name).write_text(header)

    def merged(*arguments: str) -> str:
        assert main(["merge", "output=c.csv", *arguments]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line.removeprefix("gemmpipe: ")

    printed = [merged("kernel=a16w16"), merged("kernel=a16w16", "inputs=[a.csv,b.csv]")]
    printed.append(merged("kernel=a16w16", "inputs=[c.csv]"))
    Path("a.csv").write_text(f"{header}sm_90,132,1,2,3,torch,4\nsm_90,132,1,x,3,torch,4\n")
    printed += [merged("kernel=a16w16", "inputs=[a.csv]"), merged("kernel=a8w8", "inputs=[bf16_tuned_gemm.csv]")]
    assert listed == printed
    assert Path("c.csv").read_text() == header


def test_columns_do_not_depend_on_what_was_merged_first(folder: Path) -> None:
    head = "gfx,cu_num,M,N,K,libtype,us"
    (folder / "a.csv").write_text(f"{head},_tag\nsm_90,132,1,2,3,torch,9,mine\n")
    (folder / "b.csv").write_text(f"{head},note\nsm_90,132,1,2,3,torch,4,x\n")
    for inputs, output in (("[a.csv,b.csv]", "both.csv"), ("[a.csv]", "steps.csv"), ("[b.csv]", "steps.csv")):
        assert main(["merge", f"inputs={inputs}", f"output={output}", "kernel=a16w16"]) == 0
    assert Path("both.csv").read_text() == Path("steps.csv").read_text()
    assert Path("both.csv").read_text().splitlines()[0].endswith(",_tag,note")


def test_products_do_not_depend_on_which_sidecars_a_row_met(folder: Path) -> None:
    """A file that lost its sidecar, merged a second time after another one whose sidecar knows the same run."""
    head = "gfx,cu_num,M,N,K,libtype,us,run_id"
    (folder / "a.csv").write_text(f"{head}\nsm_90,132,1,2,3,torch,9,r\n")
    (folder / "b.csv").write_text(f"{head}\nsm_90,132,2,2,3,torch,4,r\n")
    (folder / "b.csv.meta.json").write_text('{"runs": {"r": {"device": "NVIDIA H200"}}}')
    for inputs, output in (("[a.csv,b.csv]", "both.csv"), *((f"[{x}.csv]", "steps.csv") for x in "aba")):
        assert main(["merge", f"inputs={inputs}", f"output={output}", "kernel=a16w16"]) == 0
    assert Path("both.csv").read_text() == Path("steps.csv").read_text()
    rows = store.read(Path("both.csv"), load_family("a16w16"))
    assert [row["device"] for row in rows] == [None, "NVIDIA H200"]


def test_a_format_with_nothing_to_store_says_so(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table's rows are of single Ms: a run that times would have chosen over ranges."""
    (folder / "bf16_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,libtype,us\nsm_90,132,1,2,3,triton,4\n")
    arguments = ["inputs=bf16_tuned_gemm.csv", "output=c.csv", "format=[csv,vllm,triton_json]"]
    assert main(["merge", *arguments]) == 0
    printed = capfd.readouterr().out
    assert "merge: vllm: no rows to write: it has no file for products of a16w16\n" in printed
    assert (
        "merge: triton_json: no rows to write: tables hold no selections for ranges of M; these need a run" in printed
    )


def test_a_sidecar_that_cannot_be_read_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bf16_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,libtype,us,run_id\nsm_90,132,1,2,3,torch,4,r\n")
    (folder / "bf16_tuned_gemm.csv.meta.json").write_text("[" * 100)
    (folder / "c.csv.meta.json").write_text('{"runs": []}')
    assert main(["merge", "inputs=bf16_tuned_gemm.csv", "output=c.csv"]) == 0
    error = capfd.readouterr().err
    assert "warning: bf16_tuned_gemm.csv.meta.json: nested more than 32 deep, expected a JSON object; left out" in error
    assert "no object 'runs' of objects" in error
    assert "set aside as c.csv.meta.json.broken" in error
    assert (folder / "c.csv.meta.json.broken").read_text() == '{"runs": []}'


@pytest.mark.usefixtures("tables")
def test_inputs_without_rows_leave_the_target_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    Path("bare.csv").write_text(f"{HEADER}\n")
    merge = ["merge", "kernel=a8w8_blockscale", "output=c.csv"]
    message = "gemmpipe: inputs: no rows in bare.csv: nothing to merge; expected tuned tables with rows\n"
    assert main([*merge, "inputs=[bare.csv]"]) == 2
    assert capfd.readouterr().err == message
    assert not [*Path.cwd().glob("c.csv*")]
    assert main([*merge, "inputs=[bare.csv,old.csv]"]) == 0, "one table with rows is enough"
    assert "merge: c.csv: 3 rows, from 3 of old.csv" in capfd.readouterr().out
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path.cwd().glob("c.csv*")}
    assert main([*merge, "inputs=[bare.csv]"]) == 2
    assert main([*merge, "inputs=[*c.csv]"]) == 2, "the glob finds the output alone"
    assert capfd.readouterr().err == message + message.replace("bare.csv", "*c.csv")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path.cwd().glob("c.csv*")} == before
