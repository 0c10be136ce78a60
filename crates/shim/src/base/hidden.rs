//! Functions that this library has under the name of one of libc's, for Rust's runtime in it and for itself, and nobody outside.
//! What is linked here finds them before any library's, so that the dynamic linker is asked for none.

/// Has `$name` be `$function` within this library.
macro_rules! hidden {
    ($name:ident, $function:path) => {
        std::arch::global_asm!(
            concat!(".pushsection .text.", stringify!($name), ", \"ax\", @progbits"),
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ", @function"),
            concat!(stringify!($name), ":"),
            $crate::base::arch::jump!(),
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            ".popsection",
            to = sym $function,
        );
    };
}
pub(crate) use hidden;

/// A name as C has it, of a literal that ends in a zero.
pub(crate) const fn c_name(name: &'static str) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("names end in a zero"),
    }
}
