"""checkpoint.py FOLDER KIND [LAYERS [SEED]]: writes random weights with a model's MoE layers.

KIND: gpt, mixtral or llama4, or qwen, glm or deepseek, which take a format of experts.py: qwen-fp8, qwen-awq,
deepseek-fp8.

In the form of Hugging Face, with a tokenizer of bytes where the package tokenizers is installed. DeepSeek-V3's heads
and its experts' columns are those of one rank of eight; its routing is grouped, with a shared expert. GLM-4.5-Air's
shared expert is in bf16. Small on a machine without a GPU.
"""

import json
import os
import sys

import torch
from experts import FORMATS, plain
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


model, _, name_of_format = kind.partition("-")
if model not in ("gpt", "mixtral", "llama4", "qwen", "glm", "deepseek") or name_of_format not in FORMATS:
    sys.exit(f"KIND: expected a model, alone or with one of {', '.join(filter(None, FORMATS))}, got {kind!r}")
if model in ("gpt", "mixtral", "llama4") and name_of_format:
    sys.exit(f"KIND: {model} has one format, got {kind!r}")
format_of_experts = FORMATS[name_of_format]
deepseek = model == "deepseek"
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
        "routed_scaling_factor": 2.5,
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
elif model == "llama4":
    H, heads, kv, hd, E, K, inner = (256, 4, 2, 64, 8, 1, 128) if small else (5120, 40, 8, 128, 16, 1, 8192)
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "hidden_size": H,
            "intermediate_size": inner,
            "intermediate_size_mlp": 2 * inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": hd,
            "num_local_experts": E,
            "num_experts_per_tok": K,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "vocab_size": vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2},
        },
        # The checkpoint has no tensors of images, so SGLang builds no part for them.
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "image_size": 28,
            "patch_size": 14,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
        },
        **{"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5},
    }
    if small:
        # On a CPU SGLang's model leaves the rotation of queries and keys out; with this factor it turns nothing.
        config["text_config"]["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 1e9,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1,
        }
elif model != "gpt":
    H, heads, kv, hd, E, K, inner = {
        "qwen": (2048, 32, 4, 128, 128, 8, 768),
        "glm": (4096, 96, 8, 128, 128, 8, 1408),
        "mixtral": (4096, 32, 8, 128, 8, 2, 14336),
    }[model]
    if small:
        H, heads, kv, hd, E, K, inner = 256, 4, 2, 64, 8, 2, format_of_experts.small_inner
    config = {
        "hidden_size": H,
        "num_hidden_layers": layers,
        "num_experts_per_tok": K,
        "head_dim": hd,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    config |= {
        "qwen": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 4 * H,
            "moe_intermediate_size": inner,
            "num_experts": E,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "glm": {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "intermediate_size": 2 * H,
            "moe_intermediate_size": inner,
            "n_routed_experts": E,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5 if small else 1.0,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
        },
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": inner,
            "num_local_experts": E,
            "sliding_window": None,
        },
    }[model]
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
if format_of_experts.config:
    config["quantization_config"] = format_of_experts.config(layers)
if format_of_experts.file:
    with open(f"{folder}/hf_quant_config.json", "w") as file:
        json.dump(format_of_experts.file(layers), file)
config |= {"torch_dtype": "bfloat16", "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
json.dump(config, open(f"{folder}/config.json", "w"))

embed = randn(vocab, H, scale=1.0)
# A trained model's next token stands out, so part of each output row is the embedding of another token. It stands out
# by about seven standard deviations of a random row, whatever the number of columns: with more, no layer would change
# it.
order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed + 1))
part = 7.2 * H**-0.5
head = (part * embed[order].float() + (1 - part**2) ** 0.5 * randn(vocab, H, scale=1.0).float()) * H**-0.5
parts = {"model.embed_tokens.weight": embed, "lm_head.weight": head.bfloat16(), "model.norm.weight": ones(H)}
index = {}
root = "language_model." if model == "llama4" else ""


def made(*size):
    """An expert's matrix in the checkpoint's format: its tensors by the ends of their names."""
    weight = (torch.randn(size, generator=rng, device=dev) * size[-1] ** -0.5).bfloat16()
    return {end: tensor.cpu() for end, tensor in format_of_experts.store(weight, rng).items()}


def linear(*size):
    """A matrix that is not an expert's, in the checkpoint's format of such matrices."""
    return (format_of_experts.linear or plain)(randn(*size), rng)


def save(name, tensors):
    tensors = {root + key: value for key, value in tensors.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, f"{folder}/{name}.safetensors")
    index.update(dict.fromkeys(tensors, f"{name}.safetensors"))


