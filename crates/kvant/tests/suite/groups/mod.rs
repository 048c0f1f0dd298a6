//! Groups of devices: collectives against the reference, work in parts, failures.

use kvant::{CpuOptions, Device};

mod arguments;
mod by_page;
mod by_page_sealed;
mod collectives;
mod merge_attention;
mod parts;
mod summed_norms;

/// The numbers of ranks of the tested groups.
const RANKS: [usize; 4] = [1, 2, 3, 4];

/// A group of CPU devices with some threads each.
fn cpus(ranks: usize, threads: usize) -> Device {
    let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
    let devices: Vec<Device> = (0..ranks).map(|_| Device::cpu_with(options).unwrap()).collect();
    Device::group(&devices).unwrap()
}

/// The tested groups: of CPU devices, of the reference, and of the NVIDIA GPUs of this machine. With
/// `KVANT_TEST_DEVICE`, those of one kind; with `KVANT_TEST_RANKS`, those of that number of ranks.
fn groups() -> Vec<Device> {
    let only = std::env::var("KVANT_TEST_DEVICE").ok();
    let wanted = |kind: &str| only.as_deref().is_none_or(|only| only == kind);
    let mut groups = Vec::new();
    if wanted("cpu") {
        groups.extend(RANKS.map(|ranks| cpus(ranks, ranks % 2 + 1)));
        groups.push(Device::group(&[Device::reference()]).unwrap());
    }
    if wanted("cuda") {
        groups.extend(gpus());
    }
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    if only.as_deref() == Some("cuda-host") {
        groups.extend(crate::common::cuda_host::groups());
    }
    let ranks: Option<usize> = std::env::var("KVANT_TEST_RANKS").ok().map(|ranks| ranks.parse().expect("a number"));
    groups.retain(|group| ranks.is_none_or(|ranks| group.ranks() == ranks));
    assert!(!groups.is_empty(), "KVANT_TEST_DEVICE, KVANT_TEST_RANKS: there is no such group here");
    groups
}

/// Groups of reference devices, whose sums are exact: for tests that compare within a bound, or one way with another.
fn reference_groups() -> Vec<Device> {
    let only = std::env::var("KVANT_TEST_DEVICE").is_ok_and(|only| only != "cpu");
    let wanted = std::env::var("KVANT_TEST_RANKS").ok().map(|ranks| ranks.parse::<usize>().expect("a number"));
    let ranks = [2, 3].into_iter().filter(|&ranks| !only && wanted.is_none_or(|wanted| wanted == ranks));
    ranks.map(|ranks| Device::reference_group(ranks).unwrap()).collect()
}

/// All NVIDIA GPUs of this machine that work as a group, or `KVANT_TEST_RANKS` of them.
fn gpus() -> Option<Device> {
    let most = std::env::var("KVANT_TEST_RANKS").map_or(usize::MAX, |ranks| ranks.parse().expect("a number"));
    let gpus: Vec<Device> = (0..most).map_while(|index| Device::cuda(index).ok()).collect();
    (!gpus.is_empty()).then(|| Device::group(&gpus).unwrap_or_else(|error| panic!("a group of {gpus:?}: {error}")))
}
