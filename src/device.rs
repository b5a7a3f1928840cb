//! What the plan and the launch need to know of a GPU. `Device` can be made without one, for plans of any architecture.

use crate::error::{Error, Result};
use crate::fork;
use cudarc::driver::{result, sys};
use std::sync::OnceLock;

/// A GPU generation that this crate has plans for, as compute capability * 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch(pub u32);

impl Arch {
    pub const SM80: Arch = Arch(80);
    pub const SM90: Arch = Arch(90);
    pub const SM100: Arch = Arch(100);
    pub const SM120: Arch = Arch(120);

    /// From "sm_90", "90", "sm_90a" ...
    pub fn parse(text: &str) -> Option<Arch> {
        let digits = text.trim_start_matches("sm_").trim_end_matches(|c: char| c.is_ascii_alphabetic());
        digits.parse().ok().filter(|&n: &u32| (80..=129).contains(&n)).map(Arch)
    }

    /// The compiled architecture whose machine code runs here: 80 runs on all of 8.x, 90a on 9.0 alone, an f on its family.
    pub fn image(self) -> &'static str {
        match self.0 {
            80..=89 => "80",
            90..=99 => "90a",
            100..=109 => "100f",
            110..=119 => "110f",
            _ => "120f",
        }
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

/// The numbers a plan is a function of.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub arch: Arch,
    pub name: String,
    pub multiprocessors: u32,
    /// Whether the kernels for any GPU take the place of this architecture's own: of tests (OXMOE_PORTABLE).
    pub portable: bool,
    /// Most dynamic shared memory a CTA can have, bytes.
    pub shared_bytes: u32,
    /// For the roofline in `explain`, bytes a second.
    pub bandwidth: f64,
    /// Dense bf16 tensor rate for the same, flop a second.
    pub flops: f64,
}

impl Device {
    /// A usual GPU of the architecture (A100, H200, B200, RTX PRO 6000 Blackwell), for plans without a GPU. Bandwidth and rate of
    /// sm_90 are what an H200 reached (docs/measured.md), the others are data-sheet values.
    pub fn typical(arch: Arch) -> Device {
        let (name, multiprocessors, shared_kib, bandwidth, flops) = match arch.0 {
            80 => ("A100", 108, 163, 2.0e12, 312e12),
            81..=89 => ("L40S", 142, 99, 0.86e12, 362e12),
            90..=99 => ("H200", 132, 227, 4.3e12, 790e12),
            100..=109 => ("B200", 148, 227, 8.0e12, 2250e12),
            _ => ("RTX PRO 6000 Blackwell", 188, 99, 1.79e12, 504e12),
        };
        let (name, shared_bytes) = (name.into(), shared_kib * 1024);
        Device { arch, name, multiprocessors, portable: false, shared_bytes, bandwidth, flops }
    }

    /// Whether layers run on the kernels for Hopper.
    pub fn is_hopper(&self) -> bool {
        self.arch == Arch::SM90 && !self.portable
    }
}

/// Whether a CUDA driver can be opened. Every call of cudarc panics without one, so this is asked first, once.
pub fn driver_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: opens and closes libcuda by name.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// A failed driver call as an error that says what was being done.
pub fn cuda_error(doing: impl std::fmt::Display, error: result::DriverError) -> Error {
    Error::Cuda(format!("{doing}: CUDA error {:?}", error.0))
}

pub const MAX_DEVICES: usize = 64;

/// A device with its primary context, which is the one torch uses.
#[derive(Debug)]
pub struct Gpu {
    pub ordinal: i32,
    pub device: Device,
    context: usize,
    /// `fork::generation()` of the process that the context belongs to.
    generation: u32,
}

