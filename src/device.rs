//! The facts about a GPU that plans and launches need. `Device` can be made without a GPU, for plans of any architecture.

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

    /// The architecture named "sm_90", "90", "sm_90a" ...; None if no GPU in [`GPUS`] has it.
    pub fn parse(text: &str) -> Option<Arch> {
        let digits = text.strip_prefix("sm_").unwrap_or(text);
        let digits = digits.strip_suffix(['a', 'f']).unwrap_or(digits);
        GPUS.iter().map(|gpu| gpu.0).find(|number| number.to_string() == digits).map(Arch)
    }

    /// The architectures that `parse` knows, for messages.
    pub fn known() -> String {
        GPUS.map(|gpu| Arch(gpu.0).to_string()).join(", ")
    }

    /// The compiled architecture whose machine code runs on this one: 80 runs on all of 8.x, 90a only on 9.0, and an f on its family.
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

/// A usual GPU of each compute capability: multiprocessors, KiB of dynamic shared memory that a CTA can have, bytes a second of memory,
/// dense bf16 flop a second. Sizes of shared memory are from the CUDA programming guide. Bandwidths and rates are data-sheet values. If a
/// data sheet gives only another rate (Orin: int8, Thor and GB10: fp4, both sparse), the rate follows from that. The values of sm_90 are
/// what an H200 reached (docs/measured.md).
const GPUS: [(u32, &str, u32, u32, f64, f64); 10] = [
    (80, "A100", 108, 163, 2.0e12, 312e12),
    (86, "A40", 84, 99, 0.696e12, 150e12),
    (87, "Jetson AGX Orin", 16, 163, 0.205e12, 42.5e12),
    (89, "L40S", 142, 99, 0.86e12, 362e12),
    (90, "H200", 132, 227, 4.3e12, 790e12),
    (100, "B200", 148, 227, 8.0e12, 2250e12),
    (103, "B300", 148, 227, 8.0e12, 2250e12),
    (110, "Jetson AGX Thor", 20, 227, 0.273e12, 259e12),
    (120, "RTX PRO 6000 Blackwell", 188, 99, 1.79e12, 504e12),
    (121, "GB10 (DGX Spark)", 48, 99, 0.273e12, 125e12),
];

/// The numbers that a plan is a function of.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub arch: Arch,
    pub name: String,
    pub multiprocessors: u32,
    /// Whether the portable kernels replace this architecture's own, for tests (OXMOE_PORTABLE).
    pub portable: bool,
    /// Whether all CTAs that fit on its multiprocessors can run at once. They cannot on a stream of a green context or under an MPS limit.
    /// Kernels whose CTAs wait for each other are not used there.
    pub whole: bool,
    /// Most dynamic shared memory that a CTA can have, in bytes.
    pub shared_bytes: u32,
    /// Memory bandwidth in bytes a second, for the roofline in `explain`.
    pub bandwidth: f64,
    /// Dense bf16 tensor rate in flop a second, for the roofline in `explain`.
    pub flops: f64,
}

impl Device {
    /// The architecture's GPU in [`GPUS`], for plans without a GPU. An architecture that is not there has the last GPU before it.
    pub fn typical(arch: Arch) -> Device {
        let (_, name, multiprocessors, shared_kib, bandwidth, flops) =
            *GPUS.iter().rfind(|gpu| gpu.0 <= arch.0).unwrap_or(&GPUS[0]);
        let (name, shared_bytes) = (name.into(), shared_kib * 1024);
        Device { arch, name, multiprocessors, portable: false, whole: true, shared_bytes, bandwidth, flops }
    }

    /// Whether layers run on the kernels for Hopper.
    pub fn is_hopper(&self) -> bool {
        self.arch == Arch::SM90 && !self.portable
    }
}

/// Whether a CUDA driver can be opened. Every call of cudarc panics without one, so this is asked first, and once.
pub fn driver_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: the call opens and closes libcuda by name.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The error of a failed driver call. It says what was being done.
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
    /// The `fork::generation()` of the process that the context belongs to.
    generation: u32,
}

