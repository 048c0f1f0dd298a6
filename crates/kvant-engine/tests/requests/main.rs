//! Requests to an engine with the model that ships.

mod common;
mod embeddings;
mod grammar;
mod scheduling;
mod serving;
mod texts;
#[path = "../words/mod.rs"]
mod words;
