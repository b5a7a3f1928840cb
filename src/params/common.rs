//! Types that parameters of every kind share.

#[cxx::bridge(namespace = "oxmoe")]
pub mod ffi {
    /// Element type of a tensor.
    #[repr(i32)]
    #[derive(Debug)]
    enum Dtype {
        F32 = 0,
        F16 = 1,
        Bf16 = 2,
    }

    /// How gate and up rows lie in w13 `[E, 2I, H]`.
    #[repr(i32)]
    #[derive(Debug)]
    enum W13Layout {
        /// Rows 0..I gate, I..2I up (SGLang).
        GateUp = 0,
        /// Rows 0..I up, I..2I gate (flashinfer).
        UpGate = 1,
        /// Rows 2i gate, 2i + 1 up (GPT-OSS).
        Interleaved = 2,
        /// 64 gate rows, the 64 up rows that belong to them, and so on (CuteDSL). GEMMs on CPUs read it; packing for GPUs brings rows into
        /// halves.
        GateUp64 = 3,
        /// `GateUp64` with up rows before gate rows.
        UpGate64 = 4,
    }

    /// Rows `[first, first + count)` of the expert-sorted order, all of one expert. `expert` -1 ends the schedule.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Tile {
        expert: i32,
        first: i32,
        count: i32,
        /// Row tiles of GEMM1's output that are stored, if one launch has both GEMMs. A new schedule has 0.
        done: i32,
    }
}
