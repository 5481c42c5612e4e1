"""The end of the run of all faults that test_faults.py begins: between its files others run, as it mostly waits."""

import json
import sys

import pandas as pd
import pytest
from every_fault import EXPECTED, KINDS, Begun
from soak_runs import nothing_is_repeated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def test_every_fault_ends_as_a_row_and_no_healthy_candidate_suffers(every_fault: Begun) -> None:
    site, started = every_fault
    code, _, error = started.end()
    assert code == 0, error
    assert started.gone()
    profile = pd.read_csv(site.folder / "all.csv")
    own = profile[profile["libtype"] == "faulty"]
    kind = own["config"].str.extract(r'"KIND":"(\w+)"')[0]
    found = own.groupby([kind, "M"])["status"].agg(list)
    assert len(found) == 2 * len(KINDS)
    assert all(len(statuses) == 1 for statuses in found), "one row a candidate and problem"
    for name, statuses in EXPECTED.items():
        assert {found[name, 8][0], found[name, 16][0]} <= statuses, name
    assert found["wrong_at_8", 8] == ["incorrect"]
    assert found["wrong_at_8", 16][0] in {"ok", "pruned"}
    assert (own["error"].notna() == own["status"].isin(["ok", "pruned"])).sum() == 0
    quarantined = {"segfault", "kill", "exit", "sys_exit", "eat", "hang"}
    assert error.count("warning: quarantined") == 2 * len(quarantined)
    assert error.count("Traceback") == 0
    winners = {json.loads(str(row["config"])).get("KIND", "mm") for row in site.tuned()}
    assert winners <= {"right", "mm", "hang_once", "die_once", "wrong_at_8"}
    nothing_is_repeated(site.rows())
