//! Both GEMMs of a layer and what rounds their rows: the part of a call that `moe` and the calls on rows in order share.

use super::formats::fp8;
use super::grouped_gemm::{self, Gemm};
use super::layer::Layer;
use super::plan::GemmsPlan;
use super::rounding::Rounding;
use crate::cpu;
use crate::error::Result;
use crate::kernel::Stream;
use crate::params::GroupedGemmParams;

/// The parameters of the stages; device and CPU run the same ones.
#[derive(Clone, Copy)]
pub struct Gemms {
    pub up: GroupedGemmParams,
    pub down: GroupedGemmParams,
    /// What rounds x, unless it came rounded, and GEMM1's output.
    pub rounding: [Option<Rounding>; 2],
    pub fp8: Option<fp8::Between>,
}

/// What errors call the launches.
pub struct Names {
    pub x: &'static str,
    pub up: &'static str,
    pub hidden: &'static str,
    pub down: &'static str,
    pub both: &'static str,
}

impl Gemms {
    /// The launches of the plan. `counters`: zeros, as in `Counters`.
    pub fn run_cuda(
        &self,
        stream: &Stream<'_>,
        names: &Names,
        plan: &GemmsPlan,
        layer: &Layer,
        counters: *mut i32,
    ) -> Result<()> {
        let [of_x, of_hidden] = plan.quantize;
        let Gemms { mut up, mut down, rounding: [x, hidden], fp8 } = *self;
        if let Some(x) = &x {
            // A launch here stands between the schedule and GEMM1, which then need not wait for the schedule.
            up.schedule_is_older = x.launch(stream, names.x, of_x)?;
        }
        if let (Some(fp8), [None, None]) = (&fp8, of_hidden) {
            (up.out, up.out_scales) = (fp8.hidden.codes, fp8.hidden.scales.cast());
        }
        grouped_gemm::overlap(plan.overlap, counters, (&mut up, &mut down));
        let Some(plan_down) = plan.down else {
            return grouped_gemm::launch_both(stream, names.both, &plan.up, &up, &down);
        };
        let [up_order, down_order] = fp8.map_or([None; 2], |fp8| fp8.orders.map(Some));
        grouped_gemm::launch(stream, names.up, &plan.up, (layer, Gemm::Up), &up, up_order)?;
        if let Some(hidden) = &hidden {
            hidden.launch(stream, names.hidden, of_hidden)?;
        }
        grouped_gemm::launch(stream, names.down, &plan_down, (layer, Gemm::Down), &down, down_order)
    }

    /// # Safety
    /// Every pointer is valid for the parameters' shapes, and the schedule is written.
    pub unsafe fn run_cpu(&self, layer: &Layer) {
        let dtype = layer.desc.dtype;
        // SAFETY: the caller's contract.
        unsafe {
            if let Some(x) = &self.rounding[0] {
                x.on_cpu();
            }
            cpu::grouped_gemm(&self.up, dtype, layer.up.blocks);
            if let Some(hidden) = &self.rounding[1] {
                hidden.on_cpu();
            }
            cpu::grouped_gemm(&self.down, dtype, layer.down.blocks);
        }
    }
}
