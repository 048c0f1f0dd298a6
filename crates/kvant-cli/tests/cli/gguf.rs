//! GGUF files as models: a tiny random Llama with tokenizer, chat template and sampling parameters.

#[allow(dead_code, reason = "kvant-models uses the rest")]
#[path = "../../../kvant-models/tests/common/gguf.rs"]
pub mod writer;

use std::path::{Path, PathBuf};

use writer::{Value, Writer, array, f32, text, texts, u16, u32};

use crate::{kvant, kvant_with_input, scratch, str};

const HIDDEN: u64 = 64;
/// The letters of 256 bytes, the beginning-of-text token, and the end-of-text token.
const VOCAB: u64 = 258;
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";

/// The letters that represent bytes in byte-level BPE.
fn letters() -> Vec<String> {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let letter = |byte: u32| if printable(&byte) { byte } else { others.next().unwrap() };
    (0..256).map(letter).map(|c| char::from_u32(c).unwrap().to_string()).collect()
}

/// The metadata of a model.
fn metadata() -> Writer {
    let mut tokens = letters();
    tokens.extend(["<bos>".to_string(), "<eos>".to_string()]);
    let kind = |id| Value(5, if id < 256 { 1i32 } else { 3 }.to_le_bytes().to_vec());
    Writer::default()
        .pair("general.architecture", text("llama"))
        .pair("llama.embedding_length", u32(HIDDEN as u32))
        .pair("llama.block_count", u32(1))
        .pair("llama.context_length", u32(256))
        .pair("llama.attention.head_count", u32(1))
        .pair("llama.feed_forward_length", u32(HIDDEN as u32))
        .pair("llama.attention.layer_norm_rms_epsilon", f32(1e-5))
        .pair("llama.rope.freq_base", f32(1e4))
        .pair("tokenizer.ggml.model", text("gpt2"))
        .pair("tokenizer.ggml.pre", text("gpt-2"))
        .pair("tokenizer.ggml.tokens", texts(tokens.iter().map(String::as_str)))
        .pair("tokenizer.ggml.token_type", array(&(0..VOCAB).map(kind).collect::<Vec<_>>()))
        .pair("tokenizer.ggml.merges", texts(["a b"]))
        .pair("tokenizer.ggml.bos_token_id", u32(256))
        .pair("tokenizer.ggml.eos_token_id", u32(257))
        .pair("tokenizer.ggml.add_bos_token", Value(7, vec![1]))
        .pair("tokenizer.chat_template", text(TEMPLATE))
        .pair("general.sampling.temp", f32(0.0))
}

/// The tensors of a model: name, dimensions (innermost first), bytes.
fn tensors() -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let mut shapes: Vec<(String, Vec<u64>)> =
        matrices.iter().map(|name| (format!("blk.0.{name}.weight"), vec![HIDDEN, HIDDEN])).collect();
    shapes.push(("token_embd.weight".to_string(), vec![HIDDEN, VOCAB]));
    for name in ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"] {
        shapes.push((format!("{name}.weight"), vec![HIDDEN]));
    }
    let mut tensors = Vec::new();
    for (name, dims) in shapes {
        let bytes = (0..dims.iter().product()).flat_map(|_| random().to_le_bytes()).collect();
        tensors.push((name, dims, bytes));
    }
    tensors
}

fn with_tensors(writer: Writer, tensors: &[(String, Vec<u64>, Vec<u8>)]) -> Writer {
    tensors.iter().fold(writer, |writer, (name, dims, bytes)| writer.tensor(name, dims, 0, bytes.clone()))
}

fn write(directory: &Path, name: &str, writer: Writer) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, writer.bytes()).unwrap();
    path
}

fn generate(model: &Path) -> serde_json::Value {
    let args = ["generate", "--model", str(model), "--prompt", "Hello", "--max-tokens", "6", "--temperature", "0"];
    kvant(&[&args[..], &["--json"]].concat()).json().remove(0)
}

#[test]
fn a_file_a_directory_and_a_split_model_are_the_same() {
    let directory = scratch("gguf-generate");
    let file = write(&directory, "tiny.gguf", with_tensors(metadata(), &tensors()));
    // An image encoder is not another model.
    write(&directory, "mmproj-tiny.gguf", Writer::default());
    let answer = generate(&file);
    // The beginning-of-text token and five bytes.
    assert_eq!(answer["prompt_tokens"], 6);
    assert!(answer["generated_tokens"].as_u64().unwrap() > 0);
    assert_eq!(generate(&directory)["text"], answer["text"]);

    let split = scratch("gguf-split");
    let part = |writer: Writer, number: u16| writer.pair("split.no", u16(number)).pair("split.count", u16(2));
    let all = tensors();
    write(&split, "tiny-00001-of-00002.gguf", with_tensors(part(metadata(), 0), &all[..4]));
    write(&split, "tiny-00002-of-00002.gguf", with_tensors(part(Writer::default(), 1), &all[4..]));
    assert_eq!(generate(&split)["text"], answer["text"]);

    write(&directory, "other.gguf", with_tensors(metadata(), &tensors()));
    let error = kvant(&["generate", "--model", str(&directory)]).error();
    assert!(error.contains("several GGUF models (other.gguf, tiny.gguf)"), "{error}");
}

