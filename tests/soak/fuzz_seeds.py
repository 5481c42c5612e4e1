"""Whole files of every kind that gemmpipe reads, from which the fuzzer's inputs are made."""

import json

NATIVE = (
    b"gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw,"
    b"config,baseline_us,p20_us,p80_us,ratio_low,ratio_high,near_ties,policy,run_id,device,_tag\n"
    b"sm_90,132,1,2,3,False,torch.bfloat16,torch.bfloat16,False,False,triton,0,4,9.5,p@6a0,0.005,1.5,20.1,"
    b'"{""BLOCK_SIZE_M"":16}",10.1,9.4,9.6,0.9,1.1,2,graph cold interleaved,r1,NVIDIA H200,x\n'
    b"gfx942,304,16,512,256,TRUE,bf16,torch.float32,0,,asm,5,13,7.9,_ZN,0.0,,,,,,,,,,,,,-\n"
    b"sm_90,132,16,512,256,False,torch.float16,torch.float16,False,False,torch,0,1,-1,torch,0,0,0,{},,,,,,,,,,\n"
)
AITER = (
    b"gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
    b"gfx942,304,16,1536,7168,ck,11,0,9.6513,a8w8_blockscale_1x128x128,36.5,1150.3,0.0\n"
    b"gfx942,304,32,1536,7168,cktile,3,2,8.1,tile_x,36.5,1150.3,0.1%\n"
    b"gfx942,304,64,1536,7168,asm,3,1,inf,fp8gemm_x,0,0,1\n"
)
AITER_FMOE = (
    b"cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,"
    b"block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw\n"
    b"304,16,7168,256,257,9,ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fnuz,torch.float8_e4m3fnuz,"
    b"QuantType.per_1x128,1,0,32,0,40.1,k1,0.3%,30.2,k2,0.1%,70.3,0,100.1,2000.5\n"
)
UNTUNED = (
    b"M,N,K,bias,dtype,outdtype,weight,layer\n"
    b"1,1280,8192,False,torch.bfloat16,torch.bfloat16,80,qkv\n"
    b"16,8192,1024,,bf16,,,o\n"
)
CAPTURED = (
    b"family,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,op,layout,count,layer\n"
    b"a16w16,16,1280,8192,False,bfloat16,bfloat16,False,False,linear,nt,80,model.layers.0\n"
    b"a16w16,7,1280,8192,True,float16,float32,False,False,addmm,nt,3,\n"
    b"a8w8,7,1280,8192,,,bfloat16,,,_scaled_mm,nt,5,x\n"
)
_KNOBS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
ENGINE = json.dumps({"1": {**_KNOBS, "num_stages": 3}, "64": {**_KNOBS, "waves_per_eu": 0}, "4096": _KNOBS}).encode()
TRITON = json.dumps({"small_M": {**_KNOBS, "cache_modifier": ".cg", "NUM_KSPLIT": 1}, "any": _KNOBS}).encode()
DENSE = json.dumps(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "attention_bias": False,
        "hidden_act": "silu",
        "per_layer_config": {"0": {"num_key_value_heads": 4}, "7": {"head_dim": 64}},
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.*"],
        },
    }
).encode()
SPARSE = json.dumps(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "hidden_act": "silu",
        "mlp_only_layers": [],
        "layer_types": None,
    }
).encode()
HYBRID = json.dumps(
    {
        "text_config": {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "M-M*-M",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_num_heads": 256,
            "mamba_head_dim": 32,
            "ssm_state_size": 128,
            "n_groups": 8,
            "vocab_size": 131072,
        }
    }
).encode()


def _event(name: str, start: int, kinds: list[str], dims: list[list[int]], external: int) -> dict[str, object]:
    arguments = {"Input type": kinds, "Input Dims": dims, "External id": external, "Concrete Inputs": ["", ""]}
    place = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    return {**place, "name": name, "ts": start, "dur": 9.5, "args": arguments}


