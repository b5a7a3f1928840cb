//! The operands of one call and their contracts: which a pattern needs, their shapes, and that outputs do not overlap what is still read.

use super::dtype_of;
use super::pattern::{self, Narrow, Pattern, Source, PATTERNS};
use super::protocol::{Shape, CHUNK_BYTES};
use crate::contract;
use crate::cpu::{Contribution, Quantise, ReduceRows, ScaleLayout};
use crate::error::{Error, Result};
use crate::params::{Dtype, ExpertRows};
use crate::python::extract;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place, View};
use pyo3::prelude::*;

/// The attributes of `oxmoe.allreduce._Operands`: the arguments of `allreduce_fusion`.
pub struct Operands<'py> {
    pub input: Bound<'py, PyAny>,
    pattern: i64,
    output: Option<Bound<'py, PyAny>>,
    residual_out: Option<Bound<'py, PyAny>>,
    norm_out: Option<Bound<'py, PyAny>>,
    quant_out: Option<Bound<'py, PyAny>>,
    scale_out: Option<Bound<'py, PyAny>>,
    residual_in: Option<Bound<'py, PyAny>>,
    rms_gamma: Option<Bound<'py, PyAny>>,
    rms_eps: f64,
    scale_factor: Option<Bound<'py, PyAny>>,
    layout_code: Option<i64>,
    moe_reduction_device_num_experts: Option<i64>,
    moe_reduction_scale_input: Option<Bound<'py, PyAny>>,
    moe_reduction_active_experts_token_input: Option<Bound<'py, PyAny>>,
    moe_reduction_token_input: Option<Bound<'py, PyAny>>,
    expanded_idx_to_permuted_idx: Option<Bound<'py, PyAny>>,
    expert_scale_factor: Option<Bound<'py, PyAny>>,
    shared_expert_output: Option<Bound<'py, PyAny>>,
    block_quant_group_size: Option<i64>,
    weight_bias: f64,
}

/// The operands of one call after the checks.
pub struct Checked<'a, 'py> {
    given: &'a Operands<'py>,
    pattern: &'static Pattern,
    pub shape: Shape,
    elem: Elem,
    input: Option<Borrowed<'py>>,
    residual_in: Option<Borrowed<'py>>,
    gamma: Option<Borrowed<'py>>,
    output: Option<Borrowed<'py>>,
    residual_out: Option<Borrowed<'py>>,
    norm_out: Option<Borrowed<'py>>,
    quant_out: Option<Borrowed<'py>>,
    scale_out: Option<Borrowed<'py>>,
    quantise: Quantise,
    scale_factor: Option<Borrowed<'py>>,
    experts: Option<Experts<'py>>,
}

/// The operands from which the MoE patterns take a rank's contribution.
struct Experts<'py> {
    rows: Borrowed<'py>,
    table: Option<Borrowed<'py>>,
    weights: Option<Borrowed<'py>>,
    shared: Option<Borrowed<'py>>,
    slots: i64,
}

const COMPUTE: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];
pub fn check_hidden(operand: &str, hidden: i64, elem: Elem) -> Result<()> {
    let multiple = CHUNK_BYTES as i64 / elem.bytes() as i64;
    if hidden < multiple || hidden > Shape::MAX_HIDDEN || hidden % multiple != 0 {
        contract!(
            "{operand}: expected a hidden size of {multiple} to {} divisible by {multiple} (16 bytes of {elem}), got {hidden}",
            Shape::MAX_HIDDEN
        );
    }
    Ok(())
}

/// Inputs that may be the same tensor as an output of rows: kernels read a row whole before they write it. A rank's own message is its
/// input.
const ROWS: &[&str] = &["input", "residual_in", "messages"];
/// These inputs in the MoE patterns. There a row of `input` may be read for another row of the output.
const MOE_ROWS: &[&str] = &["residual_in", "messages"];

fn input<'py>(
    name: &'static str,
    object: &Option<Bound<'py, PyAny>>,
    contract: &mut Contract<'_>,
) -> Result<Option<Borrowed<'py>>> {
    object.as_ref().map(|object| contract.input(name, object)).transpose()
}

fn output<'py>(
    name: &'static str,
    object: &Option<Bound<'py, PyAny>>,
    pattern: &Pattern,
    contract: &mut Contract<'_>,
) -> Result<Option<Borrowed<'py>>> {
    let same = if pattern.source == Source::Input { ROWS } else { MOE_ROWS };
    object.as_ref().map(|object| contract.output_over(name, object, same)).transpose()
}

