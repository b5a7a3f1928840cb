"""Knows which fields of a config.json describe a model's MoE layers, by SGLang's model classes.

A family is listed here if its SGLang class was read. Any other architecture is not known, whatever its fields are
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from oxmoe.tools.check.checkpoint import Fields, Refused, Unreadable, shown

Sparse = Callable[[Fields, int], list[bool]]
Activation = Callable[[Fields, int], dict[str, Any]]


# Which layers have experts


def every(config: Fields, layers: int) -> list[bool]:
    return [True] * layers


def after_dense(default: int | None = None) -> Sparse:
    """Every moe_layer_freq-th layer from first_k_dense_replace on is a MoE layer. default: the default of SGLang's
    class, if it has one."""

    def sparse(config: Fields, layers: int) -> list[bool]:
        if config.get("first_k_dense_replace") is None and config.get("mlp_layer_types") is not None:
            return by_types(config, layers)
        first = config.whole("first_k_dense_replace", default=default)
        if isinstance(config.get("moe_layer_freq"), list):
            return by_list(config, layers)
        every_nth = config.whole("moe_layer_freq", default=1, least=1)
        return [layer >= first and layer % every_nth == 0 for layer in range(layers)]

    return sparse


def by_list(config: Fields, layers: int) -> list[bool]:
    given = _of_each_layer("moe_layer_freq", config.listed("moe_layer_freq", int), config, layers)
    return [number != 0 for number in given]


def by_list_or_every(config: Fields, layers: int) -> list[bool]:
    return every(config, layers) if config.get("moe_layer_freq") is None else by_list(config, layers)


def by_types(config: Fields, layers: int) -> list[bool]:
    kinds = _of_each_layer("mlp_layer_types", config.listed("mlp_layer_types", str), config, layers)
    unknown = [kind for kind in kinds if kind not in ("dense", "sparse", "moe", "hash_moe")]
    if unknown:
        raise Refused(f"mlp_layer_types: {shown(unknown[0])} is not known")
    return [kind != "dense" for kind in kinds]


def qwen(config: Fields, layers: int) -> list[bool]:
    """Every layer is a MoE layer, because SGLang's class has experts in every layer, whatever these fields say."""
    if config.whole("decoder_sparse_step", default=1) != 1 or config.listed("mlp_only_layers", int):
        raise Refused("decoder_sparse_step and mlp_only_layers: SGLang's class of this model has experts in all layers")
    return every(config, layers)


def interleaved(config: Fields, layers: int) -> list[bool]:
    step = config.whole("interleave_moe_layer_step")
    return [step == 0 or (layer + 1) % step == 0 for layer in range(layers)]


def numbered(config: Fields, layers: int) -> list[bool]:
    text = config.text("moe_layers_enum") or ""
    try:
        with_experts = {int(number) for number in text.split(",")}
    except ValueError as error:
        raise Unreadable(f"{config.where}: moe_layers_enum: expected numbers with commas, got {shown(text)}") from error
    return [layer in with_experts for layer in range(layers)]


def between(config: Fields, layers: int) -> list[bool]:
    first = config.whole("moe_layer_start_index", default=layers)
    last = config.whole("moe_layer_end_index", default=layers - 1)
    step = config.whole("moe_layer_interval", default=1, least=1)
    return [first <= layer <= last and (layer - first) % step == 0 for layer in range(layers)]


def after_num_dense(config: Fields, layers: int) -> list[bool]:
    return [layer >= config.whole("num_dense_layers") for layer in range(layers)]


def if_enabled(config: Fields, layers: int) -> list[bool]:
    return [config.get("enable_moe_block") is True] * layers


def by_pattern(config: Fields, layers: int) -> list[bool]:
    """Reads Nemotron-H's pattern, which has a letter or a name for each layer."""
    letters = config.text("hybrid_override_pattern")
    if letters is not None:
        return [letter == "E" for letter in _of_each_layer("hybrid_override_pattern", list(letters), config, layers)]
    names = _of_each_layer("layers_block_type", config.listed("layers_block_type", str), config, layers)
    return [name == "moe" for name in names]


def _of_each_layer(name: str, given: list[Any] | None, config: Fields, layers: int) -> list[Any]:
    if given is None or len(given) < layers:
        have = "nothing" if given is None else f"{len(given)} of them"
        raise Unreadable(f"{config.where}: {name}: expected one for each of {layers} layers, got {have}")
    return given[:layers]


# The activation between the two products, in the form that oxmoe.fused_experts.expert_options takes


