"""benches/sglang/pack.py: which packages and files go into the archive, and what its copy of SGLang loads."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benches" / "sglang" / "pack.py"


@pytest.fixture(scope="module")
def pack() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FILE.parent))
        import pack

        yield pack
    sys.modules.pop("pack", None)


def test_packages_that_are_there_are_not_packed(pack: ModuleType) -> None:
    everything, some = pack.needed(set()), pack.needed({"typing-inspection", "pyyaml", "sglang-kernel"})
    assert {line.partition("==")[0] for line in set(everything) - set(some)} == {
        "typing-inspection",
        "PyYAML",
        "sglang-kernel",
    }
    assert pack.KERNEL in everything and any(line.startswith("sglang==") for line in some)
    assert pack.plain("Typing_Inspection") == "typing-inspection"


def test_files_that_no_server_reads_are_left_out(pack: ModuleType, tmp_path: Path) -> None:
    kept = [
        "sglang/srt/rust_extensions/torch_build.py",
        "sglang/test/test_utils.py",
        "sgl_kernel/sm90/common_ops.abi3.so",
        "soundfile.py",
        "pydantic/lib/x.py",
    ]
    left = [
        "sglang/srt/rust_extensions/_server.so",
        "sglang/test/kits/x.py",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "lib/libmscclpp.a",
    ]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in [*kept, *left]:
            wheel.writestr(name, name)
    pack.unpack([tmp_path / "a.whl"], tmp_path / "site")
    found = [str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()]
    assert sorted(found) == sorted(kept)


def test_sglang_loads_modules_that_were_compiled(
    pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    if version("sglang") != "0.5.23":
        pytest.skip("the file is that of SGLang 0.5.23")
    torch = pytest.importorskip("torch")
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]).parent  # type: ignore[union-attr,index]
    file = tmp_path / "moe_wna16_marlin.py"
    file.write_bytes((root / pack.MARLIN_FILE).read_bytes())
    pack.loads_compiled(file)
    with pytest.raises(SystemExit, match="expected the function that compiles Marlin's modules"):
        (tmp_path / "other.py").write_text("x = 1\n")
        pack.loads_compiled(tmp_path / "other.py")

    spec = importlib.util.spec_from_file_location("packed_marlin", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=lambda path: ("loaded", Path(path).name)))
    monkeypatch.setattr(module, "load_jit", lambda *args, **kwargs: "compiled")
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16}
    wanted = [(dtype, flags) for modules in pack.MARLIN.values() for dtype, flags in modules]
    assert len(set(wanted)) == len(wanted) == 8
    for dtype, flags in wanted[:3]:
        name = "-".join(["marlin", pack.DTYPES[dtype], *(str(int(flag)) for flag in flags)]) + ".so"
        (tmp_path / name).touch()
        assert module._jit_moe_wna16_marlin_module(dtypes[dtype], *flags) == ("loaded", name)
    dtype, flags = wanted[3]
    assert module._jit_moe_wna16_marlin_module(dtypes[dtype], *flags) == "compiled"