impl<'py> Operands<'py> {
    /// The attributes of the object. One of a wrong type is an error that names it, as an argument is.
    pub fn of(object: &Bound<'py, PyAny>) -> Result<Operands<'py>> {
        macro_rules! attributes {
            ($($name:ident),* $(,)?) => {
                Operands { $($name: extract(stringify!($name), &object.getattr(stringify!($name))?)?),* }
            };
        }
        Ok(attributes!(
            input,
            pattern,
            output,
            residual_out,
            norm_out,
            quant_out,
            scale_out,
            residual_in,
            rms_gamma,
            rms_eps,
            scale_factor,
            layout_code,
            moe_reduction_device_num_experts,
            moe_reduction_scale_input,
            moe_reduction_active_experts_token_input,
            moe_reduction_token_input,
            expanded_idx_to_permuted_idx,
            expert_scale_factor,
            shared_expert_output,
            block_quant_group_size,
            weight_bias,
        ))
    }

    /// The checked operands, and the contract that has borrowed them. The function that runs the call finishes the contract.
    pub fn check(&self) -> Result<(Checked<'_, 'py>, Contract<'static>)> {
        let Some(pattern) = pattern::of(self.pattern) else {
            let known: Vec<String> = PATTERNS.iter().map(|p| format!("{} {}", p.number, p.name)).collect();
            contract!("pattern: expected one of {}; got {}", known.join(", "), self.pattern);
        };
        // The leader gives the result its shape and dtype. In the MoE patterns `input` cannot: it is rows of experts, or is not read.
        let (leader, name) = match pattern.source {
            Source::Input => (Some(&self.input), "input"),
            _ => (self.residual_in.as_ref(), "residual_in"),
        };
        let Some(leader) = leader else { contract!("residual_in: pattern {} needs it, got None", pattern.name) };
        let mut contract = Contract::new();
        let leader = contract.input(name, leader)?;
        self.presence(pattern)?;
        contract.check(name, &leader, &[Dim::Named("tokens"), Dim::Named("hidden")], &COMPUTE)?;
        let (tokens, hidden, elem) = (leader.shape()[0], leader.shape()[1], leader.elem);
        check_hidden(name, hidden, elem)?;
        if tokens > u32::MAX as i64 {
            contract!("{name}: expected at most {} tokens, got {tokens}", u32::MAX);
        }
        let rows = [Dim::Named("tokens"), Dim::Named("hidden")];
        let of_rows = |name: &'static str, tensor: Option<Borrowed<'py>>, contract: &mut Contract<'_>| {
            if let Some(tensor) = &tensor {
                contract.check(name, tensor, &rows, &[elem])?;
            }
            Ok::<_, Error>(tensor)
        };
        let contract_of_rows = &mut contract;
        let mut read = |name, object| {
            let tensor = input(name, object, contract_of_rows)?;
            of_rows(name, tensor, contract_of_rows)
        };
        let residual_in = read("residual_in", &self.residual_in)?;
        let shared = read("shared_expert_output", &self.shared_expert_output)?;
        let token_input = read("moe_reduction_token_input", &self.moe_reduction_token_input)?;
        let mut written = |name, object| {
            let tensor = output(name, object, pattern, &mut contract)?;
            of_rows(name, tensor, &mut contract)
        };
        let output_rows = written("output", &self.output)?;
        let residual_out = written("residual_out", &self.residual_out)?;
        let norm_out = written("norm_out", &self.norm_out)?;
        let gamma = input("rms_gamma", &self.rms_gamma, &mut contract)?;
        if let Some(gamma) = &gamma {
            contract.check("rms_gamma", gamma, &[Dim::Named("hidden")], &[elem])?;
        }
        let experts = match pattern.source {
            Source::Input => None,
            Source::MoeFinalize => Some(self.finalize(shared, elem, &mut contract)?),
            Source::MoeReduction => Some(self.reduction(token_input, (tokens, elem), &mut contract)?),
        };
        let quant_out = output("quant_out", &self.quant_out, pattern, &mut contract)?;
        let scale_out = output("scale_out", &self.scale_out, pattern, &mut contract)?;
        let (quantise, scale_factor) = match &quant_out {
            None => (Quantise::None, None),
            Some(quant_out) => {
                self.quantisation(pattern, quant_out, scale_out.as_deref(), (tokens, hidden), &mut contract)?
            }
        };
        let shape =
            Shape { pattern: self.pattern as u8, dtype: dtype_of(elem), tokens: tokens as u32, hidden: hidden as u32 };
        let input = (pattern.source == Source::Input).then_some(leader);
        let checked = Checked {
            given: self,
            pattern,
            shape,
            elem,
            input,
            residual_in,
            gamma,
            output: output_rows,
            residual_out,
            norm_out,
            quant_out,
            scale_out,
            quantise,
            scale_factor,
            experts,
        };
        // The function that runs the call adds no outputs of the caller, so the caller's operands are compared now.
        contract.finish()?;
        Ok((checked, contract))
    }

