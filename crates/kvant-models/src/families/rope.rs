//! Scalings of rotary embeddings (linear, llama3, YaRN), expressed as factors of the frequencies.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use super::{kind::Kind, limits::MAX_POSITIONS};
use crate::{Result, config::fields::Fields};

/// A base and its scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scaling {
    theta: f64,
    kind: ScalingKind,
    /// The fraction of a head's coordinates that rotate, starting with the first.
    share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ScalingKind {
    None,
    /// Divides every frequency.
    Linear(f64),
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original: f64,
    },
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original: f64,
        /// Whether the ends of the ramp are rounded to integers.
        truncate: bool,
        attention_factor: f64,
    },
}

const ORIGINAL: &str = "original_max_position_embeddings";
const FACTOR: &str = "a number from 1e-3 to 1e6";

impl Scaling {
    /// Reads `rope_theta` and the scaling [`object`]. `theta` is the default base of both.
    pub(super) fn parse(text: &Fields, theta: f64) -> Result<Scaling> {
        Scaling::parse_partial(text, theta, 1.0)?.whole(text)
    }

    /// Like [`Scaling::parse`], for families with partially rotated heads: reads `partial_rotary_factor` with the
    /// default `share`.
    pub(super) fn parse_partial(text: &Fields, theta: f64, share: f64) -> Result<Scaling> {
        let base = theta_of(text, Some(theta))?;
        match object(text)? {
            Some(fields) => Scaling::of_partial(&fields, text, theta_of(&fields, Some(base))?, original, share),
            None => Ok(Scaling { theta: base, kind: ScalingKind::None, share: share_of(&[text], share)? }),
        }
    }

    /// Reads the object of one layer kind, in files with an object per kind. For these, transformers ignores
    /// `original_max_position_embeddings` and `truncate`, which other programs read.
    pub(super) fn of_kind(fields: &Fields, text: &Fields, theta: f64) -> Result<Scaling> {
        match fields.get("truncate") {
            None | Some(Value::Bool(true)) => {}
            Some(other) => return Err(fields.error("truncate", "absent or true for a kind of layer", other)),
        }
        let original = |fields: &Fields, text: &Fields| match fields.size_or_null(ORIGINAL, MAX_POSITIONS)? {
            Some(own) => Ok(own),
            None => max_positions(fields, text),
        };
        Scaling::of_partial(fields, text, theta, original, 1.0)?.whole(fields)
    }

    /// The base and the fraction of rotated coordinates in `text` and its scaling object `fields`, for scaling types
    /// that a family reads itself.
    pub(super) fn unscaled(text: &Fields, fields: &Fields, theta: f64) -> Result<Scaling> {
        let theta = theta_of(fields, Some(theta_of(text, Some(theta))?))?;
        Ok(Scaling { theta, kind: ScalingKind::None, share: share_of(&[fields, text], 1.0)? })
    }

    /// The scalings of sliding and of full layers. `rope_parameters` has an object for each kind; older files have
    /// `rope_scaling` for full layers. Each completes the other. `thetas` are the bases of objects without one.
    pub(super) fn of_kinds(text: &Fields, thetas: [f64; 2]) -> Result<[Scaling; 2]> {
        let none = Map::new();
        let empty = text.with_keys(&none);
        let parameters = text.object("rope_parameters")?;
        let all = parameters.as_ref().unwrap_or(&empty);
        // Transformers ignores keys outside the objects; other programs read them.
        if let Some(key) = all.keys().find(|key| ![Kind::Sliding, Kind::Full].map(Kind::name).contains(key)) {
            return Err(all.error(key, "in the objects of sliding_attention and full_attention", "a key beside them"));
        }
        // Transformers modifies the full layers' object, and keeps its `rope_type` if a file uses the key's old name.
        let changes = text.object("rope_scaling")?;
        if changes.is_some() && parameters.is_some() && all.get(Kind::Full.name()).is_none() {
            return Err(all.missing(Kind::Full.name(), "an object, which rope_scaling changes"));
        }
        if let Some(old) = changes.as_ref().filter(|changes| changes.get("rope_type") != changes.get("type")) {
            old.string("rope_type")?.ok_or_else(|| old.missing("rope_type", "the type"))?;
        }
        let of = |kind: Kind, changes: Option<Fields>, theta: f64| {
            let own = all.object(kind.name())?;
            let mut keys = own.as_ref().map(|own| own.map().clone()).unwrap_or_default();
            keys.extend(changes.iter().flat_map(|changes| changes.map().clone()));
            let fields = own.or(changes).unwrap_or_else(|| empty.clone());
            let fields = fields.with_keys(&keys);
            Scaling::of_kind(&fields, text, theta_of(&fields, Some(theta))?)
        };
        let full = of(Kind::Full, changes, thetas[1])?;
        Ok([of(Kind::Sliding, None, thetas[0])?, full])
    }

