//! Converts MSL to C++ that clang accepts, with small edits that preserve line numbers.
//!
//! | MSL | becomes |
//! |---|---|
//! | `[[attributes]]` | nothing |
//! | `float4(a, b)`, `vec<T, 4>(a)`, `T(a)`, `static_cast<float4>(a)` | `metal::__make<...>(...)` |
//! | `(float4)a`, `(T)a` | `metal::__cast<...>(a)` |
//! | `(device float4 *)p` | `metal::__pointer_cast<device float4 *>(p)` |
//! | `threadgroup float s[64];` in a kernel | a typedef, and a reference to memory of the runtime |
//! | `0.5` | `0.5f`: MSL has no double |
//! | `constant T x [[function_constant(n)]];` | a macro of `glue.h` |

use std::collections::HashSet;

use crate::error::Diagnostic;
use crate::lexer::{TokenKind, Tokens};
use crate::parse::{ArgumentKind, Unit, attributes, outside};
use crate::spaces;

struct Edit {
    start: usize,
    end: usize,
    with: String,
}

struct Edits<'t, 'a> {
    t: &'t Tokens<'a>,
    list: Vec<Edit>,
}

impl Edits<'_, '_> {
    /// Replaces tokens `a..b`.
    fn replace(&mut self, a: usize, b: usize, with: impl Into<String>) {
        self.list.push(Edit { start: self.t.list[a].start, end: self.t.list[b - 1].end, with: with.into() });
    }

    /// Inserts after token `at - 1`.
    fn insert(&mut self, at: usize, with: &str) {
        let place = self.t.list[at - 1].end;
        self.list.push(Edit { start: place, end: place, with: with.into() });
    }

    fn apply(mut self) -> String {
        self.list.sort_by_key(|e| (e.start, e.end));
        let text = self.t.text;
        let (mut out, mut at) = (String::with_capacity(text.len() + text.len() / 8), 0);
        for e in &self.list {
            if e.start < at {
                continue; // inside of an earlier edit, e.g. the attribute of a function constant
            }
            out.push_str(&text[at..e.start]);
            out.push_str(&e.with);
            out.extend(text[e.start..e.end].bytes().filter(|&b| b == b'\n').map(|_| '\n'));
            at = e.end;
        }
        out.push_str(&text[at..]);
        out
    }
}

/// The purpose of a rewritten source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// clang checks its types, which include address spaces.
    Typed,
    /// clang compiles it; address spaces are plain pointers.
    Run,
}

/// The rewritten source, with an entry point for each kernel at its end.
pub(crate) fn rewrite(t: &Tokens<'_>, unit: &Unit, pass: Pass) -> Result<String, Diagnostic> {
    let mut edits = Edits { t, list: Vec::new() };
    match pass {
        Pass::Typed => spaces::member_qualifiers(t).for_each(|i| edits.replace(i, i + 1, " ")),
        Pass::Run => {
            spaces::constant_constructors(t).into_iter().for_each(|i| edits.replace(i, i + 1, " "));
            for (a, b) in spaces::twins(t, unit) {
                edits.replace(a, b, " ");
            }
        }
    }
    unselected(&mut edits, unit);
    constants(&mut edits, unit);
    for (a, b) in attributes(t, 0, t.len()) {
        if !(a..b).any(|i| t.is_word(i, "maybe_unused")) {
            edits.replace(a, b, " ");
        }
    }
    for (n, &index) in unit.kernel_statements.iter().enumerate() {
        if let Some((open, close)) = unit.statements[index].body {
            threadgroup_variables(&mut edits, open, close, n)?;
        }
    }
    types(&mut edits);
    literals(&mut edits);
    Ok(format!("#include \"msl_host.h\"\n{}\n#line 1 \"entry points\"\n{}", edits.apply(), entries(unit)))
}

/// Removes the kernels and the instantiations that the unit does not have (see `parse::select`).
fn unselected(edits: &mut Edits<'_, '_>, unit: &Unit) {
    for (index, name) in &unit.instantiation_statements {
        if !unit.kernels.iter().any(|k| &k.name == name) {
            edits.replace(unit.statements[*index].first, unit.statements[*index].last, " ");
        }
    }
    for (&index, function) in unit.kernel_statements.iter().zip(&unit.kernel_functions) {
        let s = &unit.statements[index];
        let template = edits.t.is_word(s.first, "template");
        if !template && !unit.kernels.iter().any(|k| &k.function == function) {
            edits.replace(s.first, s.last, " ");
        }
    }
}

