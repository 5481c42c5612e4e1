"""The kernel of a list of shapes, inferred from its name, columns or rows; contradictions are refused."""

import re
from pathlib import Path

import pytest

from gemmpipe.cli.main import main
from gemmpipe.pipeline.plan import Plan

MNK = "M,N,K\n1,1280,8192\n"
BMNK = "B,M,N,K\n16,1,1280,8192\n"
BF16 = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n64,256,512,False,torch.bfloat16,torch.bfloat16,False,False\n"
CAPTURED = "family,M,N,K,count\na16w16,1,64,64,3\nother,2,64,64,1\n"


@pytest.mark.parametrize(
    ("name", "text", "kernel"),
    [
        ("a4w4_blockscale_untuned_gemm.csv", MNK, "a4w4_blockscale"),
        ("dsv3_a8w8_bpreshuffle_untuned_gemm_x.csv", "M,N,K,q_dtype_w\n1,128,256,torch.int8\n", "a8w8_bpreshuffle"),
        ("a8w8_untuned_batched_gemm.csv", BMNK, "batched_a8w8"),
        ("llama70B_untuned_gemm_bf16.csv", MNK, "a16w16"),
        ("qwen_untuned_gemm.csv", BF16, "a16w16"),
        ("gemmpipe_captured.csv", CAPTURED, "a16w16"),
        ("llama70B_untuned_gemm.csv", MNK, "a8w8_blockscale"),  # fits any kernel: the default
    ],
)
def test_without_kernel_it_is_inferred_from_the_file(
    plans: list[Plan], folder: Path, name: str, text: str, kernel: str
) -> None:
    (folder / name).write_text(text)
    assert main(["capture", "shapes=csv", f"shapes.path={name}"]) == 0
    assert plans[0].family.name == kernel


def test_a_given_kernel_wins_if_the_file_fits(plans: list[Plan], folder: Path) -> None:
    (folder / "bf16_untuned_gemm.csv").write_text(BF16)
    (folder / "list.csv").write_text(MNK)
    assert main(["capture", "kernel=a8w8", "shapes=csv", "shapes.path=list.csv"]) == 0
    argv = ["kernel=a16w16_atomic", "shapes=csv", "shapes.path=bf16_untuned_gemm.csv", "shapes.rows_of=a16w16"]
    assert main(["capture", *argv]) == 0
    assert [plan.family.name for plan in plans] == ["a8w8", "a16w16_atomic"]


@pytest.mark.parametrize(
    ("name", "text", "kernel", "message"),
    [
        (
            "a4w4_blockscale_untuned_gemm.csv",
            MNK,
            "a8w8_blockscale",
            "kernel=a8w8_blockscale: a4w4_blockscale_untuned_gemm.csv is a list of a4w4_blockscale by its name; "
            "expected kernel=a4w4_blockscale, or shapes.rows_of=a4w4_blockscale to use its rows anyway",
        ),
        (
            "bf16_untuned_batched_gemm.csv",
            BMNK,
            "a16w16",
            "kernel=a16w16: bf16_untuned_batched_gemm.csv is a list of batched_bf16 by its name",
        ),
        (
            "mine.csv",
            BMNK,
            "a16w16",
            "mine.csv:2: column B: 16, which a16w16 does not have; expected kernel=batched_a8w8 or batched_bf16",
        ),
    ],
)
def test_a_file_of_another_kernel_is_refused(
    refusal, folder: Path, name: str, text: str, kernel: str, message: str
) -> None:
    (folder / name).write_text(text)
    assert refusal("capture", f"kernel={kernel}", "shapes=csv", f"shapes.path={name}", "device=cpu").startswith(message)


def test_a_column_of_batches_is_never_lost(refusal, folder: Path) -> None:
    (folder / "mine.csv").write_text(BMNK)  # fits two kernels: the default is used
    message = refusal("capture", "shapes=csv", "shapes.path=mine.csv", "device=cpu")
    assert message.startswith(
        "mine.csv:2: column B: 16, which a8w8_blockscale does not have; expected kernel=batched_a8w8"
    )


