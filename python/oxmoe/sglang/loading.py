"""Does what quantization methods do with a layer's weights after SGLang has loaded or updated them."""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import Tensor

from oxmoe import ExpertWeights
from oxmoe.peers.sglang import check_config
from oxmoe.sglang import calls, capabilities, deepep, eplb, formats, server, sglang_version
from oxmoe.sglang.experts import Handover, activation, run_dispatched
from oxmoe.sglang.updates import Updates, Writes, experts_of_checkpoint, name_of

# Parameters of scales without which codes are no weights. Scales of activations are not among them.
_SCALES = re.compile(r"w(?:13|2)_(?:weight_scale(?:_inv|_2)?|weight_global_scale|scales)")
_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")
# Parameters in which no number says that it was not loaded, so that tensors are counted.
_COUNTED = re.compile(r"w(?:13|2)_(?:weight|weight_packed|qweight|weight_bias)")
_CODES = ("w13_weight", "w2_weight")
_E8M0 = torch.float8_e8m0fnu
# Dtypes of scales whose NaN no torch function finds everywhere: the bits that count, all of which are set in a NaN.
_NAN_BYTES = {torch.float8_e4m3fn: 0x7F, _E8M0: 0xFF}


def _scales(layer: torch.nn.Module, *, inputs: bool) -> dict[str, Tensor]:
    """Returns the layer's scales of weights whose dtype has a NaN. inputs: and its scales of activations."""
    own = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False)}
    asked = {name for name in own if _SCALES.fullmatch(name) or (inputs and name in _INPUT_SCALES)}
    return {name: data for name, data in own.items() if name in asked and data.is_floating_point()}


def mark_scales(layer: torch.nn.Module, *, inputs: bool = False) -> None:
    """Fills the layer's scales of weights with NaN, so that `check_loaded` sees which ones a checkpoint lacks.
    inputs: also its scales of activations."""
    for data in _scales(layer, inputs=inputs).values():
        if data.dtype in _NAN_BYTES:
            data.view(torch.uint8).fill_(_NAN_BYTES[data.dtype])
        else:
            data.fill_(torch.nan)


def _rows_with_nan(data: Tensor) -> list[int]:
    bits = _NAN_BYTES.get(data.dtype)
    found = data.isnan() if bits is None else data.view(torch.uint8).bitwise_and(bits) == bits
    of_rows = found if found.dim() == 1 else found.flatten(1).any(1)
    rows: list[int] = of_rows.nonzero().flatten().tolist()
    return rows


def check_loaded(
    layer: torch.nn.Module, of: str, writes: Writes, *, integers: Iterable[str] = (), inputs: bool = False
) -> None:
    """Raises ValueError if a checkpoint has left out a tensor of this rank's experts: the layer would run on what the
    memory held. SGLang itself does not count tensors.

    Weights, biases and integers are counted. Scales count as missing if they are NaN, because some of SGLang's models
    write them past the loader. Rows that no expert of the checkpoint fills are legal, and get scales that are numbers.

    integers: other parameters without a NaN that the checkpoint must have. inputs: the layer reads its scales of
    activations, too.
    """
    own, experts = {name for name, _ in layer.named_parameters(recurse=False)}, experts_of_checkpoint(layer)
    counted = {name for name in own if _COUNTED.fullmatch(name)} | set(integers)
    scales = _scales(layer, inputs=inputs)
    missing = writes.missing(layer, counted | scales.keys())
    lacking = {name: _by_expert(parts, experts) for name, parts in missing.items() if name in counted}
    for name, data in scales.items():
        rows = _rows_with_nan(data)
        if found := {experts[row] for row in rows if row in experts}:
            given = _by_expert(missing.get(name, {}), experts)
            lacking[name] = {expert: given.get(expert, ()) for expert in found}
        elif rows:
            _fill_rows(data, rows)
    if lacking:
        listed = " and no ".join(f"{name} for experts {_listed(lacking[name])}" for name in sorted(lacking))
        nan = ", or has NaN there" if lacking.keys() & scales.keys() else ""
        raise ValueError(
            f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: the checkpoint has no {listed}{nan}. Either files or "
            f"tensors are missing, or the experts are not {of} as its config says: load a whole checkpoint, or serve "
            "this model without moe"
        )


