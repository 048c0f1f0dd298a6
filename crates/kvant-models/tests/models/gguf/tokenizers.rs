//! Tokenizers from metadata: special ids, spaces, bytes, and inconsistent metadata.

use kvant_models::{Error, Result, Tokenizer, gguf::Gguf};

use crate::common::gguf::{Value, Writer, array, f32, flag, text, texts, u32};

fn i32(value: i32) -> Value {
    Value(5, value.to_le_bytes().to_vec())
}

/// Tokens, each with a kind and a score.
fn vocabulary(model: &str, tokens: &[(&str, i32, f32)]) -> Writer {
    Writer::default()
        .pair("tokenizer.ggml.model", text(model))
        .pair("tokenizer.ggml.tokens", texts(tokens.iter().map(|token| token.0)))
        .pair("tokenizer.ggml.token_type", array(&tokens.iter().map(|token| i32(token.1)).collect::<Vec<_>>()))
        .pair("tokenizer.ggml.scores", array(&tokens.iter().map(|token| f32(token.2)).collect::<Vec<_>>()))
}

fn open(writer: &Writer) -> Gguf {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    Gguf::open(&path).unwrap()
}

fn tokenizer(writer: &Writer) -> Result<Tokenizer> {
    Tokenizer::from_gguf(open(writer).metadata())
}

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER: i32 = 4;

fn sentence_piece() -> Writer {
    let mut tokens = vec![("<unk>", 2, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)];
    let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    tokens.extend(bytes.iter().map(|byte| (byte.as_str(), 6, 0.0)));
    tokens.extend([
        ("▁", NORMAL, -10.0),
        ("a", NORMAL, -11.0),
        ("b", NORMAL, -12.0),
        ("ab", NORMAL, -2.0),
        ("▁a", NORMAL, -1.0),
        ("▁ab", NORMAL, -3.0),
        ("<tool>", USER, 0.0),
        ("<end_of_turn>", CONTROL, 0.0),
    ]);
    let writer = vocabulary("llama", &tokens);
    writer
        .pair("tokenizer.ggml.bos_token_id", u32(1))
        .pair("tokenizer.ggml.eos_token_id", u32(2))
        .pair("tokenizer.ggml.unknown_token_id", u32(0))
}

/// Ids in [`sentence_piece`].
const SPACE: u32 = 259;
const B: u32 = SPACE + 2;
const AB: u32 = SPACE + 3;
const SPACE_A: u32 = SPACE + 4;
const SPACE_AB: u32 = SPACE + 5;
const TOOL: u32 = SPACE + 6;
const TURN: u32 = SPACE + 7;

#[test]
fn merges_are_rebuilt_from_scores() {
    let tokenizer = tokenizer(&sentence_piece()).unwrap();
    // "▁a" has the best score, then "ab", then "▁ab" of "▁a" and "b".
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [SPACE_AB]);
    assert_eq!(tokenizer.encode("ab ab", true).unwrap(), [1, SPACE_AB, SPACE_AB]);
    assert_eq!(tokenizer.encode("bab", false).unwrap(), [SPACE, B, AB]);
    assert_eq!(tokenizer.encode("aab", false).unwrap(), [SPACE_A, AB]);
    // Each part between tokens that are matched first starts with a space.
    assert_eq!(tokenizer.encode("a<tool>ab", false).unwrap(), [SPACE_A, TOOL, SPACE_AB]);
    // Bytes of a character without a token.
    let euro: Vec<u32> = [0xe2, 0x82, 0xac].map(|byte| byte + 3).to_vec();
    assert_eq!(tokenizer.encode("€", false).unwrap(), [&[SPACE][..], &euro].concat());
    for text in ["ab", "b€ab  a", " a ", "a<tool> ab"] {
        let ids = tokenizer.encode(text, false).unwrap();
        let expected = text.replace("<tool> ", "<tool>  ");
        assert_eq!(tokenizer.decode(&ids).unwrap(), expected, "{text:?}");
    }
    assert_eq!(tokenizer.decode(&[1, SPACE_A, TURN, 2]).unwrap(), "a");
    assert_eq!((tokenizer.bos(), tokenizer.eos_token(), tokenizer.eos()), (Some(1), Some(2), &[2, TURN][..]));
    assert_eq!(tokenizer.vocab_size(), 267);
}

