//! Kernels that change numbers and layouts: activations that are rounded on their way, weights that are packed at load, dense tensors.

use super::*;

/// A quantiser of activations to e4m3 with fp32 scales.
const fn fp8(family: Family, name: &'static str, device_type: &'static str, header: &'static str) -> Row {
    Row { threads: |_| 256, ctas: |_| 6, ..Row::new(family, name, device_type, header) }
}

/// Quantises rows to e4m3 with a scale for each group of columns.
pub const QUANTIZE_FP8: Kernels<QuantizeFp8Params> = Kernels::new(Row {
    traits: |_| &[Trait::Streams],
    ..fp8(Family::QuantizeFp8, "quantize_fp8", "QuantizeFp8", "quant/quantize_fp8.cuh")
});
/// Quantises a schedule's rows to e4m3 with a scale for each group of columns.
pub const QUANTIZE_FP8_TILES: Kernels<QuantizeFp8Params> =
    Kernels::new(fp8(Family::QuantizeFp8Tiles, "quantize_fp8_tiles", "QuantizeFp8Tiles", "quant/quantize_fp8.cuh"));
/// Quantises rows to e4m3 with a scale for each group of columns, and writes each row to several places.
pub const QUANTIZE_FP8_SLOTS: Kernels<QuantizeFp8Params> = Kernels::new(Row {
    hopper: true,
    ..fp8(Family::QuantizeFp8Slots, "quantize_fp8_slots", "QuantizeFp8Slots", "quant/quantize_fp8_slots.cuh")
});
/// Quantises rows to e4m3 with one scale a row, which is stored for each group of the row.
pub const QUANTIZE_FP8_ROWS: Kernels<QuantizeFp8Params> =
    Kernels::new(fp8(Family::QuantizeFp8Rows, "quantize_fp8_rows", "QuantizeFp8Rows", "quant/quantize_fp8_rows.cuh"));
/// Finds the largest magnitude of all rows.
pub const QUANTIZE_FP8_PEAK: Kernels<QuantizeFp8Params> =
    Kernels::new(fp8(Family::QuantizeFp8Peak, "quantize_fp8_peak", "QuantizeFp8Peak", "quant/quantize_fp8_rows.cuh"));
/// Quantises a schedule's rows to e4m3 with one scale a row, which is stored for each group of the row.
pub const QUANTIZE_FP8_TILE_ROWS: Kernels<QuantizeFp8Params> = Kernels::new(fp8(
    Family::QuantizeFp8TileRows,
    "quantize_fp8_tile_rows",
    "QuantizeFp8TileRows",
    "quant/quantize_fp8_rows.cuh",
));
/// Finds the largest magnitude of a schedule's rows.
pub const QUANTIZE_FP8_TILE_PEAK: Kernels<QuantizeFp8Params> = Kernels::new(fp8(
    Family::QuantizeFp8TilePeak,
    "quantize_fp8_tile_peak",
    "QuantizeFp8TilePeak",
    "quant/quantize_fp8_rows.cuh",
));
/// Brings a caller's scales into the order that GEMMs read.
pub const EXPAND_SCALES: Kernels<ExpandScalesParams> =
    Kernels::new(fp8(Family::ExpandScales, "expand_scales", "ExpandScales", "quant/expand_scales.cuh"));

/// Quantises rows of bf16 to e4m3 with one scale a row.
pub const QUANTIZE_ROWS_E4M3: Kernels<QuantizeRowsParams> = Kernels::new(Row {
    hopper: true,
    threads: |_| 128,
    ctas: |_| 8,
    ..Row::new(Family::QuantizeRowsE4m3, "quantize_rows_e4m3", "QuantizeRowsE4m3", "quant/quantize_rows_e4m3.cuh")
});
/// Quantises a schedule's rows of bf16 to e4m3 with one scale a row.
pub const QUANTIZE_TILES_E4M3: Kernels<TileRowsParams> = Kernels::new(Row {
    family: Family::QuantizeTilesE4m3,
    name: "quantize_tiles_e4m3",
    device_type: "QuantizeTilesE4m3",
    header: "quant/quantize_rows_e4m3.cuh",
    ..QUANTIZE_ROWS_E4M3.row
});

/// Rounds rows of bf16 to the numbers of MXFP8. Six CTAs have all threads of a multiprocessor of sm_86, 89 and 120.
pub const ROUND_ROWS_MXFP8: Kernels<QuantizeRowsParams> = Kernels::new(Row {
    threads: |_| 256,
    ctas: |_| 6,
    traits: |_| &[Trait::Streams],
    ..Row::new(Family::RoundRowsMxfp8, "round_rows_mxfp8", "RoundRowsMxfp8", "quant/round_rows_mxfp8.cuh")
});
/// Rounds a schedule's rows of bf16 to the numbers of MXFP8, on Hopper.
pub const ROUND_TILES_MXFP8: Kernels<TileRowsParams> = Kernels::new(Row {
    hopper: true,
    threads: |_| 256,
    ctas: |_| 8,
    ..Row::new(Family::RoundTilesMxfp8, "round_tiles_mxfp8", "RoundTilesMxfp8", "quant/round_tiles_mxfp8.cuh")
});
/// Rounds a schedule's rows of bf16 to the numbers of MXFP8, on other GPUs.
pub const ROUND_TILES_MXFP8_PORTABLE: Kernels<TileRowsParams> = Kernels::new(Row {
    family: Family::RoundTilesMxfp8Portable,
    name: "round_tiles_mxfp8_portable",
    unit: "round_tiles_mxfp8_portable",
    hopper: false,
    ctas: |_| 6,
    ..ROUND_TILES_MXFP8.row
});

