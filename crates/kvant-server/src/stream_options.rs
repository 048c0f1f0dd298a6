//! The usage that a stream reports.

use serde::Deserialize;

use crate::{
    app::App,
    error::{ApiError, Result},
};

/// Options of a streamed response.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct StreamOptions {
    pub include_usage: Option<bool>,
    /// Whether every chunk has the usage so far, as in vLLM.
    pub continuous_usage_stats: Option<bool>,
    /// Requests padding that hides token lengths in encrypted traffic. The server adds none.
    pub include_obfuscation: Option<bool>,
}

/// The chunks of a stream that have the usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum UsageIn {
    #[default]
    None,
    /// A separate chunk at the end.
    Last,
    /// Every chunk, and a separate one at the end.
    Every,
}

impl StreamOptions {
    /// Returns the chunks that have the usage.
    pub fn usage(app: &App, options: Option<StreamOptions>, streams: bool) -> Result<UsageIn> {
        let Some(options) = options else { return Ok(UsageIn::None) };
        if !streams {
            return Err(ApiError::field("stream_options", "`stream_options` needs `stream`"));
        }
        if app.options.strict_fields && options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported("stream_options.include_obfuscation", "use TLS with padding"));
        }
        Ok(match (options.include_usage, options.continuous_usage_stats) {
            (Some(true), Some(true)) => UsageIn::Every,
            (Some(true), _) => UsageIn::Last,
            _ => UsageIn::None,
        })
    }
}
