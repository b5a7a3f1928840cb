//! The scales of a call's input that the caller quantised.

/// Scales of quantised rows as the caller has them: fp32, or words of four E8M0 bytes; of NVFP4 e4m3, row by row.
#[derive(Clone, Copy)]
pub struct GivenScales {
    pub data: *const u8,
    pub powers: bool,
    /// Between neighbouring rows and groups (fours of groups), 0 where they share one.
    pub row_stride: i64,
    pub group_stride: i64,
}

impl GivenScales {
    /// Whether this is what the GEMMs read: fp32 [rows, groups].
    pub fn is_table(&self, rows: i64, groups: i64) -> bool {
        !self.powers && (self.row_stride == groups || rows == 1) && (self.group_stride == 1 || groups == 1)
    }
}
