"""One run: builds the composed configuration, runs it, and returns the exit code."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.bench.forkserver import forkserver
from gemmpipe.cli import STDOUT, naming_write_errors, silence_lost_streams, tolerating_closed_pipes
from gemmpipe.cli.browser import may_open, open_page
from gemmpipe.cli.errors import as_bug, report_bug, report_error, system_error
from gemmpipe.cli.progress import Terminal
from gemmpipe.cli.request import RunRequest
from gemmpipe.cli.runs import remove_empty_run
from gemmpipe.core.errors import EXIT_INTERRUPTED, GemmpipeError
from gemmpipe.core.events import Events
from gemmpipe.core.paths import REPORT
from gemmpipe.core.renamed import take_notices
from gemmpipe.core.torch_build import may_have_gpu
from gemmpipe.listeners import failed
from gemmpipe.report.run_folder import can_resume

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.listeners.json_stream import JsonStream
    from gemmpipe.pipeline.plan import Plan


def check_job(cfg: "DictConfig", run_dir: Path, request: RunRequest) -> None:
    """Check a job of a sweep before its first job runs, which may take hours.

    Raises the error that the job would end with, as far as its configuration alone shows it.
    """
    from gemmpipe.pipeline.plan import check_chain

    request.folders.make_importable()
    try:
        plan = _build_plan(cfg, request, run_dir)
        if plan.pipeline != "doctor" and plan.reuse is None:
            check_chain(plan, None)
    except (GemmpipeError, OSError):
        raise
    except Exception as error:
        raise as_bug(error, request.folders.config_dir) from error


def run_job(cfg: "DictConfig", request: RunRequest) -> int:
    """Run one job and return its exit code.

    Raises KeyboardInterrupt if the user stopped it, with the run's folder as argument if it can be resumed.
    """
    from hydra.core.hydra_config import HydraConfig

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        code = execute(cfg, request, run_dir)
    except GemmpipeError as error:
        remove_empty_run(run_dir)
        return report_error(error)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except OSError as error:
        remove_empty_run(run_dir)
        silence_lost_streams()  # the buffered rest would raise again
        return report_error(system_error(error), error)
    except Exception as error:  # noqa: BLE001 (a bug in one run of a sweep must not end the others)
        remove_empty_run(run_dir)
        return report_bug(error, request.folders.config_dir)
    if code == EXIT_INTERRUPTED:
        remove_empty_run(run_dir)
        raise KeyboardInterrupt(
            *([run_dir] if can_resume(run_dir) else [])
        )  # a sweep would start its next run otherwise
    return code


_TIMING_STAGES = {"screen", "bench", "lineup", "engine"}
"""Stages that start processes: where the driver asks torch for a GPU, their imports run while it imports torch."""


def execute(cfg: "DictConfig", request: RunRequest, run_dir: Path) -> int:
    """Build the plan of a run and carry it out; returns the exit code. Raises whatever went wrong."""
    chain = cfg.get("chain")
    if isinstance(chain, Iterable) and not _TIMING_STAGES.isdisjoint(map(str, chain)) and may_have_gpu():
        forkserver()
    request.folders.make_importable()
    is_doctor = request.pipeline == "doctor"
    stream = _json_stream() if cfg.get("events") == "json" else None
    with Terminal(verbose=cfg.verbose is True, is_only_output=is_doctor) as terminal:
        events = Events(listeners=[terminal if stream is None else stream])
        try:
            plan = _build_plan(cfg, request, run_dir)
        except BaseException as error:
            if stream is not None:
                stream.finish(failed(error))
            raise
        finally:
            for notice in take_notices():
                events.emit("warning", notice)
        if is_doctor:
            from gemmpipe.cli.doctor import report_environment

            with naming_write_errors(STDOUT):
                return report_environment(plan, events)
        from gemmpipe.pipeline.listening import listening
        from gemmpipe.pipeline.runner import run

        with listening(plan, events, _options(), stream) as attached:
            attached.exit_code = run(plan, events)
        if plan.report and may_open(plan.open) and (page := run_dir / REPORT).is_file():
            open_page(page)
        return attached.exit_code


def _json_stream() -> "JsonStream":
    """The stream of `events=json`; without a reader it is dropped, as the terminal's output does."""
    from gemmpipe.listeners.json_stream import JsonStream

    def write(line: str) -> None:
        with tolerating_closed_pipes():
            print(line, flush=True)

    return JsonStream(write)


def _options() -> dict[str, str]:
    """The options that the configuration chose, by group."""
    from hydra.core.hydra_config import HydraConfig

    choices = HydraConfig.get().runtime.choices
    groups = {str(group): name for group, name in choices.items() if name is not None}
    return {group: str(name) for group, name in groups.items() if "@" not in group and not group.startswith("hydra/")}


def _build_plan(cfg: "DictConfig", request: RunRequest, run_dir: Path) -> "Plan":
    """The plan of a configuration. Raises UserError for an error in it."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from gemmpipe.pipeline.build import RunOrigin, build
    from gemmpipe.pipeline.named_backends import DEFAULT, typed_words
    from gemmpipe.pipeline.plan import check_recipe_paths

    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # unresolved, as typed
    overrides = tuple(str(override) for override in typed) if isinstance(typed, list) else ()
    words = [word for word in typed_words(overrides) if word != DEFAULT]
    origin = RunOrigin(
        pipeline=request.pipeline,
        run_dir=run_dir,
        overrides=overrides,
        python_path=request.folders.python_path,
        allowed=request.folders.target_names(),
        named_backends={word: request.folders.parts("backend", word) for word in words},
    )
    plan = build(cfg, origin)
    if request.recipe:
        check_recipe_paths(plan, request.recipe, request.typed_keys)
    return plan
