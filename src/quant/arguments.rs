//! Python arguments that layers and conversions of weights have in common.

use crate::contract;
use crate::error::Result;
use crate::params::W13Layout;
use pyo3::prelude::*;

/// Reads `layout`, the order of gate and up rows in w13.
pub fn w13_layout(name: &str) -> Result<W13Layout> {
    Ok(match name {
        "gate_up" => W13Layout::GateUp,
        "up_gate" => W13Layout::UpGate,
        "interleaved" => W13Layout::Interleaved,
        other => contract!("layout: expected \"gate_up\", \"up_gate\" or \"interleaved\", got {other:?}"),
    })
}

/// Whether activations are quantised to e4m3. The argument is torch.float8_e4m3fn, its name, or None.
pub fn is_e4m3(activation_dtype: Option<&Bound<'_, PyAny>>) -> Result<bool> {
    let Some(given) = activation_dtype else { return Ok(false) };
    let name = given.str()?.to_string();
    match name.trim_start_matches("torch.") {
        "float8_e4m3fn" => Ok(true),
        _ => contract!("activation_dtype: expected None or torch.float8_e4m3fn, got {name}"),
    }
}
