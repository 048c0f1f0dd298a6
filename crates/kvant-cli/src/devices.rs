//! `kvant devices`: lists devices, and why some are not available.

use std::fmt::Write;

use kvant::{Device, device::DeviceKind};
use serde::Serialize;

use crate::{output, result::Result};

/// List the devices, and why some are not available
#[derive(clap::Args)]
pub struct DevicesArgs {
    /// One JSON object per line: kind, index, available, default, name, reason, memory_bytes, free_bytes
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DeviceLine {
    kind: &'static str,
    /// The index among the devices of its kind: `--device cuda:1` selects index 1.
    index: usize,
    available: bool,
    /// Whether `--device auto` selects it.
    default: bool,
    name: Option<String>,
    reason: Option<String>,
    memory_bytes: Option<usize>,
    free_bytes: Option<usize>,
}

pub fn run(args: &DevicesArgs) -> Result {
    let default = Device::default();
    let (mut people, mut gpus) = (String::new(), 0);
    for entry in Device::list() {
        let kind = entry.kind.name();
        let (device, reason) = match entry.device {
            Ok(device) => (Some(device), None),
            Err(error) => (None, Some(error.to_string())),
        };
        gpus += usize::from(entry.kind == DeviceKind::Cuda && device.is_some());
        let memory = device.as_ref().and_then(|device| device.memory().ok());
        let line = DeviceLine {
            kind,
            index: entry.index,
            available: device.is_some(),
            default: device.as_ref() == Some(&default),
            name: device.map(|device| device.name()),
            reason,
            memory_bytes: memory.map(|memory| memory.total),
            free_bytes: memory.map(|memory| memory.free),
        };
        if args.json {
            output::json_line(&line)?;
            continue;
        }
        let mark = if line.default { "*" } else { " " };
        let text = line.name.or(line.reason).unwrap_or_default();
        let name = if line.index == 0 { kind.to_string() } else { format!("{kind}:{}", line.index) };
        let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
        let free = line.free_bytes.zip(line.memory_bytes);
        let free = free.map_or(String::new(), |(free, all)| format!(", {:.1} of {:.1} GiB free", gib(free), gib(all)));
        writeln!(people, "{mark} {name:<10} {text}{free}")?;
    }
    if gpus > 1 {
        writeln!(people, "--tensor-parallel {gpus} divides a model among all {gpus} NVIDIA GPUs")?;
    }
    if args.json { Ok(()) } else { output::text(&people) }
}
