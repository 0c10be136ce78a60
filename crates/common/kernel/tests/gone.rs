//! Tests that programs are unloaded with their reader. It is a separate test binary because it
//! checks all programs that this process holds. Needs root.

use shunt_kernel::sequence::Reader;

/// Returns the ids of the programs that this process has descriptors for.
fn held() -> Vec<u32> {
    let fds = std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    let info = |fd: std::fs::DirEntry| std::fs::read_to_string(fd.path()).unwrap_or_default();
    let id = |text: String| text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok());
    fds.map(info).filter_map(id).collect()
}

#[test]
fn the_programs_are_gone_with_their_reader() {
    let in_kernel =
        |id: &u32| aya::programs::loaded_programs().any(|program| program.is_ok_and(|it| it.id() == *id));
    let reader = Reader::load().unwrap();
    let programs = held();
    assert_eq!(programs.len(), 2, "{programs:?}");
    assert!(programs.iter().all(in_kernel));
    drop(reader);
    assert!(!programs.iter().any(in_kernel));
}