def hidden_act(config: Fields, layer: int) -> dict[str, Any]:
    """Returns SiLU. SGLang's classes of these families refuse all other activations."""
    given = config.text("hidden_act", default="silu")
    if given != "silu":
        raise Refused(f"hidden_act {shown(given)}: SGLang's class of this model takes silu alone")
    return {}


def bounded(config: Fields, layer: int) -> dict[str, Any]:
    return hidden_act(config, layer) | {"swiglu_limit": config.number("swiglu_limit")}


def gpt_oss(config: Fields, layer: int) -> dict[str, Any]:
    limit = config.number("swiglu_limit")
    if limit is None:
        raise Unreadable(f"{config.where}: swiglu_limit is missing")
    alpha = config.number("hidden_act_alpha", 1.702)
    return {"activation": config.text("hidden_act", default="silu"), "gemm1_alpha": alpha, "gemm1_limit": limit}


def minimax_m3(config: Fields, layer: int) -> dict[str, Any]:
    numbers = {"gemm1_alpha": config.number("swiglu_alpha"), "gemm1_limit": config.number("swiglu_limit")}
    if None in numbers.values():
        raise Unreadable(f"{config.where}: swiglu_alpha or swiglu_limit is missing")
    return {**numbers, "gate_up_interleaved": False}


def step(config: Fields, layer: int) -> dict[str, Any]:
    limits = config.listed("swiglu_limits", int | float)
    limit = _of_each_layer("swiglu_limits", limits, config, layer + 1)[layer]
    if not abs(limit) < 1e30:
        raise Unreadable(f"{config.where}: swiglu_limits: expected numbers, got {shown(limit)}")
    return {"gemm1_limit": float(limit) if limit > 0 else None}


def not_gated(config: Fields, layer: int) -> dict[str, Any]:
    return {"activation": config.text("mlp_hidden_act", default="relu2"), "is_gated": False}


def as_named(config: Fields, layer: int) -> dict[str, Any]:
    """Reads the activation of Kimi's later models: "silu" or "situ", with numbers for the second."""
    numbers = {"gemm1_alpha": config.number("activation_situ_beta")}
    numbers["gemm1_limit"] = config.number("activation_situ_linear_beta")
    return {"activation": config.text("hidden_act", default="silu"), **numbers}


def gelu(config: Fields, layer: int) -> dict[str, Any]:
    """Returns "gelu" for Gemma 4, which SGLang's layer gets whatever the field says."""
    return {"activation": "gelu"}


@dataclass(frozen=True)
class Renames:
    """What SGLang's class of a model makes of the names in a quantization_config (its hf_to_sglang_mapper), as far as
    names of experts are concerned. Of several that fit, the longest counts."""

    starts: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        for part in sorted(self.parts, key=len, reverse=True):
            if part in name:
                name = name.replace(part, self.parts[part], 1)
                break
        start = next((start for start in sorted(self.starts, key=len, reverse=True) if name.startswith(start)), None)
        return name if start is None else self.starts[start] + name.removeprefix(start)


