//! All-reduce on a GPU: a rank's memory, mapped by all ranks of its group, and the launch.

use super::allreduce_shape;
use super::memory::{self, HostWords, Mapping};
use super::operands::Operands;
use super::plan::{self, AllReducePlan};
use super::protocol::{Algorithm, Fault, FaultKind, Layout, Shape, CHUNK_BYTES, LINE_BYTES, MAX_RANKS};
use crate::contract;
use crate::cpu::{Quantise, ReduceRows};
use crate::device::{self, Current, Gpu};
use crate::error::{guard, Result};
use crate::kernel::{self, Stream};
use crate::params::{AllReduceParams, Dtype, ExpertRows, Narrowing, QuantKind, Workspaces};
use crate::stats;
use crate::tensor::Place;
use crate::variants::{allreduce, Element, Variant};
use cudarc::driver::result;
use pyo3::prelude::*;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// A bit of the header's shape word, in the field that holds the pattern's number. With it, ranks that chose different algorithms disagree
/// too.
const TWO_SHOTS: u64 = 1 << 5;
/// The header's shape word also has the calls that this rank has refused, modulo 256, in bits of the hidden size that no row on a GPU
/// needs. A refused call launches nothing. So a rank that alone refuses one disagrees with its peers at its next call, and they do not take
/// that call for the one that they wait for.
const REFUSALS: u64 = 0xFF << REFUSALS_AT;
const REFUSALS_AT: u32 = 24;
// The widest row has values of 2 bytes.
const _: () = assert!((plan::MAX_ROW_CHUNKS as u64 * CHUNK_BYTES / 2) << 8 < 1 << REFUSALS_AT);

struct Maps {
    /// This rank's memory.
    own: Mapping,
    peers: Vec<Option<Mapping>>,
    /// The descriptor by which peers map `own`. `open` closes it.
    descriptor: Option<OwnedFd>,
    report: HostWords,
}

#[doc = crate::help!("AllReduceMemory")]
#[pyclass(frozen, module = "oxmoe")]
pub struct AllReduceMemory {
    gpu: &'static Gpu,
    layout: Layout,
    /// Bytes of the largest message.
    capacity: u64,
    rank: usize,
    maps: Mutex<Option<Maps>>,
    /// Calls that this rank has refused.
    refusals: AtomicU32,
}

