"""Products of a model, against the shapes that engines run."""

import csv
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gemmpipe.core.errors import UserError
from gemmpipe.family import Family, KernelDefaults
from gemmpipe.sources.model.rules import linears
from gemmpipe.sources.model.source import ModelShapes, batch_sizes

model = functools.partial(ModelShapes, ep=1, quantization="config")

DATA = Path(__file__).parents[3] / "shared" / "data" / "model_configs"


def _config(architecture: str, hidden: int, width: int, layers: int, heads: int, kv: int, vocab: int, **more: object):  # type: ignore[no-untyped-def]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


LLAMA_8B = _config("Llama", 4096, 14336, 32, 32, 8, 128256)
LLAMA_70B = _config("Llama", 8192, 28672, 80, 64, 8, 128256)
LLAMA_405B = _config("Llama", 16384, 53248, 126, 128, 8, 128256)
QWEN_8B = _config("Qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128)
QWEN_32B = _config("Qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128)


@pytest.mark.parametrize(
    ("config", "tp", "qkv", "o", "gate_up", "down", "head"),
    [
        (LLAMA_8B, 1, (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
        (LLAMA_70B, 8, (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)),
        (LLAMA_405B, 8, (2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656), (16032, 16384)),
        (QWEN_8B, 1, (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),
        (QWEN_32B, 1, (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120)),
    ],
)
def test_dense_decoders(
    config: Mapping[str, object],
    tp: int,
    qkv: object,
    o: object,
    gate_up: object,
    down: object,
    head: object,
    blockscale: Family,
    sixteen: Family,
    no_words: KernelDefaults,
) -> None:
    source = model(path=None, config=config, tp=tp, nsets=[1, 64])
    expected = {"qkv_proj": qkv, "o_proj": o, "gate_up_proj": gate_up, "down_proj": down}
    made = source.problems(blockscale, no_words, "sm_90")
    assert {p.layer: (p["N"], p["K"]) for p in made} == expected
    assert {p["M"] for p in made} == {1, 64}
    assert len(made) == 8
    assert {p.weight for p in made} == {float(str(config["num_hidden_layers"]))}
    made = source.problems(sixteen, no_words, "sm_90")
    assert {p.layer: (p["N"], p["K"]) for p in made} == {**expected, "lm_head": head}


def _shapes(config: Mapping[str, object], tp: int) -> dict[str, tuple[int, int]]:
    return {x.layer: (x.n, x.k) for x in linears(config, tp, "here", sixteen_bit=True)}


def test_kv_heads_are_repeated_over_more_devices() -> None:
    config = _config("Qwen3", 2048, 6144, 48, 32, 4, 151936, head_dim=128)
    assert _shapes(config, 8)["qkv_proj"] == (768, 2048)
    with pytest.raises(UserError, match=r"num_key_value_heads 10 does not divide by shapes.tp=8"):
        _shapes(_config("Phi3", 5120, 17920, 40, 40, 10, 100352), 8)
    with pytest.raises(UserError, match="tp 16 is not a multiple of num_key_value_heads 10"):
        _shapes(_config("Phi3", 5120, 17920, 40, 160, 10, 100352), 16)


def test_lm_head_is_padded_to_64() -> None:
    assert _shapes(_config("Llama", 64, 128, 1, 8, 8, 1000), 8)["lm_head"] == (128, 64)
    with pytest.raises(UserError, match=r"vocab_size, padded to 64, 1024 does not divide by shapes.tp=3"):
        _shapes(_config("Llama", 96, 192, 1, 3, 3, 1000), 3)


def test_nested_text_config() -> None:
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": LLAMA_8B}
    assert _shapes(outer, 1)["qkv_proj"] == (6144, 4096)


def test_without_architectures_the_model_type_counts() -> None:
    sizes = {name: value for name, value in LLAMA_8B.items() if name != "architectures"}
    assert _shapes(sizes, 1) == _shapes(LLAMA_8B, 1)
    assert _shapes({**sizes, "model_type": "qwen3"}, 1) == _shapes(LLAMA_8B, 1)


def test_latent_attention_and_experts() -> None:
    config = _config("DeepseekV3", 7168, 18432, 61, 128, 128, 129280) | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }
    shapes = _shapes(config, 8)
    assert shapes["fused_qkv_a_proj"] == (2112, 7168)
    assert shapes["q_b_proj"] == (3072, 1536)
    assert shapes["kv_b_proj"] == (4096, 512)
    assert shapes["o_proj"] == (7168, 2048)
    assert shapes["mlp.gate_up_proj"] == (4608, 7168)
    assert shapes["shared_experts.down_proj"] == (7168, 256)
    assert shapes["router(gate)"] == (256, 7168)
    assert shapes["lm_head"] == (16160, 7168)


def test_experts_are_another_familys_and_routers_16_bit(
    blockscale: Family, sixteen: Family, no_words: KernelDefaults
) -> None:
    config = _config(
        "Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
    )
    source = model(path=None, config=config, tp=1, nsets=[1])
    assert {p.layer for p in source.problems(blockscale, no_words, "sm_90")} == {"qkv_proj", "o_proj"}
    assert {p.layer for p in source.problems(sixteen, no_words, "sm_90")} == {
        "qkv_proj",
        "o_proj",
        "router(gate)",
        "lm_head",
    }
    with pytest.raises(UserError, match=r"experts.w13.*N of a part 96 with tp 8: engines need a multiple of 128"):
        model(path=None, config=config, tp=8, nsets=[1]).problems(blockscale, no_words, "sm_90")


def test_biases_belong_to_the_key(sixteen: Family, no_words: KernelDefaults) -> None:
    source = model(path=None, config=_config("Qwen2", 1024, 2048, 2, 8, 8, 1000), tp=1, nsets=[1])
    biased = {p.layer for p in source.problems(sixteen, no_words, "sm_90") if p["bias"]}
    assert biased == {"qkv_proj"}
    defaults = KernelDefaults(dtype=None, out_dtype=None, bias=False)
    assert not any(p["bias"] for p in source.problems(sixteen, defaults, "sm_90"))


@pytest.mark.parametrize(
    ("change", "tp", "line"),
    [
        ({"num_attention_heads": None}, 1, "config.json: no field 'num_attention_heads', which LlamaForCausalLM needs"),
        ({"num_attention_heads": 0}, 1, "config.json: num_attention_heads: 0, expected a whole number from 1"),
        ({"num_attention_heads": 33}, 1, "hidden_size 4096 does not divide by num_attention_heads 33"),
        ({"num_hidden_layers": "32"}, 1, "num_hidden_layers: '32', expected a whole number"),
        ({}, 5, "num_attention_heads 32 does not divide by shapes.tp=5"),
        ({}, 0, "shapes.tp: 0, expected a whole number"),
        ({"intermediate_size": 14337}, 2, "intermediate_size 14337 does not divide by shapes.tp=2"),
        ({"architectures": ["LlamaForCausalLN"]}, 1, "no rule for architecture.*did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["RwkvForCausalLM"]}, 1, "no rule for architecture 'RwkvForCausalLM'"),
        ({"architectures": []}, 1, r"architectures: \[\], expected for example \[LlamaForCausalLM\]"),
        ({"architectures": None, "model_type": "rwkv"}, 1, "no rule for architecture 'rwkv'"),
        ({"kv_lora_rank": 512}, 1, "LlamaForCausalLM with experts or latent attention: no rule"),
    ],
)
def test_impossible_input_is_one_line(
    change: Mapping[str, object], tp: int, line: str, tmp_path: Path, sixteen: Family, no_words: KernelDefaults
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **change}))
    with pytest.raises(UserError, match=line) as caught:
        model(path=str(tmp_path), config=None, tp=tp, nsets=[1]).problems(sixteen, no_words, "sm_90")
    assert "\n" not in str(caught.value)


def test_block_scales_must_fall_on_the_cut(blockscale: Family, no_words: KernelDefaults) -> None:
    config = _config("Llama", 4096, 4096 + 512, 2, 32, 8, 128256)
    with pytest.raises(UserError, match="gate_up_proj: N of a part 576 with tp 8: engines need a multiple of 128"):
        model(path=None, config=config, tp=8, nsets=[1]).problems(blockscale, no_words, "sm_90")
    assert model(path=None, config=config, tp=1, nsets=[1]).problems(blockscale, no_words, "sm_90")


@pytest.mark.parametrize("nsets", [[], [0], ["64"], [True], [1.5]])
def test_wrong_nsets(nsets: list[object], sixteen: Family, no_words: KernelDefaults) -> None:
    with pytest.raises(UserError, match=r"shapes.nsets"):
        model(path=None, config=LLAMA_8B, tp=1, nsets=nsets).problems(sixteen, no_words, "sm_90")  # type: ignore[arg-type]


def test_where_the_config_comes_from(tmp_path: Path, sixteen: Family, no_words: KernelDefaults) -> None:
    for path, config, line in (
        (None, None, "are both empty"),
        ("x", LLAMA_8B, "are both given"),
        (str(tmp_path), None, "no file '.*config.json'"),
    ):
        with pytest.raises(UserError, match=line):
            model(path=path, config=config, tp=1, nsets=[1]).problems(sixteen, no_words, "sm_90")


@pytest.mark.skipif(not DATA.exists(), reason="collected model configurations not here")
def test_against_the_collected_shapes() -> None:
    with (DATA / "expected_gemms.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    expected: dict[tuple[str, int], dict[str, tuple[int, int, int]]] = {}
    for row in rows:
        shapes = expected.setdefault((row["model"], int(row["tp"])), {})
        shapes[row["role"]] = (int(row["N"]), int(row["K"]), int(row["layers"]))
    for (model, tp), shapes in expected.items():
        config = json.loads((DATA / f"{model}.json").read_text())
        if (model, tp) == ("Phi-4", 8):  # in the list, but engines refuse its 10 KV heads
            with pytest.raises(UserError, match="num_key_value_heads 10"):
                linears(config, tp, model, sixteen_bit=True)
            continue
        found = {x.layer: (x.n, x.k, x.calls) for x in linears(config, tp, model, sixteen_bit=True)}
        assert found == shapes, (model, tp)


@pytest.mark.parametrize("most", [0, 2**31])
def test_a_batch_size_out_of_bounds_names_both_bounds(most: int) -> None:
    with pytest.raises(UserError, match=rf"^shapes.nsets: {most}, expected whole numbers from 1 to 2147483647, "):
        batch_sizes([most])


def _source(config: Mapping[str, object]) -> ModelShapes:
    return model(path=None, config=config, tp=1, nsets=[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": [1]}, r"hidden_size: \[1\], expected a whole number"),
        ({"hidden_size": [4096] * 31}, "hidden_size: .*expected a whole number"),
        ({"hidden_size": True}, "hidden_size: True, expected a whole number"),
        ({"hidden_size": "4096"}, "hidden_size: '4096', expected a whole number"),
        ({"attention_bias": "no"}, "attention_bias: 'no', expected true or false"),
        ({"num_experts": {}}, "num_experts: {}, expected a whole number"),
        ({"kv_lora_rank": []}, r"kv_lora_rank: \[\], expected a whole number"),
        ({"num_hidden_layers": [32]}, r"num_hidden_layers: \[32\], expected a whole number"),
        ({f"x{i}": 1 for i in range(3000)}, "3,007 fields, expected at most 2,000"),
        ({"per_layer_config": {f"x{i}": {} for i in range(33)}}, "per_layer_config: 33 names for 32 layers"),
        ({"architectures": ["y" * 90_000]}, "no rule for architecture 'yyy"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_field_of_the_wrong_kind_is_one_short_line(
    fields: Mapping[str, object], message: str, sixteen: Family, no_words: KernelDefaults
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        _source({**LLAMA_8B, **fields}).problems(sixteen, no_words, "sm_90")
    assert len(str(caught.value)) <= 500


def test_lists_of_one_value_per_layer_are_a_size_for_all(sixteen: Family, no_words: KernelDefaults) -> None:
    listed = {**LLAMA_8B, "intermediate_size": [14336] * 32}
    found, plain = (_source(each).problems(sixteen, no_words, "sm_90") for each in (listed, LLAMA_8B))
    assert found == plain


def test_thousands_of_layers_with_fields_of_their_own_are_read_once(sixteen: Family, no_words: KernelDefaults) -> None:
    """Regression: each layer was searched among all names, a hundred million comparisons per call."""
    many = {**LLAMA_8B, "num_hidden_layers": 10_000, "head_dim": 128}
    many["per_layer_config"] = {f"{i:05}": {"num_key_value_heads": 4} for i in range(5_000)}
    found = _source(many).problems(sixteen, no_words, "sm_90")
    assert {(p["N"], p.weight) for p in found if "qkv" in p.layer} == {(5120, 5_000.0), (6144, 5_000.0)}
    many["per_layer_config"] = {str(i): {"head_dim": 64 + i} for i in range(5_000)}
    with pytest.raises(UserError, match="layers of more than 256 kinds"):
        _source(many).problems(sixteen, no_words, "sm_90")