    /// Rejects partially rotated heads.
    fn whole(self, fields: &Fields) -> Result<Scaling> {
        if self.share == 1.0 {
            return Ok(self);
        }
        Err(fields.error("partial_rotary_factor", "absent or 1", self.share))
    }

    /// Reads an object with `rope_type` and its parameters. `original` returns the context length before scaling.
    fn of_partial(
        fields: &Fields,
        text: &Fields,
        theta: f64,
        original: impl Fn(&Fields, &Fields) -> Result<usize>,
        share: f64,
    ) -> Result<Scaling> {
        let factor = || fields.float("factor", None, FACTOR, |f| (1e-3..=1e6).contains(&f));
        let kind = match type_of(fields)? {
            "default" => ScalingKind::None,
            "linear" => ScalingKind::Linear(factor()?),
            "llama3" => llama3(fields, factor()?, original(fields, text)? as f64)?,
            "yarn" => yarn(fields, factor()?, original(fields, text)? as f64)?,
            other => {
                let expected = "\"default\", \"linear\", \"llama3\" or \"yarn\"";
                return Err(fields.error("rope_type", expected, format_args!("{other:?}")));
            }
        };
        Ok(Scaling { theta, kind, share: share_of(&[fields, text], share)? })
    }

    /// No scaling.
    pub(super) fn none(theta: f64) -> Scaling {
        Scaling { theta, kind: ScalingKind::None, share: 1.0 }
    }

    pub(super) fn theta(&self) -> f64 {
        self.theta
    }

    /// The rotated pairs of a head; 0 if the fraction does not give an integer.
    pub(super) fn rotated_pairs(&self, head_dim: usize) -> usize {
        let rotated = (head_dim as f64 * self.share) as usize;
        if rotated.is_multiple_of(2) { rotated / 2 } else { 0 }
    }

    /// The scale of scores, given the scale of a model without scaling. YaRN's attention factor applies to the cosines
    /// and sines of both queries and keys.
    pub(super) fn score_scale(&self, plain: f64) -> f32 {
        match self.kind {
            ScalingKind::Yarn { attention_factor, .. } => (plain * attention_factor * attention_factor) as f32,
            _ => plain as f32,
        }
    }

    /// The factors that divide the frequencies of a fully rotated head; `None` if all are 1.
    pub(super) fn factors(&self, head_dim: usize) -> Option<Vec<f32>> {
        let pairs = head_dim / 2;
        let frequency = |i: usize| self.theta.powf(-(i as f64) / pairs as f64);
        match self.kind {
            ScalingKind::None => None,
            ScalingKind::Linear(factor) => Some(vec![factor as f32; pairs]),
            ScalingKind::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let of_pair = |i: usize| {
                    // Turns within the original context: fast pairs are unchanged, slow ones are scaled.
                    let rotations = original * frequency(i) / (2.0 * PI);
                    let smooth = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                };
                Some((0..pairs).map(of_pair).collect())
            }
            ScalingKind::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                // The pair that makes this number of turns within the original context.
                let pair = |rotations: f64| pairs as f64 * (original / (rotations * 2.0 * PI)).ln() / self.theta.ln();
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let of_pair = |i: usize| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 / (interpolated / factor + 1.0 - interpolated)) as f32
                };
                Some((0..pairs).map(of_pair).collect())
            }
        }
    }
}

