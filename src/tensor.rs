//! The border: Python tensors borrowed through DLPack, and the contracts they must meet. The only user of `dlpack.rs`.

use crate::contract;
use crate::dlpack;
use crate::error::{Error, Result};
use crate::params::Dtype;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{ffi, intern};
use std::ffi::c_void;
use std::fmt;

/// Element types that cross the border.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    F32,
    F16,
    Bf16,
    I32,
    I64,
    U8,
    /// Anything else: (DLPack type code, bits of all its lanes).
    Other(u8, u8),
}

impl Elem {
    pub const I8: Elem = Elem::Other(0, 8);
    pub const E4M3: Elem = Elem::Other(10, 8);
    /// A power of two: the exponent plus 127 in a byte.
    pub const E8M0: Elem = Elem::Other(14, 8);
    /// Two four-bit floats a byte; torch's shapes count the bytes.
    pub const E2M1_X2: Elem = Elem::Other(17, 8);

    pub fn bytes(self) -> usize {
        match self {
            Elem::U8 => 1,
            Elem::F16 | Elem::Bf16 => 2,
            Elem::F32 | Elem::I32 => 4,
            Elem::I64 => 8,
            Elem::Other(_, bits) => bits as usize / 8,
        }
    }

    /// As a kernel parameter; None for types that are not compute types.
    pub fn dtype(self) -> Option<Dtype> {
        match self {
            Elem::F32 => Some(Dtype::F32),
            Elem::F16 => Some(Dtype::F16),
            Elem::Bf16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    fn from_dlpack(t: dlpack::DataType) -> Elem {
        match (t.code, t.bits, t.lanes) {
            (2, 32, 1) => Elem::F32,
            (2, 16, 1) => Elem::F16,
            (4, 16, 1) => Elem::Bf16,
            (0, 32, 1) => Elem::I32,
            (0, 64, 1) => Elem::I64,
            (1, 8, 1) => Elem::U8,
            (code, bits, lanes) => Elem::Other(code, u16::from(bits).saturating_mul(lanes).min(255) as u8),
        }
    }
}

impl fmt::Display for Elem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |code| match code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => "bool",
            _ => "type code ",
        };
        match *self {
            Elem::F32 => f.write_str("float32"),
            Elem::F16 => f.write_str("float16"),
            Elem::Bf16 => f.write_str("bfloat16"),
            Elem::I32 => f.write_str("int32"),
            Elem::I64 => f.write_str("int64"),
            Elem::U8 => f.write_str("uint8"),
            Elem::E4M3 => f.write_str("float8_e4m3fn"),
            Elem::Other(12, 8) => f.write_str("float8_e5m2"),
            Elem::E8M0 => f.write_str("float8_e8m0fnu"),
            Elem::E2M1_X2 => f.write_str("float4_e2m1fn_x2"),
            Elem::Other(code, bits) if code < 7 => write!(f, "{}{bits}", kind(code)),
            Elem::Other(code, bits) => write!(f, "DLPack type {code} of {bits} bits"),
        }
    }
}

/// Where a tensor lives.
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

/// Which package a tensor object comes from: decides how new tensors are made and where the current stream is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// torch with the DLPack C exchange table (2.10 and later).
    Torch(&'static dlpack::ExchangeApi),
    /// torch without it (2.9).
    OldTorch,
    /// numpy, or anything else with `__dlpack__`.
    Other,
}

// SAFETY: the table is immutable static data of the package that published it.
unsafe impl Send for Origin {}
// SAFETY: as above.
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

/// A tensor borrowed for one call (or kept by whoever keeps the Python object alive).
#[derive(Debug)]
pub struct TensorRef {
    pub data: *mut u8,
    pub elem: Elem,
    pub place: Place,
    pub origin: Origin,
    ndim: usize,
    shape: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
    /// Released when the borrow ends; None on the fast path, where the object itself keeps the data alive.
    _managed: Option<Capsule>,
}

