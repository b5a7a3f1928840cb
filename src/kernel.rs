//! Kernels: they are loaded once per device, and launched here and nowhere else.

use crate::device::{cuda_error, Current, Device, Gpu, MAX_DEVICES};
use crate::error::{Error, Result};
use crate::tensor::Checked;
use crate::variants::signature::{Parameter, Signature};
use crate::variants::{routing, Family, Kernel, Variant};
use cudarc::driver::{result, sys};
use std::ffi::{c_void, CString};
use std::fmt::{self, Display};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::OnceLock;

/// An image, aligned so that the driver may read it as words.
#[repr(C, align(64))]
#[allow(dead_code)] // unused by a build without kernels
struct Image<T: ?Sized>(T);

/// A kernel that is in the wheel: a row of the table that build.rs writes.
#[derive(Debug)]
pub struct Compiled {
    pub variant: Variant,
    pub symbol: &'static str,
    /// Index into IMAGES of the image that has this kernel.
    image: usize,
    /// Compiled architectures ("80", "90a", ...).
    pub archs: &'static [&'static str],
}

impl Compiled {
    /// Most dynamic shared memory that a launch on this device may ask for.
    fn dynamic_shared_limit(&self, device: &Device) -> u32 {
        self.variant.shared_bytes().unwrap_or(device.shared_bytes - routing::STATIC_SHARED)
    }
}

mod table {
    #[allow(unused_imports)] // a build without kernels does not use Image
    use super::{Compiled, Image};
    include!(concat!(env!("OUT_DIR"), "/images.rs"));
}
pub use table::{IMAGES, KERNELS};

/// The architectures that were compiled in, e.g. ["80", "90a"].
pub fn compiled_archs() -> Vec<&'static str> {
    env!("OXMOE_COMPILED_ARCHS").split(';').filter(|a| !a.is_empty()).collect()
}

/// How a kernel is launched that takes parameters of the types `P`. The plan makes it.
pub struct Launch<P> {
    pub kernel: Kernel<P>,
    pub grid: u32,
    pub block: u32,
    pub cluster: u32,
    pub shared_bytes: u32,
}

/// A launch without the types of its parameters, for texts and for lists of different launches. A stream does not take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnyLaunch {
    pub variant: Variant,
    pub grid: u32,
    pub block: u32,
    pub cluster: u32,
    pub shared_bytes: u32,
}

impl<P> Launch<P> {
    /// The launch without the types of its parameters.
    pub const fn any(self) -> AnyLaunch {
        let Launch { kernel, grid, block, cluster, shared_bytes } = self;
        AnyLaunch { variant: kernel.variant(), grid, block, cluster, shared_bytes }
    }
}

impl<P> Clone for Launch<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Launch<P> {}

impl<P> PartialEq for Launch<P> {
    fn eq(&self, other: &Self) -> bool {
        self.any() == other.any()
    }
}

impl<P> Eq for Launch<P> {}

impl<P> fmt::Debug for Launch<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.any(), f)
    }
}

impl fmt::Display for AnyLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AnyLaunch { variant, grid, block, cluster, shared_bytes } = self;
        let symbol = variant.symbol();
        write!(f, "{symbol} (grid {grid}, block {block}, cluster {cluster}, {shared_bytes} bytes of shared memory)")
    }
}

/// References to the values that a launch gives to a kernel. Their types are the kernel's signature.
pub trait Arguments {
    type Signature: Signature;

    /// The addresses of the values, in the order of the kernel's parameters.
    fn pointers(&self) -> [*mut c_void; 3];
}

fn address<T>(value: &T) -> *mut c_void {
    (value as *const T).cast_mut().cast()
}

impl<P: Parameter> Arguments for &P {
    type Signature = P;

    fn pointers(&self) -> [*mut c_void; 3] {
        [address(*self), std::ptr::null_mut(), std::ptr::null_mut()]
    }
}

impl<P, Q> Arguments for (&P, &Q)
where
    (P, Q): Signature,
{
    type Signature = (P, Q);

    fn pointers(&self) -> [*mut c_void; 3] {
        [address(self.0), address(self.1), std::ptr::null_mut()]
    }
}

