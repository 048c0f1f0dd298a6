//! Any bytes as tokenizer.json: an error, or a tokenizer that takes text and gives it back.
#![no_main]

use kvant_models::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tokenizer) = Tokenizer::parse(bytes) else { return };
    let Ok(ids) = tokenizer.encode("fn main() { 42 } é 🦀", true) else { return };
    let _ = tokenizer.decode(&ids);
    let mut stream = tokenizer.stream();
    for &id in &ids {
        let _ = stream.push(id);
    }
    let _ = stream.finish();
});
