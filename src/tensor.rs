//! The border: Python tensors through DLPack. Only this module uses `dlpack.rs`.
//!
//! A tensor comes in two types. [`Borrowed`] lives for one call: it has the lifetime of the interpreter lock, so the compiler refuses to
//! store it. [`Owned`] lives as long as its holder: it keeps the storage itself alive and notices at a call if that storage was taken away.
//! Only a [`Contract`] borrows, because borrowing is what records that a call reads or writes an operand.

mod contract;
mod elem;
mod owned;
mod running;
mod storage;
#[cfg(test)]
mod tests;

pub use contract::{check_dtype, Checked, Contract, Dim, Span};
pub use elem::Elem;
pub use owned::Owned;

use crate::contract;
use crate::dlpack;
use crate::error::{Error, Result};
use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{ffi, intern};
use std::ffi::c_void;
use std::fmt;

/// The device that a tensor is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(i32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(i) => write!(f, "cuda:{i}"),
        }
    }
}

/// The package that a tensor object comes from. It decides how new tensors are made and where the current stream is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// torch with the DLPack C exchange table (2.10 and later).
    Torch(&'static dlpack::ExchangeApi),
    /// A type of another package that publishes such a table. Its tensors are treated like those of `Other`.
    Table(&'static dlpack::ExchangeApi),
    /// torch without the table (2.9).
    OldTorch,
    /// numpy, or anything else with `__dlpack__`.
    Other,
}

// SAFETY: the table is immutable static data of the package that published it.
unsafe impl Send for Origin {}
// SAFETY: the table is immutable static data of the package that published it.
unsafe impl Sync for Origin {}

impl PartialEq for dlpack::ExchangeApi {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}
impl Eq for dlpack::ExchangeApi {}
impl fmt::Debug for dlpack::ExchangeApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DLPack {}.{}", self.version.major, self.version.minor)
    }
}

const MAX_DIMS: usize = 6;
/// Versions of the exchange table that a type may publish, one behind the other.
const MAX_TABLES: usize = 16;

/// The description of a tensor: its address, element type, place and shape. It is plain data that keeps nothing alive.
#[derive(Clone, Debug)]
pub struct View {
    pub data: *mut u8,
    pub elem: Elem,
    pub place: Place,
    pub origin: Origin,
    /// Whether its owner forbids writes (a numpy array that is not writeable, memory-mapped files).
    pub read_only: bool,
    ndim: usize,
    shape: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
}

