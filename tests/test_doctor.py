"""The doctor works without a GPU and says why things are missing."""

from pathlib import Path

import pytest

from gemmpipe.cli.main import main


def test_on_a_cpu(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", f"{folder / 'gone.csv'}:{folder / 'broken.csv'}")
    (folder / "broken.csv").write_text("what,ever\n1,2\n")
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    for said in (
        "python 3.",
        "torch 2.",
        "cpu:",
        "cores",
        "triton       unavailable: no GPU",
        "torch        available",
    ):
        assert said in out
    assert "gone.csv: not there" in out
    assert "broken.csv: cannot be used" in out
    assert str(folder / "data" / "gemmpipe" / "tuned" / "bf16_tuned_gemm.csv") in out
    own = folder / "data" / "gemmpipe" / "tuned"
    own.mkdir(parents=True)
    for name in ("llama_bf16_tuned_gemm.csv", "untuned_bf16_tuned_gemm.csv"):
        (own / name).write_text("what,ever\n1,2\n")
    monkeypatch.setenv("GEMMPIPE_CONFIG_A16W16", "~/mine.csv:")
    monkeypatch.setenv("HOME", str(folder))
    assert main(["doctor", "kernel=a16w16", "device=cpu"]) == 0
    out, _ = capsys.readouterr()
    assert f"{folder / 'mine.csv'}: not there" in out, "as the run time reads it"
    assert "llama_bf16_tuned_gemm.csv" in out, "a model's own table"
    assert "untuned_bf16" not in out
    assert " .: not there" not in out


def test_where_it_stands_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no folder of its own: what it is asked wrongly in is the user's."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "device.kind=cuda", "device.index=99"]) != 0
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("mine: true\n")
    assert main(["doctor", "device.kind=cuda", "device.index=99"]) != 0
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "mine: true\n"
