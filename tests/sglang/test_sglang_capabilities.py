"""Capabilities that oxmoe finds in the installed SGLang's sources, the releases it serves, and the names that a newer
one needs."""

from __future__ import annotations

import ast
import importlib
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forked
import oxmoe.sglang
from oxmoe.sglang import capabilities, setting, sources
from oxmoe.tools import doctor

pytest.importorskip("sglang")

from sglang_server import VERSION

PARTS = tuple(capabilities.NEEDS)
NEWEST = capabilities.order(VERSION) >= capabilities.order(capabilities.LAST)
of_newest = pytest.mark.skipif(not NEWEST, reason="says what the newest release has that is served")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forgets what was read of a folder, for a test with another folder, and what that test read."""
    cached = [function for function in vars(sources).values() if hasattr(function, "cache_clear")]
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# Versions


def test_versions_are_ordered() -> None:
    versions = [
        *("0.4.99", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13rc1", "0.5.13", "0.5.13.post1", "0.5.22"),
        *("0.5.23.dev7", "0.5.23", "0.5.23.post1", "0.5.24.dev12", "0.5.24", "0.6", "0.6.0.post1", "1.0"),
    ]
    for first, second in itertools.pairwise(versions):
        assert capabilities.order(first) < capabilities.order(second), f"{first} and {second}"
    assert capabilities.order("0.6") == capabilities.order("0.6.0")
    assert [version for version in versions if capabilities.is_old(version)] == versions[:3]
    assert [version for version in versions if capabilities.is_new(version)] == versions[10:]


def test_versions_that_nobody_can_order() -> None:
    with pytest.raises(ValueError, match=r"SGLang main is no version .*; served are 0\.5\.12\.post1 to "):
        capabilities.order("main")


# Names


def test_this_release_is_served() -> None:
    assert not capabilities.is_old(VERSION)
    assert oxmoe.sglang.setting.capabilities is capabilities


def test_names_are_sglangs() -> None:
    """The names that are read of sources are those of the imported modules."""
    for module in ("srt.layers.moe.moe_runner", "srt.layers.moe.moe_runner.base", "srt.layers.quantization.fp8"):
        there = set(dir(importlib.import_module(f"sglang.{module}")))
        found = {name for name in sources.names(module) if not name.startswith("_")}
        assert len(found) > 1 and found - there <= {"TYPE_CHECKING"} | type_checking(module), module


def type_checking(module: str) -> set[str]:
    """Returns names that a module imports for type checkers alone."""
    tree = ast.parse(Path(str(importlib.import_module(f"sglang.{module}").__file__)).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {name for block in blocks for node in block.body for name in sources._bound(node)}


def test_all_to_alls_are_sglangs() -> None:
    utils = importlib.import_module("sglang.srt.layers.moe.utils")
    assert capabilities.a2a_backends() == {member.value for member in utils.MoeA2ABackend}


def test_capabilities_are_sglangs() -> None:
    runners = importlib.import_module("sglang.srt.layers.moe.moe_runner")
    layers = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    assert capabilities.has_cores() is hasattr(runners, "register_moe_runner_core")
    assert capabilities.layer_decides() is hasattr(layers.FusedMoE, "_set_runner_flags")


def test_schemas_are_sglangs() -> None:
    """The schemas that are made of the sources are those of SGLang's own operators in this process."""
    for module in ("srt.layers.flashinfer_comm_fusion", "srt.distributed.parallel_state"):
        importlib.import_module(f"sglang.{module}")
    found = {name: str(getattr(torch.ops.sglang, name).default._schema) for name in capabilities.schemas()}
    # Schemas are compared parsed, because torch writes 1e-06 in another way.
    ours = {name: torch._C.parse_schema(f"sglang::{schema}") for name, schema in capabilities.schemas().items()}
    assert found == {name: str(schema) for name, schema in ours.items()}
    assert (capabilities.PLAIN in found) is hasattr(torch.ops.sglang, capabilities.PLAIN)


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from oxmoe.sglang import capabilities as c;"
        "c.swaps(), c.schemas(), c.fusion_flag(), c.missing(tuple(c.NEEDS)), c.layer_decides(), c.announces_updates();"
        "assert not [name for name in sys.modules if name.startswith('sglang')]"
    )
    done = forked.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_newer_adapter_has_more() -> None:
    """Each release has what the one before had."""
    found = (capabilities.has_cores(), capabilities.announces_updates(), capabilities.layer_decides())
    assert found == tuple(sorted(found, reverse=True))
    assert ("flashinfer_mxfp4" in capabilities.swaps()["moe"]) is capabilities.has_cores()