impl View {
    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.ndim]
    }

    pub fn numel(&self) -> i64 {
        self.shape().iter().product()
    }

    /// Bytes of the elements, without gaps between them.
    pub fn bytes(&self) -> usize {
        self.numel() as usize * self.elem.bytes()
    }

    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.ndim]
    }

    pub fn contiguous(&self) -> bool {
        let mut expected = 1;
        for i in (0..self.ndim).rev() {
            if self.shape[i] != 1 && self.strides[i] != expected {
                return self.numel() == 0;
            }
            expected *= self.shape[i];
        }
        true
    }

    /// The first address that the tensor occupies and the first one behind it, gaps included. They are equal if it has no elements.
    pub fn extent(&self) -> (usize, usize) {
        let start = self.data as usize;
        let (below, above) = self.reach().unwrap_or_default();
        (start.wrapping_sub(below as usize), start.wrapping_add(above as usize))
    }

    /// torch's current CUDA stream of this tensor's device, also while a graph is being captured.
    pub fn current_stream(&self, py: Python<'_>) -> Result<*mut c_void> {
        let Place::Cuda(device) = self.place else { return Ok(std::ptr::null_mut()) };
        match self.origin {
            Origin::Torch(dlpack::ExchangeApi { current_stream: Some(current), .. }) => {
                let mut stream = std::ptr::null_mut();
                // SAFETY: the GIL is held, and the call writes one pointer.
                if unsafe { current(dlpack::CUDA, device, &mut stream) } != 0 {
                    return Err(PyErr::fetch(py).into());
                }
                Ok(stream)
            }
            Origin::Torch(_) | Origin::OldTorch => {
                let torch = py.import(intern!(py, "torch._C"))?;
                let stream: usize =
                    torch.getattr(intern!(py, "_cuda_getCurrentRawStream"))?.call1((device,))?.extract()?;
                Ok(stream as *mut c_void)
            }
            Origin::Other | Origin::Table(_) => Err(Error::Unsupported(
                "CUDA tensors must be torch tensors: their current stream is read from torch".to_string(),
            )),
        }
    }

    /// The view of a tensor that a producer described, with its numbers checked. `operand` names it in errors.
    fn from_dlpack(operand: &'static str, t: &dlpack::Tensor, origin: Origin, read_only: bool) -> Result<View> {
        let place = match t.device.device_type {
            dlpack::CPU | 3 => Place::Cpu, // 3: page-locked host memory
            dlpack::CUDA if t.device.device_id >= 0 => Place::Cuda(t.device.device_id),
            dlpack::CUDA => contract!("{operand}: is on cuda:{}, which is no device", t.device.device_id),
            other => contract!("{operand}: is on DLPack device type {other}; expected cpu or cuda"),
        };
        let ndim = match usize::try_from(t.ndim) {
            Ok(ndim) if ndim <= MAX_DIMS => ndim,
            _ => contract!("{operand}: has {} dimensions, at most {MAX_DIMS} are understood", t.ndim),
        };
        if ndim > 0 && t.shape.is_null() {
            contract!("{operand}: has {ndim} dimensions and no shape");
        }
        let (mut shape, mut strides) = ([0i64; MAX_DIMS], [0i64; MAX_DIMS]);
        for (i, size) in shape.iter_mut().enumerate().take(ndim) {
            // SAFETY: in DLPack, shape points to ndim numbers. Nothing says that they are aligned.
            *size = unsafe { t.shape.add(i).read_unaligned() };
        }
        let mut dense = 1i64;
        for i in (0..ndim).rev() {
            // SAFETY: in DLPack, strides points to ndim numbers or is null.
            strides[i] = if t.strides.is_null() { dense } else { unsafe { t.strides.add(i).read_unaligned() } };
            dense = dense.saturating_mul(shape[i]);
        }
        let data = (t.data as usize).checked_add(t.byte_offset as usize);
        let view = View {
            data: data.unwrap_or_default() as *mut u8,
            elem: Elem::from_dlpack(t.dtype),
            place,
            origin,
            read_only,
            ndim,
            shape,
            strides,
        };
        if data.is_none() || !view.is_addressable() {
            contract!("{operand}: has shape {:?} and strides {:?}, which no memory has", view.shape(), view.strides());
        }
        if t.data.is_null() && view.numel() > 0 {
            contract!("{operand}: has no data (a fake or meta tensor, or one whose storage was freed)");
        }
        Ok(view)
    }

    /// Whether no size is negative, and no product of sizes and no address of an element leaves the numbers that the crate counts with.
    fn is_addressable(&self) -> bool {
        self.reach().is_some()
    }

    /// Bytes before and behind `data` that the elements occupy. None if they do not fit into an address space.
    fn reach(&self) -> Option<(i64, i64)> {
        let limit = i64::MAX / 4;
        // Sizes beside a 0 count too, because shapes are multiplied before a tensor is known to be empty.
        let (mut count, mut below, mut above, mut empty) = (1i64, 0i64, 0i64, false);
        for (&size, &stride) in self.shape().iter().zip(self.strides()) {
            if size < 0 {
                return None;
            }
            empty |= size == 0;
            count = count.checked_mul(size.max(1))?;
            if size > 1 {
                let reach = (size - 1).checked_mul(stride)?;
                let side = if reach < 0 { &mut below } else { &mut above };
                *side = side.checked_add(reach)?;
            }
        }
        let bytes = self.elem.bytes().max(1) as i64;
        if count.checked_mul(bytes)? > limit {
            return None;
        }
        if empty {
            return Some((0, 0));
        }
        let (below, above) = (below.checked_neg()?.checked_mul(bytes)?, above.checked_add(1)?.checked_mul(bytes)?);
        let start = i64::try_from(self.data as usize).ok()?;
        (below <= start && start.checked_add(above)? <= limit * 2).then_some((below, above))
    }
}

