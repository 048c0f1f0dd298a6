//! Ranks that fail on purpose. `tests/suite/groups/` tests results.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::*;
use crate::{
    CpuOptions, DType, Encoder, Tensor,
    cpu::Cpu,
    host::{Host, HostExecutor},
    ops::{self, AllReduce, Softcap},
};

/// The behaviour of the softcaps of a device.
const FAILS: usize = 1;
const PANICS: usize = 2;

/// A CPU whose softcaps can fail.
struct Faulty {
    cpu: Cpu,
    fate: Arc<AtomicUsize>,
}

impl HostExecutor for Faulty {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn name(&self) -> String {
        "faulty".to_string()
    }

    fn run(&self, call: &Call) -> Result<()> {
        match (self.fate.load(SeqCst), call) {
            (FAILS, Call::Softcap(_)) => {
                Err(Error::DeviceFault { device: "faulty".to_string(), reason: "was lost".to_string() })
            }
            (PANICS, Call::Softcap(_)) => panic!("on purpose"),
            _ => self.cpu.run(call),
        }
    }

    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation {
        self.cpu.explain_attend(call)
    }
}

/// A group, and the behaviour of its ranks.
fn group(ranks: usize) -> (Device, Vec<Arc<AtomicUsize>>) {
    let fates: Vec<Arc<AtomicUsize>> = (0..ranks).map(|_| Arc::default()).collect();
    let device = |fate: &Arc<AtomicUsize>| {
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        Device::from_backend(Arc::new(Host::new(Faulty { cpu, fate: fate.clone() })))
    };
    let devices: Vec<Device> = fates.iter().map(device).collect();
    (Device::group(&devices).unwrap(), fates)
}

/// Ranks that wait for the failed one in a sum leave. The pass has the error of the failed rank, and the next pass is
/// right.
#[test]
fn a_rank_that_fails_ends_the_pass_of_all() {
    for ranks in [1, 2, 3, 4] {
        let (group, fates) = group(ranks);
        let x = Tensor::zeros(&group, DType::F32, &[100]).unwrap();
        let record = |enc: &mut Encoder| {
            ops::all_reduce(enc, &AllReduce::new(&x, &x))?;
            ops::softcap(enc, &Softcap::new(&x, 1e30, &x))?;
            ops::all_reduce(enc, &AllReduce::new(&x, &x))
        };
        let graph = Encoder::capture(&group, record).unwrap();
        let pass = || {
            let mut enc = group.encoder()?;
            record(&mut enc)?;
            enc.commit()?.wait()
        };
        for failing in &fates {
            for fate in [FAILS, PANICS] {
                for replays in [false, true] {
                    failing.store(fate, SeqCst);
                    let error = if replays { graph.replay().map(drop).unwrap_err() } else { pass().unwrap_err() };
                    let text = error.to_string();
                    let expected = if fate == FAILS { "was lost" } else { "panicked: on purpose" };
                    assert!(matches!(error, Error::DeviceFault { .. }) && text.contains(expected), "{text}");
                    failing.store(0, SeqCst);
                    x.write(&[1f32; 100]).unwrap();
                    pass().unwrap();
                    let want = (ranks * ranks) as f32;
                    for rank in 0..ranks {
                        let got = x.on_rank(rank).unwrap().to_vec::<f32>().unwrap();
                        assert!(got.iter().all(|got| (got - want).abs() < 1e-3), "{got:?}, not {want}");
                    }
                }
            }
        }
    }
}

/// The other ranks wait for a rank that is late.
#[test]
fn the_barrier_holds_until_all_are_there() {
    let (meeting, rounds) = (Meeting::new(3), AtomicUsize::new(0));
    meeting.start();
    std::thread::scope(|scope| {
        for rank in 0..3u64 {
            let (meeting, rounds) = (&meeting, &rounds);
            scope.spawn(move || {
                for round in 0..200 {
                    if round % 50 == 10 * rank {
                        std::thread::sleep(std::time::Duration::from_millis(2));
                    }
                    rounds.fetch_add(1, SeqCst);
                    meeting.wait_for_all().unwrap();
                    assert!(rounds.load(SeqCst) as u64 >= 3 * (round + 1));
                }
            });
        }
    });
    assert!(meeting.abort() && !meeting.abort());
    assert!(meeting.wait_for_all().is_err());
    // Nobody waits for a rank that has ended.
    meeting.start();
    meeting.leave();
    assert!(meeting.wait_for_all().is_err());
}
