//! Texts with drafts have the target's distribution, and equal the texts without, for every sampler and any drafts.

use std::{sync::Arc, time::Instant};

use kvant::{Device, Tensor};
use kvant_models::{DeviceSampler, Sampling};

use super::Draws;
use crate::{
    EngineRequest,
    commands::{Job, Reader},
    grammar::GrammarState,
    worker::running::Running,
};

/// Ids of the planted target.
const VOCAB: usize = 12;
/// Requests of a step, tokens of a text, and drafts of a request in a step.
const BATCH: usize = 64;
const LENGTH: usize = 40;
const DRAFTS: usize = 3;
/// Tokens that are sampled for each sampler, and without a test of the distribution.
const DRAWS: usize = 200_000;
const FEW: usize = 2 * BATCH * LENGTH;

/// The logits of the planted target after a token.
fn target(vocab: usize, after: u32) -> Vec<f32> {
    let number =
        |id: u32| (after.wrapping_mul(2_654_435_761) ^ id.wrapping_mul(40_503)).wrapping_mul(2_246_822_519) >> 16;
    (0..vocab as u32).map(|id| number(id) as f32 / 65536.0 * 4.0 - 2.0).collect()
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug)]
enum Drafts {
    None,
    /// The most probable token after each token.
    Good,
    Random,
    /// The least probable one.
    Bad,
    /// Two words in turn.
    #[cfg(feature = "grammar")]
    Words,
    /// One token, which no sampler draws: out of the vocabulary.
    Invalid,
}

impl Drafts {
    fn after(self, vocab: usize, text: &[u32]) -> Vec<u32> {
        let mut drafts: Vec<u32> = Vec::new();
        while drafts.len() < DRAFTS {
            let last = drafts.last().or(text.last()).copied().unwrap_or(0);
            let logits = target(vocab, last);
            let by = |a: &u32, b: &u32| logits[*a as usize].total_cmp(&logits[*b as usize]);
            let next = match self {
                Drafts::None => break,
                Drafts::Good => (0..vocab as u32).max_by(by),
                Drafts::Bad => (0..vocab as u32).min_by(by),
                Drafts::Random => Some((text.len() as u32 * 7 + last * 5 + drafts.len() as u32) % vocab as u32),
                #[cfg(feature = "grammar")]
                Drafts::Words => Some(if last == 3 { 4 } else { 3 }),
                Drafts::Invalid => Some(u32::MAX - 1),
            };
            drafts.extend(next);
        }
        drafts
    }
}

fn running(sampling: &Sampling, seed: u64, vocab: usize, grammar: Option<GrammarState>) -> Running {
    let (events, _) = flume::unbounded();
    let reader = Reader { events, unread: Arc::default() };
    let request = EngineRequest::new(vec![0]).sampling(sampling.clone().seed(seed));
    let request = request.max_tokens(LENGTH).stop_ids(vec![1]).min_tokens(LENGTH);
    let job = Job { id: seed, request, grammar, reader, submitted: Instant::now() };
    Running::new(job, vocab, usize::MAX, &[], DRAFTS).unwrap().0
}

/// Texts of the planted target, and the number of accepted drafts.
fn texts(
    sampling: &Sampling,
    vocab: usize,
    count: usize,
    drafts: Drafts,
    grammar: Option<&GrammarState>,
) -> (Vec<Vec<u32>>, usize) {
    let device = Device::cpu();
    let sampler = DeviceSampler::new(&device, BATCH * (1 + DRAFTS)).unwrap();
    let (mut all, mut accepted) = (Vec::new(), 0);
    for first in (0..count as u64).step_by(BATCH) {
        let seeds = first..first + BATCH as u64;
        let mut live: Vec<(Running, Vec<u32>)> =
            seeds.map(|seed| (running(sampling, seed, vocab, grammar.cloned()), vec![0])).collect();
        while live.iter().any(|(running, text)| !is_done(running, text)) {
            let going: Vec<_> = live.iter_mut().filter(|(running, text)| !is_done(running, text)).collect();
            accepted += step(going, vocab, drafts, &device, &sampler);
        }
        all.extend(live.into_iter().map(|(_, text)| text));
    }
    (all, accepted)
}

fn is_done(running: &Running, text: &[u32]) -> bool {
    running.end.is_some() || text.len() > LENGTH
}

