"""The files of tables, their order, and the warnings about them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gemmpipe.core.device import cpu_device
from gemmpipe.family import environment, load_family, shipped_families
from gemmpipe.family.environment import REPORTED
from gemmpipe.runtime import dispatch_report, gemm_a16w16, reload
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.tables import load_tables, table_layers

NAME = "bf16_tuned_gemm.csv"
FAMILY = load_family("a16w16")
MM, COPY = {"method": "mm"}, {"method": "float32_copy"}


def _found(m: int) -> tuple[str, str] | None:
    device = cpu_device()
    found = load_tables(FAMILY).find(device, (m, 64, 96, False, "bfloat16", "bfloat16", False, False))
    return (found[0].path.name, str(found[0].row["config"])) if found else None


def test_each_layer_has_the_keys_that_earlier_ones_lack(row, table, tmp_path, monkeypatch) -> None:
    user, shipped = tmp_path / "data" / "gemmpipe" / "tuned", tmp_path / "shipped"
    table(row(1, "torch", MM), path=tmp_path / "named.csv")
    table(row(1, "torch", COPY), row(2, "torch", COPY), path=user / NAME)
    table(row(3, "torch", COPY), path=user / f"dsv3_{NAME}")
    table(row(3, "torch", MM), row(4, "torch", MM), path=shipped / NAME)
    table(row(5, "torch", MM), path=shipped / "bf16_untuned_gemm.csv")
    assert _found(1) == (NAME, '{"method": "float32_copy"}')
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", str(tmp_path / "named.csv"))
    assert _found(1) == ("named.csv", '{"method": "mm"}')
    assert _found(2) == (NAME, '{"method": "float32_copy"}')
    assert _found(3) == (f"dsv3_{NAME}", '{"method": "float32_copy"}')
    assert _found(4) == (NAME, '{"method": "mm"}')
    assert _found(5) is None


def test_in_a_list_the_earlier_file_wins_and_conflicts_are_reported_once(
    row, table, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = table(row(1, "torch", MM), row(2, "torch", MM), path=tmp_path / "first.csv")
    second = table(row(1, "torch", COPY, us=0.1), row(2, "torch", MM), row(3, "torch", MM), path=tmp_path / "b.csv")
    before = first.read_bytes(), second.read_bytes()
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{first}:{second}")
    assert _found(1) == ("first.csv", '{"method": "mm"}')
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"gemmpipe: 1 key of {second} has other choices in {first}")
    assert "M=1 N=64 K=96" in message
    assert _found(3) == ("b.csv", '{"method": "mm"}')
    assert (first.read_bytes(), second.read_bytes()) == before


def test_of_a_folder_the_rows_of_this_model_of_device_come_first(
    row, table, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gfx and cu_num are the same on an H100 and an H200, whose tables are files of one folder."""
    here = cpu_device().name
    mine, other = row(1, "torch", MM, device=here), row(1, "torch", COPY, device="another", us=0.1)
    table(other, path=tmp_path / "shipped" / NAME)
    table(mine, path=tmp_path / "shipped" / "bf16_tuned_gemm_here.csv")
    assert _found(1) == ("bf16_tuned_gemm_here.csv", '{"method": "mm"}')
    assert not caplog.records, "rows of two models of device are no conflict"
    table(row(1, "torch", COPY), path=tmp_path / "shipped" / "bf16_tuned_gemm_unnamed.csv")
    assert _found(1) == ("bf16_tuned_gemm_here.csv", '{"method": "mm"}')
    assert any("has other choices" in record.getMessage() for record in caplog.records), "it may be of this model"
    table(other, path=tmp_path / "data" / "gemmpipe" / "tuned" / NAME)
    assert _found(1) == (NAME, '{"method": "float32_copy"}'), "the user's folder comes before the shipped one"
    second = table(mine, path=tmp_path / "second.csv")
    first = table(other, path=tmp_path / "first.csv")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{first}:{second}")
    assert _found(1) == ("first.csv", '{"method": "float32_copy"}'), "files that are named have an order"


def _all(m: int) -> list[tuple[str, str]]:
    found = load_tables(FAMILY).find(cpu_device(), (m, 64, 96, False, "bfloat16", "bfloat16", False, False))
    return [(each.path.name, str(each.row["libtype"])) for each in found]