/// A tensor for one call. It holds a reference to the Python object, and its lifetime is that of the interpreter lock.
#[derive(Clone, Debug)]
pub struct Borrowed<'py> {
    view: View,
    object: Bound<'py, PyAny>,
    /// The capsule that a producer made for this borrow. None for exchange tables, whose borrows are the object's own memory.
    _capsule: Option<Capsule<'py>>,
}

impl std::ops::Deref for Borrowed<'_> {
    type Target = View;
    fn deref(&self) -> &View {
        &self.view
    }
}

impl<'py> Borrowed<'py> {
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    pub fn into_object(self) -> Bound<'py, PyAny> {
        self.object
    }

    /// This tensor with its last two dimensions exchanged.
    pub fn transposed(mut self) -> Borrowed<'py> {
        let view = &mut self.view;
        if let Some(last) = view.ndim.checked_sub(1).filter(|&last| last > 0) {
            view.shape.swap(last - 1, last);
            view.strides.swap(last - 1, last);
        }
        self
    }

    /// Borrows a Python object. `operand` names it in errors. The function is private because `Contract` borrows and records.
    fn borrow(operand: &'static str, object: &Bound<'py, PyAny>) -> Result<Borrowed<'py>> {
        match origin_of(object)? {
            Origin::Torch(api) => {
                let tensor = exchange(operand, object, api)?;
                Self::refuse_lazy_state(operand, object, Elem::from_dlpack(tensor.dtype).may_require_grad())?;
                let view = View::from_dlpack(operand, &tensor, Origin::Torch(api), false)?;
                Self::refuse_no_storage(operand, object, &view)?;
                Ok(Borrowed { view, object: object.clone(), _capsule: None })
            }
            Origin::Table(api) => {
                let view = View::from_dlpack(operand, &exchange(operand, object, api)?, Origin::Other, false)?;
                Ok(Borrowed { view, object: object.clone(), _capsule: None })
            }
            origin => Self::borrow_capsule(operand, object, origin),
        }
    }

    /// Refuses a torch tensor whose storage does not hold it: it is fake, freed, or shrunk by `resize_` of the storage.
    fn refuse_no_storage(operand: &'static str, object: &Bound<'_, PyAny>, view: &View) -> Result<()> {
        if view.numel() == 0 {
            return Ok(());
        }
        let Some(memory) = storage::Memory::of_tensor(object)? else { return Ok(()) };
        if memory.address == 0 {
            contract!("{operand}: has no data (a fake or meta tensor, or one whose storage was freed)");
        }
        if !memory.holds(view.extent()) {
            contract!("{operand}: its storage has {} bytes, which do not hold it", memory.bytes);
        }
        Ok(())
    }

    /// Refuses states of a tensor that `__dlpack__` checks, but the exchange table and `_to_dlpack_versioned` do not.
    fn refuse_lazy_state(operand: &'static str, object: &Bound<'_, PyAny>, may_require_grad: bool) -> Result<()> {
        let py = object.py();
        if may_require_grad && object.getattr(intern!(py, "requires_grad"))?.is_truthy()? && grad_enabled(py)? {
            contract!("{operand}: requires grad; oxmoe has no backward: pass {operand}.detach() or call under torch.no_grad()");
        }
        if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            contract!("{operand}: has its negative bit set (a lazily negated view); pass {operand}.resolve_neg()");
        }
        Ok(())
    }

    /// Borrows through torch 2.9's function (it neither synchronises nor asks for a stream), or through the Python protocol for other
    /// origins.
    fn borrow_capsule(operand: &'static str, object: &Bound<'py, PyAny>, origin: Origin) -> Result<Borrowed<'py>> {
        let py = object.py();
        let mut narrow = None;
        let capsule = if origin == Origin::OldTorch {
            Self::refuse_lazy_state(operand, object, true)?;
            narrow = narrow_float(object)?;
            let exported = if narrow.is_some() { bytes_of(object)? } else { object.clone() };
            py.import(intern!(py, "torch._C"))?.getattr(intern!(py, "_to_dlpack_versioned"))?.call1((exported,))
        } else {
            let method = object.getattr_opt(intern!(py, "__dlpack__"))?.filter(|method| !method.is_none());
            let Some(method) = method else {
                contract!("{operand}: expected a torch tensor or a numpy array, got {}", object.get_type().name()?);
            };
            versioned_capsule(&method)
        };
        let capsule = match capsule {
            Ok(capsule) => Capsule(capsule),
            Err(error) => match read_only_array(operand, object)? {
                Some(view) => return Ok(Borrowed { view, object: object.clone(), _capsule: None }),
                None => contract!("{operand}: cannot be read through DLPack: {}", reason(py, error)?),
            },
        };
        let Some((tensor, read_only)) = capsule.tensor() else {
            contract!("{operand}: __dlpack__ returned no DLPack capsule of version 0 or 1, or one that was used")
        };
        let mut view = View::from_dlpack(operand, &tensor, origin, read_only)?;
        if let Some(elem) = narrow {
            view.elem = elem;
        }
        if origin == Origin::OldTorch {
            Self::refuse_no_storage(operand, object, &view)?;
        }
        Ok(Borrowed { view, object: object.clone(), _capsule: Some(capsule) })
    }
}