/// Rounds rows of bf16 to the numbers of NVFP4, or expands NVFP4's codes to them, on Hopper.
pub const ROUND_ROWS_NVFP4: Kernels<RoundNvfp4Params> = Kernels::new(Row {
    hopper: true,
    threads: |_| 256,
    ctas: |_| 8,
    ..Row::new(Family::RoundRowsNvfp4, "round_rows_nvfp4", "RoundRowsNvfp4", "quant/round_rows_nvfp4.cuh")
});
/// Rounds rows of bf16 to the numbers of NVFP4, or expands NVFP4's codes to them, on other GPUs.
pub const ROUND_ROWS_NVFP4_PORTABLE: Kernels<RoundNvfp4Params> = Kernels::new(Row {
    family: Family::RoundRowsNvfp4Portable,
    name: "round_rows_nvfp4_portable",
    unit: "round_rows_nvfp4_portable",
    hopper: false,
    ctas: |_| 6,
    ..ROUND_ROWS_NVFP4.row
});

/// Blocks of 64 x 64 weights that a CTA of the packers takes.
pub const PACK_BLOCKS: u32 = 4;

/// A kernel that brings weights into the packed form or back.
const fn pack(family: Family, name: &'static str, device_type: &'static str, header: &'static str) -> Row {
    Row { threads: |_| 128 * PACK_BLOCKS, ctas: |_| 2, ..Row::new(family, name, device_type, header) }
}

/// A kernel that finds every expert's shift, before the packers run.
const fn peak(family: Family, name: &'static str, device_type: &'static str, header: &'static str) -> Row {
    Row { threads: |_| 1024, ctas: |_| 1, ..pack(family, name, device_type, header) }
}

pub const MXFP4_PEAK: Kernels<PackMxfp4Params> =
    Kernels::new(peak(Family::Mxfp4Peak, "mxfp4_peak", "Mxfp4Peak", "quant/pack_mxfp4.cuh"));
pub const MXFP4_PACK: Kernels<PackMxfp4Params> =
    Kernels::new(pack(Family::Mxfp4Pack, "mxfp4_pack", "Mxfp4Pack", "quant/pack_mxfp4.cuh"));
pub const MXFP4_UNPACK: Kernels<PackMxfp4Params> =
    Kernels::new(pack(Family::Mxfp4Unpack, "mxfp4_unpack", "Mxfp4Unpack", "quant/pack_mxfp4.cuh"));
pub const MXFP8_PEAK: Kernels<PackMxfp4Params> =
    Kernels::new(peak(Family::Mxfp8Peak, "mxfp8_peak", "Mxfp8Peak", "quant/pack_mxfp8.cuh"));
pub const MXFP8_PACK: Kernels<PackMxfp4Params> =
    Kernels::new(pack(Family::Mxfp8Pack, "mxfp8_pack", "Mxfp8Pack", "quant/pack_mxfp8.cuh"));
/// Packs weights of a packed form (`forms.rs`).
pub const PACK: Kernels<PackParams> = Kernels::new(Row {
    arguments: &[Argument::Packer],
    unit: "pack_{form}",
    ..pack(Family::Pack, "{form}_pack", "Pack", "quant/pack.cuh")
});

pub const fn pack_of(form: Form) -> Kernel<PackParams> {
    PACK.with(Variant { form, ..Variant::NONE })
}

/// Makes E8M0 bytes of fp32 powers of two.
pub const MXFP4_SCALE_BYTES: Kernels<ScaleBytesParams> = Kernels::new(Row {
    threads: |_| 256,
    ctas: |_| 4,
    ..Row::new(Family::Mxfp4ScaleBytes, "mxfp4_scale_bytes", "Mxfp4ScaleBytes", "quant/pack_mxfp4.cuh")
});

/// Converts MXFP4 codes to another project's layout, or back to the checkpoint's form.
pub const MXFP4_LAYOUT_CODES: Kernels<LayoutMxfp4Params> = Kernels::new(Row {
    arguments: &[Argument::Flag("", "_back")],
    threads: |_| 128,
    ctas: |_| 8,
    ..Row::new(Family::Mxfp4LayoutCodes, "mxfp4_layout_codes", "Mxfp4LayoutCodes", "quant/layouts_mxfp4.cuh")
});
/// Converts MXFP4 scales to another project's layout, or back to the checkpoint's form.
pub const MXFP4_LAYOUT_SCALES: Kernels<LayoutMxfp4Params> = Kernels::new(Row {
    family: Family::Mxfp4LayoutScales,
    name: "mxfp4_layout_scales",
    device_type: "Mxfp4LayoutScales",
    ..MXFP4_LAYOUT_CODES.row
});

