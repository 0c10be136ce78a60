//! Runs threads that only use processor time.

use anyhow::Result;

use super::{READY, say, wait_for_end};

pub(super) fn run(threads: usize) -> Result<()> {
    for _ in 0..threads {
        std::thread::spawn(|| {
            let mut sum = 0_u64;
            loop {
                sum = std::hint::black_box(sum.wrapping_mul(3).wrapping_add(1));
            }
        });
    }
    say(READY)?;
    wait_for_end();
    Ok(())
}
