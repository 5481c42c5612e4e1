"""A Llama in plain torch with random weights and a static cache: linear layers in bf16, or in block-scaled fp8."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gemmpipe.runtime import gemm_a8w8_blockscale

BLOCK = 128
FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x fp8 [M, K], w fp8 [N, K], x_scale [M, K/128], w_scale [N/128, K/128]) -> bf16 [M, N]."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes in a config.json of Llama; the defaults are those of Llama 3 8B with fewer layers."""

    layers: int = 8
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    context: int = 2048

    @property
    def head(self) -> int:
        """Elements per head."""
        return self.hidden // self.heads


class Fp8Linear(nn.Module):
    """An fp8 weight [N, K] with a scale per 128 x 128 block; activations are quantised per 1 x 128 in each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs).normal_(std=inputs**-0.5)
        blocks = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / _FP8_MAX
        self.register_buffer("weight", (blocks / scale[:, None, :, None]).view(outputs, inputs).to(FP8))
        self.register_buffer("scale", scale)
        self.product: Product = gemm_a8w8_blockscale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] bf16 -> [..., N] bf16."""
        groups = x.reshape(-1, x.shape[-1] // BLOCK, BLOCK).float()
        scale = groups.abs().amax(-1).clamp_min(1e-6) / _FP8_MAX
        quantised = (groups / scale[..., None]).to(FP8).view(-1, x.shape[-1])
        return self.product(quantised, self.weight, scale, self.scale).view(*x.shape[:-1], -1)


def library_product(x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """torch's block-scaled product (cuBLASLt on Hopper, M padded to 4); on a CPU dequantised."""
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.llama_example.product(x, w, x_scale, w_scale)
        return out
    if x.device.type == "cpu":
        wide = (x.float().view(len(x), -1, BLOCK) * x_scale[..., None]).view(len(x), -1)
        full = w.float() * w_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (wide @ full.t()).bfloat16()
    rows = len(x)
    if rows % 4:
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, -rows % 4)).view(FP8)
        x_scale = functional.pad(x_scale, (0, 0, 0, -rows % 4))
    kinds = functional.ScalingType
    # M-major scales of x; scales of w with K/128 a multiple of 4 (Llama: 32 or 112).
    columns = x_scale.t().contiguous().t()
    out = functional.scaled_mm(
        x, w.t(), columns, kinds.BlockWise1x128, w_scale.t(), kinds.BlockWise128x128, output_dtype=torch.bfloat16
    )
    return out[:rows]


# torch 2.11 cannot trace its own scaled product: a minimal custom operator.
_LIBRARY = torch.library.Library("llama_example", "DEF")
_LIBRARY.define("product(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale) -> Tensor")
_LIBRARY.impl("product", library_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "llama_example::product", lambda x, w, *scales: x.new_empty((len(x), len(w)), dtype=torch.bfloat16), lib=_LIBRARY
)


class Attention(nn.Module):
    """Grouped-query attention over a static cache [B, kv_heads, context, head]."""

    def __init__(self, sizes: Sizes, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv = linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.head)
        self.o = linear(sizes.hidden, sizes.hidden)

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, T, hidden] at `positions` [T] of the cache [2, B, kv_heads, context, head]."""
        s = self.sizes
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, s.head).transpose(1, 2)
        q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), 1)
        q, k = rotated(q, positions), rotated(k, positions)
        cache[0].index_copy_(2, positions, k)
        cache[1].index_copy_(2, positions, v)
        y = functional.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, sizes: Sizes, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(sizes, linear)
        self.gate_up = linear(sizes.hidden, 2 * sizes.inner)
        self.down = linear(sizes.inner, sizes.hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=torch.bfloat16) for _ in range(2))

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, T, hidden]."""
        x = x + self.attention(self.norms[0](x), cache, positions, mask)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """A decoder with random weights."""

    def __init__(self, sizes: Sizes, precision: str) -> None:
        super().__init__()
        linear = Fp8Linear if precision == "fp8" else _wide
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(sizes, linear) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=torch.bfloat16)
        self.head = _wide(sizes.hidden, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor, caches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [B, T] at `positions` [T] of caches [layers, 2, B, ...] -> last logits [B, vocabulary]."""
        x = self.embedding(tokens)
        mask = (torch.arange(caches.shape[-2], device=positions.device) <= positions[:, None])[None, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, positions, mask)
        return self.head(self.norm(x[:, -1]))

    def caches(self, batch: int, context: int) -> torch.Tensor:
        """Empty caches [layers, 2, batch, kv_heads, context, head] in bf16."""
        s = self.sizes
        shape = (s.layers, 2, batch, s.kv_heads, context, s.head)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.head.weight.device)


def _wide(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, heads, T, head]."""
    half = x.shape[-1] // 2
    frequencies = 500000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def llama(sizes: Sizes, precision: str, device: str) -> Llama:
    """The model on a device, without gradients."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(sizes, precision)
    return model.eval().requires_grad_(False)