/// Quantises numbers to MXFP4.
pub const QUANTIZE_MXFP4: Kernels<QuantizeMxfp4Params> = Kernels::new(Row {
    threads: |_| 256,
    ctas: |_| 4,
    ..Row::new(Family::QuantizeMxfp4, "mxfp4_quantize", "Mxfp4Quantize", "quant/quantize_mxfp4.cuh")
});
/// Dequantises MXFP4.
pub const DEQUANTIZE_MXFP4: Kernels<QuantizeMxfp4Params> = Kernels::new(Row {
    family: Family::DequantizeMxfp4,
    name: "mxfp4_dequantize",
    device_type: "Mxfp4Dequantize",
    ..QUANTIZE_MXFP4.row
});

/// Vectors of eight numbers that a thread of `QuantizeMxfp4` and `DequantizeMxfp4` takes.
#[allow(dead_code)] // the build script does not launch
pub const QUANTIZE_UNITS: u32 = 2;

/// Quantises numbers to MXFP8.
pub const QUANTIZE_MXFP8: Kernels<QuantizeMxfp8Params> = Kernels::new(Row {
    threads: |_| 256,
    ctas: |_| 4,
    ..Row::new(Family::QuantizeMxfp8, "quantize_mxfp8", "QuantizeMxfp8", "quant/quantize_mxfp8.cuh")
});
/// Dequantises MXFP8.
pub const DEQUANTIZE_MXFP8: Kernels<QuantizeMxfp8Params> = Kernels::new(Row {
    family: Family::DequantizeMxfp8,
    name: "dequantize_mxfp8",
    device_type: "DequantizeMxfp8",
    ..QUANTIZE_MXFP8.row
});

/// Quantises numbers to NVFP4 in blocks of 16, or to MXFP4 in blocks of 32. The fp32 numbers of a block take as many registers.
pub const QUANTIZE_NVFP4: Kernels<QuantizeNvfp4Params> = Kernels::new(Row {
    arguments: &[BLOCKS],
    threads: |_| 256,
    ctas: |v| if v.blocks == 32 { 2 } else { 4 },
    ..Row::new(Family::QuantizeNvfp4, "nvfp4_quantize", "QuantizeNvfp4", "quant/quantize_nvfp4.cuh")
});

pub const fn layout(scales: bool, back: bool) -> Kernel<LayoutMxfp4Params> {
    let kernels = if scales { &MXFP4_LAYOUT_SCALES } else { &MXFP4_LAYOUT_CODES };
    kernels.kernel().flag(back)
}

pub const fn quantize_nvfp4(block: u32) -> Kernel<QuantizeNvfp4Params> {
    QUANTIZE_NVFP4.with(Variant { blocks: block, ..Variant::NONE })
}

/// Kernels that convert MXFP4 weights to the packed form and to other forms.
pub const CONVERSIONS: [Variant; 10] = [
    Variant::of(Family::Mxfp4Peak),
    Variant::of(Family::Mxfp4Pack),
    Variant::of(Family::Mxfp4Unpack),
    Variant::of(Family::Mxfp4ScaleBytes),
    layout(false, false).variant(),
    layout(false, true).variant(),
    layout(true, false).variant(),
    layout(true, true).variant(),
    Variant::of(Family::QuantizeMxfp4),
    Variant::of(Family::DequantizeMxfp4),
];

/// Kernels that round activations on their way.
const ROUNDINGS: [Family; 15] = [
    Family::QuantizeRowsE4m3,
    Family::QuantizeTilesE4m3,
    Family::QuantizeFp8,
    Family::QuantizeFp8Tiles,
    Family::QuantizeFp8Slots,
    Family::QuantizeFp8Rows,
    Family::QuantizeFp8Peak,
    Family::QuantizeFp8TileRows,
    Family::QuantizeFp8TilePeak,
    Family::ExpandScales,
    Family::RoundRowsMxfp8,
    Family::RoundTilesMxfp8,
    Family::RoundTilesMxfp8Portable,
    Family::RoundRowsNvfp4,
    Family::RoundRowsNvfp4Portable,
];

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let packers = [Family::Mxfp8Peak, Family::Mxfp8Pack].map(Variant::of);
    let dense = [Family::QuantizeMxfp8, Family::DequantizeMxfp8].map(Variant::of);
    let mut all = ROUNDINGS.map(Variant::of).to_vec();
    all.extend(CONVERSIONS);
    all.extend(packers.into_iter().chain(dense).chain([16, 32].map(|block| quantize_nvfp4(block).variant())));
    all
}