/// One step over requests: draws after the last token and after each draft, and accepts as the worker does. Returns the
/// number of accepted drafts.
fn step(
    mut live: Vec<&mut (Running, Vec<u32>)>,
    vocab: usize,
    drafts: Drafts,
    device: &Device,
    sampler: &DeviceSampler,
) -> usize {
    let drafts: Vec<Vec<u32>> = live.iter().map(|(_, text)| drafts.after(vocab, text)).collect();
    let fed = live.iter().zip(&drafts).flat_map(|((_, text), drafts)| text.last().into_iter().chain(drafts));
    let numbers: Vec<f32> = fed.flat_map(|&token| target(vocab, token)).collect();
    let logits = Tensor::from_slice(device, &numbers, &[numbers.len() / vocab, vocab]).unwrap();
    let (mut draws, mut first) = (Draws::new(&logits, None), 0);
    for ((running, text), drafts) in live.iter_mut().map(|live| &mut **live).zip(&drafts) {
        let row = draws.add(running, drafts, first, text.len()).unwrap();
        draws.rows.push(row);
        first += 1 + drafts.len();
    }
    let mut accepted = 0;
    for (((running, text), drawn), drafts) in live.into_iter().zip(draws.finish(sampler).unwrap()).zip(&drafts) {
        for (index, drawn) in drawn.into_iter().enumerate() {
            let Ok(token) = drawn.token else { panic!("no token") };
            running.accept(token).unwrap();
            text.push(token);
            if drafts.get(index) != Some(&token) || is_done(running, text) {
                break;
            }
            accepted += 1;
        }
    }
    accepted
}

