//! Long texts with planted needles and pass keys.

use kvant_models::Tokenizer;

use crate::Result;

/// Needles per context, and pass keys per context.
pub const DEPTHS: usize = 8;
/// Tokens of a needle.
const NEEDLE: usize = 32;
/// Tokens of a needle that are repeated as a cue before the rest is predicted.
const CUE: usize = 16;
/// Tokens of all needles.
const NEEDLES: usize = DEPTHS * NEEDLE;
/// Maximum tokens of all contexts together, unless a single one is longer.
const TOKENS: usize = 16384;
const MAX_CONTEXTS: usize = 8;
/// The owners of pass keys, one per depth.
const NAMES: [&str; DEPTHS] = ["Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry"];

/// A passage in a context, and the tokens that are fed after the context.
#[derive(Clone, Debug)]
pub struct Planted {
    pub passage: Vec<u32>,
    /// The queried part of the passage: a cue, and the rest to predict.
    pub asked: Vec<u32>,
    /// Tokens of the cue.
    pub cue: usize,
}

#[derive(Debug)]
pub struct Context {
    pub without: Vec<u32>,
    /// The text including the planted passages.
    pub text: Vec<u32>,
    /// In the order of their depths.
    pub needles: Vec<Planted>,
    /// In the order of their depths; empty without a tokenizer.
    pub pass_keys: Vec<Planted>,
}

/// The fraction of the text before each needle.
pub fn depths() -> Vec<f64> {
    (0..DEPTHS).map(|depth| (depth as f64 + 0.5) / DEPTHS as f64).collect()
}

/// Makes contexts from a text. Each has at most `tokens` tokens, including the queries after it, and is not longer than
/// the text. Returns none if needles would be a large part of a context.
pub fn contexts(tokens: usize, text: &[u32], tokenizer: Option<&Tokenizer>) -> Result<Vec<Context>> {
    let keys: Vec<Vec<Planted>> = match tokenizer {
        Some(tokenizer) => (0..MAX_CONTEXTS).map(|context| pass_keys(context, tokenizer)).collect::<Result<_>>()?,
        None => vec![Vec::new(); MAX_CONTEXTS],
    };
    let planted = NEEDLES + longest(&keys, |keys| keys.iter().map(|key| key.passage.len()).sum());
    let after = longest(&keys, |keys| longest(keys, |key| key.asked.len())).max(NEEDLE);
    let text_tokens = tokens.min(text.len().saturating_sub(NEEDLES)).saturating_sub(planted + after);
    if text_tokens < 2 * NEEDLES {
        return Ok(Vec::new());
    }
    let count = (TOKENS / text_tokens).clamp(1, MAX_CONTEXTS).min(text.len() / (text_tokens + NEEDLES));
    let (texts, passages) = text.split_at(text.len() - count * NEEDLES);
    let parts = texts.chunks_exact(text_tokens).zip(passages.chunks_exact(NEEDLES)).zip(keys);
    Ok(parts.map(|((text, passages), keys)| context(text, passages, keys)).collect())
}

fn longest<T>(all: &[T], length: impl Fn(&T) -> usize) -> usize {
    all.iter().map(length).max().unwrap_or(0)
}

/// Each part of the text gets a pass key at its first quarter and a needle in its middle.
fn context(text: &[u32], passages: &[u32], pass_keys: Vec<Planted>) -> Context {
    let needle = |passage: &[u32]| Planted { passage: passage.to_vec(), asked: passage.to_vec(), cue: CUE };
    let needles: Vec<Planted> = passages.chunks_exact(NEEDLE).map(needle).collect();
    let mut planted = Vec::new();
    for (depth, part) in text.chunks(text.len().div_ceil(DEPTHS)).enumerate() {
        let (quarter, half) = (part.len() / 4, part.len() / 2);
        let passage = |of: &[Planted]| of.get(depth).map_or(Vec::new(), |planted| planted.passage.clone());
        planted.extend_from_slice(&part[..quarter]);
        planted.extend(passage(&pass_keys));
        planted.extend_from_slice(&part[quarter..half]);
        planted.extend(passage(&needles));
        planted.extend_from_slice(&part[half..]);
    }
    Context { without: text.to_vec(), text: planted, needles, pass_keys }
}

/// The pass keys of a context. Its index selects the digits.
fn pass_keys(context: usize, tokenizer: &Tokenizer) -> Result<Vec<Planted>> {
    let key = |(index, name): (usize, &&str)| {
        let encode = |text: &str| tokenizer.encode(text, false);
        let cue = encode(&format!("\nThe pass key of {name} is"))?;
        let rest = encode(&format!(" {}", digits(context * DEPTHS + index)))?;
        let asked = [&cue[..], &rest].concat();
        Ok(Planted { passage: [&asked[..], &encode(". Remember it.\n")?].concat(), asked, cue: cue.len() })
    };
    NAMES.iter().enumerate().map(key).collect()
}

/// Five digits without a pattern; all numbers differ.
fn digits(index: usize) -> usize {
    10_000 + (31_337 + index * 56_891) % 90_000
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn occurrences(text: &[u32], passage: &[u32]) -> usize {
        text.windows(passage.len()).filter(|some| *some == passage).count()
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::load(concat!(env!("CARGO_MANIFEST_DIR"), "/../kvant-cli/model").as_ref()).unwrap()
    }

    #[test]
    fn every_passage_is_planted_once_and_at_its_depth() {
        let text: Vec<u32> = (100_000..112_000).collect();
        let tokenizer = tokenizer();
        for (tokens, count) in [(2000, 6), (4000, 3), (50_000, 1)] {
            let contexts = contexts(tokens, &text, Some(&tokenizer)).unwrap();
            assert_eq!(contexts.len(), count, "{tokens}");
            for context in &contexts {
                let after = context.pass_keys.iter().map(|key| key.asked.len()).max().unwrap().max(NEEDLE);
                assert!(context.text.len() + after <= tokens.min(text.len()));
                assert_eq!((context.needles.len(), context.pass_keys.len()), (DEPTHS, DEPTHS));
                for (needle, depth) in context.needles.iter().zip(depths()) {
                    assert_eq!(occurrences(&context.text, &needle.passage), 1);
                    assert_eq!(occurrences(&context.without, &needle.passage), 0);
                    let at = context.text.iter().position(|id| *id == needle.passage[0]).unwrap();
                    assert!((at as f64 / context.text.len() as f64 - depth).abs() < 0.03, "{at}, not {depth}");
                }
                for key in &context.pass_keys {
                    assert_eq!(occurrences(&context.text, &key.passage), 1);
                    assert!(key.passage.starts_with(&key.asked) && key.asked.len() > key.cue);
                    assert_eq!(occurrences(&context.text, &key.asked[..key.cue]), 1, "cues differ");
                }
                let planted = context.needles.iter().chain(&context.pass_keys).map(|planted| planted.passage.len());
                assert_eq!(context.text.len(), context.without.len() + planted.sum::<usize>());
            }
        }
        assert!(contexts(700, &text, Some(&tokenizer)).unwrap().is_empty());
        assert!(contexts(5000, &text[..700], None).unwrap().is_empty());
        assert!(contexts(5000, &text, None).unwrap()[0].pass_keys.is_empty());
    }

    #[test]
    fn pass_keys_differ() {
        let all: HashSet<usize> = (0..MAX_CONTEXTS * DEPTHS).map(digits).collect();
        assert_eq!(all.len(), MAX_CONTEXTS * DEPTHS);
        assert!(all.iter().all(|digits| (10_000..100_000).contains(digits)));
    }
}
