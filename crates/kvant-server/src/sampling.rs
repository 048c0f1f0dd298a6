//! Request fields for sampling and for the end of a text.

use kvant_engine::EngineRequest;
use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

use crate::{
    error::{self, ApiError},
    ids::random,
    serving::Serving,
};

/// One string or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(crate) enum Strings {
    One(String),
    Many(Vec<String>),
}

impl Strings {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Strings::One(string) => vec![string],
            Strings::Many(strings) => strings,
        }
    }
}

/// Maximum tokens of an answer. -1 means no limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenLimit(pub usize);

impl<'de> Deserialize<'de> for TokenLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenLimit, D::Error> {
        let Whole(number) = Whole::deserialize(deserializer)?;
        match number {
            -1 => Ok(TokenLimit(usize::MAX)),
            0.. => Ok(TokenLimit(usize::try_from(number).unwrap_or(usize::MAX))),
            _ => Err(D::Error::custom(format_args!("must be at least 0, or -1 for no limit, got {number}"))),
        }
    }
}

/// A seed: 64 bits, signed or unsigned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seed(pub u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Seed, D::Error> {
        // Negative seeds map to the upper half.
        Whole::deserialize(deserializer).map(|Whole(number)| Seed(number as u64))
    }
}

/// A priority. Higher ones run first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Priority(pub i8);

impl<'de> Deserialize<'de> for Priority {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Priority, D::Error> {
        let Whole(number) = Whole::deserialize(deserializer)?;
        let out_of_range = |_| D::Error::custom(format_args!("must be from {} to {}, got {number}", i8::MIN, i8::MAX));
        i8::try_from(number).map(Priority).map_err(out_of_range)
    }
}

/// A 64-bit integer, signed or unsigned.
struct Whole(i128);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Whole, D::Error> {
        struct OfWhole;

        impl Visitor<'_> for OfWhole {
            type Value = Whole;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an integer")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(number.into()))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Whole, E> {
                Ok(Whole(number.into()))
            }
        }

        deserializer.deserialize_i64(OfWhole)
    }
}

/// The sampling fields, declared once: calls `$then! { $head fields }`. serde's `flatten` would hide unknown fields, so
/// requests have the fields themselves.
macro_rules! with_sampling_fields {
    ($then:ident! $head:tt) => {
        $crate::sampling::$then! { $head
            temperature: Option<f32>,
            top_p: Option<f32>,
            top_k: Option<i64>,
            min_p: Option<f32>,
            seed: Option<$crate::sampling::Seed>,
            presence_penalty: Option<f32>,
            frequency_penalty: Option<f32>,
            repetition_penalty: Option<f32>,
            logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            stop: Option<$crate::sampling::Strings>,
            stop_token_ids: Option<Vec<u32>>,
            ignore_eos: Option<bool>,
            min_tokens: Option<usize>,
            include_stop_str_in_output: Option<bool>,
            skip_special_tokens: Option<bool>,
            priority: Option<$crate::sampling::Priority>,
        }
    };
}
pub(crate) use with_sampling_fields;

