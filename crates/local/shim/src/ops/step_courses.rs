//! For the tests of the files `*_step.rs`: all courses that a call can take through its steps.

use std::fmt::Debug;

/// Returns all arrays of `N` truth values.
pub(super) fn bools<const N: usize>() -> impl Iterator<Item = [bool; N]> {
    (0..1_u32 << N).map(|bits| std::array::from_fn(|at| bits & 1 << at != 0))
}

/// Calls `check` with each course that begins with the step `first`, and ends with a step that
/// shows nothing or with `first` again. A course lists everything that was found, each with the
/// step that followed. `known` is the state at its beginning, which `next` may change. No course
/// has more than `longest` steps, so there is no cycle.
pub(super) fn in_all<Found, Step, Known>(
    first: Step,
    known: Known,
    longest: usize,
    shown_by: impl Fn(Step) -> Vec<Found>,
    next: impl Fn(Found, &mut Known) -> Step,
    mut check: impl FnMut(Known, Vec<(Found, Step)>),
) where
    Found: Copy + Debug,
    Step: Copy + Debug + PartialEq,
    Known: Copy,
{
    let mut open = vec![(known, vec![])];
    while let Some((known, course)) = open.pop() {
        assert!(course.len() <= longest, "it ends or begins again soon: {course:?}");
        let before = course.last().map_or(first, |part: &(Found, Step)| part.1);
        let shown = shown_by(before);
        if shown.is_empty() || before == first && !course.is_empty() {
            check(known, course);
            continue;
        }
        for found in shown {
            let mut known = known;
            let step = next(found, &mut known);
            open.push((known, [&course[..], &[(found, step)]].concat()));
        }
    }
}
