"""The benchmark of the vLLM plug-in, without vLLM and a GPU: its forward in fp32, its processes and its tables."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import vllm_child
import vllm_models
import vllm_plugin
import vllm_reference
import vllm_summary
from vllm_processes import Child, Failed, Starting

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
SMALL_EXPERTS = {
    "moe_intermediate_size": 128,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def blocked(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in fp8, scales of 128 x 128 that differ between blocks), and `weight` becomes their product."""
    n, k = weight.shape
    scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    weight.copy_(stored.float() * spread)
    return stored, scale


def layer_of(weight: torch.Tensor, fp8: bool) -> SimpleNamespace:
    if not fp8:
        return SimpleNamespace(weight=weight)
    stored, scale = blocked(weight)
    return SimpleNamespace(weight=stored, weight_scale_inv=scale)


def fused(*layers: SimpleNamespace) -> SimpleNamespace:
    """As vLLM fuses them: rows one after the other, scales likewise (their rows are multiples of 128 here)."""
    names = vars(layers[0])
    return SimpleNamespace(**{name: torch.cat([getattr(each, name) for each in layers]) for name in names})


class Experts(torch.nn.Module):
    """The parameters of vLLM's fused experts; transformers' are replaced by what fp8 holds."""

    def __init__(self, theirs: Any, fp8: bool) -> None:
        super().__init__()
        for name, weight in (("w13_", theirs.gate_up_proj), ("w2_", theirs.down_proj)):
            layers = [layer_of(each, fp8) for each in weight.data]
            self.register_buffer(name + "weight", torch.stack([each.weight for each in layers]))
            if fp8:
                self.register_buffer(name + "weight_scale_inv", torch.stack([each.weight_scale_inv for each in layers]))