def test_a_key_has_the_rows_of_all_files(row, table, tmp_path: Path, monkeypatch) -> None:
    user, shared = tmp_path / "data" / "gemmpipe" / "tuned", "host interleaved shared_gpu"
    first = table(row(1, "asm", {"kernelName": "x"}), path=tmp_path / "first.csv")
    second = table(row(1, "flydsl", None), row(1, "ck", None, policy=shared), path=tmp_path / "second.csv")
    table(row(1, "onednn", MM), path=user / NAME)
    table(row(1, "torch", MM), path=user / f"b_{NAME}")
    table(row(1, "torch", COPY), path=tmp_path / "shipped" / NAME)
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{first}:{second}")
    alone = [("first.csv", "asm"), ("second.csv", "flydsl"), (NAME, "onednn"), (f"b_{NAME}", "torch"), (NAME, "torch")]
    assert _all(1) == [*alone, ("second.csv", "ck")], "provisional rows come last"


def test_a_row_that_cannot_run_gives_way_within_a_variable_and_a_folder(
    row, table, x, w, tmp_path: Path, monkeypatch
) -> None:
    user = tmp_path / "data" / "gemmpipe" / "tuned"
    theirs = table(row(16, "asm", None), path=tmp_path / "theirs.csv")
    mine = table(row(16, "torch", COPY), path=tmp_path / "mine.csv")
    table(row(3, "asm", None), path=user / NAME)
    table(row(3, "torch", COPY), path=user / f"b_{NAME}")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{theirs}:{mine}")
    reload()
    for m in (16, 3):
        gemm_a16w16(x(m), w)
    assert set(dispatch_report().values()) == {"exact"}


def test_files_with_a_longer_name_are_found(row, table, tmp_path: Path) -> None:
    user = tmp_path / "data" / "gemmpipe" / "tuned"
    names = [NAME, "a_bf16_tuned_gemm_fp4.csv", "b_bf16_tuned_gemm.csv", "bf16_tuned_gemm_qwen3.5_397b.csv"]
    others = ["bf16_tuned_gemmx.csv", "bf16_untuned_gemm_a.csv", "xbf16_tuned_gemm.csv", ".a_bf16_tuned_gemm.csv"]
    for name in (*names, *others):
        table(row(1, "torch", MM), path=user / name)
    assert [path.name for path in table_layers(FAMILY)[1]] == names


def test_the_given_tables_alone(row, table, tmp_path: Path, monkeypatch) -> None:
    table(row(2, "torch", MM), path=tmp_path / "data" / "gemmpipe" / "tuned" / NAME)
    table(row(3, "torch", MM), path=tmp_path / "shipped" / NAME)
    table(row(1, "torch", MM))
    for word, found in (("0", [1, 2, 3]), ("1", [1])):
        monkeypatch.setenv("GEMMPIPE_GIVEN_TABLES_ONLY", word)
        assert [m for m in (1, 2, 3) if _found(m)] == found


@pytest.mark.parametrize("us", ["inf", "-1", "0", "", "nan"])
def test_a_row_without_a_time_costs_no_table(us: str, row, table, tmp_path: Path, caplog) -> None:
    path = table(row(1, "torch", MM, us=7.0), row(2, "torch", MM, us=9.5))
    path.write_text(path.read_text().replace(",9.5,", f",{us},"))
    assert _found(1) is not None
    assert _found(2) is None
    assert not caplog.records