impl AllReduceMemory {
    fn launched<'py>(
        &self,
        py: Python<'py>,
        operands: &Bound<'py, PyAny>,
        deadline: f64,
        use_oneshot: Option<bool>,
    ) -> Result<Bound<'py, PyAny>> {
        let operands = Operands::of(operands)?;
        let (checked, contract) = operands.check()?;
        let leader = checked.on_gpu()?;
        if leader.place != Place::Cuda(self.gpu.ordinal) {
            contract!("input: is on {}, the workspace was made on cuda:{}", leader.place, self.gpu.ordinal);
        }
        if checked.bytes() as u64 > self.capacity {
            let what = allreduce_shape(checked.shape.word());
            contract!("input: {what} has {} bytes, the workspace was made for {}", checked.bytes(), self.capacity);
        }
        let plan = AllReducePlan::new(&checked.shape, &self.layout, &self.gpu.device, use_oneshot)?;
        let (rows, result) = checked.rows(Vec::new())?;
        let stream = Stream::new(self.gpu, leader.current_stream(py)?, &contract.finish()?)?;
        self.with(|maps| {
            let params = AllReduceParams {
                input: checked.input(),
                experts: checked.expert_rows().unwrap_or(NO_EXPERTS),
                ..self.params(maps, &plan, (&checked.shape, &rows), deadline)?
            };
            stream.launch("allreduce_fusion", &plan.launch, &params)
        })?;
        stats::count(stats::Call::AllReduceFusion, checked.shape.tokens.into());
        Ok(result)
    }

    fn count_refusal(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// The header's word of a call.
    fn word(&self, shape: &Shape, two: bool) -> u64 {
        let refusals = u64::from(self.refusals.load(Ordering::Relaxed)) << REFUSALS_AT & REFUSALS;
        shape.word() | refusals | if two { TWO_SHOTS } else { 0 }
    }

    fn with<T>(&self, body: impl FnOnce(&mut Maps) -> Result<T>) -> Result<T> {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        match maps.as_mut() {
            Some(maps) => body(maps),
            None => contract!("workspace: was destroyed"),
        }
    }

    fn params(
        &self,
        maps: &Maps,
        plan: &AllReducePlan,
        (shape, rows): (&Shape, &ReduceRows),
        deadline: f64,
    ) -> Result<AllReduceParams> {
        let mut at = [std::ptr::null_mut(); MAX_RANKS];
        for (rank, address) in at.iter_mut().enumerate().take(self.layout.ranks) {
            let map = if rank == self.rank { Some(&maps.own) } else { maps.peers[rank].as_ref() };
            let Some(map) = map else { contract!("workspace: rank {rank}'s memory was never opened") };
            *address = map.address();
        }
        let [rank0, rank1, rank2, rank3, rank4, rank5, rank6, rank7] = at;
        let two = plan.algorithm == Algorithm::TwoShot;
        let layout = &self.layout;
        Ok(AllReduceParams {
            workspaces: Workspaces { rank0, rank1, rank2, rank3, rank4, rank5, rank6, rank7 },
            report: maps.report.address(),
            input: std::ptr::null(),
            residual_in: rows.residual_in,
            gamma: rows.gamma,
            output: rows.output,
            residual_out: rows.residual_out,
            norm_out: rows.norm_out,
            experts: NO_EXPERTS,
            narrowing: narrowing(rows, plan.row_chunks),
            slots: if two { layout.scatter_slot(0, 0) } else { layout.oneshot_slot(0, 0) },
            slot_bytes: if two { layout.twoshot / layout.ranks as u64 } else { layout.oneshot },
            gathered: layout.gathered(),
            // The limit is far from overflow: kernels add the deadline to the clock, some twice.
            deadline_ns: (deadline * 1e9).min(1e18) as u64,
            shape: self.word(shape, two),
            rank: self.rank as i32,
            tokens: shape.tokens as i32,
            row_chunks: plan.row_chunks as i32,
            range: plan.range as i32,
            scatter_ctas: plan.stages[0] as i32,
            reduce_ctas: plan.stages[1] as i32,
            finish_ctas: plan.stages[2] as i32,
            inverse_hidden: 1.0 / rows.hidden as f32,
            epsilon: rows.epsilon,
            weight_bias: rows.weight_bias,
        })
    }
}

const NO_EXPERTS: ExpertRows = ExpertRows {
    rows: std::ptr::null(),
    row_count: 0,
    row_of_slot: std::ptr::null(),
    weights: std::ptr::null(),
    weight_dtype: Dtype::F32,
    top_k: 0,
    shared: std::ptr::null(),
};

fn narrowing(rows: &ReduceRows, row_chunks: u32) -> Narrowing {
    let none = Narrowing {
        kind: QuantKind::None,
        quant_out: rows.quant_out,
        scale_out: rows.scale_out,
        scale_factor: rows.scale_factor,
        scale: 0.0,
        tile_rows: 0,
        group_chunks: 0,
        column_stride: 0,
    };
    match rows.quantise {
        Quantise::None => none,
        Quantise::Fp8 { scale } => Narrowing { kind: QuantKind::Fp8, scale, ..none },
        Quantise::PerToken => Narrowing { kind: QuantKind::PerToken, ..none },
        Quantise::Groups { group, stride } => Narrowing {
            kind: QuantKind::Groups,
            group_chunks: (group * row_chunks as usize / rows.hidden) as i32,
            column_stride: stride as i64,
            ..none
        },
        Quantise::Nvfp4 { scale, layout } => {
            Narrowing { kind: QuantKind::Nvfp4, scale, tile_rows: layout.tile_rows(), ..none }
        }
    }
}

