"""The parts of build_flashinfer.py that need no flashinfer, on files that these tests write."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import build_flashinfer
from build_flashinfer import FORMATS, NOT_BUILT, Module, needed, partial, report, split

RUNNERS = """#include "kernels.cuh"
namespace kernels {
#ifdef ENABLE_BF16
template class CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;
template class CutlassMoeFCRunner<__nv_bfloat16, uint8_t>;
#endif
template class CutlassMoeFCRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, half, __nv_fp8_e4m3,
                                  half, true>;
template class CutlassMoeFCRunner<__nv_bfloat16, Fp4Type>;
INSTANTIATE_FINALIZE_MOE_ROUTING(half, half, half);
}
"""
# Outputs of runners; the last one has block scales.
OUTPUTS = ("half", "__nv_bfloat16", "__nv_bfloat16, __nv_bfloat16, true")
MACRO = "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, {}, {}, half, Default)"
TEMPLATE = "template void sm90_generic_mixed_moe_gemm_kernelLauncher<{}, {}, half,\nDefault>();"


def pairs(*formats: str) -> set[tuple[str, str]]:
    return {FORMATS[name] for name in formats}


@pytest.mark.parametrize(
    ("text", "format"),
    [
        (MACRO.format("half", "half"), "f16"),
        (MACRO.format("__nv_fp8_e4m3", "__nv_fp8_e4m3"), "fp8_tensor"),
        (TEMPLATE.format("__nv_bfloat16", "SafeFP4"), "mxfp4"),
        (TEMPLATE.format("__nv_fp8_e4m3", "cutlass::uint4b_t") + MACRO.format("half", "half"), "f16"),
    ],
)
def test_generated_files(text: str, format: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels_sm90_M128_group0.generated.cu"
    file.write_text(text)
    assert [name for name in FORMATS if needed(file, pairs(name))] == [format]


def test_other_files(tmp_path: Path) -> None:
    """Runners have their types in their names; files of all formats and of sm_80's kernels are always compiled."""
    for name, expected in (("moe_gemm_kernels_bf16_fp8", {"fp8_block"}), ("moe_gemm_kernels_fp16_uint4", set())):
        assert {word for word in FORMATS if needed(tmp_path / f"{name}.cu", pairs(word))} == expected
    for name in ("binding.cu", "logger.cpp", "kernels_sm80_M16_group0.generated.cu"):
        assert needed(tmp_path / name, set())


def test_split(tmp_path: Path) -> None:
    """Each runner of the formats gets a file, with the code around it. Code after the runners is in one of the
    files."""
    source, other = tmp_path / "of_flashinfer" / "cutlass_fused_moe_instantiation.cu", tmp_path / "binding.cu"
    source.parent.mkdir()
    source.write_text(RUNNERS)
    spec = SimpleNamespace(sources=[other, source], extra_include_dirs=[tmp_path])
    split(spec, pairs("bf16", "fp8_tensor"), False, tmp_path / "made")
    *made, last, throws = spec.sources
    assert last == other and NOT_BUILT in throws.read_text() and spec.extra_include_dirs == [tmp_path, source.parent]
    texts = [file.read_text() for file in made]
    classes = [[line for line in text.splitlines() if "template class" in line] for text in texts]
    assert [len(lines) for lines in classes] == [1, 1]
    assert "<__nv_bfloat16, __nv_bfloat16>" in texts[0] and "half, true>;" in texts[1]
    assert ["INSTANTIATE_FINALIZE" in text for text in texts] == [True, False]
    assert all(text.startswith('#include "kernels.cuh"') and text.count("#endif") == 1 for text in texts)
    with pytest.raises(SystemExit, match="expected a file of its runners"):
        spec.sources[:] = [source]
        split(spec, {("fp16", "uint8")}, False, tmp_path / "made")