/// The distribution of the next token in f64, from the definitions of the parameters.
fn reference(sampling: &Sampling, text: &[u32]) -> Vec<f64> {
    let mut logits: Vec<f64> = target(VOCAB, text[text.len() - 1]).into_iter().map(f64::from).collect();
    // The prompt is the first token.
    let generated = |id: usize| text[1..].iter().filter(|&&token| token as usize == id).count() as f64;
    for (id, logit) in logits.iter_mut().enumerate() {
        let count = generated(id);
        let repetition = f64::from(sampling.repetition_penalty);
        if count > 0.0 || id == 0 {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if count > 0.0 {
            *logit -= f64::from(sampling.presence_penalty) + f64::from(sampling.frequency_penalty) * count;
        }
    }
    sampling.logit_bias.iter().for_each(|&(id, bias)| logits[id as usize] += f64::from(bias));
    // The stop id is forbidden before the minimum length.
    sampling.suppressed.iter().chain(&[1]).for_each(|&id| logits[id as usize] = f64::NEG_INFINITY);
    let mut order: Vec<usize> = (0..VOCAB).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let weights: Vec<f64> = logits.iter().map(|logit| (logit / f64::from(sampling.temperature)).exp()).collect();
    order.truncate(if sampling.top_k == 0 { VOCAB } else { sampling.top_k });
    let total: f64 = order.iter().map(|&id| weights[id]).sum();
    let mut sum = 0.0;
    let kept = order.iter().take_while(|&&id| {
        let is_kept = sum < f64::from(sampling.top_p) * total;
        sum += weights[id];
        is_kept
    });
    let least = weights[order[0]] * f64::from(sampling.min_p);
    let kept: Vec<usize> = kept.copied().filter(|&id| weights[id] >= least).collect();
    let total: f64 = kept.iter().map(|&id| weights[id]).sum();
    let mut shares = vec![0.0; VOCAB];
    kept.into_iter().for_each(|id| shares[id] = weights[id] / total);
    shares
}

/// Pearson's statistic over pairs of a token and its successor, and its degrees of freedom.
fn chi_square(texts: &[Vec<u32>], sampling: &Sampling) -> (f64, f64) {
    let mut seen = vec![[0.0; VOCAB]; VOCAB];
    let mut expected = vec![[0.0; VOCAB]; VOCAB];
    for text in texts {
        for end in 1..text.len() {
            let after = text[end - 1] as usize;
            seen[after][text[end] as usize] += 1.0;
            let shares = reference(sampling, &text[..end]);
            expected[after].iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        }
    }
    let (mut statistic, mut freedom) = (0.0, 0.0);
    for (seen, expected) in seen.iter().zip(&expected) {
        let mut cells = 0.0;
        for (&seen, &expected) in seen.iter().zip(expected) {
            assert!(expected > 0.0 || seen == 0.0, "a token that cannot be drawn");
            if expected >= 5.0 {
                statistic += (seen - expected) * (seen - expected) / expected;
                cells += 1.0;
            }
        }
        freedom += f64::max(cells - 1.0, 0.0);
    }
    (statistic, freedom)
}

fn samplers() -> Vec<(&'static str, Sampling)> {
    let warm = Sampling::default().temperature(0.8);
    vec![
        ("temperature", warm.clone()),
        ("top_k", warm.clone().top_k(4)),
        ("top_p", warm.clone().top_p(0.7)),
        ("min_p", warm.clone().min_p(0.2)),
        ("all cuts", warm.clone().top_k(8).top_p(0.9).min_p(0.05)),
        ("penalties", warm.clone().repetition_penalty(1.2).presence_penalty(0.3).frequency_penalty(0.1)),
        ("bias", warm.clone().logit_bias(vec![(2, 1.5), (5, -1.0), (7, f32::NEG_INFINITY)])),
        ("suppressed", warm.suppressed(vec![3, 4])),
    ]
}

#[test]
fn texts_with_drafts_have_the_distribution_of_the_target() {
    for (name, sampling) in samplers() {
        let (texts, accepted) = texts(&sampling, VOCAB, DRAWS / LENGTH, Drafts::Good, None);
        let (statistic, freedom) = chi_square(&texts, &sampling);
        println!("{name}: {statistic:.1} for {freedom} degrees of freedom, {accepted} drafts accepted");
        assert!(accepted > DRAWS / 20, "{name}: {accepted}");
        // Four standard deviations.
        let bound = freedom + 4.0 * (2.0 * freedom).sqrt();
        assert!(statistic < bound, "{name}: {statistic:.1} for {freedom}");
        // The test notices a temperature that is 8 % higher.
        let (other, _) = chi_square(&texts, &sampling.clone().temperature(0.8 * 1.08));
        assert!(other > bound, "{name}: {other:.1} for another temperature");
    }
}

#[test]
fn texts_equal_those_without_drafts() {
    let all = samplers().into_iter().chain([("greedy", Sampling::default())]);
    for (name, sampling) in all {
        let (without, _) = texts(&sampling, VOCAB, FEW / LENGTH, Drafts::None, None);
        for drafts in [Drafts::Good, Drafts::Random, Drafts::Bad, Drafts::Invalid] {
            let (with, accepted) = texts(&sampling, VOCAB, FEW / LENGTH, drafts, None);
            assert!(with == without, "{name}, {drafts:?}");
            assert!(accepted > 100 || !matches!(drafts, Drafts::Good), "{name}: {accepted}");
        }
    }
}

#[cfg(feature = "grammar")]
#[path = "../../../tests/words/mod.rs"]
mod words;

#[cfg(feature = "grammar")]
mod grammars {
    use super::*;
    use crate::{Grammar, grammar::Compiler};

    /// The mask after each draft belongs to the text with it. Forbidden drafts end the draws of a step, and so does the
    /// end of the grammar.
    #[test]
    fn texts_with_a_grammar_equal_those_without_drafts() {
        let tokenizer = super::words::words();
        let vocab = tokenizer.pieces().unwrap().len();
        let compiler = Compiler::new(&tokenizer).unwrap();
        let sampling = Sampling::default().temperature(1.0).logit_bias(vec![(3, 3.0), (4, 3.0)]);
        for regex in ["( Hello| world|a|b){1,300}", "( Hello world){3}( Hello|b){2,5}!"] {
            let compiled = compiler.compile(&Grammar::Regex(regex.to_string())).unwrap();
            let start = compiled.start(&compiler).unwrap();
            let (without, _) = texts(&sampling, vocab, BATCH, Drafts::None, Some(&start));
            assert!(without.iter().any(|text| text.len() > 8));
            for drafts in [Drafts::Words, Drafts::Random, Drafts::Invalid] {
                let (with, accepted) = texts(&sampling, vocab, BATCH, drafts, Some(&start));
                println!("{regex}, {drafts:?}: {accepted} accepted");
                assert!(with == without, "{regex}, {drafts:?}");
                assert_eq!(accepted > 100, matches!(drafts, Drafts::Words), "{regex}, {drafts:?}: {accepted}");
            }
        }
    }
}
