//! All-reduce between GPUs: `protocol.rs` is what they will speak.

#[cfg(test)]
mod model;
pub mod protocol;
