//! Measures the energy of keys and values in the means of pages, and the coordinates that a codebook clips.

use kvant::{
    Codec, Tensor,
    codec::{self, TurboQuant},
    ops::KvSide,
};
use kvant_models::Logits;

use super::data::{PageData, SideNumbers};
use crate::{Result, measure::Measurement, progress::Progress, vectors};

/// Sums over one side of a layer.
#[derive(Clone, Copy, Default)]
struct Sums {
    energy: f64,
    of_means: f64,
    clipped: f64,
    heads: f64,
}

/// Measures all layers. Returns `None` if no window fills a page. Counts processed tokens in `progress`.
pub fn measure(bits: u32, measurement: &Measurement, progress: &mut Progress) -> Result<Option<PageData>> {
    let Measurement { model, ref windows, page_tokens, .. } = *measurement;
    let Codec::TurboQuant(turbo) = Codec::tq(bits) else { unreachable!("tq makes TurboQuant") };
    let pool = measurement.pool(&Codec::F32.into())?;
    let layers = pool.spec().layers.len();
    let mut sums = vec![[Sums::default(); 2]; layers];
    let mut sequence = pool.sequence();
    for window in windows {
        sequence.truncate(0)?;
        for page in window.chunks_exact(page_tokens) {
            let start = sequence.len();
            model.feed(&mut sequence, page, Logits::Last)?;
            let step = pool.step(&mut [(&mut sequence, 0)])?;
            for (layer, sums) in sums.iter_mut().enumerate() {
                for (side, sums) in [KvSide::K, KvSide::V].into_iter().zip(sums) {
                    let vectors = vectors::read(&pool, layer, side, &step, start..start + page_tokens)?;
                    let spec = pool.layer(layer)?.spec();
                    sums.add(turbo, &vectors, [page_tokens, spec.kv_heads, spec.head_dim], measurement)?;
                }
            }
            progress.add(page_tokens);
        }
        progress.add(window.len() % page_tokens);
    }
    if sums.iter().flatten().all(|sums| sums.heads == 0.0) {
        return Ok(None);
    }
    let sides = |number: &dyn Fn(&Sums) -> f64| SideNumbers {
        keys: sums.iter().map(|sums| number(&sums[0])).collect(),
        values: sums.iter().map(|sums| number(&sums[1])).collect(),
    };
    Ok(Some(PageData {
        page_tokens,
        mean_share: sides(&|sums| if sums.energy > 0.0 { sums.of_means / sums.energy } else { 0.0 }),
        bits,
        clipped: sides(&|sums| sums.clipped / sums.heads),
        clipped_normal: clipped_normal(codec::centroids(bits)?.last().copied().map_or(0.0, f64::from)),
    }))
}

impl Sums {
    /// Adds the vectors of a page, `[P, Hk, D]`.
    fn add(&mut self, turbo: TurboQuant, vectors: &[f64], shape: [usize; 3], measurement: &Measurement) -> Result {
        let token = shape[1] * shape[2];
        let mut means = vec![0.0; token];
        for vector in vectors.chunks_exact(token) {
            means.iter_mut().zip(vector).for_each(|(mean, x)| *mean += x / shape[0] as f64);
        }
        self.energy += vectors.iter().map(|x| x * x).sum::<f64>();
        self.of_means += shape[0] as f64 * means.iter().map(|m| m * m).sum::<f64>();
        let around: Vec<f32> = vectors.iter().zip(means.iter().cycle()).map(|(x, mean)| (x - mean) as f32).collect();
        for head in codec::stats(&Tensor::from_slice(measurement.model.device(), &around, &shape)?, turbo)? {
            self.clipped += head.clip_fraction;
            self.heads += 1.0;
        }
        Ok(())
    }
}

/// The fraction of normally distributed numbers beyond ±c, by Simpson's rule.
fn clipped_normal(c: f64) -> f64 {
    const STEPS: usize = 1000;
    let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    let h = c / STEPS as f64;
    let weight = |i: usize| if i == 0 || i == STEPS { 1.0 } else { [2.0, 4.0][i % 2] };
    let half: f64 = (0..=STEPS).map(|i| weight(i) * density(i as f64 * h)).sum::<f64>() * h / 3.0;
    1.0 - 2.0 * half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_beyond_a_border() {
        for (c, want) in [(1.0, 0.317_310_507_862_914), (2.7326, 6.283_4e-3), (0.0, 1.0)] {
            assert!((clipped_normal(c) - want).abs() < 1e-6, "{c}: {}", clipped_normal(c));
        }
    }
}
