"""Lists of problems in the configuration."""

from collections.abc import Callable, Sequence

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.sources.inline import InlineShapes


def _keys(items: Sequence[object], family: Family, defaults: KernelDefaults) -> list[tuple[object, ...]]:
    made = InlineShapes(items=items).problems(family, defaults, "sm_90")  # type: ignore[arg-type]
    return [(p["M"], p["N"], p["K"], p.weight) for p in made]


def test_both_spellings_each_with_its_own_ms(blockscale: Family, no_words: KernelDefaults) -> None:
    items = [[1, 16, 32], {"M": [1, 64], "N": 16, "K": 32, "weight": 4}, {"M": 8, "N": 48, "K": 64}]
    assert _keys(items, blockscale, no_words) == [(1, 16, 32, 5.0), (64, 16, 32, 4.0), (8, 48, 64, 1.0)]


def test_any_key_column_and_its_aliases(sixteen: Family, no_words: KernelDefaults) -> None:
    item = {"M": 1, "N": 16, "K": 32, "bias": True, "out_dtype": "fp32", "layer": "head"}
    (problem,) = InlineShapes(items=[item]).problems(sixteen, no_words, "sm_90")
    assert (problem["bias"], problem["outdtype"], problem.layer) == (True, "float32", "head")


def test_a_list_in_place_of_a_size_expands_to_each_of_its_values(blockscale: Family, no_words: KernelDefaults) -> None:
    items = [((512, 1024), 2048, 768), [1, [16, 32], 64]]
    assert [key[:3] for key in _keys(items, blockscale, no_words)] == [
        (512, 2048, 768),
        (1024, 2048, 768),
        (1, 16, 64),
        (1, 32, 64),
    ]


def test_nsets_leave_some_of_the_ms(blockscale: Family, no_words: KernelDefaults) -> None:
    items = [[[512, 1024], 2048, 768], {"M": [1, 512], "N": 16, "K": 32}, [7, 8, 8]]
    kept = InlineShapes(items=items, nsets=[512, 3]).problems(blockscale, no_words, "sm_90")
    assert [(p["M"], p["N"]) for p in kept] == [(512, 2048), (512, 16)]
    assert {p["M"] for p in InlineShapes(items=items, nsets="vllm").problems(blockscale, no_words, "sm_90")} == {512, 1}
    with pytest.raises(UserError, match=r"^shapes.nsets: no item has M of 2, 3; expected some of 1, 7, 512, 1024$"):
        InlineShapes(items=items, nsets=[2, 3]).problems(blockscale, no_words, "sm_90")
    with pytest.raises(UserError, match=r"^shapes.nsets: 0, expected whole numbers"):
        InlineShapes(items=items, nsets=0).problems(blockscale, no_words, "sm_90")


@pytest.mark.parametrize(
    ("items", "line"),
    [
        ([], "shapes.items: empty"),
        ([{"M": [], "N": 8, "K": 8}], r"shapes.items\[0\]: M: empty, expected a value or a list"),
        ("1,2,3", "shapes.items: '1,2,3', expected a list"),
        ([1, 2, 3], r"items: \[1, 2, 3\], expected .* \[\[M, N, K\], ...\]; one problem is \[\[1, 2, 3\]\]$"),
        ([1, 2], r"shapes.items: \[1, 2\], expected a list of problems \[\[M, N, K\], ...\]$"),
        ([[1, 2, 3], 4], r"shapes.items\[1\]: 4, expected \[M, N, K\]"),
        ([[1, 2]], r"shapes.items\[0\]: \[1, 2\], expected \[M, N, K\]"),
        ([[1, 2, 3], [1, -2, 3]], r"shapes.items\[1\]: column N: -2, expected a whole number"),
        ([{"M": 1, "N": 2, "k": 3}], r"no key column 'k' in smallblock; .*known: K, M, N"),
        ([[[], 2, 3]], r"shapes.items\[0\]: M: empty, expected a value or a list"),
        ([(1, 2)], r"shapes.items\[0\]: \[1, 2\], expected \[M, N, K\]"),
        (
            [{"token": 1, "model_dim": 2, "inter_dim": 3, "expert": 4, "topk": 1}],
            r"no key column 'token' in smallblock; they are of kernel=fmoe$",
        ),
        ([{"M": 1, "N": 2, "K": 3, "wieght": 1}], "did you mean 'weight'"),
        ([{"M": 1, "N": 2, "K": 3, "weight": 0}], "weight: 0, expected a number above 0"),
    ],
)
def test_wrong_items(items: object, line: str, blockscale: Family, no_words: KernelDefaults) -> None:
    with pytest.raises(UserError, match=line):
        InlineShapes(items=items).problems(blockscale, no_words, "sm_90")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("[1,2,3]", "[1, 2, 3], expected a list of problems [[M, N, K], ...]; one problem is [[1, 2, 3]]"),
        ("[M,N,K]", "['M', 'N', 'K'], expected a list of problems [[M, N, K], ...]; one problem is [['M', 'N', 'K']]"),
        ("5", "5, expected a list of problems [[M, N, K], ...]"),
        ("[]", "empty, expected a list such as [[1, 1280, 8192]]"),
    ],
)
def test_items_are_shown_as_they_were_typed(refusal: Callable[..., str], given: str, line: str) -> None:
    assert refusal("capture", "kernel=a16w16", "shapes=list", f"shapes.items={given}") == f"shapes.items: {line}"


@pytest.mark.parametrize(
    ("routing", "line"),
    [
        (
            "unifrom",
            "'unifrom', expected one of uniform, skewed, very_skewed, one_hot, or loads of the experts such as "
            "3.1/1.2/0.4; did you mean 'uniform'?",
        ),
        (
            "8/0",
            "'8/0' gives the busiest of 8 experts 8 times the mean load, expected at most 4: with topk 2 every row "
            "then has it",
        ),
    ],
)
def test_a_routing_that_no_rows_have_is_refused(refusal: Callable[..., str], routing: str, line: str) -> None:
    item = "token:4,model_dim:64,inter_dim:32,expert:8,topk:2"
    capture = ("capture", "kernel=fmoe", "device=cpu", "shapes=list")
    given = refusal(*capture, f"shapes.items=[{{{item}}}]", f"kernel.key.routing={routing}")
    assert given == f"kernel.key.routing: {line}"
    assert (
        refusal(*capture, f"shapes.items=[{{{item},routing:{routing}}}]") == f"shapes.items[0]: column routing: {line}"
    )
