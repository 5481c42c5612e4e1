"""Command lines: the plans that they make, and the message of each error."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmpipe.cli.command_line import parse_command_line
from gemmpipe.cli.main import main
from gemmpipe.cli.overrides import hydra_overrides, quote
from gemmpipe.pipeline.plan import Plan

Refusal = Callable[..., str]


def test_defaults_reach_the_runner(plans: list[Plan], folder: Path) -> None:
    assert main(["shapes=llama70b"]) == 0
    (plan,) = plans
    assert plan.pipeline == "tune"
    assert plan.chain == ("capture", "screen", "bench", "engine", "select", "merge")
    assert plan.family.name == "a8w8_blockscale"
    assert plan.overrides == ("shapes=llama70b",)
    assert plan.run_dir.parent == folder / "outputs" / "runs" / "tune"


@pytest.mark.parametrize(
    "argv",
    [
        ["quick", "kernel=a16w16", "shapes.tp=2"],
        ["quick", "kernel=a16w16", "--run", "shapes.tp=2"],
        ["--config-dir", ".", "quick", "kernel=a16w16", "shapes.tp=2"],
        ["quick", "kernel=a16w16", "--config-dir=.", "shapes.tp=2"],
        ["quick", "kernel=a16w16", "-cd", ".", "shapes.tp=8", "shapes.tp=2"],
    ],
)
def test_arguments_and_flags_in_any_order(plans: list[Plan], argv: list[str]) -> None:
    assert main(argv) == 0
    (plan,) = plans
    assert plan.pipeline == "quick"
    assert plan.family.name == "a16w16"
    assert plan.source.tp == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "argv",
    [
        ["-m", "kernel=a16w16,a8w8_blockscale", "shapes=llama8b,qwen8b"],
        ["kernel=a16w16,a8w8_blockscale", "-m", "shapes=llama8b,qwen8b"],
    ],
)
def test_sweep_runs_every_combination_in_folders_of_their_own(plans: list[Plan], argv: list[str]) -> None:
    assert main(argv) == 0
    assert [plan.run_dir.name for plan in plans] == [
        "0_a16w16_llama8b",
        "1_a16w16_qwen8b",
        "2_a8w8_blockscale_llama8b",
        "3_a8w8_blockscale_qwen8b",
    ]


def test_space_axes_on_the_command_line_are_pinned(plans: list[Plan]) -> None:
    assert main(["space.num_stages=[3,4]", "space.num_warps=8"]) == 0
    assert plans[0].space.axes["num_stages"] == (3, 4)
    assert plans[0].space.axes["num_warps"] == (8,)
    assert set(plans[0].space.pinned) == {"num_stages", "num_warps"}


def test_runs_in_one_second_have_folders_of_their_own(plans: list[Plan]) -> None:
    assert main([]) == main(["verbose=true"]) == main(["verbose=true"]) == 0
    assert len({plan.run_dir for plan in plans}) == len(plans) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["kernl=x"], "kernl: no such key; did you mean 'kernel'?"),
        (["kernel=a16w1"], "kernel: no option 'a16w1'; did you mean 'a16w16'?"),
        (["kernel=relu2", "backend=[triton,eager]"], "kernel: no option 'relu2'; known: a16w16, a16w16_atomic"),
        (["backend=[triton,eager]", "kernel=relu2"], "backend: no option 'eager'; did you mean 'peers'?"),
        (["backend=[trito]"], "backend: no option 'trito'; did you mean 'triton'?"),
        (["backend=[vllm_pair]"], "backend: no option 'vllm_pair'; it is a part of backend=engine_pairs"),
        (["shapes=lama70b"], "shapes: no option 'lama70b'; did you mean 'llama70b'?"),
        (["stages.screen.kep=3"], "stages.screen.kep: no such key; did you mean 'keep'?"),
        (["stages={screen:{kep:3}}"], "stages.screen.kep: no such key; did you mean 'keep'?"),
        (["stages.screen.keep=abc"], "stages.screen.keep: 'abc' given, expected a whole number"),
        (["space.num_stage=[3]"], "space.num_stage: no such key; did you mean 'num_stages'?"),
        (["+space.num_stage=[3]"], "space.num_stage: the space has no such axis; did you mean 'num_stages'?"),
        (["chain=[screen,benc]"], "chain: no stage 'benc'; did you mean 'bench'?"),
        (["kernel=a8w8", "kernel.key.granularity=tokn"], "kernel.key.granularity: 'tokn', expected one of row, tensor"),
        (["kernel=fmoe", "kernel.key.q_type=blok"], "kernel.key.q_type: 'blok', expected one of no, none, per_token"),
        (
            ["kernel=a8w8_blockscale", "kernel.key.x_scale=rows"],
            "kernel.key.x_scale: 'rows', expected one of row, column",
        ),
        (
            ["kernel=a16w16", "kernel.key.x_scale=row"],
            "kernel.key.x_scale: no key column of a16w16; did you mean 'scaleAB'?",
        ),
        (["kernel=fmoe", "+kernel.key.tpk=4"], "kernel.key.tpk: no key column of fmoe; did you mean 'topk'?"),
        (["format.vllm.device_name=x"], "format.vllm: 'vllm' is not chosen; format=[csv,triton_json,vllm] adds it"),
        (["timer=quick"], "timer=quick: chosen for one stage each, as in timer@stages.bench.timer=quick"),
        (["stages.bench.timer=quick"], "stages.bench.timer=quick: an option, chosen by timer@stages.bench.timer=quick"),
        (
            ["replay", "search.algorithm=random"],
            "search.algorithm=random: an option, chosen by search@search.algorithm=random",
        ),
        (["timer@stages.bench.timer=quik"], "timer: no option 'quik'; did you mean 'quick'?"),
        (["stage@stages.screen=bench"], "stages.screen: a Bench stage given, expected one named Screen"),
        (["kernel=a16w16,a8w8_blockscale"], "kernel=a16w16,a8w8_blockscale: several values need -m"),
        (["shapes.nsets.foo=3"], "shapes.nsets.foo: no such key"),
        (["shapes.nsets=[1,x]"], "shapes.nsets: [1, x] given, expected [a whole number, ...]"),
        (["=x"], "=x: expected key=value"),
        ([""], "'': empty argument; expected a pipeline, a recipe, a flag or key=value"),
        (["quick", " "], "' ': empty argument"),
        (["kernel=null"], "kernel: no option 'null'; known: a16w16"),
        (["kernel=true"], "kernel: no option 'true'; known: a16w16"),
        (["kernel=3"], "kernel: no option '3'; known: a16w16"),
        (["hydra/launcher=basik"], "hydra/launcher: no option 'basik'; did you mean 'basic'?"),
        (["tun"], "tun: no such pipeline; did you mean 'tune'?"),
        (["shw"], "shw: no such pipeline; did you mean 'show'?"),
        (["rnus"], "rnus: no such pipeline; did you mean 'runs'?"),
        (["help"], "help: no such pipeline; expected gemmpipe --help"),
        (["version"], "version: no such pipeline; expected gemmpipe --version"),
        (["help", "show"], "help show: no such command; expected gemmpipe --help show"),
        (["tune", "quick"], "quick: the pipeline is 'tune' already; expected key=value (gemmpipe --help tune)"),
        (
            ["merge", "a.csv", "b.csv", "output=c.csv"],
            "a.csv: the pipeline is 'merge' already; expected 'inputs=[a.csv,b.csv]'",
        ),
        (
            ["merge", "of it's.csv", "b.csv"],
            "of it's.csv: the pipeline is 'merge' already; expected " + shlex.quote("""inputs=["of it's.csv",b.csv]"""),
        ),
        (["verify", "a b.csv"], "a b.csv: the pipeline is 'verify' already; expected 'table=a b.csv'"),
        (["verify", "a.csv"], "a.csv: the pipeline is 'verify' already; expected table=a.csv"),
        (["verify", "last"], "last: the pipeline is 'verify' already; expected table=outputs/tuned/NAME.csv"),
        (["shwo", "last"], "shwo: no such command; did you mean 'show'?"),
        (
            ["shapes=list", "shapes.items=[{M:", "[1],", "N:", "64}]", "device=cpu"],
            "shapes.items=[{M:: a value with blanks is one argument; expected quotes: 'shapes.items=[{M: [1], N: 64}]'",
        ),
        (["shapes.tp", "4"], "shapes.tp 4: a key and its value are one argument: shapes.tp=4"),
        (["verbose", "true"], "verbose true: a key and its value are one argument: verbose=true"),
        (["kernel=a16w16", "tune"], "tune: a pipeline or a recipe comes before the first key=value"),
        (["--cfg", "jb"], "--cfg jb: expected one of job, hydra, all; did you mean 'job'?"),
        (["--multi"], "--multi: no such flag; did you mean '--multirun'?"),
        (["--kernel=a16w16"], "--kernel=a16w16: no such flag; values have no dashes: kernel=a16w16"),
        (["--shapes", "llama8b"], "--shapes: no such flag; values have no dashes: shapes=llama8b"),
        (["--pm=4"], "--pm=4: no such flag; known: --cfg"),
        (["-p", "space"], "--package: applies to --cfg only; expected --cfg job --package"),
        (["--cfg", "job", "-p", "spaces"], "--package spaces: no such part of the configuration"),
        (["shapes"], "shapes: no such pipeline; expected shapes=VALUE"),
        (["search.budget_s"], "search.budget_s: no such pipeline; expected search.budget_s=VALUE"),
        (["output="], "output: '' given, expected a folder, or NAME.csv"),
        (
            ["device=gpu"],
            "device: no option 'gpu'; expected device=cuda (NVIDIA), device=hip (AMD), or auto, the default",
        ),
        (["device=cud"], "device: no option 'cud'; did you mean 'cuda'? known: auto, cpu, cuda, hip, shared"),
        (["shapes.items=[[1,64,64]]"], "shapes.items: no such key of this option of shapes; expected shapes=list '"),
        (
            ["--help", "srch"],
            "--help srch: no such group of options, no pipeline and no command; did you mean 'search'?",
        ),
        (
            ["--help", "own_pace"],
            "--help own_pace: OWN_PACE is a knob of space=a8w8_blockscale and 1 more; expected gemmpipe --help space=",
        ),
        (["--help", "search=halvin"], "--help search=halvin: no option 'halvin'; did you mean 'halving'?"),
        (["--config-name", "x"], "--config-name: not available"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
        (["--config-dir"], "--config-dir: expected a value"),
        (["--cfg", "job", "-m"], "--cfg: cannot be combined with --multirun"),
        (["kernel=a16w16", "-sc"], "-sc: expected install=bash"),
        (["gone.yaml"], "gone.yaml: cannot be read"),
        (["resume=last"], "resume=last: no run that can be resumed under outputs/runs"),
        (["reuse=nowhere"], "reuse=nowhere: no such folder"),
        (["output=${nope}"], "output: Interpolation key 'nope' not found"),
        (["search._target_=os.system"], "search._target_: os.system: a class outside gemmpipe"),
        (
            ["search._target_=gemmpipe.core.paths.write_atomic"],
            "search._target_: gemmpipe.core.paths.write_atomic is no Search",
        ),
        (["kernel.family=this"], "kernel.family: no family 'this'"),
        (["version=2"], "version: 2 given, expected 1"),
        (["shapes.csv"], "shapes.csv: no such pipeline; a file of shapes is 'shapes=csv shapes.path=shapes.csv'"),
        (
            ["kernel=[a16w16, a8w8]"],
            "kernel: [a16w16, a8w8] given, expected one option; a sweep is -m kernel=a16w16,a8",
        ),
        (["stages.screen.kep=3"], "stages.screen.kep: no such key; did you mean 'keep'? known: bucket_keep, keep"),
        (["search.rungs=1"], "search.rungs: 1 given, expected keys and values"),
        (["search.rungs.cutoff=0.5"], "search.rungs.cutoff: 0.5 given, expected at least 1"),
        (["search.budget_s=0"], "search.budget_s: 0 given, expected more than 0 seconds, or null"),
        (["shapes=list", "shapes.list.items=[[1,2,3]]"], "shapes.list: no such key; known: items"),
        (["shapes=list", "shapes.items={M:4}"], "shapes.items: keys and values given, expected a list"),
        (["~backend"], "~backend: cannot be left out; expected backend=NAME, or backend=[]"),
        (["backend.torch=1"], "backend.torch: 1 given, expected keys and values"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_line(refusal: Refusal, plans: list[Plan], argv: list[str], message: str) -> None:
    assert refusal(*argv).startswith(message)
    assert plans == []
    assert not list(Path("outputs").glob("runs/*/*"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("csv", "a CSV file"),
        ("log", "a server's log"),
        ("trace", "a trace of"),
        ("tunableop", "a CSV file of TunableOp"),
    ],
)
def test_an_option_that_reads_files_names_their_kind(refusal: Refusal, option: str, message: str) -> None:
    assert refusal("capture", "kernel=a16w16", f"shapes={option}").startswith(
        f"shapes.path: missing, expected {message}"
    )


@pytest.mark.parametrize("group", ["kernel", "device", "+device", "timer@stages.bench.timer"])
def test_a_name_that_is_too_long_for_a_file(refusal: Refusal, group: str) -> None:
    message = refusal(f"{group}={'x' * 5000}")
    assert message.startswith(f"{group.lstrip('+').split('@')[0]}: no option 'xxx")
    assert len(message) <= 500


def test_a_path_that_is_too_long_for_a_file(refusal: Refusal) -> None:
    message = refusal("capture", "kernel=a16w16", "shapes=csv", f"shapes.path={'x' * 5000}")
    assert message.endswith("File name too long")
    assert len(message) <= 500


def test_quoting_survives_every_character() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for text in ['a"b', "a'b", "a\\", 'a\\"', "a b, c", "${x}", "N=1,K=2[128, 128].json", "~x", "(", "{", ""]:
        parsed = OverridesParser.create().parse_override(f"k={quote(text)}")
        assert str(parsed.value().text if hasattr(parsed.value(), "text") else parsed.value()) == text


@pytest.mark.parametrize("name", ["N=1,K=2[128, 128].json", "a(b).csv", "a b.csv", "a,b.csv", "a~b.csv"])
def test_awkward_paths_arrive_whole(plans: list[Plan], folder: Path, name: str) -> None:
    assert main(["shapes=csv", f"shapes.path={folder / name}"]) == 0
    assert plans[0].source.path == str(folder / name)  # type: ignore[attr-defined]


def test_home_is_expanded() -> None:
    home = str(Path.home())
    assert hydra_overrides(["output=~/x"], multirun=False) == (f"output={home}/x",)
    assert hydra_overrides(["shapes.path=[~/a.csv,~/b.csv]"], multirun=False) == (
        f"shapes.path=[{home}/a.csv,{home}/b.csv]",
    )


def test_any_backend_can_be_preferred(plans: list[Plan]) -> None:
    assert main(["stages.select.prefer.mine=0.98", "stages.select.prefer.torch=0.9"]) == 0
    prefer = plans[0].stages["select"].prefer  # type: ignore[attr-defined]
    assert prefer == {"cublaslt": 0.995, "hipblaslt": 0.995, "torch": 0.9, "mine": 0.98}


def test_info_does_not_swallow_an_override() -> None:
    line = parse_command_line(["--info", "kernel=a16w16"])
    assert line.argv == ["--info=all"]
    assert line.overrides == ("kernel=a16w16",)


def test_users_folder_brings_options_pipelines_and_python(plans: list[Plan], folder: Path, refusal: Refusal) -> None:
    own = folder / "own"
    (own / "search").mkdir(parents=True)
    (own / "space").mkdir()
    (own / "mysearch.py").write_text(
        "from gemmpipe.search.simple import Exhaustive\nclass Mine(Exhaustive):\n    __slots__ = ()\n"
    )
    mine = "defaults:\n  - _budget\n  - _self_\n\n_target_: mysearch.Mine\n"
    (own / "search" / "mine.yaml").write_text(mine)
    (own / "nightly.yaml").write_text("defaults:\n  - tune\n  - override search: mine\n  - _self_\n\nbatch: 3\n")
    assert main(["nightly", "--config-dir", str(own)]) == 0
    assert type(plans[0].search).__name__ == "Mine"
    assert plans[0].batch == 3
    assert plans[0].python_path == (str(own),)
    (own / "search" / "mine.yaml").write_text(mine + "extra: 1\n")
    assert refusal("--config-dir", str(own), "search=mine").startswith("search.extra: no such key")
    (own / "nightly.yaml").write_text("defaults:\n  - tune\n  - _self_\nbach: 3\n")
    assert refusal("nightly", "--config-dir", str(own)) == "bach: no such key; did you mean 'batch'?"
    (own / "nightly.yaml").write_text("defaults:\n  - tune\n  - override search: min\n")
    assert "search: no option 'min'; did you mean 'mine'?" in refusal("nightly", "--config-dir", str(own))
    (own / "nightly.yaml").write_text("batch: [\n")
    assert "nightly.yaml: line 2" in refusal("nightly", "--config-dir", str(own))
    (own / "nightly.yaml").unlink()
    (own / "space" / "a16w16.yaml").write_text("when: []\n")
    assert "gemmpipe ships an option 'space=a16w16'" in refusal("--config-dir", str(own))


@pytest.mark.parametrize(
    "argv", [["output=a\udcff"], ["\udcff"], ["-cd", "\udcff"], ["shapes=csv", "shapes.path=\udcff"]]
)
def test_invalid_utf8_is_refused_before_anything_runs(plans: list[Plan], refusal: Refusal, argv: list[str]) -> None:
    """It could not be written to the manifest after hours of timing."""
    argument = argv[-1].replace("\udcff", "\\xff")
    assert f"{argument}: not valid UTF-8; expected text" in refusal(*argv)
    assert not plans
