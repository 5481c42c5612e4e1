"""The engine stage: the functions of engines, searched by themselves for the formats that configure them."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gemmpipe.backends.engine import KINDS, EngineImplementation
from gemmpipe.backends.engine_compile import CompileCalls
from gemmpipe.data import Candidate, Knobs, Problem
from gemmpipe.errors import UserError, at_least, one_line
from gemmpipe.events import counted
from gemmpipe.family import Family, GemmSpec
from gemmpipe.formats import Format
from gemmpipe.problem import siblings
from gemmpipe.search import Search
from gemmpipe.search.lore import Lore
from gemmpipe.space import Space
from gemmpipe.stages import Context, Form, Stage
from gemmpipe.stages.bench import Bench
from gemmpipe.stages.engine_files import Product, at, product_of
from gemmpipe.stages.hunting.beside import hunts_for
from gemmpipe.stages.rows import candidate_of, problem_frame, problems_of, untimed_row
from gemmpipe.stages.screen import Screen
from gemmpipe.stopwatch import IDLE

if TYPE_CHECKING:
    import pandas as pd

_PROCESSES = 8  # an engine takes seconds and a gigabyte in each
_WAIT_S = 0.5
_NEIGHBOURS = 4  # of the finalists of the next key above, which serves few Ms below it


@dataclass(frozen=True, kw_only=True)
class Engine(Stage):
    """Screens the whole space of each engine's function, and times its finalists beside what the engine takes now.

    What it takes now: its published entry for so many rows, its default, and the entry of the output's file.
    """

    published: tuple[str, ...]
    screen: Screen
    bench: Bench
    search: Search
    spaces: Mapping[str, Space]
    keep: int
    further_pct: float

    needs: ClassVar[tuple[str, ...]] = ("problems", "trials")
    gives: ClassVar[tuple[str, ...]] = ("trials",)
    uses_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(1, keep=self.keep)
        at_least(0, further_pct=self.further_pct)
        for name in KINDS:
            if name not in self.spaces:
                raise ValueError(f"spaces.{name}: missing, expected the values of an engine's knobs")

    def forms(self, family: Family, formats: Mapping[str, Format]) -> tuple[Form, ...]:
        """The formats whose engine has a function for this family. Raises UserError for a path that is none."""
        given = tuple(Path(text).expanduser() for text in self.published)
        for path in given:
            if not path.exists():
                raise UserError(f"stages.engine.published: {path}: no such file or folder")
        found: list[Form] = []
        for name, each in formats.items():
            engine = each.engine()
            for one in engine.implementations(family) if engine is not None else ():
                files = given or one.folders()
                form = Form(name=name, format=each, implementation=one, published=files, further_pct=self.further_pct)
                found.append(form)
        return tuple(found)

    def check(self, context: Context) -> None:
        """Raises UserError for an axis or a value that an engine's function cannot have."""
        for form in context.forms:
            form.implementation.check(self.spaces[form.implementation.kind])

    def run(self, tables: "dict[str, pd.DataFrame]", context: Context) -> "dict[str, pd.DataFrame]":
        """The trials, with those of engines' functions: of the problems, and of Ms beside these."""
        import pandas as pd

        problems = problems_of(context.family, tables["problems"])
        parts = [tables["trials"], *(self._searched(form, problems, context) for form in context.forms)]
        parts = [part for part in parts if len(part)] or parts[:1]
        return {"trials": pd.concat(parts, ignore_index=True)}

    def _searched(self, form: Form, problems: list[Problem], context: Context) -> "pd.DataFrame":
        begun = time.monotonic()
        absent = _ask(form.implementation, context)
        runs = f"{absent}: a kernel of its form is timed" if absent else "its own function is timed in the finals"
        context.events.emit("line", f"engine: {form.name}: {runs}")
        inner = replace(
            context,
            form=form,
            implementations=(form.implementation,),
            space=self.spaces[form.implementation.kind],
            search=self.search,
            incumbents={},
            lore=Lore(),
            hunts=None,
            homes={},
            cut=set(),
        )
        hunts = hunts_for(inner)
        try:
            screen = replace(self.screen, keep=self.keep, bucket_keep=0)
            found = screen.run({"problems": problem_frame(context.family, problems)}, replace(inner, hunts=hunts))
        finally:
            hunts.close()
        given = _finals(form, problems, found, absent is None, inner)
        if absent is None:
            _compile_ahead(form, given, inner)
        trials = self.bench.run({**found, **given}, inner)["trials"]
        seconds = time.monotonic() - begun
        context.account[f"engine_{form.name}_s"] = context.account.get(f"engine_{form.name}_s", 0.0) + seconds
        context.events.emit("line", f"engine: {form.name}: {counted(len(trials), 'candidate')} in {seconds:.1f} s")
        return trials


