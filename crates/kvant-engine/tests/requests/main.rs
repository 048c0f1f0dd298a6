//! Requests to an engine with the shipped model.

mod common;
mod embeddings;
mod grammar;
mod groups;
mod hybrid;
mod scheduling;
mod serving;
mod stored;
mod texts;
#[path = "../words/mod.rs"]
mod words;
