//! Named byte ranges inside one caller-owned buffer.

/// Every range starts at a multiple of this.
pub const ALIGNMENT: usize = 256;

/// A named range of the workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    pub name: &'static str,
    pub offset: usize,
    pub bytes: usize,
}

impl Range {
    /// The address of this range in a workspace that starts at `base`.
    pub fn at<T>(self, base: *mut u8) -> *mut T {
        base.wrapping_add(self.offset).cast()
    }
}

/// Hands out ranges one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    pub bytes: usize,
}

impl Layout {
    pub fn add(&mut self, name: &'static str, bytes: usize) -> Range {
        let range = Range { name, offset: self.bytes, bytes };
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
        range
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_aligned_and_disjoint() {
        let mut layout = Layout::default();
        let (a, b, c) = (layout.add("a", 1), layout.add("b", 0), layout.add("c", 257));
        assert_eq!((a.offset, b.offset, c.offset, layout.bytes), (0, 256, 256, 768));
    }
}
