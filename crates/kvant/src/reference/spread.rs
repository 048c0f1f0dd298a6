use super::io;
use crate::ops::spread::Call;

/// The outputs of one row, whose groups have these values: [`Spread`](crate::ops::Spread).
pub fn spread(groups: &[(u32, &[f64])], places: &[u32], fill: f64) -> Vec<f64> {
    let of_place = |&place: &u32| {
        let found = groups.iter().find(|(group, values)| place as usize / values.len() == *group as usize);
        found.map_or(fill, |(_, values)| values[place as usize % values.len()])
    };
    places.iter().map(of_place).collect()
}

pub(crate) fn run(call: &Call) {
    let (x, places) = (io::load(&call.x), io::load_u32(&call.places));
    let groups = call.groups.as_ref().map_or_else(|| vec![0; call.tokens], io::load_u32);
    let mut out = Vec::with_capacity(call.tokens * call.outputs);
    for t in 0..call.tokens {
        let rows = t * call.chosen..(t + 1) * call.chosen;
        let of_row = |row: usize| (groups[row], &x[row * call.width..(row + 1) * call.width]);
        out.extend(spread(&rows.map(of_row).collect::<Vec<_>>(), &places, call.fill.into()));
    }
    io::store(&call.out, &out);
}
