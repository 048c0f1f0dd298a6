//! The field `kv_transfer_params`: prompts that one worker computes and another continues.

use std::{sync::Arc, time::Instant};

use kvant_engine::EngineRequest;
use kvant_transfer::{Offered, TransferParams};

use crate::serving::Serving;

impl Serving {
    /// Fetches the pages of a prompt that another worker has computed. If this fails, the prompt is computed here.
    pub async fn fetch_prompt(self: &Arc<Self>, params: Option<&TransferParams>, request: Option<&EngineRequest>) {
        let (Some(params), Some(request)) = (params.filter(|params| params.has_source()), request) else { return };
        let (params, request, started) = (params.clone(), request.clone(), Instant::now());
        let fetched = match self.transfers.get().cloned() {
            None => Err("this server does not transfer pages".to_string()),
            Some(transfers) => {
                let fetched = self.blocking(move |serving| transfers.fetch(&serving.model.engine, &request, &params));
                match fetched.await {
                    Ok(fetched) => fetched.map_err(|error| error.to_string()),
                    Err(error) => Err(error.message),
                }
            }
        };
        let ms = started.elapsed().as_millis() as u64;
        match fetched {
            Ok(pages) => tracing::info!(pages, ms, "fetched the pages of a prompt"),
            Err(reason) => tracing::warn!(reason, "`kv_transfer_params` is of no use: the prompt is computed here"),
        }
    }

    /// Offers the pages of a prompt to another worker, if the request asks for it.
    pub fn offer_prompt(
        self: &Arc<Self>,
        params: Option<&TransferParams>,
        request: Option<&EngineRequest>,
    ) -> Option<Offered> {
        self.transfers.get()?.offer(&self.model.engine, request?, params?, Arc::clone(self))
    }
}
