//! Counts the instructions of some kernels with valgrind's callgrind. The count does not depend on a clock or on other
//! load. It does not include the cost of memory accesses and branches.
//!
//! ```text
//! counted               count, and compare with instructions.txt
//! counted --update      count, and write instructions.txt
//! counted --case NAME   prepare a case and run it once: the command that valgrind runs
//! ```
//!
//! Kernels run on one thread and with AVX2, the best level that valgrind supports. The compiler also affects the
//! counts, so the file records it, and the tolerance is larger for another compiler.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf, process::Command};

use kvant::{Codec, CpuOptions, DType, Device, SimdLevel};
use kvant_bench::{
    Result, Shape,
    attention::{Attention, Context},
    linear::{Linear, Storage},
    rope::NormRope,
    writing::{Batch, Writing},
};

/// The tolerance of a count, relative to the recorded one.
const TOLERANCE: f64 = 0.03;
/// The tolerance for another compiler than the recorded one.
const OTHER_COMPILER: f64 = 0.15;

const SHAPE: Shape = Shape::new(256, 16, 8);

type Prepared = Box<dyn FnMut() -> Result>;

/// A name and a preparation.
type Case = (&'static str, fn(&Device) -> Result<Prepared>);

const CASES: [Case; 5] = [
    ("attend-f16", |device| attend(device, Codec::F16)),
    ("attend-tq4", |device| attend(device, Codec::tq(4))),
    ("kv-write-tq4", |device| {
        let batch = Batch { shape: SHAPE, source: DType::F32, codec: Codec::tq(4), tokens: 16 };
        let mut writing = Writing::new(device, &batch, 1)?;
        Ok(Box::new(move || writing.call()))
    }),
    ("linear-4-bit", |device| {
        let mut linear = Linear::new(device, (1, 1024, 1024), Storage::Affine { bits: 4 }, 1)?;
        Ok(Box::new(move || linear.call()))
    }),
    ("norm-rope", |device| {
        let mut norm_rope = NormRope::new(device, 1, 24, 256)?;
        Ok(Box::new(move || norm_rope.call()))
    }),
];

fn attend(device: &Device, codec: Codec) -> Result<Prepared> {
    let mut attention = Attention::new(device, &Context::full(SHAPE, codec, 1024), 1)?;
    Ok(Box::new(move || attention.call()))
}

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => compare(&count_all()?),
        ["--update"] => {
            let file = file();
            std::fs::write(&file, text(&compiler()?, &count_all()?))?;
            println!("{}: written", file.display());
            Ok(())
        }
        ["--case", name] => run(name),
        _ => Err("usage: counted [--update | --case NAME]".into()),
    }
}

/// Runs a case twice: once to allocate, and once to be counted.
fn run(name: &str) -> Result {
    let (_, prepare) = CASES.iter().find(|case| case.0 == name).ok_or_else(|| format!("{name}: no such case"))?;
    let device =
        Device::cpu_with(CpuOptions { threads: Some(1), simd: Some(SimdLevel::Avx2), ..CpuOptions::default() })?;
    let mut call = prepare(&device)?;
    call()?;
    counted_call(&mut call)
}

/// Valgrind counts instructions in this function, which it finds by name.
#[inline(never)]
fn counted_call(call: &mut Prepared) -> Result {
    std::hint::black_box(call())
}

/// The counts of all cases.
fn count_all() -> Result<BTreeMap<String, u64>> {
    CASES.iter().map(|(name, _)| Ok((name.to_string(), count(name)?))).collect()
}

fn count(name: &str) -> Result<u64> {
    let out = std::env::temp_dir().join(format!("kvant-counted-{}-{name}", std::process::id()));
    let done = Command::new("valgrind")
        .args(["--tool=callgrind", "--toggle-collect=*counted_call*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .args(["--case", name])
        .output()
        .map_err(|error| format!("valgrind: {error} (Debian: apt-get install valgrind)"))?;
    let counts = std::fs::read_to_string(&out).unwrap_or_default();
    let _ = std::fs::remove_file(&out);
    if !done.status.success() {
        return Err(format!("{name} under valgrind: {}", String::from_utf8_lossy(&done.stderr)).into());
    }
    let total = counts.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    match total {
        Some(total) if total > 0 => Ok(total),
        _ => Err(format!("{name}: callgrind counted nothing").into()),
    }
}

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("instructions.txt")
}

/// The version of cargo's compiler.
fn compiler() -> Result<String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_string());
    let version = String::from_utf8(Command::new(rustc).arg("--version").output()?.stdout)?;
    Ok(version.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
}

fn text(compiler: &str, counts: &BTreeMap<String, u64>) -> String {
    let mut text = "# Instructions of one call, one thread, AVX2: `counted --update` writes this file.\n".to_string();
    let _ = writeln!(text, "# compiler: {compiler}");
    for (name, count) in counts {
        let _ = writeln!(text, "{name} {count}");
    }
    text
}

fn compare(counts: &BTreeMap<String, u64>) -> Result {
    let recorded = std::fs::read_to_string(file())?;
    let theirs = recorded.lines().find_map(|line| line.strip_prefix("# compiler: ")).unwrap_or_default();
    let ours = compiler()?;
    let tolerance = if theirs == ours { TOLERANCE } else { OTHER_COMPILER };
    if theirs != ours {
        println!(
            "recorded with {theirs}, this is {ours}: {:.0} % instead of {:.0} %",
            100. * tolerance,
            100. * TOLERANCE
        );
    }
    let mut recorded: BTreeMap<&str, u64> = recorded
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, count)| Some((name, count.parse().ok()?)))
        .collect();
    let mut wrong = String::new();
    for (name, &count) in counts {
        let Some(before) = recorded.remove(name.as_str()) else {
            let _ = writeln!(wrong, "{name}: {count} instructions, and nothing recorded");
            continue;
        };
        let change = count as f64 / before as f64 - 1.0;
        println!("{name:<14} {count:>10} instructions, recorded {before:>10} ({:+.1} %)", 100.0 * change);
        if change.abs() > tolerance {
            let word = if change > 0.0 { "slower, or does more" } else { "better: record it" };
            let _ = writeln!(wrong, "{name}: {:+.1} % instructions ({word})", 100.0 * change);
        }
    }
    for (name, _) in recorded {
        let _ = writeln!(wrong, "{name}: recorded, but there is no such case");
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let how = "if that is meant, record it: cargo run --release -p kvant-bench --bin counted -- --update";
    Err(format!("instruction counts changed by more than {:.0} %:\n{wrong}{how}", 100.0 * tolerance).into())
}