    /// Refuses a call without a tensor that its pattern needs, and tensors that the pattern neither reads nor writes.
    fn presence(&self, pattern: &Pattern) -> Result<()> {
        let moe = pattern.source != Source::Input;
        let narrow = pattern.narrow != Narrow::None;
        let scaled = matches!(pattern.narrow, Narrow::Fp8 | Narrow::Nvfp4);
        let finalize = pattern.source == Source::MoeFinalize;
        let reduction = pattern.source == Source::MoeReduction;
        let quantised = narrow && (!moe || self.quant_out.is_some());
        // Columns: name, given, needed, allowed.
        let table = [
            ("output", self.output.is_some(), !pattern.norm, !pattern.norm || reduction),
            ("residual_in", self.residual_in.is_some(), pattern.norm, pattern.norm),
            ("rms_gamma", self.rms_gamma.is_some(), pattern.norm, pattern.norm),
            ("residual_out", self.residual_out.is_some(), pattern.norm && !moe, pattern.norm),
            ("norm_out", self.norm_out.is_some(), pattern.norm_out && !moe, pattern.norm_out),
            ("quant_out", self.quant_out.is_some(), quantised, narrow),
            (
                "scale_out",
                self.scale_out.is_some(),
                quantised && pattern.narrow != Narrow::Fp8,
                quantised && pattern.narrow != Narrow::Fp8,
            ),
            // A number that happens to be passed does no harm if the pattern does not read it.
            ("scale_factor", self.scale_factor.is_some(), quantised && scaled, true),
            ("block_quant_group_size", self.block_quant_group_size.is_some(), pattern.narrow == Narrow::Groups, true),
            ("expanded_idx_to_permuted_idx", self.expanded_idx_to_permuted_idx.is_some(), finalize, finalize),
            ("expert_scale_factor", self.expert_scale_factor.is_some(), false, finalize),
            ("shared_expert_output", self.shared_expert_output.is_some(), false, finalize),
            ("moe_reduction_device_num_experts", self.moe_reduction_device_num_experts.is_some(), reduction, true),
            ("moe_reduction_scale_input", self.moe_reduction_scale_input.is_some(), reduction, reduction),
            (
                "moe_reduction_active_experts_token_input",
                self.moe_reduction_active_experts_token_input.is_some(),
                reduction,
                reduction,
            ),
            ("moe_reduction_token_input", self.moe_reduction_token_input.is_some(), reduction, reduction),
        ];
        for (name, given, needed, allowed) in table {
            if needed && !given {
                contract!("{name}: pattern {} needs it, got None", pattern.name);
            }
            if given && !allowed {
                contract!("{name}: pattern {} neither reads nor writes it; pass None", pattern.name);
            }
        }
        Ok(())
    }

