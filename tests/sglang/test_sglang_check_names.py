"""`python -m oxmoe check` knows the names that SGLang's classes give the experts of their layers, in each release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from check_configs import CHANNEL, FP8, MODELOPT, Config, kimi_k25, llama4, nemotron, qwen3_30b
from oxmoe import __main__
from oxmoe.sglang import sources
from oxmoe.tools.check import releases, skipping
from oxmoe.tools.check.families import FAMILIES, name_of_experts, renamed
from sglang_prefixes import Models

pytest.importorskip("sglang")

from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.models.registry import ModelRegistry

from sglang_server import VERSION, installed

MODELS = Models(sources.folder() / "srt" / "models")
HAVE = [architecture for architecture in FAMILIES if architecture in MODELS.entries]
ROOTS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "backbone.")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    installed()


@pytest.mark.parametrize("architecture", HAVE)
def test_the_root(architecture: str) -> None:
    """The sources of a model say under which name it builds its layers."""
    assert MODELS.roots(architecture) == {FAMILIES[architecture].root}


def names(architecture: str) -> list[str]:
    """Returns names that a checkpoint may give to a layer's experts or to parts of them."""
    family = FAMILIES[architecture]
    places = [family.place, *(["block_sparse_moe"] if family.place == "mlp" else [])]
    whole = [f"{root}layers.7.{place}.experts" for root in ROOTS for place in places]
    return [*whole, *(f"{name}.0.gate_proj" for name in whole), *(f"{root}layers.7*" for root in ROOTS), "re:.*experts"]


def mapper(architecture: str) -> Any:
    made, _ = ModelRegistry.resolve_model_cls([architecture])
    if hasattr(made, "get_hf_to_sglang_mapper") and architecture.startswith("DeepseekV4"):
        return None  # it renames Quark's checkpoints alone
    return getattr(made, "hf_to_sglang_mapper", None)


def loads(architecture: str) -> bool:
    return architecture in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("architecture", [name for name in HAVE if loads(name)])
def test_renamed_names(architecture: str) -> None:
    """They are what SGLang's class makes of them before it compares names."""
    theirs, given = mapper(architecture), names(architecture)
    assert renamed(FAMILIES[architecture], given) == (given if theirs is None else theirs.apply_list(given))


@pytest.mark.parametrize(
    "architecture", ["Qwen3VLMoeForConditionalGeneration", "NemotronHForCausalLM", "KimiK25ForConditionalGeneration"]
)
@pytest.mark.parametrize("method", ["fp8", "modelopt_fp4"])
def test_names_that_are_renamed_first(method: str, architecture: str) -> None:
    if not loads(architecture):
        pytest.skip("this SGLang cannot import the model without a GPU")
    family, theirs = FAMILIES[architecture], mapper(architecture)
    name = name_of_experts(family, 7)
    for given in names(architecture):
        if method == "fp8":
            config = get_quantization_config("fp8").from_config({**FP8, "modules_to_not_convert": [given]})
        else:
            config = get_quantization_config(method).from_config({**MODELOPT, "ignore": [given]})
        config.apply_weight_name_mapper(theirs)
        if method == "fp8":
            plain = [entry for entry in config.ignored_layers if entry]
            assert skipping.fp8_skips(name, [given], family.renames) == any(_in(entry, name) for entry in plain)
        else:
            assert skipping.modelopt_skips(name, [given], family.renames) == config.is_layer_excluded(name)


def _in(entry: str, name: str) -> bool:
    """Applies SGLang's rule of fp8 to one name of the list."""
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    return is_layer_skipped(name, [entry])


def test_names_in_mixtures() -> None:
    config = get_quantization_config("modelopt_mixed")
    ask = getattr(config, "_quantized_layer_prefix_candidates", lambda name: (name,))
    for root in ROOTS:
        name = f"{root}layers.7.mlp.experts"
        assert releases.names_in_mixtures(VERSION, name) == list(ask(name))


def formats(folder: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    capsys.readouterr()
    __main__.main(["check", str(path), "--sglang", VERSION, "--json"])
    return sorted(kind["format"] for kind in json.loads(capsys.readouterr().out)["kinds"] if kind["kind"] == "moe")


# Name -> config, experts in the list of ignored layers that SGLang finds, some that it does not find.
CASES: dict[str, tuple[Config, str, str]] = {
    "qwen": (qwen3_30b(), "model.layers.1.mlp.experts", "language_model.model.layers.1.mlp.experts"),
    "llama4": (
        llama4(),
        "language_model.model.layers.1.feed_forward.experts",
        "model.language_model.layers.1.feed_forward.experts",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_another_root_leaves_nothing_out(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """compressed-tensors compares whole names, so a checkpoint that writes another root quantises all layers."""
    config, followed, other = CASES[case]
    parts = [f"{{}}.0.{part}_proj" for part in ("gate", "up", "down")]
    found = []
    for name in (followed, other):
        ignore = {"ignore": [part.format(name) for part in parts]}
        found.append(formats(tmp_path, config | {"quantization_config": {**CHANNEL, **ignore}}, capsys))
    assert [len(kinds) for kinds in found] == [2, 1], found


def test_names_of_nemotron_and_kimi(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """These classes rename what a checkpoint calls its layers."""
    ignore = {"ignore": ["backbone.layers.1.mixer.experts*", "lm_head"]}
    assert len(formats(tmp_path, nemotron({**MODELOPT, **ignore}), capsys)) == 2
    kimi = kimi_k25()
    for root, kinds in (("language_model.layers", 1), ("model.layers", 2), ("language_model.model.layers", 1)):
        parts = [f"{root}.1.mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")]
        kimi["text_config"]["quantization_config"] = {**kimi["text_config"]["quantization_config"], "ignore": parts}
        assert len(formats(tmp_path, kimi, capsys)) == kinds, root
