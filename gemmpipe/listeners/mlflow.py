"""MLflow: a run of gemmpipe as a run of an experiment. Option `listener=mlflow`, extra `gemmpipe[mlflow]`."""

import importlib.util
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmpipe.core.errors import UserError
from gemmpipe.listeners import FINISHED, INTERRUPTED, Listener, RunOutcome, RunStart
from gemmpipe.listeners.figures import metrics_of, parameters_of

_BATCH = 500
"""Metrics per request; servers take 1,000."""
_MAX_VALUE = 500
"""Characters of a parameter: older servers refuse more."""
_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "60",
}
"""Defaults of this process, unless the user has set others: a server that is away would hold a run up for minutes."""


@dataclass(kw_only=True, eq=False)
class Mlflow(Listener):
    """Logs parameters at the start, metrics and files at the end."""

    tracking_uri: str | None
    experiment: str
    run_name: str | None
    artifacts: bool

    _client: Any = field(default=None, init=False)
    _run: str = field(default="", init=False)
    _place: str = field(default="", init=False)

    def require(self) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise UserError("listener=mlflow needs mlflow: pip install 'gemmpipe[mlflow]'")

    def start(self, run: RunStart) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(Path("mlruns").absolute())
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user chose a folder
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=_as_uri(uri))
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(self.experiment)
        run_name = self.run_name or run.folder.name
        started = self._client.create_run(experiment, run_name=run_name)
        self._place = f"{uri} (experiment {self.experiment}, run {run_name})"
        self._run = started.info.run_id
        self._log_parameters(parameters_of(run))
        self._client.set_tag(self._run, "gemmpipe.folder", str(run.folder))

    def finish(self, outcome: RunOutcome) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            return
        versions = {f"version.{name}": text for name, text in outcome.versions.items()}
        self._log_parameters({"device": outcome.device, **versions} if outcome.device else versions)
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, 0) for name, value in metrics_of(outcome).items()]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _BATCH])
        if outcome.error:
            self._client.set_tag(self._run, "gemmpipe.error", outcome.error[:_MAX_VALUE])
        for path in (*outcome.tables, *outcome.files) if self.artifacts else ():
            if path.is_file():
                self._client.log_artifact(self._run, str(path), "tables" if path in outcome.tables else "tuned")
        if self.artifacts and outcome.report is not None:
            self._client.log_artifact(self._run, str(outcome.report))
        status = {FINISHED: "FINISHED", INTERRUPTED: "KILLED"}.get(outcome.state, "FAILED")
        self._client.set_terminated(self._run, status=status)

    def place(self) -> str:
        """The server, database or folder, with the names of the experiment and the run."""
        return self._place

    def _log_parameters(self, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value[:_MAX_VALUE]) for name, value in values.items() if value]
        if params:
            self._client.log_batch(self._run, params=params)


def _as_uri(uri: str) -> str:
    """A folder as a URI; another URI as it is."""
    return Path(uri).expanduser().absolute().as_uri() if ":" not in uri or uri.startswith("/") else uri
