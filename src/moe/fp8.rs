//! Experts in e4m3 with block scales: their contract, and the activations that are quantised on their way.

use super::plan::MoeWorkspace;
use super::weights::{check_sizes, intermediate_size, Layer, LayerDesc, Matrix, Operands, Options};
use crate::contract;
use crate::device::gpu;
use crate::error::{Error, Result};
use crate::params::{Dtype, GroupedGemmParams, QuantizeFp8Params, W13Layout};
use crate::quant::fp8::{EPS, GROUP};
use crate::quant::Format;
use crate::tensor::{Contract, Dim, Elem, Place, TensorRef};

use super::grouped_gemm::{self, WeightMaps};
use super::per_expert::PerExpert;

/// Checks w13 [E, 2I, H], w2 [E, H, I], their scales [E, 2I / 128, H / 128] and [E, H / 128, I / 128], and biases.
pub fn layer(operands: &Operands<'_>, options: &Options<'_>) -> Result<Layer> {
    let Operands { w13, w2, b13, b2, scales } = operands;
    let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
    let Some([(_, w13_scale), (_, w2_scale)]) = scales else {
        contract!("w13_scale and w2_scale: both are needed for format \"fp8_block\"");
    };
    if gated && layout == W13Layout::Interleaved {
        return Err(Error::Unsupported(
            "layout \"interleaved\" for fp8_block experts, whose blocks would mix gate and up rows; supported: \"gate_up\", \"up_gate\"".into(),
        ));
    }
    let (block, experts) = (GROUP as i64, Dim::Named("experts"));
    let mut contract = Contract::new();
    contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden")], &[Elem::E4M3])?;
    let (rows, hidden, intermediate) = (w13.shape()[1], w13.shape()[2], intermediate_size(w13, gated)?);
    check_sizes(w13, hidden)?;
    for (name, size, dimension) in [("hidden", hidden, 2), ("intermediate", intermediate, 1)] {
        if size % block != 0 {
            return Err(Error::Unsupported(format!(
                "w13: dimension {dimension} gives {name} {size} for fp8_block experts; supported: multiples of {block} (a block has one scale)"
            )));
        }
    }
    let of = |name, size: i64| Dim::Is(name, size / block);
    contract.check("w2", w2, &[experts, Dim::Named("hidden"), Dim::Is("intermediate", intermediate)], &[Elem::E4M3])?;
    let (of_rows, of_hidden) = (of("rows of w13 / 128", rows), of("hidden / 128", hidden));
    contract.check("w13_scale", w13_scale, &[experts, of_rows, of_hidden], &[Elem::F32])?;
    let of_intermediate = of("intermediate / 128", intermediate);
    contract.check("w2_scale", w2_scale, &[experts, of_hidden, of_intermediate], &[Elem::F32])?;
    for (name, bias, dim) in [("b13", b13, "rows of w13"), ("b2", b2, "hidden")] {
        if let Some(bias) = bias {
            contract.check(name, bias, &[experts, Dim::Named(dim)], &[Elem::Bf16, Elem::F32])?;
        }
    }
    let vector = if w13.place == Place::Cpu { 1 } else { 16 };
    for (name, t, alignment) in
        [("w13", w13, vector), ("w2", w2, vector), ("w13_scale", w13_scale, 4), ("w2_scale", w2_scale, 4)]
    {
        if !(t.data as usize).is_multiple_of(alignment) {
            contract!(
                "{name}: must start at a multiple of {alignment} bytes, got address {:p}; pass {name}.clone()",
                t.data
            );
        }
    }
    let matrix = |t: &TensorRef, scales: &TensorRef, bias: &Option<TensorRef>, rows, k| Matrix {
        data: t.data,
        blocks: None,
        packed: None,
        block_scales: scales.data.cast(),
        bias: bias.as_ref().map_or(std::ptr::null(), |b| b.data.cast_const()),
        bias_dtype: bias.as_ref().and_then(|b| b.elem.dtype()).unwrap_or(Dtype::Bf16),
        rows,
        k,
    };
    let desc = LayerDesc {
        experts: w13.shape()[0],
        hidden,
        intermediate,
        gated,
        dtype: Dtype::Bf16,
        format: Format::Fp8Block,
    };
    let mut layer = Layer {
        desc,
        place: w13.place,
        up: matrix(w13, w13_scale, b13, rows, hidden),
        down: matrix(w2, w2_scale, b2, hidden, intermediate),
        layout,
        activation,
        per_expert: PerExpert::NONE,
        up_maps: WeightMaps::default(),
        down_maps: WeightMaps::default(),
        least_scales: Vec::new(),
    };
    if let Place::Cuda(ordinal) = layer.place {
        let gpu = gpu(ordinal)?;
        desc.require_cuda(&gpu.device)?;
        layer.up_maps = grouped_gemm::encode(&gpu.device, &desc, &layer.up, gated, layout)?;
        layer.down_maps = grouped_gemm::encode(&gpu.device, &desc, &layer.down, false, layout)?;
    }
    Ok(layer)
}

/// What turns the layer's input and GEMM1's output into e4m3.
#[derive(Clone, Copy)]
pub struct Quantize {
    pub x: QuantizeFp8Params,
    pub hidden: QuantizeFp8Params,
}

impl Quantize {
    /// `placed`: device or host scalar, the number of placed slots. Both GEMMs then read what is quantised.
    pub fn new(
        (ws, base): (&MoeWorkspace, *mut u8),
        (tokens, slots): (i64, i64),
        placed: *const i32,
        (up, down): (&mut GroupedGemmParams, &mut GroupedGemmParams),
    ) -> Quantize {
        let params = |x: *const u8, rows, columns: i32, codes: *mut u8, scales: *mut u8, row_count| QuantizeFp8Params {
            x,
            dtype: Dtype::Bf16,
            codes,
            scales,
            rows,
            row_count,
            columns,
            group: GROUP as i32,
            row_stride: i64::from(columns) / GROUP as i64,
            group_stride: 1,
            eps: EPS,
            powers: false,
        };
        let quantize = Quantize {
            x: params(up.x, tokens, up.k, ws.x_codes.at(base), ws.x_scales.at(base), std::ptr::null()),
            hidden: params(up.out, slots, down.k, ws.hidden_codes.at(base), ws.hidden_scales.at(base), placed),
        };
        for (gemm, quantized) in [(up, &quantize.x), (down, &quantize.hidden)] {
            gemm.x = quantized.codes;
            gemm.x_scales = quantized.scales.cast();
        }
        quantize
    }

    /// GEMM1 on a GPU: what it reads of routing is older than the quantisation of x, which stands between. `inside`: it quantises its
    /// output itself.
    pub fn up_on_cuda(&self, up: &GroupedGemmParams, inside: bool) -> GroupedGemmParams {
        let up = GroupedGemmParams { schedule_is_older: true, ..*up };
        match inside {
            true => GroupedGemmParams { out: self.hidden.codes, out_scales: self.hidden.scales.cast(), ..up },
            false => up,
        }
    }
}