fn constants(edits: &mut Edits<'_, '_>, unit: &Unit) {
    for (&index, c) in unit.constant_statements.iter().zip(&unit.constants) {
        let s = &unit.statements[index];
        edits.replace(s.first, s.last, format!("__MSL_FUNCTION_CONSTANT({}, {})", c.kind, c.name));
    }
    for (&index, name) in unit.derived_statements.iter().zip(&unit.derived) {
        let (t, s) = (edits.t, &unit.statements[index]);
        if let Some(equals) = outside(t, s.first, s.last, |i| t.is(i, b'=')) {
            edits.replace(s.first, s.first + 1, "__MSL_DERIVED_CONSTANT(");
            edits.replace(equals - 1, equals + 1, format!(", {name},"));
            edits.replace(s.last - 1, s.last, ");");
        }
    }
}

/// Rewrites each `threadgroup T a[n], b;` of a kernel's body: the declaration becomes a typedef of the variables'
/// types, followed by references of these types.
fn threadgroup_variables(
    edits: &mut Edits<'_, '_>,
    open: usize,
    close: usize,
    kernel: usize,
) -> Result<(), Diagnostic> {
    let t = edits.t;
    for i in open + 1..close {
        if !t.is_word(i, "threadgroup") || !t.any(i - 1, b";{}") {
            continue;
        }
        let Some(end) = outside(t, i, close, |k| t.is(k, b';')) else { continue };
        // A pointer, a reference or an initialised variable is not threadgroup memory itself.
        if outside(t, i, end, |k| t.any(k, b"*&=(")).is_some() {
            continue;
        }
        let mut references = String::new();
        for (a, b) in t.split(i + 1, end) {
            let name_end = outside(t, a, b, |k| t.is(k, b'[')).unwrap_or(b);
            let Some(name) = name_end.checked_sub(1).and_then(|k| t.word(k)) else {
                return Err(t.diagnostic(i, "cannot read this threadgroup variable"));
            };
            let kind = format!("__msl_type_{kernel}_{name}_{i}");
            edits.replace(name_end - 1, name_end, kind.clone());
            references.push_str(&format!(" __MSL_THREADGROUP_VARIABLE({kind}, {name});"));
        }
        edits.replace(i, i + 1, "typedef");
        edits.replace(end, end + 1, format!(";{references}"));
    }
    Ok(())
}

/// Floating-point literals without a suffix are floats.
fn literals(edits: &mut Edits<'_, '_>) {
    let t = edits.t;
    for i in 0..t.len() {
        let text = t.str(i);
        let hexadecimal = text.starts_with("0x") || text.starts_with("0X");
        let exponent: &[char] = if hexadecimal { &['p', 'P'] } else { &['e', 'E'] };
        let real = t.list[i].kind == TokenKind::Number && (text.contains('.') || text.contains(exponent));
        if real && text.ends_with(|c: char| c.is_ascii_digit() || c == '.') {
            edits.insert(i + 1, "f");
        }
    }
}

fn builtin_vector(word: &str) -> bool {
    word.strip_suffix(['2', '3', '4']).is_some_and(|base| {
        matches!(
            base,
            "bool"
                | "float"
                | "half"
                | "bfloat"
                | "char"
                | "uchar"
                | "short"
                | "ushort"
                | "int"
                | "uint"
                | "long"
                | "ulong"
        )
    })
}

/// Names that may denote a vector: aliases and template parameters.
fn aliases<'a>(t: &Tokens<'a>) -> HashSet<&'a str> {
    let mut names = HashSet::new();
    for i in 0..t.len() {
        match t.word(i) {
            Some("using") if t.is(i + 2, b'=') => names.extend(t.word(i + 1)),
            Some("typename" | "class") if t.any(i + 2, b",>=") => names.extend(t.word(i + 1)),
            Some("typedef") if t.word(i + 1).is_some_and(builtin_vector) => names.extend(t.word(i + 2)),
            _ => {}
        }
    }
    names
}

