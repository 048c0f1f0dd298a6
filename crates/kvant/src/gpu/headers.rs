//! The headers of kernel files: one table per backend. A file's inclusions are read from its `#include` lines.

/// A header that kernel files include.
#[derive(Debug)]
pub struct Header {
    /// The name in `#include "NAME"`: the path from the backend's folder.
    pub name: &'static str,
    /// Its text; a function, because tables are generated.
    pub text: fn() -> String,
}

/// A table of headers: first those that are files, by their paths from the invoking file, then the generated ones.
///
/// ```ignore
/// static HEADERS: &[Header] = headers!["elements.h", "attend/softmax.h"; "signs.h" => || tables::signs("constant uint")];
/// ```
macro_rules! headers {
    [$($file:literal),* $(,)?; $($name:literal => $text:expr),* $(,)?] => {
        &[
            $($crate::gpu::Header { name: $file, text: || include_str!($file).to_string() },)*
            $($crate::gpu::Header { name: $name, text: $text },)*
        ]
    };
}
pub(crate) use headers;

/// The name in a line `#include "NAME"`.
pub(super) fn included_name(line: &str) -> Option<&str> {
    line.strip_prefix("#include \"")?.split_once('"').map(|(name, _)| name)
}

/// The headers of `table` that `text` includes, directly or through another header: each once, in order of inclusion,
/// with the text that `text_of` returns for it. Names that the table lacks are left to the compiler.
pub(super) fn included(
    text: &str,
    table: &'static [Header],
    text_of: &dyn Fn(&Header) -> String,
) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    visit(text, table, text_of, &mut found);
    found
}

fn visit(
    text: &str,
    table: &'static [Header],
    text_of: &dyn Fn(&Header) -> String,
    found: &mut Vec<(&'static str, String)>,
) {
    for name in text.lines().filter_map(included_name) {
        let Some(header) = table.iter().find(|header| header.name == name) else { continue };
        if found.iter().any(|(name, _)| *name == header.name) {
            continue;
        }
        let text = text_of(header);
        found.push((header.name, text.clone()));
        visit(&text, table, text_of, found);
    }
}

/// Asserts that a backend's table is complete and has no unused headers. `folder`: its folder below `src/`; `kernels`:
/// the extension of its kernel files.
#[cfg(test)]
pub(crate) fn assert_table_is_exact(folder: &str, kernels: &str, table: &'static [Header]) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
    let (mut folders, mut files, mut texts) = (vec![root.clone()], Vec::new(), Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is = |extension: &str| path.extension().is_some_and(|e| e == extension);
            if path.is_dir() {
                folders.push(path);
            } else if is("h") || is(kernels) {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
                texts.push((name.clone(), std::fs::read_to_string(&path).unwrap()));
                if is("h") {
                    files.push(name);
                }
            }
        }
    }
    for file in &files {
        assert!(table.iter().any(|header| header.name == file), "{folder}/{file} is not in the table of headers");
    }
    texts.extend(table.iter().filter(|h| !files.iter().any(|f| f == h.name)).map(|h| (h.name.to_string(), (h.text)())));
    let mut used = Vec::new();
    for (file, text) in &texts {
        for name in text.lines().filter_map(included_name) {
            assert!(table.iter().any(|h| h.name == name), "{folder}/{file} includes {name}, which is not in the table");
            used.push(name);
        }
    }
    for header in table {
        assert!(used.contains(&header.name), "no file of {folder} includes {}", header.name);
        assert_eq!(table.iter().filter(|h| h.name == header.name).count(), 1, "{} is in the table twice", header.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static TABLE: &[Header] = &[
        Header { name: "types.h", text: || "struct Types {};\n".to_string() },
        Header { name: "attend/math.h", text: || "#include \"types.h\" // sizes\n#include \"loop.h\"\n".to_string() },
        Header { name: "unused.h", text: String::new },
        Header { name: "loop.h", text: || "#include \"attend/math.h\"\n#include \"loop.h\"\n".to_string() },
    ];

    fn names(text: &str) -> Vec<&'static str> {
        included(text, TABLE, &|header| (header.text)()).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn inclusion_is_transitive_and_each_header_comes_once() {
        assert_eq!(names("#include <metal_stdlib>\n#include \"types.h\"\n"), ["types.h"]);
        assert_eq!(names("#include \"attend/math.h\"\n#include \"types.h\"\n"), ["attend/math.h", "types.h", "loop.h"]);
        assert_eq!(names("int x;\n"), [""; 0]);
    }

    #[test]
    fn names_that_the_table_lacks_are_left_to_the_compiler() {
        assert_eq!(names("#include \"missing.h\"\n#include \"unused.h\"\n"), ["unused.h"]);
    }

    #[test]
    fn a_replaced_text_has_its_own_inclusions() {
        let text_of = |header: &Header| match header.name {
            "types.h" => "#include \"unused.h\"\n".to_string(),
            _ => (header.text)(),
        };
        let found = included("#include \"types.h\"\n", TABLE, &text_of);
        assert_eq!(found, [("types.h", "#include \"unused.h\"\n".to_string()), ("unused.h", String::new())]);
    }
}
