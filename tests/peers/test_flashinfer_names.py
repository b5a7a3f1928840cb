"""docs/flashinfer.md has a row for every public name of flashinfer, and the names of oxmoe that it gives exist. Calls
of the same name take what those of the installed release take. The page and the calls follow 0.7.4."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import oxmoe
from oxmoe.peers import flashinfer_hopper
from oxmoe.peers.flashinfer_cutlass_formats import NUMBERED, activation_of

# File of flashinfer -> its calls that oxmoe has under the same name.
CALLS = {
    "fused_moe/core.py": (
        *("cutlass_fused_moe", "cutlass_fused_moe_workspace_size", "trtllm_fused_moe_workspace_size"),
        *("trtllm_bf16_moe", "trtllm_bf16_routed_moe", "trtllm_fp8_block_scale_moe"),
        *("trtllm_fp8_block_scale_routed_moe", "trtllm_fp8_per_tensor_scale_moe"),
        *("trtllm_fp8_per_tensor_scale_routed_moe", "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"),
        *("trtllm_mxint4_block_scale_moe", "trtllm_mxint4_block_scale_routed_moe"),
        *("trtllm_fp8_per_channel_scale_moe", "trtllm_fp8_per_channel_scale_routed_moe", "pad_trtllm_moe_weights"),
    ),
    "fused_moe/fused_routing_dsv3.py": ("fused_topk_deepseek",),
    "fused_moe/hash_topk.py": ("hash_topk",),
    "fused_moe/monomoe.py": ("mono_moe", "has_monomoe", "alloc_scratchpad", "get_scratchpad_size_bytes"),
    "fused_moe/cute_dsl/sm90_fused_moe.py": (
        *("cute_dsl_fused_moe_bf16", "CuteDslBf16MoEWrapper.__init__", "CuteDslBf16MoEWrapper.run"),
    ),
    "fused_moe/cute_dsl/fused_moe.py": (
        *("CuteDslMoEWrapper.__init__", "CuteDslMoEWrapper.run", "cute_dsl_fused_moe", "cute_dsl_fused_moe_nvfp4"),
    ),
    "gemm/gemm_base.py": ("mm_mxfp8",),
    "quantization/fp8_quantization.py": ("mxfp8_quantize", "mxfp8_dequantize_host"),
    "quantization/fp4_quantization.py": ("fp4_quantize", "scaled_fp4_grouped_quantize"),
    "comm/allreduce.py": ("allreduce_fusion", "create_allreduce_fusion_workspace"),
    "comm/trtllm_ar.py": (
        *("trtllm_allreduce_fusion", "trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"),
        "trtllm_create_ipc_workspace_for_all_reduce_fusion",
        "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    ),
}
# Calls whose later parameters are keywords, because flashinfer 0.6.11 and 0.7 order them differently: the last
# parameter that may be given by position.
BY_KEYWORD_AFTER = {
    "cutlass_fused_moe": "use_packed_weights",
    "trtllm_fp8_block_scale_moe": "fp8_quantization_type",
    "trtllm_fp8_block_scale_routed_moe": "enable_pdl",
    "CuteDslMoEWrapper.run": "tactic",
}
# Defaults that mean the same: flashinfer's text -> oxmoe's value.
SAME = {
    "ActivationType.Swiglu": 3,
    "ActivationType.Swiglu.value": 3,
    "WeightLayout.BlockMajorK": 2,
    "Fp8QuantizationType.DeepSeekFp8": 1,
    "torch.bfloat16": None,
    "_TRTLLM_MOE_PAD_HIDDEN_ALIGNMENT": 512,
    "_TRTLLM_MOE_PAD_INTERMEDIATE_ALIGNMENT": 128,
    "DEFAULT_SWIGLU_ALPHA": 1.0,
    "DEFAULT_SWIGLU_BETA": 0.0,
    "DEFAULT_SWIGLU_LIMIT": 3.4028234663852886e38,
    # Both read an environment variable in flashinfer, which oxmoe does not: four over six is refused.
    "_UNSET": None,
}
# enable_pdl has no meaning in oxmoe.
WITHOUT_MEANING = {"enable_pdl"}

PAGE = (Path(__file__).parents[2] / "docs" / "flashinfer.md").read_text()
MODULES = ("fused_moe", "gemm", "comm", "quantization")


def patterns(column: int) -> list[str]:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[column])]


def public_names(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_")}


def installed() -> Path:
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer with its sources is not installed")
    return Path(spec.origin).parent


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_a_row(module: str) -> None:
    missing = sorted(
        name
        for name in public_names(installed() / module / "__init__.py")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns(0))
    )
    assert not missing


def definitions(file: Path) -> dict[str, ast.FunctionDef]:
    """Returns the functions of a file, and those of its classes as CLASS.NAME."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("file", CALLS)
