"""Scopes and start lines of plug-ins."""

import pytest

import gemmpipe
from gemmpipe.plugins.scope import Takeover, inactive_line, read_scope, start_line
from gemmpipe.plugins.vllm import vllm_scope

VARIABLE = "GEMMPIPE_VLLM"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", ("linear", "moe")),
        ("linear,moe", ("linear", "moe")),
        (" MoE ", ("moe",)),
        ("off", ()),
        ("0", ()),
        ("linear,off", ()),
        ("linaer", ()),
        ("linaer,moe", ("moe",)),
    ],
)
def test_words(monkeypatch: pytest.MonkeyPatch, text: str, kinds: tuple[str, ...]) -> None:
    monkeypatch.setenv(VARIABLE, text)
    scope = read_scope(VARIABLE)
    assert scope.kinds == kinds
    assert scope.off == (not kinds)
    assert [scope.reason(kind) for kind in kinds] == [""] * len(kinds)
    assert all(scope.reason(kind) == f"GEMMPIPE_VLLM={text}" for kind in ("linear", "moe") if kind not in kinds)


def test_an_unknown_word_enables_nothing_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "linaer")
    (error,) = read_scope(VARIABLE).errors
    assert error.startswith("GEMMPIPE_VLLM: 'linaer': unknown; did you mean 'linear'?")
    monkeypatch.delenv(VARIABLE)
    assert read_scope(VARIABLE).errors == ()


def test_the_line_groups_reasons() -> None:
    takeovers = [
        Takeover(name="linear bf16", detail="90 rows for 5 sizes"),
        Takeover(name="linear fp8 by row", reason="no tuned rows"),
        Takeover(name="experts", reason="no tuned rows"),
    ]
    version = gemmpipe.__version__
    assert start_line("vLLM 0.25.1", "NVIDIA H200", takeovers) == (
        f"gemmpipe {version} in vLLM 0.25.1 on NVIDIA H200: takes over linear bf16 (90 rows for 5 sizes); "
        "leaves to the engine: linear fp8 by row, experts (no tuned rows)"
    )
    assert start_line("vLLM 0.25.1", "", takeovers[1:]).startswith(
        f"gemmpipe {version} in vLLM 0.25.1: takes over nothing; leaves"
    )
    assert inactive_line("vLLM 0.9", "unsupported version", ["x"]).endswith("does nothing (unsupported version); x")


def test_replays_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "replays" not in vllm_scope().kinds
    for variable in (VARIABLE, "GEMMPIPE_SGLANG"):
        monkeypatch.setenv(variable, "replays,linear")
        assert read_scope(variable, ("replays",)).kinds == ("linear", "replays")


def test_vllm_has_one_kind_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's plug-in has no quantisers: the word is unknown there."""
    assert vllm_scope().kinds == ("linear", "moe")
    assert vllm_scope().reason("quantise") == "only if GEMMPIPE_VLLM names 'quantise'"
    monkeypatch.setenv(VARIABLE, "quantise,linear")
    assert vllm_scope().kinds == ("linear", "quantise")
    assert vllm_scope().reason("moe") == "GEMMPIPE_VLLM=quantise,linear"
    monkeypatch.setenv(VARIABLE, "quantize")
    assert vllm_scope().off
    assert vllm_scope().errors[0].startswith("GEMMPIPE_VLLM: 'quantize': unknown; did you mean 'quantise'?")
    monkeypatch.setenv("GEMMPIPE_SGLANG", "quantise")
    (error,) = read_scope("GEMMPIPE_SGLANG").errors
    assert error.startswith("GEMMPIPE_SGLANG: 'quantise': unknown")