@pytest.mark.parametrize("name", ["GEMMPIPE_CONFIG_GEMM_BF16", "AITER_CONFIG_GEMM_BF16"])
def test_aiters_names_of_a_table_are_read(name: str, row, table, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(LOG, "_warned", set())
    file = table(row(1, "torch", MM), path=tmp_path / "theirs.csv")
    monkeypatch.setenv(name, str(file))
    assert _found(1) == ("theirs.csv", '{"method": "mm"}')
    assert not caplog.records
    own = table(row(1, "torch", COPY), path=tmp_path / "own.csv")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", str(own))
    assert _found(1) == ("own.csv", '{"method": "float32_copy"}')
    assert [record.getMessage() for record in caplog.records] == [
        f"gemmpipe: {name} is not read, as GEMMPIPE_CONFIG_A16W16 is set too"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AITER_CONFIG_GROUPED_FMOE", "names a table of none of the families here, and is not read"),
        ("HIP_ONLINE_TUNING", "GEMMPIPE_ONLINE_TUNING=1"),
        ("PREBUILD_KERNELS", "gemmpipe prebuild"),
        ("AITER_REBUILD", "gemmpipe.runtime.reload()"),
        ("GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH", "Triton has its own compiler"),
        ("AITER_ONLINE_TUNE", "GEMMPIPE_ONLINE_TUNING=1"),
        ("GEMMPIPE_HIP_ONLINE_TUNING", "GEMMPIPE_ONLINE_TUNING=1"),
        ("AITER_TRITON_CONFIGS_PATH", "GEMMPIPE_CONFIG_<FAMILY> names tables"),
        ("AITER_BYPASS_TUNE_CONFIG", "GEMMPIPE_GIVEN_TABLES_ONLY=1"),
        ("GTUNE_TP", "not read: shapes.tp="),
    ],
)
def test_aiters_other_variables_are_reported_once(name: str, message: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr(LOG, "_warned", set())
    monkeypatch.setenv(name, "1")
    load_tables(FAMILY), load_tables(load_family("fmoe"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"gemmpipe: {name} ")
    assert message in line


def test_the_page_on_aiter_has_every_variable() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "aiter.md").read_text()
    table = text[text.index("## Environment variables") :]
    for name in (*REPORTED, *environment.LOG_SELECTION[2:], *environment.CAPTURE[2:]):
        assert f"`{name}`" in table or f"`{name}=1`" in table, name
    for family in map(load_family, shipped_families()):
        if family.aiter_table:
            name = family.aiter_table.variable
            assert f"_{name}`" in table, name


def test_rows_timed_on_a_shared_gpu_come_after_all_others(row, table, tmp_path, monkeypatch) -> None:
    user, shipped = tmp_path / "data" / "gemmpipe" / "tuned", tmp_path / "shipped"
    shared = "host interleaved shared_gpu"
    table(row(1, "torch", COPY, policy=shared), row(2, "torch", COPY, policy=shared), path=user / NAME)
    table(row(2, "torch", MM, policy="host interleaved"), path=user / f"dsv3_{NAME}")
    table(row(1, "torch", MM, policy="host interleaved"), path=shipped / NAME)
    assert _found(1) == (NAME, '{"method": "mm"}'), "the shipped row was timed alone"
    assert _found(2) == (f"dsv3_{NAME}", '{"method": "mm"}')


def test_a_table_that_cannot_be_read_costs_a_warning(row, table, tmp_path, monkeypatch, caplog) -> None:
    good, broken = table(row(1, "torch", MM), path=tmp_path / "good.csv"), tmp_path / "broken.csv"
    broken.write_text("gfx,cu_num,M,N\nx\n")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{broken}:{tmp_path / 'absent.csv'}:{good}")
    assert _found(1) == ("good.csv", '{"method": "mm"}')
    assert [
        str(tmp_path / name) in record.getMessage()
        for name, record in zip(("broken.csv", "absent.csv"), caplog.records, strict=True)
    ] == [True, True]


@pytest.mark.parametrize("name", ["A16W17", "a16w16", "GEMM_A16W16"])
def test_a_misspelt_variable_is_reported_once(name: str, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LOG, "_warned", set())
    monkeypatch.setenv(f"GEMMPIPE_CONFIG_{name}", "table.csv")
    load_tables(FAMILY), load_tables(load_family("fmoe"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"gemmpipe: GEMMPIPE_CONFIG_{name}: not a variable of any family, ignored "
        "(did you mean GEMMPIPE_CONFIG_A16W16?)"
    )


@pytest.mark.parametrize("name", ["BF16", "A4W4", "BF16_BATCHED"])
def test_a_variable_without_aiters_word_gemm_is_reported(name: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr(LOG, "_warned", set())
    monkeypatch.setenv(f"GEMMPIPE_CONFIG_{name}", "table.csv")
    load_tables(FAMILY)
    (message,) = [record.getMessage() for record in caplog.records]
    known = {"BF16": "GEMM_BF16", "A4W4": "GEMM_A4W4", "BF16_BATCHED": "BF16_BATCHED_GEMM"}[name]
    assert message.endswith(f"not a variable of any family, ignored (did you mean GEMMPIPE_CONFIG_{known}?)")


def test_variables_of_the_users_own_families_are_not_misspelt(
    monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LOG, "_warned", set())
    (tmp_path / "a16w19.py").write_text("raise RuntimeError('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = ModuleType("loaded")
    loaded.FAMILY = replace(FAMILY, name="a16w18")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "loaded", loaded)
    for name in ("A16W18", "A16W19", "A16W16", "ELSE"):
        monkeypatch.setenv(f"GEMMPIPE_CONFIG_{name}", "")
        monkeypatch.setenv(f"GEMMPIPE_CONFIG_{name}", str(tmp_path / "absent.csv") if name != "A16W16" else "")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W17", "")
    load_tables(FAMILY)
    assert not caplog.records