impl TensorRef {
    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.ndim]
    }

    pub fn numel(&self) -> i64 {
        self.shape().iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.numel() as usize * self.elem.bytes()
    }

    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.ndim]
    }

    /// The same tensor with its last two dimensions exchanged.
    pub fn transposed(mut self) -> TensorRef {
        if let Some(last) = self.ndim.checked_sub(1).filter(|&last| last > 0) {
            self.shape.swap(last - 1, last);
            self.strides.swap(last - 1, last);
        }
        self
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

    /// Whether the two tensors' bytes overlap.
    pub fn overlaps(&self, other: &TensorRef) -> bool {
        self.place == other.place && self.overlaps_range(other.data, other.bytes())
    }

    /// The same for memory of the same device.
    pub fn overlaps_range(&self, start: *const u8, bytes: usize) -> bool {
        let (a, b) = (self.data as usize, start as usize);
        a < b + bytes && b < a + self.bytes()
    }

    /// Borrows a Python object. `operand` names it in errors.
    pub fn borrow(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<TensorRef> {
        match origin_of(object)? {
            Origin::Torch(api) => Self::borrow_fast(operand, object, api),
            origin => Self::borrow_capsule(operand, object, origin),
        }
    }

    fn borrow_fast(
        operand: &'static str,
        object: &Bound<'_, PyAny>,
        api: &'static dlpack::ExchangeApi,
    ) -> Result<TensorRef> {
        let py = object.py();
        let Some(from_object) = api.tensor_from_object else {
            return Self::borrow_capsule(operand, object, Origin::OldTorch);
        };
        let mut tensor = std::mem::MaybeUninit::<dlpack::Tensor>::uninit();
        // SAFETY: the GIL is held, the object is of a type that publishes this table, the result is read only on success.
        let tensor = unsafe {
            if from_object(object.as_ptr().cast(), tensor.as_mut_ptr()) != 0 {
                let error = PyErr::fetch(py).value(py).to_string();
                contract!("{operand}: cannot be read: {}", error.lines().next().unwrap_or_default());
            }
            tensor.assume_init()
        };
        Self::refuse_lazy_state(operand, object)?;
        Self::from_dlpack(operand, &tensor, Origin::Torch(api), None)
    }

    /// What the exchange table and `_to_dlpack_versioned` do not check and `__dlpack__` does.
    fn refuse_lazy_state(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<()> {
        let py = object.py();
        if object.getattr(intern!(py, "requires_grad"))?.is_truthy()? && grad_enabled(py)? {
            contract!("{operand}: requires grad; oxmoe has no backward: pass {operand}.detach() or call under torch.no_grad()");
        }
        if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            contract!("{operand}: has its negative bit set (a lazily negated view); pass {operand}.resolve_neg()");
        }
        Ok(())
    }

    /// torch 2.9's function (it neither synchronises nor asks for a stream), else the Python protocol: a capsule that owns a reference until the borrow ends.
    fn borrow_capsule(operand: &'static str, object: &Bound<'_, PyAny>, origin: Origin) -> Result<TensorRef> {
        let py = object.py();
        let capsule = if origin == Origin::OldTorch {
            Self::refuse_lazy_state(operand, object)?;
            py.import(intern!(py, "torch._C"))?.getattr(intern!(py, "_to_dlpack_versioned"))?.call1((object,))
        } else {
            let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
                contract!("{operand}: expected a torch tensor or a numpy array, got {}", object.get_type().name()?);
            };
            method.call0()
        };
        let capsule = match capsule {
            Ok(capsule) => capsule,
            Err(error) => {
                let error = error.value(py).to_string();
                contract!("{operand}: cannot be read through DLPack: {}", error.lines().next().unwrap_or_default())
            }
        };
        let capsule = Capsule(capsule.unbind());
        let Some(tensor) = capsule.tensor(py) else { contract!("{operand}: __dlpack__ returned no DLPack capsule") };
        Self::from_dlpack(operand, &tensor, origin, Some(capsule))
    }

    fn from_dlpack(
        operand: &'static str,
        t: &dlpack::Tensor,
        origin: Origin,
        managed: Option<Capsule>,
    ) -> Result<TensorRef> {
        let ndim = t.ndim as usize;
        if ndim > MAX_DIMS {
            contract!("{operand}: has {ndim} dimensions, at most {MAX_DIMS} are understood");
        }
        let place = match t.device.device_type {
            dlpack::CPU | 3 => Place::Cpu, // 3: page-locked host memory
            dlpack::CUDA => Place::Cuda(t.device.device_id),
            other => contract!("{operand}: is on DLPack device type {other}; expected cpu or cuda"),
        };
        let (mut shape, mut strides) = ([0i64; MAX_DIMS], [0i64; MAX_DIMS]);
        let mut dense = 1;
        for i in (0..ndim).rev() {
            // SAFETY: DLPack: shape points to ndim numbers, strides to ndim numbers or is null.
            unsafe {
                shape[i] = *t.shape.add(i);
                strides[i] = if t.strides.is_null() { dense } else { *t.strides.add(i) };
            }
            dense *= shape[i];
        }
        let data = (t.data as usize + t.byte_offset as usize) as *mut u8;
        let tensor = TensorRef {
            data,
            elem: Elem::from_dlpack(t.dtype),
            place,
            origin,
            ndim,
            shape,
            strides,
            _managed: managed,
        };
        if t.data.is_null() && tensor.numel() > 0 {
            contract!("{operand}: has no data (a fake or meta tensor)");
        }
        Ok(tensor)
    }

    /// torch's current CUDA stream of this tensor's device, also while a graph is being captured.
    pub fn current_stream(&self, py: Python<'_>) -> Result<*mut c_void> {
        let Place::Cuda(device) = self.place else { return Ok(std::ptr::null_mut()) };
        match self.origin {
            Origin::Torch(dlpack::ExchangeApi { current_stream: Some(current), .. }) => {
                let mut stream = std::ptr::null_mut();
                // SAFETY: GIL held; writes one pointer.
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
            Origin::Other => Err(Error::Unsupported(
                "CUDA tensors must be torch tensors: their current stream is read from torch".to_string(),
            )),
        }
    }
}

/// A DLPack capsule that was not consumed: its own destructor frees the managed tensor when we drop it.
#[derive(Debug)]
struct Capsule(Py<PyAny>);

impl Capsule {
    fn tensor(&self, py: Python<'_>) -> Option<dlpack::Tensor> {
        let capsule = self.0.bind(py).as_ptr();
        // SAFETY: names are checked before the pointers are followed; the capsule owns the structs and lives as long as self.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, dlpack::CAPSULE_VERSIONED.as_ptr()) == 1 {
                let p = ffi::PyCapsule_GetPointer(capsule, dlpack::CAPSULE_VERSIONED.as_ptr())
                    .cast::<dlpack::ManagedVersioned>();
                ((*p).version.major == 1).then(|| (*p).tensor)
            } else if ffi::PyCapsule_IsValid(capsule, dlpack::CAPSULE.as_ptr()) == 1 {
                let p = ffi::PyCapsule_GetPointer(capsule, dlpack::CAPSULE.as_ptr()).cast::<dlpack::Managed>();
                Some((*p).tensor)
            } else {
                None
            }
        }
    }
}

