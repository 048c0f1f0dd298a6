//! Log probabilities as JSON.

use serde_json::Value;

/// The least log probability in answers: JSON has no infinity.
const LEAST: f32 = -9999.0;

/// A log probability as a number.
pub(crate) fn number(logprob: f32) -> Value {
    // Not NaN: `max` returns the other operand then.
    Value::from(f64::from(logprob.max(LEAST)))
}
