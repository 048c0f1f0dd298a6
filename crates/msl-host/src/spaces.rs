//! Removes declarations that differ from an earlier one only by an address space: `operator=(T x) thread` and
//! `operator=(T x) device`, `f(device T *p)` and `f(threadgroup T *p)`, `struct of<device T *>` and `struct of<thread T
//! *>`.
//!
//! The code that runs has no address spaces, so these declarations would be duplicates. The first one stays.

use std::collections::{HashMap, HashSet};

use crate::lexer::Tokens;
use crate::parse::{Unit, outside};
use crate::rewrite::is_address_space;

/// The address spaces after parameter lists: those of `this` in member functions, which clang's C++ does not have.
pub(crate) fn member_qualifiers<'t>(t: &'t Tokens<'_>) -> impl Iterator<Item = usize> + 't {
    (1..t.len()).filter(|&i| {
        if !t.word(i).is_some_and(is_address_space) {
            return false;
        }
        let qualifies = |k: usize| t.word(k).is_some_and(|w| is_address_space(w) || w == "const");
        let start = (0..i).rev().find(|&k| !qualifies(k));
        let end = (i + 1..t.len()).find(|&k| !qualifies(k));
        start.is_some_and(|k| t.is(k, b')'))
            && end.is_some_and(|k| t.any(k, b"{:;=") || matches!(t.word(k), Some("noexcept" | "override" | "final")))
    })
}

/// The `constant` qualifiers after the parameters of constructors. A method of a constant object is a `const` method,
/// which a constructor cannot be.
pub(crate) fn constant_constructors(t: &Tokens<'_>) -> HashSet<usize> {
    let classes: HashSet<&str> =
        (1..t.len()).filter(|&i| matches!(t.word(i - 1), Some("struct" | "class"))).filter_map(|i| t.word(i)).collect();
    member_qualifiers(t)
        .filter(|&i| t.is_word(i, "constant"))
        .filter(|&i| {
            let open = (0..i).rev().find(|&k| t.is(k, b')')).and_then(|close| t.open(close));
            open.and_then(|open| t.word(open.checked_sub(1)?)).is_some_and(|name| classes.contains(name))
        })
        .collect()
}

/// The token ranges of declarations that differ from an earlier one only by address spaces.
pub(crate) fn twins(t: &Tokens<'_>, unit: &Unit) -> Vec<(usize, usize)> {
    let (mut found, mut seen, ignored) = (Vec::new(), HashMap::new(), constant_constructors(t));
    for s in &unit.statements {
        let head = s.body.map_or(s.last, |b| b.0);
        // Variables have no duplicates, and kernels have unique names.
        let declares = outside(t, s.first, head, |i| t.is(i, b'(')).is_some();
        let class = (s.first..head).any(|i| matches!(t.word(i), Some("struct" | "class")));
        if !declares && !class {
            continue;
        }
        if again(t, &ignored, &mut seen, &s.namespace, (s.first, head), s.body.is_some()) {
            found.push((s.first, s.last));
        } else if let Some((open, close)) = s.body.filter(|_| class) {
            members(t, &ignored, open, close, &mut found);
        }
    }
    found
}

