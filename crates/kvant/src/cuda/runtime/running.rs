//! The kernels of a stream that may still run when the next one begins.
//!
//! A kernel that overlaps waits for the previous one (`device/dependent_launch.h`). If the previous kernel has waited
//! before it let this one begin, all earlier kernels have ended. If not, the kernels for which the previous kernel
//! waits may also run.

use crate::{cuda::headers, gpu::Launch};

/// The kernels that may still run when the next launch begins early; none if nothing may.
#[derive(Clone, Default)]
pub(super) struct RunningKernels<'a>(Vec<&'a Launch>);

impl<'a> RunningKernels<'a> {
    /// Whether a kernel that waits itself may begin while these run: none of them writes a buffer that it reads ahead.
    pub fn allow(&self, launch: &Launch) -> bool {
        !self.0.is_empty() && self.0.iter().all(|running| launch.may_read_beside(running))
    }

    /// Adds the kernel that is enqueued next.
    pub fn push(&mut self, launch: &'a Launch, overlaps: bool) {
        if !overlaps || !(launch.late || headers::lets_next_begin_first(launch.source)) {
            self.0.clear();
        }
        self.0.push(launch);
    }

    /// The next launch begins after all kernels have ended.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, Device, Tensor,
        gpu::{Source, Use},
    };

    static LATE: Source = Source { name: "late", text: "    take_turn();\n", headers: &[], layouts: &[] };
    static EARLY: Source = Source { name: "early", text: "    take_turn_early();\n", headers: &[], layouts: &[] };

    /// Whether each launch may begin early. A launch is a source, the tensor that it reads ahead, and the tensor that
    /// it writes.
    fn overlaps(launches: &[(&'static Source, usize, usize)]) -> Vec<bool> {
        let tensors: Vec<Tensor> =
            (0..10).map(|_| Tensor::zeros(&Device::reference(), DType::U8, &[4]).unwrap()).collect();
        let launches: Vec<Launch> = launches
            .iter()
            .map(|&(source, ahead, written)| {
                let launch = Launch::new("test", source, "kernel").reads_ahead(&[1]);
                launch.tensor(0, &tensors[written], Use::Write).tensor(1, &tensors[ahead], Use::Read)
            })
            .collect();
        let mut running = RunningKernels::default();
        launches
            .iter()
            .map(|launch| {
                let overlaps = running.allow(launch);
                running.push(launch, overlaps);
                overlaps
            })
            .collect()
    }

    #[test]
    fn a_kernel_that_lets_the_next_one_begin_late_has_seen_others_end() {
        // The last kernel reads results of the first one, which has ended.
        assert_eq!(overlaps(&[(&LATE, 0, 1), (&LATE, 0, 2), (&LATE, 1, 3)]), [false, true, true]);
        assert_eq!(overlaps(&[(&LATE, 0, 1), (&LATE, 1, 2)]), [false, false]);
    }

    #[test]
    fn behind_early_kernels_others_still_run() {
        let early = [(&EARLY, 0, 2), (&EARLY, 0, 3)];
        for (ahead, may) in [(1, false), (2, false), (3, false), (4, true)] {
            let launches = [&[(&LATE, 0, 1)], &early[..], &[(&LATE, ahead, 5)]].concat();
            assert_eq!(overlaps(&launches), [false, true, true, may], "reads {ahead} ahead");
        }
        // It did not overlap, so earlier kernels have ended.
        assert_eq!(overlaps(&[(&LATE, 0, 1), (&EARLY, 1, 2), (&LATE, 1, 3)]), [false, false, true]);
        // After two of them, nothing earlier runs.
        assert_eq!(overlaps(&[(&LATE, 0, 1), (&EARLY, 0, 2), (&LATE, 0, 3), (&LATE, 1, 4)]), [false, true, true, true]);
    }

    #[test]
    fn nothing_begins_early_behind_what_is_unknown() {
        let launch = Launch::new("test", &LATE, "kernel");
        let mut running = RunningKernels::default();
        assert!(!running.allow(&launch));
        running.push(&launch, false);
        assert!(running.allow(&launch));
        running.clear();
        assert!(!running.allow(&launch));
    }
}
