//! Tensors of the blocks' rotary embeddings.

use kvant::{
    Device, Tensor,
    ops::{Angles, PairLayout, Rope},
};

use crate::{
    Error, Result,
    spec::{DecoderSpec, LongRope, RopeSpec},
};

/// Maximum angles of a table, which is 32 MiB then. The limit exists because the file is untrusted.
const MAX_TABLE: usize = 1 << 23;

/// The rotary embedding of a block. Equal ones share tensors.
#[derive(Clone)]
pub(super) enum BlockRope {
    /// The factors of the frequencies, f32 `[rotated_pairs]`.
    Factors(Option<Tensor>),
    /// Cosines and sines, f32 `[P, rotated_pairs]`.
    Tables { cos: Tensor, sin: Tensor },
}

/// The rotary embedding of each block; `None` if nothing rotates. `context` is the maximum length of a text, for
/// LongRoPE.
pub(super) fn of_blocks(spec: &DecoderSpec, device: &Device, context: Option<usize>) -> Result<Vec<Option<BlockRope>>> {
    let rope = |l: usize| spec.blocks[l].attention().map(|attention| (&attention.rope, attention.head_dim));
    let mut ropes: Vec<Option<BlockRope>> = Vec::with_capacity(spec.blocks.len());
    for l in 0..spec.blocks.len() {
        let of_block = match (rope(l), (0..l).find(|&m| rope(m) == rope(l))) {
            (_, Some(m)) => ropes[m].clone(),
            (Some((rope, head_dim)), None) if rope.rotated_pairs > 0 => {
                Some(BlockRope::new(rope, head_dim, device, context)?)
            }
            _ => None,
        };
        ropes.push(of_block);
    }
    Ok(ropes)
}

impl BlockRope {
    fn new(rope: &RopeSpec, head_dim: usize, device: &Device, context: Option<usize>) -> Result<BlockRope> {
        let long = rope.long.as_ref().zip(context);
        let factors = match long {
            Some((long, context)) if context > long.original => Some(&long.factors),
            _ => rope.factors.as_ref(),
        };
        if let Some((long, context)) = long.filter(|(long, _)| long.magnitude != 1.0) {
            return tables(rope, factors, head_dim, device, long, context);
        }
        let tensor = |factors: &Vec<f32>| Tensor::from_slice(device, factors, &[factors.len()]);
        Ok(BlockRope::Factors(factors.map(tensor).transpose()?))
    }

    /// The argument of operations.
    pub(super) fn operand(&self, spec: &RopeSpec) -> Rope<'_> {
        let (angles, factors) = match self {
            BlockRope::Factors(factors) => (Angles::Theta(spec.theta), factors.as_ref()),
            BlockRope::Tables { cos, sin } => (Angles::Tables { cos, sin }, None),
        };
        Rope::new(angles, spec.rotated_pairs).layout(spec.layout).freq_factors(factors)
    }
}

/// Tables of cosines and sines, for factors that frequencies cannot express.
fn tables(
    rope: &RopeSpec,
    factors: Option<&Vec<f32>>,
    head_dim: usize,
    device: &Device,
    long: &LongRope,
    context: usize,
) -> Result<BlockRope> {
    let (pairs, magnitude) = (rope.rotated_pairs, f64::from(long.magnitude));
    let max = MAX_TABLE / pairs;
    if context > max {
        return Err(Error::argument("context", format_args!("at most {max} for this model"), context));
    }
    let n = if rope.layout == PairLayout::Halves { head_dim } else { 2 * pairs } as f64;
    let frequency = |i: usize| rope.theta.powf(-2.0 * i as f64 / n) / factors.map_or(1.0, |all| f64::from(all[i]));
    let frequencies: Vec<f64> = (0..pairs).map(frequency).collect();
    let table = |of: fn(f64) -> f64| {
        let mut values = Vec::with_capacity(context * pairs);
        for position in 0..context {
            values.extend(frequencies.iter().map(|frequency| (magnitude * of(position as f64 * frequency)) as f32));
        }
        Ok::<_, Error>(Tensor::from_slice(device, &values, &[context, pairs])?)
    };
    Ok(BlockRope::Tables { cos: table(f64::cos)?, sin: table(f64::sin)? })
}