def _by_expert(parts: dict[str, list[int]], experts: dict[int, int]) -> dict[int, tuple[str, ...]]:
    """Returns the missing parts of each expert of the checkpoint."""
    found: dict[int, tuple[str, ...]] = {}
    for part, rows in parts.items():
        for expert in {experts[row] for row in rows}:
            found[expert] = (*found.get(expert, ()), part)
    return found


def _listed(lacking: dict[int, tuple[str, ...]]) -> str:
    """Returns experts with their missing parts as text: "0 to 3 (w1, w3) and 7 (w3)"."""
    by_parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for expert in sorted(lacking):
        by_parts[lacking[expert]].append(expert)
    listed = ((_ranges(experts), f" ({', '.join(parts)})" if parts else "") for parts, experts in by_parts.items())
    return " and ".join(f"{experts}{parts}" for experts, parts in listed)


def _ranges(numbers: list[int]) -> str:
    """Returns ascending numbers as text, runs of them as "0 to 3", and of many runs only the first ones."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:8]]
    return ", ".join(shown) + (f", ... ({len(numbers)} in all)" if len(ranges) > len(shown) else "")


def _fill_rows(data: Tensor, rows: list[int]) -> None:
    """Gives rows that no expert fills the scales of a row that is loaded."""
    loaded = next((row for row in range(data.shape[0]) if row not in rows), None)
    plain = data.view(torch.uint8) if data.dtype in _NAN_BYTES else data
    for row in rows:
        plain[row] = 1 if loaded is None else plain[loaded]


def checked_loader(
    layer: Any,
    load: Callable[..., Any],
    of: str,
    writes: Writes,
    *,
    converts_scales: bool = False,
    cuts: bool = True,
) -> Callable[..., Any]:
    """Wraps `load`, SGLang's weight_loader, and raises ValueError before it makes wrong weights of a tensor. It
    converts a tensor's numbers to the dtype of its parameter, also where their bits are meant. It gives each rank as
    many rows or columns as the quotient says, and drops the rest. `inspect.unwrap` gives `load` back.

    Scales in E8M0 are bytes, so that a parameter of bytes takes them as torch.float8_e8m0fnu, too.

    writes: gets the tensors. converts_scales: `load` itself makes the bytes of scales. cuts: `load` gives each rank
    its part.
    """

    @functools.wraps(load)
    def weight_loader(param: Any, loaded_weight: Any, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(("weight_name", "shard_id", "expert_id"), arguments, strict=False)) | named
        name, shard = name_of(layer, param), given.get("shard_id")
        is_scale = _SCALES.fullmatch(name) is not None
        if is_scale and not converts_scales:
            loaded_weight = e8m0_as_bytes(param, loaded_weight)
        if name in _CODES or (is_scale and not converts_scales):
            _check_dtype(layer, name, param.dtype, loaded_weight.dtype, of, is_scale=is_scale)
        if cuts:
            _check_parts(layer, name, param, loaded_weight, shard)
        if name:
            writes.add(name, shard, given.get("expert_id"))
        return load(param, loaded_weight, *arguments, **named)

    return weight_loader


def e8m0_as_bytes(parameter: Any, loaded: Tensor) -> Tensor:
    """Returns scales in E8M0 as bytes if the parameter has bytes. SGLang's loaders would refuse or convert them."""
    return loaded.view(torch.uint8) if parameter.dtype == torch.uint8 and loaded.dtype == _E8M0 else loaded


def _check_dtype(
    layer: torch.nn.Module, name: str, own: torch.dtype, loaded: torch.dtype, of: str, *, is_scale: bool
) -> None:
    if is_scale:
        # Scales of 8 bits are bytes; a conversion would keep their numbers in place of their bits.
        converts = own.itemsize > 1 or own.is_floating_point == loaded.is_floating_point
    else:
        # SGLang itself packs a fused shared expert for parameters of integers.
        wide = own.itemsize > 1 and loaded.is_floating_point and loaded.itemsize > 1
        converts = own == loaded or wide or not own.is_floating_point
    if not converts:
        raise ValueError(
            f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: the checkpoint has {loaded} for {name} of {of} experts, "
            f"which is {own}: its tensors are not what its config says; serve this model without moe"
        )


