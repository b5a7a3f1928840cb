"""checkpoint.py FOLDER KIND [LAYERS [SEED]]: random weights with a model's MoE layers.

KIND: qwen, qwen-fp8, qwen-fp8-tensor, qwen-int4, qwen-nvfp4, qwen-nvfp4-file, deepseek-fp8 or gpt.

In the form of Hugging Face, with a tokenizer of bytes where the package tokenizers is installed. fp8: experts with a
scale for each 128 x 128 block; fp8-tensor: with one scale for each matrix. int4: as compressed-tensors packs them, with
a scale for each 32 columns. nvfp4: experts as NVIDIA's ModelOpt has them, told by config.json, or (nvfp4-file) by
hf_quant_config.json. DeepSeek-V3's heads and its experts' columns are those of one rank of eight; its routing is
grouped, with a shared expert. Small on a machine without a GPU.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

folder, kind = sys.argv[1], sys.argv[2]
layers = int(sys.argv[3]) if len(sys.argv) > 3 else 4
seed = int(sys.argv[4]) if len(sys.argv) > 4 else 5
os.makedirs(folder, exist_ok=True)
dev = "cuda" if torch.cuda.is_available() else "cpu"
rng = torch.Generator(dev).manual_seed(seed)
small = dev == "cpu"
vocab = 1024


def randn(*size, scale=None):
    scale = size[-1] ** -0.5 if scale is None else scale
    return (torch.randn(size, generator=rng, device=dev) * scale).bfloat16().cpu()


def ones(n):
    return torch.ones(n, dtype=torch.bfloat16)


fp8, fp8_tensor = kind in ("qwen-fp8", "deepseek-fp8"), kind == "qwen-fp8-tensor"
deepseek, nvfp4 = kind == "deepseek-fp8", kind.startswith("qwen-nvfp4")
if deepseek:
    H, heads, E, K, inner = (256, 4, 8, 2, 128) if small else (7168, 16, 256, 8, 256)
    q_rank, kv_rank, nope, rope, value = (64, 64, 32, 16, 32) if small else (1536, 512, 128, 64, 128)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "n_routed_experts": E,
        "n_shared_experts": 1,
        "num_experts_per_tok": K,
        "n_group": 4 if small else 8,
        "topk_group": 2 if small else 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0 if small else 2.5,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
elif kind != "gpt":
    H, heads, kv, hd, E, K, inner = (
        (256, 4, 2, 64, 8, 2, 256 if fp8 or fp8_tensor else 96) if small else (2048, 32, 4, 128, 128, 8, 768)
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": H,
        "intermediate_size": 4 * H,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_experts": E,
        "num_experts_per_tok": K,
        "head_dim": hd,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
else:
    H, heads, kv, hd, E, K, inner = (256, 4, 2, 64, 8, 2, 128) if small else (2880, 64, 8, 64, 32, 4, 2880)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "hidden_size": H,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "experts_per_token": K,
        "head_dim": hd,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "max_position_embeddings": 4096,
        "initial_context_length": 4096,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
if fp8 or fp8_tensor:
    names = "qkvo"
    if deepseek:
        names = ("q_a", "q_b", "kv_b", "o", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa")
    projections = [
        f"model.layers.{n}.self_attn.{name if 'proj' in name else name + '_proj'}"
        for n in range(layers)
        for name in names
    ]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        **({"weight_block_size": [128, 128]} if fp8 else {}),
        "modules_to_not_convert": [*projections, *(f"model.layers.{n}.mlp.gate" for n in range(layers)), "lm_head"],
    }
int4 = kind == "qwen-int4"
if int4:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "actorder": None}, "input_activations": None}
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }
if nvfp4:
    left = [f"model.layers.{n}.{module}" for n in range(layers) for module in ("self_attn*", "mlp.gate")]
    producer = {"name": "modelopt", "version": "0.39"}
    if kind == "qwen-nvfp4":
        weights = {"num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": weights, "input_activations": weights, "targets": ["Linear"]}
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": group},
            "ignore": [*left, "lm_head"],
            "producer": producer,
        }
    else:
        section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
        section["exclude_modules"] = [*left, "lm_head"]
        with open(f"{folder}/hf_quant_config.json", "w") as file:
            json.dump({"producer": producer, "quantization": section}, file)
config |= {"torch_dtype": "bfloat16", "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
json.dump(config, open(f"{folder}/config.json", "w"))

embed = randn(vocab, H, scale=1.0)
# A trained model's next token stands out: part of each output row is the embedding of another token. It stands out by
# about seven standard deviations of a random row, whatever the number of columns: with more, no layer would change it.
order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed + 1))
part = 7.2 * H**-0.5
head = (part * embed[order].float() + (1 - part**2) ** 0.5 * randn(vocab, H, scale=1.0).float()) * H**-0.5
parts = {"model.embed_tokens.weight": embed, "lm_head.weight": head.bfloat16(), "model.norm.weight": ones(H)}
index = {}


def made(*size):
    """An expert's matrix in the checkpoint's format, and its scales by the ends of their names."""
    if nvfp4:
        weight, scale, scale_2 = to_nvfp4(randn(*size))
        return weight, {"weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(0.01)}
    if not (fp8 or fp8_tensor):
        return randn(*size), {}
    weight = (torch.randn(size, generator=rng, device=dev) * size[-1] ** -0.5).bfloat16()
    rows, columns = (128, 128) if fp8 else size
    blocks = weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / 448
    weight = (blocks / scale[:, None, :, None]).view(size).to(torch.float8_e4m3fn).cpu()
    if fp8:
        return weight, {"weight_scale_inv": scale.cpu()}
    # Matrices of other sizes, so that a scale of another one shows.
    size_of = 2 ** (2 * torch.rand((), generator=rng, device=dev).cpu() - 1)
    return weight, {"weight_scale": scale.cpu().view(()) * size_of}


def save(name, tensors):
    save_file({key: value.contiguous() for key, value in tensors.items()}, f"{folder}/{name}.safetensors")
    index.update(dict.fromkeys(tensors, f"{name}.safetensors"))


def to_int4(weight):
    """Words of eight codes, scales of 32 columns, and the shape."""
    groups = weight.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (groups / scale.float()).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scale[..., 0], "weight_shape": torch.tensor(weight.shape)}


def to_nvfp4(weight):
    """Codes, scales of 16 and the scale of all, which is a power of two so that numbers are bf16's."""
    other = 2 * torch.rand((), generator=rng, device=dev).cpu()
    power = torch.round(torch.log2(weight.abs().amax().float() / (6 * 448)) + other)
    blocks = weight.float().unflatten(1, (-1, 16)) / torch.exp2(power)
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    near = (blocks / scale.float()).abs()[..., None].sub(steps).abs().argmin(-1) + 8 * (blocks < 0)
    codes = near.flatten(1).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale[..., 0], torch.exp2(power)