def as_vllm(theirs: Any, fp8: bool) -> SimpleNamespace:
    """transformers' model in vLLM's names; in fp8 the given weights are rounded too, so that both are the same."""
    layers = []
    for each in theirs.model.layers:
        attention = each.self_attn
        parts = [layer_of(getattr(attention, f"{name}_proj").weight.data, fp8) for name in "qkvo"]
        held = SimpleNamespace(
            qkv_proj=fused(*parts[:3]), o_proj=parts[3], q_norm=attention.q_norm, k_norm=attention.k_norm
        )
        if hasattr(each.mlp, "experts"):
            mlp = SimpleNamespace(
                gate=layer_of(each.mlp.gate.weight.data, False), experts=Experts(each.mlp.experts, fp8)
            )
        else:
            parts = [layer_of(getattr(each.mlp, f"{name}_proj").weight.data, fp8) for name in ("gate", "up", "down")]
            mlp = SimpleNamespace(gate_up_proj=fused(*parts[:2]), down_proj=parts[2])
        norms = {name: getattr(each, name) for name in ("input_layernorm", "post_attention_layernorm")}
        layers.append(SimpleNamespace(self_attn=held, mlp=mlp, **norms))
    body = SimpleNamespace(embed_tokens=theirs.model.embed_tokens, layers=layers, norm=theirs.model.norm)
    return SimpleNamespace(model=body, lm_head=theirs.lm_head)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_the_reference_is_transformers_model(experts: bool, fp8: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    fields = SMALL | (SMALL_EXPERTS if experts else {})
    name = "Qwen3Moe" if experts else "Qwen3"
    config = getattr(transformers, f"{name}Config")(
        **{key: value for key, value in fields.items() if key != "rope_theta"},
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope_theta"]},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for key, value in theirs.named_parameters():  # norms that differ from one, logits that differ from 0
        value.copy_(
            torch.rand_like(value) + 0.5 if "norm" in key else torch.randn_like(value) * value.shape[-1] ** -0.5
        )
    model = as_vllm(theirs, fp8)
    tokens = [[(7 * i + 31 * j) % 300 for j in range(16)] for i in range(3)]
    found = vllm_reference.log_probabilities(model, fields, tokens)
    wanted = theirs(torch.tensor(tokens)).logits[:, -1].log_softmax(dim=-1)
    assert found.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_the_reference_refuses_scales_of_another_form() -> None:
    weight = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"expected float32 \(2, 1\)"):
        vllm_reference.product(torch.zeros(1, 128), weight, torch.ones(2, 4))
    with pytest.raises(ValueError, match="none"):
        vllm_reference.product(torch.zeros(1, 128), weight)


def test_kernels_of_a_trace_have_the_time_before_them() -> None:
    def event(name: str, start: float, duration: float, kind: str = "kernel") -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": start, "dur": duration}

    product = {**event("p", 1, 2), "args": {"grid": [132, 1, 1], "shared memory": 1024}}
    assert vllm_child.trace_times([product]) == {"grid [132,1,1] shared 1024 p": [1, 2.0, 0.0]}
    events = [event("b", 12, 5), event("a", 0, 10), event("a", 16, 2), event("host", 0, 99, "cpu_op"), {"ph": "M"}]
    found = vllm_child.trace_times(events)  # b waits for 2, the second a starts 1 before the end of b
    assert found == {"a": [2, 12.0, -1.0], "b": [1, 5.0, 2.0]}
    assert vllm_child.per_step(
        {"a": [10, 20.0, 2.0], "c": [1, 1.0, 0.0]}, {"a": [2, 4.0, 2.0], "c": [1, 1.0, 0.0]}, 8
    ) == {"a": [1.0, 2.0, 0.0]}


STAND_IN = """
import json, os, sys, time
model, fd = sys.argv[1], int(sys.argv[sys.argv.index("--reply-fd") + 1])
plugin = os.environ.get("GEMMPIPE_VLLM") == "linear,moe"
name = os.path.basename(model)
print("a line of the log", flush=True)
if name == "qwen3_8b_bf16" and plugin:
    print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
    sys.exit(1)
def reply(**values): os.write(fd, (json.dumps(values) + "\\n").encode())
reply(ready=True, device_used_gib=1.5)
count = 0
for line in sys.stdin:
    given = json.loads(line)
    if given["do"] == "measure":
        count += 1
        rate = 100.0 * (1.1 if plugin else 1.0) * (1.02 if plugin and count == 2 else 1.0)
        decode = {batch: [rate * int(batch)] * 2 for batch in ("1", "16", "64", "256")}
        reply(result={"decode": decode, "prefill": [20 * rate] * 5, "prefill_load": [22 * rate]})
    elif given["do"] == "profile":
        kernel = "gluon_blockscale" if plugin else "deep_gemm::sm90_fp8_gemm"
        reply(result={kernel: [36, 300.0 if plugin else 400.0, 36.0], "flash_fwd": [36, 80.0, 0.0]})
    elif given["do"] == "reference":
        value = -8.25 if plugin else -8.125
        rows = {"256": {"values": [[value, None]], "first": [7]}}
        reply(result={"tokens": [[7, 8]], "reference": [[-8.0, -9.0]], "rows": rows})
    elif given["do"] == "dispatch":
        reply(error="KeyError: no report") if plugin else reply(result={})
    elif given["do"] == "wait":
        time.sleep(60)
    elif given["do"] == "end":
        sys.exit(3)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


@pytest.mark.e2e
def test_a_run_with_a_process_that_fails_prints_the_others(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = tmp_path / "predict.csv"
    predict.write_text("N,K,M,ours_us,engine_us,dtype\n24576,4096,16,10,37.8,fp8\n")
    arguments = ["--folder", str(tmp_path), "--models", "qwen3_8b_fp8,qwen3_8b_bf16", "--child", str(stand_in)]
    arguments += ["--profile", "16", "--stagger", "0", "--predict", str(predict), "--limit-s", "60"]
    vllm_plugin.main(arguments)
    printed = capsys.readouterr().out
    assert "3 of 4 processes are ready" in printed
    assert "qwen3_8b_bf16-plugin: ended with 1, started again later" in printed
    assert "CUDA out of memory" in printed
    assert "qwen3_8b_fp8-plugin: dispatch: KeyError: no report" in printed
    lines = (tmp_path / "summary.csv").read_text().splitlines()
    assert lines[0].startswith("model,what,default_tokens_per_s")
    # 36 products that gain 27.8 us each, of a step of 10,000 us; the other layers have no line
    assert lines[2] == "qwen3_8b_fp8,16,1600.0,1760.0,1.100,1.100,1.122,1.111*,10000,9091,1001,3"
    assert len(lines) == 1 + 6  # the model without its plug-in process has no ratio
    assert "from the reference: mean 0.2500, largest 0.2500; first token 1 of 1, 1 tokens not reported" in printed
    assert "the two references differ by 0.0e+00" in printed
    profile = (tmp_path / "profile-qwen3_8b_fp8-16.txt").read_text()
    assert "step 10000.0 us, gaps 9520.0 us" in profile
    assert "-400.0    -36.0" not in profile
    assert "deep_gemm::sm90_fp8_gemm  [products]" in profile
    vllm_plugin.main(["--folder", str(tmp_path), "--models", "qwen3_8b_fp8", "--print", "--predict", str(predict)])
    assert capsys.readouterr().out.splitlines()[2].split()[:5] == ["qwen3_8b_fp8", "16", "1600.0", "1760.0", "1.100"]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_limit_ends_the_run_with_what_was_measured(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--folder", str(tmp_path), "--models", "qwen3_8b_fp8", "--child", str(stand_in), "--limit-s", "11"]
    vllm_plugin.main([*arguments, "--repeats", "1000000"])
    printed = capsys.readouterr().out
    assert "the time is over" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["qwen3_8b_fp8", "16", "1600.0", "1760.0", "1.100"] in [row[:5] for row in rows]


@pytest.mark.e2e
def test_a_process_that_hangs_or_ends_is_reported(stand_in: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(stand_in), "qwen3_8b_fp8"]
    children = [Child(name, command, {}, tmp_path / f"{name}.log") for name in ("hangs", "ends")]
    for child in children:
        assert child.read(time.monotonic() + 20)["ready"]
    with pytest.raises(Failed, match="no answer"):
        children[0].ask({"do": "wait"}, 0.3)
    with pytest.raises(Failed, match="ended with 3"):
        children[1].ask({"do": "end"}, 20)
    assert [each.process.poll() for each in children] == [-9, 3]
    with pytest.raises(Failed):
        children[1].ask({"do": "wait"}, 1)
    assert "a line of the log" in children[0].log_end()


@pytest.mark.e2e
def test_a_process_that_is_not_ready_in_time_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import time; print('waits', flush=True); time.sleep(60)"]
    starting = Starting({name: (command, {}, tmp_path / f"{name}.log") for name in ("one", "two")})
    assert starting.run(time.monotonic() + 2, parallel=1, stagger_s=0) == {}
    printed = capsys.readouterr().out
    assert "one: not ready in time" in printed
    assert "    waits" in printed
    assert "two: not started" in printed


def test_six_processes_fit_into_the_device() -> None:
    gib = [vllm_models.cache_bytes(config) / 2**30 for config in vllm_models.MODELS.values()]
    assert gib == pytest.approx([2.95, 2.95, 1.97], abs=0.01)


def test_products_are_the_layers_of_the_models() -> None:
    found = {each.layer: (each.n, each.k, each.count, each.dtype) for each in vllm_models.products(vllm_models.DENSE)}
    assert found == {
        "qkv_proj": (6144, 4096, 36, "bf16"),
        "o_proj": (4096, 4096, 36, "bf16"),
        "gate_up_proj": (24576, 4096, 36, "bf16"),
        "down_proj": (4096, 12288, 36, "bf16"),
        "lm_head": (151936, 4096, 1, "bf16"),
    }
    mixture = {each.layer: (each.n, each.k) for each in vllm_models.products(vllm_models.MODELS["qwen3_30b_fp8"])}
    assert mixture["experts"] == (1536, 2048)
    assert mixture["qkv_proj"] == (5120, 2048)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>", "products"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("fused_moe_kernel", "products"),
        ("grid [132,1,1] shared 1024 blockscale_warp_specialised", "products"),
        ("grid [132,1,1] dense", "products"),
        ("triton_red_fused__to_copy_abs_add_amax_clamp_mean_mul_pow_rsqrt_0", "quantisers"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_1", "norms"),
        ("void flash::FlashAttnFwdSm90", "attention"),
        ("moe_align_block_size_kernel", "experts' order"),
        ("Memcpy DtoD", "others"),
    ],
)
def test_kernels_have_groups(kernel: str, group: str) -> None:
    assert vllm_summary.group_of(kernel) == group


def test_a_wrong_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vllm_plugin.parsed(["--folder", ".", "--profile", "1,17"])
    assert "--profile: 17: unknown; known: 1, 16, 64, 256, prefill, prefill_load" in capsys.readouterr().err


def test_configurations_are_written(tmp_path: Path) -> None:
    vllm_plugin.main(["--folder", str(tmp_path), "--write", "--layers", "3", "--models", "qwen3_30b_fp8"])
    written = json.loads((tmp_path / "qwen3_30b_fp8" / "config.json").read_text())
    assert written["num_hidden_layers"] == 3
    assert "model.layers.2.mlp.gate" in written["quantization_config"]["modules_to_not_convert"]