impl<P, Q, R> Arguments for (&P, &Q, &R)
where
    (P, Q, R): Signature,
{
    type Signature = (P, Q, R);

    fn pointers(&self) -> [*mut c_void; 3] {
        [address(self.0), address(self.1), address(self.2)]
    }
}

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);
// SAFETY: this is a handle that the driver lets any thread use.
unsafe impl Send for Function {}
// SAFETY: this is a handle that the driver lets any thread use.
unsafe impl Sync for Function {}

struct Module(sys::CUmodule);
// SAFETY: this is a handle that the driver lets any thread use.
unsafe impl Send for Module {}
// SAFETY: this is a handle that the driver lets any thread use.
unsafe impl Sync for Module {}

/// The carveout of kernels that leave all memory except their own shared memory to the L1 cache.
const MOST_L1: i32 = sys::CUshared_carveout::CU_SHAREDMEM_CARVEOUT_MAX_L1 as i32;

static FUNCTIONS: [[OnceLock<Function>; KERNELS.len()]; MAX_DEVICES] =
    [const { [const { OnceLock::new() }; KERNELS.len()] }; MAX_DEVICES];
static MODULES: [[OnceLock<Module>; IMAGES.len()]; MAX_DEVICES] =
    [const { [const { OnceLock::new() }; IMAGES.len()] }; MAX_DEVICES];

/// Launches of each kernel that the driver accepted, counted for this process on all devices.
static LAUNCHES: [AtomicU64; KERNELS.len()] = [const { AtomicU64::new(0) }; KERNELS.len()];

/// Every kernel's symbol and the number of its launches.
pub fn launches() -> impl Iterator<Item = (&'static str, &'static AtomicU64)> {
    KERNELS.iter().map(|kernel| kernel.symbol).zip(&LAUNCHES)
}

/// Devices on which the driver has refused, as too large, a launch whose CTAs wait for each other. That happens to a process under an MPS
/// limit.
static PARTS: [AtomicBool; MAX_DEVICES] = [const { AtomicBool::new(false) }; MAX_DEVICES];

/// The index of the kernel in the table, which is sorted by family.
fn position(variant: &Variant) -> Option<usize> {
    let first = KERNELS.partition_point(|kernel| kernel.variant.family < variant.family);
    let of_family = KERNELS[first..].iter().take_while(|kernel| kernel.variant.family == variant.family);
    Some(first + of_family.map(|kernel| kernel.variant).position(|kernel| kernel == *variant)?)
}

/// Whether the wheel has machine code of this kernel for the device.
pub fn available(variant: &Variant, gpu: &Gpu) -> bool {
    position(variant).is_some_and(|i| KERNELS[i].archs.contains(&gpu.device.arch.image()))
}

