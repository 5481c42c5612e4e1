"""A run that only lists problems ends with the first of them, their file, and the command that tunes them."""

import shlex
from pathlib import Path

import pytest

from gemmpipe.cli.main import main


def _lines(*argv: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["capture", "device=cpu", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("capture: ")) :]


def test_the_first_problems_their_file_and_the_next_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines("kernel=a16w16", "shapes=llama8b", "shapes.nsets=[1,64,512]", capsys=capsys)
    assert lines[0].startswith("capture: 15 problems of 5 products")
    assert lines[1].split() == ["M", "N", "K", "calls", "layer"]
    assert [line.split() for line in lines[2:7]] == [
        ["1,", "64,", "512", "6144", "4096", "32", "qkv_proj"],
        ["1,", "64,", "512", "4096", "4096", "32", "o_proj"],
        ["1,", "64,", "512", "28672", "4096", "32", "gate_up_proj"],
        ["1,", "64,", "512", "4096", "14336", "32", "down_proj"],
        ["1,", "64,", "512", "128256", "4096", "1", "lm_head"],
    ]
    named = " ".join(lines).partition("problems  ")[2].split()[0]
    assert len(Path(named).read_text().splitlines()) == 16
    text = " ".join(" ".join(lines).split())  # long lines are continued
    following = text.partition("tune them with: gemmpipe ")[2].partition(" total ")[0]
    again = _lines(*shlex.split(following), capsys=capsys)
    assert again[0].startswith("capture: 15 problems of 5 products")
    assert again[1:7] == lines[1:7], "the file has the same problems in the same order"


def test_few_problems_are_listed_one_by_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines("kernel=a16w16", "shapes=llama8b", "shapes.nsets=[1,64]", capsys=capsys)
    assert lines[2].split() == ["1", "6144", "4096", "32", "qkv_proj"]
    assert lines[3].split() == ["64", "6144", "4096", "32", "qkv_proj"]


def test_many_products_end_with_the_number_of_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(
        "kernel=a16w16", "shapes=list", f"shapes.items={[[1, 64 * n, 64] for n in range(1, 13)]}", capsys=capsys
    )
    assert lines[2].split() == ["1", "64", "64", "1"]
    assert lines[12] == "  ... and 2 more"


def test_other_key_columns_appear_where_they_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = "shapes.items=[{M: 1, N: 64, K: 64, bias: true}, {M: 2, N: 64, K: 64, bias: false}]"
    lines = _lines("kernel=a16w16", "shapes=list", items, capsys=capsys)
    assert [line.split() for line in lines[1:4]] == [
        ["M", "N", "K", "bias", "calls"],  # and no title of an empty column
        ["1", "64", "64", "True", "1"],
        ["2", "64", "64", "False", "1"],
    ]


@pytest.mark.slow  # two runs
def test_problems_that_are_all_tuned_are_listed_with_the_command_that_tunes_them_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["kernel=a16w16", "shapes=list", "shapes.items=[[1,64,64]]"]
    assert main(["tune", "device=cpu", *small, "timer@stages.bench.timer=quick"]) == 0
    lines = _lines(*small, capsys=capsys)
    assert any(line.split()[:3] == ["1", "64", "64"] for line in lines)
    (again,) = [line for line in lines if "all are tuned already" in line]
    command = shlex.split(again.partition("tune them again with: ")[2])
    assert command[0] == "gemmpipe"
    assert main(command[1:]) == 0
    assert "1 of 1 problem tuned" in capsys.readouterr().out
