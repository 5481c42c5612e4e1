"""The prebuild stage: compiles the kernels of recorded winners into Triton's cache, with or without a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.data import Build, BuildFacts, Device
from gemmpipe.device import target_device, usable_cores
from gemmpipe.errors import MOST_PROCESSES, at_least, at_most
from gemmpipe.executors.compiling import Compilers, cache_folder
from gemmpipe.stages import Context, Stage
from gemmpipe.stages.winners import Winner, winners

if TYPE_CHECKING:
    import pandas as pd

_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Prebuild(Stage):
    """Compiles each kernel once an architecture; what the cache holds already is found, not compiled."""

    workers: int | None
    timeout_s: float

    needs: ClassVar[tuple[str, ...]] = ("selections", "shortlist")
    gives: ClassVar[tuple[str, ...]] = ("builds", "selections", "shortlist")
    reads: ClassVar[tuple[str, ...]] = ("target",)

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers)
        at_most(MOST_PROCESSES, workers=self.workers)
        at_least(0.1, timeout_s=self.timeout_s)

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """A row a build (`table.BUILDS`), and the selections and the shortlist without what cannot be compiled.

        A row of the table whose kernel cannot be built makes the run end with 1.
        """
        import pandas as pd

        from gemmpipe.table import BUILDS

        orders = self._orders(tables["selections"], context)
        context.events.emit("stage", "prebuild", total=sum(len(order.builds) for order in orders))
        rows: list[dict[str, object]] = []
        selections, shortlist = tables["selections"].copy(), tables["shortlist"]
        for order in orders:
            facts = dict(self._compile(order, context))
            rows += [_row(order, build, facts[build.id]) for build in order.builds.values()]
            _tell(order, facts, context)
            for build, problems in order.needed_by.items():
                if error := facts[build].error:
                    lost = selections["problem"].isin(problems) & (selections["gfx"] == order.device.gfx)
                    selections.loc[lost, "reason"] = f"compile_error: {error}"
                    shortlist = shortlist[~shortlist["problem"].isin(problems)]
        return {
            "builds": pd.DataFrame(rows, columns=list(BUILDS)),
            "selections": selections,
            "shortlist": shortlist,
        }

    def _orders(self, selections: "pd.DataFrame", context: Context) -> "list[_Order]":
        """What to compile, by architecture."""
        orders: dict[str, _Order] = {}

        def device_for(row: object) -> Device:
            gfx = str(row["gfx"])  # type: ignore[index]
            if gfx not in orders:
                here = context.device.gfx == gfx
                orders[gfx] = _Order(device=context.device if here else target_device(gfx))
            return orders[gfx].device

        rows = selections.to_dict("records")
        for winner in winners(context, rows, device_for):  # type: ignore[arg-type]
            orders[winner.device.gfx].add(winner)
        return list(orders.values())

    def _compile(self, order: "_Order", context: Context) -> Iterator[tuple[str, BuildFacts]]:
        """Facts by build id, as they come.

        Raises Interrupted when the user asked to stop, EnvironmentProblem when nothing can be put into the cache.
        """
        if not order.builds:
            return
        slots = min(self.workers or usable_cores(), len(order.builds))
        compilers = Compilers(order.device, slots, self.timeout_s, context.python_path)
        done = 0
        try:
            for build in order.builds.values():
                compilers.submit(build)
            while done < len(order.builds):
                wait([compilers.bell], timeout=_WAIT_S)
                context.check()
                compilers.check()
                for message in compilers.done():
                    done += 1
                    # The pool's deadline is the executor's in every other pipeline.
                    error = message.facts.error.replace("executor.compile_timeout_s", "stages.prebuild.timeout_s")
                    facts = replace(message.facts, error=error)
                    context.journal.build(message.build.id, facts)
                    yield message.build.id, facts
                context.events.emit("progress", done=done)
        finally:
            compilers.close(kill=done < len(order.builds))


@dataclass(kw_only=True)
class _Order:
    """The kernels of one architecture: builds by id, and which problems need each."""

    device: Device
    builds: dict[str, Build] = field(default_factory=dict)
    needed_by: dict[str, list[str]] = field(default_factory=dict)
    libraries: int = 0
    refused: list[str] = field(default_factory=list)

    def add(self, winner: Winner) -> None:
        """Take in a row's winner."""
        if winner.candidate is None or winner.spec is None or winner.implementation is None:
            self.refused.append(winner.problem.id)
            return
        builds = winner.implementation.builds(winner.spec, winner.candidate.knobs, self.device)
        self.libraries += not builds
        for build in builds:
            self.builds[build.id] = build
            self.needed_by.setdefault(build.id, []).append(winner.problem.id)


def _row(order: _Order, build: Build, facts: BuildFacts) -> dict[str, object]:
    return {
        "gfx": order.device.gfx,
        "build": build.id,
        "kernel": build.kernel,
        "rows": len(order.needed_by[build.id]),
        "compile_s": round(facts.compile_s, 3),
        "cached": facts.cached,
        "shared_bytes": facts.shared_bytes,
        "registers": facts.registers,
        "spills": facts.spills,
        "error": facts.error,
    }


def _tell(order: _Order, facts: dict[str, BuildFacts], context: Context) -> None:
    failed = {build: f for build, f in facts.items() if f.error}
    cached = sum(f.cached for f in facts.values())
    compiled = [f for f in facts.values() if not f.cached and not f.error]
    parts = [f"{len(compiled)} compiled in {sum(f.compile_s for f in compiled):.1f} s of the compilers' time"]
    parts += [f"{cached} found compiled"] if cached else []
    parts += [f"{len(failed)} failed"] if failed else []
    parts += [f"{order.libraries} rows of libraries need none"] if order.libraries else []
    parts += [f"{len(order.refused)} rows do not stand"] if order.refused else []
    kernels = f"{len(facts)} kernels: {', '.join(parts)}" if facts else f"no kernel: {', '.join(parts[1:])}"
    cache = f"; cache: {cache_folder()}" if facts else ""
    context.events.emit("line", f"prebuild: {order.device.gfx}: {kernels}{cache}")
    for build, f in failed.items():
        context.events.emit("warning", f"{', '.join(order.needed_by[build][:3])}: {f.error}")
    context.unsolved.extend([*order.refused, *(problem for build in failed for problem in order.needed_by[build])])
