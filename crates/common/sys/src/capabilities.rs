//! Capabilities of the calling thread: giving up those that are not needed, and using one only for
//! a moment.
//!
//! A capability is *effective* (the kernel grants what it allows), *permitted* (the thread may make
//! it effective) or given up. A new thread starts with the capabilities of its creator.

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

use crate::Result;

/// Gives up all capabilities but `effective` and `permitted`, for this thread and every program
/// that it starts. A capability in `permitted` needs [`raise`] before it is used. A capability that
/// the thread does not have stays absent.
pub fn keep_only(effective: CapabilitySet, permitted: CapabilitySet) -> Result<()> {
    let held = capabilities(None)?;
    set_no_new_privs(true)?;
    let kept = held.permitted & (effective | permitted);
    // Dropping from the bounding set needs CAP_SETPCAP. For a thread without it, its parent has set
    // the bounding set.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in (CapabilitySet::all() - kept).iter() {
            // An error means that this kernel does not know the capability.
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    let sets = CapabilitySets {
        effective: held.effective & effective,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    // Kernels before 4.3 have no ambient set.
    let _ = clear_ambient_capability_set();
    Ok(())
}

/// Makes permitted capabilities effective until the calling thread ends. Capabilities that are not
/// permitted stay absent, and the kernel then refuses the operations that they allow.
pub fn raise(wanted: CapabilitySet) -> Result<()> {
    let mut held = capabilities(None)?;
    let raised = held.effective | (held.permitted & wanted);
    if raised == held.effective {
        return Ok(());
    }
    held.effective = raised;
    set_capabilities(None, held)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` in a new thread, because capabilities belong to a thread.
    fn apart(work: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(work).join()).unwrap();
    }

    /// Needs root.
    #[test]
    fn what_is_given_up_does_not_come_back() {
        apart(|| {
            keep_only(CapabilitySet::NET_ADMIN, CapabilitySet::SYS_ADMIN).unwrap();
            let held = capabilities(None).unwrap();
            assert_eq!(held.effective, CapabilitySet::NET_ADMIN);
            assert_eq!(held.permitted, CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN);
            assert!(held.inheritable.is_empty());
            raise(CapabilitySet::SYS_ADMIN | CapabilitySet::CHOWN).unwrap();
            let held = capabilities(None).unwrap();
            assert_eq!(held.effective, CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN);
        });
    }

    /// Needs root.
    #[test]
    fn a_thread_has_what_its_maker_has() {
        apart(|| {
            keep_only(CapabilitySet::NET_ADMIN, CapabilitySet::SYS_ADMIN).unwrap();
            apart(|| {
                raise(CapabilitySet::SYS_ADMIN).unwrap();
                assert!(capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN));
            });
            assert!(!capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN));
        });
    }

    /// Needs root.
    #[test]
    fn a_program_that_is_started_gets_nothing_more() {
        apart(|| {
            keep_only(CapabilitySet::NET_ADMIN, CapabilitySet::empty()).unwrap();
            // Root's programs get all that the bounding set has.
            let status = std::process::Command::new("cat").arg("/proc/self/status").output().unwrap();
            let status = String::from_utf8(status.stdout).unwrap();
            let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
            let effective = u64::from_str_radix(effective.trim(), 16).unwrap();
            assert_eq!(effective, CapabilitySet::NET_ADMIN.bits());
            assert!(status.contains("NoNewPrivs:\t1"));
        });
    }

    #[test]
    fn a_thread_without_any_stays_without() {
        apart(|| {
            keep_only(CapabilitySet::empty(), CapabilitySet::empty()).unwrap();
            keep_only(CapabilitySet::NET_ADMIN, CapabilitySet::SYS_ADMIN).unwrap();
            raise(CapabilitySet::SYS_ADMIN).unwrap();
            assert!(capabilities(None).unwrap().permitted.is_empty());
        });
    }
}
