"""vLLM's configurations of its Triton kernels (block-scaled fp8, fused experts), in files that it loads unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemmpipe.data import Scalar
from gemmpipe.family import GemmSpec
from gemmpipe.formats.engine_json import AMD, LAUNCH, NEEDED, EngineJson, block_of, engine_dtype
from gemmpipe.templates.two_stage import APART


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineJson):
    """Writes `vllm/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128,128].json`.

    For experts `vllm/E=..,N=..,device_name=..[,dtype=fp8_w8a8][,block_shape=[128,128]].json`, N a rank's inner size.
    """

    name = "vllm"
    accepted = (*NEEDED, *LAUNCH, *AMD)

    def file_name(self, spec: GemmSpec, device: str) -> str:
        """As vLLM 0.25 looks for it: no blank in the block shape; of experts, one name for all of the H200 family."""
        if spec.experts is not None and "H200" in device.split("_"):
            device = "NVIDIA_H200"
        sizes = f"E={spec.experts.count},N={spec.experts.inner}" if spec.experts else f"N={spec.n},K={spec.k}"
        block = block_of(spec)
        shape = f",block_shape=[{block[0]},{block[1]}]" if block else ""
        return f"{sizes},device_name={device}{engine_dtype(spec)}{shape}.json"

    def inert(self, spec: GemmSpec) -> Mapping[str, tuple[Scalar, ...]]:
        """One configuration serves both stages of the experts."""
        apart = {} if spec.experts is None else dict.fromkeys(APART, (None,))
        return {**super().inert(spec), **apart}