    /// Checks the operands of MoeFinalize: input [rows, H], expanded_idx_to_permuted_idx int32 [T, k], expert_scale_factor [T, k].
    fn finalize(&self, shared: Option<Borrowed<'py>>, elem: Elem, contract: &mut Contract<'_>) -> Result<Experts<'py>> {
        let rows = contract.input("input", &self.input)?;
        contract.check("input", &rows, &[Dim::Named("rows"), Dim::Named("hidden")], &[elem])?;
        let name = "expanded_idx_to_permuted_idx";
        let slots = [Dim::Named("tokens"), Dim::Named("top_k")];
        let table = input(name, &self.expanded_idx_to_permuted_idx, contract)?;
        if let Some(table) = &table {
            contract.check(name, table, &slots, &[Elem::I32])?;
            let count = rows.shape()[0];
            let slots = table.numel() as usize;
            let numbers = match slots {
                0 => &[],
                // On a GPU, checking the row numbers here would wait for the GPU. Kernels check them.
                _ if table.place != Place::Cpu => &[],
                // SAFETY: the table is a contiguous int32 CPU tensor with `slots` elements.
                _ => unsafe { std::slice::from_raw_parts(table.data.cast::<i32>(), slots) },
            };
            if let Some((slot, &row)) = numbers.iter().enumerate().find(|(_, &row)| row < -1 || row as i64 >= count) {
                contract!("{name}: slot {slot}: expected -1 to {} (rows of input), got {row}", count - 1);
            }
        }
        let weights = input("expert_scale_factor", &self.expert_scale_factor, contract)?;
        if let Some(weights) = &weights {
            contract.check("expert_scale_factor", weights, &slots, &COMPUTE)?;
        }
        Ok(Experts { rows, table, weights, shared, slots: contract.get("top_k") })
    }

    /// Checks the operands of MoeReduction: moe_reduction_active_experts_token_input [E T, H], moe_reduction_scale_input fp32 [E, T],
    /// moe_reduction_token_input [T, H].
    fn reduction(
        &self,
        shared: Option<Borrowed<'py>>,
        shape: (i64, Elem),
        contract: &mut Contract<'_>,
    ) -> Result<Experts<'py>> {
        let (tokens, elem) = shape;
        let slots = self.moe_reduction_device_num_experts.unwrap_or(0);
        if !(0..=i32::MAX as i64 / tokens.max(1)).contains(&slots) {
            contract!("moe_reduction_device_num_experts: expected 0 to 2^31 / tokens, got {slots}");
        }
        let (rows_name, weights_name) = ("moe_reduction_active_experts_token_input", "moe_reduction_scale_input");
        let rows = input(rows_name, &self.moe_reduction_active_experts_token_input, contract)?;
        let Some(rows) = rows else { contract!("{rows_name}: is missing") };
        let count = Dim::Is("experts x tokens", slots * tokens);
        contract.check(rows_name, &rows, &[count, Dim::Named("hidden")], &[elem])?;
        let weights = input(weights_name, &self.moe_reduction_scale_input, contract)?;
        if let Some(weights) = &weights {
            contract.check(weights_name, weights, &[Dim::Is("experts", slots), Dim::Named("tokens")], &[Elem::F32])?;
        }
        Ok(Experts { rows, table: None, weights, shared, slots })
    }

    fn quantisation(
        &self,
        pattern: &Pattern,
        quant_out: &View,
        scale_out: Option<&View>,
        shape: (i64, i64),
        contract: &mut Contract<'_>,
    ) -> Result<(Quantise, Option<Borrowed<'py>>)> {
        let (tokens, hidden) = shape;
        let fp8 = [Dim::Named("tokens"), Dim::Named("hidden")];
        match (pattern.narrow, scale_out) {
            (Narrow::Fp8, _) => {
                contract.check("quant_out", quant_out, &fp8, &[Elem::E4M3, Elem::U8])?;
                let (scale, tensor) = self.scale(quant_out.place, contract)?;
                Ok((Quantise::Fp8 { scale }, tensor))
            }
            (Narrow::PerToken, Some(scale_out)) => {
                contract.check("quant_out", quant_out, &fp8, &[Elem::E4M3, Elem::U8])?;
                contract.check("scale_out", scale_out, &[Dim::Named("tokens"), Dim::Is("one", 1)], &[Elem::F32])?;
                Ok((Quantise::PerToken, None))
            }
            (Narrow::Groups, Some(scale_out)) => {
                contract.check("quant_out", quant_out, &fp8, &[Elem::E4M3, Elem::U8])?;
                let group = self.block_quant_group_size.unwrap_or(0);
                if group < 1 || hidden % group != 0 {
                    contract!("block_quant_group_size: expected a divisor of hidden {hidden}, got {group}");
                }
                let stride = (tokens as usize).next_multiple_of(4);
                let packs = (hidden / group + 3) / 4;
                let (got, strides) = (scale_out.shape(), scale_out.strides());
                let strided =
                    got.len() == 2 && (tokens <= 1 || strides[0] == 1) && (packs <= 1 || strides[1] == stride as i64);
                if scale_out.elem != Elem::I32 || got != [tokens, packs] || (tokens > 0 && !strided) {
                    contract!(
                        "scale_out: expected int32 of shape [{tokens}, {packs}] and strides [1, {stride}], got {} of shape {got:?} and strides {strides:?}",
                        scale_out.elem
                    );
                }
                if scale_out.place != quant_out.place {
                    contract!("scale_out: is on {}, but quant_out is on {}", scale_out.place, quant_out.place);
                }
                Ok((Quantise::Groups { group: group as usize, stride }, None))
            }
            (Narrow::Nvfp4, Some(scale_out)) => {
                let layout = match self.layout_code.unwrap_or(0) {
                    0 => ScaleLayout::Swizzled128x4,
                    1 => ScaleLayout::Swizzled8x4,
                    2 => ScaleLayout::Linear,
                    other => contract!(
                        "layout_code: expected 0 (SWIZZLED_128x4), 1 (SWIZZLED_8x4) or 2 (LINEAR), got {other}"
                    ),
                };
                if hidden % 16 != 0 {
                    contract!("quant_out: NVFP4 needs a hidden size divisible by 16, got {hidden}");
                }
                let half = [Dim::Named("tokens"), Dim::Is("hidden / 2", hidden / 2)];
                contract.check("quant_out", quant_out, &half, &[Elem::U8, Elem::E2M1_X2])?;
                // Callers give scale_out any shape; only its number of bytes counts.
                let bytes = layout.bytes(tokens as usize, hidden as usize / 16);
                let dims = scale_out.shape().iter().map(|&n| Dim::Is("any", n)).collect::<Vec<_>>();
                contract.check("scale_out", scale_out, &dims, &[Elem::U8, Elem::E4M3, Elem::I32])?;
                if scale_out.bytes() != bytes {
                    contract!(
                        "scale_out: expected {bytes} bytes ({:?} scales of {tokens} rows of {} blocks), got {}",
                        layout,
                        hidden / 16,
                        scale_out.bytes()
                    );
                }
                let (scale, tensor) = self.scale(quant_out.place, contract)?;
                Ok((Quantise::Nvfp4 { scale, layout }, tensor))
            }
            (Narrow::None, _) | (_, None) => contract!("quant_out: pattern {} writes none", pattern.name),
        }
    }

    /// scale_factor: a number, or a tensor of one fp32. The tensor lies on the CPU, or beside the other operands on `place`, where kernels
    /// read it.
    fn scale(&self, place: Place, contract: &mut Contract<'_>) -> Result<(f32, Option<Borrowed<'py>>)> {
        let Some(object) = &self.scale_factor else { contract!("scale_factor: is missing") };
        if object.getattr_opt("__dlpack__")?.is_none() {
            let Ok(number) = object.extract::<f64>() else {
                contract!("scale_factor: expected a number or a tensor, got {}", object.get_type().name()?)
            };
            return Ok((number as f32, None));
        }
        let tensor = contract.input("scale_factor", object)?;
        if tensor.elem != Elem::F32 || tensor.numel() != 1 || ![Place::Cpu, place].contains(&tensor.place) {
            contract!(
                "scale_factor: expected a number or one float32 on {place}, got {} of shape {:?} on {}",
                tensor.elem,
                tensor.shape(),
                tensor.place
            );
        }
        if tensor.place != Place::Cpu {
            return Ok((1.0, Some(tensor)));
        }
        // SAFETY: the tensor is one float32 on the CPU.
        Ok((unsafe { tensor.data.cast::<f32>().read_unaligned() }, None))
    }
}

