"""Files of a run next to its journal: manifest.json and the tables as CSV; the provenance of artifacts."""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmpipe import __version__
from gemmpipe.core import device as devices_of
from gemmpipe.core.data import Device, Problem, Scalar
from gemmpipe.core.errors import UserError
from gemmpipe.core.files import is_formula
from gemmpipe.core.nvml import conditions
from gemmpipe.core.paths import MANIFEST, PROBLEMS, write_atomic
from gemmpipe.executors import Usage
from gemmpipe.journal import Record
from gemmpipe.launch.replays import no_dependent_launch_reason
from gemmpipe.report.results import product_results, run_figures
from gemmpipe.report.run_folder import REUSED, read_manifest
from gemmpipe.stages.history import FORMER_POLICIES, method, native_tables
from gemmpipe.stages.rows import problem_frame
from gemmpipe.stages.workload import saving
from gemmpipe.tables import store
from gemmpipe.tables.merge import BOTH_CLOCKS, DEPENDENT, SHARED_GPU, row_key

if TYPE_CHECKING:
    import pandas as pd

    from gemmpipe.pipeline.plan import Plan
    from gemmpipe.stages import Context


def session_row(plan: "Plan", device: Device, record: Record) -> dict[str, object]:
    """The journal's header row of one session after those of `record`; raises what `policy_of_rows` raises."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "pipeline": plan.pipeline,
        "overrides": list(plan.overrides),
        "device": asdict(device),
        "versions": dict(devices_of.versions()),
        "policy": policy_of_rows(plan, device, record),
        "conditions": dict(conditions(device)),
    }


def policy(plan: "Plan", device: Device) -> str:
    """The timing method: times of different methods are never compared silently."""
    separate, both_clocks = (
        any(getattr(plan.stages[name], property_name, False) for name in plan.chain) and device.kind != "cpu"
        for property_name in ("separate_launches", "both_clocks")
    )
    words = [FORMER_POLICIES["cpu" if device.kind == "cpu" else "gpu"]]
    words += ["separate"] if separate else []
    words += [BOTH_CLOCKS] if both_clocks else []
    words += [] if no_dependent_launch_reason(device) else [DEPENDENT]
    return " ".join([*words, SHARED_GPU] if device.shared else words)


def policy_of_rows(plan: "Plan", device: Device, record: Record) -> str:
    """The policy of this run's rows: of the recorded trials, in a run that times nothing.

    Raises UserError if recorded trials and new ones would be of different timing methods, as after an update.
    """
    now, kind = policy(plan, device), "cpu" if device.kind == "cpu" else "gpu"
    recorded = (
        [str(session.get("policy") or FORMER_POLICIES[kind]) for session in record.sessions] if record.count else []
    )
    if not any(plan.stages[name].uses_device for name in plan.chain):
        return recorded[-1] if recorded else now
    if other := next((each for each in recorded if method(each) != method(now)), None):
        key = "reuse" if plan.reuse else "resume"
        raise UserError(
            f"{key}: its times are '{other}', new ones '{now}', which cannot be compared; expected a new run"
        )
    return now


def device_of(row: Mapping[str, object]) -> Device:
    """The device of a session row."""
    return Device(**row["device"])  # type: ignore[arg-type]


def provenance(plan: "Plan", device: Device) -> dict[str, "Scalar | Mapping[str, Scalar]"]:
    """The content of every artifact's sidecar: time, device, versions, and the command that reproduces it."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gemmpipe": __version__,
        "device": device.name,
        "gfx": device.gfx,
        "cu_num": device.cu_num,
        "versions": dict(devices_of.versions()),
        "conditions": dict(conditions(device)),
        "recipe": shlex.join(["gemmpipe", plan.pipeline, *plan.overrides]),
    }


def has_finished(run_dir: Path) -> bool:
    """True if a session of this run ended with all problems solved."""
    with suppress(UserError):
        return read_manifest(run_dir).get("exit_code") == 0
    return False


def write_tables(plan: "Plan", tables: "Mapping[str, pd.DataFrame]", problems: Sequence[Problem]) -> None:
    """Write the run's tables and problems as CSV, and with `profile=` the trials of every candidate."""
    listed = problem_frame(plan.family, problems)
    if plan.reuse or any("problems" in plan.stages[name].gives for name in plan.chain):
        write_atomic(plan.run_dir / PROBLEMS, table_text(listed))
    for name, frame in tables.items():
        if name == "selections" and "select" not in plan.chain:
            continue  # they are in the tables that they were read from
        if name == "memory_options" and not len(frame):
            continue  # most runs have none
        write_atomic(plan.run_dir / f"{name}.csv", table_text(frame))
    if plan.profile and "trials" in tables:
        profile = listed.drop(columns=["weight", "layer"]).merge(tables["trials"], on="problem", how="right")
        write_atomic(Path(plan.profile), table_text(profile.drop(columns=["problem"])))


