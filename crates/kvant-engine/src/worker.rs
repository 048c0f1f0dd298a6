//! The thread that owns model and pages.

use std::{sync::Arc, time::Instant};

use flume::{Receiver, Sender};
use kvant::KvPool;
use kvant_models::{Drawing, Model, Result, Sampler, Tokenizer};

use crate::{
    EngineOptions, EngineRequest, Failure, FinishReason,
    engine::{Command, Shared},
    text::{NewText, Output, Reader},
};

/// A request that was submitted.
pub(crate) struct Job {
    pub id: u64,
    pub request: EngineRequest,
    pub reader: Reader,
    pub submitted: Instant,
}

pub(crate) struct Worker {
    model: Model,
    pool: KvPool,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    outputs: Sender<Vec<(u64, Output)>>,
    drawing: Drawing,
}

impl Worker {
    pub fn new(
        model: Model,
        pool: KvPool,
        tokenizer: Arc<Tokenizer>,
        options: &EngineOptions,
        shared: Arc<Shared>,
        outputs: Sender<Vec<(u64, Output)>>,
    ) -> Result<Worker> {
        let drawing = Drawing::new(model.device(), options.sequences)?;
        Ok(Worker { model, pool, tokenizer, shared, outputs, drawing })
    }

    pub fn run(self, commands: &Receiver<Command>) {
        for command in commands.iter() {
            let Command::Submit(job) = command else { continue };
            let id = job.id;
            self.send(id, Output::Start(Box::new(NewText::new(&job.request, job.reader.clone()))));
            let end = match self.generate(&job) {
                Ok(reason) => Output::End(reason),
                Err(error) => Output::Failed(Failure::Request(error.to_string())),
            };
            self.send(id, end);
        }
    }

    fn send(&self, id: u64, output: Output) {
        let _ = self.outputs.send(vec![(id, output)]);
    }

    fn generate(&self, job: &Job) -> Result<FinishReason> {
        let _ = (&self.shared, job.submitted);
        let request = &job.request;
        let mut sequence = self.pool.sequence();
        let sampler = Sampler::new(request.sampling.clone(), self.model.vocab_size())?;
        let mut logits = self.model.feed(&mut sequence, &request.prompt, kvant_models::Logits::Last)?;
        for _ in 0..request.max_tokens {
            let drawn = self.drawing.draw(&logits, &[(sampler.sampling(), sequence.len() as u32)])?;
            let token = drawn[0].unwrap_or(0);
            if request.stop_ids.as_deref().unwrap_or(self.tokenizer.eos()).contains(&token) {
                return Ok(FinishReason::StopId(token));
            }
            self.send(job.id, Output::Token { id: token, logprobs: None });
            logits = self.model.feed(&mut sequence, &[token], kvant_models::Logits::Last)?;
        }
        Ok(FinishReason::Length)
    }
}
