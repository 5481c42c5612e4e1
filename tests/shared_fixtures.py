"""Fixtures of all tests, and the choice of tests: command lines in an empty folder, small families, a device."""

import logging
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from forked_programs import Forking
from hydra._internal.hydra import Hydra
from hydra_files import read_once
from hypothesis import HealthCheck, settings
from interpreter_process import Interpreter
from kinds import kind_of, nothing_started
from search_setup import HOPPER
from shipped_rows import copy_rows

from gemmpipe import __version__
from gemmpipe.bench import forkserver
from gemmpipe.cli.main import main
from gemmpipe.core.data import Device, Problem, Scalar
from gemmpipe.core.events import Events
from gemmpipe.core.paths import shipped_tables
from gemmpipe.executors import slots, supervisor
from gemmpipe.family import Family, GemmSpec, Inputs, KernelDefaults, KeyColumn, Scaling, Weights
from gemmpipe.pipeline.plan import Plan
from gemmpipe.stages.screen import search_processes

# Deadlines would fail on a busy machine.
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("busy")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

KEY = tuple(KeyColumn(name=name, kind="int") for name in ("M", "N", "K"))
BF16_KEY = (
    *KEY,
    KeyColumn(name="bias", kind="bool"),
    KeyColumn(name="dtype", kind="dtype"),
    KeyColumn(name="outdtype", kind="dtype", aliases=("out_dtype",)),
    KeyColumn(name="scaleAB", kind="bool", default=False),
    KeyColumn(name="bpreshuffle", kind="bool", default=False),
)


def _sixteen_spec(problem: Problem) -> GemmSpec:
    m, n, k = (int(str(problem[name])) for name in ("M", "N", "K"))
    dtype, out = str(problem["dtype"]), str(problem["outdtype"])
    return GemmSpec(m=m, n=n, k=k, x_dtype=dtype, w_dtype=dtype, out_dtype=out, bias=bool(problem["bias"]))


def _block_spec(problem: Problem) -> GemmSpec:
    m, n, k = (int(str(problem[name])) for name in ("M", "N", "K"))
    fp8 = "float8_e4m3fn"
    x_scale, w_scale = Scaling(granularity="block", block=(1, 128)), Scaling(granularity="block", block=(128, 128))
    return GemmSpec(m=m, n=n, k=k, x_dtype=fp8, w_dtype=fp8, out_dtype="bfloat16", x_scale=x_scale, w_scale=w_scale)


def _sixteen_defaults(defaults: KernelDefaults, gfx: str) -> Mapping[str, Scalar]:
    dtype = defaults.dtype or "bfloat16"
    return {"dtype": dtype, "outdtype": defaults.out_dtype or dtype, "bias": bool(defaults.bias)}


def _weights(spec: GemmSpec, generator: torch.Generator) -> Weights:
    return Weights(w=torch.randn(spec.n, spec.k, generator=generator))


def _inputs(spec: GemmSpec, generator: torch.Generator) -> Inputs:
    return Inputs(x=torch.randn(spec.m, spec.k, generator=generator))


def _family(name: str, block: bool) -> Family:
    return Family(
        name=name,
        key_columns=KEY if block else BF16_KEY,
        csv_name=f"{name}_tuned_gemm.csv",
        json_tag=name.upper(),
        entry_point=f"gemm_{name}",
        key_defaults=(lambda defaults, gfx: {}) if block else _sixteen_defaults,
        spec=_block_spec if block else _sixteen_spec,
        make_weights=_weights,
        make_inputs=_inputs,
        reference=lambda spec, inputs, weights: inputs.x @ weights.w.T,
        tolerance=lambda spec: (0.01, 0.01),
        flops=lambda spec: 2.0 * spec.m * spec.n * spec.k,
        bytes_moved=lambda spec: float(spec.m * spec.k + spec.n * spec.k + spec.m * spec.n),
        baseline=("torch",),
        implementations=(),
        lm_head=not block,
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the marker of its kind; without a GPU, one case of each test that needs one says so."""
    for item in items:
        kind = kind_of(item)
        if kind:
            item.add_marker(kind)
    if torch.cuda.is_available():
        return
    first = {_function(item): item for item in reversed(items)}
    left = [item for item in items if item.get_closest_marker("gpu") and first[_function(item)] is not item]
    config.hook.pytest_deselected(items=left)
    others = {*left}
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(tryfirst=True)  # before xdist tells the order
def pytest_collection_finish(session: pytest.Session) -> None:
    """Put files that share a process together; of two workers one begins at the start, the other one in the middle."""
    forking, interpreting = (_files_using(session.items, name) for name in ("forked_programs", "interpreter"))
    first = [item for item in session.items if item.path in forking]
    middle = [item for item in session.items if item.path in interpreting - forking]
    rest = [item for item in session.items if item.path not in forking | interpreting]
    before = max(0, len(session.items) // 2 - len(first))
    while 0 < before < len(rest) and rest[before].path == rest[before - 1].path:
        before += 1
    session.items[:] = [*first, *rest[:before], *middle, *rest[before:]]


def _files_using(items: list[pytest.Item], fixture: str) -> set[Path]:
    return {item.path for item in items if fixture in getattr(item, "fixturenames", ())}


def _function(item: pytest.Item) -> tuple[str, bool]:
    """The test of a case; its slow cases are a test of their own."""
    return item.nodeid.partition("[")[0], item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _unit_tests_start_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `-m unit` a test that starts a process or compiles fails; among others it may find these done by another."""
    if "unit" not in request.config.getoption("markexpr") or request.node.get_closest_marker("unit") is None:
        yield
        return
    with nothing_started() as refused:
        yield
    if refused:
        pytest.fail(f"not a unit test (tests/kinds.py): it calls {', '.join(sorted(set(refused)))}")


@pytest.fixture(scope="session", autouse=True)
def _hydra_composes_once() -> Iterator[None]:
    """Hydra composes a configuration twice: first for `hydra.mode`, which no test sets; that is half of a command."""
    with mock.patch.object(Hydra, "get_mode", return_value=None), read_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All workers of a session share one Triton cache."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ["TRITON_CACHE_DIR"] = str(shared / "triton")


@pytest.fixture(autouse=True)
def _usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screens without a terminal have 80 columns, whatever the shell or a library exports."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Device locks lie in the temporary folder: runs of this process do not wait for other runs on this machine."""
    tmp_path_factory.getbasetemp()  # stays where it is
    folder = tempfile.mkdtemp(prefix="gt-")  # a short name, as sockets lie there too
    os.chmod(folder, 0o1777)  # as /tmp: some tests run programs of another user
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)  # after its own, -100
    with mock.patch.dict(os.environ, {"TMPDIR": folder}), mock.patch.object(tempfile, "tempdir", folder):
        yield


