"""Judges a model's layers, kind by kind: what oxmoe takes, what it refuses, and what to type."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import oxmoe
from oxmoe.hopper import untried
from oxmoe.peers.sglang import expert_options
from oxmoe.sglang import formats, int4_schemes
from oxmoe.tools.check import modelopt, quantization, releases
from oxmoe.tools.check.checkpoint import Checkpoint, Fields, Refused, Unreadable, shown
from oxmoe.tools.check.families import FAMILIES, Family
from oxmoe.tools.check.format import Format

HOPPER = "sm_90"
_MOST_LAYERS = 4096
# SGLang builds this class of linear layers for quantizations that it does not list (QuantMixtralForCausalLM).
_MIXTRAL = "MixtralForCausalLM"
_CUTLASS = 128  # SGLang's layout for flashinfer_mxfp4 on Hopper rounds it up to this
_ASSUMED = (
    "MIXED_PRECISION without quantized_layers: SGLang takes it for W4AFP8. Name the folder with its safetensors, so "
    "that their dtypes are compared"
)
_ALONE = "oxmoe takes over MoE layers alone"
_MXFP8_LINEAR = "on Hopper those of their matrices that are MXFP8 run on oxmoe.mxfp8_linear"
_PACKED = 64  # SGLang's MXFP4 layers on oxmoe round a rank's share of I up to it


@dataclass(frozen=True)
class Server:
    """The server on which the model is to run."""

    sglang: str
    tp: int
    ep: int
    gpu: str

    def __str__(self) -> str:
        return f"SGLang {self.sglang}, --tp-size {self.tp}, --ep-size {self.ep}, {self.gpu}"


@dataclass(frozen=True)
class RankLayer:
    """One MoE layer of a rank. `python -m oxmoe bench --model` times it."""

    format: str  # its name in `oxmoe.explain`
    experts: int  # experts of this rank
    top_k: int
    hidden: int
    intermediate: int  # intermediate size of this rank, as oxmoe holds it
    options: dict[str, Any]  # options of ExpertWeights
    biases: bool
    ep: int
    chosen: int  # experts of the model that a token chooses

    def share(self, tokens: int) -> int:
        """Returns this rank's mean share of the tokens of a call: as many slots as the rank has on average."""
        return max(1, round(tokens * self.chosen / (self.ep * self.top_k)))