/// The first tensor type seen with its origin: nearly every tensor of a process is of this type.
static FIRST_TYPE: PyOnceLock<(Py<PyType>, Origin)> = PyOnceLock::new();

fn origin_of(object: &Bound<'_, PyAny>) -> Result<Origin> {
    let py = object.py();
    let ty = object.get_type();
    let (first, origin) =
        FIRST_TYPE.get_or_try_init(py, || Ok::<_, Error>((ty.clone().unbind(), origin_of_type(&ty)?)))?;
    if first.is(&ty) {
        return Ok(*origin);
    }
    origin_of_type(&ty)
}

fn origin_of_type(ty: &Bound<'_, PyType>) -> Result<Origin> {
    let py = ty.py();
    if let Some(capsule) = ty.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? {
        // SAFETY: the capsule's name is checked by PyCapsule_GetPointer; tables of other major versions are skipped, not read.
        unsafe {
            let mut api = ffi::PyCapsule_GetPointer(capsule.as_ptr(), dlpack::EXCHANGE_CAPSULE.as_ptr())
                .cast::<dlpack::ExchangeApi>();
            if api.is_null() {
                return Err(PyErr::fetch(py).into());
            }
            while !api.is_null() && (*api).version.major != 1 {
                api = (*api).previous;
            }
            if let Some(api) = api.as_ref() {
                return Ok(Origin::Torch(api));
            }
        }
    }
    let torch = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>().ok();
    let torch = torch.and_then(|modules| modules.get_item(intern!(py, "torch")).ok().flatten());
    // None there: an import that was ruled out.
    if let Some(torch) = torch.filter(|torch| !torch.is_none()) {
        if ty.is_subclass(&torch.getattr(intern!(py, "Tensor"))?)? {
            return Ok(Origin::OldTorch);
        }
    }
    Ok(Origin::Other)
}

fn grad_enabled(py: Python<'_>) -> Result<bool> {
    Ok(py.import(intern!(py, "torch"))?.call_method0(intern!(py, "is_grad_enabled"))?.is_truthy()?)
}

/// A new uninitialised tensor of `like`'s package on its device. The only allocation in the crate.
pub fn empty<'py>(
    like: &Bound<'py, PyAny>,
    borrowed: &TensorRef,
    shape: &[i64],
    elem: Elem,
) -> Result<Bound<'py, PyAny>> {
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

