//! Values that each thread of a service has its own of, so that threads share no cache line for
//! them.

use std::cell::Cell;

thread_local! {
    /// The number of this thread. Threads that serve no connections have the first one's.
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// Gives the calling thread its number.
pub(crate) fn number_this_thread(number: usize) {
    NUMBER.set(number);
}

/// A value for each thread.
#[derive(Debug)]
pub(crate) struct PerThread<T>(Box<[Apart<T>]>);

/// A value that shares no cache line with another one. Processors fetch pairs of lines of 64 bytes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Apart<T>(T);

impl<T: Default> PerThread<T> {
    pub(crate) fn new(threads: usize) -> PerThread<T> {
        PerThread((0..threads.max(1)).map(|_| Apart::default()).collect())
    }
}

impl<T> PerThread<T> {
    /// Returns the calling thread's value. Threads whose number is not below that of the values
    /// share some.
    pub(crate) fn own(&self) -> &T {
        &self.0[NUMBER.get() % self.0.len()].0
    }

    /// Returns the values of all threads.
    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|value| &value.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn each_thread_has_its_own_value() {
        let counts: PerThread<Mutex<usize>> = PerThread::new(3);
        std::thread::scope(|scope| {
            for number in 0..3 {
                let counts = &counts;
                scope.spawn(move || {
                    number_this_thread(number);
                    *counts.own().lock().unwrap() += number + 1;
                });
            }
        });
        let all: Vec<usize> = counts.all().map(|count| *count.lock().unwrap()).collect();
        assert_eq!(all, [1, 2, 3]);
    }
}