def test_untuned_mixed(tmp_path: Path) -> None:
    """Without kernels for the autotuner there are two of mixed types, a file each."""
    kernel = (
        "template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_bfloat16, {}, half,\n"
        "cute::Shape<cute::Int<{}>, cute::Int<{}>, cute::Int<{}>>, "
        "cute::Shape<cute::Int<{}>, cute::Int<1>, cute::Int<1>>, "
        "cutlass::gemm::KernelTmaWarpSpecialized{}, Default>(int);\n"
    )
    first, other = ("SafeFP4", 64, 16, 128, 1, "Pingpong"), ("SafeFP4", 128, 64, 256, 1, "Cooperative")
    not_taken = [
        ("SafeFP4", 64, 16, 128, 2, "Pingpong"),
        ("SafeFP4", 128, 64, 256, 1, "Pingpong"),
        ("cutlass::uint4b_t", 64, 16, 128, 1, "Pingpong"),
        ("SafeFP4", 64, 16, 256, 1, "Pingpong"),
    ]
    mixed = tmp_path / "kernels_sm90_M64_Mixed_group0.generated.cu"
    mixed.write_text(
        "".join(["// head\n", *(kernel.format(*values) for values in (first, *not_taken, other)), "// tail\n"])
    )
    spec = SimpleNamespace(sources=[mixed], extra_include_dirs=None)
    split(spec, pairs("mxfp4", "bf16"), True, tmp_path / "made")
    expected = [f"// head\n{kernel.format(*values)}// tail\n" for values in (first, other)]
    *made, throws = (file.read_text() for file in spec.sources)
    assert made == expected and NOT_BUILT in throws
    spec.sources[:] = [mixed]
    with pytest.raises(SystemExit, match="got none"):
        split(spec, pairs("mxfp4"), False, tmp_path / "made")


def test_untuned_equal(tmp_path: Path) -> None:
    """Without kernels for the autotuner there is one of equal types, and none of sm_80."""

    def kernel(*words: object) -> str:
        given = ", ".join(map(str, words))
        return f"#if defined(ENABLE_FP8)\n    INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, {given});\n#endif\n"

    fp8, plain = "__nv_fp8_e4m3", "false, false, false, false"
    first = (fp8, fp8, "__nv_bfloat16", "void", "EpilogueOpDefault", "NONE", 128, 16, 128, 1, 1, 1, plain)
    not_taken = [
        (fp8, fp8, "half", *first[3:]),
        (*first[:5], "FINALIZE", *first[6:]),
        (*first[:7], 32, *first[8:]),
        (*first[:9], 2, 1, 1, plain),
        (*first[:12], "false, false, false, true"),
        (*first[:12], "true, false, false, false"),
        ("half", "half", "half", *first[3:8], 64, *first[9:]),
    ]
    dense = tmp_path / "kernels_sm90_M128_group0.generated.cu"
    dense.write_text("".join(kernel(*words) for words in (not_taken[0], first, *not_taken[1:])))
    old = tmp_path / "kernels_sm80_M16_group0.generated.cu"
    old.write_text("template void sm80_generic_fused_moe_gemm_kernelLauncher<half>();\n")
    spec = SimpleNamespace(sources=[dense, old], extra_include_dirs=None)
    split(spec, pairs("fp8_tensor", "bf16"), True, tmp_path / "made")
    made, throws = spec.sources
    assert kernel(*first) in made.read_text() and made.read_text().count("INSTANTIATE") == 1
    assert NOT_BUILT in throws.read_text()


def test_untuned_runners(tmp_path: Path) -> None:
    """The layer's code and its GEMMs' code have one runner a format, whose output is the tests'. GEMMs of equal types
    do not fall back to kernels for older GPUs."""
    layers = tmp_path / "cutlass_fused_moe_instantiation.cu"
    layers.write_text(
        RUNNERS.replace("half, true>", "__nv_bfloat16, true>")
        + "template class CutlassMoeFCRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, half>;\n"
        + "template class CutlassMoeFCRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16>;\n"
    )
    equal, mixed, other = (tmp_path / f"moe_gemm_kernels_{types}.cu" for types in ("fp8_fp8", "bf16_fp8", "bf16_uint8"))
    head = '// head\n#include "moe_gemm_template_dispatch.h"\n\nnamespace kernels {\n'
    fp8 = [f"template class MoeGemmRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, {output}>;\n" for output in OUTPUTS]
    equal.write_text(head + "".join(fp8) + "}\n")
    runner = "template class MoeGemmRunner<__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16>;\n"
    mixed.write_text(head + runner + "}\n")
    other.write_text(head + "template class MoeGemmRunner<__nv_bfloat16, uint8_t, __nv_bfloat16>;\n}\n")
    spec = SimpleNamespace(sources=[layers, equal, mixed, other], extra_include_dirs=None)
    split(spec, pairs("fp8_tensor", "fp8_block"), True, tmp_path / "made")
    layer, of_equal, of_mixed, _ = (file.read_text() for file in spec.sources)
    assert "<__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16>;" in layer and layer.count("template class") == 1
    assert of_mixed == head + runner + "}\n"
    before, _, after = head.partition("\n\n")
    assert of_equal.startswith(before) and of_equal.endswith(f"{after}{fp8[1]}}}\n")
    assert "struct genericMoeGemmKernelLauncher<__nv_fp8_e4m3, __nv_fp8_e4m3, Output" in of_equal