/// Constructors and casts.
fn types(edits: &mut Edits<'_, '_>) {
    let t = edits.t;
    let aliases = aliases(t);
    // The end of a type that begins at `i` and may be a vector: `float4`, `metal::vec<T, 4>`, an alias.
    let vector_type = |i: usize| -> Option<usize> {
        let at = if t.is_word(i, "metal") && t.is_scope(i + 1) { i + 3 } else { i };
        let word = t.word(at)?;
        if word == "vec" && t.is(at + 1, b'<') {
            t.close_angle(at + 1).map(|c| c + 1)
        } else {
            (builtin_vector(word) || matches!(word, "half" | "bfloat") || aliases.contains(word)).then_some(at + 1)
        }
    };
    for i in 0..t.len() {
        let before = i.checked_sub(1);
        if t.is(i, b'(') {
            if before.is_some_and(|b| t.word(b).is_some_and(|w| !matches!(w, "return" | "else" | "case"))) {
                continue; // a call, or sizeof, or an operator's name
            }
            let Some(close) = t.close(i) else { continue };
            let function = if vector_type(i + 1) == Some(close) {
                "metal::__cast<"
            } else if is_pointer_type(t, i + 1, close) {
                "metal::__pointer_cast<"
            } else {
                continue;
            };
            if let Some(end) = operand(t, close + 1) {
                edits.replace(i, i + 1, function);
                edits.replace(close, close + 1, ">(");
                edits.insert(end, ")");
            }
            continue;
        }
        if t.is_word(i, "static_cast") && t.is(i + 1, b'<') {
            if vector_type(i + 2).is_some_and(|end| t.is(end, b'>')) {
                edits.replace(i, i + 1, "metal::__make");
            }
            continue;
        }
        let Some(end) = vector_type(i) else { continue };
        if !t.is(end, b'(') {
            continue;
        }
        let qualified = before.is_some_and(|b| {
            t.is(b, b'.')
                || (t.is(b, b':') && b > 0 && t.is(b - 1, b':'))
                || (t.is(b, b'>') && b > 0 && t.is(b - 1, b'-'))
                || t.is_word(b, "operator")
        });
        // `thread T (&x)[8]` and `T (*f)(int)` declare; `T(*p)` converts.
        let declares = t.is(end + 1, b'&')
            || (t.is(end + 1, b'*')
                && before.is_none_or(|b| t.word(b).is_some_and(|w| w != "return") || t.any(b, b";{}")));
        if !qualified && !declares {
            edits.replace(i, end, format!("metal::__make<{}>", t.range(i, end)));
        }
    }
}

/// The end of the operand of a cast that starts at `i`: prefix operators and casts; a name, a number or parentheses;
/// and all following calls, indices and members. `None` if there is no operand, so that this is not a cast.
fn operand(t: &Tokens<'_>, i: usize) -> Option<usize> {
    let mut at = i;
    while t.any(at, b"-+!~*&") {
        at += 1;
    }
    if t.is(at, b'(') {
        at = t.close(at)? + 1;
        // `(a) b` is a cast of b.
        if matches!(t.list.get(at).map(|n| n.kind), Some(TokenKind::Word | TokenKind::Number))
            && !t.is_word(at, "const")
        {
            return operand(t, at);
        }
    } else if matches!(t.list.get(at)?.kind, TokenKind::Word | TokenKind::Number) {
        at += 1;
    } else {
        return None;
    }
    loop {
        if t.any(at, b"([") {
            at = t.close(at)? + 1;
        } else if t.is_scope(at) || (t.is(at, b'-') && t.is(at + 1, b'>')) {
            at += 3;
        } else if t.is(at, b'.') {
            at += 2;
        } else if t.is(at, b'<') {
            match t.close_angle(at) {
                Some(close) if t.is(close + 1, b'(') => at = close + 1,
                _ => return Some(at),
            }
        } else if (t.is(at, b'+') && t.is(at + 1, b'+')) || (t.is(at, b'-') && t.is(at + 1, b'-')) {
            at += 2;
        } else {
            return (at <= t.len()).then_some(at);
        }
    }
}

/// Whether tokens `a..b` are a pointer type with an address space and nothing else, such as `const device vec<T, 4> *`.
fn is_pointer_type(t: &Tokens<'_>, a: usize, b: usize) -> bool {
    let spaced = (a..b).any(|i| t.word(i).is_some_and(is_address_space));
    let plain = (a..b).all(|i| matches!(t.list[i].kind, TokenKind::Word | TokenKind::Number) || t.any(i, b"*:<>,"));
    spaced && plain && (a..b).any(|i| t.is(i, b'*')) && (t.is(b - 1, b'*') || t.is_word(b - 1, "const"))
}

pub(crate) fn is_address_space(word: &str) -> bool {
    matches!(
        word,
        "device" | "constant" | "threadgroup" | "thread" | "threadgroup_imageblock" | "ray_data" | "object_data"
    )
}

