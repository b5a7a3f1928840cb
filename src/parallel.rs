//! Loops on many threads. All of them run in one pool of this process's own, which is made anew in a child of fork(): threads do not
//! survive fork(), and a pool without them would wait for ever.
//!
//! This file alone names rayon, so that no loop can run in rayon's global pool: `Parallel` has the methods that do the work, and rayon's
//! trait of the same methods is not exported.

use crate::fork;
use rayon::iter::ParallelIterator;
pub use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefMutIterator};
pub use rayon::slice::{ParallelSlice, ParallelSliceMut};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::atomic::{AtomicPtr, Ordering};

struct Pool {
    /// `fork::generation()` of the process whose threads they are.
    generation: u32,
    threads: ThreadPool,
}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// As many threads as `RAYON_NUM_THREADS` says, or as there are processors. Where the system gives no more threads: half as many, and so on.
fn start() -> ThreadPool {
    let mut most = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = ThreadPoolBuilder::new();
    loop {
        match builder.build() {
            Ok(threads) => return threads,
            Err(error) => {
                most /= 2;
                assert!(most > 0, "no thread can be started: {error}");
                builder = ThreadPoolBuilder::new().num_threads(most);
            }
        }
    }
}

/// This process's pool.
///
/// NOTE: no lock: another thread of the parent may have held it at the fork.
fn pool() -> &'static ThreadPool {
    let generation = fork::generation();
    let current = POOL.load(Ordering::Acquire);
    // SAFETY: null, or a pool that was stored below and is never freed.
    if let Some(pool) = unsafe { current.as_ref() }.filter(|pool| pool.generation == generation) {
        return &pool.threads;
    }
    let made = Box::into_raw(Box::new(Pool { generation, threads: start() }));
    // A parent's pool is left as it is: its threads cannot be told to end.
    match POOL.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was made above and is never freed from here on.
        Ok(_) => unsafe { &(*made).threads },
        Err(faster) => {
            // SAFETY: another thread of this process was faster: nobody has seen the one that was made here, and the other is never freed.
            unsafe {
                drop(Box::from_raw(made));
                &(*faster).threads
            }
        }
    }
}

/// How many threads this process's loops run on.
pub fn threads() -> usize {
    pool().current_num_threads()
}

/// The consuming methods of rayon's iterators, in this process's pool. What is not divided runs on the caller's thread.
pub trait Parallel: IndexedParallelIterator {
    fn for_each(self, body: impl Fn(Self::Item) + Send + Sync) {
        self.for_each_least(1, body);
    }

    /// Tasks have at least so many items.
    fn for_each_least(self, least: usize, body: impl Fn(Self::Item) + Send + Sync) {
        divided(self.len(), least, || ParallelIterator::for_each(self.with_min_len(least), body));
    }

    /// `init` makes what a task's items share.
    fn for_each_init<T>(self, init: impl Fn() -> T + Send + Sync, body: impl Fn(&mut T, Self::Item) + Send + Sync) {
        divided(self.len(), 1, || ParallelIterator::for_each_init(self, init, body));
    }

    fn map_collect<R: Send>(self, map: impl Fn(Self::Item) -> R + Send + Sync) -> Vec<R> {
        divided(self.len(), 1, || ParallelIterator::map(self, map).collect())
    }

    /// The largest of what `map` gives, 0 at least. Tasks have at least so many items.
    fn largest(self, least: usize, map: impl Fn(Self::Item) -> f32 + Send + Sync) -> f32 {
        divided(self.len(), least, || ParallelIterator::map(self.with_min_len(least), map).reduce(|| 0.0, f32::max))
    }

    /// The first thing that `map` gives.
    fn find_map_first<R: Send>(self, map: impl Fn(Self::Item) -> Option<R> + Send + Sync) -> Option<R> {
        divided(self.len(), 1, || ParallelIterator::find_map_first(self, map))
    }
}

impl<I: IndexedParallelIterator> Parallel for I {}

/// Runs a loop of `items`, where it is no shorter than two tasks, on the pool.
fn divided<R: Send>(items: usize, least: usize, run: impl FnOnce() -> R + Send) -> R {
    if items < 2 * least {
        run()
    } else {
        pool().install(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn check(folder: &Path, wrong: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                check(&path, wrong);
            } else if !path.ends_with("src/parallel.rs") && std::fs::read_to_string(&path).unwrap().contains("rayon") {
                wrong.push(path.display().to_string());
            }
        }
    }

    #[test]
    fn no_other_file_names_rayon() {
        let mut wrong = Vec::new();
        check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut wrong);
        assert_eq!(wrong, [""; 0]);
    }

    #[test]
    fn loops_run_in_the_pool_that_there_is() {
        let in_pool = |_| rayon::current_thread_index().map(|_| pool().current_thread_index().is_some());
        assert_eq!((0..2).into_par_iter().map_collect(in_pool), [Some(true); 2]);
        assert_eq!((0..1).into_par_iter().map_collect(in_pool), [None]);
        assert_eq!((0..1000usize).into_par_iter().largest(10, |i| i as f32), 999.0);
        assert!(std::ptr::eq(pool(), pool()));
    }
}
