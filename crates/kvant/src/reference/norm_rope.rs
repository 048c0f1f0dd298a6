use super::{check_len, hadamard, io, rms_norm};
use crate::{
    Error, Result,
    ops::{
        PairLayout,
        norm_rope::{AnglesCall, Call, NormCall, RopeCall},
    },
};

/// The angles of the pairs at a position: position · theta^(−2i/`base`) / factorᵢ.
///
/// `base` is D for [`PairLayout::Halves`], 2·pairs for the other layouts. Without `factors`, each factor is 1.
///
/// # Errors
/// `Shape` if the number of factors is not `pairs`, `OutOfMemory`.
pub fn rope_angles(position: u32, theta: f64, base: usize, pairs: usize, factors: Option<&[f64]>) -> Result<Vec<f64>> {
    check_len("rope_angles", "factors", pairs, factors.map_or(pairs, <[f64]>::len))?;
    let angle = |i: usize| {
        let frequency = theta.powf(-2.0 * i as f64 / base as f64);
        f64::from(position) * frequency / factors.map_or(1.0, |f| f[i])
    };
    let mut angles = Vec::new();
    let failed =
        |_| Error::OutOfMemory { device: "reference".to_string(), bytes: pairs.saturating_mul(size_of::<f64>()) };
    angles.try_reserve_exact(pairs).map_err(failed)?;
    angles.extend((0..pairs).map(angle));
    Ok(angles)
}

/// Rotates pair i of a head by the angle whose (cosine, sine) is `turns[i]`; the other coordinates are unchanged.
///
/// # Errors
/// `Value` for more pairs than half the coordinates.
pub fn rope(x: &mut [f64], layout: PairLayout, turns: &[(f64, f64)]) -> Result<()> {
    if turns.len() > x.len() / 2 {
        let expected = format!("at most D/2 = {} pairs", x.len() / 2);
        return Err(Error::Value { op: "rope", arg: "turns", expected, got: turns.len().to_string() });
    }
    for (i, &(cos, sin)) in turns.iter().enumerate() {
        let (a, b) = layout.pair(i, x.len(), turns.len());
        (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos);
    }
    Ok(())
}

/// The computation for one head of one token: the norm, then the rotary embedding, then the Hadamard rotation; each is
/// optional.
pub(super) struct Head {
    norm: Option<(Option<Vec<f64>>, f64)>,
    rope: Option<RopeCall>,
    factors: Option<Vec<f64>>,
    tables: Option<[Vec<f64>; 2]>,
    rotate: bool,
}

impl Head {
    /// Loads weights and tables.
    pub(super) fn new(norm: Option<&NormCall>, rope: Option<&RopeCall>, rotate: bool) -> Head {
        let tables = rope.and_then(|rope| match &rope.angles {
            AnglesCall::Theta(_) => None,
            AnglesCall::Tables { cos, sin, .. } => Some([io::load(cos), io::load(sin)]),
        });
        Head {
            norm: norm.map(|norm| (norm.weight.as_ref().map(io::load), norm.eps.into())),
            rope: rope.cloned(),
            factors: rope.and_then(|rope| rope.freq_factors.as_ref()).map(io::load),
            tables,
            rotate,
        }
    }

    /// (cosine, sine) of each pair.
    fn turns(&self, rope: &RopeCall, position: u32, head_dim: usize) -> Vec<(f64, f64)> {
        let pairs = rope.rotated_pairs;
        match (&rope.angles, &self.tables) {
            (AnglesCall::Theta(theta), _) => {
                let base = rope.layout.frequency_base(head_dim, pairs);
                let angles = rope_angles(position, *theta, base, pairs, self.factors.as_deref())
                    .expect("validation compared the lengths");
                angles.iter().map(|angle| (angle.cos(), angle.sin())).collect()
            }
            (AnglesCall::Tables { .. }, Some([cos, sin])) => {
                let row = position as usize * pairs..(position as usize + 1) * pairs;
                cos[row.clone()].iter().copied().zip(sin[row].iter().copied()).collect()
            }
            (AnglesCall::Tables { .. }, None) => unreachable!("`new` loads the tables"),
        }
    }

    pub(super) fn apply(&self, x: &[f64], position: u32) -> Vec<f64> {
        let mut y = match &self.norm {
            Some((weight, eps)) => rms_norm(x, weight.as_deref(), *eps).expect("validation compared the lengths"),
            None => x.to_vec(),
        };
        if let Some(call) = &self.rope {
            rope(&mut y, call.layout, &self.turns(call, position, x.len())).expect("validation counted the pairs");
        }
        if self.rotate { hadamard(&y, false).expect("validation checked D") } else { y }
    }
}

pub(crate) fn run(call: &Call) {
    let head = Head::new(call.norm.as_ref(), call.rope.as_ref(), call.rotate);
    let (x, positions) = (io::load(&call.x), io::load_u32(&call.positions));
    let mut out = vec![0.0; x.len()];
    for (token, &position) in positions.iter().enumerate() {
        for h in 0..call.heads {
            let from = (token * call.heads + h) * call.head_dim;
            let to = call.out_order.row(token, h, call.tokens, call.heads) * call.head_dim;
            let y = head.apply(&x[from..from + call.head_dim], position);
            out[to..to + call.head_dim].copy_from_slice(&y);
        }
    }
    io::store(&call.out, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_pair_the_documented_coordinates() {
        let quarter_turn = [(0.0, 1.0); 2];
        let turned = |layout| {
            let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
            rope(&mut x, layout, &quarter_turn).unwrap();
            x
        };
        assert_eq!(turned(PairLayout::Halves), [-5.0, -6.0, 3.0, 4.0, 1.0, 2.0, 7.0, 8.0]);
        assert_eq!(turned(PairLayout::LeadingHalves), [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(turned(PairLayout::Interleaved), [-2.0, 1.0, -4.0, 3.0, 5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn mismatched_lengths_are_rejected() {
        assert!(rope(&mut [0.0; 5], PairLayout::Halves, &[(1.0, 0.0); 3]).is_err());
        assert!(rope_angles(1, 1e4, 8, 4, Some(&[1.0; 3])).is_err());
    }

    #[test]
    fn angles_by_position_theta_and_factor() {
        let angles = rope_angles(3, 100.0, 8, 3, Some(&[1.0, 1.0, 8.0])).unwrap();
        let expected = [3.0, 3.0 / 10f64.sqrt(), 3.0 / 10.0 / 8.0];
        assert!(angles.iter().zip(expected).all(|(a, e)| (a - e).abs() < 1e-14));
    }
}
