"""What one kernel family takes of a model's products, and the key that it gives them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gemmpipe.data import Problem, Scalar
from gemmpipe.errors import UserError
from gemmpipe.family import Family, GemmSpec, KernelDefaults
from gemmpipe.problem import make_problem
from gemmpipe.sources.decoder.activations import between_products
from gemmpipe.sources.decoder.linear import Config, Linear
from gemmpipe.sources.decoder.quantization import Quantization

_WIDE = ("bfloat16", "float16")
_GATED = 2


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A family, the kernel's words, and what the checkpoint says of its layers (None: nothing, so any family may)."""

    family: Family
    defaults: KernelDefaults
    gfx: str
    quantization: Quantization | None

    @property
    def columns(self) -> frozenset[str]:
        """The names of the family's key."""
        return frozenset(column.name for column in self.family.key_columns)

    @property
    def batched(self) -> bool:
        """Whether it computes several products as one."""
        return "B" in self.columns

    @property
    def grouped(self) -> bool:
        """Whether it computes experts."""
        return "expert" in self.columns

    def takes(self, linear: Linear, *, quantised: bool) -> bool:
        """Whether this family computes it: plain, batched or grouped, quantised or in 16 bits."""
        if bool(linear.experts) != self.grouped or bool(linear.batch) != self.batched:
            return False
        if self.grouped and len(linear.parts) != _GATED:
            return False  # an expert's down projection is computed with what precedes it
        if self.batched:
            return True
        if linear.sixteen_bit:
            return self.family.lm_head
        if self.quantization is None:
            return True
        if not quantised:
            return self._some_spec().w_dtype in _WIDE
        return bool(self.quantization.experts) if self.grouped else self.family.name in self.quantization.families

    def problems(
        self, linear: Linear, config: Config, sizes: Sequence[int], where: str, *, quantised: bool
    ) -> list[Problem]:
        """The product at each M; `config` are the language model's fields. Raises UserError beginning with `where`."""
        values = self._grouped(linear, config, where, quantised=quantised) if self.grouped else self._plain(linear)
        if self.quantization and quantised and not self.grouped:
            values |= self.quantization.columns(self.columns)
        try:
            return [
                make_problem(
                    self.family,
                    {self.family.rows_column: m, **values},
                    self.defaults,
                    self.gfx,
                    where,
                    float(linear.calls),
                    linear.layer,
                )
                for m in sizes
            ]
        except UserError as error:
            if not (self.grouped and quantised and self.quantization) or str(error).startswith("kernel."):
                raise
            said = str(error).removeprefix(f"{where}: ")
            raise UserError(
                f"{where}: {self.quantization.what}: {said}; shapes.quantization=ignore takes them in 16 bits"
            ) from None

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """The (rows, columns) of the tiles that the family's weights are scaled in, where it scales them so."""
        if self.quantization is not None:
            return self.quantization.block
        scaling = self._some_spec().w_scale
        return scaling.block if scaling is not None and scaling.granularity == "block" else None

    def nothing(self) -> str:
        """Why a model has no product for this family, and what to type instead."""
        if self.quantization is None:
            what = "experts" if self.grouped else "batched products" if self.batched else "products"
            return f"no {what} in this model, which kernel={self.family.name} would compute"
        return f"nothing is left to kernel={self.family.name}: {self._stored()}"

    def others(self, products: Sequence[tuple[Linear, bool]]) -> str:
        """A clause on the (product, quantised) that this family does not take, empty for none that matter."""
        plain = sum(not linear.experts and not linear.sixteen_bit for linear, _ in products)
        said = [f"{plain} products of other kernels ({self._stored()})"] if plain and self.quantization else []
        experts = [linear for linear, _ in products if linear.experts]
        if experts and not self.grouped:
            none = any(linear.bias for linear in experts)
            said.append("the experts (no kernel of ours: they have biases)" if none else "the experts (kernel=fmoe)")
        return ", ".join(said)

    def _stored(self) -> str:
        """What the checkpoint says of itself, in kernels."""
        assert self.quantization is not None
        said = self.quantization
        kernels = " or ".join(f"kernel={name}" for name in said.families) or "no kernel of ours"
        return (
            f"quantization_config says {said.what} ({kernels}; kernel=a16w16 for what stays in 16 bits); "
            "shapes.quantization=ignore takes its layers all the same"
        )

    def _some_spec(self) -> GemmSpec:
        """Of any product: what does not depend on sizes."""
        sizes: dict[str, Scalar] = {c.name: 1024 for c in self.family.key_columns if c.kind == "int"}
        return self.family.spec(make_problem(self.family, {**sizes, "topk": 1}, self.defaults, self.gfx, "kernel"))

    def _plain(self, linear: Linear) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {"N": linear.n, "K": linear.k}
        if linear.batch:
            values["B"] = linear.batch
        if linear.bias and "bias" in self.columns and self.defaults.bias is None:
            values["bias"] = True
        return values

    def _grouped(self, linear: Linear, config: Config, where: str, *, quantised: bool) -> dict[str, Scalar]:
        if not linear.topk:
            raise UserError(f"{where}: no field 'num_experts_per_tok', which kernel={self.family.name} needs")
        values: dict[str, Scalar] = {
            "model_dim": linear.k,
            "inter_dim": linear.parts[0],
            "expert": linear.experts,
            "topk": linear.topk,
            "use_g1u1": 1,
        }
        if "act_type" in self.columns:  # a family of one's own without that column decides by itself
            values |= between_products(linear, config, self.family.name, where)
        if self.quantization is not None:
            values["q_type"] = self.quantization.experts if quantised else "No"
        return values
