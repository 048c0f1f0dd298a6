//! Requests to an engine with the shipped model.

mod common;
mod drafters;
mod embeddings;
mod grammar;
mod groups;
mod hybrid;
mod hybrid_groups;
mod scheduling;
mod serving;
mod stored;
mod texts;
#[path = "../words/mod.rs"]
mod words;
