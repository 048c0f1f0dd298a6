//! Shared by the fuzz targets.

use std::sync::Once;

use kvant_models::Tokenizer;

/// Ignores panics that kvant-models converts to errors. All other panics are failures.
pub fn allow_caught_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let abort = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !Tokenizer::catches_panics() {
                abort(info);
            }
        }));
    });
}