def table_text(frame: "pd.DataFrame") -> str:
    """The CSV text of a run's table."""
    if "samples_us" in frame:
        texts = [" ".join(f"{s:.3f}" for s in samples) for samples in frame["samples_us"]]
        frame = frame.assign(samples_us=texts)
    texts_of = frame.select_dtypes(include=["object", "string"]).columns
    frame = frame.assign(**{name: frame[name].map(_as_text) for name in texts_of})
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def _as_text(value: object) -> object:
    """Text with an apostrophe before what a spreadsheet takes as a formula: names and errors may be untrusted."""
    return f"'{value}" if isinstance(value, str) and is_formula(value) else value


@dataclass(frozen=True, kw_only=True)
class Reused:
    """The rows of a tuned table for all problems of a run."""

    table: Path
    rows: "pd.DataFrame"

    @property
    def run_ids(self) -> list[str]:
        """The runs that timed them."""
        return list(dict.fromkeys(str(each) for each in self.rows.get("run_id", ()) if each == each and each))

    def as_object(self) -> dict[str, object]:
        """The entry of the manifest: the table, the number of its rows, and the runs that timed them."""
        return {"table": str(self.table), "problems": len(self.rows), "runs": self.run_ids}


def reused_rows(plan: "Plan", context: "Context") -> Reused | None:
    """The rows of the output's table, where a run that selects had nothing to tune; None for any other run."""
    import pandas as pd

    if "select" not in plan.chain or not context.already_tuned or context.problems:
        return None
    device = (context.device.gfx, context.device.cu_num)
    wanted = {(*device, *(value for _, value in problem.key)) for problem in context.already_tuned}
    for path in native_tables(plan.family, context.output, plan.formats.values()):
        rows = store.read(path, plan.family) if path.is_file() else []
        found = [row for row in rows if row_key(row, plan.family) in wanted]
        if found:
            return Reused(table=path, rows=pd.DataFrame(found))
    return None


def _figures(plan: "Plan", tables: "Mapping[str, pd.DataFrame]") -> dict[str, object] | None:
    """The figures of the run's own selections; None for a run that selected nothing."""
    if "select" not in plan.chain or "selections" not in tables or not len(tables["selections"]):
        return None
    return asdict(run_figures(product_results(tables["selections"], plan.family, plan.rooflines)))


def _earlier_wall_s(run_dir: Path) -> float:
    """The wall time of the run's earlier sessions that wrote a manifest: a run that is resumed costs all of them."""
    with suppress(UserError):
        former = read_manifest(run_dir)
        seconds = (former.get("wall_s"), former.get("earlier_wall_s"))
        return sum(float(each) for each in seconds if isinstance(each, int | float))
    return 0.0


def write(
    plan: "Plan",
    tables: "Mapping[str, pd.DataFrame]",
    context: "Context",
    resources: Sequence[Usage],
    wall_s: float,
    code: int,
    *,
    aborted: bool = False,
) -> None:
    """Write manifest.json: configuration, versions, time per resource, artifacts, exit code.

    Where nothing had to be timed it names the table with the choices, whose rows are written to reused.csv.
    `aborted`: the run was stopped before it wrote its tables; those in its folder are of an earlier session.
    """
    if (reused := reused_rows(plan, context)) is not None:
        write_atomic(plan.run_dir / REUSED, table_text(reused.rows))
    content = {
        "gemmpipe": __version__,
        "pipeline": plan.pipeline,
        "overrides": list(plan.overrides),
        "config": plan.config,
        "provenance": context.provenance,
        "exit_code": code,
        "aborted": aborted,
        "wall_s": round(wall_s, 3),
        "earlier_wall_s": round(_earlier_wall_s(plan.run_dir), 3),
        "account_s": {k: round(v, 3) for k, v in context.stage_seconds.items()},
        "resources": [
            {
                "name": u.name,
                "wall_s": round(u.wall_s, 3),
                "busy_s": {k: round(v, 3) for k, v in u.busy_s.items()},
                "idle_s": round(u.idle_s, 3),
                "unaccounted_s": round(u.unaccounted_s, 3),
            }
            for u in resources
        ],
        "unsolved": context.unsolved,
        "undecided": context.undecided,
        "left": context.left,
        "workload": asdict(found) if "selections" in tables and (found := saving(tables["selections"])) else None,
        "figures": _figures(plan, tables),
        "reused": reused.as_object() if reused is not None else None,
        "files": tables["artifacts"]["file"].tolist() if "artifacts" in tables else [],
    }
    write_atomic(plan.run_dir / MANIFEST, json.dumps(content, indent=2, default=str) + "\n")
