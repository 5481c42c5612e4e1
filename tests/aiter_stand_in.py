"""A stand-in for the package aiter on a CPU: its functions with the signatures that they have, its lists of kernels.

Signatures are those of ROCm/aiter of 2026-08-22 (aiter/ops/gemm_op_*.py, batched_gemm_op_*.py, gradlib.py, shuffle.py,
moe_op.py, quant.py, fused_moe.py); each function computes what the real one does, from operands laid out as it wants
them, and asserts what the real one cannot say: that it was called as its kernels need it. Nothing here has run on AMD
hardware.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemmpipe.backends import aiter as aiter_backend
from gemmpipe.backends import aiter_package, hipblaslt
from gemmpipe.core.data import Device
from gemmpipe.core.device import arch_device
from gemmpipe.family.layouts import unshuffle
from gemmpipe.family.operands import unpack_mx

Optional = torch.Tensor | None

BF16_LIST = """knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias
bf16_32x64_splitk,a.co,1,32,64,3,0,1,64,1
bf16_32x64_clean,b.co,1,32,64,0,0,0,64,1
bf16_64x64_bshuffle_splitk,c.co,1,64,64,0,1,1,64,1
bf16_256x256_bshuffle,d.co,1,256,256,0,1,0,64,0
"""
I8_LIST = "tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n16,128,1,1,i8_16x128,a.co\n112,256,0,1,i8_112x256,b.co\n"
FP8_LIST = "tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n32,128,1,1,fp8_32x128,a.co\n"
FP4_LIST = (
    "tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name\n"
    "32,128,1,1,_ZN5aiter_f4_32x128,a.co\n256,256,0,0,_ZN5aiter_f4_plain,b.co\n192,256,0,1,_ZN5aiter_f4_192x256,c.co\n"
)


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4


class ActivationType(Enum):
    No = -1
    Silu = 0
    Gelu = 1


class PretendedHip(Device):
    """An AMD GPU whose memory is the CPU's."""

    @property
    def torch_name(self) -> str:
        return "cpu"


def pretended(gfx: str) -> Device:
    """The GPU of this architecture as far as a CPU can be one."""
    known = arch_device(gfx)
    return PretendedHip(**{each.name: getattr(known, each.name) for each in fields(known)})


CALLS: list[tuple[str, tuple[object, ...]]] = []
"""Every call since the package was made: the function, and what of its arguments says which kernel runs."""


def hipb_mm(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    solution_index: int,
    bias: Optional = None,
    out_dtype: torch.dtype | None = None,
    scaleA: Optional = None,
    scaleB: Optional = None,
    scaleOut: Optional = None,
    bpreshuffle: bool | None = None,
    use_gelu: bool | None = None,
) -> torch.Tensor:
    assert solution_index in (-1, 7, 21434)
    CALLS.append(("hipb_mm", (solution_index, bool(bpreshuffle))))
    w = unshuffle(mat2.t(), "n16k16").t() if bpreshuffle else mat2
    full = mat1.float() @ w.float()
    full = full if scaleA is None or scaleB is None else full * scaleA * scaleB
    return (full if bias is None else full + bias.float()).to(out_dtype)


def hipb_findallsols(
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    bias: Optional = None,
    out_dtype: torch.dtype | None = None,
    scaleA: Optional = None,
    scaleB: Optional = None,
    scaleC: Optional = None,
    bpreshuffle: bool = False,
    use_gelu: bool = False,
) -> list[int]:
    assert mat1.shape[1] == mat2.shape[0]
    assert (scaleA is None) == (mat1.dtype.itemsize > 1)
    return [7] if bpreshuffle else [21434, 7, 21434]


def gemm_a16w16_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    bias: Optional = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool = False,
) -> torch.Tensor:
    assert splitK is None or 1 <= splitK <= 16
    CALLS.append(("gemm_a16w16_asm", (kernelName, splitK, bpreshuffle)))
    full = A.float() @ (unshuffle(B, "n16k16") if bpreshuffle else B).float().T
    return out.copy_(full if bias is None else full + bias.float())


