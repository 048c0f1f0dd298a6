//! Streaming text id by id, with decoders of tokenizers that have byte tokens (Gemma, Llama), and others.

use kvant_models::{TextStream, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The words of the vocabulary, which follow three special tokens and 256 bytes.
const WORDS: [&str; 16] =
    ["▁", "a", "b", "▁the", "é", "▁▁", "\n", "한", ".", "▁'", "s", "日本", "##ing", "▁,", "👨", "\u{200d}"];
const FIRST_BYTE: u32 = 3;
const FIRST_WORD: u32 = FIRST_BYTE + 256;
/// Each in the form that the decoder has.
const SPECIAL: [&str; 3] = ["<pad>", "<eos>", "<bos>"];

fn tokenizer(decoder: Value) -> Tokenizer {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = SPECIAL.iter().map(|s| s.to_string()).chain(bytes).chain(WORDS.iter().map(|s| s.to_string()));
    let vocab: serde_json::Map<String, Value> = words.zip(0..).map(|(word, id)| (word, json!(id))).collect();
    let special = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added: Vec<Value> = SPECIAL.iter().enumerate().map(special).collect();
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "vocab": vocab, "merges": []});
    let json = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder, "model": model});
    Tokenizer::parse(json.to_string().as_bytes()).unwrap()
}

fn gemma() -> Tokenizer {
    tokenizer(json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]}))
}

/// Removes a space from the start of the text.
fn llama() -> Tokenizer {
    tokenizer(json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}))
}

fn all() -> [(&'static str, Tokenizer); 4] {
    let wordpiece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    [("gemma", gemma()), ("llama", llama()), ("wordpiece", tokenizer(wordpiece)), ("metaspace", tokenizer(metaspace))]
}

fn bytes(text: &str) -> impl Iterator<Item = u32> {
    text.bytes().map(|byte| FIRST_BYTE + u32::from(byte))
}

fn word(word: &str) -> u32 {
    FIRST_WORD + WORDS.iter().position(|&w| w == word).unwrap() as u32
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    rest_of(tokenizer.stream(), ids)
}

fn rest_of(mut stream: TextStream<&Tokenizer>, ids: &[u32]) -> String {
    let pieces: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces + &stream.finish().unwrap()
}

/// The text of a prompt without an incomplete character at its end, and the text that follows.
fn prompt_and_rest(tokenizer: &Tokenizer, special: bool, prompt: &[u32], rest: &[u32]) -> [String; 2] {
    let mut stream = tokenizer.stream().special(special);
    let text = prompt.iter().map(|&id| stream.push(id).unwrap()).collect();
    [text, rest_of(tokenizer.stream().special(special).after(prompt).unwrap(), rest)]
}

#[test]
fn a_word_after_a_prompt_keeps_its_space() {
    let the = word("▁the");
    for (name, tokenizer) in all() {
        let first = if name == "gemma" { " the" } else { "the" };
        let first = if name == "wordpiece" { "▁the" } else { first };
        let next = if name == "wordpiece" { " ▁the" } else { " the" };
        assert_eq!(prompt_and_rest(&tokenizer, false, &[the], &[the]), [first, next], "{name}");
        // The start of a text is not a continuation: this is the first word.
        assert_eq!(prompt_and_rest(&tokenizer, false, &[2], &[the]), ["", first], "{name}");
        assert_eq!(prompt_and_rest(&tokenizer, false, &[], &[the, the]), ["", &format!("{first}{next}")], "{name}");
        // In a text with the names of special tokens, it is the second.
        assert_eq!(prompt_and_rest(&tokenizer, true, &[2], &[the]), ["<bos>", next], "{name}");
    }
}

#[test]
fn a_character_that_begins_in_the_prompt_is_in_the_text() {
    let ids: Vec<u32> = [word("a")].into_iter().chain(bytes("😀")).chain([word("▁the")]).collect();
    for tokenizer in [gemma(), llama()] {
        for prompt in 1..5 {
            let (prompt, rest) = ids.split_at(prompt);
            assert_eq!(prompt_and_rest(&tokenizer, false, prompt, rest), ["a", "😀 the"]);
        }
        // The remaining bytes never arrive.
        assert_eq!(prompt_and_rest(&tokenizer, false, &ids[..3], &[word("b")]), ["a", "\u{fffd}\u{fffd}b"]);
    }
}

#[test]
fn only_the_end_of_a_long_prompt_is_decoded() {
    for count in [63, 64, 65, 1000] {
        for (name, tokenizer) in all() {
            let mut prompt = vec![2; count];
            let [_, first] = prompt_and_rest(&tokenizer, false, &prompt, &[word("▁the")]);
            assert_eq!(first, tokenizer.decode(&[word("▁the")]).unwrap(), "{name}");
            prompt.extend(vec![word("a"); count]);
            prompt.extend(bytes("é").take(1));
            let rest: Vec<u32> = bytes("é").skip(1).chain([word("▁the")]).collect();
            if name != "wordpiece" && name != "metaspace" {
                assert_eq!(prompt_and_rest(&tokenizer, false, &prompt, &rest)[1], "é the", "{name}");
            }
        }
    }
}

#[test]
fn bytes_of_single_tokens() {
    for (name, tokenizer) in all() {
        let text = |token: u32| String::from_utf8(tokenizer.token_bytes(token).unwrap()).unwrap();
        // This decoder puts a space before every token.
        let bos = if name == "wordpiece" { " <bos>" } else { "<bos>" };
        assert_eq!([text(2), text(5000)], [bos, ""], "{name}");
        let space = if name == "wordpiece" { " ▁the" } else { " the" };
        assert_eq!(text(word("▁the")), space, "{name}");
        if let "gemma" | "llama" = name {
            assert_eq!(tokenizer.token_bytes(FIRST_BYTE + 0xF0).unwrap(), [0xF0], "{name}");
            assert_eq!([text(word("▁▁")), text(word("日本"))], ["  ", "日本"], "{name}");
        }
    }
}

/// A script that the vocabulary lacks: a run of byte tokens as long as the text.
#[test]
fn long_runs_of_bytes_are_text() {
    for text in ["ꀀ".repeat(60), "ꀀꀁ".repeat(11), "😀".repeat(60), "ߐ".repeat(60), format!("a{}", "ꀀ".repeat(30))]
    {
        for (name, tokenizer) in [("gemma", gemma()), ("llama", llama())] {
            let ids: Vec<u32> = bytes(&text).collect();
            let mut stream = tokenizer.stream();
            let mut out = String::new();
            for (at, &id) in ids.iter().enumerate() {
                out += &stream.push(id).unwrap();
                // A character is returned with its last byte.
                let whole = String::from_utf8_lossy(&text.as_bytes()[..=at]);
                assert_eq!(out, whole.trim_end_matches('\u{fffd}'), "{name}");
            }
            assert_eq!(out + &stream.finish().unwrap(), text, "{name}");
        }
    }
}

/// In `decode`, incomplete bytes also destroy the characters before them.
#[test]
fn text_after_invalid_bytes_is_kept() {
    let broken = &"😀".as_bytes()[..2];
    let mut ids = vec![word("a")];
    ids.extend(bytes("😀"));
    ids.extend(broken.iter().map(|&byte| FIRST_BYTE + u32::from(byte)));
    ids.extend([word("▁the"); 100]);
    let text = streamed(&gemma(), &ids);
    assert_eq!(text, format!("a😀\u{fffd}\u{fffd}{}", " the".repeat(100)));
    // Incomplete bytes at the end.
    assert_eq!(streamed(&gemma(), &ids[..7]), "a😀\u{fffd}\u{fffd}");
}

/// Any number of tokens without text, with a decoder that treats the start of a text specially.
#[test]
fn ids_without_text_change_nothing() {
    let mut ids = vec![word("▁the"); 3];
    for silent in [1, 63, 64, 65, 1000] {
        ids.extend(vec![0; silent]);
        ids.extend([word("▁the"), word("s")]);
        for (name, tokenizer) in all() {
            assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap(), "{name}, {silent}");
        }
    }
}