/// Whether a declaration with this head was seen before with other address spaces.
fn again<'a>(
    t: &Tokens<'a>,
    ignored: &HashSet<usize>,
    seen: &mut HashMap<String, &'a str>,
    scope: &str,
    (first, head): (usize, usize),
    defines: bool,
) -> bool {
    let mut key = format!("{scope}{defines} ");
    let mut constant = false;
    let mut depth = 0usize;
    for i in without_initialisers(t, first, head) {
        let word = t.str(i);
        match word {
            "(" => depth += 1,
            ")" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if ignored.contains(&i) || (depth > 0 && names_parameter(t, i)) {
            continue;
        }
        // Without address spaces, `constant T` is `const T`; a second `const` is redundant.
        if word == "const" || word == "constant" {
            constant = true;
            continue;
        }
        if is_address_space(word) {
            continue;
        }
        if std::mem::take(&mut constant) {
            key.push_str("const ");
        }
        key.push_str(word);
        key.push(' ');
    }
    if constant {
        key.push_str("const");
    }
    let text = t.range(first, head);
    match seen.get(&key) {
        Some(&earlier) => earlier != text && (first..head).any(|i| t.word(i).is_some_and(is_address_space)),
        None => {
            seen.insert(key, text);
            false
        }
    }
}

/// Whether the word at `i`, between parentheses, is the name of a parameter: after its type, before the parameter's
/// end.
fn names_parameter(t: &Tokens<'_>, i: usize) -> bool {
    const TYPES: &[&str] = &[
        "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "size_t", "half", "bfloat",
        "float", "void", "const", "volatile",
    ];
    let word = t.word(i).is_some_and(|w| !TYPES.contains(&w) && !is_address_space(w));
    let typed = i > 0 && (t.any(i - 1, b"*&>") || t.word(i - 1).is_some_and(|w| !matches!(w, "typename" | "class")));
    word && typed && (t.any(i + 1, b",)=") || (t.is(i + 1, b'[') && t.is(i + 2, b'[')))
}

/// The tokens of a head without a constructor's initialisers: `S(T x) : x(x)` up to the colon.
fn without_initialisers(t: &Tokens<'_>, first: usize, head: usize) -> std::ops::Range<usize> {
    let colon = outside(t, first, head, |i| {
        t.is(i, b':') && !t.is(i + 1, b':') && !t.is(i.wrapping_sub(1), b':') && (first..i).any(|k| t.is(k, b')'))
    });
    first..colon.unwrap_or(head)
}

/// The duplicates among the members of a class.
fn members(t: &Tokens<'_>, ignored: &HashSet<usize>, open: usize, close: usize, found: &mut Vec<(usize, usize)>) {
    let mut seen = HashMap::new();
    let (mut i, mut first) = (open + 1, open + 1);
    while i < close {
        if t.is(i, b';') {
            if outside(t, first, i, |k| t.is(k, b'(')).is_some() && again(t, ignored, &mut seen, "", (first, i), false)
            {
                found.push((first, i + 1));
            }
            first = i + 1;
        } else if t.is(i, b'{') {
            let Some(end) = t.close(i) else { return };
            let class = (first..i).any(|k| matches!(t.word(k), Some("struct" | "class" | "union" | "enum")));
            let function = !class && outside(t, first, i, |k| t.is(k, b'(')).is_some();
            // `S() : a{1}, b{2} {}`: a comma or another brace follows an initialiser.
            let initialiser = t.any(end + 1, b",{");
            if class && !t.is_word(first, "template") {
                members(t, ignored, i, end, found);
            } else if function && !initialiser {
                if again(t, ignored, &mut seen, "", (first, i), true) {
                    found.push((first, end + 1));
                }
                first = end + 1;
            }
            i = end;
        } else if t.is(i, b':') && !t.is(i + 1, b':') && !t.is(i - 1, b':') && i == first + 1 {
            first = i + 1; // `public:`
        } else if t.any(i, b"([") {
            i = t.close(i).unwrap_or(close);
        }
        i += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;

    /// The duplicates of a text.
    fn removed(text: &str) -> Vec<String> {
        let tokens = Tokens::new(text);
        let unit = parse(&tokens).expect("parses");
        twins(&tokens, &unit).into_iter().map(|(a, b)| tokens.range(a, b).to_string()).collect()
    }

    #[test]
    fn declarations_of_other_address_spaces_are_duplicates() {
        assert_eq!(
            removed("float f(device const float *p) { return 1; } float f(const threadgroup float *p) { return 2; }"),
            ["float f(const threadgroup float *p) { return 2; }"]
        );
        assert_eq!(
            removed(
                "template <class T> struct of<device T *> { int a; }; template <class T> struct of<thread T *> { int b; };"
            ),
            ["template <class T> struct of<thread T *> { int b; }"]
        );
        // Without address spaces, `constant` is `const`.
        assert_eq!(removed("struct S { void f(constant int &x) {} void f(device const int &x) {} };").len(), 1);
    }

    #[test]
    fn members_and_constructors_are_duplicates() {
        let text = "struct S { int a; S(int x) thread : a{x} {} S(int y) constant : a{y} {} \
                    int get() const thread { return a; } int get() const device { return a; } int get() thread; };";
        assert_eq!(removed(text), ["S(int y) constant : a{y} {}", "int get() const device { return a; }"]);
    }

    #[test]
    fn overloads_stay() {
        for text in [
            "float f(float x) { return 1; } float f(int x) { return 2; }",
            "void f(device float *p) {} void f(device const float *p) {}",
            "struct S { void f(device int *p) {} void f(device int *p, int n) {} };",
            "namespace a { void f(device int *p) {} } namespace b { void f(thread int *p) {} }",
            "void f(device int *p); void f(device int *p) {}",
            "struct S { static constant constexpr const short a = 1; static constant constexpr const short b = 1; };",
            "template <typename T, typename U> void f(device T *p) {} template <typename T, int N> void f(thread T *p) {}",
        ] {
            assert_eq!(removed(text), [""; 0], "{text}");
        }
    }
}
