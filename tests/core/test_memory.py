"""An object that outlives a call owns its memory, and no output lies over an operand that the call reads.

The tests cover every format's ExpertWeights, every operand of it, and every way in which torch gives a tensor other
memory. They also cover every entry point, every operand of it, and both outputs (out and workspace).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxmoe
from oxmoe.testing import same_bits


@pytest.fixture(scope="module", autouse=True)
def only_what_these_tests_make_is_collected() -> Iterator[None]:
    """A collection then visits none of the objects that imports have left, of which there are about a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


E, K, H, INTER, T = 4, 2, 256, 128, 6
E4M3 = torch.float8_e4m3fn


def operands(format: str, device: str, rng: torch.Generator) -> dict[str, Any]:
    """Returns the tensors of a layer of `format` with everything that its constructor takes."""

    def randn(*size: int, to: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, generator=rng).mul_(size[-1] ** -0.5).to(to).to(device)

    def bytes_of(*size: int) -> Tensor:
        return torch.randint(255, size, generator=rng, dtype=torch.uint8).to(device)

    def ones(*size: int) -> Tensor:
        return torch.ones(size, device=device) / 64

    both = {"w13": (E, 2 * INTER, H), "w2": (E, H, INTER)}
    biases = {"b13": randn(E, 2 * INTER, to=torch.float32), "b2": randn(E, H, to=torch.float32)}
    numbers = {"alpha": ones(E), "beta": ones(E), "limit": ones(E) * 64}
    if format in ("bf16", "f16", "f32"):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
        return {name: randn(*size, to=dtype) for name, size in both.items()} | biases | numbers
    if format.startswith("fp8"):
        weights = {name: randn(*size).to(E4M3) for name, size in both.items()} | biases | numbers
        if format == "fp8_block":
            return weights | {
                "w13_scale": ones(E, 2 * INTER // 128, H // 128),
                "w2_scale": ones(E, H // 128, INTER // 128),
            }
        if format == "fp8_tensor":
            return weights | {"w13_scale": ones(E), "w2_scale": ones(E), "a13_scale": ones(1), "a2_scale": ones(1)}
        return weights | {"w13_scale": ones(E, 2 * INTER), "w2_scale": ones(E, H)}
    if format == "mxfp8":
        weights = {name: randn(*size).to(E4M3) for name, size in both.items()} | biases | numbers
        scales = {f"{name}_scale": bytes_of(*size[:2], size[2] // 32) // 128 + 120 for name, size in both.items()}
        return weights | scales
    codes = {name: bytes_of(*size[:2], size[2] // 2) for name, size in both.items()} | biases | numbers
    if format == "mxfp4":
        scales = {f"{name}_scale": bytes_of(*size[:2], size[2] // 32) // 128 + 118 for name, size in both.items()}
        return codes | scales
    if format == "int4":
        groups = {name: (*size[:2], size[2] // 32) for name, size in both.items()}
        zeros = {f"{name}_zeros": bytes_of(*size) % 17 for name, size in groups.items()}
        return codes | zeros | {f"{name}_scale": randn(*size) / 8 for name, size in groups.items()}
    scales = {f"{name}_scale": ones(*size[:2], size[2] // 16).to(E4M3) for name, size in both.items()}
    return codes | scales | {"w13_global_scale": ones(E, 2), "w2_global_scale": ones(E)}


FORMATS = ("bf16", "f16", "f32", "fp8_block", "fp8_tensor", "fp8_rows", "mxfp8", "mxfp4", "nvfp4", "int4")
# Operands that are copied when they are given, so that the caller's tensor may change afterwards.
COPIED = ("w13_global_scale", "w2_global_scale")


def make(format: str, given: dict[str, Any]) -> oxmoe.ExpertWeights:
    constructor = getattr(oxmoe.ExpertWeights, "fp8_tensor" if format == "fp8_rows" else format)
    return constructor(**given)


def x_of(format: str, device: str, rng: torch.Generator) -> Tensor:
    dtype = {"f16": torch.float16, "f32": torch.float32}.get(format, torch.bfloat16)
    return torch.randn((T, H), generator=rng).to(dtype).to(device)


def call(weights: oxmoe.ExpertWeights, x: Tensor) -> Tensor:
    ids = torch.arange(T * K, dtype=torch.int32, device=x.device).view(T, K) % E
    return oxmoe.moe(x, weights, torch.full((T, K), 0.5, device=x.device), ids)


def to_module(format: str, given: dict[str, Any]) -> nn.Module:
    module = nn.Module()
    for name, tensor in given.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def made_of(module: nn.Module, format: str) -> oxmoe.ExpertWeights:
    return make(format, dict(module.named_parameters()))


def set_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)


def set_storage(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.set_(torch.zeros_like(parameter))
        parameter.set_(torch.zeros_like(parameter))


def delete(module: nn.Module) -> None:
    for name, _ in list(module.named_parameters()):
        delattr(module, name)


def half(module: nn.Module) -> None:
    module.to(torch.float64)


MOVES: dict[str, Callable[[nn.Module], None]] = {
    "data": set_data,
    "set": set_storage,
    "del": delete,
    "to": half,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("format", FORMATS)
def test_what_the_caller_moves_stays(format: str, move: str, device: str, rng: torch.Generator) -> None:
    if device == "cuda" and format == "f32":
        pytest.skip("fp32 experts are served on CPU alone")
    module = to_module(format, operands(format, device, rng))
    weights, x = made_of(module, format), x_of(format, device, rng)
    before = call(weights, x)
    MOVES[move](module)
    gc.collect()
    # Other tensors get the freed memory. It must not be the layer's.
    junk = [torch.full((E, 2 * INTER, H), torch.nan, device=device) for _ in range(8)]
    assert torch.equal(call(weights, x).view(torch.uint8), before.view(torch.uint8))
    assert len(junk) == 8


def resize_to_nothing(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def resize_to_more(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 4096)


def share(tensor: Tensor) -> None:
    tensor.share_memory_()


CHANGES = {"resize_(0)": resize_to_nothing, "resize_": resize_to_more, "share_memory_": share}
OPERANDS = [(format, name) for format in FORMATS for name in operands(format, "cpu", torch.Generator())]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("format", "name"), OPERANDS)
def test_what_cannot_be_owned_is_noticed(format: str, name: str, change: str, rng: torch.Generator) -> None:
    given = operands(format, "cpu", rng)
    weights, x = make(format, given), x_of(format, "cpu", rng)
    before = call(weights, x)
    read_as = {"fp8_tensor": ("w13_scale", "w2_scale")}.get(format, ()) + COPIED
    CHANGES[change](given[name])
    if name in read_as:  # the operand is made into a table of blocks, or copied
        assert torch.equal(call(weights, x), before)
        return
    out = torch.full_like(x, torch.nan)
    with pytest.raises(ValueError, match=rf"^{name}: its memory was moved, freed or resized"):
        oxmoe.moe(x, weights, torch.full((T, K), 0.5), torch.zeros((T, K), dtype=torch.int32), out=out)
    assert out.isnan().all()
    rows = x.new_zeros((E, 3, H))
    with pytest.raises(ValueError, match=rf"^{name}: its memory was moved"):
        oxmoe.moe_masked(rows, weights, torch.ones(E, dtype=torch.int32))
    with pytest.raises(ValueError, match=rf"^{name}: its memory was moved"):
        oxmoe.moe_contiguous(x, weights, torch.ones(E, dtype=torch.int32))
    assert make(format, given | {name: operands(format, "cpu", rng)[name]}) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "f32"])
def test_freed_weights_are_noticed_on_a_gpu(format: str, rng: torch.Generator) -> None:
    given = operands(format, "cuda", rng)
    weights, x = make(format, given), x_of(format, "cuda", rng)
    call(weights, x)
    packed = weights.w13_packed
    freed = packed[0] if packed is not None else given["w13"]
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^w13: its memory was moved, freed or resized"):
        call(weights, x)


def test_memory_comes_back(rng: torch.Generator) -> None:
    """Weight offload that brings the same memory back needs no new ExpertWeights; other memory does."""
    given = operands("bf16", "cpu", rng)
    weights, x = make("bf16", given), x_of("bf16", "cpu", rng)
    before, storage = call(weights, x), given["w13"].untyped_storage()
    kept, address, size = given["w13"].clone(), storage.data_ptr(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    if storage.data_ptr() == address:
        given["w13"].copy_(kept)
        assert torch.equal(call(weights, x), before)
    else:
        with pytest.raises(ValueError, match="w13: its memory was moved"):
            call(weights, x)


def test_the_owner_lets_go(rng: torch.Generator) -> None:
    """Storages live as long as the ExpertWeights that read them, and no longer."""
    given = operands("bf16", "cpu", rng)
    weights = make("bf16", given)
    alive = {name: weakref.ref(tensor) for name, tensor in given.items()}
    del given
    gc.collect()
    assert all(ref() is not None for ref in alive.values())
    del weights
    gc.collect()
    assert all(ref() is None for ref in alive.values())


def test_numpy_memory(rng: torch.Generator) -> None:
    """numpy gives an array other memory only if it is told not to look at references."""
    given = {name: tensor.numpy() for name, tensor in operands("f32", "cpu", rng).items()}
    given = {name: np.array(array) for name, array in given.items()}
    weights = make("f32", given)
    x, ids = np.random.default_rng(0).standard_normal((T, H)).astype(np.float32), np.zeros((T, K), dtype=np.int32)
    chosen = np.full((T, K), 0.5, dtype=np.float32)
    oxmoe.moe(x, weights, chosen, ids)
    given["w2"].resize((E, H, 4 * INTER), refcheck=False)
    with pytest.raises(ValueError, match="w2: its memory was moved, freed or resized"):
        oxmoe.moe(x, weights, chosen, ids)


def test_read_only_arrays_are_read(rng: torch.Generator) -> None:
    """Memory-mapped checkpoints are read-only: inputs may be read-only, outputs not."""
    given = {name: np.array(tensor.numpy()) for name, tensor in operands("f32", "cpu", rng).items()}
    x = np.random.default_rng(0).standard_normal((T, H)).astype(np.float32)
    ids, chosen = np.zeros((T, K), dtype=np.int32), np.full((T, K), 0.5, dtype=np.float32)
    wanted = oxmoe.moe(x, make("f32", given), chosen, ids)
    for array in (*given.values(), x, ids, chosen):
        array.setflags(write=False)
    weights = make("f32", given)
    assert np.array_equal(oxmoe.moe(x, weights, chosen, ids), wanted)
    assert np.array_equal(oxmoe.moe(x[::1], weights, chosen, ids), wanted)
    logits = np.ones((T, E), dtype=np.float32)
    logits.setflags(write=False)
    assert oxmoe.topk(logits, K)[1].shape == (T, K)
    out = np.zeros_like(x)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out: is written, but its memory is read-only"):
        oxmoe.moe(x, weights, chosen, ids, out=out)


def overlaid(tensor: Tensor, size: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Returns a copy of `tensor`, and `size` bytes over it that begin `shift` bytes into it."""
    count = tensor.numel() * tensor.element_size()
    room = torch.zeros(max(count, size + shift) + 256, dtype=torch.uint8)
    room = room[-room.data_ptr() % 256 :]
    copy = room[:count].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy, room[shift : shift + size]


def moe_operands(format: str, logits: bool, rng: torch.Generator) -> dict[str, Any]:
    """Returns the tensors that a call of `moe` reads beside x."""
    if not logits:
        ids = torch.randint(E, (T, K), generator=rng, dtype=torch.int32)
        return {"topk_weights": torch.rand((T, K), generator=rng), "topk_ids": ids}
    read = {"router_logits": torch.randn((T, E), generator=rng), "correction_bias": torch.rand(E, generator=rng)}
    return read | {"num_token_non_padded": torch.tensor([T], dtype=torch.int32)}


@pytest.mark.parametrize("written", ["out", "workspace"])
@pytest.mark.parametrize("logits", [False, True], ids=["ids", "logits"])
@pytest.mark.parametrize("format", FORMATS)
def test_moe_writes_over_nothing(format: str, logits: bool, written: str, rng: torch.Generator) -> None:
    given, read, x = operands(format, "cpu", rng), moe_operands(format, logits, rng), x_of(format, "cpu", rng)
    options: dict[str, Any] = {"top_k": K, "scoring_func": "sigmoid"} if logits else {}
    copied = COPIED + (("w13_scale", "w2_scale") if format == "fp8_tensor" else ())
    room = oxmoe.workspace_bytes(make(format, given), T, K)
    size = T * H * x.element_size() if written == "out" else room

    def run(name: str | None) -> None:
        """Makes one call whose output lies over the operand `name`."""
        layer, tensors, own_x, memory = dict(given), dict(read), x, None
        for group in (layer, tensors):
            if name in group:
                group[name], memory = overlaid(group[name], size)
        if name == "x":
            own_x, memory = overlaid(x, size, 0 if written == "workspace" else 2 * x.element_size())
        weights = make(format, layer)
        if memory is None:
            memory = overlaid(x, size)[1]
        memory = memory.view(x.dtype).view(T, H) if written == "out" else memory
        before = {key: tensor.clone() for key, tensor in (layer | tensors | {"x": own_x}).items()}
        try:
            oxmoe.moe(own_x, weights, **tensors, **options, **{written: memory})
        finally:
            for key, tensor in (layer | tensors | {"x": own_x}).items():
                if key in copied:  # the layer has its own numbers, so the caller's memory may be written
                    continue
                assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8)), key

    run(None)
    for name in (*given, *read, "x"):
        if name in copied:
            run(name)
            continue
        with pytest.raises(ValueError, match=rf"^{written}: overlaps {name}"):
            run(name)


@pytest.mark.parametrize("written", ["out", "workspace"])
@pytest.mark.parametrize("entry", ["moe_masked", "moe_contiguous"])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_write_over_nothing(format: str, entry: str, written: str, rng: torch.Generator) -> None:
    given = operands(format, "cpu", rng)
    x = torch.randn((E, 8, H), generator=rng).to(x_of(format, "cpu", rng).dtype)
    x = x if entry == "moe_masked" else x.view(-1, H)
    counts = torch.tensor([3, 0, 8, 1], dtype=torch.int32)
    counts_name = "masked_m" if entry == "moe_masked" else "counts"
    room = oxmoe.masked_workspace_bytes(make(format, given), E * 8)
    size = x.numel() * x.element_size() if written == "out" else room
    names = [name for name in given if name not in COPIED]
    if format == "fp8_tensor":
        names = [name for name in names if name not in ("w13_scale", "w2_scale")]
    for name in (*names, counts_name, "x"):
        layer, own_x, own_counts = dict(given), x, counts
        if name in layer:
            layer[name], memory = overlaid(layer[name], size)
        elif name == "x":
            own_x, memory = overlaid(x, size, 0 if written == "workspace" else 2 * x.element_size())
        else:
            own_counts, memory = overlaid(counts, size)
        memory = memory.view(x.dtype).view(x.shape) if written == "out" else memory
        before = memory.view(torch.uint8).clone()
        with pytest.raises(ValueError, match=rf"^{written}: overlaps {name}"):
            getattr(oxmoe, entry)(own_x, make(format, layer), own_counts, **{written: memory})
        assert torch.equal(memory.view(torch.uint8), before)


def test_outputs_are_apart(rng: torch.Generator) -> None:
    weights, x = make("bf16", operands("bf16", "cpu", rng)), x_of("bf16", "cpu", rng)
    size = oxmoe.workspace_bytes(weights, T, K)
    out, workspace = overlaid(x, size)
    with pytest.raises(ValueError, match="workspace: overlaps out"):
        oxmoe.moe(x, weights, **moe_operands("bf16", False, rng), out=out, workspace=workspace)
    logits = torch.randn((T, E), generator=rng)
    chosen, raw = overlaid(torch.zeros((T, K)), T * K * 4)
    with pytest.raises(ValueError, match="topk_ids: overlaps topk_weights"):
        oxmoe.topk(logits, K, topk_weights=chosen, topk_ids=raw.view(torch.int32).view(T, K))


@pytest.mark.parametrize("written", ["topk_weights", "topk_ids"])
@pytest.mark.parametrize("name", ["router_logits", "correction_bias", "num_token_non_padded"])
def test_topk_writes_over_nothing(name: str, written: str, rng: torch.Generator) -> None:
    read = moe_operands("bf16", True, rng)
    read[name], memory = overlaid(read[name], T * K * 4)
    memory = memory.view(torch.int32 if written == "topk_ids" else torch.float32).view(T, K)
    before = {key: tensor.clone() for key, tensor in read.items()}
    with pytest.raises(ValueError, match=rf"^{written}: overlaps {name}"):
        oxmoe.topk(**read, top_k=K, **{written: memory})
    assert all(torch.equal(read[key], before[key]) for key in read)


@pytest.mark.parametrize("name", ["a", "b", "a_descale", "b_descale"])
def test_mm_mxfp8_writes_over_nothing(name: str, rng: torch.Generator) -> None:
    m, n, k = 4, 64, 128
    read = {"a": torch.randn((m, k), generator=rng).to(E4M3), "b": torch.randn((n, k), generator=rng).to(E4M3)}
    read |= {"a_descale": torch.full((m, k // 32), 127, dtype=torch.uint8)}
    read |= {"b_descale": torch.full((k // 32, n), 127, dtype=torch.uint8)}
    read[name], memory = overlaid(read[name], m * n * 2)
    out = memory.view(torch.bfloat16).view(m, n)
    with pytest.raises(ValueError, match=f"out: overlaps {name}"):
        oxmoe.mm_mxfp8(read["a"], read["b"].T, read["a_descale"], read["b_descale"], out=out)


def test_options_that_a_call_does_not_read(rng: torch.Generator) -> None:
    weights, x = make("bf16", operands("bf16", "cpu", rng)), x_of("bf16", "cpu", rng)
    chosen = moe_operands("bf16", False, rng)
    wrong: dict[str, Any] = {
        "top_k": 7,
        "scoring_func": "nonsense",
        "renormalize": False,
        "correction_bias": torch.zeros(3),
        "num_expert_group": 2,
        "topk_group": 1,
        "num_token_non_padded": torch.tensor([1], dtype=torch.int32),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name}: is an option of router_logits"):
            oxmoe.moe(x, weights, **chosen, **{name: value})
    with pytest.raises(ValueError, match="keep_router_weight: is an option of no_combine"):
        oxmoe.moe(x, weights, **chosen, keep_router_weight=True)


@pytest.mark.parametrize(("size", "rank"), [(2**40, 2**29), (2**31, 2**30), (0, 0), (2, 2), (2, -1), (2**62, 1)])
def test_ranks_that_no_id_reaches(size: int, rank: int, rng: torch.Generator) -> None:
    weights, x = make("bf16", operands("bf16", "cpu", rng)), x_of("bf16", "cpu", rng)
    for read in (moe_operands("bf16", False, rng), moe_operands("bf16", True, rng) | {"top_k": K}):
        with pytest.raises(ValueError, match=r"^ep_(size|rank): "):
            oxmoe.moe(x, weights, **read, ep_size=size, ep_rank=rank)


@pytest.mark.parametrize("kept", [0.0, 0.5])
@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids", "out", "workspace"])
def test_operands_whose_storage_shrank(name: str, kept: float, device: str, rng: torch.Generator) -> None:
    """The address of such an operand is that of memory which other tensors may have by now."""
    weights = make("bf16", operands("bf16", device, rng))
    given: dict[str, Any] = {"x": x_of("bf16", device, rng), **moe_operands("bf16", False, rng)}
    given = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}
    given["out"] = torch.empty_like(given["x"])
    given["workspace"] = torch.zeros(oxmoe.workspace_bytes(weights, T, K) + 256, dtype=torch.uint8, device=device)
    tensor = given[name] = torch.nn.Parameter(given[name].clone(), requires_grad=False)
    full = tensor.untyped_storage().nbytes()
    assert oxmoe.moe(weights=weights, **given).isfinite().all()
    before = [value.clone() for key, value in given.items() if key != name and isinstance(value, Tensor)]
    tensor.untyped_storage().resize_(int(full * kept))
    told = "has no data" if kept == 0 else f"its storage has {int(full * kept)} bytes"
    with pytest.raises(ValueError, match=f"^{name}: {told}"):
        oxmoe.moe(weights=weights, **given)
    after = [value for key, value in given.items() if key != name and isinstance(value, Tensor)]
    assert all(same_bits(*pair) for pair in zip(before, after, strict=True))
    # A view of the part that is left is served.
    if kept and name == "x":
        rows = T // 2
        part = {key: value[:rows] for key, value in given.items() if key in ("topk_weights", "topk_ids")}
        assert oxmoe.moe(tensor[:rows], weights, **part).isfinite().all()


@pytest.mark.parametrize("name", ["topk_weights", "topk_ids"])
def test_torchs_own_functions_read_no_freed_storage(name: str) -> None:
    given = {"topk_weights": torch.ones(3, 2), "topk_ids": torch.zeros(3, 2, dtype=torch.int32)}
    oxmoe.pack_topk(**given)
    given[name].untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=f"^{name}: its storage has 8 bytes"):
        oxmoe.pack_topk(**given)


@pytest.mark.parametrize("name", ["x", "topk_ids", "workspace"])
def test_tensors_without_memory(name: str, rng: torch.Generator) -> None:
    """A view of a meta or fake tensor behind its storage's beginning has an address all the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    weights = make("bf16", operands("bf16", "cpu", rng))
    read: dict[str, Any] = {"x": x_of("bf16", "cpu", rng), **moe_operands("bf16", False, rng)}
    read["workspace"] = torch.zeros(oxmoe.workspace_bytes(weights, T, K) + 256, dtype=torch.uint8)
    for view in (
        torch.zeros(read[name].numel() + 99, dtype=read[name].dtype, device="meta")[99:].view(read[name].shape),
        FakeTensorMode()
        .from_tensor(torch.zeros(read[name].numel() + 99, dtype=read[name].dtype))[99:]
        .view(read[name].shape),
    ):
        with pytest.raises(ValueError, match=f"^{name}: (has no data|cannot be read)"):
            oxmoe._oxmoe.moe(weights=weights, **(read | {name: view}))
