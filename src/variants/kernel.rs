//! Kernels whose types name their parameters.

use super::signature::Signature;
use super::{Element, Row, Variant};
use std::fmt;
use std::marker::PhantomData;

/// The kernels of a row, which take parameters of the types `P`. Only the files of the table make one.
pub struct Kernels<P> {
    pub(super) row: Row,
    takes: PhantomData<fn(P)>,
}

impl<P: Signature> Kernels<P> {
    pub(super) const fn new(row: Row) -> Kernels<P> {
        Kernels { row: Row { parameters: P::PARAMETERS, ..row }, takes: PhantomData }
    }

    /// The kernel with the arguments of `variant`, whose own family does not count.
    pub(super) const fn with(&self, variant: Variant) -> Kernel<P> {
        Kernel { variant: Variant { family: self.row.family, ..variant }, takes: PhantomData }
    }

    /// The kernel without arguments.
    pub const fn kernel(&self) -> Kernel<P> {
        self.with(Variant::NONE)
    }
}

/// One kernel, which takes parameters of the types `P`. The types come from its row:
/// ```
/// use _oxmoe::params::CombineParams;
/// use _oxmoe::variants::{routing, Kernel};
///
/// let kernel: Kernel<CombineParams> = routing::COMBINE.kernel();
/// ```
/// A kernel with other types does not compile:
/// ```compile_fail,E0308
/// use _oxmoe::params::CombineParams;
/// use _oxmoe::variants::{routing, Kernel};
///
/// let kernel: Kernel<CombineParams> = routing::SCHEDULE.kernel();
/// ```
pub struct Kernel<P> {
    variant: Variant,
    takes: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    /// The kernel without the types of its parameters. It can be loaded, but not launched.
    pub const fn variant(self) -> Variant {
        self.variant
    }

    pub const fn gated(self, gated: bool) -> Kernel<P> {
        Kernel { variant: Variant { gated, ..self.variant }, ..self }
    }

    pub const fn with_element(self, element: Element) -> Kernel<P> {
        Kernel { variant: Variant { element, ..self.variant }, ..self }
    }

    pub const fn flag(self, flag: bool) -> Kernel<P> {
        Kernel { variant: Variant { flag, ..self.variant }, ..self }
    }
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P> std::ops::Deref for Kernel<P> {
    type Target = Variant;
    fn deref(&self) -> &Variant {
        &self.variant
    }
}

impl<P> PartialEq for Kernel<P> {
    fn eq(&self, other: &Self) -> bool {
        self.variant == other.variant
    }
}

impl<P> Eq for Kernel<P> {}

impl<P> fmt::Debug for Kernel<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.variant, f)
    }
}
