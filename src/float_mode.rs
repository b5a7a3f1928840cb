//! The floating-point mode of a thread: how it rounds, and whether denormal numbers count as 0.
//!
//! `torch.set_flush_denormal(True)` and other libraries change the mode of the caller's thread. Threads of a pool have another mode, so the
//! same call would have other bits, and MXFP4's scale 2^-127 would be 0. All loops of the CPU backend run in the default mode.
//!
//! NOTE: on processors other than x86-64 the mode stays as it is.

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    /// MXCSR at the start of a process: round to nearest, denormal numbers count, no exception is a signal.
    pub const DEFAULT: u32 = 0x1f80;
    /// The flags of exceptions that happened. They change no result.
    pub const FLAGS: u32 = 0x3f;

    pub fn read() -> u32 {
        let mut mode = 0u32;
        // SAFETY: the instruction writes these four bytes.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut mode, options(nostack, preserves_flags)) };
        mode
    }

    pub fn write(mode: u32) {
        // SAFETY: the instruction reads these four bytes. They came from `read` or are `DEFAULT`, so no reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &mode, options(nostack, preserves_flags, readonly)) };
    }
}

/// Gives this thread the default mode.
pub fn set_default() {
    #[cfg(target_arch = "x86_64")]
    register::write(register::DEFAULT);
}

/// Whether this thread has the default mode.
#[cfg(all(test, target_arch = "x86_64"))]
pub fn is_default() -> bool {
    register::read() & !register::FLAGS == register::DEFAULT
}

/// Gives this thread a mode in which denormal numbers are 0.
#[cfg(all(test, target_arch = "x86_64"))]
pub fn set_flushing() {
    register::write(register::DEFAULT | 0x8040);
}

/// Runs `body` in the default mode. The thread has its own mode again afterwards, also after a panic.
pub fn in_default<T>(body: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    let _restored = {
        let before = register::read();
        let other = before & !register::FLAGS != register::DEFAULT;
        if other {
            register::write(register::DEFAULT);
        }
        other.then(|| Restored(before))
    };
    body()
}

#[cfg(target_arch = "x86_64")]
struct Restored(u32);

#[cfg(target_arch = "x86_64")]
impl Drop for Restored {
    fn drop(&mut self) {
        register::write(self.0);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Flushes denormal results and inputs, and rounds down.
    const OTHER: u32 = register::DEFAULT | 0x8040 | 0x2000;

    #[test]
    fn a_body_has_the_default_mode() {
        let mode = || register::read() & !register::FLAGS;
        std::thread::spawn(move || {
            register::write(OTHER);
            assert_eq!(in_default(mode), register::DEFAULT);
            assert_eq!(mode(), OTHER);
            assert!(std::panic::catch_unwind(|| in_default(|| panic!())).is_err());
            assert_eq!(mode(), OTHER);
            set_default();
            assert_eq!(mode(), register::DEFAULT);
        })
        .join()
        .unwrap();
    }
}
