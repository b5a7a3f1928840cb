//! Quantisers, packing of weights, and the dense GEMM.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
        type Tile = crate::params::common::ffi::Tile;
    }

    /// A checkpoint's MXFP4 matrices and their packed form (csrc/common/mxfp4.cuh), either of which is made from the other, or their
    /// form for e4m3 (csrc/common/mxfp4_e4m3.cuh); or MXFP8 matrices and theirs (csrc/common/mxfp8.cuh).
    #[derive(Clone, Copy, Debug)]
    struct PackMxfp4Params {
        /// `[experts, rows, 16 * row_blocks]` bytes of codes (MXFP8: 32), E8M0 `[experts, rows, row_blocks]`.
        codes: *mut u8,
        scales: *mut u8,
        row_blocks: i32,
        experts: i32,
        rows: i32,
        /// Rows and columns that are packed; the others become padding, and no scale of theirs counts. All rows where `gated`.
        used_rows: i32,
        k: i32,
        /// Rows are gate and up rows in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// fp32 `[experts]`.
        expert_scales: *mut f32,
        /// Packing for e4m3 activations.
        e4m3: bool,
    }

    /// Other projects' layouts of MXFP4 weights (src/quant/layouts/).
    #[repr(i32)]
    #[derive(Debug)]
    enum Mxfp4Layout {
        /// triton_kernels.
        Hopper = 0,
        /// flashinfer's CUTLASS kernels, 0.6: rows r and r + 8 side by side.
        CutlassPairs = 1,
        /// The same, 0.7: Hopper's words in the same places.
        CutlassSpread = 2,
    }

    /// MXFP4 codes or scales of a checkpoint in another layout, or back.
    #[derive(Clone, Copy, Debug)]
    struct LayoutMxfp4Params {
        input: *const u8,
        output: *mut u8,
        layout: Mxfp4Layout,
        /// Rows that the layout keeps together.
        band_rows: u32,
        /// Of the checkpoint's matrices, columns in bytes; the layout's have its padding, which becomes zeros and is left out.
        rows: u32,
        columns: u32,
        held_rows: u32,
        held_columns: u32,
    }

    /// Numbers and their MXFP4, either of which is made from the other: blocks of 32 numbers, 16 bytes of codes and a scale byte.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeMxfp4Params {
        /// In `dtype`.
        numbers: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        blocks: i64,
        dtype: Dtype,
        /// Quantising: scales are rounded so that nothing is clipped, else as the OCP specification has it.
        up: bool,
    }

    /// Numbers to e2m1, two a byte, with a scale for each block of columns: NVFP4 or MXFP4 (src/quant/nvfp4.rs).
    #[derive(Clone, Copy, Debug)]
    struct QuantizeNvfp4Params {
        /// `[batches, rows, columns]` in `dtype`.
        x: *const u8,
        dtype: Dtype,
        /// `[batches, rows, columns / 2]`.
        codes: *mut u8,
        /// Of each batch `[rows, columns / block]`, both padded where `tile_rows` (128 or 8; 0: row by row) has tiles. Padding becomes 0.
        scales: *mut u8,
        tile_rows: i32,
        batches: i32,
        rows: i32,
        columns: i32,
        /// 16 or 32 columns, and whether scales are powers of two (E8M0), else e4m3.
        block: i32,
        powers: bool,
        /// fp32, what numbers are multiplied by: one, or `[batches]`, or (`inverse`) what they are divided by. Null: 1.
        global_scale: *const f32,
        of_batch: bool,
        inverse: bool,
        /// i32 `[batches]` or null: rows of a batch from there on are left alone, and so are their codes and scales.
        row_counts: *const i32,
    }

    /// Scales of e4m3 rows: of a group's amax, of a row's (for its groups), of `given` as that of all rows, or `given` itself.
    #[repr(i32)]
    #[derive(Debug)]
    enum Fp8Scaling {
        Groups = 0,
        Rows = 1,
        Peak = 2,
        Given = 3,
    }

    /// Rows of numbers to e4m3 with a scale for each group of columns: amax / 448, or the next power of two.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeFp8Params {
        /// `[rows, columns]` in `dtype`.
        x: *const u8,
        dtype: Dtype,
        /// e4m3 `[rows, columns]`.
        codes: *mut u8,
        /// fp32, or E8M0 bytes, four groups of a row a word (`powers`).
        scales: *mut u8,
        rows: i64,
        /// Device scalar or null: rows from this one on are left alone.
        row_count: *const i32,
        /// A multiple of `group`: 16, 32, 64 or 128.
        columns: i32,
        group: i32,
        /// Scales (words) between neighbouring rows and groups (fours of groups).
        row_stride: i64,
        group_stride: i64,
        /// Least amax.
        eps: f32,
        /// Scales are powers of two, as bytes. Only of `Groups`.
        powers: bool,
        /// A schedule of tiles of up to `tile_rows` rows, or null: rows outside it are left alone.
        tiles: *const Tile,
        tile_count: *const i32,
        tile_rows: i32,
        scaling: Fp8Scaling,
        /// One fp32. `QuantizeFp8Peak` raises it to the largest magnitude of all rows.
        given: *mut f32,
        /// Of `Rows`: threads of a row, a power of two up to 256.
        row_threads: i32,
        /// Of `QuantizeFp8Slots`: the places that a row and its scales go to, i32 `[rows, top_k]`, -1: none. Else null.
        place_of_slot: *const i32,
        top_k: i32,
        /// x was there before the launch before, which knows nothing of what is written: the kernel runs beside that one (`pdl::run`).
        x_is_older: bool,
    }

    /// Scales of given e4m3 rows, in whatever order or form, as the GEMMs read them: fp32 `[rows, groups]`.
    #[derive(Clone, Copy, Debug)]
    struct ExpandScalesParams {
        /// fp32, or int32 of four E8M0 bytes (`powers`), the first group lowest. Strides count them, 0 where some share one.
        scales: *const u8,
        powers: bool,
        row_stride: i64,
        group_stride: i64,
        table: *mut f32,
        rows: i32,
        groups: i32,
        /// As `x_is_older` above.
        scales_are_older: bool,
    }

    /// The E8M0 bytes of a matrix, one for each block of a row's columns.
    #[derive(Clone, Copy, Debug)]
    struct ScaleView {
        data: *const u8,
        /// Tiles of 128 or 8 rows by 4 blocks (src/quant/nvfp4.rs); 0: two strides.
        tile_rows: i32,
        row_stride: i64,
        block_stride: i64,
    }

    /// `out[m, n] = a[m, k] b[n, k]^T` of e4m3 with scales for 32 columns.
    #[derive(Clone, Copy, Debug)]
    struct MmMxfp8Params {
        /// e4m3 `[m, k]` and `[n, k]`, k a multiple of 32.
        a: *const u8,
        b: *const u8,
        a_scales: ScaleView,
        b_scales: ScaleView,
        /// bf16, f16 or fp32 `[m, n]`.
        out: *mut u8,
        out_dtype: Dtype,
        m: i32,
        n: i32,
        k: i32,
        /// CTAs that share K. One: the first `shared_tiles` are cut into runs of K for all CTAs, the others are whole CTAs'.
        splits: i32,
        shared_tiles: i32,
        /// a as bf16 in the order that csrc/gemm/mm_mxfp8_wide_sm90.cuh reads, for tiles of `tile_tokens`; else null.
        tokens: *mut u8,
        tile_tokens: i32,
        /// Of CTAs' warpgroups that leave a tile to another CTA: their sums, and a number each that is 1 once they are there.
        partial_sums: *mut u8,
        arrived: *mut i32,
        arrivals: i32,
    }

    /// Rows of numbers to MXFP8: e4m3 with a scale for 32 columns, and back.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeMxfp8Params {
        /// `[rows, columns]` in `dtype`.
        numbers: *mut u8,
        dtype: Dtype,
        /// e4m3 `[rows, padded_columns]`, zeros from `columns` on.
        codes: *mut u8,
        scales: *mut u8,
        /// 128, 8, or 0 for scales row by row; those of rows and blocks up to the tiles' ends are 0.
        tile_rows: i32,
        rows: i64,
        columns: i32,
        padded_columns: i32,
    }

    /// Rows of bf16 to e4m3 with one scale each: scale = amax / 448, or 1 where that is less than 2^-126. Rounding to MXFP8 takes it too:
    /// then `out` has bf16 numbers, perhaps over x, and `scales` is null.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeRowsParams {
        /// bf16 `[rows, columns]`.
        x: *const u8,
        /// e4m3 `[rows, out_columns]`, zeros from `columns` on. The CPU backend of a layer writes bf16 numbers, perhaps over x.
        out: *mut u8,
        /// `[rows]`.
        scales: *mut f32,
        rows: i32,
        columns: i32,
        out_columns: i32,
        /// A schedule or null: rows are places, and those after its last one are left alone.
        tiles: *const Tile,
        tile_count: *const i32,
        /// As in `QuantizeFp8Params`.
        x_is_older: bool,
    }

    /// E8M0 bytes of fp32 powers of two.
    #[derive(Clone, Copy, Debug)]
    struct ScaleBytesParams {
        scales: *const f32,
        bytes: *mut u8,
        count: i64,
        /// Unsigned, all ones before the launch: the least index of a number that is no power of two.
        first_wrong: *mut i64,
    }
}
