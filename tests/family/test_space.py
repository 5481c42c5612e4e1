"""Spaces: products, conditions, replacements, pinned axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.errors import UserError
from gemmpipe.family.space import Space, matches, most_points, parse_space


def space(axes, when=(), pinned=()):
    return Space(axes=axes, when=tuple(when), pinned=pinned)


def test_points_are_the_product_of_the_axes():
    assert len(list(space({"a": (1, 2), "b": (3, 4, 5)}).configs({}))) == 6


def test_a_fact_replaces_an_axis():
    s = space({"a": (1, 2), "b": (3,)}, [{"M": "<=64", "b": (3, 4)}])
    assert len(list(s.configs({"M": 64}))) == 4
    assert len(list(s.configs({"M": 65}))) == 2


def test_an_axis_value_replaces_another_axis_for_its_points_only():
    s = space({"kind": ("plain", "pingpong"), "warps": (4, 8)}, [{"kind": "pingpong", "warps": (8,)}])
    assert list(s.configs({})) == [
        {"kind": "plain", "warps": 4},
        {"kind": "plain", "warps": 8},
        {"kind": "pingpong", "warps": 8},
    ]


def test_a_condition_on_a_value_from_another_entry():
    s = space(
        {"kind": ("plain", "cluster"), "a": (1,), "b": (1, 2)}, [{"kind": "cluster", "a": (1, 3)}, {"a": 3, "b": (2,)}]
    )
    points = [tuple(point.values()) for point in s.configs({})]
    assert points == [("plain", 1, 1), ("plain", 1, 2), ("cluster", 1, 1), ("cluster", 1, 2), ("cluster", 3, 2)]


def test_a_pinned_axis_is_never_replaced():
    s = space({"a": (7,)}, [{"arch": "gfx*", "a": (1, 2)}], pinned=("a",))
    assert list(s.configs({"arch": "gfx942"})) == [{"a": 7}]


def test_globs_and_bounds():
    assert matches("gfx942", "gfx*") and not matches("sm_90", "gfx*")
    assert matches(65, ">64") and not matches(64, ">64")
    with pytest.raises(UserError, match="needs a number"):
        matches(3, "<=many")


def test_an_unused_axis_has_one_value_unless_an_entry_has_a_condition_on_it() -> None:
    s = space({"a": (1, 2), "b": (3, 4, 5)})
    assert list(s.configs({}, unused=("b", "unknown"))) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    conditional = space({"a": (1, 2), "b": (3, 4, 5)}, [{"b": 4, "a": (9,)}])
    assert list(conditional.configs({}, unused=("b",))) == list(conditional.configs({}))


AXES = ("a", "b", "c", "d")
values = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple)
conditions = st.sampled_from([0, 1, 2, 3, "<=1", ">1", "<3"])
entries = st.dictionaries(st.sampled_from((*AXES, "M")), st.one_of(values, conditions), min_size=1, max_size=3).map(
    lambda entry: {k: v for k, v in entry.items() if not (k == "M" and isinstance(v, tuple))}
)


def brute_force(s, facts):
    """The points by definition of `configs`: all combinations that the matching entries allow."""
    domains = {
        a: dict.fromkeys((*s.axes[a], *(v for e in s.when if isinstance(e.get(a), tuple) for v in e[a]))) for a in AXES
    }
    found = set()
    for point in itertools.product(*domains.values()):
        known, axes = {**facts, **dict(zip(AXES, point, strict=True))}, dict(s.axes)
        for entry in s.when:
            if all(matches(known[k], v) for k, v in entry.items() if not isinstance(v, tuple)):
                axes |= {k: v for k, v in entry.items() if isinstance(v, tuple)}
        if all(known[a] in axes[a] for a in AXES):
            found.add(point)
    return found


@given(
    axes=st.fixed_dictionaries(dict.fromkeys(AXES, values)),
    when=st.lists(entries, max_size=6),
    m=st.integers(0, 3),
    pinned=st.lists(st.sampled_from(AXES), max_size=2),
)
def test_no_problem_has_more_points_than_the_bound(axes, when, m, pinned):
    s = space(axes, when, pinned)
    assert len(list(s.configs({"M": m}))) <= most_points(s)


def test_the_bound_counts_what_can_occur_together():
    axes = {"kind": ("plain", "skinny"), "tile": (16, 32), "warps": (4,)}
    when = [{"kind": "plain", "tile": (16, 32, 64)}, {"kind": "skinny", "tile": (1,), "warps": (1, 2)}]
    assert most_points(space(axes, when)) == len(list(space(axes, when).configs({}))) == 3 + 2
    assert most_points(space({"a": (1, 2), "b": (3, 4, 5)})) == 6
    assert most_points(space({})) == 1
    # A pinned axis is not replaced by the entry with fewer values.
    assert most_points(space(axes, when, ("tile",))) == 2 + 2 * 2


def test_the_bound_counts_the_branches_of_values_that_a_later_entry_replaces():
    axes = {**dict.fromkeys("abc", (0,)), "kind": (0, 1)}
    when = [dict.fromkeys("abc", tuple(range(8))), *({"kind": k, **dict.fromkeys("abc", (0,))} for k in (0, 1))]
    when += [{name: 0, "kind": (0, 1)} for name in "abc"]
    assert len(list(space(axes, when).configs({}))) == 2
    assert most_points(space(axes, when)) >= 8**3


@pytest.mark.parametrize(("count", "size"), [(50, "up to 1e\\+100"), (150, "countless")])
def test_too_many_points_are_refused_in_one_line(count, size):
    with pytest.raises(UserError, match=f"^space: {size} points, expected at most 100,000,000$"):
        parse_space({f"a{i}": list(range(100 if count == 50 else 1000)) for i in range(count)} | {"when": []}, ())


def test_a_problem_with_too_many_points_is_refused_before_the_first():
    s = parse_space({f"a{i}": list(range(15)) for i in range(6)} | {"when": [{"M": "<=64", "a0": [1]}]}, ())
    with pytest.raises(UserError, match=r"^space: 11,390,625 points for one problem, expected at most 3,000,000$"):
        next(s.configs({"M": 128}))
    assert next(s.configs({"M": 64}))["a0"] == 1


def test_conditions_that_only_other_devices_compare_do_not_stop_a_space():
    when = [{"vendor": "amd", "waves": [0, 2]}, {"vendor": "amd", "waves": "<=1", "tile": [1]}]
    s = parse_space({"waves": [None], "tile": [1, 2], "when": when}, ())
    assert len(list(s.configs({"vendor": "nvidia"}))) == 2


@given(axes=st.fixed_dictionaries(dict.fromkeys(AXES, values)), when=st.lists(entries, max_size=6), m=st.integers(0, 3))
def test_pruned_enumeration_equals_brute_force(axes, when, m):
    s = space(axes, when)
    points = [tuple(point[a] for a in AXES) for point in s.configs({"M": m})]
    assert len(points) == len(set(points))
    assert set(points) == brute_force(s, {"M": m})