/// The tensor that an exchange table describes for an object of its type.
fn exchange(
    operand: &'static str,
    object: &Bound<'_, PyAny>,
    api: &'static dlpack::ExchangeApi,
) -> Result<dlpack::Tensor> {
    let py = object.py();
    let Some(from_object) = api.tensor_from_object else {
        return Err(Error::Unsupported(format!("{operand}: torch's exchange table has no tensor_from_object")));
    };
    // A function that says it succeeded and wrote nothing leaves device type 0, which is refused.
    let mut tensor = std::mem::MaybeUninit::<dlpack::Tensor>::zeroed();
    // SAFETY: the GIL is held, the object is of a type that publishes this table, and zeros are a valid tensor.
    unsafe {
        if from_object(object.as_ptr().cast(), tensor.as_mut_ptr()) != 0 {
            let error = PyErr::take(py).map(|error| reason(py, error)).transpose()?;
            let error = error.unwrap_or("its type's exchange table says no more".into());
            contract!("{operand}: cannot be read: {error}");
        }
        Ok(tensor.assume_init())
    }
}

/// The first line of a producer's exception. An interrupt and missing memory are no fault of the operand, so they stay what they are.
fn reason(py: Python<'_>, error: PyErr) -> Result<String> {
    if !error.is_instance_of::<PyException>(py) || error.is_instance_of::<PyMemoryError>(py) {
        return Err(error.into());
    }
    Ok(error.value(py).to_string().lines().next().unwrap_or_default().into())
}

/// Asks for a capsule that says whether its memory may be written. Producers of the older protocol do not know this argument.
fn versioned_capsule<'py>(method: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = method.py();
    let kwargs = PyDict::new(py);
    kwargs.set_item(intern!(py, "max_version"), (1, 0))?;
    match method.call((), Some(&kwargs)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call0(),
        result => result,
    }
}

/// The type of a torch tensor of floats of eight bits, or of pairs of four bits. torch 2.9 refuses to export these.
fn narrow_float(object: &Bound<'_, PyAny>) -> Result<Option<Elem>> {
    let py = object.py();
    let dtype = object.getattr(intern!(py, "dtype"))?;
    if dtype.getattr(intern!(py, "itemsize"))?.extract::<usize>()? != 1 {
        return Ok(None);
    }
    Ok(Elem::narrow_float(dtype.str()?.to_str()?))
}

/// A view of a torch tensor's bytes, for elements of one byte.
fn bytes_of<'py>(object: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    let py = object.py();
    let bytes = py.import(intern!(py, "torch"))?.getattr(intern!(py, "uint8"))?;
    Ok(object.call_method1(intern!(py, "view"), (bytes,))?)
}