#[test]
fn chat_and_eval_use_the_metadata() {
    let directory = scratch("gguf-chat");
    let file = write(&directory, "tiny.gguf", with_tensors(metadata(), &tensors()));
    let chat = || kvant_with_input(&["chat", str(&file), "--max-tokens", "8"], b"Hello\n").ok();
    // The file sets temperature 0, so the random seed has no effect.
    assert_eq!(chat(), chat());
    let words = directory.join("text");
    std::fs::write(&words, "ab c").unwrap();
    let line = kvant(&["eval", "--model", str(&file), "--text", str(&words), "--kv", "f32", "--json"]).json().remove(0);
    // The beginning-of-text token is not predicted; four bytes and the end-of-text token are.
    assert_eq!(line["tokens"], 5);
    let nats = line["nats_per_token"].as_f64().unwrap();
    assert!(nats > 1.0 && nats < 40.0, "{nats}");
}

#[test]
fn generate_answers_a_message() {
    let directory = scratch("gguf-answer");
    let file = write(&directory, "tiny.gguf", with_tensors(metadata(), &tensors()));
    let args = ["generate", "--model", str(&file), "--prompt", "Hello", "--max-tokens", "12", "--chat", "--json"];
    let generate = |more: &[&str]| kvant(&[&args[..], more].concat()).json().remove(0);
    let answer = generate(&[]);
    // <bos>, `user: Hello` and a line break.
    assert_eq!(answer["prompt_tokens"], 13);
    assert_eq!(generate(&["--system", "Hi"])["prompt_tokens"], 13 + "system: Hi\n".len());
    // The file sets temperature 0.
    assert_eq!(generate(&["--seed", "5"])["text"], answer["text"]);
    let chat = kvant_with_input(&["chat", str(&file), "--max-tokens", "12"], b"Hello\n").ok();
    let text = answer["text"].as_str().unwrap();
    assert_eq!(chat, format!("{text}\n"));

    // A text ends before the stop string, with and without --chat.
    let (at, stop) = text.char_indices().nth(3).expect("a text of some length");
    let stop = stop.to_string();
    let first = text.find(&stop).unwrap().min(at);
    assert_eq!(generate(&["--stop", &stop])["text"].as_str().unwrap(), &text[..first]);
    let plain = [&args[..7], &["--temperature", "0", "--json"]].concat();
    let text = kvant(&plain).json().remove(0)["text"].as_str().unwrap().to_string();
    let stop = text.chars().nth(2).unwrap().to_string();
    let stopped = kvant(&[&plain[..], &["--stop", "never", "--stop", &stop]].concat()).json().remove(0);
    assert_eq!(stopped["text"].as_str().unwrap(), text.split(&stop).next().unwrap());
    assert!(kvant(&["generate", "--system", "Hi"]).error().contains("--chat"));
}

/// A conversation that exceeds the context loses its oldest turns, not its system message.
#[test]
fn a_chat_goes_on_when_the_context_is_full() {
    let directory = scratch("gguf-long-chat");
    let file = write(&directory, "tiny.gguf", with_tensors(metadata(), &tensors()));
    let saved = directory.join("saved.json");
    let turn = format!("{}\n", "x".repeat(30));
    let input = format!("{}/save {}\n", turn.repeat(6), saved.display());
    let args = ["chat", str(&file), "--max-tokens", "4", "--context", "128", "--system", "Short."];
    let run = kvant_with_input(&args, input.as_bytes());
    assert!(run.stderr.contains("--context 128 is full"), "{}", run.stderr);
    run.ok();
    let messages: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    assert_eq!(messages.len(), 1 + 2 * 6, "all are saved");
}

#[test]
fn errors_name_unsupported_features() {
    let directory = scratch("gguf-errors");
    let fails = |writer: Writer, expected: &str| {
        let file = write(&directory, "x.gguf", writer);
        let error = kvant(&["generate", "--model", str(&file)]).error();
        assert!(error.contains(expected), "expected {expected:?}, got {error}");
    };
    let mut other = metadata();
    other.pairs[0].1 = text("rwkv7");
    fails(with_tensors(other, &tensors()), "general.architecture \"rwkv7\" is not supported");
    let mut strange = with_tensors(metadata(), &tensors());
    // NVFP4 has blocks of 64 elements in 36 bytes.
    strange.tensors[0] = ("blk.0.attn_q.weight".to_string(), vec![HIDDEN, HIDDEN], 40, vec![0; 36 * 64]);
    fails(strange, "got NVFP4");
    fails(with_tensors(metadata(), &tensors()[1..]), "`blk.0.attn_q.weight`");
    std::fs::write(directory.join("x.gguf"), b"GGUF\x03").unwrap();
    assert!(kvant(&["generate", "--model", str(&directory.join("x.gguf"))]).error().contains("truncated"));
}