#[pymethods]
#[pyo3(crate = "crate::python")]
impl AllReduceMemory {
    #[new]
    #[pyo3(signature = (device, world_size, rank, bytes, dtype, *, force_oneshot_support=false))]
    fn new(
        py: Python<'_>,
        device: i32,
        world_size: u32,
        rank: usize,
        bytes: u64,
        dtype: &str,
        force_oneshot_support: bool,
    ) -> PyResult<AllReduceMemory> {
        guard(|| {
            plan::serves(world_size)?;
            if rank >= world_size as usize {
                contract!("rank: expected 0 to {}, got {rank}", world_size - 1);
            }
            let gpu = device::gpu(device)?;
            let layout = Layout::new(bytes, world_size as usize, force_oneshot_support);
            let made: Result<Maps> = py.detach(|| {
                // The kernels are loaded before the first call, which may be inside a stream capture.
                kernel::prepare(gpu, &kernels(dtype, world_size))?;
                let report = HostWords::new(gpu)?;
                let (own, descriptor) = memory::create(gpu, layout.bytes(), LINE_BYTES as usize)?;
                let peers = (0..world_size).map(|_| None).collect();
                Ok(Maps { own, peers, descriptor: Some(descriptor), report })
            });
            Ok(AllReduceMemory {
                gpu,
                layout,
                capacity: bytes,
                rank,
                maps: Mutex::new(Some(made?)),
                refusals: 0.into(),
            })
        })
    }

    #[doc = crate::help!("AllReduceMemory.nbytes")]
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.bytes()
    }

    #[doc = crate::help!("AllReduceMemory.device")]
    #[getter]
    fn device(&self) -> i32 {
        self.gpu.ordinal
    }

    #[doc = crate::help!("AllReduceMemory.descriptor")]
    fn descriptor(&self) -> PyResult<i32> {
        guard(|| {
            self.with(|maps| match &maps.descriptor {
                Some(descriptor) => Ok(descriptor.as_raw_fd()),
                None => contract!("workspace: peers' memory was opened before"),
            })
        })
    }

    #[doc = crate::help!("AllReduceMemory.open")]
    fn open(&self, py: Python<'_>, descriptors: Vec<i32>) -> PyResult<()> {
        guard(|| {
            if descriptors.len() != self.layout.ranks {
                contract!("descriptors: expected {}, got {}", self.layout.ranks, descriptors.len());
            }
            py.detach(|| {
                self.with(|maps| {
                    let Some(exported) = &maps.descriptor else {
                        contract!("workspace: peers' memory was opened before");
                    };
                    for (peer, &number) in descriptors.iter().enumerate().filter(|&(peer, _)| peer != self.rank) {
                        if number < 0 {
                            contract!("descriptors: rank {peer}'s is missing");
                        }
                        // SAFETY: the number is not -1, and it is used once, to be duplicated. That is an error if it is not open. If the
                        // caller closes it meanwhile, another file may be duplicated, which `memory::open` looks at.
                        let theirs = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
                        let Ok(theirs) = theirs.try_clone_to_owned() else {
                            contract!("descriptors: rank {peer}'s ({number}) is not open");
                        };
                        let theirs = memory::open(self.gpu, theirs.as_fd(), (&maps.own, exported), peer)?;
                        maps.peers[peer] = Some(theirs);
                    }
                    maps.descriptor = None;
                    Ok(())
                })
            })
        })
    }

    #[doc = crate::help!("AllReduceMemory.launch")]
    #[pyo3(signature = (operands, deadline, use_oneshot=None))]
    fn launch<'py>(
        &self,
        py: Python<'py>,
        operands: &Bound<'py, PyAny>,
        deadline: f64,
        use_oneshot: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        guard(|| self.launched(py, operands, deadline, use_oneshot).inspect_err(|_| self.count_refusal()))
    }

    #[doc = crate::help!("AllReduceMemory.refused")]
    fn refused(&self) {
        self.count_refusal();
    }

    #[doc = crate::help!("AllReduceMemory.fault")]
    fn fault(&self) -> PyResult<Option<(bool, String)>> {
        guard(|| {
            self.with(|maps| {
                let Some(fault) = Fault::from_word(maps.report.read(0)) else { return Ok(None) };
                Ok(Some(describe(&fault, self.rank, [maps.report.read(1), maps.report.read(2)])))
            })
        })
    }

    #[doc = crate::help!("AllReduceMemory.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guard(|| {
            py.detach(|| {
                let maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner).take();
                if maps.is_none() {
                    return Ok(());
                }
                let _current = Current::new(self.gpu)?;
                let waited = result::ctx::synchronize();
                drop(maps);
                waited.map_err(|e| device::cuda_error("all-reduce workspace: waiting for the GPU", e))
            })
        })
    }

    #[doc = crate::help!("AllReduceMemory.synchronize")]
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        guard(|| {
            py.detach(|| {
                let failed = |e| device::cuda_error("all-reduce workspace: waiting for the GPU", e);
                self.with(|maps| {
                    let _current = Current::new(self.gpu)?;
                    result::ctx::synchronize().map_err(failed)?;
                    let mut word = [0u64];
                    // SAFETY: the copy reads the first word of our own memory, which is the error word.
                    unsafe { result::memcpy_dtoh_sync(&mut word, maps.own.address() as u64) }.map_err(failed)?;
                    if maps.report.read(0) == 0 {
                        maps.report.write(0, word[0]);
                    }
                    Ok(())
                })
            })
        })
    }
}

