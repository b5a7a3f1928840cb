"""checkpoint.py FOLDER KIND [LAYERS [SEED]]: writes random weights with a model's MoE layers.

KIND: a model of models/, alone or with a format of experts.py: gpt, qwen, qwen-fp8, deepseek-fp8.

In the form of Hugging Face, with a tokenizer of bytes where the package tokenizers is installed. Small on a machine
without a GPU.
"""

import json
import os
import sys

import torch
from experts import FORMATS
from models import MODELS, VOCABULARY, Weights
from models.common import ones
from safetensors.torch import save_file

folder, kind = sys.argv[1], sys.argv[2]
layers = int(sys.argv[3]) if len(sys.argv) > 3 else 4
seed = int(sys.argv[4]) if len(sys.argv) > 4 else 5
os.makedirs(folder, exist_ok=True)

# Names of models may have a dash, too: the longest one counts.
name_of_model = max((name for name in MODELS if f"{kind}-".startswith(f"{name}-")), key=len, default="")
name_of_format = kind[len(name_of_model) + 1 :]
if kind.endswith("-") or not name_of_model or name_of_format not in FORMATS:
    sys.exit(
        f"KIND: expected one of {', '.join(MODELS)}, alone or with one of {', '.join(filter(None, FORMATS))}, "
        f"got {kind!r}"
    )
if name_of_format and not MODELS[name_of_model].formats:
    sys.exit(f"KIND: {name_of_model} has one format, got {kind!r}")
experts = FORMATS[name_of_format]
weights = Weights(experts, seed)
model = MODELS[name_of_model](weights, layers)
config, hidden = model.config, model.hidden
if experts.config:
    config["quantization_config"] = experts.config(layers)
if experts.file:
    with open(f"{folder}/hf_quant_config.json", "w") as file:
        json.dump(experts.file(layers), file)
config |= {"torch_dtype": "bfloat16", "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
with open(f"{folder}/config.json", "w") as file:
    json.dump(config, file)

embed = weights.randn(VOCABULARY, hidden, scale=1.0)
# A trained model's next token stands out, so part of each output row is the embedding of another token. It stands out
# by about seven standard deviations of a random row, whatever the number of columns: with more, no layer would change
# it.
order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed + 1))
part = 7.2 * hidden**-0.5
head = (part * embed[order].float() + (1 - part**2) ** 0.5 * weights.randn(VOCABULARY, hidden, scale=1.0).float()) * (
    hidden**-0.5
)
rest = {"model.embed_tokens.weight": embed, "lm_head.weight": head.bfloat16(), "model.norm.weight": ones(hidden)}
rest |= model.rest()
index = {}


def save(name, tensors):
    tensors = {model.root + key: value for key, value in tensors.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, f"{folder}/{name}.safetensors")
    index.update(dict.fromkeys(tensors, f"{name}.safetensors"))


for n in range(layers):
    save(f"layer{n}", model.layer(n))
save("rest", rest)
with open(f"{folder}/model.safetensors.index.json", "w") as file:
    json.dump({"metadata": {}, "weight_map": index}, file)


def tokenizer():
    """Makes a tokenizer with one id for each byte, so that every text can be encoded, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<bos>", *getattr(model, "special", ())]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{word}>" for word in range(len(words), VOCABULARY)]
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
