#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shunt_fuzz::target("http")(bytes));