/// Ids of a valid text: words, special tokens, and characters in bytes.
fn valid() -> impl Strategy<Value = Vec<u32>> {
    let special = (0u32..3).prop_map(|id| vec![id]);
    let word = (0..WORDS.len() as u32).prop_map(|i| vec![FIRST_WORD + i]);
    let spelled =
        prop::sample::select(vec!["ꀀ", "😀", "ߐ", "x", " ", "한", "ꀁ", "ꀂ"]).prop_map(|c| bytes(c).collect());
    prop::collection::vec(prop_oneof![1 => special, 4 => word, 12 => spelled], 0..150).prop_map(|ids| ids.concat())
}

/// Words and bytes that are rarely valid together.
fn any() -> impl Strategy<Value = Vec<u32>> {
    let word = (0..WORDS.len() as u32).prop_map(|i| FIRST_WORD + i);
    let lead = (0xE2u32..0xE5).prop_map(|byte| FIRST_BYTE + byte);
    let rest = (0x80u32..0xC0).prop_map(|byte| FIRST_BYTE + byte);
    prop::collection::vec(prop_oneof![word, lead, rest], 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn valid_text_is_the_decoded_text(ids in valid()) {
        for (name, tokenizer) in all() {
            prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids).unwrap(), "{}", name);
        }
    }

    /// For every end of the prompt.
    #[test]
    fn prompt_and_rest_are_the_text(ids in valid(), end in prop::arbitrary::any::<prop::sample::Index>(), special in prop::bool::ANY) {
        let (prompt, rest) = ids.split_at(end.index(ids.len() + 1));
        for (name, tokenizer) in all() {
            let whole = if special { tokenizer.decode_with_special(&ids) } else { tokenizer.decode(&ids) };
            prop_assert_eq!(prompt_and_rest(&tokenizer, special, prompt, rest).concat(), whole.unwrap(), "{}", name);
        }
    }

    /// All characters that belong to words are returned, in order.
    #[test]
    fn invalid_bytes_remove_no_other_text(ids in any()) {
        // The bytes cannot form these characters.
        let own = |text: String| text.chars().filter(|c| c.is_ascii() || *c == 'é' || *c == '👨').collect::<String>();
        for (name, tokenizer) in all() {
            prop_assert_eq!(own(streamed(&tokenizer, &ids)), own(tokenizer.decode(&ids).unwrap()), "{}", name);
        }
    }
}
