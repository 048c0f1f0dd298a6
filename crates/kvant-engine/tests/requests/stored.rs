//! Prefixes on disk: found by later engines, with equal texts.

use std::{fs, path::PathBuf, time::Duration};

use kvant::Codec;
use kvant_engine::{EngineOptions, EngineRequest, Event, PageFiles, internals};

use crate::common::{batch_invariant_engine, collect};

/// A new directory, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("kvant-stored-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(path)
    }

    fn pages(&self) -> Vec<PathBuf> {
        let paths = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let mut pages: Vec<PathBuf> =
            paths.filter(|path| path.extension().is_some_and(|kind| kind == "page")).collect();
        pages.sort();
        pages
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn prompt(first: u32) -> Vec<u32> {
    (0..150).map(|at| 10 + (first * 31 + at * 7) % 900).collect()
}

/// Runs prompts on an engine with a directory, and ends it. Returns the ids of each text and the tokens found.
fn run(scratch: &Scratch, options: EngineOptions, prompts: &[Vec<u32>]) -> Vec<(Vec<u32>, usize)> {
    let files = PageFiles::open(&scratch.0, 1 << 30).unwrap();
    let engine = batch_invariant_engine(options.page_files(files.clone()));
    let texts = prompts.iter().map(|prompt| {
        let responses = engine.submit(EngineRequest::new(prompt.clone()).max_tokens(12)).unwrap();
        let (ids, _, finished) = collect(responses);
        (ids, finished.usage.cached_tokens)
    });
    let texts = texts.collect();
    drop(engine);
    assert!(files.close(Duration::from_secs(60)), "the engine stores its prefixes and ends");
    texts
}

fn options(codec: Codec) -> EngineOptions {
    EngineOptions::default().codecs(codec).context(256).sequences(2).page_tokens(16).model_identity(b"shipped".to_vec())
}

#[test]
fn a_later_engine_finds_prefixes() {
    for codec in [Codec::F16, Codec::tq(4), Codec::tq_centred(4)] {
        let scratch = Scratch::new(&format!("later-{codec}"));
        let prompts: Vec<Vec<u32>> = (0..4).map(prompt).collect();
        let cold = run(&scratch, options(codec), &prompts);
        assert!(cold.iter().all(|(ids, cached)| ids.len() == 12 && *cached == 0));
        let warm = run(&scratch, options(codec), &prompts);
        for ((before, _), (after, cached)) in cold.iter().zip(&warm) {
            assert_eq!((after, *cached), (before, 144), "{codec}");
        }
        // Other weights, codecs or page sizes: nothing is found, and nothing is lost.
        let pages = scratch.pages().len();
        for other in [
            options(codec).model_identity(b"another".to_vec()),
            options(Codec::tq(5)),
            options(codec).page_tokens(32),
            options(codec).prefix_cache(false),
        ] {
            assert_eq!(run(&scratch, other, &prompts[..1])[0].1, 0, "{codec}");
        }
        assert!(scratch.pages().len() > pages);
        assert_eq!(run(&scratch, options(codec), &prompts[..1]), warm[..1], "{codec}");
    }
}

/// Damaged files cost time, never another text.
#[test]
fn damaged_files_do_not_change_texts() {
    let scratch = Scratch::new("damage");
    let prompts: Vec<Vec<u32>> = (0..3).map(prompt).collect();
    let cold = run(&scratch, options(Codec::F16), &prompts);
    for round in 0..6usize {
        for (index, path) in scratch.pages().into_iter().enumerate() {
            let mut bytes = fs::read(&path).unwrap();
            match (index * 7 + round * 3) % 11 {
                0 => bytes.truncate(bytes.len() * (round + 1) / 8),
                1 => {
                    let at = bytes.len() * (round + 1) / 8;
                    bytes[at] ^= 1 << round;
                }
                2 => bytes = vec![0; bytes.len()],
                _ => continue,
            }
            fs::write(&path, bytes).unwrap();
        }
        let texts = run(&scratch, options(Codec::F16), &prompts);
        for ((before, _), (after, cached)) in cold.iter().zip(&texts) {
            assert_eq!(after, before, "round {round}");
            assert!(*cached <= 144 && cached % 16 == 0);
        }
        assert!(texts.iter().any(|(_, cached)| *cached < 144), "round {round}: something was damaged");
    }
}

/// Two engines of one process share a directory.
#[test]
fn engines_share_a_directory() {
    let scratch = Scratch::new("shared");
    let files = PageFiles::open(&scratch.0, 1 << 30).unwrap();
    let ids = |engine: &kvant_engine::Engine| {
        let responses = engine.submit(EngineRequest::new(prompt(0)).max_tokens(12)).unwrap();
        let (ids, _, finished) = collect(responses);
        (ids, finished.usage.cached_tokens)
    };
    let options = options(Codec::F16).page_files(files.clone());
    let [first, second] = [0, 1].map(|_| batch_invariant_engine(options.clone()));
    let (want, _) = ids(&first);
    // The first engine stores its pages once it is idle, in order.
    while files.bytes() == 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (got, cached) = ids(&second);
    assert_eq!(got, want);
    assert!(cached > 0);
}

/// While the pages of a request's prefix are read, other requests go on.
#[test]
fn steps_do_not_wait_for_files() {
    let scratch = Scratch::new("background");
    let cold = run(&scratch, options(Codec::F16), &[prompt(0)]);
    let files = PageFiles::open(&scratch.0, 1 << 30).unwrap();
    // Nine pages.
    internals::delay_reads(&files, Duration::from_millis(100));
    let engine = batch_invariant_engine(options(Codec::F16).page_files(files.clone()));
    let other = engine.submit(EngineRequest::new(vec![5; 20]).max_tokens(60)).unwrap();
    let stored = engine.submit(EngineRequest::new(prompt(0)).max_tokens(12)).unwrap();
    let counted = std::thread::spawn(move || other.take_while(|event| !matches!(event, Event::Finished(_))).count());
    let (ids, _, finished) = collect(stored);
    assert_eq!((ids, finished.usage.cached_tokens), (cold[0].0.clone(), 144));
    assert!(finished.usage.generated_tokens == 12 && engine.stats().finished_length == 2, "{:?}", engine.stats());
    assert_eq!(counted.join().unwrap(), 60);
}
