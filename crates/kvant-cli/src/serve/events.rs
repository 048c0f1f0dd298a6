//! `--kv-events`: publishes which prefixes are cached.

use kvant_engine::{CacheScope, Engine};
use kvant_events::{Publisher, Salt};

use super::args::ServeArgs;
use crate::Result;

/// Publishes the prefixes of an engine, if the command asks for it.
pub fn publish(args: &ServeArgs, engine: &Engine) -> Result {
    let Some(address) = &args.kv_events else { return Ok(()) };
    let publisher = Publisher::new(address, engine.options().page_tokens).topic(&args.kv_events_topic).salts(salt);
    let publisher = match &args.kv_events_replay {
        Some(address) => publisher.replay(address),
        None => publisher,
    };
    let engine = engine.clone();
    publisher.start(move |report| engine.watch_prefixes(report)).map_err(|error| format!("--kv-events: {error}"))?;
    Ok(())
}

/// Routers know the salts that clients choose. Prefixes of API keys are not published.
fn salt(salt: &[u8]) -> Salt {
    match CacheScope::salt_of(salt) {
        Some("") => Salt::None,
        Some(salt) => Salt::Known(salt.to_string()),
        None => Salt::Secret,
    }
}
