//! Declarations that differ only by an address space: `operator=(T x) thread` and `operator=(T x) device`,
//! `f(device T *p)` and `f(threadgroup T *p)`, `struct of<device T *>` and `struct of<thread T *>`.
//!
//! The code that runs has no address spaces, so such declarations would be the same. One of them stays.

use std::collections::{HashMap, HashSet};

use crate::lexer::Tokens;
use crate::parse::{Unit, outside};
use crate::rewrite::is_address_space;

/// The address spaces behind parameter lists: those of `this` in member functions, which clang's C++ does not have.
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

/// Of these, `constant` behind the parameters of a constructor: a method of a constant object is a `const` method,
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

/// The token ranges of declarations that are the same as an earlier one but for address spaces.
pub(crate) fn twins(t: &Tokens<'_>, unit: &Unit) -> Vec<(usize, usize)> {
    let (mut found, mut seen, ignored) = (Vec::new(), HashMap::new(), constant_constructors(t));
    for s in &unit.statements {
        let head = s.body.map_or(s.last, |b| b.0);
        // Variables have no twins, and kernels have names of their own.
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
    for i in initialisers(t, first, head) {
        let word = t.str(i);
        if ignored.contains(&i) {
            continue;
        }
        // `constant T` is `const T` where there are no address spaces; a second `const` says nothing new.
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
        Some(&earlier) => earlier != text,
        None => {
            seen.insert(key, text);
            false
        }
    }
}

/// The tokens of a head without a constructor's initialisers: `S(T x) : x(x)` up to the colon.
fn initialisers(t: &Tokens<'_>, first: usize, head: usize) -> std::ops::Range<usize> {
    let colon = outside(t, first, head, |i| {
        t.is(i, b':') && !t.is(i + 1, b':') && !t.is(i.wrapping_sub(1), b':') && (first..i).any(|k| t.is(k, b')'))
    });
    first..colon.unwrap_or(head)
}

/// The twins among the members of a class.
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
            // `: a{1}, b(2) {`: the body is the brace that no comma or brace follows.
            let initialiser = function && t.any(end + 1, b",{");
            if class && !t.is_word(first, "template") {
                members(t, ignored, i, end, found);
            }
            i = end;
            if function && !initialiser {
                let body = (first..=end).rev().find(|&k| t.is(k, b'{') && t.close(k) == Some(end)).unwrap_or(end);
                if again(t, ignored, &mut seen, "", (first, body), true) {
                    found.push((first, end + 1));
                }
                first = end + 1;
            } else if !function && !t.is(end + 1, b';') && !t.any(end + 1, b",") && !class {
                first = first.max(open + 1);
            }
        } else if t.is(i, b':') && !t.is(i + 1, b':') && !t.is(i - 1, b':') && i == first + 1 {
            first = i + 1; // `public:`
        } else if t.any(i, b"([") {
            i = t.close(i).unwrap_or(close);
        }
        i += 1;
    }
}