#[test]
fn spaces_and_bos_are_the_files_choice() {
    let writer = sentence_piece()
        .pair("tokenizer.ggml.add_space_prefix", flag(false))
        .pair("tokenizer.ggml.add_bos_token", flag(false))
        .pair("tokenizer.ggml.eot_token_id", u32(TURN))
        .pair("tokenizer.ggml.eom_token_id", u32(9999));
    let tokenizer = tokenizer(&writer).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [AB]);
    assert_eq!(tokenizer.encode_prompt("ab").unwrap(), [AB]);
    assert!(!tokenizer.adds_bos() && tokenizer.bos() == Some(1));
    assert_eq!(tokenizer.decode(&[SPACE_A, B]).unwrap(), " ab");
    assert_eq!(tokenizer.eos(), [2, TURN]);
}

/// In OpenAI's harmony format, <|end|> ends a message, and <|return|> or <|call|> the answer.
#[test]
fn the_end_of_a_harmony_message_is_not_the_end() {
    let tokens =
        [("a", NORMAL, 0.0), ("<|end|>", CONTROL, 0.0), ("<|return|>", CONTROL, 0.0), ("<|call|>", CONTROL, 0.0)];
    let with_merges = |tokens: &[(&str, i32, f32)]| {
        vocabulary("gpt2", tokens)
            .pair("tokenizer.ggml.pre", text("gpt-4o"))
            .pair("tokenizer.ggml.merges", texts(["a a"]))
    };
    assert_eq!(tokenizer(&with_merges(&tokens)).unwrap().eos(), [2, 3]);
    // Phi 3 ends a turn with this token.
    assert_eq!(tokenizer(&with_merges(&tokens[..2])).unwrap().eos(), [1]);
}

/// As in llama.cpp: exporters give end-of-turn tokens any kind.
#[test]
fn ends_of_any_kind_end_and_are_no_text() {
    for kind in [NORMAL, USER, CONTROL, 5] {
        let tokens = [("a", NORMAL, 0.0), ("<|im_end|>", kind, 0.0), ("stop", kind, 0.0), ("pause", kind, 0.0)];
        let writer = || {
            vocabulary("gpt2", &tokens)
                .pair("tokenizer.ggml.pre", text("qwen2"))
                .pair("tokenizer.ggml.merges", texts(["a a"]))
        };
        let named = |key: &str| tokenizer(&writer().pair(&format!("tokenizer.ggml.{key}_token_id"), u32(2))).unwrap();
        assert_eq!(tokenizer(&writer()).unwrap().eos(), [1]);
        for key in ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"] {
            let tokenizer = named(key);
            assert_eq!(tokenizer.eos(), [1, 2], "{key}");
            // An end of turn in a template is one token, and an answer does not show it.
            assert_eq!(tokenizer.encode("a<|im_end|>astop", false).unwrap(), [0, 1, 0, 2], "{key} {kind}");
            assert_eq!(tokenizer.decode(&[0, 1, 2, 0]).unwrap(), "aa", "{key} {kind}");
        }
    }
    // A file without kinds.
    let mut writer = sentence_piece();
    writer.pairs.retain(|(key, _)| key != "tokenizer.ggml.token_type");
    let tokenizer = tokenizer(&writer).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.decode(&[SPACE_A, TURN]).unwrap().as_str()), (&[2, TURN][..], "a"));
}

