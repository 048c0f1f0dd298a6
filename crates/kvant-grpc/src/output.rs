//! Events of the engine as responses of the protocol.

use kvant_engine::{FinishReason as EndReason, Finished, TextToken};
use kvant_models::TokenLogprobs;
use kvant_transfer::Offered;
use prost_types::Struct;
use vllm_proto::{
    CandidateTokenInfo, FinishInfo, GenerateResponse, PromptInfo, SequenceOutput,
    candidate_token_info::TokenInfo,
    finish_info::{FinishReason, StopReason},
};

use crate::{
    request::{Requests, Wanted},
    transfer::structure,
};

/// The output of one sequence so far.
#[derive(Debug)]
pub(crate) struct Output {
    index: u32,
    wanted: Wanted,
    stop_ids: Vec<u32>,
    stop_strings: Vec<String>,
    /// Sent with the first response.
    prompt: Option<PromptInfo>,
    /// `kv_transfer_params` of the last response.
    transfer: Option<Struct>,
    /// Generated tokens.
    tokens: u32,
}

impl Output {
    /// The output of a sequence.
    pub fn new(index: usize, requests: &Requests) -> Output {
        let wanted = requests.wanted;
        let token_ids = if wanted.prompt_token_ids { requests.prompt.clone() } else { Vec::new() };
        let mut prompt =
            PromptInfo { num_prompt_tokens: requests.prompt.len() as u32, token_ids, ..PromptInfo::default() };
        if wanted.prompt_logprobs {
            // The first token has no probability.
            prompt.logprobs.push(0.0);
            prompt.ranks.push(0);
            prompt.candidate_tokens.push(CandidateTokenInfo::default());
        }
        let (stop_ids, stop_strings) = (requests.stop_ids.clone(), requests.stop_strings.clone());
        Output { index: index as u32, wanted, stop_ids, stop_strings, prompt: Some(prompt), transfer: None, tokens: 0 }
    }

    /// Offers the prompt's pages with the last response.
    pub fn offer(self, offered: Option<&Offered>) -> Output {
        Output { transfer: offered.and_then(|offered| structure(offered.params())), ..self }
    }

    /// Adds log probabilities of prompt tokens.
    pub fn prompt(&mut self, scores: &[TokenLogprobs]) {
        let Some(prompt) = &mut self.prompt else { return };
        for scores in scores {
            prompt.logprobs.push(scores.logprob);
            prompt.ranks.push(rank(scores));
            prompt.candidate_tokens.push(alternatives(scores));
        }
    }

    /// The response with a token.
    pub fn token(&mut self, token: TextToken) -> GenerateResponse {
        self.tokens += 1;
        let mut output = SequenceOutput { num_tokens: 1, ..SequenceOutput::default() };
        if self.wanted.token_ids {
            output.token_ids.push(token.id);
        }
        if let Some(scores) = token.logprobs.filter(|_| self.wanted.logprobs) {
            output.logprobs.push(scores.logprob);
            output.ranks.push(rank(&scores));
            output.candidate_tokens.push(alternatives(&scores));
        }
        self.response(output, token.text)
    }

    /// The last response of a text that ended by itself.
    pub fn finished(&mut self, finished: Finished) -> GenerateResponse {
        let (reason, stop) = match finished.reason {
            EndReason::StopId(id) if self.stop_ids.contains(&id) => {
                (FinishReason::Stop, Some(StopReason::StopTokenId(id)))
            }
            EndReason::StopId(id) => (FinishReason::Stop, Some(StopReason::EosTokenId(id))),
            EndReason::StopString(index) => {
                (FinishReason::Stop, self.stop_strings.get(index).cloned().map(StopReason::StopString))
            }
            EndReason::Grammar => (FinishReason::Stop, None),
            _ => (FinishReason::Length, None),
        };
        let cached = Some(finished.usage.cached_tokens as u32);
        self.end(finished.text, reason, stop, cached)
    }

    /// The last response of an aborted text.
    pub fn aborted(&mut self) -> GenerateResponse {
        self.end(String::new(), FinishReason::Aborted, None, None)
    }

    fn end(
        &mut self,
        text: String,
        reason: FinishReason,
        stop_reason: Option<StopReason>,
        num_cached_tokens: Option<u32>,
    ) -> GenerateResponse {
        let num_output_tokens = self.tokens;
        let kv_transfer_params = self.transfer.take().filter(|_| reason != FinishReason::Aborted);
        let mut info = FinishInfo { num_output_tokens, stop_reason, num_cached_tokens, ..FinishInfo::default() };
        info.kv_transfer_params = kv_transfer_params;
        info.set_finish_reason(reason);
        self.response(SequenceOutput { finish_info: Some(info), ..SequenceOutput::default() }, text)
    }

    fn response(&mut self, output: SequenceOutput, text: String) -> GenerateResponse {
        let text = if self.wanted.text { text } else { String::new() };
        let outputs = Some(SequenceOutput { index: self.index, text, ..output });
        // Sequences have one prompt.
        let prompt_info = self.prompt.take().filter(|_| self.index == 0);
        GenerateResponse { prompt_info, outputs }
    }
}

/// vLLM's ranks begin with 1.
fn rank(scores: &TokenLogprobs) -> u32 {
    u32::try_from(scores.rank + 1).unwrap_or(u32::MAX)
}

fn alternatives(scores: &TokenLogprobs) -> CandidateTokenInfo {
    let top = scores.top.iter().zip(1..);
    let tokens = top.map(|(&(id, logprob), rank)| TokenInfo { id, logprob, rank }).collect();
    CandidateTokenInfo { tokens }
}

/// Merges the responses of one sequence into one.
pub(crate) fn merged(mut responses: Vec<GenerateResponse>) -> GenerateResponse {
    let prompt_info = responses.iter_mut().find_map(|response| response.prompt_info.take());
    let mut all = SequenceOutput::default();
    for output in responses.into_iter().filter_map(|response| response.outputs) {
        all.index = output.index;
        all.text += &output.text;
        all.num_tokens += output.num_tokens;
        all.token_ids.extend(output.token_ids);
        all.logprobs.extend(output.logprobs);
        all.ranks.extend(output.ranks);
        all.candidate_tokens.extend(output.candidate_tokens);
        all.finish_info = all.finish_info.or(output.finish_info);
    }
    GenerateResponse { prompt_info, outputs: Some(all) }
}
