//! add_bias against the reference.

use super::SIZES;
use crate::common::{FLOATS, Out, Rng, bytes_of, conform, indices, input, run, sees_indices};
use kvant::{
    DType, Error,
    ops::{self, AddBias},
};

#[test]
fn add_bias() {
    let mut rng = Rng::of("add_bias");
    for (rows, dim) in SIZES {
        for x_type in FLOATS {
            for out_type in FLOATS {
                let (bias_type, experts) = (rng.pick(&FLOATS), rng.pick(&[None, Some(1), Some(5)]));
                let in_place = x_type == out_type && rng.below(2) == 0;
                let case = format!(
                    "add_bias [{rows}, {dim}] {x_type} + {bias_type} -> {out_type}, experts {experts:?}, in place {in_place}"
                );
                conform(&case, |device| {
                    let mut rng = Rng::of(&case);
                    let x = input(device, x_type, &rng.normals(rows * dim), &[rows, dim])?;
                    let ids: Vec<u32> = (0..rows).map(|_| rng.below(experts.unwrap_or(1)) as u32).collect();
                    let ids = indices(device, &ids, &[rows, 1])?;
                    let count = experts.unwrap_or(1);
                    let shape = [count, dim];
                    let biases = rng.normals(count * dim);
                    let bias = input(device, bias_type, &biases, if experts.is_some() { &shape } else { &shape[1..] })?;
                    let out = Out::new(device, out_type, &[rows, dim])?;
                    if in_place {
                        out.tensor.write_bytes(&bytes_of(&x)?)?;
                    }
                    let x = if in_place { &out.tensor } else { &x };
                    let args = AddBias::new(x, &bias, &out.tensor).experts(experts.map(|_| &ids));
                    run(device, |enc| ops::add_bias(enc, &args))?;
                    Ok(vec![out.close("out")?])
                });
            }
        }
    }
}

/// The host returns an error for an expert that does not exist; a GPU writes zeros for its row.
#[test]
fn experts_out_of_range() {
    for device in crate::common::devices() {
        let x = input(device, DType::F32, &[1.0; 12], &[3, 4]).unwrap();
        let bias = input(device, DType::F32, &[2.0; 8], &[2, 4]).unwrap();
        let ids = indices(device, &[1, u32::MAX, 2], &[3, 1]).unwrap();
        let out = Out::new(device, DType::F32, &[3, 4]).unwrap();
        let result = run(device, |enc| ops::add_bias(enc, &AddBias::new(&x, &bias, &out.tensor).experts(Some(&ids))));
        if sees_indices(device) {
            assert!(matches!(result, Err(Error::OutOfRange { index: 1, limit: 2, .. })), "{device}: {result:?}");
            continue;
        }
        result.unwrap();
        assert_eq!(out.tensor.to_f32().unwrap(), [[3.0; 4], [0.0; 4], [0.0; 4]].concat(), "{device}");
    }
}
