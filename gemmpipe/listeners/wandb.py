"""Weights & Biases: a run of gemmpipe as a run of a project. Option `listener=wandb`, extra `gemmpipe[wandb]`."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gemmpipe.core.errors import UserError
from gemmpipe.listeners import FINISHED, Listener, Product, RunOutcome, RunStart
from gemmpipe.listeners.figures import metrics_of, parameters_of

_START_TIMEOUT_S = 30.0
"""A server that is away must not hold a run up for the 90 s of the package's default."""
_COLUMNS = ("problem", "backend", "config", "time_us", "library_us", "speedup", "floor_share", "policy")


@dataclass(kw_only=True, eq=False)
class Wandb(Listener):
    """Logs parameters at the start, metrics, a table of the products and files at the end."""

    project: str
    entity: str | None
    run_name: str | None
    mode: Literal["online", "offline"] | None
    artifacts: bool

    _run: Any = field(default=None, init=False)
    _place: str = field(default="", init=False)

    def require(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise UserError("listener=wandb needs wandb: pip install 'gemmpipe[wandb]'")

    def start(self, run: RunStart) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=_START_TIMEOUT_S, disable_git=True)
        wandb.setup(settings)  # silent before init, which would ask for a missing key under the progress, and wait
        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.run_name or run.folder.name,
                mode=self.mode,
                dir=str(run.folder.absolute()),
                config=parameters_of(run),
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            raise UserError(f"{str(error).rstrip('.')}, or add listener.wandb.mode=offline") from None

    def finish(self, outcome: RunOutcome) -> None:
        if self._run is None:
            return
        versions = {f"version.{name}": text for name, text in outcome.versions.items()}
        self._run.config.update({"device": outcome.device, **versions})
        self._run.log(metrics_of(outcome))
        if outcome.products:
            self._run.log({"products": _table(outcome.products)})
        if outcome.error:
            self._run.summary["error"] = outcome.error
        if self.artifacts:
            self._log_files(outcome)
        offline = f"{Path(self._run.dir).parent} (offline: wandb sync FOLDER sends it)"
        self._place = offline if self._run.offline else str(self._run.url)
        self._run.finish(exit_code=0 if outcome.state == FINISHED and not outcome.exit_code else 1)

    def place(self) -> str:
        """The address of the run, or the folder of an offline one and how to send it."""
        return self._place

    def _log_files(self, outcome: RunOutcome) -> None:
        """The files of the run as one artifact."""
        import wandb

        artifact = wandb.Artifact("gemmpipe-run", type="tuned_tables")
        for folder, paths in (("tables", outcome.tables), ("tuned", outcome.files)):
            for path in paths:
                if path.is_file():
                    artifact.add_file(str(path), name=f"{folder}/{path.name}")
        if outcome.report is not None:
            artifact.add_file(str(outcome.report), name=outcome.report.name)
        self._run.log_artifact(artifact)


def _table(products: tuple[Product, ...]) -> Any:
    import wandb

    rows: list[Iterable[Any]] = [[getattr(product, name) for name in _COLUMNS] for product in products]
    return wandb.Table(columns=list(_COLUMNS), data=rows)
