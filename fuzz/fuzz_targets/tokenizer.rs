//! Arbitrary bytes as tokenizer.json: an error, or a tokenizer that encodes text and decodes the ids.
#![cfg_attr(fuzzing, no_main)]

use std::sync::Once;

use kvant_models::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // kvant-models converts panics of the tokenizers crate to errors. All other panics are failures.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let abort = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let file = info.location().map_or("", |at| at.file());
            if !["tokenizers-", "spm_precompiled-"].iter().any(|name| file.contains(name)) {
                abort(info);
            }
        }));
    });
    let Ok(tokenizer) = Tokenizer::parse(bytes) else { return };
    let Ok(ids) = tokenizer.encode("fn main() { 42 } é 🦀", true) else { return };
    let _ = tokenizer.decode(&ids);
    let mut stream = tokenizer.stream();
    for &id in &ids {
        let _ = stream.push(id);
    }
    let _ = stream.finish();
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