/// The CUDA version that the driver speaks, as CUDA numbers versions: 13000 is 13.0. It is asked once.
pub fn driver_version() -> Result<i32> {
    static VERSION: OnceLock<i32> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    if !driver_present() {
        return Err(Error::Cuda(
            "no CUDA driver: libcuda.so.1 was not found. CPU tensors work without one; for CUDA tensors install NVIDIA's driver (580 or later)"
                .into(),
        ));
    }
    let mut version = 0;
    // SAFETY: the call writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(|e| cuda_error("cuDriverGetVersion", e))?;
    Ok(*VERSION.get_or_init(|| version))
}

/// The CUDA version that a driver must support for this build's kernels. Machine code of a compiler runs on every driver of its major
/// version.
pub fn needed_version() -> i32 {
    let major = env!("OXMOE_NVCC_VERSION").split('.').next().and_then(|major| major.parse().ok());
    // A build without kernels needs version 13, by which the driver's functions are declared.
    1000 * major.unwrap_or(13).max(13)
}

/// The text of a CUDA version: "13.0" for 13000.
pub fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn require_version(version: i32, needed: i32) -> Result<()> {
    if version >= needed {
        return Ok(());
    }
    let driver = if needed == 13000 { "driver 580 or newer" } else { "a newer driver" };
    Err(Error::Cuda(format!(
        "driver speaks CUDA {}; this build needs {}: {driver}, or the cuda-compat package",
        version_text(version),
        version_text(needed)
    )))
}

fn initialised(done: std::result::Result<(), result::DriverError>) -> Result<i32> {
    done.map_err(|e| match (e.0, fork::generation()) {
        // The driver reports this in a child of a process that had used it.
        (sys::CUresult::CUDA_ERROR_NOT_INITIALIZED, 1..) => fork::cuda_error("cuInit"),
        _ => cuda_error("cuInit", e),
    })?;
    result::device::get_count().map_err(|e| cuda_error("cuDeviceGetCount", e))
}

/// The number of GPUs that the driver sees, also GPUs that are too old for this build. 0 if the driver may use none (an empty
/// CUDA_VISIBLE_DEVICES).
pub fn visible() -> Result<i32> {
    driver_version()?;
    match result::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        done => initialised(done),
    }
}

/// The number of GPUs, or an error that says why none can be used.
fn count() -> Result<i32> {
    require_version(driver_version()?, needed_version())?;
    initialised(result::init())
}

/// The GPU with this ordinal. Its primary context is retained on first use and kept.
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

/// Makes a GPU's primary context current while this value lives. It costs one driver call if the context already is current.
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
            // SAFETY: this context, or none (null), was current on this thread before. A failure to restore it leaves ours current, which is
            // harmless.
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
        for wrong in ["sm_75", "sm_95", "sm_115", "sm_88", "sm_sm_90", "sm_90aa", "sm_090", "sm_", ""] {
            assert_eq!(Arch::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Arch::parse("sm_103f"), Some(Arch(103)));
        assert_eq!((Arch(89).image(), Arch(103).image(), Arch(110).image()), ("80", "100f", "110f"));
    }
    #[test]
    fn every_gpu_is_its_own() {
        for (arch, name, multiprocessors, shared, ..) in GPUS {
            let device = Device::typical(Arch(arch));
            assert_eq!(
                (device.name.as_str(), device.multiprocessors, device.shared_bytes),
                (name, multiprocessors, shared << 10)
            );
        }
        // Compute capability 8.8 is not in the table.
        assert_eq!(Device::typical(Arch(88)).name, "Jetson AGX Orin");
    }

    #[test]
    fn a_driver_that_is_too_old_is_told() {
        assert!(require_version(13000, 13000).is_ok() && require_version(13020, 13000).is_ok());
        let said = |version, needed| require_version(version, needed).unwrap_err().to_string();
        let expected =
            "driver speaks CUDA 12.8; this build needs 13.0: driver 580 or newer, or the cuda-compat package";
        assert_eq!(said(12080, 13000), expected);
        assert!(said(13010, 14000).contains("needs 14.0: a newer driver"));
    }
}
