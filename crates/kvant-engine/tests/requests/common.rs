//! The shipped model, and requests for it.

use std::{path::Path, sync::Arc};

use kvant::{Codec, CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, Finished, Responses};
use kvant_models::{CacheDivision, LoadOptions, Model, Tokenizer};

pub fn model() -> Model {
    model_on(CpuOptions::default())
}

fn model_on(options: CpuOptions) -> Model {
    Model::load(shipped(), &Device::cpu_with(CpuOptions { threads: Some(2), ..options }).unwrap()).unwrap()
}

pub fn shipped() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model"))
}

pub fn engine(options: EngineOptions) -> Engine {
    Engine::start(model(), Arc::new(Tokenizer::load(shipped()).unwrap()), options).unwrap()
}

/// Of a group of CPU devices, which share the heads and the matrices. Devices share KV heads, too.
pub fn group_engine(ranks: usize, options: EngineOptions) -> Engine {
    divided_engine(ranks, CacheDivision::Heads, options)
}

/// As above, with a division of the cache.
pub fn divided_engine(ranks: usize, cache_division: CacheDivision, options: EngineOptions) -> Engine {
    engine_on(CpuOptions::default(), ranks, cache_division, options)
}

/// As above, of batch-invariant devices: texts are equal to the bit, whatever runs beside them.
pub fn invariant_divided_engine(ranks: usize, cache_division: CacheDivision, options: EngineOptions) -> Engine {
    let cpu = CpuOptions { batch_invariant: true, ..CpuOptions::default() };
    engine_on(cpu, ranks, cache_division, options)
}

fn engine_on(cpu: CpuOptions, ranks: usize, cache_division: CacheDivision, options: EngineOptions) -> Engine {
    let rank = |_| Device::cpu_with(CpuOptions { threads: Some(1), ..cpu }).unwrap();
    let group = Device::group(&(0..ranks).map(rank).collect::<Vec<_>>()).unwrap();
    let load = LoadOptions { cache_division, ..LoadOptions::default() };
    let model = Model::load_with(shipped(), &group, &load).unwrap();
    Engine::start(model, Arc::new(Tokenizer::load(shipped()).unwrap()), options).unwrap()
}

/// An engine on a batch-invariant device.
pub fn batch_invariant_engine(options: EngineOptions) -> Engine {
    let model = model_on(CpuOptions { batch_invariant: true, ..CpuOptions::default() });
    Engine::start(model, Arc::new(Tokenizer::load(shipped()).unwrap()), options).unwrap()
}

/// Options with exact caches, so that batch composition changes results only by f32 rounding.
pub fn options() -> EngineOptions {
    EngineOptions::default().codecs(Codec::F32).context(256)
}

/// The ids, the text and the end of a request.
pub fn collect(responses: Responses) -> (Vec<u32>, String, Finished) {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for event in responses {
        match event {
            Event::Token(token) => {
                ids.push(token.id);
                text += &token.text;
            }
            Event::Finished(finished) => {
                text += &finished.text;
                return (ids, text, finished);
            }
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    panic!("no end");
}

pub fn request(engine: &Engine, prompt: &str) -> EngineRequest {
    EngineRequest::new(engine.tokenizer().encode_prompt(prompt).unwrap()).max_tokens(30)
}