/// Loads a kernel on a device if it is not loaded yet. It is called when weights are loaded, so that no launch inside a stream capture has
/// to load. The device's context must be current.
fn load(gpu: &Gpu, variant: &Variant) -> Result<(usize, Function)> {
    let functions = &FUNCTIONS[gpu.ordinal as usize];
    let row = position(variant);
    if let Some((index, function)) = row.and_then(|i| Some((i, functions[i].get()?))) {
        return Ok((index, *function));
    }
    let Some(index) = row.filter(|&i| KERNELS[i].archs.contains(&gpu.device.arch.image())) else {
        return Err(Error::Cuda(format!(
            "cuda:{} ({}) is {}; this wheel has {} for {}: build oxmoe with OXMOE_CUDA_ARCHS={}",
            gpu.ordinal,
            gpu.device.name,
            gpu.device.arch,
            variant.symbol(),
            row.map_or("no GPU".into(), |i| KERNELS[i].archs.join(", ")),
            gpu.device.arch.image()
        )));
    };
    let kernel = &KERNELS[index];
    let module = &MODULES[gpu.ordinal as usize][kernel.image];
    if module.get().is_none() {
        // SAFETY: the image is a fatbin made by nvcc at build time, 64-byte aligned, and alive for ever.
        let loaded = unsafe { result::module::load_data(IMAGES[kernel.image].as_ptr().cast()) }.map_err(|e| {
            cuda_error(format_args!("loading {} on cuda:{} ({})", kernel.symbol, gpu.ordinal, gpu.device.arch), e)
        })?;
        if let Err(second) = module.set(Module(loaded)) {
            // SAFETY: another thread was faster, and nobody has seen this copy.
            let _ = unsafe { result::module::unload(second.0) };
        }
    }
    let module = module.get().map(|m| m.0).unwrap_or(std::ptr::null_mut());
    let name = CString::new(kernel.symbol).unwrap_or_default();
    // SAFETY: the module was loaded above and is never unloaded.
    let function = unsafe { result::module::get_function(module, name) }
        .map_err(|e| cuda_error(format_args!("finding {}", kernel.symbol), e))?;
    let attribute = |which, value: i32| {
        // SAFETY: the function belongs to a loaded module.
        unsafe { result::function::set_function_attribute(function, which, value) }
            .map_err(|e| cuda_error(format_args!("setting {which:?} of {} to {value}", kernel.symbol), e))
    };
    use sys::CUfunction_attribute_enum as A;
    if kernel.dynamic_shared_limit(&gpu.device) > 48 * 1024 {
        attribute(A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.dynamic_shared_limit(&gpu.device) as i32)?;
    }
    if kernel.variant.streams() {
        attribute(A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, MOST_L1)?;
    }
    if matches!(kernel.variant.family, Family::Route | Family::RouteGivenIds) && gpu.device.arch.0 >= 90 {
        attribute(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
    }
    Ok((index, *functions[index].get_or_init(|| Function(function))))
}

/// Loads kernels ahead of their first launch.
pub fn prepare(gpu: &Gpu, variants: &[Variant]) -> Result<()> {
    let _current = Current::new(gpu)?;
    for variant in variants {
        load(gpu, variant)?;
    }
    Ok(())
}

/// A stream of a device whose context is current. Launches go to it.
pub struct Stream<'a> {
    gpu: &'a Gpu,
    raw: sys::CUstream,
    _current: Current,
}

