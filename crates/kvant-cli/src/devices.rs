//! `kvant devices`: lists devices, with the reasons for those that are not available.

use std::fmt::Write;

use kvant::Device;
use serde::Serialize;

use crate::{Result, output};

/// List the devices, and the reasons for those that are not available
#[derive(clap::Args)]
pub struct DevicesArgs {
    /// One JSON object per line: kind, available, default, name, reason
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DeviceLine {
    kind: &'static str,
    available: bool,
    /// Whether `--device auto` selects it.
    default: bool,
    name: Option<String>,
    reason: Option<String>,
}

pub fn run(args: &DevicesArgs) -> Result {
    let default = Device::default().kind();
    let mut people = String::new();
    for entry in Device::list() {
        let kind = entry.kind.name();
        let (name, reason) = match entry.device {
            Ok(device) => (Some(device.name()), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let line = DeviceLine { kind, available: name.is_some(), default: entry.kind == default, name, reason };
        if args.json {
            output::json_line(&line)?;
            continue;
        }
        let mark = if line.default { "*" } else { " " };
        let text = line.name.or(line.reason).unwrap_or_default();
        writeln!(people, "{mark} {kind:<10} {text}")?;
    }
    if args.json { Ok(()) } else { output::text(&people) }
}
