"""The backends that a command line names, and those that the rows of a table were chosen without."""

from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.core.artifact import record_run, sidecar_path
from gemmpipe.pipeline.named_backends import chosen_without, named_backends, typed_words
from gemmpipe.pipeline.plan import Plan

ONE = ("kernel=a16w16", "shapes=list", "shapes.items=[[16,256,512]]", "device=cpu")


def test_words_are_those_of_the_last_choice() -> None:
    assert typed_words(["backend=[triton]", "kernel=a16w16", "backend=[default, deepgemm]"]) == ("default", "deepgemm")
    assert typed_words(["backend=torch"]) == ("torch",)
    assert typed_words(["backend=[]", "backend.deepgemm.tiles=2"]) == ()
    assert typed_words(["kernel=a16w16"]) == ("default",)


def test_the_members_of_default_are_not_named(plans: list[Plan]) -> None:
    assert main([*ONE]) == 0
    assert main([*ONE, "backend=[default,torch,engine_pairs]"]) == 0
    nothing, plan = plans
    assert named_backends(nothing) == []
    found = {each.name: (each.option, each.labels) for each in named_backends(plan)}
    assert found == {
        "torch": ("torch", ("torch",)),
        "vllm_pair": ("engine_pairs", ("vllm",)),
        "sglang_pair": ("engine_pairs", ("sglang",)),
    }


@pytest.mark.parametrize(
    ("recipe", "lacking"),
    [
        ("gemmpipe tune kernel=a16w16", ["deepgemm", "engine_pairs"]),
        ("gemmpipe tune 'backend=[default,deepgemm]'", ["engine_pairs"]),
        ("gemmpipe tune 'backend=[default,peers]'", []),
        ("gemmpipe tune backend=deepgemm", ["torch", "engine_pairs"]),
        ("not 'a command", []),
        ("", []),
    ],
)
def test_rows_chosen_without_a_backend(recipe: str, lacking: list[str], plans: list[Plan], folder: Path) -> None:
    assert main([*ONE, "backend=[default,torch,deepgemm,engine_pairs]"]) == 0
    table = folder / "tuned.csv"
    record_run(sidecar_path(table), "r1", {"recipe": recipe}, None, print)
    assert chosen_without(plans[-1], table, ["r1", "gone"]) == lacking
    assert chosen_without(plans[-1], table, []) == []
    assert chosen_without(plans[-1], folder / "none.csv", ["r1"]) == []
