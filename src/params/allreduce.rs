//! Parameters of the all-reduce, and of the residual, norm and quantisation that follow it.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    unsafe extern "C++" {
        include!("oxmoe/src/params/common.rs.h");
        type Dtype = crate::params::common::ffi::Dtype;
    }

    /// Every rank's all-reduce workspace (src/allreduce/protocol.rs) as it is mapped here. Kernels read it as an array.
    #[derive(Clone, Copy, Debug)]
    struct Workspaces {
        rank0: *mut u8,
        rank1: *mut u8,
        rank2: *mut u8,
        rank3: *mut u8,
        rank4: *mut u8,
        rank5: *mut u8,
        rank6: *mut u8,
        rank7: *mut u8,
    }

    /// How a row of the norm is made narrower (src/cpu/allreduce.rs, `Quantise`).
    #[repr(i32)]
    #[derive(Debug)]
    enum QuantKind {
        None = 0,
        /// e4m3 of value x (1 / scale).
        Fp8 = 1,
        /// e2m1 with an e4m3 scale per 16 values.
        Nvfp4 = 2,
        /// e4m3 with a power-of-two scale per group.
        Groups = 3,
        /// e4m3 with an fp32 scale a row.
        PerToken = 4,
    }

    #[derive(Clone, Copy, Debug)]
    struct Narrowing {
        kind: QuantKind,
        quant_out: *mut u8,
        scale_out: *mut u8,
        /// One fp32 that counts in place of `scale`, or null.
        scale_factor: *const f32,
        scale: f32,
        /// Nvfp4: rows of a tile of scales, 128 or 8. 0 if scales lie row by row.
        tile_rows: i32,
        /// Groups: chunks of a group, a power of two up to 32.
        group_chunks: i32,
        /// Groups: int32s between neighbouring columns of `scale_out`.
        column_stride: i64,
    }

    /// A rank's contribution, if it is a sum of experts' rows (src/cpu/allreduce.rs, `Contribution`).
    #[derive(Clone, Copy, Debug)]
    struct ExpertRows {
        /// Rows of experts' outputs. Null if the contribution is `input`.
        rows: *const u8,
        row_count: i64,
        /// Row of slot `t top_k + j`, -1 if the slot has none. If it is null, slot j of token t is row `j tokens + t`.
        row_of_slot: *const i32,
        /// Weights of the slots. Null if all are 1.
        weights: *const u8,
        weight_dtype: Dtype,
        top_k: i32,
        /// A row of each token that is added last, or null.
        shared: *const u8,
    }

    /// One all-reduce. Tensors are `[tokens, hidden]` and start at multiples of 16 bytes; a chunk is 16 bytes.
    #[derive(Clone, Copy, Debug)]
    struct AllReduceParams {
        workspaces: Workspaces,
        /// Host memory that the device can write: the fault word (0: none), this rank's shape word, the shape word of a peer that
        /// disagrees.
        report: *mut u64,
        input: *const u8,
        /// Tensors that a pattern does not read or write are null. `gamma` is `[hidden]`, and no kernel before this one writes it.
        residual_in: *const u8,
        gamma: *const u8,
        output: *mut u8,
        residual_out: *mut u8,
        norm_out: *mut u8,
        /// Byte offset of the first slot in every workspace.
        slots: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
        /// Two-shot: byte offset of the gathered sums in every workspace.
        gathered: u64,
        deadline_ns: u64,
        /// The shape word, on which all ranks must agree.
        shape: u64,
        rank: i32,
        tokens: i32,
        row_chunks: i32,
        /// Two-shot: chunks of an owner's range.
        range: i32,
        /// Two-shot: CTAs of each stage.
        scatter_ctas: i32,
        reduce_ctas: i32,
        finish_ctas: i32,
        /// fp32(1 / hidden).
        inverse_hidden: f32,
        epsilon: f32,
        /// A number that is added to gamma.
        weight_bias: f32,
        /// These two structs are last, because kernels that serve kAllReduce or kARResidualRMSNorm alone do not read them.
        experts: ExpertRows,
        narrowing: Narrowing,
    }
}
