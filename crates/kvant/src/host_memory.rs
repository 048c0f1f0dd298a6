//! The memory of the host, as Linux reports it.

use std::{fs, path::Path};

use crate::device::MemoryInfo;

/// Total, free and held memory; `None` if it is not known.
pub(crate) fn info() -> Option<MemoryInfo> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
    };
    let (total, free) = (field("MemTotal")?, field("MemAvailable")?);
    let (limit, left) = container_limit(Path::new("/sys/fs/cgroup")).unwrap_or((usize::MAX, usize::MAX));
    Some(MemoryInfo { total: total.min(limit), free: free.min(left), held: 0 })
}

/// The limit of the control group (version 2) and the unused part of it; `None` without a limit.
fn container_limit(group: &Path) -> Option<(usize, usize)> {
    let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse::<usize>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    Some((limit, limit.saturating_sub(used)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_limit_memory() {
        let group = std::env::temp_dir().join(format!("kvant-cgroup-{}", std::process::id()));
        fs::create_dir_all(&group).unwrap();
        assert_eq!(container_limit(&group), None);
        fs::write(group.join("memory.max"), "max\n").unwrap();
        fs::write(group.join("memory.current"), "300\n").unwrap();
        assert_eq!(container_limit(&group), None);
        fs::write(group.join("memory.max"), "1000\n").unwrap();
        assert_eq!(container_limit(&group), Some((1000, 700)));
        fs::write(group.join("memory.max"), "200\n").unwrap();
        assert_eq!(container_limit(&group), Some((200, 0)));
        fs::remove_dir_all(&group).unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn free_memory_is_a_part_of_all() {
        let memory = crate::Device::cpu().memory().unwrap();
        assert!(memory.free > 0 && memory.free <= memory.total, "{memory:?}");
    }
}