def _check_parts(layer: Any, name: str, param: Any, loaded: Tensor, shard: str | None) -> None:
    """With --moe-runner-backend flashinfer_trtllm SGLang rounds a rank's columns up to 128, so that groups and blocks
    of scales that two ranks share are not seen when the layer is built."""
    ranks = layer.moe_tp_size
    if ranks == 1 or shard not in ("w1", "w2", "w3") or getattr(layer, "use_presharded_weights", False):
        return
    if shard == "w2" and getattr(param, "quant_method", None) == "channel":
        return  # scales of rows are for all columns
    if name == "w2_g_idx":
        parts = loaded.shape[0]
        wrong = parts != ranks * param.shape[1]
    elif loaded.dim() != 2:
        return  # a scale of a matrix
    else:
        parts = loaded.shape[int((shard == "w2") != bool(getattr(param, "is_transposed", False)))]
        wrong = parts % ranks != 0
    if wrong:
        raise ValueError(
            f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: {ranks} ranks cannot share {parts} parts of {name} as "
            "SGLang would cut them: it rounds up each rank's columns with --moe-runner-backend flashinfer_trtllm; "
            "choose another --moe-runner-backend"
        )


def leave_out_gates(layer: Any) -> None:
    """Halves the parameters of w13 if the experts have no gate and SGLang made rows of gate and up all the same:
    releases differ, and so do its methods."""
    of_codes = layer.w2_weight.shape[2]
    if layer.moe_runner_config.is_gated or layer.w13_weight.shape[1] != 2 * of_codes:
        return
    for name in ("w13_weight", "w13_weight_scale", "w13_weight_scale_inv", "w13_weight_bias"):
        own = getattr(layer, name, None)
        if own is not None:
            own.set_(own.data[:, : own.shape[1] // 2].clone())


class NeedsBfloat16:
    """A method whose experts compute in bf16 only, and have kernels for some sizes only."""

    of = ""  # the format of its experts, in words
    sized_as = ""  # the format whose sizes `formats` has

    def create_weights(
        self, layer: torch.nn.Module, num_experts: int, hidden_size: int, *sizes: Any, **attributes: Any
    ) -> None:
        """Creates SGLang's parameters. Before a checkpoint is read, it raises NotImplementedError for sizes without
        kernels and for another params_dtype. Both may be positional arguments."""
        columns = sizes[0] if sizes else attributes["intermediate_size_per_partition"]
        formats.check_sizes(self.sized_as, hidden_size, columns, of=f"{self.of} experts")
        dtype = attributes.get("params_dtype", sizes[1] if len(sizes) > 1 else None)
        if dtype != torch.bfloat16:
            raise NotImplementedError(f"oxmoe: {self.of} experts need --dtype bfloat16, got {dtype}")
        super().create_weights(layer, num_experts, hidden_size, *sizes, **attributes)  # type: ignore[misc]


def check_layer_config(config: Any) -> None:
    """Raises NotImplementedError or ValueError for a layer that has no kernels, before its checkpoint is read."""
    check_config(config)
    activation(config)


def refuse_transposed(layer: Any) -> None:
    """Raises NotImplementedError if SGLang's loader would transpose the weights of this layer while it loads them."""
    if getattr(layer, "use_triton_kernels", False) and not capabilities.layer_decides():
        raise NotImplementedError(
            "oxmoe: with --moe-runner-backend triton_kernel this SGLang loads the weights of every layer transposed; "
            "the quantization oxmoe needs another --moe-runner-backend (for bf16 layers without --quantization oxmoe, "
            "OXMOE_SGLANG=moe takes that backend over)"
        )


def _loads_gate_and_up_together(layer: Any) -> bool:
    fused = layer.weight_loader_fused
    load = getattr(layer.w13_weight, "weight_loader", None)
    # `Updates.loader` may have wrapped it.
    return load is not None and inspect.unwrap(load, stop=lambda step: step == fused) == fused


def handover(layer: Any, method: Any) -> Handover:
    """Returns what SGLang did and will do with this layer. Raises NotImplementedError if oxmoe cannot follow it."""
    # If the layer decides, this flag is False for oxmoe's runner and for methods without one.
    by_loader = bool(layer.use_flashinfer_trtllm_moe) and isinstance(method, Fp8MoEMethod | UnquantizedFusedMoEMethod)
    if by_loader and _loads_gate_and_up_together(layer):
        raise NotImplementedError(
            "oxmoe: this model loads gate and up together, and with --moe-runner-backend flashinfer_trtllm this SGLang "
            "pads each rank's weights and swaps gate and up elsewhere; choose another --moe-runner-backend"
        )
    global_ids = layer.moe_ep_size > 1 and bool(getattr(layer.dispatcher, "skip_local_expert_mapping", False))
    if global_ids and layer.num_fused_shared_experts:
        raise NotImplementedError(
            "oxmoe: with this --moe-runner-backend ids are of all ranks' experts, and fused shared experts are on each "
            "rank; start with --disable-shared-experts-fusion, or choose another --moe-runner-backend"
        )
    return Handover(
        up_first=by_loader,
        global_ids=global_ids,
        scaled=layer.should_fuse_routed_scaling_factor_in_topk,
        ep_size=layer.moe_ep_size,
        ep_rank=layer.moe_ep_rank,
    )


def check_all_to_all(weights_format: str) -> None:
    """Raises NotImplementedError or ValueError before a checkpoint is read, if the server's all-to-all brings tokens
    that experts of this format do not take."""
    deepep.dispatched(weights_format, sglang_version())
    deepep.refuse_overlap()


def loaded(layer: torch.nn.Module, weights: ExpertWeights) -> None:
    """Tells the layer's dispatcher at load which dtype to bring, and refuses an overlap that would wait for ever."""
    # "fp8_tensor-token" is cut to "fp8_tensor": a dispatcher does not depend on how activations are scaled.
    deepep.tell_dispatcher(layer, weights.format.partition("-")[0], sglang_version())
    deepep.refuse_overlap()


def _tensors(weights: ExpertWeights) -> list[Tensor | None]:
    of_experts = [weights.w13, weights.w2, weights.w13_scale, weights.w2_scale, weights.a13_scale, weights.a2_scale]
    return [*of_experts, weights.b13, weights.b2, *(weights.w13_packed or ()), *(weights.w2_packed or ())]


def renewed(old: ExpertWeights | None, new: ExpertWeights) -> ExpertWeights:
    """Returns `new`. After an update of a layer's weights it returns `old`, filled with the contents of `new`,
    because CUDA graphs know its addresses."""
    # On a CPU there are no graphs. The global scales of NVFP4 and int4's zero points are not among the tensors.
    if old is None or (new.format in ("nvfp4", "int4-zeros") and new.w13_packed is None):
        return new
    for to, tensor in zip(_tensors(old), _tensors(new), strict=True):
        if to is not None and tensor is not None and to.data_ptr() != tensor.data_ptr():
            to.copy_(tensor)
    return old


def share_memory(parameter: torch.nn.Parameter, packed: Tensor) -> None:
    """Gives a parameter the memory of what was packed from it, if that has as many bytes. The parameter's own memory
    is freed."""
    if packed.nbytes == parameter.nbytes:
        parameter.set_(packed.view(-1).view(torch.uint8).view(parameter.dtype).view(parameter.shape))  # type: ignore[call-overload]


def share_packed(layer: torch.nn.Module, weights: ExpertWeights, codes: str, scales: str = "weight_scale") -> None:
    """Calls `share_memory` for a layer's codes, "w13_<codes>" and "w2_<codes>", and for their scales."""
    for name, packed in (("w13", weights.w13_packed), ("w2", weights.w2_packed)):
        if packed is not None:
            share_memory(getattr(layer, f"{name}_{codes}"), packed[0])
            share_memory(getattr(layer, f"{name}_{scales}"), packed[1])


def packed_parameters(layer: torch.nn.Module, weights: ExpertWeights) -> set[str]:
    """Returns the names of the parameters whose memory holds packed weights instead of the checkpoint's."""
    packed = [tensor for tensor in (*(weights.w13_packed or ()), *(weights.w2_packed or ())) if tensor is not None]
    storages = {tensor.untyped_storage().data_ptr() for tensor in packed}
    return {name for name, own in _loaded(layer) if own.untyped_storage().data_ptr() in storages}


def biases(layer: torch.nn.Module, weights: ExpertWeights) -> set[str]:
    """Returns the names of the parameters that kernels read as biases where they lie."""
    held = {bias.data_ptr() for bias in (weights.b13, weights.b2) if bias is not None}
    return {name for name, own in _loaded(layer) if own.data_ptr() in held}


def is_derived(layer: torch.nn.Module, weights: ExpertWeights) -> bool:
    """Whether these ExpertWeights are wrong after only the layer's parameters are written."""
    # The global scales of NVFP4 are copied, and are not among the tensors.
    if weights.format.startswith("nvfp4") or weights.w13_packed is not None:
        return True
    own = {parameter.untyped_storage().data_ptr() for _, parameter in _loaded(layer)}
    held = (tensor for tensor in _tensors(weights) if tensor is not None)
    return any(tensor.untyped_storage().data_ptr() not in own for tensor in held)


def _loaded(layer: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters that a checkpoint fills. oxmoe's own tables are not among them; they are parameters so
    that EPLB moves them."""
    return [(name, own) for name, own in layer.named_parameters(recurse=False) if not name.startswith(eplb.PREFIX)]


def _addresses(layer: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in layer.named_parameters(recurse=False)}


class MadeAtLoad:
    """A method for layers whose ExpertWeights are made at load. Tokens go to oxmoe.moe as they come."""

    oxmoe = True
    runner: Any = None
    of = ""
    sized_as = ""
    weights: ExpertWeights | None = None
    packed: frozenset[str] = frozenset()
    moe_runner_config: Any
    handover = Handover()
    layer_loads = True  # whether weights come through the layer's loader, or its model writes the parameters itself
    takes_biases = False
    converts_scales = False  # whether the method's loader makes the bytes of scales of their numbers
    integers: tuple[str, ...] = ()  # parameters without a NaN that a checkpoint of this format must write
    reads_input_scales = False  # whether kernels need the scales of activations that a checkpoint may have
    _updates: Updates | None = None
    _made_of: dict[str, int] | None = None
    _broken: str | None = None

    @property
    def updates(self) -> Updates:
        if self._updates is None:
            self._updates = Updates()
        return self._updates

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """Creates the format's parameters, which are written through `Updates.loader`. Raises NotImplementedError for
        biases that the method would leave out: SGLang's models skip biases that have no parameter."""
        if attributes.get("with_bias") and not self.takes_biases:
            raise NotImplementedError(f"oxmoe: {self.of} experts with biases are not served")
        if "weight_loader" in attributes:
            attributes["weight_loader"] = self.loader(layer, attributes["weight_loader"])
        super().create_weights(layer, *sizes, **attributes)  # type: ignore[misc]
        mark_scales(layer, inputs=self.reads_input_scales)

    def loader(self, layer: torch.nn.Module, load: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `load`, SGLang's weight_loader of this layer."""
        load = checked_loader(
            layer, load, self.of, self.updates.writes, converts_scales=self.converts_scales, cuts=self.layer_loads
        )
        return self.updates.loader(layer, load, self.of)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        if self.layer_loads:
            refuse_transposed(layer)
        if server.skips_processing():
            raise NotImplementedError(
                f"oxmoe: {self.of} experts are prepared after they are loaded, which --load-format remote_instance "
                "leaves out; start with another --load-format"
            )
        if (flag := server.moves_parameters()) is not None:
            raise NotImplementedError(
                f"oxmoe: {self.of} experts are prepared after they are loaded, and {flag} gives their parameters other "
                "memory afterwards; start without it (layers of --quantization oxmoe in bf16, f16, and fp8 with 128 x "
                "128 blocks follow their parameters)"
            )
        check_all_to_all(self.sized_as)
        check_layer_config(moe_runner_config)
        self.moe_runner_config = moe_runner_config

    def make(self, layer: torch.nn.Module, **options: Any) -> ExpertWeights:
        raise NotImplementedError

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Newer releases call this before they update weights, and process them afterwards.

        Nothing is unpacked. Packed parameters are written whole, or the update is refused at its end.
        """
        if self.weights is not None:
            self.updates.announce()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Describes the weights. After a weight update SGLang calls it again, also for layers that it did not write."""
        if self.weights is not None and self.packed:
            writes = self.updates.writes
            lacking = writes.missing(layer, set(self.packed))
            missing = {name: writes.counted(layer, parts, name) for name, parts in lacking.items()}
            # Packed weights are made of other parameters, too, such as global scales: none of them may change alone.
            others = writes.names(layer) - self.packed - biases(layer, self.weights)
            if missing.keys() == self.packed and not others and not any(written for written, _ in missing.values()):
                # Packed bytes would be packed once more, so they stay. The dispatcher may be a new one, though.
                self.updates.finish(derived=True)
                loaded(layer, self.weights)
                return
            if missing:
                given = ", ".join(f"{name} {written} of {parts}" for name, (written, parts) in missing.items())
                given += f" parts; and {', '.join(sorted(others))}" if others else " parts"
                self._broken = (
                    f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: a weight update wrote parts of packed {self.of} "
                    f"experts ({given}); it must write all of a layer's. Load the whole layer again"
                )
                raise RuntimeError(self._broken)
            self._broken = None
        if self.weights is None and self.updates.writes:
            check_loaded(layer, self.of, self.updates.writes, integers=self.integers, inputs=self.reads_input_scales)
        self.handover = handover(layer, self)
        options = activation(self.moe_runner_config, up_first=self.handover.up_first)
        self.weights = renewed(self.weights, self.make(layer, **options))
        self.share(layer, self.weights)
        eplb.register(layer, self.weights)
        self.finish(layer)
        loaded(layer, self.weights)

    def share(self, layer: torch.nn.Module, weights: ExpertWeights) -> None:
        """Gives the layer's parameters the memory of what was made from them, if the format can do so."""

    def finish(self, layer: torch.nn.Module) -> None:
        """Notes what the ExpertWeights were made of."""
        assert self.weights is not None
        self.packed = frozenset(packed_parameters(layer, self.weights))
        self._made_of = _addresses(layer)
        derived = is_derived(layer, self.weights)
        if derived and server.backs_up_experts():
            raise NotImplementedError(
                f"oxmoe: {self.of} experts are not served with --enable-elastic-expert-backup: after a rank is lost "
                "SGLang writes bytes of the checkpoint into their parameters, which hold or accompany what was made of "
                "them; start without it"
            )
        if derived and server.balances_experts():
            model = calls.model_of(self.moe_runner_config)
            if capabilities.lists_experts_early(model):
                raise NotImplementedError(
                    f"oxmoe: {self.of} experts are not served with --enable-eplb in a model of {model}: it lists the "
                    "tensors to move before they are prepared; start without --enable-eplb"
                )
        self.updates.finish(derived=derived)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        if self.weights is None:
            raise RuntimeError(
                f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: the {self.of} experts were not prepared: SGLang did "
                "not call process_weights_after_loading after it had loaded them; start with another --load-format"
            )
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if (addresses := _addresses(layer)) != self._made_of:
            moved = sorted(name for name, address in addresses.items() if address != (self._made_of or {}).get(name))
            raise RuntimeError(
                f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: {', '.join(moved)} got other memory after the "
                f"{self.of} experts were prepared, which hold the old; SGLang must process the weights again (a "
                "weight update does), and --cpu-offload-gb is not served for them"
            )
        return run_dispatched(dispatch_output, self.weights, self.moe_runner_config, self.handover)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> Any:
        """Newer releases ask this. None means that tokens come with top-k ids of this rank's experts."""
        return None
