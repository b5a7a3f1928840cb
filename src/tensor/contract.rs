//! The contract of one call: its operands, their named dimensions, and what it reads and writes.
//!
//! A call borrows every operand through its contract, as an input or as an output, so that the read and write sets cannot miss one.
//! `finish` compares them, only here, and gives the token without which nothing is launched.

use super::running::{self, Use};
use super::{empty, has_tangent, in_forward_mode, Borrowed, Elem, Origin, Place, View};
use crate::contract;
use crate::error::Result;
use crate::float_mode;
use pyo3::prelude::*;

/// One dimension of a contract.
#[derive(Clone, Copy)]
pub enum Dim {
    /// A dimension bound by the first operand that has it, and equal everywhere else.
    Named(&'static str),
    /// A dimension fixed by something other than a tensor: (name, expected).
    Is(&'static str, i64),
}

/// Memory that an operand occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub operand: &'static str,
    pub place: Place,
    /// The first address of the memory, and the first one behind it.
    pub start: usize,
    pub end: usize,
}

impl Span {
    pub fn new(operand: &'static str, place: Place, start: *const u8, bytes: usize) -> Span {
        Span { operand, place, start: start as usize, end: start as usize + bytes }
    }

    fn of(operand: &'static str, view: &View) -> Span {
        let (start, end) = view.extent();
        Span { operand, place: view.place, start, end }
    }

    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Whether the two spans share a byte.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.place == other.place
            && !self.is_empty()
            && !other.is_empty()
            && self.start < other.end
            && other.start < self.end
    }
}

/// A borrowed operand in the read and write sets.
#[derive(Clone, Copy, Debug)]
struct Access {
    span: Span,
    elem: Elem,
    /// Inputs that this output may be itself, byte for byte at the same address. None if the operand is an input.
    written_over: Option<&'static [&'static str]>,
}

/// Refuses a dtype. If several things are wrong, errors about an operand's type come before errors about its layout.
pub fn check_dtype(operand: &str, t: &View, elems: &[Elem]) -> Result<()> {
    if !elems.contains(&t.elem) {
        let expected: Vec<String> = elems.iter().map(Elem::to_string).collect();
        contract!("{operand}: expected dtype {}, got {}", expected.join(" or "), t.elem);
    }
    Ok(())
}

/// The expression that makes a right copy of an operand: a method of torch's tensors, or one of numpy's arrays.
fn copy_of(operand: &str, t: &View, of_torch: &str, of_numpy: &str) -> String {
    format!("{operand}.{}()", if t.origin == Origin::Other { of_numpy } else { of_torch })
}

/// Operands that a contract has room for from the start. A call of the layer has fewer.
const ROOM: usize = 12;

/// The proof that a call's outputs are apart from its other operands. Launches and CPU loops ask for it.
#[derive(Debug)]
pub struct Checked<'c>(&'c Contract<'c>);

impl Checked<'_> {
    /// Runs a loop of the CPU backend without the interpreter lock, in the default floating-point mode. It is an error if a call on another
    /// thread uses memory of this call at the moment, and one of them writes it.
    pub fn on_cpu<T: Send>(&self, py: Python<'_>, body: impl FnOnce() -> T + Send) -> Result<T> {
        let running = running::begin(self.0.uses())?;
        Ok(py.detach(|| {
            let result = float_mode::in_default(body);
            drop(running);
            result
        }))
    }
}

/// The contract of one call. Each operand is borrowed and checked once. An error names the operand, the dimension, the expected and the
/// given value.
#[derive(Debug)]
pub struct Contract<'a> {
    bound: [(&'static str, i64, &'static str); 8],
    count: usize,
    place: Option<(Place, &'static str)>,
    /// Whether the operands are torch tensors.
    torch: Option<(bool, &'static str)>,
    accesses: Vec<Access>,
    /// Memory that the call reads of a layer that was described before.
    layer: &'a [Span],
    /// Whether torch computes tangents now, once an input was asked whether it has one.
    forward_mode: Option<bool>,
}

impl Default for Contract<'_> {
    fn default() -> Self {
        Contract {
            bound: Default::default(),
            count: 0,
            place: None,
            torch: None,
            accesses: Vec::with_capacity(ROOM),
            layer: &[],
            forward_mode: None,
        }
    }
}