def test_partial(tmp_path: Path) -> None:
    """The link of a partial module has the objects of its formats alone, under a name of its own."""
    for name in ("moe_gemm_kernels_bf16_bf16.cu", "moe_gemm_kernels_fp16_fp16.cu"):
        (tmp_path / name).touch()
    objects = [tmp_path / "bf16.o", tmp_path / "fp16.o"]
    linked, ninja = tmp_path / "m.so", tmp_path / "build.ninja"
    ninja.write_text(
        f"ldflags = -shared $\n    -lcuda\nrule cuda_compile\n  command = nvcc $in\n"
        f"build {objects[0]}: cuda_compile {tmp_path}/moe_gemm_kernels_bf16_bf16.cu\n"
        f"build {objects[1]}: cuda_compile {tmp_path}/moe_gemm_kernels_fp16_fp16.cu\n"
        f"build {linked}: link {objects[0]} {objects[1]}\ndefault {linked}\n"
    )
    module = partial(Module("m", ninja, linked, tmp_path / "aot" / "m.so"), ["bf16"])
    lines = module.ninja.read_text().splitlines()
    assert f"build {tmp_path}/m_bf16.so: link_without {objects[0]}" in lines
    assert not any(line.startswith(f"build {linked}:") for line in lines)
    assert "ldflags = -shared -lcuda" in lines and module.linked == tmp_path / "m_bf16.so"
    with pytest.raises(SystemExit, match="expected generated files of more formats than bf16,f16"):
        partial(Module("m", ninja, linked, linked), ["bf16", "f16"])
    module = partial(Module("m", ninja, linked, linked), ["bf16", "f16"], untuned=True)
    assert module.linked == tmp_path / "m_bf16_f16_untuned.so"


def test_left_out(tmp_path: Path) -> None:
    """A module without some kernels loads and runs, and the call of a missing kernel throws, which its caller catches.
    Two files may define the same symbol."""
    same = "namespace cutlass { int missing(); int given() { return 7; } }\n"
    (tmp_path / "a.cc").write_text(
        same + 'extern "C" int call(int which) { try { return which ? cutlass::missing() : cutlass::given(); } '
        "catch (int thrown) { return thrown; } }\n"
    )
    (tmp_path / "b.cc").write_text(same + 'extern "C" [[noreturn]] void oxmoe_not_built() { throw 5; }\n')
    for name in "ab":
        command = ["g++", "-fPIC", "-c", str(tmp_path / f"{name}.cc"), "-o", str(tmp_path / f"{name}.o")]
        subprocess.run(command, check=True)
    made = tmp_path / "m.so"
    command = [sys.executable, build_flashinfer.__file__, "--link", made, tmp_path / "a.o", tmp_path / "b.o", "-shared"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == "m.so: 1 functions of kernels were left out\n"
    module = ctypes.CDLL(str(made))
    assert [module.call(which) for which in (0, 1)] == [7, 5]


def test_data_is_not_left_out(tmp_path: Path) -> None:
    source, made = tmp_path / "a.cc", tmp_path / "a.o"
    source.write_text("namespace cutlass { struct A { virtual ~A(); }; A *make() { return new A(); } }\n")
    subprocess.run(["g++", "-fPIC", "-c", source, "-o", made], check=True)
    command = [sys.executable, build_flashinfer.__file__, "--link", tmp_path / "m.so", made, "-shared"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0 and "expected that functions alone are left out, got _ZTVN7cutlass1AE" in run.stderr


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built, failed = (
        Module(name, tmp_path, tmp_path / name / "m.so", tmp_path / "aot" / name / "m.so") for name in ("one", "two")
    )
    rows = [(0, 4000, tmp_path / "one" / "a.o"), (0, 9500, tmp_path / "one" / "b.o"), (9500, 9600, built.place)]
    log = "# ninja log v7\n" + "".join(f"{start}\t{end}\t1\t{out}\tabc\n" for start, end, out in rows)
    (tmp_path / ".ninja_log").write_text(log)
    report([built, failed], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one: in place after 10 s; 2 files took 14 s together"
    assert lines[1].split() == ["9.5", "s", "b.o"]
    assert lines[3] == "two: not built; 0 files took 0 s together"


@pytest.mark.parametrize("arguments", [["fused_moe_91"], ["--formats", "bf16,int3"], ["--untuned"]])
def test_refusals(arguments: list[str]) -> None:
    run = subprocess.run([sys.executable, build_flashinfer.__file__, *arguments], capture_output=True, text=True)
    assert run.returncode == 2 and ": expected " in run.stderr
