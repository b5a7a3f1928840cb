"""The extension module's functions. Tensors are torch tensors, or numpy arrays on CPU; each is borrowed for the call.

Letters: T tokens, k experts a token (top_k), E experts of the model, El experts held here, H hidden size,
I intermediate size.

Errors, everywhere: ValueError for an operand that breaks its contract (the message names operand, dimension,
expected, got), NotImplementedError for a combination no kernel serves (it lists what is served), RuntimeError for a
missing driver, a GPU this wheel has no kernels for, or a CUDA error. When an error is raised nothing has been written.
"""

from typing import Any, Literal

Tensor = Any

__version__: str

class ExpertWeights:
    """The experts of one MoE layer: checked, described and (on Hopper) tensor maps encoded once, at load. Immutable.

    Keeps the tensors alive; does not copy them.
    """

    @staticmethod
    def bf16(
        w13: Tensor,  # [El, 2I, H], or [El, I, H] when not gated
        w2: Tensor,  # [El, H, I]
        *,
        b13: Tensor | None = None,  # [El, 2I] bf16 or fp32
        b2: Tensor | None = None,  # [El, H] bf16 or fp32
        layout: Literal["gate_up", "up_gate", "interleaved"] = "gate_up",
        activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu",
        gated: bool | None = None,  # default: True, but False for relu2
        alpha: float = 1.0,  # silu only: x sigmoid(alpha x)
        beta: float = 0.0,  # silu only: added to up
        limit: float | None = None,  # silu only: gate <= limit, |up| <= limit
        clamp: Literal["before", "after"] = "before",  # gate is bounded before the sigmoid, or silu(gate) after it
    ) -> ExpertWeights:
        """bf16 experts. GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0, limit=7.0."""

    @staticmethod
    def f16(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp16 experts; options as for bf16 (biases fp16 or fp32)."""

    @staticmethod
    def f32(w13: Tensor, w2: Tensor, **options: Any) -> ExpertWeights:
        """fp32 experts, CPU only; options as for bf16 (biases fp32)."""

    # The arguments, as given: torch.compile and the operators take the experts apart through these.
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None
    layout: str
    activation: str
    alpha: float
    beta: float
    limit: float | None
    clamp: str

    format: str  # "bf16", "f16", "f32"
    num_experts: int  # El
    hidden_size: int
    intermediate_size: int
    gated: bool
    device: str  # "cpu" or "cuda:0"

def moe(
    x: Tensor,  # [T, H], dtype of the weights
    weights: ExpertWeights,
    topk_weights: Tensor | None = None,  # fp32 [T, k]
    topk_ids: Tensor | None = None,  # int32 or int64 [T, k]; -1: no expert
    *,
    router_logits: Tensor | None = None,  # fp32, bf16 or f16 [T, E], instead of topk_weights and topk_ids
    top_k: int = 0,  # with router_logits
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,  # fp32 [E]
    num_expert_group: int = 0,
    topk_group: int = 0,
    num_token_non_padded: Tensor | None = None,  # int32 scalar tensor on x's device
    routed_scaling_factor: float = 1.0,  # multiplies the combined output
    apply_router_weight_on_input: bool = False,  # weights multiply GEMM1's sums instead of the outputs
    no_combine: bool = False,  # out is [T, k, H], unweighted
    keep_router_weight: bool = False,  # with no_combine: weighted all the same
    ep_size: int = 1,  # > 1: topk_ids are global, these weights hold experts [ep_rank El, (ep_rank + 1) El)
    ep_rank: int = 0,
    out: Tensor | None = None,  # [T, H]; may be x itself
    workspace: Tensor | None = None,  # uint8 [>= workspace_bytes(...)], 256-byte aligned
) -> Tensor:
    """out[t] = routed_scaling_factor * sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]),
    expert(e, x) = w2[e] act(w13[e] x + b13[e]) + b2[e].

    Sums in fp32; rounded to the dtype after the activation, after the second GEMM (b2 included) and at the end.
    Deterministic; a row's bits do not depend on the batch around it.
    """

def workspace_bytes(weights: ExpertWeights, num_tokens: int, top_k: int) -> int:
    """Bytes of workspace that `moe` needs for up to num_tokens tokens: exact, never decreasing in num_tokens."""

def topk(
    router_logits: Tensor,  # fp32, bf16 or f16 [T, E], E <= 512
    top_k: int,  # <= 32, fused shared experts included
    *,
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_topk", "identity"] = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,  # fp32 [E]: added to the score for the choice only
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: Literal["max", "top2"] | None = None,  # default: top2 with a bias, max without
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,  # weights times routed_scaling_factor
    num_token_non_padded: Tensor | None = None,
    order: Literal["weight", "id"] = "weight",  # of the columns: best first, or by expert id
    topk_weights: Tensor | None = None,  # fp32 [T, k] output
    topk_ids: Tensor | None = None,  # int32 [T, k] output
) -> tuple[Tensor, Tensor]:
    """(topk_weights fp32 [T, k], topk_ids int32 [T, k]), best first, ties to the lower id."""

def sort_by_expert(
    topk_ids: Tensor,  # int32 or int64 [T, k]
    num_experts: int,
    *,
    first_expert: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(histogram int32 [E], offsets int32 [E + 1], place_of_slot int32 [T k], slot_of_place int32 [T k]).

    -1 where there is none.
    """

def routing_tables(
    topk_weights: Tensor,  # fp32 [T, k]
    topk_ids: Tensor,  # int32 or int64 [T, k]; -1: none
    num_experts: int,
    *,
    gate_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(gate_scal [T k], expt_hist int32 [E], slice_offs int32 [E + 1], combine_indx int32 [T k],
    dispatch_indx int32 [T k], block_offs_data int32 [4, E + 1], block_schedule_data int32 [4, N]): triton_kernels'
    tables of a routed batch.

    A slot is t * k + j. combine_indx: place -> slot, grouped by expert, stable in the slot; dispatch_indx: slot ->
    place; -1 where there is none. gate_scal: weight of each place's slot in gate_dtype; 0 where there is none. For row
    i of the two block tables a block is 16 << i rows of one expert: block_offs_data is the running sum of
    ceil(hist / block), and block_schedule_data lists block << 16 | expert, expert by expert, then -1.
    N = T k if T k <= E, else E - 1 - floor((E - T k - 1) / 16).
    """

def moe_tensors(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> Tensor:
    """`moe` on bare weight tensors, with the options of ExpertWeights and of moe's given-ids form.

    Describes the weights at every call, so nothing can go stale when a caller swaps or moves them.
    """

def explain(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_tokens: int,
    *,
    format: str = "bf16",
    gated: bool = True,
    arch: str | None = None,  # "sm_80", "sm_90", "sm_100", "sm_120", "cpu"; default: this machine's
) -> str:
    """The plan for a shape, as text: kernels, tiles, warps, stages, grids, shared memory, workspace, roofline floor."""

def device_info() -> dict[str, Any]:
    """What doctor prints: driver, GPUs (name, arch, SMs, memory), archs in the wheel, nvcc, CPU instructions."""
