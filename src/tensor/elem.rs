//! Element types of tensors.

use crate::dlpack;
use crate::params::Dtype;
use std::fmt;

/// DLPack's type code of float4_e2m1fn.
const FLOAT4: u8 = 17;

/// Element types that cross the border.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    F32,
    F16,
    Bf16,
    I32,
    I64,
    U8,
    /// Any other type of one lane: (DLPack type code, bits). Two lanes of float4 count as one element of eight bits.
    Other(u8, u8),
    /// Vectors, which no operand takes: (DLPack type code, bits of a lane, lanes).
    Vector(u8, u8, u16),
}

impl Elem {
    pub const I8: Elem = Elem::Other(0, 8);
    pub const E4M3: Elem = Elem::Other(10, 8);
    /// A power of two: the exponent plus 127, in a byte.
    pub const E8M0: Elem = Elem::Other(14, 8);
    /// Two four-bit floats in a byte. torch's shapes count the bytes.
    pub const E2M1_X2: Elem = Elem::Other(FLOAT4, 8);

    pub fn bytes(self) -> usize {
        match self {
            Elem::U8 => 1,
            Elem::F16 | Elem::Bf16 => 2,
            Elem::F32 | Elem::I32 => 4,
            Elem::I64 => 8,
            Elem::Other(_, bits) => bits as usize / 8,
            Elem::Vector(_, bits, lanes) => (bits as usize * lanes as usize).div_ceil(8),
        }
    }

    /// Whether a tensor of this type may require gradients. torch does not let integers require them.
    pub(super) fn may_require_grad(self) -> bool {
        !matches!(self, Elem::I32 | Elem::I64 | Elem::U8 | Elem::I8)
    }

    /// The type as a kernel parameter. None for types that are not compute types.
    pub fn dtype(self) -> Option<Dtype> {
        match self {
            Elem::F32 => Some(Dtype::F32),
            Elem::F16 => Some(Dtype::F16),
            Elem::Bf16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    /// The type of floats of eight bits, or of pairs of four bits, that torch calls `name`. None for other types.
    pub(super) fn narrow_float(name: &str) -> Option<Elem> {
        [Elem::E4M3, Elem::Other(11, 8), Elem::Other(12, 8), Elem::Other(13, 8), Elem::E8M0, Elem::E2M1_X2]
            .into_iter()
            .find(|elem| name.strip_prefix("torch.").is_some_and(|name| name == elem.to_string()))
    }

    pub(super) fn from_dlpack(t: dlpack::DataType) -> Elem {
        match (t.code, t.bits, t.lanes) {
            (2, 32, 1) => Elem::F32,
            (2, 16, 1) => Elem::F16,
            (4, 16, 1) => Elem::Bf16,
            (0, 32, 1) => Elem::I32,
            (0, 64, 1) => Elem::I64,
            (1, 8, 1) => Elem::U8,
            (FLOAT4, 4, 2) => Elem::E2M1_X2,
            (code, bits, 1) if code != FLOAT4 => Elem::Other(code, bits),
            (code, bits, lanes) => Elem::Vector(code, bits, lanes),
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
            Elem::Other(11, 8) => f.write_str("float8_e4m3fnuz"),
            Elem::Other(12, 8) => f.write_str("float8_e5m2"),
            Elem::Other(13, 8) => f.write_str("float8_e5m2fnuz"),
            Elem::E8M0 => f.write_str("float8_e8m0fnu"),
            Elem::E2M1_X2 => f.write_str("float4_e2m1fn_x2"),
            Elem::Other(6, 8) => f.write_str("bool"),
            Elem::Other(code, bits) if code < 6 => write!(f, "{}{bits}", kind(code)),
            Elem::Other(code, bits) => write!(f, "DLPack type {code} of {bits} bits"),
            Elem::Vector(code, bits, lanes) => write!(f, "DLPack type {code} of {bits} bits in {lanes} lanes"),
        }
    }
}
