//! Reads and writes the keys and values of the only sequence of a step.

use std::ops::Range;

use kvant::{
    DType, KvPool, Step, Tensor,
    ops::{self, KvRead, KvSide, KvWrite},
};

/// The vectors of all heads at `positions`, token by token.
pub fn read(
    pool: &KvPool,
    layer: usize,
    side: KvSide,
    step: &Step,
    positions: Range<usize>,
) -> kvant::Result<Vec<f64>> {
    let layer = pool.layer(layer)?;
    let out = Tensor::zeros(pool.device(), DType::F32, &shape(layer, positions.len()))?;
    let mut enc = pool.device().encoder()?;
    ops::kv_read(&mut enc, &KvRead::new(layer, side, &out).step(Some(step)).start(positions.start))?;
    enc.commit()?.wait()?;
    Ok(out.to_f32()?.into_iter().map(f64::from).collect())
}

/// Writes the keys and values of a step's tokens.
pub fn write(pool: &KvPool, layer: usize, step: &Step, [k, v]: &[Vec<f64>; 2]) -> kvant::Result<()> {
    let layer = pool.layer(layer)?;
    let tensor = |vectors: &[f64]| {
        let vectors: Vec<f32> = vectors.iter().map(|&x| x as f32).collect();
        Tensor::from_slice(pool.device(), &vectors, &shape(layer, step.tokens()))
    };
    let (k, v) = (tensor(k)?, tensor(v)?);
    let mut enc = pool.device().encoder()?;
    ops::kv_write(&mut enc, &KvWrite::new(&k, &v, step, layer))?;
    enc.commit()?.wait()
}

/// The consecutive positions of a step's tokens.
pub fn positions(step: &Step) -> kvant::Result<Range<usize>> {
    let first = step.positions().to_vec::<u32>()?.first().copied().unwrap_or(0) as usize;
    Ok(first..first + step.tokens())
}

fn shape(layer: &kvant::KvLayer, tokens: usize) -> [usize; 3] {
    [tokens, layer.spec().kv_heads, layer.spec().head_dim]
}