/// One dimension of a contract.
#[derive(Clone, Copy)]
pub enum Dim {
    /// Bound by the first operand that has it, equal everywhere else.
    Named(&'static str),
    /// A number fixed by something other than a tensor: (name, expected).
    Is(&'static str, i64),
}

/// The contract of one call: named dimensions, one device. Checks each operand once; the message has operand, dimension, expected, got.
#[derive(Default)]
pub struct Contract {
    bound: [(&'static str, i64, &'static str); 8],
    count: usize,
    place: Option<(Place, &'static str)>,
    /// Whether the operands are torch tensors.
    torch: Option<(bool, &'static str)>,
}

impl Contract {
    pub fn new() -> Contract {
        Contract::default()
    }

    /// Fixes a dimension or device that `source` (e.g. the weights) decides.
    pub fn with(mut self, source: &'static str, place: Place, dims: &[(&'static str, i64)]) -> Contract {
        self.place = Some((place, source));
        for &(name, value) in dims {
            self.bind(name, value, source);
        }
        self
    }

    fn bind(&mut self, name: &'static str, value: i64, source: &'static str) {
        self.bound[self.count] = (name, value, source);
        self.count += 1;
    }

    /// The bound value of a dimension.
    pub fn get(&self, name: &'static str) -> i64 {
        self.bound[..self.count].iter().find(|b| b.0 == name).map_or(0, |b| b.1)
    }

    pub fn check(&mut self, operand: &'static str, t: &TensorRef, dims: &[Dim], elems: &[Elem]) -> Result<()> {
        if !elems.contains(&t.elem) {
            let expected: Vec<String> = elems.iter().map(Elem::to_string).collect();
            contract!("{operand}: expected dtype {}, got {}", expected.join(" or "), t.elem);
        }
        let torch = t.origin != Origin::Other;
        match self.torch {
            None => self.torch = Some((torch, operand)),
            Some((first, source)) if first != torch => {
                let kind = |torch| if torch { "a torch tensor" } else { "a numpy array (or another package's)" };
                contract!("{operand}: is {}, but {source} is {}", kind(torch), kind(first))
            }
            _ => {}
        }
        match self.place {
            None => self.place = Some((t.place, operand)),
            Some((place, source)) if place != t.place => {
                contract!("{operand}: is on {}, but {source} is on {place}", t.place)
            }
            _ => {}
        }
        if t.shape().len() != dims.len() {
            let names: Vec<&str> = dims
                .iter()
                .map(|d| match d {
                    Dim::Named(n) | Dim::Is(n, _) => *n,
                })
                .collect();
            contract!(
                "{operand}: expected {} dimensions [{}], got shape {:?}",
                dims.len(),
                names.join(", "),
                t.shape()
            );
        }
        for (i, dim) in dims.iter().enumerate() {
            let got = t.shape()[i];
            match *dim {
                Dim::Is(name, expected) if got != expected => {
                    contract!("{operand}: dimension {i} \"{name}\": expected {expected}, got {got}")
                }
                Dim::Named(name) => match self.bound[..self.count].iter().find(|b| b.0 == name) {
                    Some(&(_, expected, source)) if expected != got => {
                        contract!("{operand}: dimension {i} \"{name}\": expected {expected} (from {source}), got {got}")
                    }
                    Some(_) => {}
                    None => self.bind(name, got, operand),
                },
                Dim::Is(..) => {}
            }
        }
        if !t.contiguous() {
            contract!(
                "{operand}: is not contiguous (shape {:?}, strides {:?}); pass {operand}.contiguous()",
                t.shape(),
                t.strides()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[i64], strides: &[i64]) -> TensorRef {
        let fill = |values: &[i64]| std::array::from_fn(|i| values.get(i).copied().unwrap_or(0));
        TensorRef {
            data: std::ptr::null_mut(),
            elem: Elem::F32,
            place: Place::Cpu,
            origin: Origin::Other,
            ndim: shape.len(),
            shape: fill(shape),
            strides: fill(strides),
            _managed: None,
        }
    }

    #[test]
    fn dimensions_of_one_have_any_stride() {
        let contiguous = |shape: &[i64], strides: &[i64]| tensor(shape, strides).contiguous();
        assert!(contiguous(&[2, 3], &[3, 1]) && !contiguous(&[2, 3], &[1, 2]) && !contiguous(&[2, 3], &[4, 1]));
        assert!(contiguous(&[1, 3], &[77, 1]) && contiguous(&[3, 1], &[1, 77]) && contiguous(&[2, 1, 3], &[3, -5, 1]));
        assert!(!contiguous(&[1, 3], &[77, 2]) && !contiguous(&[2, 1, 3], &[4, 0, 1]));
        // Without elements strides mean nothing; without dimensions there are none.
        assert!(contiguous(&[2, 0, 3], &[5, 7, 2]) && contiguous(&[], &[]));
    }
}
