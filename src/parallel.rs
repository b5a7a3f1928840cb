//! Loops on many threads. All of them run in one pool that belongs to this process. A child of fork() makes a new pool: threads do not
//! survive fork(), and a pool without them would wait for ever.
//!
//! Only this file names rayon, so that no loop can run in rayon's global pool. `Parallel` has the methods that do the work, and rayon's
//! trait of the same methods is not exported.

use crate::float_mode;
use crate::fork::PerProcess;
use rayon::iter::ParallelIterator;
pub use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefMutIterator};
pub use rayon::slice::{ParallelSlice, ParallelSliceMut};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A pool with `RAYON_NUM_THREADS` threads, or one thread for each processor. If the system gives no more threads, it takes half as many,
/// and so on.
fn start() -> ThreadPool {
    // A new thread has the mode of the thread that starts it.
    let builder = || ThreadPoolBuilder::new().start_handler(|_| float_mode::set_default());
    let mut most = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let mut pool = builder();
    loop {
        match pool.build() {
            Ok(threads) => return threads,
            Err(error) => {
                most /= 2;
                assert!(most > 0, "no thread can be started: {error}");
                pool = builder().num_threads(most);
            }
        }
    }
}

/// This process's pool. A parent's pool is left alone, because its threads cannot be told to end.
fn pool() -> &'static ThreadPool {
    static POOL: PerProcess<ThreadPool> = PerProcess::new();
    POOL.get(start)
}

/// The number of threads on which this process's loops run.
pub fn threads() -> usize {
    pool().current_num_threads()
}

/// The consuming methods of rayon's iterators, in this process's pool. A loop that is not divided runs on the caller's thread.
pub trait Parallel: IndexedParallelIterator {
    fn for_each(self, body: impl Fn(Self::Item) + Send + Sync) {
        self.for_each_least(1, body);
    }

    /// Runs `body` for each item, in tasks of at least `least` items.
    fn for_each_least(self, least: usize, body: impl Fn(Self::Item) + Send + Sync) {
        divided(self.len(), least, || ParallelIterator::for_each(self.with_min_len(least), body));
    }

    /// Runs `body` for each item. `init` makes the value that the items of a task share.
    fn for_each_init<T>(self, init: impl Fn() -> T + Send + Sync, body: impl Fn(&mut T, Self::Item) + Send + Sync) {
        divided(self.len(), 1, || ParallelIterator::for_each_init(self, init, body));
    }

    fn map_collect<R: Send>(self, map: impl Fn(Self::Item) -> R + Send + Sync) -> Vec<R> {
        divided(self.len(), 1, || ParallelIterator::map(self, map).collect())
    }

    /// The largest number that `map` gives, at least 0. Tasks have at least `least` items.
    fn largest(self, least: usize, map: impl Fn(Self::Item) -> f32 + Send + Sync) -> f32 {
        divided(self.len(), least, || ParallelIterator::map(self.with_min_len(least), map).reduce(|| 0.0, f32::max))
    }

    /// The first value that `map` gives in the order of the items.
    fn find_map_first<R: Send>(self, map: impl Fn(Self::Item) -> Option<R> + Send + Sync) -> Option<R> {
        divided(self.len(), 1, || ParallelIterator::find_map_first(self, map))
    }
}

impl<I: IndexedParallelIterator> Parallel for I {}

/// Runs a loop of `items` on the pool if it is at least two tasks long, and otherwise on this thread.
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

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_pool_has_the_default_mode() {
        let of_pool = std::thread::spawn(|| {
            float_mode::set_flushing();
            start().broadcast(|_| float_mode::is_default())
        });
        assert!(of_pool.join().unwrap().into_iter().all(|is_default| is_default));
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
