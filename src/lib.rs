//! oxmoe: SGLang's MoE layers on Rust and CUDA. This file lists the names that Python sees.

pub mod allreduce;
mod counters;
pub mod cpu;
pub mod dense;
pub mod desc;
pub mod device;
mod dlpack;
pub mod error;
mod float_mode;
mod fork;
pub mod kernel;
pub mod moe;
mod parallel;
pub mod params;
#[cfg(test)] // only the build script uses it
mod platform;
pub mod python;
pub mod quant;
mod sizes;
mod stats;
pub mod tensor;
pub mod tma;
pub mod variants;
pub mod workspace;

use pyo3::prelude::*;

#[doc = crate::help!("_oxmoe")]
#[pymodule]
mod _oxmoe {
    #[pymodule_export]
    use crate::allreduce::gpu::{allreduce_unsupported, AllReduceMemory};
    #[pymodule_export]
    use crate::allreduce::{allreduce_bytes, allreduce_finish, allreduce_message, allreduce_shape};
    #[pymodule_export]
    use crate::dense::mm_mxfp8;
    #[pymodule_export]
    use crate::device_info;
    #[pymodule_export]
    use crate::moe::explain::{explain, shape_workspace_bytes, workspace_bytes};
    #[pymodule_export]
    use crate::moe::masked::{masked_workspace_bytes, moe_contiguous, moe_masked};
    #[pymodule_export]
    use crate::moe::topk::{routing_tables, sort_by_expert, topk};
    #[pymodule_export]
    use crate::moe::weights::handle::experts_of;
    #[pymodule_export]
    use crate::moe::weights::ExpertWeights;
    #[pymodule_export]
    use crate::moe::{moe, moe_tensors};
    #[pymodule_export]
    use crate::quant::fp8_ops::quantize_fp8;
    #[pymodule_export]
    use crate::quant::layout_ops::{
        deinterleave_sm90_mxfp4, interleave_sm90_mxfp4, swizzle_hopper_mxfp4, unswizzle_hopper_mxfp4,
    };
    #[pymodule_export]
    use crate::quant::mxfp8_ops::{dequantize_mxfp8, quantize_mxfp8};
    #[pymodule_export]
    use crate::quant::nvfp4_ops::quantize_nvfp4;
    #[pymodule_export]
    use crate::quant::ops::{dequantize_mxfp4, quantize_mxfp4};
    #[pymodule_export]
    use crate::quant::packed_ops::{pack_mxfp4, unpack_mxfp4};
    #[pymodule_export]
    use crate::quant::row_ops::quantize_rows_e4m3;
    #[pymodule_export]
    use crate::stats::stats;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::fork::watch();
        crate::moe::add_constructors(&m.getattr("ExpertWeights")?)?;
        m.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

#[doc = crate::help!("device_info")]
#[pyfunction(crate = "crate::python")]
fn device_info(py: Python<'_>) -> PyResult<Bound<'_, pyo3::types::PyDict>> {
    let info = pyo3::types::PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("commit", option_env!("OXMOE_BUILT_FROM"))?;
    info.set_item("nvcc", env!("OXMOE_NVCC_VERSION"))?;
    info.set_item("archs", kernel::compiled_archs())?;
    info.set_item("kernels", kernel::KERNELS.len())?;
    let formats = pyo3::types::PyDict::new(py);
    for format in &quant::FORMATS {
        formats.set_item(format.name, if format.cuda { vec!["cuda", "cpu"] } else { vec!["cpu"] })?;
    }
    info.set_item("formats", formats)?;
    info.set_item("cpu", cpu::instruction_set())?;
    info.set_item("threads", parallel::threads())?;
    info.set_item("driver", device::driver_present())?;
    let version = if device::driver_present() { Some(error::guard(device::driver_version)?) } else { None };
    info.set_item("driver_cuda", version.map(device::version_text))?;
    info.set_item("needed_cuda", device::version_text(device::needed_version()))?;
    let gpus = pyo3::types::PyList::empty(py);
    for ordinal in 0..error::guard(|| if device::driver_present() { device::visible() } else { Ok(0) })? {
        let entry = pyo3::types::PyDict::new(py);
        match error::guard(|| device::gpu(ordinal)) {
            Ok(gpu) => {
                entry.set_item("name", &gpu.device.name)?;
                entry.set_item("arch", gpu.device.arch.to_string())?;
                entry.set_item("multiprocessors", gpu.device.multiprocessors)?;
                entry.set_item("shared_bytes", gpu.device.shared_bytes)?;
                entry.set_item("kernels", kernel::compiled_archs().contains(&gpu.device.arch.image()))?;
            }
            // An unusable GPU does not hide the others. It may be older than sm_80, and under a driver that is too old no GPU is usable.
            Err(error) => {
                entry.set_item("name", error.value(py).to_string())?;
                entry.set_item("arch", "not supported")?;
                entry.set_item("multiprocessors", 0)?;
                entry.set_item("shared_bytes", 0)?;
                entry.set_item("kernels", false)?;
            }
        }
        gpus.append(entry)?;
    }
    info.set_item("gpus", gpus)?;
    Ok(info)
}
