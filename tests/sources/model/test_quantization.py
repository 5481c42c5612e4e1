"""The kernels of a checkpoint's layers by its quantisation."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from executed_lines import grows_linearly
from hypothesis import given
from hypothesis import strategies as st
from pairwise import few

from gemmpipe.core.errors import UserError
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.model import quantization as ignored
from gemmpipe.sources.model.quantization import quantization_of
from gemmpipe.sources.model.source import ModelShapes

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)


def calls(entry: object, kernel: str, quantization: str = "config", layers: int = 4) -> dict[str, float]:
    config = {**LLAMA, "num_hidden_layers": layers, "quantization_config": entry}
    source = ModelShapes(path=None, config=config, tp=1, ep=1, nsets=[8], quantization=quantization)  # type: ignore[arg-type]
    return {p.layer: p.weight for p in source.problems(load_family(kernel), NOTHING, "sm_90")}


ALL = {"qkv_proj": 4.0, "o_proj": 4.0, "gate_up_proj": 4.0, "down_proj": 4.0}


def group(**weights: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "input_activations": {"num_bits": 8}}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("entry", "kernel"),
    [
        (BLOCKS, "a8w8_blockscale"),
        (BLOCKS, "a8w8_blockscale_bpreshuffle"),
        (group(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), "a8w8_blockscale"),
        (group(num_bits=8, type="float", strategy="channel"), "a8w8"),
        (group(num_bits=8, type="int", strategy="channel"), "a8w8"),
        ({"quant_method": "fbgemm_fp8"}, "a8w8_bpreshuffle"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "a8w8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "a8w8"),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4"}, "input_tensors": {"dtype": "fp4"}},
            },
            "a4w4_blockscale",
        ),
    ],
)
def test_each_form_goes_to_its_kernel(entry: Mapping[str, object], kernel: str) -> None:
    assert calls(entry, kernel) == ALL
    assert calls(entry, "a16w16") == {"lm_head": 1.0}
    assert calls(entry, "a16w16", "ignore") == {**ALL, "lm_head": 1.0}


def test_the_columns_that_it_decides() -> None:
    config = {**LLAMA, "quantization_config": group(num_bits=8, type="int", strategy="channel")}
    source = ModelShapes(path=None, config=config, tp=1, ep=1, nsets=[8], quantization="config")
    assert {p["q_dtype_w"] for p in source.problems(load_family("a8w8"), NOTHING, "sm_90")} == {"int8"}
    source = ModelShapes(
        path=None,
        config={**config, "quantization_config": {"quant_method": "fp8"}},
        tp=1,
        ep=1,
        nsets=[8],
        quantization="config",
    )
    assert {p["granularity"] for p in source.problems(load_family("a8w8"), NOTHING, "sm_90")} == {"tensor"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["lm_head"], {}),
        (["model.layers.0.self_attn"], {"qkv_proj": 1, "o_proj": 1}),
        (["model.layers.*.self_attn"], {"qkv_proj": 4, "o_proj": 4}),
        (["model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"], {"qkv_proj": 1, "down_proj": 1}),
        (["down_proj"], {"down_proj": 4}),
        (["re:.*mlp.*"], {"gate_up_proj": 4, "down_proj": 4}),
        (["re:^(?!.*mlp).*$"], {"qkv_proj": 4, "o_proj": 4}),
        (["re:model.layers.[01].self_attn.o_proj$"], {"o_proj": 2}),
        (["model.language_model.layers.3.mlp"], {"gate_up_proj": 1, "down_proj": 1}),
        (["model.layers.1"], dict.fromkeys(ALL, 1)),
    ],
)
def test_what_is_ignored_stays_in_16_bits(names: list[str], left: Mapping[str, int]) -> None:
    entry = {**BLOCKS, "modules_to_not_convert": names}
    wide, eight = calls(entry, "a16w16"), calls(entry, "a8w8_blockscale")
    assert {name: wide.get(name, 0) for name in ALL} == {name: left.get(name, 0) for name in ALL}
    assert all(wide.get(name, 0) + eight.get(name, 0) == 4 for name in ALL)


def test_layers_without_a_kernel_are_reported() -> None:
    with pytest.raises(UserError, match=r"is fp8 in blocks of 128x128 \(kernel=a8w8_blockscale or"):
        calls(BLOCKS, "a8w8")
    with pytest.raises(UserError, match=r"is awq \(no kernel of ours; kernel=a16w16 for 16-bit layers"):
        calls({"quant_method": "awq", "bits": 4}, "a8w8")
    assert calls({"quant_method": "gptq"}, "a16w16") == {"lm_head": 1.0}


def test_modelopt_keeps_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    entry = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(entry))
    source = ModelShapes(path=str(tmp_path), config=None, tp=1, ep=1, nsets=[8], quantization="config")
    assert {p.layer for p in source.problems(load_family("a16w16"), NOTHING, "sm_90")} == {"lm_head"}
    assert "4 products of other kernels" in source.left_out(load_family("a16w16"), NOTHING, "sm_90")


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("fp8", "quantization_config: 'fp8', expected an object"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size: \[128\], expected two whole numbers"),
        ({**BLOCKS, "ignore": "lm_head"}, "expected a list of module names"),
        ({**BLOCKS, "ignore": ["re:" + "a" * 300]}, "expected a shorter pattern"),
        ({**BLOCKS, "ignore": ["re:["]}, "unterminated character set"),
        ({"quant_method": "compressed-tensors"}, "config_groups: no group with weights"),
    ],
)
def test_errors_are_one_line(entry: object, line: str) -> None:
    with pytest.raises(UserError, match=line):
        calls(entry, "a8w8_blockscale")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "pattern", few(["(.|.)" * 30 + "!", ".?" * 60 + "!!", "(.*)*!", "(?=((.|.)*))" + ".*" * 40 + "!"], 0)
)
def test_a_pattern_that_takes_for_ever_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored, "_TIMEOUT_S", 1.0)
    with pytest.raises(UserError, match="cannot be matched within 1 s, expected simple patterns"):
        calls({**BLOCKS, "ignore": [f"re:{pattern}"]}, "a8w8_blockscale")


def test_work_grows_with_names_and_layers() -> None:
    def read(layers: int) -> Callable[[], None]:
        names = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(0, layers, 2) for name in "qkvo"]

        def ask() -> None:
            found = calls({**BLOCKS, "ignore": names}, "a16w16", layers=layers)
            assert found["qkv_proj"] == (layers + 1) // 2

        return ask

    grows_linearly(read, 200)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["fp8", "int8", "mxfp4", "quark", "block"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["quant_method", "quant_algo", "weight_block_size", "config_groups", "weights", "ignore"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_anything_there_is_read_or_refused(entry: object) -> None:
    line = ""
    try:
        quantization_of({"quantization_config": entry}, "here")
    except UserError as error:
        line = str(error)
    assert "\n" not in line