/// A read-only numpy array, as its array interface describes it. numpy before 2.1 does not export such an array.
fn read_only_array(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<Option<View>> {
    let py = object.py();
    let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? else { return Ok(None) };
    let field = |name| interface.get_item(name);
    let (address, read_only): (usize, bool) = field(intern!(py, "data"))?.extract()?;
    let (mut shape, kind): (Vec<i64>, String) =
        (field(intern!(py, "shape"))?.extract()?, field(intern!(py, "typestr"))?.extract()?);
    let code = match kind.as_bytes() {
        [b'<' | b'|', b'f', ..] => 2,
        [b'<' | b'|', b'i', ..] => 0,
        [b'<' | b'|', b'u', ..] => 1,
        _ => return Ok(None),
    };
    let Some(bytes) = kind.get(2..).and_then(|digits| digits.parse::<i64>().ok()).filter(|&n| (1..=8).contains(&n))
    else {
        return Ok(None);
    };
    let strides: Option<Vec<i64>> = field(intern!(py, "strides"))?.extract()?;
    // There must be one stride for each size.
    let whole = |all: &Vec<i64>| all.len() == shape.len() && all.iter().all(|stride| stride % bytes == 0);
    if !read_only || !strides.as_ref().is_none_or(whole) {
        return Ok(None);
    }
    let mut strides: Option<Vec<i64>> = strides.map(|all| all.iter().map(|stride| stride / bytes).collect());
    let tensor = dlpack::Tensor {
        data: address as *mut c_void,
        device: dlpack::DeviceRef { device_type: dlpack::CPU, device_id: 0 },
        ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
        dtype: dlpack::DataType { code, bits: 8 * bytes as u8, lanes: 1 },
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut().map_or(std::ptr::null_mut(), |all| all.as_mut_ptr()),
        byte_offset: 0,
    };
    View::from_dlpack(operand, &tensor, Origin::Other, true).map(Some)
}

/// A DLPack capsule that was not consumed. Its own destructor frees the managed tensor when the last reference goes.
#[derive(Clone, Debug)]
struct Capsule<'py>(Bound<'py, PyAny>);

impl Capsule<'_> {
    /// The tensor, and whether it must not be written.
    fn tensor(&self) -> Option<(dlpack::Tensor, bool)> {
        let capsule = self.0.as_ptr();
        // SAFETY: names are checked before the pointers are followed. The capsule owns the structs and lives as long as self. The structs may be
        // misaligned. Only a struct of major version 1 is known to have the fields behind its version.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, dlpack::CAPSULE_VERSIONED.as_ptr()) == 1 {
                let p = ffi::PyCapsule_GetPointer(capsule, dlpack::CAPSULE_VERSIONED.as_ptr())
                    .cast::<dlpack::ManagedVersioned>();
                let version = (&raw const (*p).version).read_unaligned();
                (version.major == 1).then(|| {
                    let flags = (&raw const (*p).flags).read_unaligned();
                    ((&raw const (*p).tensor).read_unaligned(), flags & dlpack::READ_ONLY != 0)
                })
            } else if ffi::PyCapsule_IsValid(capsule, dlpack::CAPSULE.as_ptr()) == 1 {
                let p = ffi::PyCapsule_GetPointer(capsule, dlpack::CAPSULE.as_ptr()).cast::<dlpack::Managed>();
                Some(((&raw const (*p).tensor).read_unaligned(), false))
            } else {
                None
            }
        }
    }
}

/// The type of the first tensor seen, with its origin. Nearly every tensor of a process is of this type.
static FIRST_TYPE: PyOnceLock<(Py<PyType>, Origin)> = PyOnceLock::new();

fn origin_of(object: &Bound<'_, PyAny>) -> Result<Origin> {
    let py = object.py();
    let ty = object.get_type();
    match FIRST_TYPE.get(py) {
        Some((first, origin)) if first.is(&ty) => return Ok(*origin),
        Some(_) => return origin_of_type(&ty),
        None => {}
    }
    // Before the cell is taken: a type's own code may run here, and may call this module again.
    let origin = origin_of_type(&ty)?;
    let _ = FIRST_TYPE.set(py, (ty.unbind(), origin));
    Ok(origin)
}

