"""One run: the composed configuration built, carried out, and its end turned into an exit code."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe.cli.progress import Terminal
from gemmpipe.cli.reports import INTERRUPTED, as_bug, of_the_machine, report, report_bug
from gemmpipe.cli.request import Request
from gemmpipe.cli.streams import STDOUT, silence_the_lost, writing
from gemmpipe.cli.unbegun import can_go_on, forget
from gemmpipe.errors import GemmpipeError
from gemmpipe.events import Events
from gemmpipe.forkserver import forkserver

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gemmpipe.plan import Plan


def check_job(cfg: "DictConfig", run_dir: Path, request: Request) -> None:
    """Find a mistake in a job of a sweep before the jobs in front of it have run for hours.

    Raises what the job would end with, as far as its configuration alone tells.
    """
    from gemmpipe.plan import check_chain

    request.folders.make_importable()
    try:
        plan = _plan(cfg, request, run_dir)
        if plan.pipeline != "doctor" and plan.reuse is None:
            check_chain(plan, None)
    except (GemmpipeError, OSError):
        raise
    except Exception as error:
        raise as_bug(error, request.folders.config_dir) from error


def run_job(cfg: "DictConfig", request: Request) -> int:
    """Carry out one run and return its exit code.

    Raises KeyboardInterrupt when the user stopped it, with the run's folder where it can go on.
    """
    from hydra.core.hydra_config import HydraConfig

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        code = _carry_out(cfg, request, run_dir)
    except GemmpipeError as error:
        forget(run_dir)
        return report(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        forget(run_dir)
        silence_the_lost()  # what is still buffered would be told once more
        return report(of_the_machine(error), error)
    except Exception as error:  # noqa: BLE001 (a bug in one run of a sweep must not end the others)
        forget(run_dir)
        return report_bug(error, request.folders.config_dir)
    if code == INTERRUPTED:
        forget(run_dir)
        raise KeyboardInterrupt(
            *([run_dir] if can_go_on(run_dir) else [])
        )  # a sweep would start its next run otherwise
    return code


_BESIDE = {"screen", "bench", "lineup", "engine"}
"""Stages for which processes are started: what these import is imported while the driver imports its own."""


def _carry_out(cfg: "DictConfig", request: Request, run_dir: Path) -> int:
    chain = cfg.get("chain")
    if isinstance(chain, Iterable) and not _BESIDE.isdisjoint(map(str, chain)):
        forkserver()
    request.folders.make_importable()
    examines = request.pipeline == "doctor"
    with Terminal(verbose=cfg.verbose is True, is_all=examines) as terminal:
        events = Events(listeners=[terminal])
        plan = _plan(cfg, request, run_dir)
        if examines:
            from gemmpipe.doctor import examine

            with writing(STDOUT):
                return examine(plan, events)
        from gemmpipe.runner import run

        return run(plan, events)


def _plan(cfg: "DictConfig", request: Request, run_dir: Path) -> "Plan":
    """What the configuration means. Raises UserError for whatever is wrong with it by itself."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from gemmpipe.config import Origin, build
    from gemmpipe.plan import check_below

    typed = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # unresolved, as it was typed
    origin = Origin(
        pipeline=request.pipeline,
        run_dir=run_dir,
        overrides=tuple(str(word) for word in typed) if isinstance(typed, list) else (),
        python_path=request.folders.python_path,
        allowed=request.folders.named_code(),
    )
    plan = build(cfg, origin)
    if request.recipe:
        check_below(plan, request.recipe, request.typed)
    return plan