/// `partial_rotary_factor` of the first object that has it.
fn share_of(all: &[&Fields], default: f64) -> Result<f64> {
    for fields in all {
        let share =
            fields.float_or_null("partial_rotary_factor", "above 0, at most 1", |share| share > 0.0 && share <= 1.0)?;
        if let Some(share) = share {
            return Ok(share);
        }
    }
    Ok(default)
}

pub(super) fn theta_of(fields: &Fields, default: Option<f64>) -> Result<f64> {
    fields.float("rope_theta", default, "a number from 1 to 1e12", |t| (1.0..=1e12).contains(&t))
}

/// `rope_type`, or the key's old name, which MLX reads first.
pub(super) fn type_of<'a>(fields: &Fields<'a>) -> Result<&'a str> {
    let (new, old) = (fields.string("rope_type")?, fields.string("type")?);
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            let expected = format_args!("absent or the same as rope_type, {new:?}");
            Err(fields.error("type", expected, format_args!("{old:?}")))
        }
        (new, old) => Ok(new.or(old).unwrap_or("default")),
    }
}

/// The scaling object of all layers. As in transformers, `rope_scaling` replaces `rope_parameters` unless it is empty.
pub(super) fn object<'a>(text: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    match text.object("rope_scaling")?.filter(|scaling| !scaling.map().is_empty()) {
        Some(scaling) => Ok(Some(scaling)),
        None => text.object("rope_parameters"),
    }
}

/// The context length before scaling. As in transformers, the model's key takes precedence over the scaling's.
fn original(fields: &Fields, text: &Fields) -> Result<usize> {
    for fields in [text, fields] {
        if let Some(original) = fields.size_or_null(ORIGINAL, MAX_POSITIONS)? {
            return Ok(original);
        }
    }
    max_positions(fields, text)
}

/// The context length before scaling that a model gets after loading: transformers completes it only for some types.
pub(super) fn visible_original(fields: &Fields, text: &Fields) -> Result<usize> {
    match type_of(fields)? {
        "llama3" | "yarn" => original(fields, text),
        _ => fields.size(ORIGINAL, None, MAX_POSITIONS),
    }
}

fn max_positions(fields: &Fields, text: &Fields) -> Result<usize> {
    let positions = text.size_or_null("max_position_embeddings", MAX_POSITIONS)?;
    positions.ok_or_else(|| fields.missing(ORIGINAL, "a number of positions"))
}

fn llama3(fields: &Fields, factor: f64, original: f64) -> Result<ScalingKind> {
    let positive = |key: &str| fields.float(key, None, "above 0, at most 1e6", |f| f > 0.0 && f <= 1e6);
    let (low_freq_factor, high_freq_factor) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
    if high_freq_factor <= low_freq_factor {
        let expected = format_args!("above low_freq_factor, {low_freq_factor}");
        return Err(fields.error("high_freq_factor", expected, high_freq_factor));
    }
    Ok(ScalingKind::Llama3 { factor, low_freq_factor, high_freq_factor, original })
}

fn yarn(fields: &Fields, factor: f64, original: f64) -> Result<ScalingKind> {
    let positive = |key: &str| fields.float_or_null(key, "above 0, at most 1e6", |f| f > 0.0 && f <= 1e6);
    let not_negative = |key: &str| fields.float_or_null(key, "from 0 to 1e6", |f| (0.0..=1e6).contains(&f));
    let (beta_fast, beta_slow) = (positive("beta_fast")?.unwrap_or(32.0), positive("beta_slow")?.unwrap_or(1.0));
    if beta_fast < beta_slow {
        return Err(fields.error("beta_fast", format_args!("at least beta_slow, {beta_slow}"), beta_fast));
    }
    let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    // 0 counts as absent.
    let weight = |key: &str| not_negative(key).map(|weight| weight.filter(|&weight| weight != 0.0));
    let attention_factor = match (not_negative("attention_factor")?, weight("mscale")?, weight("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(mscale_of), Some(all)) => mscale(mscale_of) / mscale(all),
        _ => mscale(1.0),
    };
    // Null means false.
    let truncate = fields.bool_or_null("truncate")?.unwrap_or(fields.get("truncate").is_none());
    Ok(ScalingKind::Yarn { factor, beta_fast, beta_slow, original, truncate, attention_factor })
}
