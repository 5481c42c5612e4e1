"""Rows of aiter's own tables serve calls, on a mocked MI300X with CPU memory, with a mock of the package."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import aiter_stand_in
import pytest
import torch
from aiter_stand_in import CALLS, pretended

from gemmpipe.family import load_family
from gemmpipe.family.layouts import TILES_16X16, preshuffle
from gemmpipe.runtime import (
    batched_gemm_a8w8,
    batched_gemm_bf16,
    cache,
    fused_moe,
    gemm_a4w4_blockscale,
    gemm_a8w8,
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a16w16,
    reload,
)
from gemmpipe.runtime.selection_log import LOG
from gemmpipe.runtime.weight_cache import WEIGHT_CACHE

RESULT = "us,kernelName,tflops,bw,errRatio"
PLAIN = f"kernelId,splitK,{RESULT}"
BF16 = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
KEY16 = "False,torch.bfloat16,torch.bfloat16,False"
M, N, K = 5, 256, 384
Given = Callable[..., Path]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """A mock of aiter, and a mocked device for the run time's calls of torch.cuda."""
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda *place: SimpleNamespace(synchronize=lambda: None))
    with aiter_stand_in.package(monkeypatch, tmp_path / "lists") as module:
        yield module


@pytest.fixture
def given(package: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Given:
    """Write tables of a family and have its variable name them, on a device of this architecture."""

    def write(family: str, *texts: str, gfx: str = "gfx942") -> Path:
        monkeypatch.setitem(cache._DEVICES, -1, pretended(gfx))
        files = [tmp_path / f"table{i}.csv" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        monkeypatch.setenv(f"GEMMPIPE_CONFIG_{family.upper()}", ":".join(map(str, files)))
        reload()
        CALLS.clear()
        return files[0]

    return write


def _steps() -> set[str]:
    return set(LOG.steps.values())


def _bf16(*rows: str) -> str:
    """Rows of aiter's bf16 table: libtype, solidx, splitK, kernelName, bpreshuffle."""
    lines = []
    for row in rows:
        libtype, solidx, split, name, shuffled = row.split(",")
        lines.append(f"gfx942,304,{M},{N},{K},{KEY16},{shuffled},{libtype},{solidx},{split},4.5,{name},0.0,1,1")
    return "\n".join([BF16, *lines]) + "\n"


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and their product, bf16."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(M, K, generator=generator).bfloat16()
    w = (torch.randn(N, K, generator=generator) * K**-0.5).bfloat16()
    return x, w, x.float() @ w.float().T


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.parametrize(
    ("row", "called"),
    [
        ("hipblaslt,21434,0,Cijk_Alik_Bljk,False", ("hipb_mm", (21434, False))),
        ("asm,5,4,bf16_32x64_splitk,False", ("gemm_a16w16_asm", ("bf16_32x64_splitk", 4, False))),
        ("asm,5,1,,False", ("gemm_a16w16_asm", (None, 1, False))),
    ],
)
def test_bf16_rows(row: str, called: tuple[str, object], given: Given, operands: Operands) -> None:
    given("a16w16", _bf16(row))
    x, w, product = operands
    torch.testing.assert_close(gemm_a16w16(x, w).float(), product, rtol=1e-2, atol=1e-2)
    assert called in CALLS
    assert _steps() == {"exact"}


@pytest.mark.compile
@pytest.mark.parametrize(("label", "kernel"), [("triton", "auto"), ("skinny", "sol2")])
def test_rows_of_triton_and_skinny_name_our_kernels(
    label: str, kernel: str, given: Given, operands: Operands, caplog: pytest.LogCaptureFixture
) -> None:
    given("a16w16", _bf16(f"{label},0,0,{kernel},False"), _bf16("hipblaslt,7,0,Cijk,False"))
    family, device = load_family("a16w16"), pretended("gfx942")
    key = (M, N, K, False, "bfloat16", "bfloat16", False, False)
    rows = [found.row for found in cache.load_tables(family).find(device, key)]
    problem = family.problem(tuple(zip((c.name for c in family.key_columns), key, strict=True)))
    chosen = cache.first_usable(family, rows, device)
    assert chosen is not None
    assert chosen[0].candidate.backend == label
    assert chosen[0].implementation.unsupported_reason(family.spec(problem), chosen[0].candidate.knobs, device) is None
    x, w, product = operands
    # No kernel for an AMD GPU runs here: the key's next row, in the next file, is used.
    torch.testing.assert_close(gemm_a16w16(x, w).float(), product, rtol=1e-2, atol=1e-2)
    assert CALLS[-1] == ("hipb_mm", (7, False))
    assert f"table0.csv: {label} BLOCK_SIZE_K=" in caplog.text
    assert "failed and is skipped" in caplog.text


def test_a_solution_that_the_library_has_not_gives_way(
    given: Given, operands: Operands, caplog: pytest.LogCaptureFixture
) -> None:
    given("a16w16", _bf16("hipblaslt,99,0,x,False", "flydsl,1,0,y,False"), _bf16("asm,1,2,bf16_32x64_splitk,False"))
    x, w, product = operands
    torch.testing.assert_close(gemm_a16w16(x, w).float(), product, rtol=1e-2, atol=1e-2)
    assert CALLS == [("gemm_a16w16_asm", ("bf16_32x64_splitk", 2, False))]
    assert "hipBLASLt lists no 99" in caplog.text
    assert "no 'flydsl' in this installation" in caplog.text
    assert _steps() == {"exact"}


def test_a_shuffled_bf16_weight(given: Given, operands: Operands) -> None:
    given("a16w16", _bf16("asm,3,4,bf16_64x64_bshuffle_splitk,True", "hipblaslt,7,0,x,False"))
    x, w, product = operands
    tiles = preshuffle(w, TILES_16X16)
    torch.testing.assert_close(gemm_a16w16(x, tiles, bpreshuffle=True).float(), product, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gemm_a16w16(x, w).float(), product, rtol=1e-2, atol=1e-2)
    assert CALLS == [("gemm_a16w16_asm", ("bf16_64x64_bshuffle_splitk", 4, True)), ("hipb_mm", (7, False))]


@pytest.mark.parametrize(("gfx", "called"), [("gfx942", "hipb_mm"), ("gfx950", "gemm_a16w16_asm")])
def test_a_shuffled_bf16_weight_without_a_row(gfx: str, called: str, given: Given, operands: Operands) -> None:
    given("a16w16", BF16 + "\n", gfx=gfx)
    x, w, product = operands
    y = gemm_a16w16(x, preshuffle(w, TILES_16X16), bpreshuffle=True)
    torch.testing.assert_close(y.float(), product, rtol=1e-2, atol=1e-2)
    assert [name for name, _ in CALLS] == [called]
    assert _steps() == {"fallback"}


def test_a8w8_without_libtype_is_ck(given: Given) -> None:
    given("a8w8", f"gfx,cu_num,M,N,K,q_dtype_w,{PLAIN}\ngfx942,304,{M},{N},{K},torch.int8,34,1,20.5,a8w8_row,1,5,0.0\n")
    x, w = (torch.randint(-20, 20, shape, dtype=torch.int8) for shape in ((M, K), (N, K)))
    x_scale, w_scale = torch.rand(M, 1), torch.rand(N, 1)
    y = gemm_a8w8(x, w, x_scale, w_scale)
    torch.testing.assert_close(y.float(), (x.float() @ w.float().T) * x_scale * w_scale.T, rtol=1e-2, atol=1e-2)
    assert CALLS == [("gemm_a8w8_tune", (34, 1))]
    assert _steps() == {"exact"}


@pytest.mark.parametrize(
    ("libtype", "split", "called"),
    [
        ("ck", 2, ("gemm_a8w8_blockscale_bpreshuffle_tune", (8, 2))),
        ("asm", 3, ("gemm_a8w8_blockscale_bpreshuffle_asm", ("fp8_32x128", 3))),
    ],
)
def test_blockscale_rows(libtype: str, split: int, called: tuple[str, object], given: Given) -> None:
    row = f"gfx942,304,{M},{N},{K},{libtype},8,{split},6.6,fp8_32x128,1,7,0.0"
    given("a8w8_blockscale_bpreshuffle", f"gfx,cu_num,M,N,K,libtype,{PLAIN}\n{row}\n")
    fp8 = torch.float8_e4m3fnuz
    x, w = (torch.randn(shape).to(fp8) for shape in ((M, K), (N, K)))
    x_scale, w_scale = torch.rand(M, 3), torch.rand(2, 3)
    product = (x.float() * x_scale.repeat_interleave(128, 1)) @ (
        w.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).T
    y = gemm_a8w8_blockscale_bpreshuffle(x, preshuffle(w, TILES_16X16), x_scale, w_scale)
    torch.testing.assert_close(y.float(), product, rtol=1e-2, atol=1e-2)
    assert [called] == CALLS
    assert _steps() == {"exact"}


@pytest.mark.parametrize(
    ("number", "name", "called"),
    [
        (17, "a4w4_blockscale_256x32x512", ("gemm_a4w4_blockscale_tune", (17, 1))),
        (21, "_ZN5aiter_f4_32x128", ("gemm_a4w4_asm", ("_ZN5aiter_f4_32x128", 1))),
    ],
)
def test_a4w4_rows_are_ck_or_assembly_by_their_names(
    number: int, name: str, called: tuple[str, object], given: Given
) -> None:
    rows = "".join(f"gfx950,256,{m},{N},{K},{number},1,5.4,{name},0.78,194,0.0\n" for m in (M, 2 * M))
    given("a4w4_blockscale", f"gfx,cu_num,M,N,K,{PLAIN}\n{rows}", gfx="gfx950")
    family = load_family("a4w4_blockscale")
    generator = torch.Generator().manual_seed(7)
    spec = family.spec(family.problem((("M", 2 * M), ("N", N), ("K", K), ("outdtype", "bfloat16"))))
    weights, inputs = family.make_weights(spec, generator), family.make_inputs(spec, generator)
    product = family.reference(spec, inputs, weights)
    for m in (M, 2 * M):
        y = gemm_a4w4_blockscale(inputs.x[:m], weights.w, inputs.x_scale[:m], weights.w_scale)
        torch.testing.assert_close(y.float(), product[:m], rtol=2e-2, atol=2e-2)
    assert [called] * 2 == CALLS
    assert _steps() == {"exact"}
    assert len(WEIGHT_CACHE.entries) == 1, "both rows read one form of the weight"


def test_batched_rows(given: Given) -> None:
    given(
        "batched_bf16", f"gfx,cu_num,B,M,N,K,{PLAIN}\ngfx942,304,3,{M},{N},{K},78,0,111.9,bf16_batched,3.0,3000,0.0\n"
    )
    x, w = (torch.randn(shape).bfloat16() for shape in ((3, M, K), (3, N, K)))
    torch.testing.assert_close(batched_gemm_bf16(x, w).float(), x.float() @ w.float().mT, rtol=2e-2, atol=0.2)
    assert CALLS == [("batched_gemm_bf16_tune", (78, 0))]


def test_batched_rows_of_8_bits_are_int8(given: Given) -> None:
    """aiter's function takes no other type, and its table has no column of it."""
    row = f"gfx942,304,3,{M},{N},{K},28,1,68.9,a8w8_batched_rowwise,155,5004,0.0"
    given("batched_a8w8", f"gfx,cu_num,B,M,N,K,{PLAIN}\n{row}\n")
    x, w = (torch.randint(-20, 20, shape, dtype=torch.int8) for shape in ((3, M, K), (3, N, K)))
    x_scale, w_scale = torch.rand(3, M, 1), torch.rand(3, N, 1)
    y = batched_gemm_a8w8(x, w, x_scale, w_scale)
    product = (x.float() @ w.float().mT) * x_scale * w_scale.mT
    torch.testing.assert_close(y.float(), product, rtol=1e-2, atol=1e-2)
    assert CALLS == [("batched_gemm_a8w8_tune", (28, 1))]
    assert _steps() == {"exact"}


FMOE = (
    "gfx,cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,"
    "doweight_stage1,block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw,_tag\n"
)


def _experts(stages: tuple[str, str], one_stage: int = 0) -> str:
    key = "gfx942,304,9,128,96,5,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0"
    return f"{FMOE}{key},64,0,17.8,{stages[0]},0.0%,14.5,{stages[1]},0.3%,32.3,{one_stage},5.26,2629.41,\n"


def test_rows_of_experts(given: Given, caplog: pytest.LogCaptureFixture) -> None:
    names = ("moe_ck2stages_gemm1_256x64x64x64", "moe_ck2stages_gemm2_256x64x64x64")
    given("fmoe", _experts(("flydsl_1", "flydsl_2")), _experts(("_ZN5aiter_fmoe", ""), one_stage=1), _experts(names))
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(9, 128, generator=generator).bfloat16()
    w1 = (torch.randn(5, 192, 128, generator=generator) * 128**-0.5).bfloat16()
    w2 = (torch.randn(5, 128, 96, generator=generator) * 96**-0.5).bfloat16()
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)]).int()
    shares = torch.rand(9, 2, generator=generator)
    y = fused_moe(x, w1, w2, shares, ids)
    expected = torch.zeros(9, 128)
    for row in range(9):
        for slot in range(2):
            both = w1[ids[row, slot]].float() @ x[row].float()
            h = torch.nn.functional.silu(both[:96]) * both[96:]
            expected[row] += shares[row, slot] * (w2[ids[row, slot]].float() @ h)
    torch.testing.assert_close(y.float(), expected, rtol=3e-2, atol=3e-2)
    assert [(f"ck_moe_stage{i}_fwd", (names[i - 1], 64, True)) for i in (1, 2)] == CALLS
    assert _steps() == {"exact"}
    assert "flydsl_1 is no composable kernel of two stages" in caplog.text
    assert "_ZN5aiter_fmoe is no composable kernel of two stages" in caplog.text


def test_blockscale_with_row_major_weights(given: Given) -> None:
    header = f"gfx,cu_num,M,N,K,libtype,{PLAIN}"
    given("a8w8_blockscale", f"{header}\ngfx942,304,{M},{N},{K},,8,2,6.6,a8w8_blockscale,1,7,0.0\n")
    x, w = (torch.randn(shape).to(torch.float8_e4m3fnuz) for shape in ((M, K), (N, K)))
    x_scale, w_scale = torch.rand(M, 3), torch.rand(2, 3)
    wide = w.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = (x.float() * x_scale.repeat_interleave(128, 1)) @ wide.T
    for scale in (x_scale, x_scale.t().contiguous().t()):  # in rows, and M-major
        torch.testing.assert_close(gemm_a8w8_blockscale(x, w, scale, w_scale).float(), product, rtol=1e-2, atol=1e-2)
    assert CALLS == [("gemm_a8w8_blockscale_tune", (8, 2))] * 2