def test_calls_take_flashinfers_arguments(file: str) -> None:
    """Every parameter of the installed release exists here, in its order and with its default."""
    theirs, wrong = definitions(installed() / file), []
    for name in CALLS[file]:
        arguments, (first, _, method) = theirs[name].args, name.partition(".")
        function = next(
            getattr(owner, first) for owner in (oxmoe, oxmoe.nvfp4, flashinfer_hopper) if hasattr(owner, first)
        )
        ours = inspect.signature(getattr(function, method) if method else function).parameters
        open_to_more = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        keywords = [argument.arg for argument in arguments.kwonlyargs]
        last = BY_KEYWORD_AFTER.get(name)
        ordered = positional[: positional.index(last) + 1] if last else positional
        if (order := list(ours)[: len(ordered)]) != ordered:
            wrong.append(f"{name}: expected {ordered}, got {order}")
        defaults = dict(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
        defaults |= {
            key: value for key, value in zip(keywords, arguments.kw_defaults, strict=True) if value is not None
        }
        for parameter in (*positional, *keywords):
            if parameter not in ours:
                wrong += [] if open_to_more and parameter in keywords else [f"{name} has no {parameter}"]
            elif parameter in defaults and parameter not in WITHOUT_MEANING:
                text, default = ast.unparse(defaults[parameter]), ours[parameter].default
                expected = SAME[text] if text in SAME else ast.literal_eval(text)
                wrong += [] if default == expected else [f"{name}: {parameter} is {default!r}, expected {text}"]
    assert wrong == []


def members(file: str, name: str) -> dict[str, int]:
    """Returns the members of an enumeration of the installed release."""
    body = ast.parse((installed() / file).read_text()).body
    (node,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        part.targets[0].id: ast.literal_eval(part.value)  # type: ignore[attr-defined]
        for part in node.body
        if isinstance(part, ast.Assign)
    }


def test_numbers_of_patterns() -> None:
    expected = members("comm/trtllm_ar.py", "AllReduceFusionPattern")
    assert {pattern.name: pattern.value for pattern in oxmoe.AllReduceFusionPattern} == expected


def test_numbers_of_activations() -> None:
    numbers = members("tllm_enums.py", "ActivationType")
    assert {name: numbers[name] for name in NUMBERED.values()} == {name: number for number, name in NUMBERED.items()}
    for number, name in NUMBERED.items():
        assert activation_of(number) == activation_of(SimpleNamespace(name=name)) == name
    for number in (1, *range(7, 10), 11, 12, 13):
        with pytest.raises(
            NotImplementedError, match=rf"no kernel for {number}; served are .*Geglu \(4\).*SwigluStep and"
        ):
            activation_of(number)


def test_our_calls_have_a_row() -> None:
    """The page names every public call that oxmoe took over from flashinfer, or that prepares its weights."""
    modules = ("oxmoe.peers.flashinfer_", "oxmoe.allreduce.", "oxmoe.dense")
    ours = {name for name in oxmoe.__all__ if getattr(getattr(oxmoe, name), "__module__", "").startswith(modules)}
    assert {"cutlass_fused_moe", "allreduce_fusion", "mm_mxfp8", "TRTLLMAllReduceFusionWorkspace"} <= ours
    # These are SGLang's calls, which docs/api.md has.
    ours -= {"fused_experts_flashinfer_mxfp4", "mxfp8_linear"}
    named = set(re.findall(r"[A-Za-z_0-9]+", " ".join((*patterns(0), *patterns(1)))))
    assert sorted(ours - named) == []


def test_our_names_exist() -> None:
    ours = [name for name in patterns(1) if name.startswith("oxmoe.")]
    assert len(ours) > 10
    for name in ours:
        value: object = oxmoe
        for part in name.removeprefix("oxmoe.").split("."):
            value = getattr(value, part)
