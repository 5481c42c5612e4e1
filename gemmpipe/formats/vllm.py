"""vLLM's configurations of its block-scaled fp8 kernel, in the files that it loads unchanged."""

from dataclasses import dataclass

from gemmpipe.formats.engine_json import AMD, NEEDED, EngineJson


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineJson):
    """Writes `vllm/N=..,K=..,device_name=..,dtype=fp8_w8a8,block_shape=[128,128].json`."""

    name = "vllm"
    accepted = (*NEEDED, "num_stages", *AMD)

    def file_name(self, n: int, k: int, device: str, block: tuple[int, int]) -> str:
        """As vLLM 0.33 looks for it: no blank in the block shape."""
        return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[{block[0]},{block[1]}].json"
