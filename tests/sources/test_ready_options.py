"""The shipped models: each gives the products that engines run, for every kernel with any of them."""

import pytest
import yaml

from gemmpipe.core.errors import UserError
from gemmpipe.core.paths import shipped
from gemmpipe.family import KernelDefaults, load_family
from gemmpipe.sources.model.source import ModelShapes

NOTHING = KernelDefaults(dtype=None, out_dtype=None, bias=None)
SHARED = yaml.safe_load((shipped("conf") / "shapes" / "_model.yaml").read_text())
OPTIONS = {
    path.stem: content
    for path in sorted((shipped("conf") / "shapes").glob("[!_]*.yaml"))
    if "config" in (content := yaml.safe_load(path.read_text()))
}

EXPECTED = {
    "deepseek_v3": {
        "a8w8_blockscale": {
            *((2112, 7168, 61), (3072, 1536, 61), (4096, 512, 61), (7168, 2048, 61)),
            *((4608, 7168, 3), (7168, 2304, 3), (512, 7168, 58), (7168, 256, 58)),
        },
        "a16w16": {(256, 7168, 58), (16160, 7168, 1)},
    },
    "kimi_k2": {
        "a8w8_blockscale": {
            *((2112, 7168, 61), (1536, 1536, 61), (2048, 512, 61), (7168, 1024, 61)),
            *((4608, 7168, 1), (7168, 2304, 1), (512, 7168, 60), (7168, 256, 60)),
        },
        "a16w16": {(384, 7168, 60), (20480, 7168, 1)},
    },
    "qwen3_30b_a3b": {"a16w16": {(5120, 2048, 48), (2048, 4096, 48), (128, 2048, 48), (151936, 2048, 1)}},
    "qwen3_235b_a22b": {
        "a16w16": {(1280, 4096, 94), (4096, 1024, 94), (128, 4096, 94), (18992, 4096, 1)},
        "a8w8_blockscale": {(1280, 4096, 94), (4096, 1024, 94)},
    },
    "gpt_oss_20b": {"a16w16": {(5120, 2880, 24), (2880, 4096, 24), (32, 2880, 24), (201088, 2880, 1)}},
    "gpt_oss_120b": {"a16w16": {(640, 2880, 36), (2880, 512, 36), (128, 2880, 36), (25136, 2880, 1)}},
    "mixtral_8x7b": {"a16w16": {(6144, 4096, 32), (4096, 4096, 32), (8, 4096, 32), (32000, 4096, 1)}},
    "glm45_air": {
        "a16w16": {
            *((1792, 4096, 46), (4096, 1536, 46), (2736, 4096, 1), (4096, 1368, 1), (352, 4096, 45)),
            *((4096, 176, 45), (128, 4096, 45), (18944, 4096, 1)),
        }
    },
    "llama70b": {"a8w8_blockscale": {(1280, 8192, 80), (8192, 1024, 80), (7168, 8192, 80), (8192, 3584, 80)}},
}
EXPERTS = {  # model_dim, inter_dim, experts per device, topk, layers
    "deepseek_v3": (7168, 256, 256, 8, 58),
    "kimi_k2": (7168, 256, 384, 8, 60),
    "qwen3_30b_a3b": (2048, 768, 128, 8, 48),
    "qwen3_235b_a22b": (4096, 1536, 16, 8, 94),
    "mixtral_8x7b": (4096, 14336, 8, 2, 32),
    "glm45_air": (4096, 176, 128, 8, 45),
}


def source(name: str) -> ModelShapes:
    fields = {n: v for n, v in {**SHARED, "nsets": [16], **OPTIONS[name]}.items() if n not in ("defaults", "_target_")}
    return ModelShapes(**fields)


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_ready_model_has_16_bit_products(name: str) -> None:
    assert source(name).problems(load_family("a16w16"), NOTHING, "sm_90")


@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name, each in EXPECTED.items() for kernel in each])
def test_products(name: str, kernel: str) -> None:
    made = source(name).problems(load_family(kernel), NOTHING, "sm_90")
    assert {(p["N"], p["K"], int(p.weight)) for p in made} == EXPECTED[name][kernel]


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_go_to_the_fused_family(name: str) -> None:
    (problem,) = source(name).problems(load_family("fmoe"), NOTHING, "sm_90")
    named = tuple(problem[column] for column in ("model_dim", "inter_dim", "expert", "topk"))
    assert (*named, int(problem.weight)) == EXPERTS[name]
    assert problem.rows == 16
    assert problem["q_type"] == ("QuantType.per_1x128" if name in ("deepseek_v3", "kimi_k2") else "QuantType.No")


def test_what_a_published_form_makes_impossible() -> None:
    with pytest.raises(
        UserError, match=r"experts with biases and a clamped SwiGLU, which kernel=fmoe does not compute$"
    ):
        source("gpt_oss_20b").problems(load_family("fmoe"), NOTHING, "sm_90")
    with pytest.raises(UserError, match="N of a part 1368 with tp 8: engines need a multiple of 128"):
        source("glm45_air").problems(load_family("a8w8_blockscale"), NOTHING, "sm_90")
    absorbed = source("deepseek_v3").problems(load_family("batched_bf16"), NOTHING, "sm_90")
    assert [(p["B"], p["N"], p["K"]) for p in absorbed] == [(16, 512, 128), (16, 128, 512)]


def test_the_proof_is_llama_70b_and_eight_products_of_deepseek_v3() -> None:
    items = {
        name: [
            (m, item["N"], item["K"])
            for item in yaml.safe_load((shipped("conf") / "shapes" / f"{name}.yaml").read_text())["items"]
            for m in item["M"]
        ]
        for name in ("proof", "proof_deepseek_v3")
    }
    nsets = yaml.safe_load((shipped("conf") / "shapes" / "_nsets.yaml").read_text())["nsets"]
    llama = {(m, n, k) for n, k, _ in EXPECTED["llama70b"]["a8w8_blockscale"] for m in nsets}
    assert len(items["proof"]) == len(set(items["proof"])) == 136
    assert len(set(items["proof_deepseek_v3"])) == 64
    assert set(items["proof"]) == llama | set(items["proof_deepseek_v3"])
