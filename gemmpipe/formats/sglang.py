"""SGLang's configurations of its Triton kernels (block-scaled fp8, fused experts), in files that it loads unchanged."""

from dataclasses import dataclass
from importlib import metadata

from gemmpipe.data import Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.formats.chosen import Choice
from gemmpipe.formats.engine_json import AMD, LAUNCH, NEEDED, TMA, EngineJson, block_of, engine_dtype
from gemmpipe.templates.two_stage import knobs_of_stage


@dataclass(frozen=True, kw_only=True)
class Sglang(EngineJson):
    """Writes `sglang/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128, 128].json`.

    For experts `sglang/configs/triton_X_Y_Z/E=..,N=..,device_name=...json` and its `_down` twin, the second stage's:
    `SGLANG_MOE_CONFIG_DIR` is the folder `sglang`.
    """

    name = "sglang"
    accepted = (*NEEDED, *LAUNCH, *AMD, "SWAP_AB", "SPLIT_K", TMA)

    def file_name(self, spec: GemmSpec, device: str) -> str:
        """As SGLang 0.5 looks for it: a blank in the block shape."""
        block = block_of(spec)
        shape = f",block_shape=[{block[0]}, {block[1]}]" if block else ""
        if spec.experts is None:
            return f"N={spec.n},K={spec.k},device_name={device}{engine_dtype(spec)}{shape}.json"
        by_row = spec.w_scale is not None and block is None
        sizes = f"E={spec.experts.count},N={spec.experts.inner},device_name={device}"
        return f"{sizes}{engine_dtype(spec)}{shape}{',per_channel_quant=True' if by_row else ''}.json"

    def bodies(self, choice: Choice, device: str) -> dict[str, dict[str, Scalar]]:
        """For experts a file a stage, in the folder of the triton that they were tuned with."""
        if choice.spec.experts is None:
            return super().bodies(choice, device)
        folder = f"configs/triton_{metadata.version('triton').split('+')[0].replace('.', '_')}"
        name = self.file_name(choice.spec, device).removesuffix(".json")
        return {
            f"{folder}/{name}.json": knobs_of_stage(choice.knobs, 1),
            f"{folder}/{name}_down.json": knobs_of_stage(choice.knobs, 2),
        }
