//! The tensors of a layer, as Python gives them and as a call borrows them, and the checks that all formats share.

use super::scale_bytes::borrow_scale;
use crate::contract;
use crate::error::{Error, Result};
use crate::tensor::{Borrowed, Contract, Dim, Elem, View};
use pyo3::prelude::*;

/// A layer's tensors as Python gives them.
pub struct Arguments<'a, 'py> {
    pub w13: &'a Bound<'py, PyAny>,
    pub w2: &'a Bound<'py, PyAny>,
    pub b13: Option<&'a Bound<'py, PyAny>>,
    pub b2: Option<&'a Bound<'py, PyAny>>,
    pub w13_scale: Option<&'a Bound<'py, PyAny>>,
    pub w2_scale: Option<&'a Bound<'py, PyAny>>,
}

/// A layer's tensors, borrowed for one call.
pub struct Operands<'py> {
    pub w13: Borrowed<'py>,
    pub w2: Borrowed<'py>,
    pub b13: Option<Borrowed<'py>>,
    pub b2: Option<Borrowed<'py>>,
    /// Scales of w13 and w2. E8M0 bytes that were made of fp32 scales are new tensors.
    pub scales: Option<[Borrowed<'py>; 2]>,
}

impl<'py> Operands<'py> {
    /// Borrows the tensors. `fp8`: block scales stay as they are; otherwise fp32 scales become E8M0 bytes. `in_place`: weights and scales
    /// are written too.
    pub fn borrow(
        contract: &mut Contract<'_>,
        arguments: &Arguments<'_, 'py>,
        (fp8, in_place): (bool, bool),
    ) -> Result<Operands<'py>> {
        let scales = match (arguments.w13_scale, arguments.w2_scale) {
            (None, None) => None,
            (Some(up), Some(down)) => {
                let mut borrow = |name, scale: &Bound<'py, PyAny>| match (fp8, in_place) {
                    (true, _) => contract.input(name, scale),
                    (false, _) => borrow_scale(name, scale, contract, in_place),
                };
                Some([borrow("w13_scale", up)?, borrow("w2_scale", down)?])
            }
            (None, _) => contract!("w13_scale: needed where w2_scale is given"),
            (_, None) => contract!("w2_scale: needed where w13_scale is given"),
        };
        let mut weights = |name, w: &Bound<'py, PyAny>| match in_place {
            true => contract.output(name, w),
            false => contract.input(name, w),
        };
        let (w13, w2) = (weights("w13", arguments.w13)?, weights("w2", arguments.w2)?);
        let mut bias = |name, bias: Option<&Bound<'py, PyAny>>| bias.map(|b| contract.input(name, b)).transpose();
        let (b13, b2) = (bias("b13", arguments.b13)?, bias("b2", arguments.b2)?);
        Ok(Operands { w13, w2, b13, b2, scales })
    }
}

/// A tensor that a layer reads beside its weights, scales, biases and numbers of SwiGLU, with the operand's name.
pub type Extra<'py> = (&'static str, Borrowed<'py>);

/// Codes, scales and expert_scales of packed weights.
pub type PackedTensors<'py> = [Extra<'py>; 3];
/// Columns of GEMM1's output, from the rows of w13.
pub fn intermediate_size(w13: &View, gated: bool) -> Result<i64> {
    let rows = w13.shape()[1];
    if gated && rows % 2 != 0 {
        contract!(
            "w13: dimension 1 holds gate and up rows and must be even, got {rows}; pass gated=False if it has no gates"
        );
    }
    Ok(if gated { rows / 2 } else { rows })
}

/// Checks w2, whose last dimension follows from the rows of w13. If w2 has twice or half as many columns, the error says that `gated`
/// decides it.
pub fn check_w2(
    contract: &mut Contract,
    w13: &View,
    w2: &View,
    dims: &[Dim],
    elems: &[Elem],
    gated: bool,
) -> Result<()> {
    let (&[.., columns], &[.., Dim::Is(_, expected)]) = (w2.shape(), dims) else {
        return contract.check("w2", w2, dims, elems);
    };
    let transposed = gated
        && matches!(
            (w13.shape(), w2.shape()),
            (&[_, hidden, two_intermediate], &[_, intermediate, same]) if same == hidden && two_intermediate == 2 * intermediate
        );
    contract.check("w2", w2, dims, elems).map_err(|error| match error {
        Error::Contract(text) if transposed => Error::Contract(format!(
            "{text}; the sizes are those of transposed weights: w13 is [experts, rows, hidden], and w2 is [experts, hidden, intermediate]"
        )),
        Error::Contract(text) if gated && columns == 2 * expected => Error::Contract(format!(
            "{text}; gated=True means that half of w13's rows are gates: pass gated=False if it has none"
        )),
        Error::Contract(text) if !gated && 2 * columns == expected => Error::Contract(format!(
            "{text}; gated=False means that w13 has no gates: pass gated=True if half of its rows are"
        )),
        other => other,
    })
}

/// Checks b13 `[E, rows of w13]` and b2 `[E, hidden]`, if they are given.
pub fn check_biases(contract: &mut Contract, operands: &Operands<'_>, hidden: Dim, elems: &[Elem]) -> Result<()> {
    for (name, bias, dim) in [("b13", &operands.b13, Dim::Named("rows of w13")), ("b2", &operands.b2, hidden)] {
        if let Some(bias) = bias {
            contract.check(name, bias, &[Dim::Named("experts"), dim], elems)?;
        }
    }
    Ok(())
}

/// Refuses empty layers, and sizes that kernels cannot count.
pub fn check_sizes(w13: &View, hidden: i64) -> Result<()> {
    let (experts, rows, limit) = (w13.shape()[0], w13.shape()[1], i32::MAX as i64 / 2);
    if experts == 0 || rows == 0 || hidden == 0 {
        contract!("w13: no dimension may be 0, got shape {:?}", w13.shape());
    }
    if experts > 4096 || rows > limit || hidden > limit {
        contract!("w13: shape {:?} is beyond 4096 experts or 2^30 rows", w13.shape());
    }
    Ok(())
}