@pytest.mark.parametrize(
    ("kernel", "column", "cell", "fitting"),
    [
        ("a16w16", "q_dtype_w", "torch.int8", "a8w8"),
        ("a16w16_atomic", "bias", "True", "a16w16"),
        ("a8w8_blockscale", "bpreshuffle", "1", "a8w8_blockscale_bpreshuffle"),
        ("a4w4_blockscale", "dtype", "torch.bfloat16", "a16w16"),
    ],
)
def test_another_format_is_never_lost(
    refusal, folder: Path, capsys: pytest.CaptureFixture[str], kernel: str, column: str, cell: str, fitting: str
) -> None:
    (folder / "mine.csv").write_text(f"M,N,K,{column}\n1,64,128,{cell}\n")
    typed = ["capture", f"kernel={kernel}", "shapes=csv", "shapes.path=mine.csv"]
    text, _, kernels = refusal(*typed).partition("; the row is one of kernel=")
    assert text == f"mine.csv:2: column {column}: {cell}, which {kernel} does not compute"
    assert fitting in re.split(", | or ", kernels)
    with (folder / "mine.csv").open("a") as more:
        more.write("2,64,128,False\n3,64,128,\n" if column in ("bias", "bpreshuffle") else "3,64,128,\n")
    capsys.readouterr()
    assert main(typed) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"left out: 1 row, the first: mine.csv:2: column {column}: {cell}, which {kernel} does not compute" in printed
    )


@pytest.mark.parametrize(
    ("kernel", "header", "cells"),
    [
        ("a16w16", "q_dtype_w", "bf16"),
        ("a16w16_atomic", "bias,scaleAB,bpreshuffle", "False,0,"),
        ("a8w8_bpreshuffle", "bpreshuffle,scaleAB", "True,True"),
    ],
)
def test_a_format_that_the_kernel_has_is_no_contradiction(
    plans: list[Plan], folder: Path, kernel: str, header: str, cells: str
) -> None:
    (folder / "mine.csv").write_text(f"M,N,K,{header}\n1,64,128,{cells}\n")
    assert main(["capture", f"kernel={kernel}", "shapes=csv", "shapes.path=mine.csv"]) == 0
    assert len(plans) == 1


def test_lists_of_several_kernels_are_refused(refusal, folder: Path) -> None:
    (folder / "a8w8_untuned_gemm.csv").write_text(MNK)
    (folder / "bf16_untuned_gemm.csv").write_text(BF16)
    message = refusal("capture", "shapes=csv", "shapes.path=[a8w8_untuned_gemm.csv,bf16_untuned_gemm.csv]")
    assert message == (
        "kernel: a8w8_untuned_gemm.csv is a list of a8w8, bf16_untuned_gemm.csv one of a16w16; "
        "expected lists of one kernel"
    )


def test_a_users_own_pipeline_sets_its_kernel(plans: list[Plan], folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "look.yaml").write_text(
        "# Mine\ndefaults:\n  - _base\n  - override kernel: a8w8\n  - _self_\n\nchain: [capture]\n"
    )
    (folder / "gemmpipe_captured.csv").write_text("family,M,N,K,count\na16w16,1,64,64,3\na8w8,2,64,64,1\n")
    (folder / "list.csv").write_text("M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n1,64,64,False,int8,bf16,0,0\n")
    assert main(["--config-dir", "mine", "look", "shapes=csv", "shapes.path=list.csv"]) == 0
    assert plans[0].family.name == "a8w8"


def test_no_limit_of_time(plans: list[Plan]) -> None:
    assert main(["executor.timeout_s=null"]) == 0
    assert plans[0].executor.timeout_s is None  # type: ignore[attr-defined]
