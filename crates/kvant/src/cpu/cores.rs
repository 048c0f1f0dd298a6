//! The default number of threads of a CPU device.

use std::{collections::BTreeSet, fs, path::Path};

/// Maximum number of CPUs that is accepted from Linux's lists.
const MAX_CPUS: usize = 1 << 14;

/// The number of physical cores that this process may use; without a known topology, the system's available
/// parallelism. Two threads on one core share its vector units and caches, and the slowest task determines the time of
/// an operation.
pub(super) fn cores() -> usize {
    let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
    // Control groups may allow less CPU time than all cores provide.
    physical_cores(Path::new("/sys/devices/system/cpu"), Path::new("/proc/self/status"))
        .map_or(parallelism, |cores| cores.clamp(1, parallelism))
}

/// The number of cores that have the CPUs allowed by `status`, according to Linux's topology files.
fn physical_cores(cpus: &Path, status: &Path) -> Option<usize> {
    let status = fs::read_to_string(status).ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        let list = cpus.join(format!("cpu{cpu}/topology/thread_siblings_list"));
        numbers(&fs::read_to_string(list).ok()?)
    };
    let cores: BTreeSet<Vec<usize>> = numbers(allowed)?.into_iter().map(siblings).collect::<Option<_>>()?;
    Some(cores.len())
}

/// Parses a list like `0-3,8`.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MAX_CPUS {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(numbers("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(numbers("5"), Some(vec![5]));
        for wrong in ["", "a", "1-", "0-99999999999", "1,,2", "-1"] {
            assert_eq!(numbers(wrong), None, "{wrong}");
        }
    }

    /// Eight CPUs on four cores; the process may use some of them.
    #[test]
    fn siblings_count_once() {
        let dir = std::env::temp_dir().join(format!("kvant-cores-{}", std::process::id()));
        for cpu in 0..8usize {
            let topology = dir.join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join("thread_siblings_list"), format!("{},{}\n", cpu % 4, cpu % 4 + 4)).unwrap();
        }
        let status = dir.join("status");
        for (allowed, cores) in
            [("0-7", Some(4)), ("0-3", Some(4)), ("1,5", Some(1)), ("0,4-6", Some(3)), ("0-8", None)]
        {
            fs::write(&status, format!("Name:\tkvant\nCpus_allowed_list:\t{allowed}\nThreads:\t1\n")).unwrap();
            assert_eq!(physical_cores(&dir, &status), cores, "{allowed}");
        }
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(physical_cores(&dir, &status), None);
        assert!(cores() >= 1);
    }
}
