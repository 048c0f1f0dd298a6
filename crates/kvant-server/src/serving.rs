//! The server with the model of one request.

use std::{ops::Deref, sync::Arc};

use kvant_models::Result as ModelResult;

use crate::{
    app::{App, blocking},
    error::{ApiError, Result},
    models::ModelLease,
};

/// Texts from this length on wait for each other: the tokenizer takes some hundred bytes for each of theirs.
const LONG_TEXT: usize = 256 << 10;

/// The server, and the model that a request uses. The model stays loaded while this exists.
pub(crate) struct Serving {
    app: Arc<App>,
    /// The name of the model in answers.
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
    /// Waits for the model that a request names; the first one if it names none.
    pub async fn of(app: &Arc<App>, asked: Option<&str>) -> Result<Arc<Serving>> {
        let index = app.models.find(asked)?;
        let model = app.models.get(index, app.options.load_time).await?;
        let name = app.models.known()[index].name().to_string();
        Ok(Arc::new(Serving { app: Arc::clone(app), name, model }))
    }

    /// The server without the model.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Runs what takes long on a thread of its own, such as to tokenise a long text.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Serving) -> T + Send + 'static,
    ) -> Result<T> {
        let serving = Arc::clone(self);
        blocking(move || work(&serving)).await
    }

    /// As [`Serving::blocking`], for work that tokenises `bytes` bytes of text. Only a few long texts are tokenised at
    /// once, so that many do not take all memory, and the memory of each goes back to the system.
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
            // The client may have gone long ago: the place is free when the work is done.
            drop(place);
            result
        })
        .await
    }

    /// The ids of a prompt. One that must have more tokens than the context is not tokenised.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.check_length(text)?;
        tokenized("prompt", self.model.engine.tokenizer().encode_prompt(text))
    }

    /// The ids of a text that is embedded. One that must have more tokens than the context is not tokenised.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        self.check_length(text)?;
        tokenized("prompt", self.model.engine.tokenizer().encode_whole(text))
    }

    fn check_length(&self, text: &str) -> Result<()> {
        let (least, limit) = (self.model.engine.tokenizer().min_tokens(text), self.model.engine.context());
        match least > limit {
            true => Err(ApiError::of_text("prompt", &kvant_models::Error::TooLong { least, limit })),
            false => Ok(()),
        }
    }

    /// The bytes of one token within a text, special ones by their names.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.model.engine.tokenizer().token_bytes(id).unwrap_or_default()
    }

    /// The text of one token, special ones by their names. A token that begins or ends within a character is shown by
    /// its bytes, as in `bytes:\xf0\x9f`, so that different tokens stay different.
    pub fn token_text(&self, id: u32) -> String {
        bytes_text(&self.token_bytes(id))
    }
}

/// Bytes as text if they are UTF-8, or with escapes, in OpenAI's form.
pub(crate) fn bytes_text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| escaped(bytes), str::to_string)
}

/// Bytes with escapes, in OpenAI's form.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    format!("bytes:{}", bytes.escape_ascii())
}

/// An error of the tokenizer is about the text.
pub(crate) fn tokenized<T>(field: &str, result: ModelResult<T>) -> Result<T> {
    result.map_err(|error| ApiError::of_text(field, &error))
}