@dataclass
class Kind:
    """Layers of one kind and format. served: None if oxmoe has nothing to do with them."""

    kind: str  # "dense", "moe", "shared" or "draft"
    count: int
    served: bool | None = None
    taken_by: str = "SGLang"
    format: str = ""
    layers: list[int] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    bytes_per_rank: int = 0
    times: list[dict[str, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank_layer: RankLayer | None = None  # the layer of a rank, for MoE layers that are served


@dataclass
class Report:
    """The answer. served is True if every MoE layer of the model itself is served."""

    server: Server
    architecture: str = ""
    served: bool = False
    kinds: list[Kind] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        values = asdict(self)
        for kind in values["kinds"]:
            del kind["rank_layer"]
        return {**values.pop("server"), **values, "setting": "moe"}


@dataclass(frozen=True)
class _Experts:
    """The experts of a model's MoE layers."""

    number: int
    top_k: int
    hidden: int
    intermediate: int


def judge(checkpoint: Checkpoint, server: Server, tokens: Sequence[int]) -> Report:
    """Judges a checkpoint. Raises Unreadable for a config that cannot be used. The report has what is not served or
    not known."""
    report = Report(server)
    try:
        _judge(checkpoint, report, tokens)
    except Refused as refused:
        report.refused.append(str(refused))
    wrong = [reason for kind in report.kinds if kind.kind == "moe" for reason in kind.refused]
    report.refused += [reason for reason in dict.fromkeys(wrong) if reason not in report.refused]
    report.served = not report.refused
    return report


def _judge(checkpoint: Checkpoint, report: Report, tokens: Sequence[int]) -> None:
    config, server = checkpoint.config, report.server
    releases.check(server.sglang)
    named = config.listed("architectures", str)
    if not named:
        raise Unreadable(f"{config.where}: architectures is missing, which names SGLang's class of the model")
    report.architecture = named[0]
    family = FAMILIES.get(named[0])
    if family is None:
        raise Refused(f"architecture {shown(named[0])} is not known: whether its MoE layers are served is not, either")
    text = config.within("text_config", "language_config", "llm_config") or config
    layers = text.whole(*family.layers, least=1)
    if layers > _MOST_LAYERS:
        raise Unreadable(f"{text.where}: {family.layers[0]}: expected up to {_MOST_LAYERS}, got {layers}")
    sparse = [layer for layer, has_experts in enumerate(family.sparse(text, layers)) if has_experts]
    if len(sparse) < layers:
        report.kinds.append(Kind("dense", layers - len(sparse), notes=[_ALONE]))
    if not sparse:
        raise Refused("the model has no MoE layers: there is nothing for oxmoe to take over")
    experts = _Experts(
        text.whole(*family.experts, least=1),
        text.whole(*family.top_k, least=1),
        text.whole(*family.hidden, least=1),
        text.whole(*family.intermediate, least=1),
    )
    dtype = text.text("dtype", "torch_dtype") or config.text("dtype", "torch_dtype")
    others = functools.partial(
        quantization.of_layers,
        checkpoint,
        text,
        report.architecture,
        family,
        gpu=server.gpu,
        nvfp4=server.gpu == HOPPER and releases.has_nvfp4(server.sglang),
        k3_mxfp4=server.gpu == HOPPER and releases.has_cores(server.sglang),
        f16=dtype == "float16",
        fp4_fields=releases.fp4_fields(server.sglang),
    )
    found = quantization.found(checkpoint, text, report.architecture)
    formats_of = modelopt.of_layers(
        checkpoint, found, report.architecture, family, others, gpu=server.gpu, version=server.sglang
    )
    groups: dict[tuple[Format, str], list[int]] = {}
    activations: dict[str, dict[str, Any]] = {}
    for layer in sparse:
        activation = family.activation(text, layer)
        activations[repr(activation)] = activation
        groups.setdefault((formats_of(layer), repr(activation)), []).append(layer)
    if found is not None and found.text("quant_algo") == modelopt.MIXED and not checkpoint.headers:
        if any(format.scheme is not None for format, _ in groups):
            report.notes.append(_ASSUMED)
    if report.architecture == _MIXTRAL and (apart := [format for format, _ in groups if not _own_name(format)]):
        raise Refused(f"{apart[0]}: SGLang builds Mixtral without MoE layers for oxmoe's quantization")
    for (format, key), numbers in groups.items():
        kind = Kind("moe", len(numbers), layers=numbers, format=str(format))
        report.kinds.append(kind)
        _experts(kind, format, experts, activations[key], family, server, tokens)
        _compare(kind, format, checkpoint)
    _others(report, text, family, layers, checkpoint, formats_of)
    if server.gpu == HOPPER and any(format is quantization.MXFP8 for format, _ in groups):
        for kind in report.kinds:
            if kind.kind in ("dense", "shared"):
                kind.notes = [*(note for note in kind.notes if note != _ALONE), _MXFP8_LINEAR]
    _flags(report, {format for format, _ in groups}, dtype)


def routing(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns how the config's router chooses, as options of topk, as far as the fields say it. Nothing means softmax
    and top-k."""
    text = checkpoint.config.within("text_config", "language_config", "llm_config") or checkpoint.config
    no_aux = text.text("topk_method") == "noaux_tc"
    if text.text("scoring_func") != "sigmoid" and not no_aux:
        return {}
    groups, chosen = (max(1, text.whole(name, default=1)) for name in ("n_group", "topk_group"))
    return {"scoring_func": "sigmoid", "num_expert_group": groups, "topk_group": chosen}


def _share(experts: _Experts, server: Server) -> tuple[int, int]:
    """Returns the experts of a rank, and its columns of each. Raises Refused if SGLang cannot distribute them."""
    if server.tp % server.ep:
        raise Refused(f"--ep-size {server.ep} does not divide --tp-size {server.tp}")
    ranks = server.tp // server.ep
    if experts.number % server.ep:
        raise Refused(f"--ep-size {server.ep} does not divide {experts.number} experts")
    if experts.intermediate % ranks:
        raise Refused(f"{ranks} ranks that share an expert do not divide its intermediate size {experts.intermediate}")
    return experts.number // server.ep, experts.intermediate // ranks


def _experts(
    kind: Kind,
    format: Format,
    experts: _Experts,
    activation: dict[str, Any],
    family: Family,
    server: Server,
    tokens: Sequence[int],
) -> None:
    """Judges MoE layers of one format and activation by the rules of SGLang's adapters."""
    kind.served, kind.taken_by = False, "moe=oxmoe"
    copies = 1
    if format is quantization.K3_MXFP4:
        kind.taken_by, copies = "moe=flashinfer_mxfp4", 2
        kind.notes.append("the experts are in memory twice: as SGLang lays them out, and as oxmoe does")
    kind.sizes = {"experts": experts.number, "top_k": experts.top_k}
    kind.sizes |= {"hidden": experts.hidden, "intermediate": experts.intermediate}
    try:
        options = expert_options(**activation)
        local, columns = _share(experts, server)
        kind.sizes |= {"experts_per_rank": local, "intermediate_per_rank": columns}
        _check_format(format, options, server, biases=family.biases)
        if format in (quantization.MXFP4, quantization.K3_MXFP4):
            padded = _PACKED if format is quantization.MXFP4 else _CUTLASS
            columns = -(-columns // padded) * padded
        _check_sizes(format, experts, columns, server)
        rows = 3 if options["gated"] else 2
        kind.bytes_per_rank = round(copies * kind.count * local * rows * experts.hidden * columns * format.bits / 8)
        sizes = (local, min(experts.top_k, local), experts.hidden, columns)
        layer = RankLayer(format.planned, *sizes, options, family.biases, server.ep, experts.top_k)
        kind.times = [_time(layer, count, server.gpu) for count in tokens]
        kind.rank_layer = layer
    except NotImplementedError as error:
        kind.refused.append(str(error).removeprefix("oxmoe: ") + _better(format, experts, server))
    except (Refused, ValueError) as error:
        kind.refused.append(str(error))
    kind.served = not kind.refused
    if format is modelopt.NVFP4 and not releases.has_nvfp4_linear(server.sglang):
        kind.notes.append(modelopt.OLD_LINEAR)
    if family.on_input:
        kind.notes.append("router weights multiply the input: not behind an all-to-all")


def _check_format(format: Format, options: dict[str, Any], server: Server, *, biases: bool) -> None:
    capability = int(server.gpu.removeprefix("sm_"))
    if format is quantization.MXFP8 and capability < 90:
        raise Refused(f"MXFP8 layers of SGLang are served from sm_90 on, not on {server.gpu}")
    if format is quantization.MXFP4 and "alpha" not in options:
        raise Refused("an MXFP4 checkpoint without gemm1_alpha is not served (only GPT-OSS's order of rows is known)")
    if biases and format.name not in formats.WITH_BIASES and format is not quantization.MXFP4:
        raise Refused(f"{format.label}: oxmoe serves no such experts with biases in SGLang")
    if format.scheme is not None and format.scheme.layout == int4_schemes.W4AFP8 and not options["gated"]:
        raise Refused("W4AFP8 experts without a gate are not served")
    if format is quantization.K3_MXFP4 and options.get("situ_linear_beta") is None:
        raise Refused("--moe-runner-backend flashinfer_mxfp4 serves no SiTU without a bound of up")
    if format.name in ("fp8_block", "fp8_tensor") and options["layout"] == "interleaved":
        raise Refused(f"oxmoe has no kernels for {format.label} with alternating rows of gate and up")


def _check_sizes(format: Format, experts: _Experts, columns: int, server: Server) -> None:
    """Raises NotImplementedError if a rank's share has no kernel."""
    formats.check_sizes(format.name, experts.hidden, columns, of=format.label)
    if format.scheme is not None:
        int4_schemes.groups_of(format.scheme, experts.hidden, columns, server.tp // server.ep)


def _better(format: Format, experts: _Experts, server: Server) -> str:
    """Returns the least --ep-size with which a rank's share has a kernel."""
    for ep in range(server.ep + 1, server.tp + 1):
        try:
            _, columns = _share(experts, Server(server.sglang, server.tp, ep, server.gpu))
            _check_sizes(format, experts, columns, Server(server.sglang, server.tp, ep, server.gpu))
        except (Refused, NotImplementedError):
            continue
        return f". With --ep-size {ep} the sizes are served"
    return ""


def _time(layer: RankLayer, tokens: int, gpu: str) -> dict[str, float]:
    """Returns the roofline of one layer on one rank, with its mean share of what tokens choose."""
    sizes = (layer.experts, layer.top_k, layer.hidden, layer.intermediate, layer.share(tokens))
    plan = oxmoe.explain(*sizes, format=layer.format, gated=layer.options["gated"], arch=gpu)
    found = re.search(r"^floor: ([\d.]+) us of memory traffic, ([\d.]+) us of arithmetic$", plan, re.MULTILINE)
    if found is None:
        raise Refused(f"oxmoe.explain gives no roofline for {gpu}")
    memory, arithmetic = map(float, found.groups())
    return {"tokens": tokens, "us": max(memory, arithmetic), "memory_us": memory, "arithmetic_us": arithmetic}


def _compare(kind: Kind, format: Format, checkpoint: Checkpoint) -> None:
    """Compares the format with the tensors that exist. If they do not have it, the format is not known."""
    for layer in kind.layers:
        dtypes = checkpoint.dtypes.get(layer, set())
        if dtypes - format.stored:
            kind.refused.append(
                f"layer {layer}: by the config its experts are {format}, but their tensors are "
                f"{', '.join(sorted(dtypes))}: the format is not known"
            )
            kind.served = False
            return


def _others(
    report: Report, text: Fields, family: Family, layers: int, checkpoint: Checkpoint, formats_of: quantization.Formats
) -> None:
    """Judges shared experts and draft layers, which do not decide whether the model is served."""
    if family.shared and text.whole(*family.shared, default=0):
        moe = sum(kind.count for kind in report.kinds if kind.kind == "moe")
        note = "SGLang's linear layers, or one more expert of the MoE layer where SGLang fuses them"
        report.kinds.append(Kind("shared", moe, sizes={family.shared[0]: text.whole(*family.shared)}, notes=[note]))
    drafts = text.whole(*family.drafts, default=0)
    if not drafts:
        return
    first = next(kind for kind in report.kinds if kind.kind == "moe")
    kind = Kind("draft", drafts, layers=list(range(layers, layers + min(drafts, _MOST_LAYERS))))
    kind.notes.append("used with --speculative-algorithm alone; they do not count for the answer")
    kind.notes.append(
        "if the start says that such a layer does not run on oxmoe: --speculative-moe-runner-backend deep_gemm"
    )
    report.kinds.append(kind)
    format = formats_of(layers)
    stored = set().union(*(checkpoint.dtypes.get(layer, set()) for layer in kind.layers))
    if stored - format.stored:
        kind.notes.append(f"their tensors are {', '.join(sorted(stored))}: the format is not known")
    elif str(format) == first.format:
        kind.format, kind.sizes, kind.taken_by = first.format, dict(first.sizes), first.taken_by
        kind.served, kind.refused = first.served, list(first.refused)
    else:
        kind.format = str(format)
        kind.notes.append("the checkpoint leaves them in another format than the MoE layers: not judged")


def _own_name(format: Format) -> bool:
    """Whether SGLang's name of the quantization stays, or none is needed."""
    plain = format in (quantization.BF16, quantization.F16)
    own = (*int4_schemes.METHODS, int4_schemes.W4AFP8)
    return plain or (format.scheme is not None and format.scheme.layout in own)


def _flags(report: Report, found: set[Format], dtype: str | None) -> None:
    """Sets what to type besides OXMOE_SGLANG=moe."""
    server = report.server
    if server.tp > 1:
        report.flags.append(f"--tp-size {server.tp}")
    if server.ep > 1:
        report.flags.append(f"--ep-size {server.ep}")
    plain = found <= {quantization.BF16, quantization.F16}
    if dtype != "bfloat16" and not (plain and dtype == "float16"):
        report.flags.append("--dtype bfloat16")
        report.notes.append(f"dtype is {shown(dtype)} in the config: oxmoe's experts need bf16, or f16 unquantised")
    if plain:
        mixtral = report.architecture == _MIXTRAL
        report.flags.append("--moe-runner-backend deep_gemm" if mixtral else "--quantization oxmoe")
    if quantization.K3_MXFP4 in found:
        report.flags.append("--moe-runner-backend flashinfer_mxfp4")
    if quantization.MXFP4 in found and server.ep > 1 and not releases.layer_decides(server.sglang):
        report.flags.append("--moe-runner-backend triton")
    if remark := untried(server.gpu):
        report.notes.append(remark)