fn read(tensor: &Option<Borrowed<'_>>) -> *const u8 {
    tensor.as_ref().map_or(std::ptr::null(), |t| t.data.cast_const())
}

fn write(tensor: &Option<Borrowed<'_>>) -> *mut u8 {
    tensor.as_ref().map_or(std::ptr::null_mut(), |t| t.data)
}

impl<'py> Checked<'_, 'py> {
    /// Bytes of one rank's message.
    pub fn bytes(&self) -> usize {
        self.shape.tokens as usize * self.shape.hidden as usize * self.elem.bytes()
    }

    /// Refuses tensors that a workspace of CPU tensors cannot reach.
    pub fn on_cpu(&self) -> Result<()> {
        match self.input.as_ref().or(self.residual_in.as_ref()) {
            Some(leader) if leader.place != Place::Cpu => Err(Error::Unsupported(format!(
                "input: is on {}; this workspace serves tensors on cpu: make one on the GPU (device=\"cuda\")",
                leader.place
            ))),
            _ => Ok(()),
        }
    }

    /// The tensor that gives the result its shape. It is an error if kernels cannot read and write all tensors in chunks.
    pub fn on_gpu(&self) -> Result<&Borrowed<'py>> {
        let experts = self.experts.as_ref();
        let tensors = [
            ("input", self.input.as_ref()),
            ("residual_in", self.residual_in.as_ref()),
            ("rms_gamma", self.gamma.as_ref()),
            ("output", self.output.as_ref()),
            ("residual_out", self.residual_out.as_ref()),
            ("norm_out", self.norm_out.as_ref()),
            ("quant_out", self.quant_out.as_ref()),
            ("scale_out", self.scale_out.as_ref()),
            ("the experts' rows", experts.map(|e| &e.rows)),
            ("the shared expert's output", experts.and_then(|e| e.shared.as_ref())),
        ];
        for (name, tensor) in tensors {
            if tensor.is_some_and(|t| t.data.align_offset(CHUNK_BYTES as usize) != 0) {
                contract!("{name}: expected an address divisible by {CHUNK_BYTES}");
            }
        }
        if let Quantise::Groups { group, .. } = self.quantise {
            let (bytes, chunk) = (group * self.elem.bytes(), CHUNK_BYTES as usize);
            if bytes % chunk != 0 || !(bytes / chunk).is_power_of_two() || bytes / chunk > 32 {
                return Err(Error::Unsupported(format!(
                    "block_quant_group_size: on GPUs groups of {chunk} x 2^n bytes up to {} are served, got {group} {}",
                    32 * chunk,
                    self.elem
                )));
            }
        }
        match self.input.as_ref().or(self.residual_in.as_ref()) {
            Some(leader) => Ok(leader),
            None => contract!("residual_in: {} needs it", self.pattern.name),
        }
    }

    /// The rows that are this rank's contribution. Null if the contribution comes from experts' rows.
    pub fn input(&self) -> *const u8 {
        read(&self.input)
    }

    /// The experts' rows from which kernels make the contribution of a MoE pattern.
    pub fn expert_rows(&self) -> Option<ExpertRows> {
        let experts = self.experts.as_ref()?;
        // A null pointer would mean that there are no experts' rows. Kernels read nothing of an empty tensor, so any other address serves.
        let rows = if experts.rows.data.is_null() { read(&self.residual_in) } else { experts.rows.data.cast_const() };
        Some(ExpertRows {
            rows,
            row_count: experts.rows.shape()[0],
            row_of_slot: read(&experts.table).cast(),
            weights: read(&experts.weights),
            weight_dtype: experts.weights.as_ref().map_or(Dtype::F32, |w| dtype_of(w.elem)),
            top_k: experts.slots as i32,
            shared: read(&experts.shared),
        })
    }

    /// The contribution of a MoE pattern: its parameters and the new tensor.
    pub fn contribution(&self, contract: &mut Contract<'_>) -> Result<Option<(Contribution, Bound<'py, PyAny>)>> {
        let (Some(experts), Some(like)) = (&self.experts, &self.residual_in) else {
            return Ok(None);
        };
        let shape = [self.shape.tokens as i64, self.shape.hidden as i64];
        let out = contract.new_output("message", like, &shape, self.elem)?;
        let contribution = Contribution {
            rows: experts.rows.data,
            row_of_slot: experts.table.as_ref().map_or(std::ptr::null(), |t| t.data.cast::<i32>().cast_const()),
            weights: read(&experts.weights),
            weight_dtype: experts.weights.as_ref().map(|w| dtype_of(w.elem)),
            shared: read(&experts.shared),
            out: out.data,
            tokens: self.shape.tokens as usize,
            slots: experts.slots as usize,
            hidden: self.shape.hidden as usize,
        };
        Ok(Some((contribution, out.into_object())))
    }

    /// Parameters of the rows, and the tensor that the call returns.
    pub fn rows(&self, parts: Vec<*const u8>) -> Result<(ReduceRows, Bound<'py, PyAny>)> {
        let given = self.given;
        let outputs = [&given.norm_out, &given.quant_out, &given.residual_out, &given.output];
        let Some(result) = outputs.into_iter().flatten().next() else {
            contract!("norm_out: pattern {} was given no output at all", self.pattern.name);
        };
        let rows = ReduceRows {
            parts,
            tokens: self.shape.tokens as usize,
            hidden: self.shape.hidden as usize,
            output: write(&self.output),
            residual_in: read(&self.residual_in),
            gamma: read(&self.gamma),
            residual_out: write(&self.residual_out),
            norm_out: write(&self.norm_out),
            quant_out: write(&self.quant_out),
            scale_out: write(&self.scale_out),
            epsilon: given.rms_eps as f32,
            weight_bias: given.weight_bias as f32,
            quantise: self.quantise,
            scale_factor: read(&self.scale_factor).cast(),
        };
        Ok((rows, result.clone()))
    }
}
