"""Shapes, routings and inputs of tests and benches: real models' layers, awkward sizes, patterns that break kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oxmoe.tools.bench import layers

GPT_OSS = {"layout": "interleaved", "alpha": 1.702, "beta": 1.0, "limit": 7.0}


@dataclass(frozen=True)
class Shape:
    """One MoE layer. options go to ExpertWeights."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    bias: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def with_options(self, **options: Any) -> Shape:
        return replace(self, options=tuple(options.items()))

    @property
    def gated(self) -> bool:
        options = dict(self.options)
        return options.get("gated", options.get("activation") != "relu2")

    @property
    def w13_rows(self) -> int:
        return 2 * self.intermediate if self.gated else self.intermediate


MODELS = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("mixtral-8x7b-tp2", 8, 2, 4096, 7168),
        Shape("gpt-oss-20b", 32, 4, 2880, 2880, bias=True, options=tuple(GPT_OSS.items())),
    )
}

# The other layers that the bench times.
OTHER_MODELS = {
    name: Shape(name, shape.experts, shape.top_k, shape.hidden, shape.intermediate)
    for name, shape in layers.SHAPES.items()
    if name not in MODELS
}

# Layers with the models' ratios and divisibility, small enough for a loop on CPU; then sizes that are no multiple of a
# tile.
REDUCED = (
    Shape("qwen3-small", 16, 8, 256, 96),
    Shape("mixtral-small", 8, 2, 512, 896),
    Shape("gpt-oss-small", 8, 4, 360, 360, bias=True, options=tuple(GPT_OSS.items())),
)
ODD = (
    Shape("i704", 6, 2, 128, 704),
    Shape("i1408", 4, 2, 192, 1408),
    Shape("h192-i192", 8, 2, 192, 192),
    Shape("h384-i384", 8, 3, 384, 384),
    Shape("h136-i136", 5, 2, 136, 136),
    Shape("h130-i70", 3, 2, 130, 70, bias=True),
    Shape("one-expert-model", 1, 1, 64, 32),
)
TINY = Shape("tiny", 6, 3, 64, 48)

# Token counts for every shape, and for decoding: on a GPU every small count, and either side of 16 and 32.
TOKENS = (0, 1, 7, 64)
FEW_TOKENS = {"cpu": (1, 2, 9, 33), "cuda": (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33)}

# Every activation that SGLang's models use, as ExpertWeights options.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu-up-gate": {"layout": "up_gate"},
    "swiglu-interleaved": {"layout": "interleaved"},
    "gpt-oss": GPT_OSS,
    "gpt-oss-halves": {**GPT_OSS, "layout": "gate_up"},
    "limit-before": {"limit": 0.5, "clamp": "before"},
    "limit-after": {"limit": 0.25, "clamp": "after"},
    "geglu": {"activation": "gelu"},
    "geglu-tanh": {"activation": "gelu_tanh"},
    # The first has bounds that every layer here reaches. The second is SiTU without the second bound.
    "situ": {"activation": "situ", "situ_beta": 1.25, "situ_linear_beta": 0.75, "layout": "up_gate"},
    "situ-unbounded": {"activation": "situ"},
    "relu2": {"activation": "relu2"},
    "silu-plain": {"activation": "silu", "gated": False},
    "gelu-plain": {"activation": "gelu", "gated": False},
    "gelu-tanh-plain": {"activation": "gelu_tanh", "gated": False},
}


