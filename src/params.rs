//! Every kernel parameter struct and enum, once, for Rust and CUDA: cxx turns each file of `src/params/` into a C++ header that `csrc/`
//! includes as `oxmoe/src/params/<name>.rs.h`. Pointers are device addresses in kernel launches and host addresses in the CPU backend.

pub mod allreduce;
pub mod common;
pub mod dense;
pub mod moe;
pub mod nvfp4;
pub mod pack;
pub mod quant;
pub mod tiles;

pub use allreduce::ffi::{AllReduceParams, ExpertRows, Narrowing, QuantKind, Workspaces};
pub use common::ffi::{Dtype, Tile, W13Layout};
pub use dense::ffi::MmMxfp8FewParams;
pub use moe::ffi::{
    Activation, ActivationKind, CombineParams, GemmPairParams, GroupScore, GroupedGemmParams, LayerParams,
    OrderedGemmParams, RaggedParams, RouteParams, RoutedLayerParams, ScheduleParams, Scoring, SelectParams,
};
pub use nvfp4::ffi::RoundNvfp4Params;
pub use pack::ffi::PackParams;
pub use quant::ffi::{
    ExpandScalesParams, Fp8Scaling, LayoutMxfp4Params, MmMxfp8Params, Mxfp4Layout, PackMxfp4Params, QuantizeFp8Params,
    QuantizeMxfp4Params, QuantizeMxfp8Params, QuantizeNvfp4Params, QuantizeRowsParams, ScaleBytesParams, ScaleView,
};
pub use tiles::ffi::TileRowsParams;

impl SelectParams {
    /// A choice without logits: ids and weights are given.
    #[allow(dead_code)] // the build script launches nothing
    pub const NO_LOGITS: SelectParams = SelectParams {
        logits: std::ptr::null(),
        logits_dtype: Dtype::F32,
        tokens: 0,
        experts: 0,
        top_k: 0,
        correction_bias: std::ptr::null(),
        scoring: Scoring::Softmax,
        renormalize: false,
        scale: 1.0,
        group_score: GroupScore::None,
        groups: 0,
        topk_group: 0,
        shared_experts: 0,
        shared_weight: 0.0,
        order_by_id: false,
        num_token_non_padded: std::ptr::null(),
        ids: std::ptr::null_mut(),
        weights: std::ptr::null_mut(),
    };
}
