//! Collectives on one device, where they copy. Groups: `groups/`.

use super::SIZES;
use crate::common::{FLOATS, Out, Rng, bytes_of, conform, input, ranks, run};
use kvant::{
    DType,
    ops::{self, AllGather, AllReduce},
};

#[test]
fn all_reduce_of_one_device() {
    if ranks() > 1 {
        return;
    }
    for (rows, dim) in SIZES {
        for x_type in FLOATS {
            for out_type in FLOATS {
                for in_place in [false, true] {
                    let in_place = in_place && x_type == out_type;
                    conform(format!("all_reduce [{rows}, {dim}] {x_type} -> {out_type}, {in_place}"), |device| {
                        let x = input(device, x_type, &Rng::new(5).normals(rows * dim), &[rows, dim])?;
                        let out = Out::new(device, out_type, &[rows, dim])?;
                        if in_place {
                            out.tensor.write_bytes(&bytes_of(&x)?)?;
                        }
                        let x = if in_place { &out.tensor } else { &x };
                        run(device, |enc| ops::all_reduce(enc, &AllReduce::new(x, &out.tensor)))?;
                        Ok(vec![out.close("out")?])
                    });
                }
            }
        }
    }
}

#[test]
fn all_gather_of_one_device() {
    if ranks() > 1 {
        return;
    }
    for (rows, dim) in SIZES {
        for dtype in [DType::F32, DType::BF16] {
            conform(format!("all_gather [{rows}, {dim}] {dtype}"), |device| {
                let x = input(device, dtype, &Rng::new(6).normals(rows * dim), &[rows, dim])?;
                let out = Out::new(device, dtype, &[rows, dim])?;
                run(device, |enc| ops::all_gather(enc, &AllGather::new(&x, &out.tensor)))?;
                Ok(vec![out.same("out")?])
            });
        }
    }
}
