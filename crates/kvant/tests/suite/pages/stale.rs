//! Random histories of recorded operations whose sequences change before they run.

use std::collections::HashMap;

use crate::common::{devices, proptest_cases, run};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, Graph, KvPool, PoolSpec, Sequence, Step, StepSize, Submission,
    Tensor,
    ops::{self, KvRead, KvSide, KvWrite},
};
use proptest::prelude::*;

const DIM: usize = 64;
const PAGE: usize = 16;

/// Actions of a history. Indices choose among the existing objects.
#[derive(Clone, Debug)]
enum Action {
    Begin,
    Fork(u16),
    Truncate(u16, u16),
    End(u16),
    /// A new step, recorded in an encoder.
    Record {
        which: u16,
        tokens: usize,
    },
    /// Rewrites one of two reserved steps, for one or two sequences.
    Rewrite {
        reserved: u16,
        which: [u16; 2],
    },
    /// Records the reserved step, or only its first token, in an encoder or a graph.
    RecordReserved {
        reserved: u16,
        is_part: bool,
        is_graph: bool,
    },
    Run(u16),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        2 => Just(Action::Begin),
        1 => any::<u16>().prop_map(Action::Fork),
        2 => (any::<u16>(), any::<u16>()).prop_map(|(which, len)| Action::Truncate(which, len)),
        2 => any::<u16>().prop_map(Action::End),
        5 => (any::<u16>(), 1..20usize).prop_map(|(which, tokens)| Action::Record { which, tokens }),
        4 => (any::<u16>(), any::<[u16; 2]>()).prop_map(|(reserved, which)| Action::Rewrite { reserved, which }),
        4 => (any::<u16>(), any::<bool>(), any::<bool>())
            .prop_map(|(reserved, is_part, is_graph)| Action::RecordReserved { reserved, is_part, is_graph }),
        6 => any::<u16>().prop_map(Action::Run),
    ];
    prop::collection::vec(action, 1..40)
}

/// A sequence, and the known values of its positions.
struct Tracked {
    id: usize,
    sequence: Sequence,
    values: Vec<Option<f32>>,
}

/// The tokens of a step: sequence, its number of changes at that time, and position.
type Tokens = Vec<(usize, u64, usize)>;

enum Work {
    Commit(Encoder),
    Replay(Graph),
}

/// Recorded operations, and the value of each of their rows.
struct Recorded {
    work: Work,
    values: Vec<f32>,
    of: Of,
}

/// The tokens that recorded operations write.
enum Of {
    Own(Tokens),
    Reserved(usize),
    /// The first token of a reserved step after a number of rewrites, and the other tokens of that step.
    Part(usize, u64, Tokens),
}

struct History {
    pool: KvPool,
    tracked: Vec<Tracked>,
    /// The number of changes of each sequence; ended sequences are absent.
    changes: HashMap<usize, u64>,
    reserved: Vec<(Step, u64, Tokens)>,
    recorded: Vec<Recorded>,
    next_id: usize,
    next_value: f32,
}

fn pick<T>(list: &[T], at: u16) -> Option<usize> {
    (!list.is_empty()).then(|| usize::from(at) % list.len())
}

