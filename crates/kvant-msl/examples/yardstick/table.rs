//! Tables of counts.

use msl_host::Counts;

/// A row: the kernels' name, and the summed counts of their launches.
pub struct Row {
    pub name: String,
    pub counts: Counts,
}

/// A column: its title, and its number for a launch.
type Column = (&'static str, fn(&Counts) -> f64);

const COLUMNS: [Column; 12] = [
    ("bytes", |c| (c.footprint[0] + c.footprint[1]) as f64),
    ("transactions", |c| c.device.units as f64),
    ("loads, stores", |c| c.device.accesses as f64),
    ("tg cycles", |c| c.threadgroup.units as f64),
    ("barriers", |c| (c.barriers + c.simdgroup_barriers) as f64),
    ("shuffles", |c| (c.shuffles + c.votes + 5 * c.reductions) as f64),
    ("matrix", |c| c.matrix_products as f64),
    ("float", |c| (c.operations.float32 + c.operations.float16) as f64),
    ("int", |c| (c.operations.int + c.operations.int_slow + c.operations.branches) as f64),
    ("int64", |c| (c.operations.int64 + c.operations.int64_products) as f64),
    ("slow", |c| {
        let o = &c.operations;
        (o.conversions + o.exponentials + o.reciprocals + o.roots + o.trigonometric) as f64
    }),
    ("private, constant", |c| (c.private.accesses + c.constant.accesses) as f64),
];

/// Prints rows, each count divided by `per`.
pub fn print(title: &str, per: f64, unit: &str, rows: &[Row], lines: bool) {
    println!("\n**{title}**, per {unit}\n");
    let titles: Vec<&str> = COLUMNS.iter().map(|c| c.0).collect();
    println!("| | {} | SIMD-groups | tg bytes |", titles.join(" | "));
    println!("|---|{}", "---|".repeat(COLUMNS.len() + 2));
    for Row { name, counts } in rows {
        let numbers: Vec<String> = COLUMNS.iter().map(|c| short(c.1(counts) / per)).collect();
        println!("| {name} | {} | {} | {} |", numbers.join(" | "), counts.simdgroups, counts.threadgroup_bytes);
    }
    for Row { name, counts } in rows.iter().filter(|_| lines) {
        println!("\n{name}\n{counts}");
        for line in counts.lines.iter().take(12) {
            println!("{} {}: {:?}", line.space, line.line, line.traffic);
        }
    }
}

/// Rounds to three significant digits.
fn short(x: f64) -> String {
    match x {
        0.0 => "0".into(),
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x if x >= 1.0 => format!("{x:.2}"),
        x => format!("{x:.3}"),
    }
}
