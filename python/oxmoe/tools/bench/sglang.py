"""SGLang's own MoE kernels on Triton, and the code that SGLang's peers share: versions, a server's settings, top-k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from oxmoe.formats.int4 import Experts as Int4
from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.layers import Fp8Block, Inputs, Shape, Weights

OLD, NEW = "0.5.12.post1", "0.5.23"
# The bar of the error's relative norm for e4m3 activations. A value that rounds to its neighbour is a sixteenth off,
# and perhaps its whole group or row with it. With two tokens a layer of fp8 blocks was 2.1 % off.
E4M3_ERROR = 4e-2
# Settings that stand in place of a server's, for as long as the process lives.
_settings = ExitStack()


def missing(device: str, versions: Sequence[str]) -> str | None:
    """Returns why SGLang's kernels of these versions cannot run here, or None if they can."""
    if device != "cuda":
        return "needs a GPU"
    if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
        return "sglang and sgl_kernel are not installed"
    import sglang

    if sglang.__version__ not in versions:
        return f"is written for SGLang {' and '.join(versions)}, found {sglang.__version__}"
    return None


def prepare() -> None:
    """Makes the settings that SGLang's kernels read, as a server of one rank would make them."""
    if find_spec("sglang.srt.runtime_context") is None:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(
            SimpleNamespace(enable_fused_moe_sum_all_reduce=False, enable_deterministic_inference=False)
        )
        return
    from sglang.srt.runtime_context import get_context, get_parallel

    if not hasattr(get_context(), "override_server_args"):
        raise RuntimeError("this SGLang's context takes no settings for tests")
    _settings.close()
    _settings.enter_context(get_context().override_server_args(model_path="dummy"))
    sizes = dict.fromkeys(("moe_ep_size", "moe_tp_size", "tp_size"), 1)
    ranks = dict.fromkeys(("moe_ep_rank", "moe_tp_rank", "tp_rank"), 0)
    _settings.enter_context(get_parallel().override(**sizes, **ranks, tp_group=SimpleNamespace(world_size=1)))


def router(top_k: int) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """Returns SGLang's top-k, which gives (weights, ids) of a call's logits, or the given choice."""
    from sglang.srt.layers.moe import topk

    def route(inputs: Inputs) -> tuple[Tensor, Tensor]:
        if inputs.chosen is not None:
            return inputs.chosen
        x, logits = inputs.x, inputs.router_logits
        if not inputs.router:
            weights, ids = topk.fused_topk(x, logits, top_k, True)[:2]
            return weights, ids
        names = ("correction_bias", "num_expert_group", "topk_group")
        bias, groups, chosen = (inputs.router[name] for name in names)
        weights, ids = topk.biased_grouped_topk(x, logits, bias, top_k, True, groups, chosen)[:2]
        return weights, ids

    return route


def rounds_activations(item: Weights) -> bool:
    """Returns whether SGLang's Triton kernels round the layer's activations to e4m3."""
    return item.activation_scales is not None or isinstance(item.w13, Fp8Block)


class SglangTriton(Backend):
    """SGLang's top-k and its Triton fused_experts, tuned if SGLang ships a configuration.

    fp8_tensor-token is its path for a scale a channel (per_channel_quant): all channels of an expert have one number.
    int4 takes what `CompressedTensorsWNA16TritonMoE` and `moe_wna16` hand over.
    """

    name = "sglang-triton"
    formats = (
        *("bf16", "f16", "fp8_block", "fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"),
        *("int4", "int4-zeros"),
    )
    VERSIONS = (OLD, NEW)

    @classmethod
    def missing(cls, device: str) -> str | None:
        return missing(device, cls.VERSIONS)

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        import sglang
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

        prepare()
        self.detail = f"SGLang {sglang.__version__}"
        self.route, self.fused_experts = router(shape.top_k), fused_experts
        self.config = MoeRunnerConfig(
            num_experts=shape.experts,
            num_local_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            top_k=shape.top_k,
            inplace=False,
            activation=shape.options.get("activation", "silu"),
            gemm1_alpha=shape.options.get("situ_beta", shape.options.get("alpha")),
            gemm1_clamp_limit=shape.options.get("situ_linear_beta", shape.options.get("limit")),
        )
        self.scales = [self._scales(item) for item in weights]
        if rounds_activations(weights[0]):
            self.most_error = E4M3_ERROR

    @staticmethod
    def _scales(item: Weights) -> dict[str, Any]:
        """Returns options of fused_experts for e4m3 and int4 experts."""
        if isinstance(item.w13, Int4):
            group = 2 * item.w13.codes.shape[2] // item.w13.scales.shape[2]
            scales: dict[str, Any] = {"w1_scale": item.w13.scales, "w2_scale": item.w2.scales}
            if item.w13.zeros is not None:
                # A byte holds the zero points of two rows, the first in the low bits.
                halves = [(zeros[:, 0::2], zeros[:, 1::2]) for zeros in (item.w13.zeros, item.w2.zeros)]
                scales["w1_zp"], scales["w2_zp"] = ((low | high << 4).contiguous() for low, high in halves)
            return {**scales, "use_int4_w4a16": True, "block_shape": [0, group]}
        if not isinstance(item.w13, Fp8Block):
            return {}
        if item.activation_scales is None:
            options = {"w1_scale": item.w13.scales, "w2_scale": item.w2.scales, "block_shape": [128, 128]}
            return {**options, "use_fp8_w8a8": True}
        of_experts = [weights.scales[:, 0, 0].contiguous() for weights in (item.w13, item.w2)]
        if item.activation_scales == "token":
            w1_scale, w2_scale = (
                scale[:, None, None].expand(-1, weights.codes.shape[1], 1).contiguous()
                for scale, weights in zip(of_experts, (item.w13, item.w2), strict=True)
            )
            return {"w1_scale": w1_scale, "w2_scale": w2_scale, "per_channel_quant": True, "use_fp8_w8a8": True}
        scales = {"w1_scale": of_experts[0], "w2_scale": of_experts[1], "use_fp8_w8a8": True}
        if item.activation_scales != "tensor":
            given = (scale.reshape(1) for scale in item.activation_scales)
            scales.update(zip(("a1_scale", "a2_scale"), given, strict=True))
        return scales

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        topk_weights, topk_ids = self.route(inputs)
        item = self.weights[index]
        w13, w2 = (
            weights.codes if isinstance(weights, (Fp8Block, Int4)) else weights for weights in (item.w13, item.w2)
        )
        result: Tensor = self.fused_experts(
            inputs.x,
            w13,
            w2,
            (topk_weights, topk_ids, inputs.router_logits),
            self.config,
            b1=item.b13,
            b2=item.b2,
            **self.scales[index],
        )
        return result
