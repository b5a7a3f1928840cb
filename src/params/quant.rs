//! Parameters of quantisers, of packing of weights, and of the dense GEMM.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
        type W13Layout = crate::params::common::ffi::W13Layout;
        type Tile = crate::params::common::ffi::Tile;
    }

    /// A checkpoint's MXFP4 matrices and their packed form (csrc/common/mxfp4.cuh), either of which is made from the other. The packed form
    /// may also be the one for e4m3 (csrc/common/mxfp4_e4m3.cuh), or that of MXFP8 matrices (csrc/common/mxfp8.cuh).
    #[derive(Clone, Copy, Debug)]
    struct PackMxfp4Params {
        /// Codes: `[experts, rows, 16 * row_blocks]` bytes (MXFP8: `32 * row_blocks`).
        codes: *mut u8,
        /// Scales: E8M0 `[experts, rows, row_blocks]`.
        scales: *mut u8,
        row_blocks: i32,
        experts: i32,
        rows: i32,
        /// Rows that are packed (all rows if `gated`), and columns. All others become padding, and their scales do not count.
        used_rows: i32,
        k: i32,
        /// Whether rows are gate and up rows, in `layout`.
        gated: bool,
        layout: W13Layout,
        packed_codes: *mut u8,
        packed_scales: *mut u8,
        /// Factors of the experts' sums, fp32 `[experts]`.
        expert_scales: *mut f32,
        /// Whether the packed form is the one for e4m3 activations.
        e4m3: bool,
    }

    /// Other projects' layouts of MXFP4 weights (src/quant/layouts/).
    #[repr(i32)]
    #[derive(Debug)]
    enum Mxfp4Layout {
        /// triton_kernels' layout for Hopper.
        Hopper = 0,
        /// flashinfer's CUTLASS kernels, 0.6: rows r and r + 8 side by side.
        CutlassPairs = 1,
        /// flashinfer's CUTLASS kernels, 0.7: the words of `Hopper` in the places of `CutlassPairs`.
        CutlassSpread = 2,
    }

    /// MXFP4 codes or scales that are converted from a checkpoint's form to another layout, or back.
    #[derive(Clone, Copy, Debug)]
    struct LayoutMxfp4Params {
        input: *const u8,
        output: *mut u8,
        layout: Mxfp4Layout,
        /// Rows that the layout keeps together.
        band_rows: u32,
        /// Rows of the checkpoint's matrices, and their columns in bytes.
        rows: u32,
        columns: u32,
        /// Rows of the layout's matrices, and their columns in bytes. They include padding, which becomes zeros, or is left out on the way
        /// back.
        held_rows: u32,
        held_columns: u32,
    }

    /// Numbers and their MXFP4, either of which is made from the other: blocks of 32 numbers, 16 bytes of codes and a scale byte.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeMxfp4Params {
        /// Numbers of `dtype`.
        numbers: *mut u8,
        codes: *mut u8,
        scales: *mut u8,
        blocks: i64,
        dtype: Dtype,
        /// Quantising: scales are rounded up so that nothing is clipped. Otherwise they follow the OCP specification.
        up: bool,
    }

    /// Numbers that become e2m1, two a byte, with a scale for each block of columns: NVFP4 or MXFP4 (src/quant/nvfp4.rs).
    #[derive(Clone, Copy, Debug)]
    struct QuantizeNvfp4Params {
        /// Numbers `[batches, rows, columns]` of `dtype`.
        x: *const u8,
        dtype: Dtype,
        /// Codes `[batches, rows, columns / 2]`.
        codes: *mut u8,
        /// Scales `[rows, columns / block]` of each batch. With tiles both dimensions are padded to whole tiles, and padding becomes 0.
        scales: *mut u8,
        /// Rows of a tile of scales, 128 or 8. 0 if scales lie row by row.
        tile_rows: i32,
        batches: i32,
        rows: i32,
        columns: i32,
        /// Columns of a block, 16 or 32.
        block: i32,
        /// Whether scales are powers of two (E8M0). Otherwise they are e4m3.
        powers: bool,
        /// fp32 by which numbers are multiplied, or divided if `inverse`: one number, or `[batches]` if `of_batch`. Null: 1.
        global_scale: *const f32,
        of_batch: bool,
        inverse: bool,
        /// i32 `[batches]` or null. Rows of a batch from its number on are left alone, and so are their codes and scales.
        row_counts: *const i32,
    }

    /// The number from which the scales of e4m3 rows are made.
    #[repr(i32)]
    #[derive(Debug)]
    enum Fp8Scaling {
        /// The amax of each group.
        Groups = 0,
        /// The amax of each row; all groups of the row get the scale.
        Rows = 1,
        /// `given`, which is the amax of all rows.
        Peak = 2,
        /// `given`, which is the scale itself.
        Given = 3,
    }

    /// Rows of numbers that become e4m3 with a scale for each group of columns: amax / 448, or the next power of two.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeFp8Params {
        /// Numbers `[rows, columns]` of `dtype`.
        x: *const u8,
        dtype: Dtype,
        /// Codes, e4m3 `[rows, columns]`.
        codes: *mut u8,
        /// fp32 scales, or with `powers` E8M0 bytes, of which a word has four groups of a row.
        scales: *mut u8,
        rows: i64,
        /// Device scalar or null. Rows from this number on are left alone.
        row_count: *const i32,
        /// Columns, a multiple of `group`. A group has 16, 32, 64 or 128 columns.
        columns: i32,
        group: i32,
        /// Distances between the scales of neighbouring rows and of neighbouring groups. With `powers`: words, and neighbouring fours of
        /// groups.
        row_stride: i64,
        group_stride: i64,
        /// The least amax; a smaller one counts as this.
        eps: f32,
        /// Scales are powers of two, as bytes. `Groups` alone has this.
        powers: bool,
        /// A schedule of tiles of up to `tile_rows` rows, or null. Rows outside the schedule are left alone.
        tiles: *const Tile,
        tile_count: *const i32,
        tile_rows: i32,
        scaling: Fp8Scaling,
        /// One fp32. `QuantizeFp8Peak` raises it to the largest magnitude of all rows.
        given: *mut f32,
        /// `Rows`: threads that take a row, a power of two up to 256.
        row_threads: i32,
        /// `QuantizeFp8Slots`: the places to which a row and its scales go, i32 `[rows, top_k]`, -1: none. Null in every other kernel.
        place_of_slot: *const i32,
        top_k: i32,
        /// The launch before this one neither writes x nor touches what this one writes, so the kernel runs beside it (`pdl::run`).
        x_is_older: bool,
    }

    /// Scales of e4m3 rows that the caller quantised. They come in any order or form, and become what the GEMMs read: fp32 `[rows,
    /// groups]`.
    #[derive(Clone, Copy, Debug)]
    struct ExpandScalesParams {
        /// fp32, or with `powers` int32 of four E8M0 bytes, the first group lowest. Strides count these elements; a stride is 0 if rows or
        /// groups share a scale.
        scales: *const u8,
        powers: bool,
        row_stride: i64,
        group_stride: i64,
        table: *mut f32,
        rows: i32,
        groups: i32,
        /// The launch before this one does not write the scales, so the kernel runs beside it (`pdl::run`).
        scales_are_older: bool,
    }

    /// The E8M0 bytes of a matrix, one for each block of a row's columns.
    #[derive(Clone, Copy, Debug)]
    struct ScaleView {
        data: *const u8,
        /// Rows of a tile, which has 128 or 8 rows by 4 blocks (src/quant/nvfp4.rs). 0 if the two strides say where bytes lie.
        tile_rows: i32,
        row_stride: i64,
        block_stride: i64,
    }

    /// `out[m, n] = a[m, k] b[n, k]^T`, where a and b are e4m3 with a scale for 32 columns.
    #[derive(Clone, Copy, Debug)]
    struct MmMxfp8Params {
        /// e4m3 `[m, k]` and `[n, k]`, k a multiple of 32.
        a: *const u8,
        b: *const u8,
        a_scales: ScaleView,
        b_scales: ScaleView,
        /// The output `[m, n]` of bf16, f16 or fp32.
        out: *mut u8,
        out_dtype: Dtype,
        m: i32,
        n: i32,
        k: i32,
        /// CTAs of a cluster, which share the K of a tile. If it is 1, the first `shared_tiles` tiles are cut into runs of K for all CTAs,
        /// and each other tile belongs to one CTA.
        splits: i32,
        shared_tiles: i32,
        /// a as bf16 in the order that csrc/gemm/mm_mxfp8_wide_sm90.cuh reads, for tiles of `tile_tokens`. Null in the kernels for few
        /// tokens.
        tokens: *mut u8,
        tile_tokens: i32,
        /// Sums of warpgroups that leave a tile to another CTA.
        partial_sums: *mut u8,
        /// i32 `[arrivals]`, one for each warpgroup of each CTA: it is 1 once the warpgroup's sums are stored in `partial_sums`.
        arrived: *mut i32,
        arrivals: i32,
    }

    /// Rows of numbers that become MXFP8, e4m3 with a scale for 32 columns, or are made from it.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeMxfp8Params {
        /// Numbers `[rows, columns]` of `dtype`.
        numbers: *mut u8,
        dtype: Dtype,
        /// e4m3 `[rows, padded_columns]`, with zeros from `columns` on.
        codes: *mut u8,
        scales: *mut u8,
        /// Rows of a tile of scales, 128 or 8. 0 if scales lie row by row. Scales of rows and blocks up to the tiles' ends are 0.
        tile_rows: i32,
        rows: i64,
        columns: i32,
        padded_columns: i32,
    }

    /// Rows of bf16 that become e4m3 with one scale each: scale = amax / 448, or 1 if that is less than 2^-126. Rounding to MXFP8 takes
    /// this struct too: then `out` has bf16 numbers, perhaps over x, and `scales` is null.
    #[derive(Clone, Copy, Debug)]
    struct QuantizeRowsParams {
        /// Numbers, bf16 `[rows, columns]`.
        x: *const u8,
        /// e4m3 `[rows, out_columns]`, with zeros from `columns` on. The CPU backend of a layer writes bf16 numbers, perhaps over x.
        out: *mut u8,
        /// Scales `[rows]`.
        scales: *mut f32,
        rows: i32,
        columns: i32,
        out_columns: i32,
        /// A schedule or null. With it rows are places, and rows after the schedule's last place are left alone.
        tiles: *const Tile,
        tile_count: *const i32,
        /// The launch before this one does not write x, so the kernel runs beside it (`pdl::run`).
        x_is_older: bool,
    }

    /// fp32 powers of two that become E8M0 bytes.
    #[derive(Clone, Copy, Debug)]
    struct ScaleBytesParams {
        scales: *const f32,
        bytes: *mut u8,
        count: i64,
        /// The least index of a number that is no power of two, as an unsigned number; all ones before the launch.
        first_wrong: *mut i64,
    }
}