_WIDE = ["c10::BFloat16", "c10::BFloat16"]
TRACE = json.dumps(
    {
        "schemaVersion": 1,
        "traceEvents": [
            _event("aten::linear", 0, _WIDE, [[16, 256], [512, 256]], 1),
            _event("aten::mm", 1, _WIDE, [[16, 256], [256, 512]], 2),
            _event("aten::mm", 20, _WIDE, [[7, 256], [256, 512]], 3),
            _event("vllm::gemm", 40, _WIDE, [[7, 256], [256, 512]], 4),
            {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 3.5, "args": {"External id": 2}},
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        ],
    }
).encode()
LOG = (
    b"INFO [config.py:1] compilation_config={'cudagraph_capture_sizes': [8, 4, 2, 1], 'x': 1}\n"
    b"WARNING Config file not found at /vllm/configs/N=17408,K=5120,device_name=NVIDIA_L40S,dtype=fp8_w8a8,"
    b"block_shape=[128,128].json\n"
    b"WARNING Config file not found at ['/vllm/E=512,N=128,device_name=NVIDIA_H20-3e.json', '/o/E=512,N=128,"
    b"device_name=NVIDIA_H20-3e.json']\n"
    b"[aiter] shape is M:6, N:6144, K:4096, not found tuned config in /tmp/a8w8_blockscale_tuned_gemm.csv, will use\n"
    b"[aiter] shape is M:24, N:1936, K:5120 dtype='torch.bfloat16' otype='torch.float32' bias=True, scaleAB=False, "
    b"bpreshuffle=False, not found tuned config in /tmp/bf16_tuned_gemm.csv, will use default config!\n"
    b"[aiter] [fused_moe] using 2stage default for ('gfx942', 304, 32, 7168, 256, 256, 8, <ActivationType.Silu: 0>, "
    b"'torch.bfloat16', 'torch.float8_e4m3fnuz', 'torch.float8_e4m3fnuz', 'QuantType.per_1x128', True, False)\n"
)
TUNABLEOP = (
    b"Validator,PT_VERSION,2.13.0\nValidator,HIPBLASLT_VERSION,1000-b2\nValidator,GCN_ARCH_NAME,gfx942:sramecc+\n"
    b"GemmTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144,Gemm_Hipblaslt_21434,0.0123\n"
    b"GemmTunableOp_BFloat16_TN,tn_1280_64_8192,Default,0.0098\n"
    b"GemmStridedBatchedTunableOp_BFloat16_TN,tn_512_16_128_B_8_ld_128_128_512,Gemm_Hipblaslt_5,0.03\n"
    b"ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_1280_16_8192_ld_8192_8192_1280_rw_1_bias_None,"
    b"Gemm_Hipblaslt_9,0.004\n"
)
TUNABLEOP_UNTUNED = (
    b"GemmTunableOp_BFloat16_TN,tn_6144_7_4096_ld_4096_4096_6144\n"
    b"GemmAndBiasTunableOp_Half_TN,tn_1280_16_8192_ld_8192_8192_1280\n"
)
DEVICE = {"kind": "cuda", "index": 0, "name": "NVIDIA H200", "gfx": "sm_90", "cu_num": 132, "shared_bytes": 232448}
DEVICE |= {"cache_bytes": 62914560, "warp_size": 32, "uuid": "GPU-1"}
_KEY = {"M": 1, "N": 2, "K": 3, "bias": False, "dtype": "bfloat16", "outdtype": "bfloat16"}
_KEY |= {"scaleAB": False, "bpreshuffle": False}
_ID = "a16w16 M=1 N=2 K=3 bias=False dtype=bfloat16 outdtype=bfloat16 scaleAB=False bpreshuffle=False"
_TRIAL = {"row": "trial", "problem": _ID, "candidate": "c1", "status": "ok", "launches": 2, "samples_us": [1.5, 1.25]}
JOURNAL = b"".join(
    json.dumps(row).encode() + b"\n"
    for row in (
        {"row": "session", "device": DEVICE, "pipeline": "tune", "overrides": ["kernel=a16w16"], "versions": {}},
        {"row": "problem", "id": _ID, "key": _KEY, "weight": 1.0, "layer": "qkv"},
        {"row": "candidate", "id": "c1", "backend": "triton", "knobs": _KNOBS, "kernel": "p@6a0", "builds": ["b"]},
        {"row": "build", "id": "b", "compile_s": 0.5, "shared_bytes": 1, "registers": 2, "spills": 0, "error": ""},
        {**_TRIAL, "stage": "screen", "err_ratio": 0.0},
        {**_TRIAL, "stage": "bench", "err_ratio": 0.0, "requested_launches": 2, "shared": False, "error": ""},
        {**_TRIAL, "stage": "bench", "tuning": {"seconds": 1.0, "tried": 2, "of": 3, "compiled": 2}},
        {"row": "assignment", "problem": _ID, "device": "GPU-1"},
        {"row": "cut_short", "problem": _ID},
        {"row": "complete", "problem": _ID},
        {"row": "done", "stage": "bench", "problem": _ID},
    )
)
MANIFEST = json.dumps(
    {"gemmpipe": "1", "pipeline": "tune", "overrides": ["kernel=a16w16"], "config": {"kernel": {"family": "a16w16"}}}
    | {"provenance": {"device": "NVIDIA H200"}, "exit_code": 130, "wall_s": 1.5, "unsolved": [], "files": ["a.csv"]}
).encode()
SIDECAR = json.dumps({"runs": {"r1": {"device": "NVIDIA H200", "versions": {"triton": "3.6.0"}}}}).encode()
RECIPE = (
    b"version: 1\npipeline: tune\nkernel: a16w16\nshapes: csv\nshapes.path: shapes.csv\nstages.screen.keep: 8\n"
    b"space: {BLOCK_SIZE_M: [16, 32], num_warps: [4]}\noutput: out\nsweep:\n  search: [halving, random]\n"
)
_RECORDED = (
    {"row": "recording", "version": 1, "family": "a16w16", "device": DEVICE, "first_launch_s": 0.01, "tick_us": 0.032},
    {"row": "build", "compile_s": 0.5, "shared_bytes": 1024, "registers": 64, "spills": 0, "error": ""},
    {"row": "candidate", "backend": "triton", "knobs": _KNOBS},
    {"row": "problem", "key": _KEY, "results": [[0, [0], "ok", 40, [0, 1, -1]]]},
)
RECORDING = b"".join(json.dumps(row).encode() + b"\n" for row in _RECORDED)
RECORDING_CSV = (
    b"M,N,K,BLOCK_SIZE_M,num_warps,time_us,compile_s,registers,spills,shared_bytes,status\n"
    b"1,1280,8192,16,4,9.5,0.5,64,0,1024,ok\n16,1280,8192,32,8,7.25,0.4,64,0,2048,ok\n"
)
HYDRA = b"- kernel=a16w16\n- shapes.path=x.csv\n- stages.screen.keep=8\n"
