//! `kvant doctor`: compares a device with the reference, operation by operation.

mod cases;

use std::time::Instant;

use kvant::{Device, Error, KernelReport};
use serde::Serialize;

use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs},
    output,
};
use cases::Trial;

/// Check a device: run every operation on it, and compare the results with the reference
///
/// The cases are small. The first run of a case compiles its kernels if the device needs that; times include making the
/// inputs. Operations that a device does not support are listed and are not failures. On a Mac, the kernels follow: the
/// threads that the compiler allows, the threadgroup memory that they declare, and compiler messages. If results are
/// wrong, paste the lines of `--json` into an issue.
#[derive(clap::Args)]
pub struct DoctorArgs {
    /// One JSON object per line: device, case, status, error, bound, reason, first_us, us; then of kernels: device,
    /// kernel, constants, threads, threadgroup_bytes, refusal
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Serialize)]
struct Finding {
    device: String,
    case: String,
    /// `ok`, `wrong`, `failed` or `unsupported`.
    status: &'static str,
    /// √(Σ(x−y)²/Σy²) against the reference.
    error: Option<f64>,
    bound: f64,
    /// The reason why there is no result.
    reason: Option<String>,
    first_us: Option<f64>,
    us: Option<f64>,
}

/// A kernel as compiled by the device's compiler.
#[derive(Serialize)]
struct Kernel {
    device: String,
    kernel: String,
    constants: String,
    threads: usize,
    threadgroup_bytes: usize,
    refusal: Option<String>,
}

impl Kernel {
    fn of(device: &Device, report: KernelReport) -> Kernel {
        let KernelReport { name, constants, threads, threadgroup_bytes, refusal, .. } = report;
        Kernel { device: device.to_string(), kernel: name, constants, threads, threadgroup_bytes, refusal }
    }

    fn text(&self) -> String {
        let Kernel { kernel, constants, threads, threadgroup_bytes, refusal, .. } = self;
        match refusal {
            None => format!("kernel {kernel:<34} {threads:>5} threads {threadgroup_bytes:>6} bytes   {constants}\n"),
            Some(log) => format!("refused {kernel} {constants}\n{log}\n"),
        }
    }
}

pub fn run(args: &DoctorArgs) -> Result {
    let device = args.device.open()?;
    let reference = Device::reference();
    let cases = cases::all(args.activations.dtype(&device), args.device.eight_bit_activations());
    output::people(&format!("{device}\n"), args.json)?;
    let (mut bad, mut unsupported) = (0, 0);
    for case in &cases {
        let line = examine(&device, &reference, case)?;
        bad += usize::from(matches!(line.status, "wrong" | "failed"));
        unsupported += usize::from(line.status == "unsupported");
        if args.json { output::json_line(&line)? } else { output::text(&text(&line))? }
    }
    for kernel in device.kernels() {
        let line = Kernel::of(&device, kernel);
        if args.json { output::json_line(&line)? } else { output::text(&line.text())? }
    }
    match bad {
        0 => output::people(&verdict(&device, cases.len(), unsupported), args.json),
        _ => Err(format!("{bad} of {} cases differ from the reference or failed", cases.len()).into()),
    }
}

/// Summarises the result of all cases in a sentence.
fn verdict(device: &Device, cases: usize, unsupported: usize) -> String {
    let rest = match unsupported {
        0 => String::new(),
        count => format!(", {count} are not supported"),
    };
    format!("verdict: {device} matches the reference: {} of {cases} cases are correct{rest}\n", cases - unsupported)
}

fn examine(device: &Device, reference: &Device, case: &Trial) -> Result<Finding> {
    let want = case.run(reference)?;
    let timed = || {
        let begin = Instant::now();
        let got = case.run(device);
        (got, output::round3(begin.elapsed().as_secs_f64() * 1e6))
    };
    let (first, first_us) = timed();
    let line = Finding {
        device: device.to_string(),
        case: case.name.clone(),
        status: "failed",
        error: None,
        bound: case.bound,
        reason: None,
        first_us: None,
        us: None,
    };
    let got = match first {
        Ok(got) => got,
        Err(error) => {
            let unsupported = matches!(error.downcast_ref(), Some(Error::Unsupported { .. }));
            let status = if unsupported { "unsupported" } else { "failed" };
            return Ok(Finding { status, reason: Some(error.to_string()), ..line });
        }
    };
    // The kernels are compiled by now. A second run can fail even if the first succeeded.
    let (again, us) = timed();
    let error = distance(&got, &want).max(distance(&again?, &want));
    // NaN is never within a bound.
    let status = if error <= case.bound { "ok" } else { "wrong" };
    Ok(Finding { status, error: Some(error), first_us: Some(first_us), us: Some(us), ..line })
}

/// √(Σ(x−y)²/Σy²); infinite if lengths differ.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(&x, &y)| square(f64::from(x) - f64::from(y))).sum();
    let size: f64 = want.iter().map(|&y| square(f64::from(y))).sum();
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

fn text(line: &Finding) -> String {
    let Finding { case, status, bound, .. } = line;
    match (line.error, line.first_us, line.us) {
        (Some(error), Some(first), Some(us)) => format!(
            "{status:<6} {case:<44} error {error:>7.1e} of {bound:.0e}   first {:>9.1} ms   then {:>8.3} ms\n",
            first / 1e3,
            us / 1e3
        ),
        _ => format!("{status:<6} {case:<44} {}\n", line.reason.as_deref().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_and_notice_nan() {
        assert_eq!(distance(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(distance(&[3.0, 5.0], &[3.0, 4.0]), 0.2);
        assert_eq!(distance(&[0.0], &[0.0]), 0.0);
        assert_eq!(distance(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(distance(&[1.0], &[1.0, 1.0]), f64::INFINITY);
        assert!(distance(&[f32::NAN], &[1.0]).is_nan());
    }

    #[test]
    fn a_wrong_result_is_wrong() {
        let device = Device::cpu();
        let case = |factor: f32| {
            Trial::new("case", 1e-3, move |on| {
                let is_reference = on.kind() == kvant::DeviceKind::Reference;
                Ok(vec![if is_reference { 1.0 } else { factor }])
            })
        };
        let status = |factor| examine(&device, &Device::reference(), &case(factor)).unwrap().status;
        assert_eq!([status(1.0), status(1.01), status(f32::NAN)], ["ok", "wrong", "wrong"]);
    }
}
