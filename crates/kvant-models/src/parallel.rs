//! Runs loading on several threads.

use std::{
    num::NonZero,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use crate::Result;

/// Bytes that a thread reads at once. They stay in its cache until they are copied to the device, and CUDA copies this
/// size asynchronously.
pub(crate) const PIECE: usize = 1 << 20;

/// Maximum threads for each device that is written: eight threads read page caches faster than a device accepts the
/// data.
const MAX_THREADS: usize = 8;

/// Calls `work` for each of `0..count` on several threads, for data of `devices` devices. Each thread has its own
/// state, such as a buffer. After an error, no further index is started.
///
/// # Errors
/// One of the errors of `work`.
pub(crate) fn for_each<S>(
    count: usize,
    devices: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let run = || {
        let mut state = state();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            if let Err(error) = work(&mut state, number) {
                next.store(count, Ordering::Relaxed);
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS * devices).min(count);
    thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be spawned, the existing ones do the work.
            let _ = thread::Builder::new().name("kvant loader".to_string()).spawn_scoped(scope, run);
        }
        run();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn every_number_once() {
        let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        for_each(
            seen.len(),
            2,
            || 0,
            |mine, number| {
                *mine += 1;
                seen[number].fetch_add(1, Ordering::Relaxed);
                Ok(())
            },
        )
        .unwrap();
        assert!(seen.iter().all(|times| times.load(Ordering::Relaxed) == 1));
        for_each(0, 1, || (), |(), _| unreachable!("there is nothing to do")).unwrap();
    }

    #[test]
    fn an_error_ends_it() {
        let done = AtomicUsize::new(0);
        let result = for_each(
            1_000_000,
            1,
            || (),
            |(), number| match number {
                17 => Err(Error::MissingTensor { name: "seventeen".to_string() }),
                _ => {
                    done.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(std::time::Duration::from_micros(50));
                    Ok(())
                }
            },
        );
        assert!(result.unwrap_err().to_string().contains("seventeen"));
        assert!(done.load(Ordering::Relaxed) < 10_000);
    }
}