impl Drop for AllReduceMemory {
    fn drop(&mut self) {
        let maps = self.maps.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if maps.is_some() {
            if let Ok(_current) = Current::new(self.gpu) {
                let _ = result::ctx::synchronize();
                drop(maps);
            }
        }
    }
}

/// (Whether the fault was a wait that ended, its message), from the fault and the two shape words beside it.
fn describe(fault: &Fault, rank: usize, [ours, theirs]: [u64; 2]) -> (bool, String) {
    let Fault { kind, finder, peer, epoch } = *fault;
    let shape = |word: u64| {
        let shots = if word & TWO_SHOTS != 0 { " in two shots" } else { "" };
        let refused = match (word & REFUSALS) >> REFUSALS_AT {
            0 => String::new(),
            calls => format!(" and has refused {calls} calls before"),
        };
        allreduce_shape(word & !(TWO_SHOTS | REFUSALS)) + shots + &refused
    };
    match kind {
        FaultKind::Timeout => (
            true,
            format!(
                "rank {finder} waited for peer {peer} in call {epoch}: nothing came within the deadline{}",
                if ours == 0 { String::new() } else { format!(" (rank {rank} calls {})", shape(ours)) }
            ),
        ),
        FaultKind::Mismatch => {
            let named =
                |who: String, word| if word == 0 { String::new() } else { format!(", {who} calls {}", shape(word)) };
            let shapes = named(format!("rank {rank}"), ours) + &named("a peer".into(), theirs);
            (false, format!("ranks {finder} and {peer} disagree on the shape in call {epoch}{shapes}"))
        }
    }
}

/// The kernels that calls of one dtype and group size can take.
fn kernels(dtype: &str, ranks: u32) -> Vec<Variant> {
    let element = match dtype {
        "float32" => Element::F32,
        "float16" => Element::F16,
        _ => Element::Bf16,
    };
    allreduce::of(element, ranks)
}

#[doc = crate::help!("allreduce_unsupported")]
#[pyfunction(crate = "crate::python")]
pub fn allreduce_unsupported(device: i32, world_size: u32) -> PyResult<Option<String>> {
    guard(|| {
        if let Err(error) = plan::serves(world_size) {
            return Ok(Some(error.to_string()));
        }
        let gpu = match device::gpu(device) {
            Ok(gpu) => gpu,
            Err(error) => return Ok(Some(error.to_string())),
        };
        let missing = kernels("bfloat16", world_size).into_iter().any(|variant| !kernel::available(&variant, gpu));
        Ok(missing.then(|| format!("this wheel has no all-reduce kernels for {}", gpu.device.arch)))
    })
}
