//! spread against the reference, whose results are checked by hand.

use crate::common::{Out, Rng, conform, indices, input, run};
use kvant::{
    DType,
    ops::{self, Spread},
};

/// Group `g` of `x` is the row of a token that `groups` names; the values of places are their numbers.
#[test]
fn spread() {
    const WIDTH: usize = 5;
    for (dtype, tokens, outputs) in [(DType::F32, 1, 300), (DType::F16, 3, 67), (DType::BF16, 2, 1), (DType::F32, 2, 0)]
    {
        for chosen in [0, 1, 4] {
            let case = format!("spread T {tokens}, V {outputs}, K {chosen}, {dtype}");
            let mut rng = Rng::of(&case);
            let places: Vec<u32> = (0..outputs).map(|_| [rng.below(40) as u32, u32::MAX][rng.below(9) / 8]).collect();
            let grouped = chosen > 0;
            let groups: Vec<u32> = (0..tokens)
                .flat_map(|_| {
                    let mut all: Vec<u32> = (0..8).chain([u32::MAX]).collect();
                    rng.shuffle(&mut all);
                    all.truncate(chosen);
                    all
                })
                .collect();
            let rows = if grouped { groups.clone() } else { vec![0; tokens] };
            let values = rows.iter().enumerate().flat_map(|(row, &group)| {
                (0..WIDTH).map(move |column| (row / chosen.max(1) * 64) as f32 + (group % 8 * 5) as f32 + column as f32)
            });
            let values: Vec<f32> = values.collect();
            conform(&case, |device| {
                let x = input(device, dtype, &values, &[rows.len(), WIDTH])?;
                let (ids, of_rows) =
                    (indices(device, &places, &[outputs])?, indices(device, &groups, &[tokens, chosen])?);
                let out = Out::new(device, dtype, &[tokens, outputs])?;
                let args = Spread::new(&x, &ids, f32::NEG_INFINITY, &out.tensor).groups(grouped.then_some(&of_rows));
                run(device, |enc| ops::spread(enc, &args))?;
                for (t, got) in out.tensor.to_f32()?.chunks(outputs.max(1)).enumerate() {
                    for (&place, &got) in places.iter().zip(got) {
                        let has = if grouped { &groups[t * chosen..(t + 1) * chosen] } else { &[0][..] };
                        let want =
                            if has.contains(&(place / 5)) { (t * 64) as f32 + place as f32 } else { f32::NEG_INFINITY };
                        assert_eq!(got, want, "{device}: {case}, place {place} of {has:?}");
                    }
                }
                Ok(vec![out.same("out")?])
            });
        }
    }
}
