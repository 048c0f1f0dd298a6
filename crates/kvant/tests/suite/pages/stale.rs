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

/// Indices choose among what is there.
#[derive(Clone, Debug)]
enum Action {
    Begin,
    Fork(u16),
    Truncate(u16, u16),
    End(u16),
    /// A step of its own, in an encoder.
    Record {
        which: u16,
        tokens: usize,
    },
    /// One of two reserved steps is rewritten, for one or two sequences.
    Rewrite {
        reserved: u16,
        which: [u16; 2],
    },
    /// Records the reserved step, or its first token alone, in an encoder or a graph.
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

/// A sequence, and the value of each position that is known.
struct Told {
    id: usize,
    sequence: Sequence,
    values: Vec<Option<f32>>,
}

/// The tokens of a step: sequence, how often it had changed, and position.
type Tokens = Vec<(usize, u64, usize)>;

enum Work {
    Commit(Encoder),
    Replay(Graph),
}

/// Operations that have been recorded, and the value of each of their rows.
struct Recorded {
    work: Work,
    values: Vec<f32>,
    of: Of,
}

/// Which tokens recorded operations write.
enum Of {
    Own(Tokens),
    Reserved(usize),
    /// The first token of a reserved step that had been rewritten so often, and the other tokens of that step.
    Part(usize, u64, Tokens),
}

struct History {
    pool: KvPool,
    told: Vec<Told>,
    /// How often each sequence has changed; those that have ended are not here.
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
        let (told, recorded, changes) = (Vec::new(), Vec::new(), HashMap::new());
        History { pool, told, changes, reserved, recorded, next_id: 0, next_value: 1.0 }
    }

    fn begin(&mut self, sequence: Sequence, values: Vec<Option<f32>>) {
        self.changes.insert(self.next_id, 0);
        self.told.push(Told { id: self.next_id, sequence, values });
        self.next_id += 1;
    }

    /// Takes positions for a batch, into a step. Without room nothing happens.
    fn extend(&mut self, batch: &[(usize, usize)], into: Option<usize>) -> Option<(Step, Tokens)> {
        let mut all: Vec<Option<&mut Told>> = self.told.iter_mut().map(Some).collect();
        let mut told: Vec<(&mut Told, usize)> =
            batch.iter().map(|&(index, count)| (all[index].take().unwrap(), count)).collect();
        let mut sequences: Vec<_> = told.iter_mut().map(|(told, count)| (&mut told.sequence, *count)).collect();
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
        for (told, count) in told {
            let changes = self.changes.get_mut(&told.id).unwrap();
            *changes += 1;
            tokens.extend((told.values.len()..told.values.len() + count).map(|at| (told.id, *changes, at)));
            told.values.resize(told.values.len() + count, None);
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
            // Recording checks, too.
            Err(error) => assert!(!self.is_fresh(&of), "{error}"),
        }
    }

    fn tokens<'a>(&'a self, of: &'a Of) -> &'a Tokens {
        match of {
            Of::Own(tokens) | Of::Part(_, _, tokens) => tokens,
            Of::Reserved(reserved) => &self.reserved[*reserved].2,
        }
    }

    /// Whether the sequences are as they were when the step was written.
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
                    let told = self.told.iter_mut().find(|told| told.id == id).unwrap();
                    told.values[position] = Some(value);
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

    /// Every known position has its value.
    fn compare(&mut self) {
        let device = self.pool.device().clone();
        for told in self.told.iter_mut().filter(|told| !told.values.is_empty()) {
            let count = told.values.len();
            let step = self.pool.step(&mut [(&mut told.sequence, 0)]).unwrap();
            for side in [KvSide::K, KvSide::V] {
                let out = Tensor::zeros(&device, DType::F32, &[count, 1, DIM]).unwrap();
                let read = KvRead::new(self.pool.layer(0).unwrap(), side, &out).step(Some(&step));
                run(&device, |enc| ops::kv_read(enc, &read)).unwrap();
                for (position, (row, value)) in out.to_f32().unwrap().chunks(DIM).zip(&told.values).enumerate() {
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
                let Some(at) = pick(&self.told, which) else { return };
                let (sequence, values) = (self.told[at].sequence.fork(), self.told[at].values.clone());
                self.begin(sequence, values);
            }
            Action::Truncate(which, len) => {
                let Some(at) = pick(&self.told, which) else { return };
                let told = &mut self.told[at];
                let len = usize::from(len) % (told.values.len() + 1);
                if len != told.values.len() {
                    *self.changes.get_mut(&told.id).unwrap() += 1;
                }
                told.sequence.truncate(len).unwrap();
                told.values.truncate(len);
            }
            Action::End(which) => {
                let Some(at) = pick(&self.told, which) else { return };
                let told = self.told.swap_remove(at);
                self.changes.remove(&told.id);
            }
            Action::Record { which, tokens } => {
                let Some(at) = pick(&self.told, which) else { return };
                let Some((step, tokens)) = self.extend(&[(at, tokens)], None) else { return };
                self.record(&step, false, Of::Own(tokens));
            }
            Action::Rewrite { reserved, which } => {
                let reserved = usize::from(reserved) % 2;
                let mut batch: Vec<_> = which.iter().filter_map(|&at| Some((pick(&self.told, at)?, 1))).collect();
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

    /// Recorded operations run exactly if nothing has changed that their step was made for, and never write to a page
    /// of another sequence.
    #[test]
    fn recorded_operations_never_write_to_other_sequences(actions in actions(), seed in any::<u8>()) {
        for device in devices() {
            // msl-host is no fast machine.
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