@dataclass(frozen=True)
class Family:
    """The fields of a model's MoE layers. If several names are known, the first one that exists counts."""

    sparse: Sparse = field(default_factory=after_dense)
    experts: tuple[str, ...] = ("n_routed_experts", "num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    shared: tuple[str, ...] = ("n_shared_experts", "num_shared_experts")  # number of shared experts, or their columns
    drafts: tuple[str, ...] = ("num_nextn_predict_layers",)
    activation: Activation = hidden_act
    biases: bool = False
    root: str = "model"  # what comes before ".layers" in the names that SGLang's class gives its layers
    place: str = "mlp"  # part of a layer's name that holds the experts
    renames: Renames | None = None
    on_input: bool = False  # router weights multiply a token, not its result
    fp4_by_default: bool = False  # an fp8 checkpoint's experts are MXFP4 unless the files say otherwise


_DEEPSEEK = Family(activation=bounded)
_QWEN = Family(sparse=qwen, shared=("shared_expert_intermediate_size",), drafts=("mtp_num_hidden_layers",))
_GRANITE = Family(sparse=every, intermediate=("intermediate_size",), place="block_sparse_moe")
_MIMO = Family(sparse=by_list)
_STEP = Family(
    sparse=numbered,
    experts=("moe_num_experts",),
    top_k=("moe_top_k",),
    shared=("share_expert_dims", "share_expert_dim"),
    activation=step,
)
_BAILING = Family(sparse=after_dense(0))
_WRAPPED = {"language_model.layers.": "language_model.model.layers."}
_KIMI_LINEAR = Family(
    sparse=after_dense(0), top_k=("num_experts_per_token", "num_experts_per_tok"), activation=as_named
)
_KIMI_K3 = replace(_KIMI_LINEAR, hidden=("routed_expert_hidden_size", "hidden_size"))
_LLAMA4 = Family(
    sparse=interleaved, intermediate=("intermediate_size",), shared=(), place="feed_forward", on_input=True
)
_LANGUAGE = {"model.language_model.": "language_model.model."}
_GEMMA4 = Family(sparse=if_enabled, top_k=("top_k_experts",), shared=(), activation=gelu, place="moe")
_EXAONE = Family(sparse=after_dense())
_MINIMAX_M3 = Family(
    sparse=by_list_or_every,
    intermediate=("intermediate_size",),
    activation=minimax_m3,
    renames=Renames(parts={".block_sparse_moe.": ".mlp."}),
)
_LATENT = ("moe_latent_size", "hidden_size")

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "DeepseekV4ForCausalLM": Family(sparse=every, activation=bounded, fp4_by_default=True),
    "Glm4MoeForCausalLM": Family(),
    "Glm4vMoeForConditionalGeneration": Family(root="language_model"),
    "Glm4MoeLiteForCausalLM": Family(),
    "GlmMoeDsaForCausalLM": Family(),
    "KimiVLForConditionalGeneration": replace(_DEEPSEEK, root="language_model.model"),
    "KimiK25ForConditionalGeneration": replace(_DEEPSEEK, renames=Renames(_WRAPPED)),
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "KimiK3LinearForCausalLM": _KIMI_K3,
    "KimiK3ForConditionalGeneration": replace(_KIMI_K3, renames=Renames(_WRAPPED, {"block_sparse_moe": "mlp"})),
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN, root="model.language_model", renames=Renames({**_LANGUAGE, "model.": "language_model.model."})
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN, root="model.language_model"),
    "GptOssForCausalLM": Family(sparse=every, intermediate=("intermediate_size",), activation=gpt_oss, biases=True),
    "MiniMaxM2ForCausalLM": Family(
        sparse=every, intermediate=("intermediate_size",), drafts=("num_mtp_modules",), place="block_sparse_moe"
    ),
    "MiniMaxM3SparseForCausalLM": _MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": replace(_MINIMAX_M3, root="language_model.model"),
    "MiMoV2ForCausalLM": _MIMO,
    "MiMoV2FlashForCausalLM": _MIMO,
    "Step3p5ForCausalLM": _STEP,
    "Step3p7ForConditionalGeneration": replace(_STEP, root="language_model.model", renames=Renames(_LANGUAGE)),
    "HYV3ForCausalLM": Family(sparse=after_dense(0), root=".model"),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, root="language_model.model"),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, root="model.language_model"),
    "NemotronHForCausalLM": Family(
        sparse=by_pattern,
        hidden=_LATENT,
        activation=not_gated,
        place="mixer",
        renames=Renames({"backbone.": "model."}),
    ),
    "MixtralForCausalLM": replace(_GRANITE, root=""),
    "GraniteMoeForCausalLM": _GRANITE,
    "LongcatFlashForCausalLM": Family(
        sparse=every,
        top_k=("moe_topk", "num_experts_per_tok"),
        intermediate=("expert_ffn_hidden_size", "moe_intermediate_size"),
        layers=("num_layers", "num_hidden_layers"),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        sparse=between, experts=("moe_num_experts",), top_k=("moe_k",), shared=("moe_num_shared_experts",)
    ),
    "BailingMoEForCausalLM": _BAILING,
    "BailingMoeForCausalLM": _BAILING,
    "BailingMoeV2ForCausalLM": _BAILING,
    "LagunaForCausalLM": Family(sparse=by_types, shared=("shared_expert_intermediate_size",)),
    "ExaoneMoEForCausalLM": _EXAONE,
    "ExaoneMoeForCausalLM": _EXAONE,
    "Lfm2MoeForCausalLM": Family(sparse=after_num_dense, place="feed_forward"),
    "OlmoeForCausalLM": Family(sparse=every, intermediate=("intermediate_size",)),
}


def name_of_experts(family: Family, layer: int) -> str:
    """Returns the name that SGLang's class gives the experts of a layer. Checkpoints use it to leave layers
    unquantised."""
    root = f"{family.root}." if family.root else ""
    return f"{root}layers.{layer}.{family.place}.experts"


def renamed(family: Family, names: Iterable[str]) -> list[str]:
    """Returns the names of a quantization_config as SGLang compares them."""
    return [name if family.renames is None else family.renames(name) for name in names]
