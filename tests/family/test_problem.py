"""Problems from text: spellings of dtypes, bools and sizes, and one-line errors for invalid values."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmpipe.core.errors import NotComputed, UserError
from gemmpipe.family import Family, KernelDefaults, KeyColumn, load_family
from gemmpipe.family.problem import (
    check_routing,
    locate_key_columns,
    make_problem,
    merge_duplicates,
    parse_bool,
    parse_dtype,
    parse_int,
    parse_key_value,
    parse_weight,
)


@pytest.mark.parametrize(
    ("text", "gfx", "name"),
    [
        ("torch.bfloat16", "sm_90", "bfloat16"),
        (" bf16 ", "sm_90", "bfloat16"),
        ("half", "sm_90", "float16"),
        ("FP16", "sm_90", "float16"),
        ("fp8", "sm_90", "float8_e4m3fn"),
        ("fp8", "gfx942", "float8_e4m3fnuz"),
        ("fp8", "gfx950", "float8_e4m3fn"),
        ("torch.float8_e4m3fnuz", "sm_90", "float8_e4m3fnuz"),
        ("i8", "sm_90", "int8"),
        ("fp4", "gfx950", "float4_e2m1fn_x2"),
    ],
)
def test_dtype_names(text: str, gfx: str, name: str) -> None:
    assert parse_dtype(text, gfx) == name


def test_an_unknown_dtype_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'bfloat16'"):
        parse_dtype("bflot16", "sm_90")


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "1.5", "1_0", "٣", "1e3", True, 2.5, math.inf, 2**31, "9" * 30])
def test_invalid_sizes(value: object) -> None:
    with pytest.raises(UserError, match="expected a whole number"):
        parse_int(value)


@pytest.mark.parametrize("value", ["16", " 16 ", 16, 16.0, "16.0"])
def test_sizes(value: object) -> None:
    assert parse_int(value) == 16


def test_bools_and_weights() -> None:
    assert [parse_bool(v) for v in ("TRUE", "False", 1, "0", True)] == [True, False, True, False, True]
    assert parse_weight("2.5") == 2.5
    for bad in ("nan", "-1", "inf", "x", True):
        with pytest.raises(UserError):
            parse_weight(bad)
    with pytest.raises(UserError, match="expected True or False"):
        parse_bool("maybe")


def test_missing_columns_come_from_the_kernels_options(sixteen: Family) -> None:
    defaults = KernelDefaults(dtype="fp16", out_dtype=None, bias=True)
    problem = make_problem(sixteen, {"M": 1, "N": "16", "K": 32.0, "bias": math.nan}, defaults, "sm_90", "x.csv:2")
    assert dict(problem.key) == {
        "M": 1,
        "N": 16,
        "K": 32,
        "bias": True,
        "dtype": "float16",
        "outdtype": "float16",
        "scaleAB": False,
        "bpreshuffle": False,
    }


def test_errors_have_place_and_column(sixteen: Family, no_words: KernelDefaults) -> None:
    with pytest.raises(UserError, match=r"^x.csv:7: column N: 'many', expected a whole number from 1 to \d+$"):
        make_problem(sixteen, {"M": 1, "N": "many", "K": 3}, no_words, "sm_90", "x.csv:7")
    with pytest.raises(UserError, match=r"^x.csv:7: column K: no value, expected a whole number from 1$"):
        make_problem(sixteen, {"M": 1, "N": 2}, no_words, "sm_90", "x.csv:7")


def test_duplicates_are_merged_with_weights_summed_and_layers_joined(
    blockscale: Family, no_words: KernelDefaults
) -> None:
    made = [
        make_problem(blockscale, {"M": m, "N": 2, "K": 3}, no_words, "sm_90", "x", weight, layer)
        for m, weight, layer in ((1, 32.0, "o"), (2, 1.0, ""), (1, 4.0, "q"), (1, 1.0, "o"))
    ]
    assert [(p["M"], p.weight, p.layer) for p in merge_duplicates(made)] == [(1, 37.0, "o+q"), (2, 1.0, "")]


def test_columns_are_found_by_name_alias_and_lower_case(sixteen: Family) -> None:
    assert locate_key_columns(["k", "n", "m", "out_dtype"], sixteen, "x:1") == {"M": 2, "N": 1, "K": 0, "outdtype": 3}
    with pytest.raises(UserError, match=r"x:1: no column 'K'.*found M, N"):
        locate_key_columns(["M", "N"], sixteen, "x:1")
    with pytest.raises(UserError, match="'M' occurs 2 times"):
        locate_key_columns(["M", "N", "K", "M"], sixteen, "x:1")


def test_choices_of_a_column_are_case_insensitive() -> None:
    column = KeyColumn(name="act_type", kind="str", choices=(("silu", "ActivationType.Silu"), ("gelu", "G")))
    for value in ("silu", "SILU", " ActivationType.Silu", "activationtype.silu"):
        assert parse_key_value(column, value, "") == "ActivationType.Silu"
    assert parse_key_value(column, "g", "") == "G"
    with pytest.raises(UserError, match=r"'silo', expected one of silu, gelu; did you mean 'silu'\?$"):
        parse_key_value(column, "silo", "")
    with pytest.raises(UserError, match=r"'q', expected one of silu, gelu$"):
        parse_key_value(column, "q", "")


def test_choices_that_are_read_but_not_computed_are_not_listed() -> None:
    column = KeyColumn(name="act_type", kind="str", choices=(("silu", "Silu"),), others=(("swiglu", "Act.Swiglu"),))
    assert [parse_key_value(column, value, "") for value in ("SwiGLU", "act.swiglu")] == ["Act.Swiglu"] * 2
    with pytest.raises(UserError, match=r"'swi', expected one of silu$"):
        parse_key_value(column, "swi", "")


@given(value=st.sampled_from([True, False, 1, 0, "1", "0", "True", "FALSE", "yes"]))
def test_flags_are_integers(value: object) -> None:
    flag = parse_key_value(KeyColumn(name="use_g1u1", kind="flag"), value, "")
    assert (type(flag), flag) == (int, int(str(value).lower() in ("true", "1", "yes")))


def test_the_order_of_scales_is_an_option_of_the_kernel_or_a_cell() -> None:
    family = load_family("a8w8_blockscale")
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None, key={"x_scale": "column"})
    sizes = {"M": 8, "N": 128, "K": 256}
    assert make_problem(family, sizes, defaults, "sm_90", "list")["x_scale"] == "column"
    assert make_problem(family, {**sizes, "x_scale": "row"}, defaults, "sm_90", "list")["x_scale"] == "row"
    both = make_problem(family, sizes, replace(defaults, key={}), "sm_90", "list")
    assert both["x_scale"] is None
    assert "x_scale" not in both.id, "older journals and tables have this problem id"
    with pytest.raises(UserError, match="column x_scale: 'rows', expected one of row, column; did you mean 'row'"):
        make_problem(family, {**sizes, "x_scale": "rows"}, defaults, "sm_90", "list")


def test_a_wrong_condition_names_where_it_was_given() -> None:
    family, sizes = load_family("fmoe"), {"token": 4, "model_dim": 64, "inter_dim": 32, "expert": 8, "topk": 2}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=None, key={"routing": "unifrom"})
    expected = r"'unifrom', expected one of uniform, .*; did you mean 'uniform'\?$"
    with pytest.raises(UserError, match=rf"^kernel\.key\.routing: {expected}"):
        make_problem(family, sizes, defaults, "sm_90", "list")
    with pytest.raises(UserError, match=rf"^list: column routing: {expected}") as error:
        make_problem(family, {**sizes, "routing": "unifrom"}, replace(defaults, key={}), "sm_90", "list")
    assert not isinstance(error.value, NotComputed), "a source must not leave the row out"
    impossible = replace(defaults, key={"routing": "8/0"})
    problem = make_problem(family, sizes, impossible, "sm_90", "a row of an old table")
    with pytest.raises(UserError, match=r"^kernel\.key\.routing: '8/0' gives the busiest of 8 experts 8 times"):
        check_routing(family, problem, sizes, impossible, "list")
    with pytest.raises(UserError, match=r"^list: column routing: '8/0' gives"):
        check_routing(family, problem, {**sizes, "routing": "8/0"}, impossible, "list")
