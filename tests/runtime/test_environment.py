"""aiter's environment variables with the same meaning as gemmpipe's."""

import logging
from pathlib import Path

import pytest

from gemmpipe.runtime import gemm_a16w16, reload
from gemmpipe.runtime.capture.recorder import DEFAULT_FILE, requested_recorder
from gemmpipe.runtime.selection_log import LOG


@pytest.mark.parametrize("name", ["GEMMPIPE_TUNE_GEMM", "AITER_TUNE_GEMM"])
def test_capture_is_enabled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMPIPE_CAPTURE", raising=False)
    assert requested_recorder() is None
    monkeypatch.setenv(name, "0")
    assert requested_recorder() is None
    monkeypatch.setenv(name, "1")
    recorder = requested_recorder()
    assert recorder is not None
    assert recorder.path == tmp_path / DEFAULT_FILE
    monkeypatch.setenv("GEMMPIPE_CAPTURE", str(tmp_path / "mine.csv"))
    named = requested_recorder()
    assert named is not None
    assert named.path == tmp_path / "mine.csv"
    monkeypatch.setenv("GEMMPIPE_CAPTURE", "0")
    assert requested_recorder() is None, "gemmpipe's variable has priority"


@pytest.mark.parametrize("name", ["GEMMPIPE_LOG_TUNED_CONFIG", "AITER_LOG_TUNED_CONFIG"])
def test_lookup_steps_are_logged(
    name: str, x, w, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gemmpipe.runtime")
    monkeypatch.setenv(name, "0")
    gemm_a16w16(x(3), w)
    assert "no row" not in caplog.text
    monkeypatch.setenv(name, "1")
    LOG.clear()
    reload()
    gemm_a16w16(x(3), w)
    assert "exact M=3: no row" in caplog.text