impl<'a> Stream<'a> {
    /// `raw` is torch's current stream of this GPU. `Checked` proves that the operands of the call were compared with each other.
    pub fn new(gpu: &'a Gpu, raw: *mut c_void, _checked: &Checked<'_>) -> Result<Stream<'a>> {
        Ok(Stream { gpu, raw: raw.cast(), _current: Current::new(gpu)? })
    }

    pub fn device(&self) -> &Device {
        &self.gpu.device
    }

    /// Whether all CTAs of `launch`, which wait for each other, can run at once on this stream. The driver reports the size of a green
    /// context. On other streams the answer is true until the driver has refused such a launch on this device.
    pub fn holds(&self, launch: &AnyLaunch) -> bool {
        let ctas = |multiprocessors: u32| multiprocessors * launch.variant.ctas_per_multiprocessor();
        !PARTS[self.gpu.ordinal as usize].load(Ordering::Relaxed)
            && self.green_multiprocessors().is_none_or(|part| launch.grid <= ctas(part))
    }

    /// Multiprocessors of the stream's green context, if it has one.
    fn green_multiprocessors(&self) -> Option<u32> {
        // The streams that CUDA names by a number belong to the primary context, which is current.
        if self.raw as usize <= 2 {
            return None;
        }
        let mut green = std::ptr::null_mut();
        // SAFETY: this is torch's stream, and the call writes one handle.
        let asked = unsafe { sys::cuStreamGetGreenCtx(self.raw, &mut green) };
        if asked != sys::CUresult::CUDA_SUCCESS || green.is_null() {
            return None;
        }
        let mut resource = std::mem::MaybeUninit::<sys::CUdevResource>::zeroed();
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: the driver gave the handle, and the call writes one struct.
        let asked = unsafe { sys::cuGreenCtxGetDevResource(green, resource.as_mut_ptr(), kind) };
        // SAFETY: the struct was zeroed, then written as a resource of this kind.
        (asked == sys::CUresult::CUDA_SUCCESS).then(|| unsafe { resource.assume_init().__bindgen_anon_1.sm.smCount })
    }

    pub fn gpu(&self) -> &Gpu {
        self.gpu
    }

    /// Writes `count` zeros, in stream order.
    ///
    /// # Safety
    /// `to` points to memory of this device, which the caller may write.
    pub unsafe fn zero(&self, op: impl Display, to: *mut i32, count: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { result::memset_d8_async(to as u64, 0, 4 * count, self.raw) }
            .map_err(|e| cuda_error(format_args!("{op}: zeroing {count} counters"), e))
    }

    /// Copies `bytes` of device memory, in stream order.
    ///
    /// # Safety
    /// `to` and `from` are ranges of this device's memory that the caller may write and read, and they do not overlap.
    pub unsafe fn copy(&self, op: &str, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { result::memcpy_dtod_async(to as u64, from as u64, bytes, self.raw) }
            .map_err(|e| cuda_error(format_args!("{op}: copying {bytes} bytes"), e))
    }

    /// Copies `bytes` of device memory to the host, and waits for them.
    ///
    /// # Safety
    /// `to` and `from` are ranges that the caller may write and read.
    pub unsafe fn read(&self, op: &str, to: *mut u8, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        // SAFETY: the caller's contract; `to` outlives the copy, because this function waits for it.
        unsafe { result::memcpy_dtoh_async(to, from as u64, self.raw) }
            .map_err(|e| cuda_error(format_args!("{op}: reading {bytes} bytes"), e))?;
        // SAFETY: this is torch's stream, which the caller holds.
        unsafe { result::stream::synchronize(self.raw) }
            .map_err(|e| cuda_error(format_args!("{op}: waiting for its stream"), e))
    }

    /// Whether launches go into a CUDA graph.
    pub fn is_capturing(&self) -> Result<bool> {
        // SAFETY: this is torch's stream, which the caller holds.
        unsafe { result::stream::is_capturing(self.raw) }
            .map(|status| status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
            .map_err(|e| cuda_error("cuStreamIsCapturing", e))
    }

    /// Launches one kernel with programmatic dependent launch: it may start while its predecessor drains, and waits on the device
    /// (griddepcontrol.wait) before it touches anything an earlier kernel wrote.
    ///
    /// The arguments have the types that the kernel takes:
    /// ```
    /// use _oxmoe::kernel::{Launch, Stream};
    /// use _oxmoe::params::CombineParams;
    ///
    /// fn run(stream: &Stream, launch: &Launch<CombineParams>, params: &CombineParams) {
    ///     let _ = stream.launch("combine", launch, params);
    /// }
    /// ```
    /// Other types do not compile:
    /// ```compile_fail,E0308
    /// use _oxmoe::kernel::{Launch, Stream};
    /// use _oxmoe::params::{CombineParams, ScheduleParams};
    ///
    /// fn run(stream: &Stream, launch: &Launch<CombineParams>, params: &ScheduleParams) {
    ///     let _ = stream.launch("combine", launch, params);
    /// }
    /// ```
    pub fn launch<A: Arguments>(&self, op: impl Display, launch: &Launch<A::Signature>, arguments: A) -> Result<()> {
        let launch = &launch.any();
        let (index, function) = load(self.gpu, &launch.variant)?;
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        }; 2];
        let mut count = 0;
        if self.gpu.device.arch >= crate::device::Arch::SM90 {
            count = 1;
            if launch.cluster > 1 {
                attributes[1].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
                attributes[1].value.clusterDim.x = launch.cluster;
                attributes[1].value.clusterDim.y = 1;
                attributes[1].value.clusterDim.z = 1;
                count = 2;
            }
            // CTAs of this kernel wait for each other. All of them must start, or none, also beside kernels of another stream.
            if launch.variant.is_one_launch() {
                attributes[count as usize].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                attributes[count as usize].value.cooperative = 1;
                count += 1;
            }
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        let mut pointers = arguments.pointers();
        // SAFETY: `pointers` has the addresses of the parameters that this kernel's signature takes, since launch and arguments have one
        // signature. They live until the call returns. The op's contract has checked the device memory behind them.
        unsafe { sys::cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(|e| self.launch_error(&op, launch, e))?;
        LAUNCHES[index].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn launch_error(&self, op: &dyn Display, launch: &AnyLaunch, error: result::DriverError) -> Error {
        if error.0 != sys::CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE {
            return cuda_error(format_args!("{op}: launching {launch}"), error);
        }
        // The refusal is not remembered for a green context, because it concerns only one stream.
        if self.green_multiprocessors().is_none() {
            PARTS[self.gpu.ordinal as usize].store(true, Ordering::Relaxed);
        }
        Error::TooLarge(format!(
            "{op}: launching {launch}: this stream has too few multiprocessors for all CTAs at once"
        ))
    }
}
