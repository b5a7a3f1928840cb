"""The config.json of models that people serve, written here: the fields that describe their MoE layers, in true
sizes."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
HYBRID = {**FP8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}


def mixed(**algorithms: str) -> dict[str, Any]:
    """Returns ModelOpt's config of a mixture of these layers: "NVFP4" for backbone_layers_1 and so on."""
    layers = {name.replace("_layers_", ".layers.") + ".mixer.experts.0.up_proj": of for name, of in algorithms.items()}
    listed = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    return {**config, "kv_cache_quant_algo": None, "ignore": ["lm_head"]}


def compressed(weights: Config, inputs: Config | None, **more: Any) -> Config:
    arguments = {"type": "float", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**arguments, **weights}}
    group["input_activations"] = inputs and {**arguments, **inputs}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore, **more}


_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
CHANNEL = compressed({"num_bits": 8, "strategy": "channel"}, _TOKEN, format="float-quantized")
NVFP4 = compressed({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, None, format="nvfp4-pack-quantized")
K3_MXFP4 = compressed({"num_bits": 4, "strategy": "group", "group_size": 32}, None, format="mxfp4-pack-quantized")
INT4 = compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None, format="pack-quantized")

W4AFP8 = compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, _TOKEN)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def changed(quantised: Config, **weights: Any) -> Config:
    """Returns a compressed-tensors config with other weights."""
    (group,) = quantised["config_groups"].values()
    return {**quantised, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


def _model(architecture: str, layers: int, hidden: int, quantised: Config | None = None, **fields: Any) -> Config:
    config = {"architectures": [architecture], "num_hidden_layers": layers, "hidden_size": hidden}
    config |= {"hidden_act": "silu", "torch_dtype": "bfloat16", **fields}
    return config if quantised is None else {**config, "quantization_config": quantised}


def _nested(architecture: str, config: Config) -> Config:
    """Returns a multimodal model's config: the language model's fields are in text_config."""
    outside = {"architectures": [architecture], "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}}
    if quantised := config.pop("quantization_config", None):
        outside["quantization_config"] = quantised
    return {**outside, "text_config": config}


def _many(experts: int, top_k: int, intermediate: int, **fields: Any) -> Config:
    """Returns fields by DeepSeek's names."""
    sizes = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": intermediate}
    return {**sizes, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, **fields}


def _plain(experts: int, top_k: int, intermediate: int, **fields: Any) -> Config:
    sizes = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": intermediate}
    return {**sizes, **fields}


def deepseek_v3(quantised: Config | None = FP8, **fields: Any) -> Config:
    sizes = _many(256, 8, 2048, first_k_dense_replace=3, moe_layer_freq=1)
    return _model("DeepseekV3ForCausalLM", 61, 7168, quantised, **sizes, **fields)


def deepseek_v4(quantised: Config = FP8) -> Config:
    sizes = _many(256, 6, 2048, swiglu_limit=10.0, num_hash_layers=3)
    return _model("DeepseekV4ForCausalLM", 43, 4096, quantised, **sizes)


def deepseek_v4_pro() -> Config:
    sizes = _many(384, 6, 3072, swiglu_limit=10.0, num_hash_layers=3)
    return _model("DeepseekV4ForCausalLM", 61, 7168, FP8, **sizes)


def glm_air(quantised: Config | None = None) -> Config:
    return _model("Glm4MoeForCausalLM", 46, 4096, quantised, **_many(128, 8, 1408))


def qwen3_30b(quantised: Config | None = None, **fields: Any) -> Config:
    sizes = _plain(128, 8, 768, decoder_sparse_step=1, mlp_only_layers=[])
    return _model("Qwen3MoeForCausalLM", 48, 2048, quantised, **{**sizes, **fields})


def qwen3_235b(quantised: Config | None = FP8) -> Config:
    return _model("Qwen3MoeForCausalLM", 94, 4096, quantised, **_plain(128, 8, 1536))


def gpt_oss(experts: int = 32, layers: int = 24, quantised: Config | None = MXFP4) -> Config:
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 4, "intermediate_size": 2880, "swiglu_limit": 7.0}
    return _model("GptOssForCausalLM", layers, 2880, quantised, **sizes)


def kimi_k2(quantised: Config = FP8) -> Config:
    return _model("DeepseekV3ForCausalLM", 61, 7168, quantised, **_many(384, 8, 2048))


def kimi_k25() -> Config:
    """Returns Kimi-K2.5's config. SGLang's configuration lifts the text model's quantisation out of text_config."""
    text = kimi_k2(INT4)
    return {**_nested("KimiK25ForConditionalGeneration", dict(text)), "quantization_config": None, "text_config": text}


def minimax_m2() -> Config:
    sizes = {"num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536, "num_mtp_modules": 3}
    return _model("MiniMaxM2ForCausalLM", 62, 3072, FP8, **sizes)


def minimax_m3(quantised: Config | None = None) -> Config:
    sizes = {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 3072, "n_shared_experts": 1}
    sizes |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "moe_layer_freq": [0, 0, 0, *[1] * 57]}
    return _nested("MiniMaxM3SparseForConditionalGeneration", _model("", 60, 6144, quantised, **sizes))


def mimo(quantised: Config = FP8) -> Config:
    sizes = _many(256, 8, 2048, n_shared_experts=None, moe_layer_freq=[0, *[1] * 47])
    return _model("MiMoV2FlashForCausalLM", 48, 4096, quantised, **sizes)


def step(quantised: Config | None = None) -> Config:
    sizes = {"moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280}
    sizes |= {"moe_layers_enum": ",".join(map(str, range(3, 45))), "swiglu_limits": [0.0] * 43 + [7.0] * 5}
    return _model("Step3p5ForCausalLM", 45, 4096, quantised, **sizes)


def llama4(quantised: Config | None = None) -> Config:
    sizes = {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 8192}
    sizes |= {"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1}
    return _nested("Llama4ForConditionalGeneration", _model("", 48, 5120, quantised, **sizes))


def maverick() -> Config:
    config = llama4(CHANNEL)
    config["text_config"] |= {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    return config


def gemma4() -> Config:
    sizes = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "enable_moe_block": True}
    text = _model("", 30, 2816, hidden_activation="gelu_pytorch_tanh", **sizes)
    return _nested("Gemma4ForConditionalGeneration", text)


def nemotron(quantised: Config | None = None, **fields: Any) -> Config:
    sizes = _many(128, 6, 1856, mlp_hidden_act="relu2", hybrid_override_pattern="MEM*E" * 10 + "ME")
    return _model("NemotronHForCausalLM", 52, 2688, quantised, **{**sizes, **fields})


def mixtral(quantised: Config | None = None) -> Config:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}
    return _model("MixtralForCausalLM", 32, 4096, quantised, **sizes)


def longcat() -> Config:
    sizes = {"n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12, "expert_ffn_hidden_size": 2048}
    return _model("LongcatFlashForCausalLM", 0, 6144, FP8, **sizes, num_layers=28)


def ernie() -> Config:
    sizes = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2}
    sizes |= {"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1}
    return _model("Ernie4_5_MoeForCausalLM", 28, 2560, **sizes)


def kimi_linear() -> Config:
    sizes = _plain(256, 8, 1024, num_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1)
    sizes["num_experts_per_token"] = sizes.pop("num_experts_per_tok")
    return _model("KimiLinearForCausalLM", 27, 2304, **sizes)


def kimi_k3(quantised: Config | None = None) -> Config:
    config = kimi_linear() | ({} if quantised is None else {"quantization_config": quantised})
    config |= {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    config |= {"routed_expert_hidden_size": 1536}
    return _nested("KimiK3ForConditionalGeneration", config)


def _qwen35(quantised: Config | None) -> Config:
    sizes = _plain(256, 8, 512, shared_expert_intermediate_size=512, mtp_num_hidden_layers=1)
    return _nested("Qwen3_5MoeForConditionalGeneration", _model("", 40, 2048, quantised, **sizes))


# Name -> config, --tp-size, format of the MoE layers, how many there are, flags. All of them are served on sm_90.
SERVED: dict[str, tuple[Config, int, str, int, list[str]]] = {
    "DeepSeek-V3": (deepseek_v3(), 8, "fp8, 128 x 128 blocks", 58, []),
    "DeepSeek-V3.2": (
        deepseek_v3() | {"architectures": ["DeepseekV32ForCausalLM"]},
        8,
        "fp8, 128 x 128 blocks",
        58,
        [],
    ),
    "GLM-4.5-Air": (glm_air(), 4, "bf16", 45, ["--quantization oxmoe"]),
    "GLM-4.5-Air-FP8": (glm_air(CHANNEL), 1, "fp8, a scale a channel, dynamic activations", 45, []),
    **{
        f"GLM-4.5-Air-FP8 on {tp}": (glm_air(CHANNEL), tp, "fp8, a scale a channel, dynamic activations", 45, [])
        for tp in (2, 4, 8)
    },
    "Qwen3-30B-A3B, channels, on 8": (qwen3_30b(CHANNEL), 8, "fp8, a scale a channel, dynamic activations", 48, []),
    "GLM-4.6-FP8": (
        _model("Glm4MoeForCausalLM", 92, 5120, CHANNEL, **_many(160, 8, 1536, first_k_dense_replace=3)),
        4,
        "fp8, a scale a channel, dynamic activations",
        89,
        [],
    ),
    "GLM-4.7-Flash": (
        _model("Glm4MoeLiteForCausalLM", 47, 2048, **_many(64, 4, 1536)),
        1,
        "bf16",
        46,
        ["--quantization oxmoe"],
    ),
    "GLM-5-FP8": (
        _model("GlmMoeDsaForCausalLM", 78, 6144, FP8, **_many(256, 8, 2048, first_k_dense_replace=3)),
        8,
        "fp8, 128 x 128 blocks",
        75,
        [],
    ),
    "Kimi-K2-Instruct": (kimi_k2(), 16, "fp8, 128 x 128 blocks", 60, []),
    "Kimi-K2-Thinking": (kimi_k2(INT4), 8, "int4 of compressed-tensors, groups of 32", 60, []),
    "DeepSeek-V3.1-Terminus-W4AFP8": (
        deepseek_v3({"quant_method": "w4afp8", "activation_scheme": "static"}),
        8,
        "int4 of W4AFP8, groups of 128, bf16 activations (its fp8 scales of activations are not used)",
        58,
        [],
    ),
    "Kimi-K2.5": (kimi_k25(), 8, "int4 of compressed-tensors, groups of 32", 60, []),
    "Kimi-Linear": (kimi_linear(), 4, "bf16", 26, ["--quantization oxmoe"]),
    "Kimi-K3": (kimi_k3(), 8, "bf16", 26, ["--quantization oxmoe"]),
    "Kimi-K3-MXFP4": (
        kimi_k3(K3_MXFP4),
        8,
        "MXFP4 of compressed-tensors, bf16 activations",
        26,
        ["--moe-runner-backend flashinfer_mxfp4"],
    ),
    "Qwen3-30B-A3B": (qwen3_30b(), 8, "bf16", 48, ["--quantization oxmoe"]),
    "Qwen3-30B-A3B-FP8": (qwen3_30b(FP8), 2, "fp8, 128 x 128 blocks", 48, []),
    "Qwen3-235B-A22B-FP8": (qwen3_235b(), 4, "fp8, 128 x 128 blocks", 94, []),
    "Qwen3-Next-80B-A3B-FP8": (
        _model("Qwen3NextForCausalLM", 48, 2048, FP8, **_plain(512, 10, 512, shared_expert_intermediate_size=512)),
        4,
        "fp8, 128 x 128 blocks",
        48,
        [],
    ),
    "Qwen3.6-35B-A3B-FP8": (_qwen35(FP8), 1, "fp8, 128 x 128 blocks", 40, []),
    "gpt-oss-20b": (gpt_oss(), 1, "MXFP4", 24, []),
    "gpt-oss-120b": (gpt_oss(128, 36), 8, "MXFP4", 36, []),
    "gpt-oss-20b-bf16": (gpt_oss(quantised=None), 1, "bf16", 24, ["--quantization oxmoe"]),
    "MiniMax-M2.5": (minimax_m2(), 4, "fp8, 128 x 128 blocks", 62, []),
    "MiniMax-M3": (minimax_m3(), 8, "bf16", 57, ["--quantization oxmoe"]),
    "MiniMax-M3-MXFP8": (minimax_m3(MXFP8), 4, "MXFP8", 57, []),
    "MiMo-V2-Flash": (mimo(), 8, "fp8, 128 x 128 blocks", 47, []),
    "Step-3.5-Flash": (step(), 8, "bf16", 42, ["--quantization oxmoe"]),
    "Step-3.5-Flash-FP8": (step(FP8), 2, "fp8, 128 x 128 blocks", 42, []),
    "Hy3": (
        _model("HYV3ForCausalLM", 80, 4096, **_plain(192, 8, 1536, num_shared_experts=1, first_k_dense_replace=1)),
        8,
        "bf16",
        79,
        ["--quantization oxmoe"],
    ),
    "Llama-4-Scout": (llama4(), 8, "bf16", 48, ["--quantization oxmoe"]),
    "Llama-4-Maverick-FP8": (maverick(), 8, "fp8, a scale a channel, dynamic activations", 24, []),
    "Gemma-4-26B-A4B": (gemma4(), 1, "bf16", 30, ["--quantization oxmoe"]),
    "Nemotron-3-Nano": (nemotron(), 1, "bf16", 21, ["--quantization oxmoe"]),
    "Nemotron-3-Super": (nemotron(moe_latent_size=1024), 4, "bf16", 21, ["--quantization oxmoe"]),
    "Mixtral-8x7B": (mixtral(), 2, "bf16", 32, ["--moe-runner-backend deep_gemm"]),
    "LongCat-Flash-FP8": (longcat(), 8, "fp8, 128 x 128 blocks", 28, []),
    "ERNIE-4.5": (ernie(), 1, "bf16", 27, ["--quantization oxmoe"]),
    "Ling-2.0": (
        _model("BailingMoeV2ForCausalLM", 20, 2048, **_plain(256, 8, 512, first_k_dense_replace=1)),
        1,
        "bf16",
        19,
        ["--quantization oxmoe"],
    ),
    "Laguna": (
        _model("LagunaForCausalLM", 40, 2048, **_plain(256, 8, 512), mlp_layer_types=["dense", *["sparse"] * 39]),
        1,
        "bf16",
        39,
        ["--quantization oxmoe"],
    ),
    "K-EXAONE": (
        _model("ExaoneMoEForCausalLM", 32, 4096, **_plain(64, 8, 1024, first_k_dense_replace=1)),
        1,
        "bf16",
        31,
        ["--quantization oxmoe"],
    ),
    "LFM2-8B-A1B": (
        _model("Lfm2MoeForCausalLM", 24, 2048, **_plain(32, 4, 1792), num_dense_layers=2),
        1,
        "bf16",
        22,
        ["--quantization oxmoe"],
    ),
    "OLMoE": (
        _model("OlmoeForCausalLM", 16, 2048, num_experts=64, num_experts_per_tok=8, intermediate_size=1024),
        1,
        "bf16",
        16,
        ["--quantization oxmoe"],
    ),
    "Granite-MoE": (
        _model("GraniteMoeForCausalLM", 24, 1024, num_local_experts=32, num_experts_per_tok=8, intermediate_size=512),
        1,
        "bf16",
        24,
        ["--quantization oxmoe"],
    ),
    "Mixtral AWQ": (mixtral(AWQ), 2, "int4 of AWQ, groups of 128, zero points", 32, []),
    "Qwen3 AWQ": (qwen3_30b(AWQ | {"group_size": 64}), 8, "int4 of AWQ, groups of 64, zero points", 48, []),
    "Mixtral GPTQ": (mixtral(GPTQ), 8, "int4 of GPTQ, groups of 128", 32, []),
    "DeepSeek-V4-Flash": (deepseek_v4(), 4, "MXFP4 in an fp8 checkpoint", 43, []),
    "DeepSeek-V4-Pro": (deepseek_v4_pro(), 8, "MXFP4 in an fp8 checkpoint", 61, []),
    "MXFP4 experts by name": (
        deepseek_v3({**FP8, "routed_experts_quant_method": "mxfp4"}),
        8,
        "MXFP4 in an fp8 checkpoint",
        58,
        [],
    ),
    "NVFP4 of compressed-tensors": (qwen3_30b(NVFP4), 4, "NVFP4 of compressed-tensors, bf16 activations", 48, []),
    "DeepSeek-R1-NVFP4": (deepseek_v3(MODELOPT), 8, "NVFP4 of ModelOpt, bf16 activations", 58, []),
    "DeepSeek-V4-NVFP4": (deepseek_v4(HYBRID), 4, "NVFP4 of ModelOpt, bf16 activations", 43, []),
    "Nemotron-3-Nano-NVFP4": (nemotron(MODELOPT), 1, "NVFP4 of ModelOpt, bf16 activations", 21, []),
    "Nemotron-3-Nano-FP8": (nemotron(MODELOPT_FP8), 1, "fp8, a scale a matrix, static activations", 21, []),
    "Nemotron-3-Super-FP8": (
        nemotron(MODELOPT_FP8, moe_latent_size=1024, moe_intermediate_size=2688),
        1,
        "fp8, a scale a matrix, static activations",
        21,
        [],
    ),
    "fp8, one scale": (qwen3_30b(ONE_SCALE), 2, "fp8, a scale a matrix, dynamic activations", 48, []),
    "fp8, static": (qwen3_30b(STATIC), 2, "fp8, a scale a matrix, static activations", 48, []),
}

# Name -> config, --tp-size, what the refusal says.
REFUSED: dict[str, tuple[Config, int, str]] = {
    "DeepSeek-R1-NVFP4 AWQ": (deepseek_v3({**MODELOPT, "quant_algo": "NVFP4_AWQ"}), 8, "quant_algo NVFP4_AWQ is not"),
    "NVFP4 with other groups": (deepseek_v3({**MODELOPT, "group_size": 32}), 8, "group_size 32: served is 16"),
    "MXFP4 experts that are cut between two blocks of scales": (
        deepseek_v4() | {"moe_intermediate_size": 1344},
        16,
        "MXFP4 in an fp8 checkpoint: .* must be multiples of 32, got intermediate_size of a rank 84",
    ),
    "Qwen3-235B on eight": (qwen3_235b(), 8, "intermediate_size of a rank 192.*--ep-size 2 the sizes are served"),
    "MiniMax-M2 on eight": (minimax_m2(), 8, "intermediate_size of a rank 192"),
    "int8": (qwen3_30b(changed(INT4, num_bits=8)), 1, "integers of 8 bits; served is int4"),
    "int4 with an order": (qwen3_30b(changed(INT4, actorder="group")), 1, "groups have columns in activation order"),
    "int4, groups of 16": (qwen3_30b(changed(INT4, group_size=16)), 1, "group size 16; served is int4"),
    "int4, fp8 tokens": (qwen3_30b(W4AFP8), 1, "compressed-tensors with type 'int' num_bits 4.*: served are"),
    "AWQ, 8 bits": (mixtral({**AWQ, "bits": 8}), 2, "integers of 8 bits"),
    "AWQ, gemv": (mixtral({**AWQ, "version": "gemv"}), 2, "version gemv, whose words have another order"),
    "AWQ, groups of 256": (qwen3_30b({**AWQ, "group_size": 256}), 1, "AWQ with group size 256: SGLang's linear layers"),
    "AWQ, ranks": (
        qwen3_30b(AWQ | {"group_size": 128}, moe_intermediate_size=704),
        1,
        "704 is no multiple of the group",
    ),
    "GPTQ, desc_act": (mixtral({**GPTQ, "desc_act": True}), 2, "desc_act: groups have columns in activation order"),
    "GPTQ, sym false": (mixtral({**GPTQ, "sym": False}), 2, "GPTQ with sym false: SGLang's linear layers"),
    "GPTQ with rules": (qwen3_30b({**GPTQ, "dynamic": {".*experts.*": {"bits": 8}}}), 1, "rules of their own"),
    "GPTQ, no rules": (
        qwen3_30b({**GPTQ, "dynamic": {"-:(": {}}}),
        1,
        "dynamic: no regular expression that can be used",
    ),
    "auto-round": (
        mixtral({"quant_method": "auto-round", "bits": 4}),
        2,
        "of compressed-tensors, awq, gptq and w4afp8 alone",
    ),
    "fp8 of ModelOpt with other sizes": (
        nemotron(MODELOPT_FP8, moe_intermediate_size=1848),
        1,
        "got intermediate_size of a rank 1848",
    ),
    "a mixture without NVFP4": (nemotron(mixed(backbone_layers_1="FP8")), 1, "takes it for W4AFP8"),
    "a mixture with int4": (
        nemotron(mixed(backbone_layers_1="NVFP4", backbone_layers_4="INT4_AWQ")),
        1,
        "experts of quant_algo 'INT4_AWQ' in a mixture",
    ),
    "Step-3.5 in fp8 on eight": (step(FP8), 8, "intermediate_size of a rank 160"),
    "Qwen3-30B in channels on 32": (qwen3_30b(CHANNEL), 32, "intermediate_size of a rank one of 16, got .*rank 24;"),
    "Mixtral, int4 of compressed-tensors": (mixtral(INT4), 2, "SGLang builds Mixtral without MoE layers"),
    "fp8 of other blocks": (qwen3_30b({**FP8, "weight_block_size": [64, 64]}), 1, r"weight_block_size \[64, 64\]"),
    "MiniMax-M3.1, NVFP4 experts": (
        minimax_m3({**MXFP8, "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}),
        4,
        "experts of this MXFP8 checkpoint are 'NVFP4': oxmoe does not take them over",
    ),
    "MXFP4 of compressed-tensors in another model": (
        qwen3_30b(K3_MXFP4),
        1,
        "num_bits 4 strategy 'group' group_size 32",
    ),
    "MXFP4 without alpha": (qwen3_30b(MXFP4), 1, "without gemm1_alpha"),
    "a method that is not known": (qwen3_30b({"quant_method": "fp3"}), 1, "quant_method fp3: is not known"),
    "no method": (qwen3_30b({"bits": 4}), 1, "quantization_config has no quant_method"),
    "an architecture that is not known": (
        qwen3_30b() | {"architectures": ["NewMoeForCausalLM"]},
        1,
        "architecture 'NewMoeForCausalLM' is not known",
    ),
    "another activation": (qwen3_30b() | {"hidden_act": "gelu"}, 1, "hidden_act 'gelu': SGLang's class"),
    "dense layers that SGLang does not build": (qwen3_30b(mlp_only_layers=[0]), 1, "experts in all layers"),
    "Gemma 4 without experts": (
        _nested("Gemma4ForCausalLM", _model("", 30, 2816, enable_moe_block=False)),
        1,
        "no MoE layers",
    ),
    "more top-k than kernels": (qwen3_30b() | {"num_experts_per_tok": 33}, 1, "top_k: expected 1 to 32, got 33"),
    "nested quantisation": (
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": qwen3_30b(FP8)},
        1,
        "lies in the text model's config",
    ),
    "ranks that do not divide": (qwen3_30b(), 5, "do not divide its intermediate size 768"),
}
