//! The model that ships, and requests for it.

use std::{path::Path, sync::Arc};

use kvant::{Codec, CpuOptions, Device};
use kvant_engine::{Engine, EngineOptions, EngineRequest, Event, Finished, Responses};
use kvant_models::{Model, Tokenizer};
use serde_json::{Value, json};

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

/// Of a batch-invariant device.
pub fn batch_invariant_engine(options: EngineOptions) -> Engine {
    let model = model_on(CpuOptions { batch_invariant: true, ..CpuOptions::default() });
    Engine::start(model, Arc::new(Tokenizer::load(shipped()).unwrap()), options).unwrap()
}

/// Exact caches, so that the shape of a batch changes results by rounding in f32 only.
pub fn options() -> EngineOptions {
    EngineOptions::default().codecs(Codec::F32).context(256)
}

/// Ids, text and end of a request.
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

/// A tokenizer of SentencePiece's kind for the shipped model's ids: words begin with ▁, which the first word of a text
/// loses, and all bytes are tokens.
pub fn words() -> Tokenizer {
    let mut vocabulary: Vec<String> = ["<pad>", "<eos>", "<bos>"].map(str::to_string).to_vec();
    vocabulary.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    vocabulary.extend(["▁Hello", "▁world"].map(str::to_string));
    vocabulary.extend((vocabulary.len()..4096).map(|id| format!("▁w{id}")));
    let special = |id: usize| {
        json!({"id": id, "content": vocabulary[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added: Vec<Value> = (0..3).map(special).collect();
    let vocabulary: serde_json::Map<String, Value> =
        vocabulary.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let space = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let decoders = json!([space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]);
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": null, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    });
    Tokenizer::parse(json.to_string().as_bytes()).unwrap()
}