impl<'a> Contract<'a> {
    pub fn new() -> Contract<'a> {
        Contract::default()
    }

    /// Fixes a dimension or device that `source` (e.g. the weights) decides.
    pub fn with(mut self, source: &'static str, place: Place, dims: &[(&'static str, i64)]) -> Contract<'a> {
        self.fix(source, place, dims);
        self
    }

    /// Fixes a dimension or device, as [`Contract::with`] does, in a contract that has borrowed before.
    pub fn fix(&mut self, source: &'static str, place: Place, dims: &[(&'static str, i64)]) {
        self.place = Some((place, source));
        for &(name, value) in dims {
            self.bind(name, value, source);
        }
    }

    /// Adds the memory that the call reads of a layer.
    pub fn reads_layer(mut self, spans: &'a [Span]) -> Contract<'a> {
        self.layer = spans;
        self
    }

    /// Borrows an operand that the call reads.
    pub fn input<'py>(&mut self, operand: &'static str, object: &Bound<'py, PyAny>) -> Result<Borrowed<'py>> {
        let tensor = Borrowed::borrow(operand, object)?;
        self.refuse_tangent(operand, &tensor)?;
        self.record(operand, &tensor, None)?;
        Ok(tensor)
    }

    /// Refuses a tensor with a tangent: the result would have none.
    fn refuse_tangent(&mut self, operand: &'static str, tensor: &Borrowed<'_>) -> Result<()> {
        if !tensor.elem.may_require_grad() || !matches!(tensor.origin, Origin::Torch(_) | Origin::OldTorch) {
            return Ok(());
        }
        let forward_mode = match self.forward_mode {
            Some(known) => known,
            None => *self.forward_mode.insert(in_forward_mode(tensor.object().py())?),
        };
        if forward_mode && has_tangent(tensor.object())? {
            contract!(
                "{operand}: has a tangent (forward-mode differentiation); oxmoe computes none: pass {operand}.detach()"
            );
        }
        Ok(())
    }

    /// Borrows an operand that the call writes. It shares memory with no other operand.
    pub fn output<'py>(&mut self, operand: &'static str, object: &Bound<'py, PyAny>) -> Result<Borrowed<'py>> {
        self.output_over(operand, object, &[])
    }

    /// Borrows an operand that the call writes. It may also be one of the inputs `same`: the same bytes, with the same dtype.
    pub fn output_over<'py>(
        &mut self,
        operand: &'static str,
        object: &Bound<'py, PyAny>,
        same: &'static [&'static str],
    ) -> Result<Borrowed<'py>> {
        let tensor = Borrowed::borrow(operand, object)?;
        if tensor.read_only {
            contract!("{operand}: is written, but its memory is read-only; pass a writeable copy");
        }
        self.record(operand, &tensor, Some(same))?;
        Ok(tensor)
    }

    /// A new uninitialised tensor of `like`'s package on its device, which the call writes. It is not recorded: newly allocated memory is
    /// apart from every operand, and a part of a call may free it before the next part allocates.
    pub fn new_output<'py>(
        &self,
        operand: &'static str,
        like: &Borrowed<'py>,
        shape: &[i64],
        elem: Elem,
    ) -> Result<Borrowed<'py>> {
        Borrowed::borrow(operand, &empty(like, shape, elem)?)
    }

    /// Notes an access. No operand is read or written at addresses that its numbers cannot have.
    fn record(
        &mut self,
        operand: &'static str,
        view: &View,
        written_over: Option<&'static [&'static str]>,
    ) -> Result<()> {
        let alignment = view.elem.bytes();
        if alignment.is_power_of_two() && !(view.data as usize).is_multiple_of(alignment) {
            contract!(
                "{operand}: must be aligned to {alignment} bytes, got address {:p}; pass {}",
                view.data,
                copy_of(operand, view, "clone", "copy")
            );
        }
        self.accesses.push(Access { span: Span::of(operand, view), elem: view.elem, written_over });
        Ok(())
    }

    /// Compares everything that the call writes with everything else that it reads or writes.
    pub fn finish(&self) -> Result<Checked<'_>> {
        for (i, output) in self.accesses.iter().enumerate() {
            let Some(same) = output.written_over else { continue };
            for (j, other) in self.accesses.iter().enumerate() {
                // If two outputs overlap, the error names the later one.
                if i == j || (other.written_over.is_some() && j > i) || !output.span.overlaps(&other.span) {
                    continue;
                }
                let (operand, name) = (output.span.operand, other.span.operand);
                if !same.contains(&name) {
                    contract!("{operand}: overlaps {name}");
                }
                if output.span != (Span { operand, ..other.span }) || output.elem != other.elem {
                    contract!("{operand}: overlaps {name} without being the same tensor");
                }
            }
            if let Some(read) = self.layer.iter().find(|read| output.span.overlaps(read)) {
                contract!("{}: overlaps {}", output.span.operand, read.operand);
            }
        }
        Ok(Checked(self))
    }

    /// Everything that the call reads and writes, apart from memory that was allocated for it.
    fn uses(&self) -> Vec<Use> {
        let operands = self.accesses.iter().map(|a| Use { span: a.span, written: a.written_over.is_some() });
        operands.chain(self.layer.iter().map(|&span| Use { span, written: false })).collect()
    }

    fn bind(&mut self, name: &'static str, value: i64, source: &'static str) {
        self.bound[self.count] = (name, value, source);
        self.count += 1;
    }

    /// The bound value of a dimension.
    pub fn get(&self, name: &'static str) -> i64 {
        self.bound[..self.count].iter().find(|b| b.0 == name).map_or(0, |b| b.1)
    }

    /// Checks dtype, package, place, dimensions and contiguity of an operand.
    pub fn check(&mut self, operand: &'static str, t: &View, dims: &[Dim], elems: &[Elem]) -> Result<()> {
        check_dtype(operand, t, elems)?;
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
                "{operand}: is not contiguous (shape {:?}, strides {:?}); pass {}",
                t.shape(),
                t.strides(),
                copy_of(operand, t, "contiguous", "copy")
            );
        }
        Ok(())
    }
}
