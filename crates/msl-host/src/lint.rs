//! Finds pointers and references without an address space. MSL requires one on each (`thread` for locals). clang
//! treats a missing qualifier as the default space and does not report it.

use crate::error::Diagnostic;
use crate::lexer::{TokenKind, Tokens};
use crate::parse::{Statement, Unit, outside};
use crate::rewrite::is_address_space;

/// All pointers and references without an address space, in source order.
pub(crate) fn missing_qualifiers(t: &Tokens<'_>, unit: &Unit) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for s in &unit.statements {
        signature(t, s, &mut found);
        if let Some((open, close)) = s.body {
            declarations(t, open, close, &mut found);
            if (s.first..open).any(|i| matches!(t.word(i), Some("struct" | "class"))) {
                members(t, open, close, &mut found);
            }
        }
    }
    casts(t, &mut found);
    found.sort_unstable();
    found.dedup();
    found
        .into_iter()
        .map(|i| {
            t.diagnostic(
                i,
                format!(
                    "`{}` names no address space: write `thread`, `device`, `constant` or `threadgroup`",
                    around(t, i)
                ),
            )
        })
        .collect()
}

/// The declarator around a `*` or `&`, for the message: `float *p`.
fn around<'a>(t: &Tokens<'a>, i: usize) -> &'a str {
    let end = if t.word(i + 1).is_some() { i + 2 } else { i + 1 };
    let mut start = i.saturating_sub(1);
    if t.is(start, b'>') {
        start = t.open_angle(start).map_or(start, |s| s.saturating_sub(1));
    }
    t.range(start, end)
}

fn spaced(t: &Tokens<'_>, a: usize, b: usize) -> bool {
    (a..b).any(|i| t.word(i).is_some_and(is_address_space))
}

/// A `*` or `&` that is not part of `&&`, outside of template arguments, in `a..b`; also in `(&name)[n]`.
fn indirection(t: &Tokens<'_>, a: usize, b: usize) -> Option<usize> {
    let mut i = a;
    while i < b {
        if t.is(i, b'=') {
            return None; // a default value
        }
        if t.is(i, b'<') {
            i = t.close_angle(i).filter(|&c| c < b).unwrap_or(i);
        } else if t.is(i, b'[') {
            i = t.close(i)?;
        } else if t.is(i, b'*') || (t.is(i, b'&') && !t.is(i + 1, b'&') && !t.is(i.wrapping_sub(1), b'&')) {
            return Some(i);
        }
        i += 1;
    }
    None
}

/// The parameters and the return type of a function.
fn signature(t: &Tokens<'_>, s: &Statement, found: &mut Vec<usize>) {
    if matches!(
        t.word(s.first),
        Some("using" | "typedef" | "struct" | "enum" | "constant" | "constexpr" | "static_assert")
    ) {
        return;
    }
    let start = if t.is_word(s.first, "template") && t.is(s.first + 1, b'<') {
        t.close_angle(s.first + 1).map_or(s.first, |i| i + 1)
    } else {
        s.first
    };
    let end = s.body.map_or(s.last, |b| b.0);
    let Some(open) =
        outside(t, start, end, |i| t.is(i, b'(') && i > start && (t.word(i - 1).is_some() || t.is(i - 1, b'>')))
    else {
        return;
    };
    if outside(t, start, open, |i| t.is(i, b'=')).is_some() || t.is_word(open - 1, "decltype") {
        return; // a variable, or an instantiation by decltype
    }
    if let Some(i) = indirection(t, start, open).filter(|_| !spaced(t, start, open)) {
        found.push(i);
    }
    parameters(t, open, found);
}

fn parameters(t: &Tokens<'_>, open: usize, found: &mut Vec<usize>) {
    let Some(close) = t.close(open) else { return };
    for (a, b) in t.split(open + 1, close) {
        found.extend(indirection(t, a, b).filter(|_| !spaced(t, a, b)));
    }
}

/// Member functions of a struct: their parameters.
fn members(t: &Tokens<'_>, open: usize, close: usize, found: &mut Vec<usize>) {
    let mut i = open + 1;
    while i < close {
        if t.is(i, b'(') && t.word(i - 1).is_some() {
            let Some(end) = t.close(i) else { return };
            let defines = t.any(end + 1, b"{:") || t.is_word(end + 1, "const") || t.is_word(end + 1, "thread");
            if defines {
                parameters(t, i, found);
            }
            i = end;
        } else if t.is(i, b'{') {
            i = t.close(i).unwrap_or(close); // a body: its declarations are checked elsewhere
        }
        i += 1;
    }
}

