//! softcap against the reference.

use super::SIZES;
use crate::common::{FLOATS, Out, Rng, bytes_of, conform, input, run};
use kvant::{
    Tensor,
    ops::{self, Softcap},
};

#[test]
fn softcap() {
    for (rows, dim) in SIZES {
        for x_type in FLOATS {
            for out_type in FLOATS {
                for (cap, in_place) in [(30.0, false), (0.5, false), (1e30, false), (5.0, x_type == out_type)] {
                    conform(format!("softcap {cap} [{rows}, {dim}] {x_type} -> {out_type}, {in_place}"), |device| {
                        let values: Vec<f32> = Rng::new(3).normals(rows * dim).iter().map(|x| x * 20.0).collect();
                        let x = input(device, x_type, &values, &[rows, dim])?;
                        let out = Out::new(device, out_type, &[rows, dim])?;
                        if in_place {
                            out.tensor.write_bytes(&bytes_of(&x)?)?;
                        }
                        let x = if in_place { &out.tensor } else { &x };
                        run(device, |enc| ops::softcap(enc, &Softcap::new(x, cap, &out.tensor)))?;
                        Ok(vec![out.close("out")?])
                    });
                }
            }
        }
    }
}

/// Tensors that begin at a multiple of four elements, with an incomplete last four.
#[test]
fn a_part_of_four_at_the_end() {
    for elements in [1usize, 3, 4, 1023, 1026] {
        for x_type in FLOATS {
            for out_type in FLOATS {
                conform(format!("softcap of {elements} {x_type} -> {out_type}"), |device| {
                    let whole = elements.next_multiple_of(4);
                    let x = input(device, x_type, &Rng::new(3).normals(whole), &[1, whole])?;
                    let out = Out::new(device, out_type, &[1, whole])?;
                    let part = |tensor: &Tensor| tensor.reshape(&[whole])?.rows(0..elements);
                    let (x, part_of_out) = (part(&x)?, part(&out.tensor)?);
                    run(device, |enc| ops::softcap(enc, &Softcap::new(&x, 2.0, &part_of_out)))?;
                    // The rest keeps its pattern.
                    Ok(vec![out.close("out")?])
                });
            }
        }
    }
}
