//! Functions that this library defines under names of libc, for Rust's runtime in it and for
//! itself. They are hidden from other libraries. The linker binds the library's calls to them, so
//! the dynamic linker has no such name to resolve.

/// Defines `$name` as `$function` within this library.
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

/// Returns a C string of a literal that ends in a zero.
pub(crate) const fn c_name(name: &'static str) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("names end in a zero"),
    }
}