def _ask(implementation: EngineImplementation, context: Context) -> str | None:
    """Why the engine's own function takes no part; asked beside the driver where possible, as it imports the engine."""
    aside = context.pool.aside(partial(_absent, implementation))
    if aside is None:
        return implementation.absent()
    with context.watch.spending(IDLE):
        return aside.result()


def _absent(implementation: EngineImplementation) -> str | None:
    return implementation.absent()


def _compile_ahead(form: Form, given: "Mapping[str, pd.DataFrame]", context: Context) -> None:
    """Compile what the engine's function needs in the finals in several processes: a call would do it by itself."""
    specs = {p.id: context.family.spec(p) for p in problems_of(context.family, given["problems"])}
    by_candidate: dict[Candidate, list[GemmSpec]] = {}
    for problem, libtype, config in given["shortlist"][["problem", "libtype", "config"]].itertuples(index=False):
        by_candidate.setdefault(candidate_of(libtype, config), []).append(specs[problem])
    calls = [[(spec, candidate.knobs) for spec in specs] for candidate, specs in by_candidate.items()]
    shares = [[call for some in calls[i::_PROCESSES] for call in some] for i in range(_PROCESSES)]
    left = {
        future
        for share in shares
        if share and (future := context.pool.aside(_task(form.implementation, share, context))) is not None
    }
    while left:
        context.check()
        with context.watch.spending(IDLE):
            done, left = wait(left, timeout=_WAIT_S)
        for future in done:
            if (error := future.exception()) is not None:
                context.events.emit("detail", f"engine: {form.name}: {one_line(error)}")


def _task(
    implementation: EngineImplementation, calls: Sequence[tuple[GemmSpec, Knobs]], context: Context
) -> CompileCalls:
    return CompileCalls(implementation=implementation, device=context.device, calls=calls)


def _finals(
    form: Form, problems: Sequence[Problem], found: "Mapping[str, pd.DataFrame]", installed: bool, context: Context
) -> "dict[str, pd.DataFrame]":
    """The problems of the finals, which are more than those that were screened, and who takes part in each."""
    import pandas as pd

    from gemmpipe.table import SHORTLIST

    ready = found["shortlist"][found["shortlist"]["us"].notna()].sort_values("us", kind="stable")
    screened: dict[str, list[Candidate]] = {}
    for problem, libtype, config in ready[["problem", "libtype", "config"]].itertuples(index=False):
        screened.setdefault(problem, []).append(candidate_of(libtype, config))
    wanted: list[Problem] = []
    rows: list[dict[str, object]] = []
    for group in siblings(problems):
        product = product_of(form, group, context)
        by_m = {p.rows: screened.get(p.id, []) for p in group}
        for m in product.grid.points:
            problem = at(context.family, group[0], m) if m not in by_m else next(p for p in group if p.rows == m)
            wanted.append(problem)
            rows += _rows(problem, _rivals(m, product, by_m), product, installed, context)
    return {
        "problems": problem_frame(context.family, wanted),
        "shortlist": pd.DataFrame(rows, columns=list(SHORTLIST)),
    }


def _rivals(m: int, product: Product, by_m: Mapping[int, list[Candidate]]) -> list[Candidate]:
    """The finalists of a key; of another M, those of the key that serves it, and some of its neighbours'."""
    if m in by_m:
        return by_m[m]
    own = product.grid.nearest(m)
    others = [c for key in product.grid.beside(m) if key != own for c in by_m[key][:_NEIGHBOURS]]
    return [*by_m[own], *others]


def _rows(
    problem: Problem, rivals: Sequence[Candidate], product: Product, installed: bool, context: Context
) -> list[dict[str, object]]:
    """The shortlist of one M; what the engine takes now races to the end, where it can run."""
    assert context.form is not None
    implementation = context.form.implementation
    spec = context.family.spec(problem)
    known = product.known(problem.rows)
    runs = [c for c in known if installed or implementation.misfit(spec, c.knobs, context.device) is None]
    rest = [c for c in dict.fromkeys(rivals) if c not in runs]
    return [untimed_row(problem.id, c, "incumbent" if c in runs else "") for c in (*runs, *rest)]
