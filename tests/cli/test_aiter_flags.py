"""Flags and keys of aiter's tuning scripts are refused with the equivalent arguments, which compose."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmpipe.cli.aiter_flags import _AITER_FLAGS, _SINGLE_DASH
from gemmpipe.cli.main import main
from gemmpipe.pipeline.plan import Plan

DEFAULT = "default"
FLAGS = {
    "--errRatio 0.01": "stages.bench.err_ratio=0.01",
    "--mp 4": "executor.workers=4",
    "--mp=4": "executor.workers=4",
    "--all": "retune=true",
    "--retune": "retune=true",
    "--sort": "format.csv.sort=true",
    "--sort True": "format.csv.sort=true",
    "--warmup 3": "stages.bench.timer.warmup=3",
    "--iters 200": "stages.bench.timer.iters=200",
    "--timeout 30": "executor.timeout_s=30",
    "--timeout None": "executor.timeout_s=null",
    "--libtype asm": "'backend=[aiter]'",
    "--libtype triton hipblaslt ck": "'backend=[triton,hipblaslt,aiter]'",
    "--libtype triton,torch": "'backend=[triton,torch]'",
    "--libtype all": f"'backend=[{DEFAULT},hipblaslt,aiter]'",
    "--with-hipblaslt": f"'backend=[{DEFAULT},hipblaslt]'",
    "--model_dir X": "shapes=model shapes.path=X",
    "--model_dir=X": "shapes=model shapes.path=X",
    "--tp 8": "shapes.tp=8",
    "--nsets 1 512": "'shapes.nsets=[1,512]'",
    "--batch-size 512": "'shapes.nsets=[512]'",
    "--batch 50": "batch=50",
    "--update_improved": "stages.select.min_improvement_pct=3",
    "--min_improvement_pct 2": "stages.select.min_improvement_pct=2",
    "-v": "verbose=true",
    "--verbose": "verbose=true",
    "-o b.csv": "output=b.csv",
    "--tune_file b.csv:c.csv": "output=b.csv",
    "--tuned_file b.csv": "output=b.csv",
    "-i a.csv": "shapes=csv shapes.path=a.csv",
    "-i=a.csv": "shapes=csv shapes.path=a.csv",
    "--untune_file a.csv": "shapes=csv shapes.path=a.csv",
    "--input_file a.csv": "shapes=csv shapes.path=a.csv",
    "-o2 all.csv": "profile=all.csv",
    "--profile_file all.csv": "profile=all.csv",
    "--indtype bf16": "kernel.dtype=bf16",
    "--input-type bf16": "kernel.dtype=bf16",
    "--outdtype f32": "kernel.out_dtype=f32",
    "--out-dtype f32": "kernel.out_dtype=f32",
    "--block-size-m-range 16 32": "'space.BLOCK_SIZE_M=[16,32]'",
    "--num-ksplit-range 1 4": "'space.NUM_KSPLIT=[1,4]'",
    "--num-warps-range=4": "'space.num_warps=[4]'",
    "--cache-modifier-range .cg None": "'space.cache_modifier=[.cg,\"\"]'",
    "--all_bias": "-m kernel.bias=false,true",
    "-i a.csv -o b.csv --mp 2 -v": "shapes=csv shapes.path=a.csv output=b.csv executor.workers=2 verbose=true",
}
KEYS = {
    "errRatio=0.01": "stages.bench.err_ratio=0.01",
    "mp=4": "executor.workers=4",
    "tp=8": "shapes.tp=8",
    "nsets=1": "'shapes.nsets=[1]'",
    "nsets=[1,64]": "'shapes.nsets=[1,64]'",
    "iters=200": "stages.bench.timer.iters=200",
    "libtype=asm": "'backend=[aiter]'",
    "sort=true": "format.csv.sort=true",
    "sort=false": "format.csv.sort=false",
    "hipb_prefer_ratio=0.9": "stages.select.prefer.hipblaslt=0.9",
    "all=true": "retune=true",
    "timeout=null": "executor.timeout_s=null",
    "untune_file=a.csv": "shapes=csv shapes.path=a.csv",
}


@pytest.mark.parametrize("typed", FLAGS)
def test_a_flag(typed: str, refusal: Callable[..., str]) -> None:
    kind = "aiter flags" if len(re.findall(r"(?:^| )-", typed)) > 1 else "an aiter flag"
    assert refusal(*typed.split(), "kernel=a16w16") == f"{typed}: {kind}; expected {FLAGS[typed]}"


@pytest.mark.parametrize("typed", KEYS)
def test_a_key(typed: str, refusal: Callable[..., str]) -> None:
    assert refusal("kernel=a16w16", typed) == f"{typed}: an aiter key; expected {KEYS[typed]}"


@pytest.mark.e2e
def test_the_equivalents_compose(plans: list[Plan], folder: Path) -> None:
    """Those of different keys together: composing takes a fifth of a second."""
    (folder / "a.csv").write_text("M,N,K\n1,64,64\n")
    lines: list[dict[str, str]] = []
    for expected in dict.fromkeys((*FLAGS.values(), *KEYS.values())):
        given = {word.partition("=")[0]: word for word in shlex.split(expected)}
        of_model = {key: word for key, word in given.items() if key in ("shapes.tp", "shapes.nsets")}
        given = {"shapes": "shapes=llama8b", **given} if of_model else given
        kept = (line for line in lines if all(line.get(key, word) == word for key, word in given.items()))
        together = next((line for line in kept if of_model.keys() <= line.keys() or "shapes.path" not in line), None)
        if together is None:
            lines.append(together := {})
        together |= given
    for line in lines:
        assert main(["kernel=a16w16", *line.values()]) == 0, line
    assert len(plans) >= len(lines) > 5


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("--run_config x.csv", "expected gemmpipe verify table=x.csv"),
        ("--run_config", "expected gemmpipe verify table=VALUE"),
        ("--compare", "expected gemmpipe compare"),
        ("--errRatio", "expected stages.bench.err_ratio=VALUE"),
        ("-k", "splits of K are part of every search; 'space.NUM_KSPLIT=[1]' leaves them out"),
        ("--shape_grouped", "the candidates of a problem are always timed on one GPU"),
        ("--preshuffle", "selected by the kernel's name: kernel="),
        ("--libtype flydsl", "no backend runs flydsl"),
        ("--libtype opus torch", "expected 'backend=[torch]'; no backend runs opus"),
        ("--last", "no equivalent"),
        ("--kid 3", "no equivalent"),
        ("--libtype cktile", "no backend runs cktile"),
        ("--BATCH 4", "sizes are listed: shapes=list 'shapes.items=[[M,N,K]]'"),
        ("-n 512", "sizes are listed: shapes=list 'shapes.items=[[M,N,K]]'"),
        ("-k 64", "splits of K are part of every search; 'space.NUM_KSPLIT=[1]' leaves them out; sizes are listed: "),
        ("--n-list 512 1024", "format=[triton_json] writes a file per (N, K)"),
        ("--overwrite", "each run has a folder of its own"),
    ],
)
def test_flags_of_another_command_or_without_an_equivalent(typed: str, text: str, refusal: Callable[..., str]) -> None:
    assert refusal(*typed.split()).startswith(f"{typed}: an aiter flag; {text}")


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("backend=asm", "backend: no option 'asm'; expected 'backend=[aiter]'"),
        ("backend=[triton,ck]", "backend: no option 'ck'; expected 'backend=[triton,aiter]'"),
        (
            "backend=all",
            "backend: no option 'all'; leave backend= out for the default ones; with AMD's, expected 'backend=[",
        ),
        ("backend=[flydsl]", "backend: no option 'flydsl'; no backend runs flydsl"),
        (
            "backend=nope",
            "backend: no option 'nope'; known: aiter, autotune, cublaslt, deepgemm, default, engine_pairs, ",
        ),
        ("inputs=a.csv:b.csv", "inputs: several files are a list: 'inputs=[a.csv,b.csv]'"),
        ("libtype=opus", "libtype=opus: an aiter key; no backend runs opus"),
    ],
)
def test_libtypes_and_lists_of_files(typed: str, text: str, refusal: Callable[..., str]) -> None:
    line = refusal(typed)
    assert line.startswith(text)
    assert not line.endswith("...")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("mp=4 iters=200", "mp=4 iters=200: aiter keys; expected executor.workers=4 stages.bench.timer.iters=200"),
        (
            "mp=4 k=1 backend=asm inputs=a.csv:b.csv splitk=true",
            "mp=4 splitk=true: aiter keys; expected executor.workers=4; splitk: splits of K are part of every search; "
            "'space.NUM_KSPLIT=[1]' leaves them out; backend: no option 'asm'; expected 'backend=[aiter]'; "
            "inputs: several files are a list: 'inputs=[a.csv,b.csv]'",
        ),
        (
            "--mp 4 iters=200 libtype=asm,opus kernel=a16w16",
            "--mp 4 iters=200 libtype=asm,opus: aiter flags and keys; expected executor.workers=4 "
            "stages.bench.timer.iters=200 'backend=[aiter]'; no backend runs opus",
        ),
    ],
)
def test_all_words_of_a_line_are_answered_at_once(typed: str, line: str, refusal: Callable[..., str]) -> None:
    assert refusal(*typed.split()) == line


def test_a_recipe_is_named(refusal: Callable[..., str], folder: Path) -> None:
    (folder / "r.yaml").write_text("version: 1\npipeline: tune\nerrRatio: 0.01\n")
    assert refusal("r.yaml").startswith("r.yaml: errRatio=0.01: an aiter key; expected stages.bench.err_ratio=0.01")


def test_gemmpipes_own_flags_are_no_aiter_flags(refusal: Callable[..., str]) -> None:
    assert refusal("--kernel=a16w16") == "--kernel=a16w16: no such flag; values have no dashes: kernel=a16w16"
    assert refusal("--multi") == "--multi: no such flag; did you mean '--multirun'?"
    assert main(["--info", "config", "kernel=a16w16"]) == 0


def test_the_readme_has_every_flag() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "aiter.md").read_text()
    table = text[text.index("## Flags") : text.index("## Environment variables")].lower().replace("-", "_")
    for name in _AITER_FLAGS:
        dashes = "_" if name in _SINGLE_DASH else "" if name == "hipb_prefer_ratio" else "__"
        assert f"`{dashes}{name}`" in table, name