/// Declares a struct of the sampling fields.
macro_rules! sampling_struct {
    ({ $(#[$meta:meta])* struct $name:ident } $($field:ident: $type:ty,)*) => {
        $(#[$meta])*
        pub(crate) struct $name {
            $(pub $field: $type,)*
        }
    };
}
pub(crate) use sampling_struct;

with_sampling_fields! { sampling_struct! {
    /// The fields shared by completions and chat completions.
    #[derive(Clone, Debug, Default)]
    struct SamplingFields
} }

/// Declares a request with fields of its own and the sampling fields, which its `sampling_fields` moves out.
macro_rules! sampling_request {
    (struct $($request:tt)*) => {
        $crate::sampling::with_sampling_fields! { sampling_request! { struct $($request)* } }
    };
    ({ struct $name:ident { $($(#[$meta:meta])* $own:ident: $own_type:ty,)* } } $($field:ident: $type:ty,)*) => {
        #[derive(Debug, serde::Deserialize)]
        pub(crate) struct $name {
            $($(#[$meta])* pub $own: $own_type,)*
            $($field: $type,)*
        }

        impl $name {
            fn sampling_fields(&mut self) -> $crate::sampling::SamplingFields {
                $crate::sampling::SamplingFields { $($field: self.$field.take(),)* }
            }
        }
    };
}
pub(crate) use sampling_request;

/// Maximum absolute value of a bias or a penalty.
const MAX_BIAS: f32 = 100.0;

impl SamplingFields {
    /// Sets the fields in a request. Absent fields get the server's defaults.
    pub fn apply(self, request: EngineRequest, app: &Serving) -> error::Result<EngineRequest> {
        let default = &app.model.sampling;
        let top_k = match self.top_k {
            None => default.top_k,
            // Values above the size of the vocabulary have no effect.
            Some(top_k @ -1..) => usize::try_from(top_k).unwrap_or(0),
            Some(top_k) => {
                let message = format!("`top_k` must be at least 0, or -1 for all, got {top_k}");
                return Err(ApiError::field("top_k", message));
            }
        };
        let mut sampling = default
            .clone()
            .temperature(self.temperature.unwrap_or(default.temperature))
            .top_p(self.top_p.unwrap_or(default.top_p))
            .top_k(top_k)
            .min_p(self.min_p.unwrap_or(default.min_p))
            .seed(self.seed.map_or_else(random, |Seed(seed)| seed))
            .presence_penalty(self.presence_penalty.unwrap_or(default.presence_penalty))
            .frequency_penalty(self.frequency_penalty.unwrap_or(default.frequency_penalty))
            .repetition_penalty(self.repetition_penalty.unwrap_or(default.repetition_penalty));
        if let Some(bias) = self.logit_bias {
            sampling.logit_bias = bias.into_iter().map(logit_bias).collect::<error::Result<_>>()?;
        }
        let stop = self.stop.map(Strings::into_vec).unwrap_or_default();
        let mut ids = self.stop_token_ids.unwrap_or_default();
        if !self.ignore_eos.unwrap_or(false) {
            ids.extend(app.model.engine.tokenizer().eos());
        }
        let mut request = request
            .sampling(sampling)
            .stop(stop)
            .stop_ids(ids)
            .min_tokens(self.min_tokens.unwrap_or(0))
            .include_stop(self.include_stop_str_in_output.unwrap_or(false))
            .priority(self.priority.map_or(0, |Priority(priority)| priority));
        if self.skip_special_tokens == Some(false) {
            request = request.special_tokens(true);
        }
        Ok(request)
    }
}

/// A bias of -100 forbids a token.
fn logit_bias((id, bias): (String, f32)) -> error::Result<(u32, f32)> {
    let invalid = |expected: &str, got: String| {
        Err(ApiError::field("logit_bias", format!("`logit_bias` must have {expected}, got {got}")))
    };
    match id.parse() {
        _ if !(-MAX_BIAS..=MAX_BIAS).contains(&bias) => invalid("values from -100 to 100", bias.to_string()),
        Ok(id) if bias == -MAX_BIAS => Ok((id, f32::NEG_INFINITY)),
        Ok(id) => Ok((id, bias)),
        Err(_) => invalid("token ids as keys", format!("{:?}", id.chars().take(32).collect::<String>())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_limits() {
        let seed = |json: &str| serde_json::from_str::<Seed>(json).ok().map(|Seed(seed)| seed);
        assert_eq!((seed("0"), seed("18446744073709551615")), (Some(0), Some(u64::MAX)));
        assert_eq!((seed("-1"), seed("-9223372036854775808")), (Some(u64::MAX), Some(1 << 63)));
        assert_eq!((seed("18446744073709551616"), seed("1.5"), seed("\"1\"")), (None, None, None));
        let limit = |json: &str| serde_json::from_str::<TokenLimit>(json).ok().map(|TokenLimit(limit)| limit);
        assert_eq!((limit("0"), limit("7"), limit("-1")), (Some(0), Some(7), Some(usize::MAX)));
        assert_eq!((limit("-2"), limit("0.5")), (None, None));
        assert_eq!(serde_json::from_str::<Priority>("-128").unwrap(), Priority(-128));
        let error = serde_json::from_str::<Priority>("300").unwrap_err().to_string();
        assert!(error.contains("from -128 to 127, got 300"), "{error}");
    }
}