for n in range(layers):
    p = f"model.layers.{n}."
    t = {p + "input_layernorm.weight": ones(H), p + "post_attention_layernorm.weight": ones(H)}
    if deepseek:
        t |= {
            p + "self_attn.q_a_proj.weight": randn(q_rank, H),
            p + "self_attn.q_a_layernorm.weight": ones(q_rank),
            p + "self_attn.q_b_proj.weight": randn(heads * (nope + rope), q_rank),
            p + "self_attn.kv_a_proj_with_mqa.weight": randn(kv_rank + rope, H),
            p + "self_attn.kv_a_layernorm.weight": ones(kv_rank),
            p + "self_attn.kv_b_proj.weight": randn(heads * (nope + value), kv_rank),
            p + "self_attn.o_proj.weight": randn(H, heads * value),
            p + "mlp.gate.weight": randn(E, H),
            p + "mlp.gate.e_score_correction_bias": randn(E, scale=0.1).float(),
        }
    else:
        t |= {
            p + "self_attn.q_proj.weight": randn(heads * hd, H),
            p + "self_attn.k_proj.weight": randn(kv * hd, H),
            p + "self_attn.v_proj.weight": randn(kv * hd, H),
            p + "self_attn.o_proj.weight": randn(H, heads * hd),
        }
    if kind != "gpt":
        if not deepseek:
            t |= {
                p + "self_attn.q_norm.weight": ones(hd),
                p + "self_attn.k_norm.weight": ones(hd),
                p + "mlp.gate.weight": randn(E, H),
            }
        for expert in (*(f"experts.{e}" for e in range(E)), *(["shared_experts"] if deepseek else [])):
            for name, size in (("gate_proj", (inner, H)), ("up_proj", (inner, H)), ("down_proj", (H, inner))):
                if int4:
                    t |= {f"{p}mlp.{expert}.{name}.{part}": value for part, value in to_int4(randn(*size)).items()}
                    continue
                weight, scales = made(*size)
                t[f"{p}mlp.{expert}.{name}.weight"] = weight
                t |= {f"{p}mlp.{expert}.{name}.{suffix}": scale for suffix, scale in scales.items()}
    else:
        for name, rows in (("q", heads * hd), ("k", kv * hd), ("v", kv * hd), ("o", H)):
            t[f"{p}self_attn.{name}_proj.bias"] = randn(rows, scale=0.1)
        t |= {
            # SGLang's attention of torch, which a CPU has, leaves sinks out; these count for nothing.
            p + "self_attn.sinks": torch.full((heads,), -100.0).bfloat16() if small else randn(heads, scale=1.0),
            p + "mlp.router.weight": randn(E, H),
            p + "mlp.router.bias": randn(E, scale=0.1),
        }
        for name, rows, columns in (("gate_up_proj", 2 * inner, H), ("down_proj", H, inner)):
            t[f"{p}mlp.experts.{name}_blocks"] = torch.randint(
                256, (E, rows, columns // 32, 16), dtype=torch.uint8, generator=rng, device=dev
            ).cpu()
            # Of numbers like those of other weights.
            low = 120 if small else 119
            t[f"{p}mlp.experts.{name}_scales"] = torch.randint(
                low, low + 2, (E, rows, columns // 32), dtype=torch.uint8, generator=rng, device=dev
            ).cpu()
            t[f"{p}mlp.experts.{name}_bias"] = randn(E, rows, scale=0.1)
    save(f"layer{n}", t)
save("rest", parts)
json.dump({"metadata": {}, "weight_map": index}, open(f"{folder}/model.safetensors.index.json", "w"))


def tokenizer():
    """One id for each byte, so that every text can be encoded, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<bos>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{word}>" for word in range(len(words), vocab)]
    made = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in special])
    made.save(f"{folder}/tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}",
    }
    json.dump(settings, open(f"{folder}/tokenizer_config.json", "w"))


try:
    tokenizer()
except ImportError:
    print("no tokenizer: the package tokenizers is not installed", flush=True)
print(
    "checkpoint",
    kind,
    folder,
    sum(os.path.getsize(f"{folder}/{f}") for f in os.listdir(folder)) >> 20,
    "MiB",
    flush=True,
)