def gemm_a8w8_asm(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    kernelName: str = "",
    bias: Optional = None,
    bpreshuffle: bool | None = True,
    splitK: int | None = None,
) -> torch.Tensor:
    assert bias is not None, "its kernels read one"
    assert (bias.dtype, tuple(bias.shape)) == (torch.float32, (1, WQ.shape[0]))
    assert bpreshuffle
    CALLS.append(("gemm_a8w8_asm", (kernelName, splitK)))
    return Out.copy_((XQ.float() @ unshuffle(WQ, "n16k16").float().T) * x_scale * w_scale + bias)


def gemm_a8w8_blockscale_bpreshuffle_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: Optional = None,
    splitK: int | None = None,
    kernelName: str | None = None,
    bpreshuffle: bool | None = True,
    zero_bias_buf: Optional = None,
) -> torch.Tensor:
    assert bpreshuffle
    CALLS.append(("gemm_a8w8_blockscale_bpreshuffle_asm", (kernelName, splitK)))
    return out.copy_(_blockwise(A, unshuffle(B, "n16k16"), A_scale, B_scale, m_major=True))


def gemm_a4w4_asm(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    out: torch.Tensor,
    kernelName: str = "",
    bias: Optional = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    log2_k_split: int | None = None,
) -> torch.Tensor:
    assert bpreshuffle
    CALLS.append(("gemm_a4w4_asm", (kernelName, log2_k_split)))
    return out.copy_(_fp4(A, B, A_scale, B_scale, out))


def gemm_a4w4_blockscale_tune(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    Out: torch.Tensor,
    kernelId: int = 0,
    splitK: int = 0,
) -> torch.Tensor:
    assert 0 <= kernelId < 20
    assert 0 <= splitK <= 3
    CALLS.append(("gemm_a4w4_blockscale_tune", (kernelId, splitK)))
    return Out.copy_(_fp4(XQ, WQ, x_scale, w_scale, Out))


def batched_gemm_bf16_tune(
    XQ: torch.Tensor, WQ: torch.Tensor, out: torch.Tensor, kernelId: int, splitK: int = 0
) -> torch.Tensor:
    assert 0 <= splitK <= 3
    CALLS.append(("batched_gemm_bf16_tune", (kernelId, splitK)))
    return out.copy_(XQ.float() @ WQ.float().mT)


def _tune(name: str, *, m_major: bool, shuffled: bool) -> Callable[..., torch.Tensor]:
    def tune(
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        x_scale: torch.Tensor,
        w_scale: torch.Tensor,
        Out: torch.Tensor,
        kernelId: int = 0,
        splitK: int = 0,
    ) -> torch.Tensor:
        assert 0 <= splitK <= 3
        CALLS.append((name, (kernelId, splitK)))
        w = unshuffle(WQ, "n16k16") if shuffled else WQ
        if x_scale.shape[-1] == 1:
            assert w_scale.shape[-2] == 1, "the weight's scales are a row [1, N]"
            return Out.copy_((XQ.float() @ w.float().mT) * x_scale * w_scale)
        return Out.copy_(_blockwise(XQ, w, x_scale, w_scale, m_major=m_major))

    return tune


def _blockwise(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, *, m_major: bool
) -> torch.Tensor:
    assert x_scale.is_contiguous()
    rows, blocks = x_scale.shape
    spread = x_scale.reshape(blocks, rows).T if m_major else x_scale
    scaled = x.float() * spread.repeat_interleave(128, 1)[:, : x.shape[1]]
    scales = w_scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
    return scaled @ (w.float() * scales).T


