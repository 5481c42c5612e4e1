"""The prebuild stage: compiles the kernels of recorded winners into Triton's cache, with or without a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.core.data import Build, BuildFacts, Device
from gemmpipe.core.device import target_device, usable_cores
from gemmpipe.core.errors import MAX_PROCESSES, check_at_least, check_at_most
from gemmpipe.core.events import counted, verb
from gemmpipe.executors.compile_pool import CompilePool, cache_folder
from gemmpipe.stages import POLL_S, Context, Stage
from gemmpipe.stages.load import Winner, winners

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Prebuild(Stage):
    """Compiles each kernel once per architecture, unless the cache has it."""

    workers: int | None
    timeout_s: float

    needs: ClassVar[tuple[str, ...]] = ("selections", "shortlist")
    gives: ClassVar[tuple[str, ...]] = ("builds", "selections", "shortlist")
    reads: ClassVar[tuple[str, ...]] = ("target",)

    def __post_init__(self) -> None:
        check_at_least(1, workers=self.workers)
        check_at_most(MAX_PROCESSES, workers=self.workers)
        check_at_least(0.1, timeout_s=self.timeout_s)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """Returns a row per build (`schema.BUILDS`), and selections and shortlist without kernels that do not compile.

        A row of the table with such a kernel makes the run end with exit code 1.
        """
        import pandas as pd

        from gemmpipe.core.schema import BUILDS

        plans = self._plans(tables["selections"], context)
        total = sum(len(plan.builds) for plan in plans)
        context.events.emit("stage", "prebuild", total=total, unit="kernels")
        rows: list[dict[str, object]] = []
        selections, shortlist = tables["selections"].copy(), tables["shortlist"]
        for plan in plans:
            facts = dict(self._compile(plan, len(rows), total, context))
            rows += [_row(plan, build, facts[build.id]) for build in plan.builds.values()]
            _report(plan, facts, context)
            for build, problems in plan.needed_by.items():
                if error := facts[build].error:
                    lost = selections["problem"].isin(problems) & (selections["gfx"] == plan.device.gfx)
                    selections.loc[lost, "reason"] = f"compile_error: {error}"
                    shortlist = shortlist[~shortlist["problem"].isin(problems)]
        return {
            "builds": pd.DataFrame(rows, columns=list(BUILDS)),
            "selections": selections,
            "shortlist": shortlist,
        }

    def _plans(self, selections: "pd.DataFrame", context: Context) -> "list[_ArchBuilds]":
        """The builds to compile, by architecture."""
        plans: dict[str, _ArchBuilds] = {}

        def device_for(row: object) -> Device:
            gfx = str(row["gfx"])  # type: ignore[index]
            if gfx not in plans:
                here = context.device.gfx == gfx
                plans[gfx] = _ArchBuilds(device=context.device if here else target_device(gfx))
            return plans[gfx].device

        rows = selections.to_dict("records")
        for winner in winners(context, rows, device_for):  # type: ignore[arg-type]
            plans[winner.device.gfx].add(winner)
        return list(plans.values())

    def _compile(
        self, plan: "_ArchBuilds", before: int, total: int, context: Context
    ) -> Iterator[tuple[str, BuildFacts]]:
        """Yields (build id, facts) as compilers finish; `before` of the stage's `total` builds are finished.

        Raises Interrupted when the user asked to stop, EnvironmentProblem when the cache cannot be written.
        """
        if not plan.builds:
            return
        slots = min(self.workers or usable_cores(), len(plan.builds))
        pool = CompilePool(plan.device, slots, self.timeout_s, context.python_path)
        done = 0
        try:
            for build in plan.builds.values():
                pool.submit(build)
            while done < len(plan.builds):
                wait([pool.ready_pipe], timeout=POLL_S)
                context.check()
                pool.check()
                for message in pool.done():
                    done += 1
                    # In other pipelines the executor's option is the deadline of the pool.
                    error = message.facts.error.replace("executor.compile_timeout_s", "stages.prebuild.timeout_s")
                    facts = replace(message.facts, error=error)
                    context.journal.build(message.build.id, facts)
                    yield message.build.id, facts
                left = len(plan.builds) - done
                running = min(slots, left) / 2 if done else 0.0  # each is halfway, on average
                share = (before + done + running) / total
                context.events.emit("progress", plan.device.gfx, done=before + done, total=total, share=share)
        finally:
            pool.close(kill=done < len(plan.builds))


@dataclass(kw_only=True)
class _ArchBuilds:
    """The kernels of one architecture: builds by id, and the ids of the problems that need each."""

    device: Device
    builds: dict[str, Build] = field(default_factory=dict)
    needed_by: dict[str, list[str]] = field(default_factory=dict)
    libraries: int = 0
    rejected: list[str] = field(default_factory=list)

    def add(self, winner: Winner) -> None:
        """Adds the builds of a row's winner."""
        if winner.cannot_run:
            self.libraries += 1
            return
        if winner.candidate is None or winner.spec is None or winner.implementation is None:
            self.rejected.append(winner.problem.id)
            return
        builds = winner.implementation.builds(winner.spec, winner.candidate.knobs, self.device)
        self.libraries += not builds
        for build in builds:
            self.builds[build.id] = build
            self.needed_by.setdefault(build.id, []).append(winner.problem.id)


def _row(plan: _ArchBuilds, build: Build, facts: BuildFacts) -> dict[str, object]:
    return {
        "gfx": plan.device.gfx,
        "build": build.id,
        "kernel": build.kernel,
        "rows": len(plan.needed_by[build.id]),
        "compile_s": round(facts.compile_s, 3),
        "cached": facts.cached,
        "shared_bytes": facts.shared_bytes,
        "registers": facts.registers,
        "spills": facts.spills,
        "error": facts.error,
    }


def _report(plan: _ArchBuilds, facts: dict[str, BuildFacts], context: Context) -> None:
    failed = {build: f for build, f in facts.items() if f.error}
    cached = sum(f.cached for f in facts.values())
    compiled = [f for f in facts.values() if not f.cached and not f.error]
    parts = [f"{len(compiled)} compiled in {sum(f.compile_s for f in compiled):.1f} s of compile time"]
    parts += [f"{cached} found compiled"] if cached else []
    parts += [f"{len(failed)} failed"] if failed else []
    parts += (
        [f"{counted(plan.libraries, 'row')} of libraries {verb(plan.libraries, 'needs', 'need')} no kernel"]
        if plan.libraries
        else []
    )
    parts += [f"{counted(len(plan.rejected), 'row')} rejected"] if plan.rejected else []
    what = counted(len(facts), "kernel") if facts else "nothing to compile"
    kernels = f"{what}: {', '.join(parts if facts else parts[1:])}"
    cache = f"; cache: {cache_folder()}" if facts else ""
    context.events.emit("line", f"prebuild: {plan.device.gfx}: {kernels}{cache}")
    for build, f in failed.items():
        context.events.emit("warning", f"{', '.join(plan.needed_by[build][:3])}: {f.error}")
    context.unsolved.extend([*plan.rejected, *(problem for build in failed for problem in plan.needed_by[build])])
