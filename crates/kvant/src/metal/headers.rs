//! The headers of the kernel files. A file's `#include` lines name the headers that it needs.

use crate::gpu::{Header, headers, tables};

/// All headers, by their paths from this folder.
pub(super) static HEADERS: &[Header] = headers![
    "affine.h",
    "attend/fragments.h",
    "attend/keys.h",
    "attend/lanes.h",
    "attend/params.h",
    "attend/softmax.h",
    "blocks.h",
    "delta_rule/gates.h",
    "elements.h",
    "key_bias.h",
    "norm_rope.h",
    "ordered.h",
    "pages.h",
    "planes.h",
    "reduce.h",
    "rotate.h",
    "rows.h",
    "slots.h",
    "turboquant.h",
    "upper_half.h",
    "vectors.h";
    "codebooks.h" => || tables::codebooks("constant constexpr float"),
    "signs.h" => || tables::signs("constant constexpr uint"),
];

#[test]
fn the_table_is_exact() {
    crate::gpu::assert_table_is_exact("metal", "metal", HEADERS);
}

/// Expands every kernel file's headers. With `KVANT_METAL_SOURCES`, writes the results to that folder, for Apple's
/// compiler.
#[test]
fn sources_expand() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/metal");
    let to = std::env::var_os("KVANT_METAL_SOURCES").map(std::path::PathBuf::from);
    let folders = [root.clone(), root.join("attend"), root.join("delta_rule")]
        .map(|folder| std::fs::read_dir(folder).expect("reads"));
    let mut count = 0;
    for path in folders.into_iter().flatten().map(|entry| entry.expect("reads").path()) {
        if path.extension().is_none_or(|extension| extension != "metal") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("reads").leak();
        let name = path.strip_prefix(&root).expect("is within").to_string_lossy().replace('/', "_");
        let source = crate::gpu::Source { name: name.clone().leak(), text, headers: HEADERS, layouts: &[] };
        let expanded = source.expand();
        assert!(!expanded.contains("#include \""), "{name} includes a header that is not in the table");
        count += 1;
        if let Some(folder) = &to {
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join(name), expanded)).expect("writes");
        }
    }
    assert!(count >= 15, "only {count} kernel files");
}
