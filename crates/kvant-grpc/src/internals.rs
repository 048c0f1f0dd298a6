//! Parts for fuzz targets and tests of this workspace.

use kvant_engine::{Engine, EngineRequest};
use kvant_models::Sampling;
use prost::Message;
use tonic::Status;
use vllm_proto::GenerateRequest;

use crate::request::{Requests, invalid};

/// The engine's requests in the bytes of a `GenerateRequest`, as a client sends them.
pub fn requests(engine: &Engine, bytes: &[u8]) -> Result<Vec<EngineRequest>, Status> {
    let request = GenerateRequest::decode(bytes).map_err(|error| invalid("body", error))?;
    Ok(Requests::new(engine, &Sampling::default(), request)?.requests)
}
