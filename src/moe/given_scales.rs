//! The scales of an x that the caller quantised.

/// The caller's scales of quantised rows: fp32, or words of four E8M0 bytes. Scales of NVFP4 are e4m3, row by row.
#[derive(Clone, Copy)]
pub struct GivenScales {
    pub data: *const u8,
    /// Whether scales are words of four E8M0 bytes.
    pub powers: bool,
    /// Distance between the scales of neighbouring rows, 0 if all rows share a scale.
    pub row_stride: i64,
    /// Distance between the scales of neighbouring groups (with `powers`: fours of groups), 0 if all groups share a scale.
    pub group_stride: i64,
}

impl GivenScales {
    /// Whether the scales lie as the GEMMs read them: fp32 [rows, groups].
    pub fn is_table(&self, rows: i64, groups: i64) -> bool {
        !self.powers && (self.row_stride == groups || rows == 1) && (self.group_stride == 1 || groups == 1)
    }
}