/// All GPUs, or why there are none.
pub fn count() -> Result<i32> {
    if !driver_present() {
        return Err(Error::Cuda(
            "no CUDA driver: libcuda.so.1 was not found. CPU tensors work without one; for CUDA tensors install NVIDIA's driver (580 or later)"
                .into(),
        ));
    }
    result::init().map_err(|e| match (e.0, fork::generation()) {
        // What the driver says in a child of a process that had used it.
        (sys::CUresult::CUDA_ERROR_NOT_INITIALIZED, 1..) => fork::cuda_error("cuInit"),
        _ => cuda_error("cuInit", e),
    })?;
    result::device::get_count().map_err(|e| cuda_error("cuDeviceGetCount", e))
}

/// The GPU with this ordinal; its primary context is retained on first use and kept.
pub fn gpu(ordinal: i32) -> Result<&'static Gpu> {
    static GPUS: [OnceLock<Gpu>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
    let Some(slot) = usize::try_from(ordinal).ok().and_then(|i| GPUS.get(i)) else {
        return Err(Error::Cuda(format!("device ordinal {ordinal} is out of range")));
    };
    if let Some(gpu) = slot.get() {
        if gpu.generation != fork::generation() {
            return Err(fork::cuda_error(&format!("cuda:{ordinal}")));
        }
        return Ok(gpu);
    }
    let gpu = open(ordinal)?;
    Ok(slot.get_or_init(|| gpu))
}

fn open(ordinal: i32) -> Result<Gpu> {
    use sys::CUdevice_attribute_enum as A;
    let n = count()?;
    if ordinal >= n {
        return Err(Error::Cuda(format!("cuda:{ordinal} does not exist, the driver sees {n} GPUs")));
    }
    let doing = |what: &str| format!("{what} of cuda:{ordinal}");
    let dev = result::device::get(ordinal).map_err(|e| cuda_error(doing("cuDeviceGet"), e))?;
    // SAFETY: `dev` came from the driver.
    let ask =
        |a| unsafe { result::device::get_attribute(dev, a) }.map_err(|e| cuda_error(doing("cuDeviceGetAttribute"), e));
    let major = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
    let minor = ask(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
    let arch = Arch(major * 10 + minor);
    if arch < Arch::SM80 {
        return Err(Error::Cuda(format!("cuda:{ordinal} is {arch}; oxmoe has kernels from sm_80 (Ampere) on")));
    }
    let typical = Device::typical(arch);
    let name = result::device::get_name(dev).map_err(|e| cuda_error(doing("cuDeviceGetName"), e))?;
    // SAFETY: `dev` came from the driver; the context is retained for the life of the process.
    let context =
        unsafe { result::primary_ctx::retain(dev) }.map_err(|e| cuda_error(doing("cuDevicePrimaryCtxRetain"), e))?;
    let device = Device {
        arch,
        name,
        multiprocessors: ask(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        portable: std::env::var_os("OXMOE_PORTABLE").is_some_and(|value| value == "1"),
        shared_bytes: ask(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        ..typical
    };
    Ok(Gpu { ordinal, device, context: context as usize, generation: fork::generation() })
}

/// Makes a GPU's primary context current for as long as it lives; costs one driver call when it already is.
pub struct Current {
    previous: Option<sys::CUcontext>,
}

impl Current {
    pub fn new(gpu: &Gpu) -> Result<Current> {
        let context = gpu.context as sys::CUcontext;
        let previous = result::ctx::get_current().map_err(|e| cuda_error("cuCtxGetCurrent", e))?;
        if previous == Some(context) {
            return Ok(Current { previous: None });
        }
        // SAFETY: the primary context was retained by `open` and is never released.
        unsafe { result::ctx::set_current(context) }.map_err(|e| cuda_error("cuCtxSetCurrent", e))?;
        Ok(Current { previous: Some(previous.unwrap_or(std::ptr::null_mut())) })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: this context was current on this thread when we came; failure to restore leaves ours current, which is harmless.
            let _ = unsafe { result::ctx::set_current(previous) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Arch::parse("sm_90a"), Some(Arch::SM90));
        assert_eq!(Arch::parse("120"), Some(Arch::SM120));
        assert_eq!(Arch::parse("sm_75"), None);
        assert_eq!((Arch(89).image(), Arch(103).image(), Arch(110).image()), ("80", "100f", "110f"));
    }
}
