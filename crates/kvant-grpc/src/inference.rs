//! The service `vllm.Inference`.

use std::{pin::Pin, sync::Arc};

use futures_util::{
    Stream, StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use kvant_engine::{Event, Failure, FinishReason, Responses};
use kvant_transfer::Offered;
use tonic::{Request, Response, Status};
use vllm_proto::{GenerateRequest, GenerateResponse, inference_server::Inference};

use crate::{
    abort::Entry,
    output::{Output, merged},
    request::{Requests, invalid, rejected},
    server::Shared,
};

pub(crate) struct InferenceService(pub Arc<Shared>);

type ResponseStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for InferenceService {
    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<GenerateResponse>, Status> {
        let request = request.into_inner();
        if request.sampling.as_ref().is_some_and(|sampling| sampling.num_sequences > 1) {
            return Err(invalid("sampling.num_sequences", "a response has one sequence: use GenerateStream"));
        }
        let responses = self.0.submit(request).await?.try_collect().await?;
        Ok(Response::new(merged(responses)))
    }

    type GenerateStreamStream = ResponseStream;

    async fn generate_stream(&self, request: Request<GenerateRequest>) -> Result<Response<ResponseStream>, Status> {
        Ok(Response::new(self.0.submit(request.into_inner()).await?))
    }
}

impl Shared {
    /// Submits all sequences of a request. Dropping the stream cancels them.
    async fn submit(
        self: &Arc<Self>,
        request: GenerateRequest,
    ) -> Result<BoxStream<'static, Result<GenerateResponse, Status>>, Status> {
        if !self.knows(&request.model) {
            return Err(Status::not_found(format!("the model {:?} does not exist", short(&request.model))));
        }
        let id = request.request_id.clone();
        let prepare = move |shared: &Shared| {
            let requests = Requests::new(&shared.engine, &shared.options.sampling, request)?;
            let first = requests.requests.first();
            let offered = first.and_then(|first| shared.transfer(requests.transfer.as_ref(), first));
            Ok::<_, Status>((requests, offered))
        };
        let (requests, mut offered) = self.blocking(prepare).await??;
        let mut sequences = Vec::new();
        for (index, request) in requests.requests.iter().enumerate() {
            let responses = self.engine.submit(request.clone()).map_err(|error| rejected(&error))?;
            let output = Output::new(index, &requests).offer(offered.as_ref());
            let (offered, entry) = (offered.take(), self.running.add(&id));
            sequences.push(Sequence { responses, output, offered, entry, has_ended: false }.stream());
        }
        Ok(stream::select_all(sequences).boxed())
    }
}

/// The beginning of a text from a client.
fn short(text: &str) -> String {
    text.chars().take(64).collect()
}

/// A running sequence.
struct Sequence {
    responses: Responses,
    output: Output,
    /// The offer of the prompt to another worker, until the prompt is computed.
    offered: Option<Offered>,
    entry: Entry,
    has_ended: bool,
}

impl Sequence {
    fn stream(self) -> BoxStream<'static, Result<GenerateResponse, Status>> {
        let next = async |mut sequence: Sequence| {
            let response = sequence.next().await?;
            Some((response, sequence))
        };
        stream::unfold(self, next).boxed()
    }

    /// The next response. `None` after the last one.
    async fn next(&mut self) -> Option<Result<GenerateResponse, Status>> {
        while !self.has_ended {
            let event = tokio::select! {
                event = self.responses.recv_async() => event?,
                () = self.entry.aborted() => {
                    self.has_ended = true;
                    return Some(Ok(self.output.aborted()));
                }
            };
            if !matches!(event, Event::Prompt(_)) {
                self.offered = None;
            }
            match event {
                Event::Prompt(scores) => self.output.prompt(&scores),
                Event::Token(token) => return Some(Ok(self.output.token(token))),
                Event::Finished(finished) => {
                    self.has_ended = true;
                    if finished.reason == FinishReason::Drained {
                        // Routers let another worker continue.
                        return Some(Err(Status::unavailable("the server ends")));
                    }
                    return Some(Ok(self.output.finished(finished)));
                }
                Event::Failed(failure) => {
                    self.has_ended = true;
                    return Some(Err(failed(&failure)));
                }
                _ => {}
            }
        }
        None
    }
}

fn failed(failure: &Failure) -> Status {
    match failure {
        Failure::Engine(_) => Status::unavailable(failure.to_string()),
        _ => Status::internal(failure.to_string()),
    }
}
