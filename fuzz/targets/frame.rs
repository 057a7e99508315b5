//! libFuzzer's entry to the target `frame`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use offbeat_fuzz::memory::Counting;

#[global_allocator]
static MEMORY: Counting = Counting;

fuzz_target!(|bytes: &[u8]| offbeat_fuzz::frame(bytes));