impl History {
    fn new(device: &Device) -> History {
        let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 24 * 2 * PAGE * DIM * 4).page_tokens(PAGE);
        let pool = KvPool::new(device, &spec).unwrap();
        let reserve = || (pool.reserve_step(StepSize::decode(2, 400)).unwrap(), 0, Vec::new());
        let reserved = vec![reserve(), reserve()];
        let (tracked, recorded, changes) = (Vec::new(), Vec::new(), HashMap::new());
        History { pool, tracked, changes, reserved, recorded, next_id: 0, next_value: 1.0 }
    }

    fn begin(&mut self, sequence: Sequence, values: Vec<Option<f32>>) {
        self.changes.insert(self.next_id, 0);
        self.tracked.push(Tracked { id: self.next_id, sequence, values });
        self.next_id += 1;
    }

    /// Takes positions for a batch, into a step. Does nothing without room.
    fn extend(&mut self, batch: &[(usize, usize)], into: Option<usize>) -> Option<(Step, Tokens)> {
        let mut all: Vec<Option<&mut Tracked>> = self.tracked.iter_mut().map(Some).collect();
        let mut tracked: Vec<(&mut Tracked, usize)> =
            batch.iter().map(|&(index, count)| (all[index].take().unwrap(), count)).collect();
        let mut sequences: Vec<_> =
            tracked.iter_mut().map(|(tracked, count)| (&mut tracked.sequence, *count)).collect();
        let step = match into {
            Some(reserved) => {
                let step = self.reserved[reserved].0.clone();
                self.pool.step_into(&mut sequences, &step).map(|()| step)
            }
            None => self.pool.step(&mut sequences),
        };
        let step = match step {
            Err(Error::OutOfPages { .. }) => return None,
            step => step.unwrap(),
        };
        let mut tokens = Vec::new();
        for (tracked, count) in tracked {
            let changes = self.changes.get_mut(&tracked.id).unwrap();
            *changes += 1;
            tokens.extend((tracked.values.len()..tracked.values.len() + count).map(|at| (tracked.id, *changes, at)));
            tracked.values.resize(tracked.values.len() + count, None);
        }
        Some((step, tokens))
    }

    fn record(&mut self, step: &Step, is_graph: bool, of: Of) {
        let device = self.pool.device().clone();
        let rows = step.tokens();
        let values: Vec<f32> = (0..rows).map(|row| self.next_value + row as f32).collect();
        self.next_value += rows as f32;
        let data: Vec<f32> = values.iter().flat_map(|&value| [value; DIM]).collect();
        let data = Tensor::from_slice(&device, &data, &[rows, 1, DIM]).unwrap();
        let layer = self.pool.layer(0).unwrap();
        let mut enc = device.encoder().unwrap();
        let work = if is_graph {
            let graph = Encoder::capture(&device, |enc| ops::kv_write(enc, &KvWrite::new(&data, &data, step, layer)));
            graph.map(Work::Replay)
        } else {
            ops::kv_write(&mut enc, &KvWrite::new(&data, &data, step, layer)).map(|()| Work::Commit(enc))
        };
        match work {
            Ok(work) => self.recorded.push(Recorded { work, values, of }),
            // Recording checks the step, too.
            Err(error) => assert!(!self.is_fresh(&of), "{error}"),
        }
    }

    fn tokens<'a>(&'a self, of: &'a Of) -> &'a Tokens {
        match of {
            Of::Own(tokens) | Of::Part(_, _, tokens) => tokens,
            Of::Reserved(reserved) => &self.reserved[*reserved].2,
        }
    }

    /// Whether the sequences are unchanged since the step was written.
    fn is_fresh(&self, of: &Of) -> bool {
        let is_rewritten = matches!(of, Of::Part(reserved, rewrites, _) if self.reserved[*reserved].1 != *rewrites);
        !is_rewritten && self.tokens(of).iter().all(|(id, changes, _)| self.changes.get(id) == Some(changes))
    }

    fn run(&mut self, index: usize) {
        let Recorded { work, values, of } = self.recorded.swap_remove(index);
        let is_fresh = self.is_fresh(&of);
        let (result, again) = match work {
            Work::Commit(enc) => (enc.commit(), None),
            Work::Replay(graph) => (graph.replay(), Some(graph)),
        };
        match result.map(Submission::wait) {
            Ok(done) => {
                done.unwrap();
                assert!(is_fresh, "operations ran whose sequences had changed");
                for ((id, _, position), &value) in self.tokens(&of).clone().into_iter().zip(&values) {
                    let tracked = self.tracked.iter_mut().find(|tracked| tracked.id == id).unwrap();
                    tracked.values[position] = Some(value);
                }
            }
            Err(Error::Value { arg: "step", .. }) => assert!(!is_fresh, "nothing had changed"),
            Err(error) => panic!("{error}"),
        }
        if let Some(graph) = again {
            self.recorded.push(Recorded { work: Work::Replay(graph), values, of });
        }
        self.compare();
    }

    /// Checks that every known position has its value.
    fn compare(&mut self) {
        let device = self.pool.device().clone();
        for tracked in self.tracked.iter_mut().filter(|tracked| !tracked.values.is_empty()) {
            let count = tracked.values.len();
            let step = self.pool.step(&mut [(&mut tracked.sequence, 0)]).unwrap();
            for side in [KvSide::K, KvSide::V] {
                let out = Tensor::zeros(&device, DType::F32, &[count, 1, DIM]).unwrap();
                let read = KvRead::new(self.pool.layer(0).unwrap(), side, &out).step(Some(&step));
                run(&device, |enc| ops::kv_read(enc, &read)).unwrap();
                for (position, (row, value)) in out.to_f32().unwrap().chunks(DIM).zip(&tracked.values).enumerate() {
                    let holds = value.is_none_or(|value| row.iter().all(|&x| x == value));
                    assert!(holds, "{device}: position {position} has {}, not {value:?}", row[0]);
                }
            }
        }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Begin => self.begin(self.pool.sequence(), Vec::new()),
            Action::Fork(which) => {
                let Some(at) = pick(&self.tracked, which) else { return };
                let (sequence, values) = (self.tracked[at].sequence.fork(), self.tracked[at].values.clone());
                self.begin(sequence, values);
            }
            Action::Truncate(which, len) => {
                let Some(at) = pick(&self.tracked, which) else { return };
                let tracked = &mut self.tracked[at];
                let len = usize::from(len) % (tracked.values.len() + 1);
                if len != tracked.values.len() {
                    *self.changes.get_mut(&tracked.id).unwrap() += 1;
                }
                tracked.sequence.truncate(len).unwrap();
                tracked.values.truncate(len);
            }
            Action::End(which) => {
                let Some(at) = pick(&self.tracked, which) else { return };
                let tracked = self.tracked.swap_remove(at);
                self.changes.remove(&tracked.id);
            }
            Action::Record { which, tokens } => {
                let Some(at) = pick(&self.tracked, which) else { return };
                let Some((step, tokens)) = self.extend(&[(at, tokens)], None) else { return };
                self.record(&step, false, Of::Own(tokens));
            }
            Action::Rewrite { reserved, which } => {
                let reserved = usize::from(reserved) % 2;
                let mut batch: Vec<_> = which.iter().filter_map(|&at| Some((pick(&self.tracked, at)?, 1))).collect();
                batch.sort_unstable();
                batch.dedup();
                let Some((_, tokens)) = self.extend(&batch, Some(reserved)) else { return };
                self.reserved[reserved].1 += 1;
                self.reserved[reserved].2 = tokens;
            }
            Action::RecordReserved { reserved, is_part, is_graph } => {
                let reserved = usize::from(reserved) % 2;
                let (step, rewrites, tokens) = self.reserved[reserved].clone();
                if !is_part {
                    return self.record(&step, is_graph, Of::Reserved(reserved));
                }
                if !tokens.is_empty() {
                    self.record(&step.select(&[0]).unwrap(), is_graph, Of::Part(reserved, rewrites, tokens));
                }
            }
            Action::Run(which) => {
                if let Some(at) = pick(&self.recorded, which) {
                    self.run(at);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: proptest_cases(64), ..ProptestConfig::default() })]

    /// Recorded operations run exactly if the sequences and steps that their step depends on are unchanged, and never
    /// write to a page of another sequence.
    #[test]
    fn recorded_operations_never_write_to_other_sequences(actions in actions(), seed in any::<u8>()) {
        for device in devices() {
            // msl-host is slow.
            if device.kind() == kvant::DeviceKind::Metal && seed % 5 != 0 {
                continue;
            }
            let mut history = History::new(device);
            actions.iter().for_each(|action| history.act(action));
            while !history.recorded.is_empty() {
                history.run(0);
                history.recorded.retain(|recorded| matches!(recorded.work, Work::Commit(_)));
            }
        }
    }
}