def _fp4(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    assert out.shape[0] % 32 == 0
    rows = x.shape[0]
    tiles = unshuffle(w.view(torch.uint8), "n16k16").view(w.dtype)
    full = torch.zeros(out.shape, dtype=torch.float32)
    full[:rows] = _scaled_fp4(x, x_scale) @ _scaled_fp4(tiles, w_scale).T
    return full


def _scaled_fp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    full = unpack_mx(values)
    rows, groups = full.shape[0], full.shape[1] // 32
    wide, columns = scales.shape
    assert (wide, columns) == (-(-rows // 256) * 256, -(-groups // 8) * 8)
    stored = scales.view(torch.uint8).flatten()
    # Where aiter's `shuffle_scale` puts (row, column), one by one.
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    place = (r // 32) * 32 * columns + (c // 8) * 256 + (c % 4) * 64 + (r % 16) * 4 + (c // 4 % 2) * 2 + r // 16 % 2
    return full * torch.exp2(stored[place].float() - 127).repeat_interleave(32, 1)


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    pad_k_to: int = 0,
) -> torch.Tensor:
    rows, along = layout
    step = 16 // x.element_size()
    tiles = x.view(-1, x.shape[-2] // rows, rows, x.shape[-1] // (2 * along), 2 * along // step, step)
    made = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(*x.shape)
    made.is_shuffled = True
    return made


def get_hip_quant(qType: QuantType) -> Callable[..., tuple[torch.Tensor, Optional]]:
    if qType is QuantType.No:
        return lambda *operands, **arguments: (operands[0], None)
    group = 128 if qType is QuantType.per_1x128 else None

    def quantise(
        x: torch.Tensor, scale: Optional = None, quant_dtype: torch.dtype = torch.int8, num_rows: Optional = None,
        num_rows_factor: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        parts = x.float().view(*x.shape[:-1], -1, group or x.shape[-1])
        scales = parts.abs().amax(-1) / torch.finfo(quant_dtype).max
        values = (parts / scales[..., None]).to(quant_dtype).view(x.shape)
        return values, scales

    return quantise


def moe_sorting(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = 32,
    expert_mask: Optional = None,
    num_local_tokens: Optional = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: bool = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: bool = False,
) -> tuple[torch.Tensor, ...]:
    assert (topk_ids.dtype, topk_weights.dtype) == (torch.int32, torch.float32)
    rows, topk = topk_ids.shape
    ids, shares, experts = [], [], []
    for expert in range(num_experts):
        places = [(t, s) for t, s in (topk_ids == expert).nonzero().tolist()]
        padded = -(-len(places) // block_size) * block_size
        ids += [t | s << 24 for t, s in places] + [rows | topk << 24] * (padded - len(places))
        shares += [float(topk_weights[t, s]) for t, s in places] + [0.0] * (padded - len(places))
        experts += [expert] * (padded // block_size)
    out = torch.zeros(rows, model_dim, dtype=moebuf_dtype)
    return torch.tensor(ids), torch.tensor(shares), torch.tensor(experts), torch.tensor([len(ids)]), out


def ck_moe_stage1_fwd(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    sorted_expert_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    out: torch.Tensor,
    topk: int,
    kernelName: str = "",
    w1_scale: Optional = None,
    a1_scale: Optional = None,
    block_m: int | None = 32,
    sorted_weights: Optional = None,
    quant_type: QuantType = QuantType.No,
    activation: ActivationType = ActivationType.Silu,
    splitk: int | None = 1,
    use_non_temporal_load: bool | None = False,
    dst_type: torch.dtype | None = None,
) -> torch.Tensor:
    CALLS.append(("ck_moe_stage1_fwd", (kernelName, block_m, getattr(w1, "is_shuffled", False))))
    x = _rescaled(hidden_states, a1_scale)
    act = {ActivationType.Silu: torch.nn.functional.silu, ActivationType.Gelu: torch.nn.functional.gelu}[activation]
    for place, (packed, expert) in enumerate(_places(sorted_token_ids, sorted_expert_ids, block_m)):
        token, slot = packed & 0xFFFFFF, packed >> 24
        if slot < topk:
            row = x[token] @ _expert(w1, w1_scale, expert).T
            row = row if sorted_weights is None else row * sorted_weights[place]
            half = out.shape[-1]
            out[token, slot] = (act(row[:half]) * row[half:]).to(out.dtype)
    return out


def ck_moe_stage2_fwd(
    inter_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    sorted_expert_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    out: torch.Tensor,
    topk: int,
    kernelName: str = "",
    w2_scale: Optional = None,
    a2_scale: Optional = None,
    block_m: int | None = 32,
    sorted_weights: Optional = None,
    quant_type: QuantType = QuantType.No,
    activation: ActivationType = ActivationType.Silu,
    use_non_temporal_load: bool | None = False,
) -> torch.Tensor:
    CALLS.append(("ck_moe_stage2_fwd", (kernelName, block_m, getattr(w2, "is_shuffled", False))))
    h, total = _rescaled(inter_states, a2_scale), torch.zeros(out.shape)
    for place, (packed, expert) in enumerate(_places(sorted_token_ids, sorted_expert_ids, block_m)):
        token, slot = packed & 0xFFFFFF, packed >> 24
        if slot < topk:
            row = h[token, slot] @ _expert(w2, w2_scale, expert).T
            total[token] += row if sorted_weights is None else row * sorted_weights[place]
    return out.copy_(total)


def _places(ids: torch.Tensor, experts: torch.Tensor, block: int | None) -> Iterator[tuple[int, int]]:
    for place, packed in enumerate(ids.tolist()):
        yield packed, int(experts[place // (block or 1)])


def _rescaled(values: torch.Tensor, scale: Optional) -> torch.Tensor:
    if scale is None:
        return values.float()
    return values.float() * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def _expert(w: torch.Tensor, scale: Optional, expert: int) -> torch.Tensor:
    one = (unshuffle(w[expert], "n16k16") if getattr(w, "is_shuffled", False) else w[expert]).float()
    if scale is None:
        return one
    if scale.shape[-2] == one.shape[0]:
        return one * scale[expert].reshape(-1, 1)
    return one * scale[expert].repeat_interleave(128, 0)[: one.shape[0]].repeat_interleave(128, 1)[:, : one.shape[1]]


@contextmanager
def package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[ModuleType]:
    """The stand-in as `import aiter` finds it, its lists of assembly kernels in `folder`."""
    modules = {name: ModuleType(name) for name in ("aiter", "aiter.jit", "aiter.ops", "aiter.fused_moe")}
    modules |= {name: ModuleType(name) for name in ("aiter.jit.core", "aiter.ops.shuffle")}
    module = modules["aiter"]
    module.opened = []
    module.hipb_create_extension = lambda: module.opened.append(1)
    for each in (
        *(hipb_mm, hipb_findallsols, gemm_a16w16_asm, gemm_a8w8_asm, gemm_a8w8_blockscale_bpreshuffle_asm),
        *(gemm_a4w4_asm, gemm_a4w4_blockscale_tune, batched_gemm_bf16_tune, get_hip_quant),
        *(ck_moe_stage1_fwd, ck_moe_stage2_fwd, QuantType, ActivationType),
    ):
        setattr(module, each.__name__, each)
    for name, m_major, shuffled in (
        ("gemm_a8w8_tune", False, False),
        ("gemm_a8w8_blockscale_tune", False, False),
        ("gemm_a8w8_bpreshuffle_tune", False, True),
        ("gemm_a8w8_blockscale_bpreshuffle_tune", True, True),
        ("batched_gemm_a8w8_tune", False, False),
    ):
        setattr(module, name, _tune(name, m_major=m_major, shuffled=shuffled))
    modules["aiter.ops.shuffle"].shuffle_weight = shuffle_weight
    modules["aiter.fused_moe"].moe_sorting = moe_sorting
    modules["aiter.jit.core"].get_asm_dir = lambda: str(folder)
    for path, text in (
        ("bf16gemm/bf16gemm_fp32bf16.csv", BF16_LIST),
        ("i8gemm/i8gemm_bf16_perTokenI8.csv", I8_LIST),
        ("fp8gemm_blockscale/fp8gemm_bf16_blockscale.csv", FP8_LIST),
        ("f4gemm/f4gemm_bf16_per1x32Fp4.csv", FP4_LIST),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name, each in modules.items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(
        "torch.cuda.tunable.get_validators", lambda: (("PT_VERSION", "2.11"), ("HIPBLASLT_VERSION", "100101-abc"))
    )
    cached = (
        *(hipblaslt.aiter_import_problem, hipblaslt._library, hipblaslt._version, hipblaslt._solutions),
        *(aiter_package.aiter_version, aiter_package.asm_kernels, aiter_backend._zeros),
    )
    CALLS.clear()
    for function in cached:
        function.cache_clear()
    yield module
    for function in cached:
        function.cache_clear()