# Newer releases


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up a process with OXMOE_SGLANG=moe,allreduce and a release after the newest that is served."""
    monkeypatch.setenv(setting.SETTING, "moe,allreduce")
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.99.1")
    monkeypatch.setattr(oxmoe.sglang, "_active", {})


@of_newest
def test_nothing_is_missing_in_the_newest_release() -> None:
    assert capabilities.missing(PARTS) == []


@of_newest
def test_a_newer_release_starts_with_one_warning(
    asked: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = importlib.import_module(oxmoe.sglang.adapter_name())
    monkeypatch.setattr(adapter, "SWAPS", dict.fromkeys(adapter.SWAPS, lambda: "what"))
    monkeypatch.setattr("oxmoe.sglang.layers.watch", lambda *_: None)
    with caplog.at_level(logging.WARNING):
        oxmoe.sglang.install()
        oxmoe.sglang.install()
    assert caplog.messages == [
        f"oxmoe: SGLang 0.99.1 is newer than {capabilities.LAST}, the newest that oxmoe is tested with; all that it "
        "takes over is there"
    ]
    assert "newer than" in doctor._served("0.99.1") and "all that oxmoe takes over is there" in doctor._served("0.99.1")


def needed() -> list[tuple[str, str, str]]:
    """Returns (module, class or "", name) of everything that a newer release must have."""
    found = {}
    for part in PARTS:
        for place, wanted in capabilities.NEEDS[part].items():
            module, _, owner = place.partition(":")
            found |= {(module, owner, name): None for name in wanted.split()}
    return list(found)


@of_newest
@pytest.mark.parametrize(("module", "owner", "name"), needed(), ids=lambda text: text.rpartition(".")[2] or "-")
def test_a_newer_release_without_a_name_is_refused(
    module: str, owner: str, name: str, asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name counts, and the one line says which it is."""
    if owner:
        members = sources.members
        monkeypatch.setattr(sources, "members", lambda *of: members(*of) - ({name} if of == (module, owner) else set()))
    else:
        names = sources.names
        monkeypatch.setattr(sources, "names", lambda of: names(of) - ({name} if of == module else set()))
    place = f"{module}:{owner}" if owner else module
    if name == "register_moe_runner_core":
        # flashinfer_mxfp4 is then no part either, and the other names are still reported.
        assert "flashinfer_mxfp4" not in capabilities.swaps()["moe"]
    words = (
        f"SGLang 0.99.1 is newer than {capabilities.LAST}, .* has not what oxmoe takes over there: .*{name} in {place}"
    )
    with pytest.raises(RuntimeError, match=words) as refused:
        oxmoe.sglang.install()
    assert "\n" not in str(refused.value) and oxmoe.sglang.active() == ()
    assert f"{name} in {place}" in doctor._served("0.99.1")


@of_newest
@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (
            "srt/layers/flashinfer_comm_fusion.py",
            "    fp32_acc: bool = True,\n    use_attn_tp_group",
            "    fp32_acc: bool = True,\n    gemma: bool = False,\n    use_attn_tp_group",
            "the operator flashinfer_allreduce_residual_rmsnorm\\(input_tensor, residual, .*, use_attn_tp_group\\)",
        ),
        (
            "srt/layers/flashinfer_comm_fusion.py",
            "    max_token_num: int = 2048,",
            "    max_token_num: int = MAX_TOKENS,",
            "the signature of SGLang's flashinfer_allreduce_residual_rmsnorm is not understood: .*MAX_TOKENS",
        ),
        (
            "srt/model_executor/model_runner_components/weight_updater.py",
            "_derived_weight_cache_error",
            "_derived_error",
            "_derived_weight_cache_error in srt.model_executor",
        ),
        ("srt/arg_groups/fields/exec_.py", "    enable_eplb:", "    balance:", "the argument enable_eplb"),
    ],
    ids=["parameter", "default", "mention", "argument"],
)
def test_changed_sources_are_refused(
    file: str,
    old: str,
    new: str,
    words: str,
    asked: None,
    forgotten: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The test has a copy of the files that are read, one of them changed."""
    theirs = Path(next(iter(importlib.import_module("sglang").__path__)))
    for path in read_files(theirs):
        copied = tmp_path / path.relative_to(theirs)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(path.read_text())
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    monkeypatch.setattr(sources, "folder", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=words):
        oxmoe.sglang.install()


def read_files(folder: Path) -> list[Path]:
    modules = [place.partition(":")[0] for part in PARTS for place in capabilities.NEEDS[part]]
    modules += [module for wanted in capabilities.MENTIONS.values() for module in wanted]
    paths = [folder.joinpath(*module.split(".")) for module in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return [*files, *folder.joinpath("srt", "arg_groups", "fields").glob("*.py")]


@pytest.mark.parametrize("version", ["0.5.11", "0.4.99", "main"])
def test_older_releases_are_refused(version: str, asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: version)
    with pytest.raises(RuntimeError, match=f"SGLang {re.escape(version)} is .*; served are 0.5.12.post1 to "):
        oxmoe.sglang.install()
    assert doctor._served(version).startswith("not served")


def test_versions_are_compared_in_one_place() -> None:
    """No other module names a release as text that code compares; dispatch has the releases of names."""
    folder = Path(oxmoe.sglang.__file__).parent
    for path in [*folder.glob("*.py"), folder.parent / "tools" / "doctor.py"]:
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        versions = {text for text in texts if isinstance(text, str) and re.fullmatch(r"\d+\.\d+\.\d+\S*", text)}
        assert not versions or path.name in ("capabilities.py", "dispatch.py"), f"{path.name}: {versions}"