for n in range(layers):
    p = f"model.layers.{n}."
    t = {p + "input_layernorm.weight": ones(H), p + "post_attention_layernorm.weight": ones(H)}
    if deepseek:
        t |= {
            p + "self_attn.q_a_layernorm.weight": ones(q_rank),
            p + "self_attn.kv_a_layernorm.weight": ones(kv_rank),
        }
        for name, size in (
            ("q_a_proj", (q_rank, H)),
            ("q_b_proj", (heads * (nope + rope), q_rank)),
            ("kv_a_proj_with_mqa", (kv_rank + rope, H)),
            ("kv_b_proj", (heads * (nope + value), kv_rank)),
            ("o_proj", (H, heads * value)),
        ):
            t |= {f"{p}self_attn.{name}.{end}": part for end, part in linear(*size).items()}
    else:
        t |= {
            p + "self_attn.q_proj.weight": randn(heads * hd, H),
            p + "self_attn.k_proj.weight": randn(kv * hd, H),
            p + "self_attn.v_proj.weight": randn(kv * hd, H),
            p + "self_attn.o_proj.weight": randn(H, heads * hd),
        }
    if model == "mixtral":
        t[p + "block_sparse_moe.gate.weight"] = randn(E, H)
        for e in range(E):
            for name, size in (("w1", (inner, H)), ("w3", (inner, H)), ("w2", (H, inner))):
                t[f"{p}block_sparse_moe.experts.{e}.{name}.weight"] = randn(*size)
    elif model == "llama4":
        t[p + "feed_forward.router.weight"] = randn(E, H)
        # All experts lie in one tensor, with columns and rows exchanged.
        t[p + "feed_forward.experts.gate_up_proj"] = randn(E, H, 2 * inner, scale=H**-0.5)
        t[p + "feed_forward.experts.down_proj"] = randn(E, inner, H, scale=inner**-0.5)
        for name, size in (("gate_proj", (inner, H)), ("up_proj", (inner, H)), ("down_proj", (H, inner))):
            t[f"{p}feed_forward.shared_expert.{name}.weight"] = randn(*size)
    elif model != "gpt":
        if model == "qwen":
            t |= {p + "self_attn.q_norm.weight": ones(hd), p + "self_attn.k_norm.weight": ones(hd)}
        t[p + "mlp.gate.weight"] = randn(E, H)
        if model != "qwen":
            t[p + "mlp.gate.e_score_correction_bias"] = randn(E, scale=0.1).float()
        for expert in (*(f"experts.{e}" for e in range(E)), *(["shared_experts"] if model != "qwen" else [])):
            as_experts = expert != "shared_experts" or (deepseek and format_of_experts.linear is None)
            store = made if as_experts else linear
            for name, size in (("gate_proj", (inner, H)), ("up_proj", (inner, H)), ("down_proj", (H, inner))):
                t |= {f"{p}mlp.{expert}.{name}.{end}": part for end, part in store(*size).items()}
    else:
        for name, rows in (("q", heads * hd), ("k", kv * hd), ("v", kv * hd), ("o", H)):
            t[f"{p}self_attn.{name}_proj.bias"] = randn(rows, scale=0.1)
        t |= {
            # SGLang's torch attention, which a CPU runs, leaves sinks out; sinks of -100 count for nothing.
            p + "self_attn.sinks": torch.full((heads,), -100.0).bfloat16() if small else randn(heads, scale=1.0),
            p + "mlp.router.weight": randn(E, H),
            p + "mlp.router.bias": randn(E, scale=0.1),
        }
        for name, rows, columns in (("gate_up_proj", 2 * inner, H), ("down_proj", H, inner)):
            t[f"{p}mlp.experts.{name}_blocks"] = torch.randint(
                256, (E, rows, columns // 32, 16), dtype=torch.uint8, generator=rng, device=dev
            ).cpu()
            # These scales give numbers of the size of the other weights.
            low = 120 if small else 119
            t[f"{p}mlp.experts.{name}_scales"] = torch.randint(
                low, low + 2, (E, rows, columns // 32), dtype=torch.uint8, generator=rng, device=dev
            ).cpu()
            t[f"{p}mlp.experts.{name}_bias"] = randn(E, rows, scale=0.1)
    save(f"layer{n}", t)
save("rest", parts)
json.dump({"metadata": {}, "weight_map": index}, open(f"{folder}/model.safetensors.index.json", "w"))


def tokenizer():
    """Makes a tokenizer with one id for each byte, so that every text can be encoded, and a chat template."""
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
        "model_max_length": config.get("text_config", config)["max_position_embeddings"],
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