/// Declarations at the start of a statement: `float *p = ...`, `auto &x = ...`.
fn declarations(t: &Tokens<'_>, open: usize, close: usize, found: &mut Vec<usize>) {
    for i in open..close {
        let starts = t.any(i, b";{}") || (t.is(i, b'(') && t.is_word(i - 1, "for"));
        if !starts {
            continue;
        }
        let mut at = i + 1;
        while matches!(t.word(at), Some("const" | "static" | "volatile" | "constexpr")) {
            at += 1;
        }
        let Some(end) = type_end(t, at) else { continue };
        let mut star = end;
        while t.is(star, b'*') || t.is(star, b'&') || t.is_word(star, "const") {
            star += 1;
        }
        let indirect = (end..star).find(|&k| t.any(k, b"*&"));
        let declares = t.word(star).is_some() && t.any(star + 1, b"=;,[{:");
        if let Some(k) = indirect.filter(|_| declares) {
            found.push(k);
        }
    }
}

/// The end of a type's name at `i`, if it exists and has no address space.
fn type_end(t: &Tokens<'_>, i: usize) -> Option<usize> {
    let mut at = i;
    loop {
        let word = t.word(at)?;
        if is_address_space(word)
            || matches!(word, "return" | "using" | "typedef" | "goto" | "delete" | "case" | "else" | "struct")
        {
            return None;
        }
        at += 1;
        if t.is(at, b'<') {
            at = t.close_angle(at)? + 1;
        }
        if t.is_scope(at) {
            at += 2;
        } else if !(matches!(word, "unsigned" | "signed" | "const") && t.word(at).is_some()) {
            return Some(at);
        }
    }
}

/// `(float *)p`, `reinterpret_cast<float *>(p)`, `using P = float *;`: a `*` without a following operand ends a type.
fn casts(t: &Tokens<'_>, found: &mut Vec<usize>) {
    for i in 1..t.len() {
        if !t.is(i, b'*') || !t.any(i + 1, b")>;,") {
            continue;
        }
        let mut from = i;
        while from > 0
            && (matches!(t.list[from - 1].kind, TokenKind::Word | TokenKind::Number) || t.any(from - 1, b":*<>"))
            && !t.is_word(from - 1, "return")
        {
            from -= 1;
        }
        // `<` before the type opens the enclosing template arguments; the words before it are not part of the type.
        if from < i && !spaced(t, from, i) {
            found.push(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;

    fn lines(text: &str) -> Vec<u32> {
        let marked = format!("# 1 \"a.metal\"\n{text}");
        let tokens = Tokens::new(&marked);
        let unit = parse(&tokens).expect("parses");
        missing_qualifiers(&tokens, &unit).iter().map(|d| d.line).collect()
    }

    #[test]
    fn finds_parameters_locals_casts_and_members() {
        assert_eq!(lines("float f(float *p) { return p[0]; }"), [1]);
        assert_eq!(lines("void f(thread float &a,\n float4 &b) {}"), [2]);
        assert_eq!(lines("void f(thread float *p) {\n float *q = p;\n auto &r = *p;\n}"), [2, 3]);
        assert_eq!(
            lines("void f(device float *p) {\n x = ((float4 *)p)[0];\n y = reinterpret_cast<float4 *>(p);\n}"),
            [2, 3]
        );
        assert_eq!(lines("struct S {\n void set(const float &x) { v = x; }\n float *p;\n};"), [2, 3]);
        assert_eq!(lines("using P = float *;"), [1]);
        assert_eq!(lines("template <typename T>\nvoid f(T (&x)[8]) {}"), [2]);
        assert_eq!(lines("float *f(int i) { return 0; }"), [1]);
    }

    #[test]
    fn leaves_arithmetic_and_qualified_pointers_alone() {
        assert_eq!(lines("int f(int a, int b) { int c = a * b; c = a & b; c *= a; return a * b; }"), []);
        assert_eq!(
            lines(
                "void f(device const float *p, thread float (&x)[4]) { for (device const float *q = p; q < p + a * b; q++) g(*q, &x); }"
            ),
            []
        );
        assert_eq!(
            lines(
                "constant float T[2] = {1.0f, 2.0f}; bool f(bool a, bool b) { if (a && b) { return a; } return (a & b); }"
            ),
            []
        );
        assert_eq!(
            lines(
                "void f(device float *p) { device float4 *q = (device float4 *)p; h<device float *>(p); thread auto &r = *p; }"
            ),
            []
        );
    }
}