def draws(x: Tensor, rows: int = 8) -> list[Tensor]:
    """Returns x, and beside fewer than `rows` rows x with its columns rotated: a share of moved elements needs many
    rows.

    The elements of a row share the intermediate values that rounded to a neighbour: one such value of an expert with 64
    columns moves an eighth of the row, and in a single row that is luck.
    """
    return [x, *(x.roll(3 * i, 1) for i in range(1, -(-rows // max(x.shape[0], 1)) if x.shape[0] else 1))]


PATTERNS = ("uniform", "skewed", "one_expert", "duplicates", "holes", "all_holes", "uneven")


def make_routing(pattern: str, tokens: int, experts: int, top_k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns (topk_weights fp32 [T, k], topk_ids int32 [T, k]) on CPU. Weights of absent experts are NaN: never
    read."""
    weights = torch.rand((tokens, top_k), generator=rng) + 0.05
    weights /= weights.sum(1, keepdim=True)
    popularity = torch.ones(experts)
    if pattern == "skewed":
        popularity = 1.0 / torch.arange(1, experts + 1, dtype=torch.float32) ** 1.5
        popularity = popularity[torch.randperm(experts, generator=rng)]
    if tokens == 0:
        ids = torch.zeros((0, top_k), dtype=torch.int64)
    elif top_k <= experts:
        ids = torch.multinomial(popularity.expand(tokens, -1), top_k, generator=rng)
    else:
        ids = torch.randint(experts, (tokens, top_k), generator=rng)
    if pattern == "one_expert":
        ids = torch.full_like(ids, int(torch.randint(experts, (1,), generator=rng)))
    elif pattern == "duplicates":
        ids[:, 1:] = torch.where(torch.rand((tokens, top_k - 1), generator=rng) < 0.5, ids[:, :1], ids[:, 1:])
    elif pattern == "holes":
        ids = ids.masked_fill(torch.rand((tokens, top_k), generator=rng) < 0.4, -1)
    elif pattern == "all_holes":
        ids = torch.full_like(ids, -1)
    elif pattern == "uneven":
        # One expert gets every token, and the others get one slot each or none.
        ids = torch.full_like(ids, experts - 1)
        flat = ids.view(-1)
        flat[: min(flat.numel(), experts // 2)] = torch.arange(min(flat.numel(), experts // 2))
    elif pattern not in ("uniform", "skewed"):
        raise ValueError(f"pattern: unknown {pattern!r}")
    return weights.masked_fill(ids < 0, torch.nan), ids.int()


def tie_free_logits(tokens: int, experts: int, rng: torch.Generator, *, step: float = 1 / 32) -> Tensor:
    """Returns fp32 logits, distinct within a row and exact in bf16 up to 256 experts: every implementation chooses
    alike."""
    rows = [torch.randperm(experts, generator=rng) for _ in range(tokens)]
    return (torch.stack(rows) - experts // 2).float() * step if rows else torch.zeros((0, experts))


def tie_free_groups(tokens: int, experts: int, rng: torch.Generator) -> Tensor:
    """Returns tie_free_logits for groups judged by two sigmoids. The offset keeps sigmoid(a) + sigmoid(-a) = 1 from
    making groups tie up to rounding; the logits are no longer exact in bf16."""
    return tie_free_logits(tokens, experts, rng) + 0.37


@dataclass
class Layer:
    """Operands of one layer on one device."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @property
    def reference_options(self) -> dict[str, Any]:
        return {"b13": self.b13, "b2": self.b2, **dict(self.shape.options)}

    def weights(self) -> Any:
        import oxmoe

        formats = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        return getattr(oxmoe.ExpertWeights, formats[self.w13.dtype])(self.w13, self.w2, **self.reference_options)


def make_layer(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    rng: torch.Generator,
    *,
    bias_dtype: torch.dtype | None = None,
    local_experts: int | None = None,
) -> Layer:
    """Makes random weights, scaled so that activations and outputs are of size one."""
    experts = local_experts or shape.experts
    # A model's layer has a billion numbers: a GPU draws its own, from a seed of rng.
    seed = int(torch.randint(1 << 62, (), generator=rng))
    generator = rng if device == "cpu" else torch.Generator(device).manual_seed(seed)

    def randn(*size: int, scale: float, to: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).to(to)

    w13 = randn(experts, shape.w13_rows, shape.hidden, scale=shape.hidden**-0.5, to=dtype)
    w2 = randn(experts, shape.hidden, shape.intermediate, scale=2 * shape.intermediate**-0.5, to=dtype)
    if not shape.bias:
        return Layer(shape, w13, w2, None, None)
    bias_dtype = bias_dtype or dtype
    b13 = randn(experts, shape.w13_rows, scale=0.5, to=bias_dtype)
    b2 = randn(experts, shape.hidden, scale=0.5, to=bias_dtype)
    return Layer(shape, w13, w2, b13, b2)


def make_x(tokens: int, shape: Shape, dtype: torch.dtype, device: str, rng: torch.Generator) -> Tensor:
    return torch.randn((tokens, shape.hidden), generator=rng).to(dtype).to(device)


def apart(x: Tensor, weights: Any, topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> Tensor:
    """Returns `moe` in separate launches: behind the tokens follow eight without experts, too many for one launch."""
    import oxmoe

    rows = len(x)
    x = torch.cat([x, x.new_zeros((8, x.shape[1]))])
    topk_weights = torch.cat([topk_weights, topk_weights.new_zeros((8, topk_weights.shape[1]))])
    topk_ids = torch.cat([topk_ids, topk_ids.new_full((8, topk_ids.shape[1]), -1)])
    return oxmoe.moe(x, weights, topk_weights, topk_ids, **options)[:rows]


def make_workspace(size: int, device: torch.device | str) -> Tensor:
    """Returns size bytes of 0xFF (NaN as a float, -1 as an index), 256-byte aligned: torch aligns to 64 on CPU."""
    room = torch.full((size + 256,), 0xFF, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 256
    return room[start : start + size]
