// The structs of `src/params` that kernels take. The including file says what the macro makes of their names: `signature.rs` makes parameters
// of them, and `build.rs`, which cannot have the structs, makes types of these names.
structs! {
    AllReduceParams
    CombineParams
    ExpandScalesParams
    GemmPairParams
    GroupedGemmParams
    LayerParams
    LayoutMxfp4Params
    MmMxfp8FewParams
    MmMxfp8Params
    OrderedGemmParams
    PackMxfp4Params
    PackParams
    QuantizeFp8Params
    QuantizeMxfp4Params
    QuantizeMxfp8Params
    QuantizeNvfp4Params
    QuantizeRowsParams
    RaggedParams
    RoundNvfp4Params
    RouteParams
    RoutedLayerParams
    ScaleBytesParams
    ScheduleParams
    SelectParams
    TileRowsParams
}