#[test]
fn metadata_that_do_not_fit_are_named() {
    let tokens = [("a", NORMAL, 0.0), ("b", NORMAL, 0.0)];
    let gpt2 = || vocabulary("gpt2", &tokens);
    let bare = |model: &str| Writer::default().pair("tokenizer.ggml.model", text(model));
    let cases = [
        (Writer::default(), "metadata: `tokenizer.ggml.model` must be a string, got nothing"),
        (bare("gpt2"), "metadata: `tokenizer.ggml.tokens` must be an array of strings, got nothing"),
        (vocabulary("bert", &tokens), "tokenizer.ggml.model \"bert\" is not supported"),
        (gpt2(), "metadata: `tokenizer.ggml.merges` must be an array of strings, got nothing"),
        (gpt2().pair("tokenizer.ggml.merges", texts(["ab"])), "must be pairs of tokens"),
        (gpt2().pair("tokenizer.ggml.pre", text("new")), "tokenizer.ggml.pre \"new\" is not supported"),
        (vocabulary("gpt2", &[("a", 1, 0.0), ("a", 1, 0.0)]), "must be an array without duplicates, got \"a\" twice"),
        (bare("llama").pair("tokenizer.ggml.tokens", texts(["a"])), "`tokenizer.ggml.scores` must be"),
        (
            bare("llama")
                .pair("tokenizer.ggml.tokens", texts(["a"]))
                .pair("tokenizer.ggml.scores", array(&[f32(f32::NAN)])),
            "an array of finite numbers, got NaN",
        ),
        (
            bare("gpt2")
                .pair("tokenizer.ggml.tokens", texts(["a"]))
                .pair("tokenizer.ggml.token_type", array(&[i32(1), i32(1)])),
            "`tokenizer.ggml.token_type` must be an array of 1 numbers, one per token, got 2",
        ),
        (sentence_piece().pair("tokenizer.ggml.eot_token_id", text("x")), "`tokenizer.ggml.eot_token_id` must be"),
    ];
    for (writer, expected) in cases {
        let error = tokenizer(&writer).unwrap_err();
        assert!(matches!(error, Error::Metadata { .. } | Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "expected {expected:?}, got {error}");
    }
    // A merge of unknown tokens has no effect.
    let writer = gpt2().pair("tokenizer.ggml.merges", texts(["a c", "a b"])).pair("tokenizer.ggml.pre", text("gpt-2"));
    assert_eq!(tokenizer(&writer).unwrap().encode("ab", true).unwrap(), [0, 1]);
}

#[test]
fn templates_and_sampling_parameters() {
    let writer = Writer::default()
        .pair("tokenizer.chat_template", text("{{ a }}"))
        .pair("tokenizer.chat_template.tool_use", text("{{ b }}"))
        .pair("general.sampling.temp", f32(0.6))
        .pair("general.sampling.top_k", i32(20))
        .pair("general.sampling.top_p", f32(0.95))
        .pair("tokenizer.ggml.suppress_tokens", array(&[i32(5), i32(7)]));
    let gguf = open(&writer);
    let m = gguf.metadata();
    assert_eq!(
        (m.chat_template(None).unwrap(), m.chat_template(Some("tool_use")).unwrap()),
        (Some("{{ a }}"), Some("{{ b }}"))
    );
    assert_eq!(m.chat_template(Some("rag")).unwrap(), None);
    let defaults = m.generation_defaults().unwrap();
    assert_eq!((defaults.temperature, defaults.top_k, defaults.top_p), (Some(0.6), Some(20), Some(0.95)));
    assert_eq!((defaults.min_p, defaults.repetition_penalty), (None, None));
    assert_eq!(defaults.suppress_tokens, Some(vec![5, 7]));
    let odd = Writer::default().pair("general.sampling.top_p", f32(1.5)).pair("general.sampling.top_k", i32(-1));
    let defaults = open(&odd).metadata().generation_defaults().unwrap();
    assert_eq!((defaults.top_p, defaults.top_k), (Some(1.0), Some(0)));
    for (key, value) in [("temp", f32(-1.0)), ("top_p", f32(-0.5)), ("top_k", f32(0.5)), ("min_p", text("0"))] {
        let key = format!("general.sampling.{key}");
        let error = open(&Writer::default().pair(&key, value)).metadata().generation_defaults().unwrap_err();
        assert!(error.to_string().contains(&key), "{error}");
    }
    let negative = open(&Writer::default().pair("tokenizer.ggml.suppress_tokens", array(&[i32(-1)])));
    assert!(negative.metadata().generation_defaults().unwrap_err().to_string().contains("an array of ids, got -1"));
}
