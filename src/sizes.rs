//! Sizes of operands in the integer types of kernels.

use crate::error::{Error, Result};

/// `size` in the 32 bits of a kernel's parameter. `what` names it in an error: `x: dimension 0 "tokens"`.
pub fn int(what: &str, size: i64) -> Result<i32> {
    i32::try_from(size).map_err(|_| Error::Unsupported(format!("{what}: {size}; supported: up to {}", i32::MAX)))
}

/// The product of some dimensions of `what`.
pub fn product(what: &str, sizes: &[i64]) -> Result<i64> {
    sizes.iter().try_fold(1i64, |product, &size| product.checked_mul(size)).ok_or_else(|| {
        Error::Unsupported(format!("{what}: dimensions {sizes:?}; supported: a product of up to {}", i64::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_do_not_wrap() {
        assert_eq!(int("x", i64::from(i32::MAX)).unwrap(), i32::MAX);
        for size in [1 << 31, (1 << 32) + 5, i64::MAX, i64::MIN] {
            let Err(Error::Unsupported(text)) = int("x: dimension 0 \"tokens\"", size) else { panic!("{size}") };
            assert_eq!(text, format!("x: dimension 0 \"tokens\": {size}; supported: up to 2147483647"));
        }
    }

    #[test]
    fn products_do_not_wrap() {
        assert_eq!(product("x", &[]).unwrap(), 1);
        assert_eq!(product("x", &[1 << 31, 1 << 31]).unwrap(), 1 << 62);
        assert!(product("x", &[1 << 32, 1 << 31]).unwrap_err().to_string().starts_with("x: dimensions [4294967296, "));
    }
}
