//! A small tokenizer, shared with the server's tests.

use kvant_models::Tokenizer;
use serde_json::{Value, json};

/// A SentencePiece tokenizer for the shipped model's ids. Words begin with ▁, which the first word of a text loses. All
/// bytes are tokens, with ids that the model finds probable. `▁Hello` is 3, `▁world` 4, byte 0 is 259.
pub fn words() -> Tokenizer {
    words_with(&[], &[])
}

/// [`words`] in which the ids from 5 on are special tokens `marks`, followed by tokens of `texts`.
pub fn words_with(marks: &[&str], texts: &[&str]) -> Tokenizer {
    let mut vocabulary: Vec<String> = ["<pad>", "<eos>", "<bos>", "▁Hello", "▁world"].map(str::to_string).to_vec();
    vocabulary.extend(marks.iter().chain(texts).map(|text| text.replace(' ', "▁")));
    vocabulary.extend((vocabulary.len()..259).map(|id| format!("▁w{id}")));
    vocabulary.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    vocabulary.extend((vocabulary.len()..4096).map(|id| format!("▁w{id}")));
    let special = |id: usize| {
        json!({"id": id, "content": vocabulary[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added: Vec<Value> = (0..3).chain(5..5 + marks.len()).map(special).collect();
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
