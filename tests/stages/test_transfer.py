"""Transfer: the table of one degree of tensor parallelism gives the first candidates at the next one."""

from pathlib import Path

from gemmpipe.cli.main import main
from gemmpipe.core.data import Candidate, Device
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.family.problem import make_problem
from gemmpipe.pipeline.plan import Plan
from gemmpipe.search.history import History
from gemmpipe.stages.history import add_table_winners
from gemmpipe.stages.rows import candidate_of
from gemmpipe.stages.screen.search_pool import SearchContext
from gemmpipe.tables import store

FAMILY = load_family("a8w8_blockscale")


def _first(plan: Plan, device: Device, history: History) -> list[Candidate]:
    """The first requests of the default search on 64 x 8192 x 7168: Llama 70B's down projection at TP 4."""
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None)
    problem = make_problem(FAMILY, {"M": 64, "N": 8192, "K": 7168}, defaults, device.gfx, "case")
    backends = tuple(i for b in plan.backends.values() for i in b.implementations(FAMILY))
    search_context = SearchContext(
        family=FAMILY.module,
        implementations=backends,
        device=device,
        space=plan.space,
        search=plan.search,
        incumbents={},
        launches=2,
        keep=20,
    )
    _, search_problem = search_context.open(problem, history)
    return [request.candidate for request in plan.search.start(search_problem).ask()]


def test_the_choices_of_tp_8_are_tried_first_at_tp_4(plans: list[Plan], h200: Device, h200_tables: Path) -> None:
    assert main(["kernel=a8w8_blockscale"]) == 0
    table = h200_tables / FAMILY.csv_name
    [row] = [r for r in store.read(table, FAMILY) if (r["M"], r["N"], r["K"]) == (64, 8192, 3584)]
    chosen = candidate_of(str(row["libtype"]), str(row["config"]))
    history = History()
    add_table_winners(history, [table], FAMILY, h200)
    informed = _first(plans[0], h200, history)
    own = [c for c in informed if c.backend in {i.label for i in FAMILY.implementations}]
    assert chosen in own[: plans[0].search.transfer_winners], "right after the library paths"  # type: ignore[attr-defined]
    assert chosen not in _first(plans[0], h200, History()), "without the table"
