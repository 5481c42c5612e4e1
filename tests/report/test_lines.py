"""Folding keeps words and styles; commands stay whole."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.text_table import fold_width, terminal_width
from gemmpipe.report.lines import GOOD, KEY, Line, fitted, folded, styled


@pytest.mark.parametrize(
    ("columns", "width"), [(None, 80), ("", 80), ("60", 60), ("100", 100), ("45", 45), ("20", 40), ("999", 120)]
)
def test_without_a_terminal_the_width_is_that_of_columns(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert (terminal_width(), fold_width(pipe)) == (width, None)


@given(st.text(alphabet="ab c", max_size=200), st.integers(min_value=10, max_value=60))
def test_folding_keeps_the_words_and_the_width(text: str, width: int) -> None:
    parts = folded(Line(text=text), width)
    assert " ".join(part.text for part in parts).split() == text.split()
    for part in parts:
        assert len(part.text) <= width or max(map(len, part.text.split())) > width - 2 - (
            len(part.text) - len(part.text.lstrip())
        )


@pytest.mark.parametrize(
    ("text", "width", "parts"),
    [
        (
            "5 of 90 problems tuned; chosen: torch 17, onednn 3",
            40,
            ["5 of 90 problems tuned; chosen:", "torch 17, onednn 3"],
        ),
        ("left: 85 with M 2 to 4,096.", 24, ["left: 85 with M 2", "to 4,096."]),
        ("1 2 3 4 5 6 7 8 9 10 11", 10, ["1 2 3 4 5", "6 7 8 9", "10 11"]),
        ("times of 3.14ms and more", 16, ["times of 3.14ms", "and more"]),
    ],
)
def test_a_number_stays_with_the_word_before_it(text: str, width: int, parts: list[str]) -> None:
    assert [part.text.strip() for part in folded(Line(text=text), width)] == parts


def test_styles_move_with_their_words() -> None:
    line = styled("one two ", ("three four", GOOD), " five ", ("six", KEY))
    parts = folded(line, 14)
    arguments = [(part.text[low:high], style) for part in parts for low, high, style in part.spans]
    assert arguments == [("three", GOOD), ("four", GOOD), ("six", KEY)]


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_TUNED_CONFIG_FOLDER=/tmp/outputs/tuned/vllm vllm serve /models/llama --tensor-parallel-size 8",
        "vllm serve /models/llama --tensor-parallel-size 8 --moe-backend triton",
        "python -m sglang.launch_server --model-path /models/llama --tp 8",
        "vLLM reads files of dense products from its package alone: gemmpipe export last vllm install=true",
    ],
)
def test_a_line_with_a_command_to_copy_is_fitted_whole(text: str) -> None:
    assert fitted(Line(text=text), 40) == [Line(text=text)]
    assert len(fitted(Line(text=f"note: {text[:30]} and more words than fit a line"), 40)) > 1


def test_a_command_is_never_folded() -> None:
    line = Line(text="export " + "x" * 50 + " y", is_whole=True)
    assert folded(line, 20) == [line]