@pytest.fixture(scope="session")
def sixteen() -> Family:
    """A 16-bit family with aiter's bf16 key and `lm_head`."""
    return _family("small16", block=False)


@pytest.fixture(scope="session")
def blockscale() -> Family:
    """An fp8 family with 1x128 and 128x128 scales, keyed by M, N, K."""
    return _family("smallblock", block=True)


@pytest.fixture(scope="session")
def no_words() -> KernelDefaults:
    """No `kernel.*` value given."""
    return KernelDefaults(dtype=None, out_dtype=None, bias=None)


@pytest.fixture(scope="session")
def h200() -> Device:
    """The H200 with the properties that its driver reports."""
    return HOPPER


@pytest.fixture(scope="session")
def h200_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tables as they are shipped, without rows that this checkout's own runs added."""
    folder = tmp_path_factory.mktemp("h200_tables")
    copy_rows(shipped_tables(), folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current directory of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that reach the runner, which is replaced: none is executed."""
    found: list[Plan] = []

    def run(plan: Plan, events: Events) -> int:
        found.append(plan)
        return 0

    monkeypatch.setattr("gemmpipe.pipeline.runner.run", run)
    return found


@pytest.fixture
def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line with a usage error; returns its single line on stderr, without `gemmpipe: `."""

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        out, error = capsys.readouterr()
        assert out == "" or (out.startswith(f"gemmpipe {__version__}: ") and out.count("\n") == 1)  # what was to run
        error = error[error.index("\n") + 1 :] if error.startswith("report: reading ") else error  # what was to be read
        assert error.startswith("gemmpipe: ")
        assert error.count("\n") == 1
        assert "internal error" not in error
        return error.removeprefix("gemmpipe: ").rstrip("\n")

    return refused


@pytest.fixture(autouse=True)
def _enabled_loggers() -> Iterator[None]:
    """Reverts the logging setup of Hydra after a test that ran a command line in this process."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("gemmpipe") and isinstance(logger, logging.Logger):
            logger.disabled = False


FAULTY = Path(__file__).parent / "faulty"


@pytest.fixture(scope="session")
def faulty_arguments() -> tuple[str, ...]:
    """Arguments that tune the family of tests/faulty on the CPU, with short timing; two problems by default."""
    return (
        f"--config-dir={FAULTY}",
        "kernel=faulty",
        "shapes=list",
        "shapes.items=[{M: [8, 16], N: 32, K: 64}]",
        "backend=[faulty,torch]",
        "format=[csv]",
        "device=cpu",
        "timer@stages.bench.timer=quick",
        "executor.timeout_s=1",
        "stages.bench.max_foreign_pct=null",  # other tests use the cores
        "stages.screen.margin_pct=100000",  # all enter the finals, which distinguish the faults
    )


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries to start a process in this process as ever, with a tenth of the pauses between them."""
    pauses_s = tuple(pause / 10 for pause in forkserver.RETRY_PAUSES_S)
    for module in (forkserver, slots, supervisor, search_processes):
        monkeypatch.setattr(module, "RETRY_PAUSES_S", pauses_s)


@pytest.fixture
def own_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device locks in the test's folder, independent of other runs on this machine."""
    monkeypatch.setattr("gemmpipe.executors.local.tempfile", SimpleNamespace(gettempdir=lambda: str(folder)))


@pytest.fixture
def scaled_on_cpu() -> None:
    """Skips the test if torch has no scaled product on CPUs, such as torch 2.11."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2.out", "CPU"):
        pytest.skip(f"torch {torch.__version__} multiplies scaled operands on GPUs only")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs cases under Triton's interpreter, in one process."""
    running = Interpreter()
    yield running
    running.close()


@pytest.fixture(scope="session")
def forked_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    """Runs programs without a new interpreter, which takes seconds to import torch."""
    running = Forking(folder=tmp_path_factory.mktemp("printed"))
    yield running
    running.close()