fn origin_of_type(ty: &Bound<'_, PyType>) -> Result<Origin> {
    let py = ty.py();
    let mut table = None;
    if let Some(capsule) = ty.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?.filter(|table| !table.is_none()) {
        // SAFETY: PyCapsule_GetPointer checks the capsule's name. Tables of other major versions are skipped, not read.
        unsafe {
            let mut api = ffi::PyCapsule_GetPointer(capsule.as_ptr(), dlpack::EXCHANGE_CAPSULE.as_ptr())
                .cast::<dlpack::ExchangeApi>();
            if api.is_null() {
                // An object of that name is no table, so the type is read like any other.
                drop(PyErr::take(py));
            }
            // A chain of older tables is as long as there are versions. One that is longer may be a circle.
            let mut left = MAX_TABLES;
            while api.is_aligned() && !api.is_null() && (*api).version.major != 1 {
                left -= 1;
                api = if left > 0 { (*api).previous } else { std::ptr::null_mut() };
            }
            table = Some(api).filter(|api| api.is_aligned()).and_then(|api| api.as_ref());
            table = table.filter(|api| api.tensor_from_object.is_some());
        }
    }
    let torch = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>().ok();
    let torch = torch.and_then(|modules| modules.get_item(intern!(py, "torch")).ok().flatten());
    // None in `sys.modules` means that the import was ruled out.
    let of_torch = match torch.filter(|torch| !torch.is_none()) {
        Some(torch) => ty.is_subclass(&torch.getattr(intern!(py, "Tensor"))?)?,
        None => false,
    };
    Ok(match (of_torch, table) {
        (true, Some(api)) => Origin::Torch(api),
        (true, None) => Origin::OldTorch,
        (false, Some(api)) => Origin::Table(api),
        (false, None) => Origin::Other,
    })
}

fn grad_enabled(py: Python<'_>) -> Result<bool> {
    Ok(py.import(intern!(py, "torch"))?.call_method0(intern!(py, "is_grad_enabled"))?.is_truthy()?)
}

/// Whether torch computes tangents now, inside `torch.autograd.forward_ad.dual_level()`.
fn in_forward_mode(py: Python<'_>) -> Result<bool> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let module = match MODULE.get(py) {
        Some(module) => module.bind(py).clone(),
        None => {
            // torch loads it with itself. A module that is not loaded has computed nothing.
            let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
            let module = modules.call_method1(intern!(py, "get"), (intern!(py, "torch.autograd.forward_ad"),))?;
            if module.is_none() {
                return Ok(false);
            }
            let _ = MODULE.set(py, module.clone().unbind());
            module
        }
    };
    // The number of the innermost level, -1 outside of all.
    let level = module.getattr_opt(intern!(py, "_current_level"))?;
    Ok(level.map_or(Ok(-1), |level| level.extract::<i64>())? >= 0)
}

/// Whether a torch tensor has a tangent.
fn has_tangent(object: &Bound<'_, PyAny>) -> Result<bool> {
    let py = object.py();
    let parts =
        py.import(intern!(py, "torch.autograd.forward_ad"))?.call_method1(intern!(py, "unpack_dual"), (object,))?;
    Ok(!parts.getattr(intern!(py, "tangent"))?.is_none())
}

/// The description of a tensor without its address, for decisions that come before an operand is borrowed.
pub fn describe(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<View> {
    Ok(View { data: std::ptr::null_mut(), ..Borrowed::borrow(operand, object)?.view })
}

/// A new uninitialised tensor of `like`'s package on its device. The crate allocates tensors only here.
pub fn empty<'py>(like: &Borrowed<'py>, shape: &[i64], elem: Elem) -> Result<Bound<'py, PyAny>> {
    let (borrowed, like) = (&like.view, &like.object);
    let py = like.py();
    let shape = PyTuple::new(py, shape)?;
    let name = match elem {
        Elem::F32 => intern!(py, "float32"),
        Elem::F16 => intern!(py, "float16"),
        Elem::Bf16 => intern!(py, "bfloat16"),
        Elem::I32 => intern!(py, "int32"),
        Elem::I64 => intern!(py, "int64"),
        Elem::E4M3 if borrowed.origin != Origin::Other => intern!(py, "float8_e4m3fn"),
        _ => intern!(py, "uint8"),
    };
    let kwargs = PyDict::new(py);
    if borrowed.origin == Origin::Other {
        let numpy = py.import(intern!(py, "numpy"))?;
        kwargs.set_item(intern!(py, "dtype"), numpy.getattr(name)?)?;
        return Ok(numpy.getattr(intern!(py, "empty"))?.call((shape,), Some(&kwargs))?);
    }
    let torch = py.import(intern!(py, "torch"))?;
    kwargs.set_item(intern!(py, "dtype"), torch.getattr(name)?)?;
    kwargs.set_item(intern!(py, "device"), like.getattr(intern!(py, "device"))?)?;
    Ok(torch.getattr(intern!(py, "empty"))?.call((shape,), Some(&kwargs))?)
}