/// `extern "C"` functions that bind the parameters of each kernel, and access to the function constants.
fn entries(unit: &Unit) -> String {
    let mut out = String::new();
    for (n, kernel) in unit.kernels.iter().enumerate() {
        let mut values = String::new();
        for argument in &kernel.arguments {
            values.push_str(&match &argument.kind {
                ArgumentKind::Buffer(index) => format!(", metal::__at_buffer<{index}>{{}}"),
                ArgumentKind::Threadgroup(index) => format!(", metal::__at_threadgroup<{index}>{{}}"),
                ArgumentKind::Builtin(name) => format!(", metal::__at_{name}{{}}"),
            });
        }
        out.push_str(&format!(
            "extern \"C\" void msl_entry_{n}(const MslContext *c) {{ metal::__call(&::{}, c{values}); }}\n",
            kernel.function
        ));
    }
    if !unit.constants.is_empty() {
        out.push_str("#if !defined(MSL_TYPED) && !defined(MSL_COUNT)\n");
        let each = |f: fn(usize, &str) -> String| {
            unit.constants.iter().enumerate().map(|(i, c)| f(i, &c.name)).collect::<String>()
        };
        out.push_str(&format!(
            "extern \"C\" void msl_forget_constants() {{ {} }}\n",
            each(|_, name| format!("__msl_defined_{name} = false; "))
        ));
        out.push_str(&format!(
            "extern \"C\" void *msl_constant(unsigned i) {{ {} return nullptr; }}\n",
            each(|i, name| format!("if (i == {i}) {{ __msl_defined_{name} = true; return &{name}; }} "))
        ));
        let derive: String = unit.derived.iter().map(|name| format!("__msl_derive_{name}(); ")).collect();
        out.push_str(&format!("extern \"C\" void msl_derive_constants() {{ {derive} }}\n#endif\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lint::missing_qualifiers;
    use crate::parse::{instantiate_all, parse};

    fn rewritten(text: &str) -> String {
        let tokens = Tokens::new(text);
        let unit = parse(&tokens).expect("parses");
        rewrite(&tokens, &unit, Pass::Run).expect("rewrites")
    }

    #[test]
    fn casts_take_their_operand_and_no_more() {
        let cases = [
            ("x = (float4)a.b[1] * c;", "x = metal::__cast<float4>(a.b[1]) * c;"),
            ("x = -(half4)-f(a)(b) + c;", "x = -metal::__cast<half4>(-f(a)(b)) + c;"),
            ("x = (float4)(half4)a;", "x = metal::__cast<float4>(metal::__cast<half4>(a));"),
            ("x = *(device float4 *)(p + i);", "x = *metal::__pointer_cast<device float4 *>((p + i));"),
            ("x = (float4)as_type<half4>(a) < b;", "x = metal::__cast<float4>(as_type<half4>(a)) < b;"),
            ("x = 0.5 * 1e-3 + 1. - 0x1p-2 + 2.5h + 1.0f;", "x = 0.5f * 1e-3f + 1.f - 0x1p-2f + 2.5h + 1.0f;"),
            ("x = c ? a : half4(b);", "x = c ? a : metal::__make<half4>(b);"),
            ("x = (a) * b; y = sizeof(float4) * 2;", "x = (a) * b; y = sizeof(float4) * 2;"),
            (
                "x = metal::float4(vec<T, 2>(1), 2);",
                "x = metal::__make<metal::float4>(metal::__make<vec<T, 2>>(1), 2);",
            ),
        ];
        for (before, after) in cases {
            let text = format!("void f() {{ {before} }}");
            assert!(rewritten(&text).contains(after), "{before} became {}", rewritten(&text));
        }
    }

    /// For any tokens, the front end terminates and preserves line numbers.
    #[test]
    fn any_tokens_are_processed() {
        let words = [
            "template",
            "kernel",
            "void",
            "f",
            "<",
            ">",
            "(",
            ")",
            "[",
            "]",
            "[[",
            "]]",
            "{",
            "}",
            ";",
            ",",
            "=",
            "*",
            "&",
            ":",
            "::",
            ".",
            "-",
            "host_name",
            "buffer",
            "\"x\"",
            "3",
            "0x1e+2",
            "threadgroup",
            "thread",
            "device",
            "constant",
            "function_constant",
            "float4",
            "vec",
            "metal",
            "typename",
            "using",
            "static_cast",
            "decltype",
            "namespace",
            "extern",
            "struct",
            "for",
            "return",
            "const",
            "\n",
            "\n# 5 \"a.h\"\n",
            "\"",
            "'",
            "\\",
            "é",
            "is_function_constant_defined",
            "operator",
        ];
        let mut seed = 1u64;
        let mut next = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        for _ in 0..30_000 {
            let mut text = String::new();
            for _ in 0..next(40) {
                text.push_str(words[next(words.len())]);
                if next(3) > 0 {
                    text.push(' ');
                }
            }
            let tokens = Tokens::new(&text);
            let Ok(mut unit) = parse(&tokens) else { continue };
            let _ = instantiate_all(&tokens, &mut unit, &[("a".into(), "f<3>".into())]);
            missing_qualifiers(&tokens, &unit);
            for pass in [Pass::Typed, Pass::Run] {
                let Ok(out) = rewrite(&tokens, &unit, pass) else { continue };
                let lines = |s: &str| s.matches('\n').count();
                let entries = entries(&unit);
                assert_eq!(lines(&out), lines(&text) + 3 + lines(&entries), "{text}");
            }
        }
    }
}
