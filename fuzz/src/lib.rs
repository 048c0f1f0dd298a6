//! What fuzz targets share.

use std::sync::Once;

use kvant_models::Tokenizer;

/// Makes panics that kvant-models turns into errors no failures: those of the crates below it. All others are.
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
