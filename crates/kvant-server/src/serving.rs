//! The server, and the model of one request.

use std::{ops::Deref, sync::Arc};

use kvant_models::Result as ModelResult;

use crate::{
    app::App,
    blocking::blocking,
    error::{ApiError, Result},
    models::ModelLease,
};

/// Minimum bytes of a text that counts as long. The tokenizer takes some hundred bytes of memory per byte of text, so
/// only a few long texts are tokenised at a time.
const LONG_TEXT: usize = 256 << 10;

/// The server, and the model that a request uses. The model stays loaded while this exists.
pub(crate) struct Serving {
    app: Arc<App>,
    /// The name of the model in responses.
    pub name: String,
    pub model: ModelLease,
}

impl Deref for Serving {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Serving {
    /// Waits for the model that a request names. If it names none, the first.
    pub async fn of(app: &Arc<App>, asked: Option<&str>) -> Result<Arc<Serving>> {
        let (index, known) = app.models.find(asked).await?;
        let model = app.models.get(index, app.options.load_time).await?;
        let name = known.name().to_string();
        Ok(Arc::new(Serving { app: Arc::clone(app), name, model }))
    }

    /// The server without the model.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Runs long work, such as tokenising a long text, on a thread of its own.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Serving) -> T + Send + 'static,
    ) -> Result<T> {
        let serving = Arc::clone(self);
        blocking(move || work(&serving)).await
    }

    /// Like [`Serving::blocking`], for work that tokenises `bytes` bytes of text. Limits how many long texts are
    /// tokenised at the same time, and returns the memory of each to the system.
    pub async fn encoding<T: Send + 'static>(
        self: &Arc<Self>,
        bytes: usize,
        work: impl FnOnce(&Serving) -> T + Send + 'static,
    ) -> Result<T> {
        if bytes < LONG_TEXT {
            return self.blocking(work).await;
        }
        let place = Arc::clone(&self.long_texts).acquire_owned().await;
        self.blocking(move |serving| {
            let result = work(serving);
            if let Some(reclaim) = serving.options.reclaim {
                reclaim();
            }
            // The permit is released when the work is done, even if the client has disconnected.
            drop(place);
            result
        })
        .await
    }

    /// Tokenises a prompt. A text that certainly exceeds the context is rejected without tokenising it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.check_length(text)?;
        tokenized("prompt", self.model.engine.tokenizer().encode_prompt(text))
    }

    /// Tokenises a text to embed. A text that certainly exceeds the context is rejected without tokenising it.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        self.check_length(text)?;
        tokenized("prompt", self.model.engine.tokenizer().encode_whole(text))
    }

    fn check_length(&self, text: &str) -> Result<()> {
        let (min_tokens, limit) = (self.model.engine.tokenizer().min_tokens(text), self.model.engine.context());
        match min_tokens > limit {
            true => Err(ApiError::of_text("prompt", &kvant_models::Error::TooLong { min_tokens, limit })),
            false => Ok(()),
        }
    }

    /// The bytes of one token within a text. Special tokens are shown by name.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.model.engine.tokenizer().token_bytes(id).unwrap_or_default()
    }

    /// The text of one token. Special tokens are shown by name. A token that begins or ends within a character is shown
    /// as bytes, as in `bytes:\xf0\x9f`, so that distinct tokens have distinct texts.
    pub fn token_text(&self, id: u32) -> String {
        bytes_text(&self.token_bytes(id))
    }
}

/// Bytes as text if they are valid UTF-8, or escaped in OpenAI's format.
pub(crate) fn bytes_text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| escaped(bytes), str::to_string)
}

/// Bytes escaped in OpenAI's format.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    format!("bytes:{}", bytes.escape_ascii())
}

/// Attributes an error of the tokenizer to a field.
pub(crate) fn tokenized<T>(field: &str, result: ModelResult<T>) -> Result<T> {
    result.map_err(|error| ApiError::of_text(field, &error))
}
