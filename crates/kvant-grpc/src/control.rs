//! The service `vllm.Control`.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use vllm_proto::{
    self as proto, AbortRequest, AbortResponse, GetKvEventSourcesRequest, GetKvEventSourcesResponse,
    GetModelInfoRequest, GetServerInfoRequest, ListLorasRequest, ListLorasResponse, ModelInfo, ParallelismInfo,
    ServerInfo, control_server::Control,
};

use crate::server::Shared;

pub(crate) struct ControlService(pub Arc<Shared>);

/// Methods that change weights or the state of the engine.
macro_rules! unimplemented_methods {
    ($($name:ident: $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl Control for ControlService {
            $(async fn $name(&self, _: Request<proto::$request>) -> Result<Response<proto::$response>, Status> {
                Err(Status::unimplemented(concat!("this server has no ", stringify!($name))))
            })*

            async fn shutdown(
                &self,
                _: Request<proto::ShutdownRequest>,
            ) -> Result<Response<proto::ShutdownResponse>, Status> {
                Err(Status::failed_precondition("the process ends on SIGTERM"))
            }

            async fn get_server_info(&self, _: Request<GetServerInfoRequest>) -> Result<Response<ServerInfo>, Status> {
                Ok(Response::new(self.0.server_info()))
            }

            async fn get_model_info(&self, _: Request<GetModelInfoRequest>) -> Result<Response<ModelInfo>, Status> {
                Ok(Response::new(self.0.model_info()))
            }

            async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
                request.into_inner().request_ids.iter().for_each(|id| self.0.running.abort(id));
                Ok(Response::new(AbortResponse {}))
            }

            async fn list_loras(&self, _: Request<ListLorasRequest>) -> Result<Response<ListLorasResponse>, Status> {
                Ok(Response::new(ListLorasResponse::default()))
            }

            async fn get_kv_event_sources(
                &self,
                _: Request<GetKvEventSourcesRequest>,
            ) -> Result<Response<GetKvEventSourcesResponse>, Status> {
                Ok(Response::new(GetKvEventSourcesResponse { sources: self.0.sources() }))
            }

            async fn is_paused(
                &self,
                _: Request<proto::IsPausedRequest>,
            ) -> Result<Response<proto::IsPausedResponse>, Status> {
                Ok(Response::new(proto::IsPausedResponse { paused: false }))
            }

            async fn is_sleeping(
                &self,
                _: Request<proto::IsSleepingRequest>,
            ) -> Result<Response<proto::IsSleepingResponse>, Status> {
                Ok(Response::new(proto::IsSleepingResponse { sleeping: false }))
            }

            async fn get_weight_version(
                &self,
                _: Request<proto::GetWeightVersionRequest>,
            ) -> Result<Response<proto::GetWeightVersionResponse>, Status> {
                Ok(Response::new(proto::GetWeightVersionResponse { weight_version: "default".to_string() }))
            }
        }
    };
}

unimplemented_methods! {
    load_lora: LoadLoraRequest -> LoadLoraResponse;
    unload_lora: UnloadLoraRequest -> UnloadLoraResponse;
    pause_generation: PauseGenerationRequest -> PauseGenerationResponse;
    resume_generation: ResumeGenerationRequest -> ResumeGenerationResponse;
    sleep: SleepRequest -> SleepResponse;
    wake_up: WakeUpRequest -> WakeUpResponse;
    init_weight_transfer_engine: InitWeightTransferEngineRequest -> InitWeightTransferEngineResponse;
    start_weight_update: StartWeightUpdateRequest -> StartWeightUpdateResponse;
    start_draft_weight_update: StartDraftWeightUpdateRequest -> StartDraftWeightUpdateResponse;
    update_weights: UpdateWeightsRequest -> UpdateWeightsResponse;
    finish_weight_update: FinishWeightUpdateRequest -> FinishWeightUpdateResponse;
    update_weight_version: UpdateWeightVersionRequest -> UpdateWeightVersionResponse;
}

impl Shared {
    fn server_info(&self) -> ServerInfo {
        let (stats, options) = (self.engine.stats(), self.engine.options());
        let ranks = self.engine.ranks();
        let parallelism = ParallelismInfo {
            tensor_parallel_size: ranks as u32,
            pipeline_parallel_size: 1,
            data_parallel_size: 1,
            decode_context_parallel_size: 1,
            world_size: ranks as u64,
            data_parallel_size_local: 1,
            ..ParallelismInfo::default()
        };
        ServerInfo {
            engine_version: format!("kvant {}", env!("CARGO_PKG_VERSION")),
            // Clients of vLLM check it.
            api_version: "vllm".to_string(),
            instance_id: self.instance.clone(),
            parallelism: Some(parallelism),
            max_model_len: self.engine.context() as u32,
            kv_block_size: stats.page_tokens as u32,
            total_kv_blocks: stats.pages as u64,
            max_running_requests: options.sequences as u64,
            max_batched_tokens: options.step_tokens as u64,
            proto_version: vllm_proto::VERSION.to_string(),
            effective_attention_block_size: Some(stats.page_tokens as u64),
            ..ServerInfo::default()
        }
    }

    fn model_info(&self) -> ModelInfo {
        let [name, aliases @ ..] = self.options.names.as_slice() else { return ModelInfo::default() };
        ModelInfo {
            model_id: self.options.source.as_ref().unwrap_or(name).clone(),
            served_model_name: name.clone(),
            served_model_aliases: aliases.iter().filter(|alias| *alias != "*").cloned().collect(),
            supports_text_input: true,
            supports_token_ids_input: true,
            ..ModelInfo::default()
        }
    }

    fn sources(&self) -> Vec<proto::KvEventSource> {
        let source = self.options.events.iter().map(|source| proto::KvEventSource {
            transport: "zmq".to_string(),
            endpoint: source.endpoint.clone(),
            topic: source.topic.clone(),
            replay_endpoint: source.replay.clone().unwrap_or_default(),
            data_parallel_rank: Some(0),
            encoding: "msgpack".to_string(),
            schema_version: 1,
            ..proto::KvEventSource::default()
        });
        source.collect()
    }
}
