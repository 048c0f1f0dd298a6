//! Finds the parts of a source that the front end needs: kernels with their attributes, instantiations, function
//! constants.

use crate::error::Diagnostic;
use crate::lexer::{TokenKind, Tokens};

/// A kernel, as launches need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name, or its `host_name`.
    pub name: String,
    /// Its parameters, in order.
    pub arguments: Vec<Argument>,
    pub(crate) function: String,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Its name in the source.
    pub name: String,
    /// The source of its value.
    pub kind: ArgumentKind,
    /// The function constant that decides whether it exists.
    pub only_if: Option<String>,
    /// Whether it points to constant memory.
    pub constant: bool,
}

/// The source of a parameter's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArgumentKind {
    /// `[[buffer(n)]]`
    Buffer(u32),
    /// `[[threadgroup(n)]]`
    Threadgroup(u32),
    /// `[[thread_position_in_grid]]` and the like.
    Builtin(String),
}

#[derive(Clone, Debug)]
pub(crate) struct FunctionConstant {
    pub index: u32,
    pub name: String,
    pub kind: String,
}

/// A declaration or definition at namespace scope: tokens `first..last`; `body` holds the braces of a definition.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    pub first: usize,
    pub last: usize,
    pub body: Option<(usize, usize)>,
    pub namespace: String,
}

#[derive(Default)]
pub(crate) struct Unit {
    pub kernels: Vec<Kernel>,
    pub constants: Vec<FunctionConstant>,
    /// Constants computed from function constants, in order.
    pub derived: Vec<String>,
    pub statements: Vec<Statement>,
    /// Indices of the statements that are function constants, derived constants, and kernel definitions.
    pub constant_statements: Vec<usize>,
    pub derived_statements: Vec<usize>,
    pub kernel_statements: Vec<usize>,
    /// The functions of `kernel_statements`.
    pub kernel_functions: Vec<String>,
    /// Statements `template [[host_name("x")]] ...`: index and name.
    pub instantiation_statements: Vec<(usize, String)>,
    /// Parameters without an attribute.
    pub unnumbered: Vec<Diagnostic>,
}

const BUILTINS: &[&str] = &[
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
];

/// The attributes `[[...]]` in `a..b`: token ranges with their brackets.
pub(crate) fn attributes(t: &Tokens<'_>, a: usize, b: usize) -> Vec<(usize, usize)> {
    let (mut found, mut i) = (Vec::new(), a);
    while i + 1 < b {
        let opens = t.is(i, b'[') && t.is(i + 1, b'[');
        if let Some(close) = opens.then(|| t.close(i)).flatten() {
            found.push((i, close + 1));
            i = close;
        }
        i += 1;
    }
    found
}

fn statements(t: &Tokens<'_>) -> Vec<Statement> {
    let (mut list, mut namespaces) = (Vec::new(), Vec::<String>::new());
    let (mut i, mut first) = (0, 0);
    while i < t.len() {
        if t.is(i, b';') {
            if first < i {
                list.push(Statement { first, last: i + 1, body: None, namespace: namespaces.concat() });
            }
            first = i + 1;
        } else if t.is(i, b'{') {
            let opens_scope = t.is_word(first, "namespace") || (t.is_word(first, "extern") && i == first + 2);
            if opens_scope {
                let name = if t.is_word(first, "namespace") && i > first + 1 { t.range(first + 1, i) } else { "" };
                namespaces.push(if name.is_empty() { String::new() } else { format!("{name}::") });
                first = i + 1;
            } else {
                let close = t.close(i).unwrap_or(t.len() - 1);
                list.push(Statement { first, last: close + 1, body: Some((i, close)), namespace: namespaces.concat() });
                (i, first) = (close, close + 1);
            }
        } else if t.is(i, b'}') {
            namespaces.pop();
            first = i + 1;
        } else if t.any(i, b"([") {
            i = t.close(i).unwrap_or(i);
        }
        i += 1;
    }
    list
}

/// The first token in `a..b` outside of brackets that satisfies `wanted`.
pub(crate) fn outside(t: &Tokens<'_>, a: usize, b: usize, wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let mut i = a;
    while i < b {
        if wanted(i) {
            return Some(i);
        }
        if t.any(i, b"([{") {
            i = t.close(i)?;
        }
        i += 1;
    }
    None
}

pub(crate) fn parse(t: &Tokens<'_>) -> Result<Unit, Diagnostic> {
    let mut unit = Unit { statements: statements(t), ..Unit::default() };
    let mut templates: Vec<Kernel> = Vec::new();
    let mut instantiations = Vec::new();
    for index in 0..unit.statements.len() {
        let s = unit.statements[index].clone();
        if t.is_word(s.first, "template") && !t.is(s.first + 1, b'<') {
            if let Some((name, function)) = instantiation(t, &s)? {
                unit.instantiation_statements.push((index, name.clone()));
                instantiations.push((s.first, name, function));
            }
        } else if let Some((kernel, template)) = kernel(t, &s)? {
            unit.kernel_statements.push(index);
            unit.kernel_functions.push(kernel.function.clone());
            unit.unnumbered.extend(unnumbered(t, &s));
            templates.push(kernel.clone());
            if !template {
                unit.kernels.push(kernel);
            }
        } else if let Some(constant) = function_constant(t, &s)? {
            unit.constant_statements.push(index);
            unit.constants.push(constant);
        } else if let Some(name) = derived_constant(t, &s, &unit)? {
            unit.derived_statements.push(index);
            unit.derived.push(name);
        }
    }
    for (place, name, function) in instantiations {
        let kernel = instantiate(&templates, &name, &function);
        unit.kernels.push(kernel.ok_or_else(|| {
            t.diagnostic(place, format!("`{name}` instantiates `{function}`, which is not a kernel of this source"))
        })?);
    }
    Ok(unit)
}

/// The kernel that `function` (`scale<half, 4>`) is an instance of, under the name `name`.
fn instantiate(templates: &[Kernel], name: &str, function: &str) -> Option<Kernel> {
    let base = function.split('<').next().unwrap_or(function).trim();
    let template = templates.iter().find(|k| k.name == base || k.function == base)?;
    Some(Kernel { name: name.into(), arguments: template.arguments.clone(), function: function.into() })
}

/// Adds the instantiations that the caller requested.
pub(crate) fn instantiate_all(t: &Tokens<'_>, unit: &mut Unit, wanted: &[(String, String)]) -> Result<(), Diagnostic> {
    let mut templates = Vec::new();
    for &index in &unit.kernel_statements {
        templates.extend(kernel(t, &unit.statements[index])?.map(|k| k.0));
    }
    for (name, function) in wanted {
        let kernel = instantiate(&templates, name, function);
        unit.kernels.push(kernel.ok_or_else(|| {
            t.diagnostic(0, format!("`{name}` instantiates `{function}`, which is not a kernel of this source"))
        })?);
    }
    Ok(())
}

/// Limits the unit to the kernels of these names.
pub(crate) fn select(t: &Tokens<'_>, unit: &mut Unit, wanted: &[String]) -> Result<(), Diagnostic> {
    for name in wanted {
        if !unit.kernels.iter().any(|k| &k.name == name) {
            return Err(t.diagnostic(0, format!("the source has no kernel `{name}`")));
        }
    }
    unit.kernels.retain(|k| wanted.contains(&k.name));
    Ok(())
}

/// `template [[host_name("x")]] [[kernel]] void f<float>(...)` or `decltype(f<float>) f<float>`: the name and
/// `f<float>`.
fn instantiation(t: &Tokens<'_>, s: &Statement) -> Result<Option<(String, String)>, Diagnostic> {
    let mut name = None;
    for (a, b) in attributes(t, s.first, s.last) {
        if let Some(at) = (a..b).find(|&i| t.is_word(i, "host_name")) {
            let texts = (at..b).filter(|&i| t.list[i].kind == TokenKind::Text);
            name = Some(texts.map(|i| t.str(i).trim_matches('"')).collect::<String>());
        }
    }
    let Some(name) = name else { return Ok(None) };
    let bad = || t.diagnostic(s.first, format!("cannot read the instantiation of `{name}`"));
    let mut end = s.last - 1; // without the semicolon
    if t.is(end - 1, b')') {
        end = t.open(end - 1).ok_or_else(bad)?;
    }
    let mut from = end.checked_sub(1).ok_or_else(bad)?;
    if t.is(from, b'>') {
        from = t.open_angle(from).and_then(|i| i.checked_sub(1)).ok_or_else(bad)?;
    }
    t.word(from).ok_or_else(bad)?;
    Ok(Some((name, format!("{}{}", s.namespace, t.range(from, end)))))
}

/// A kernel definition, and whether it is a template.
fn kernel(t: &Tokens<'_>, s: &Statement) -> Result<Option<(Kernel, bool)>, Diagnostic> {
    let Some((body, _)) = s.body else { return Ok(None) };
    let bare = outside(t, s.first, body, |i| t.is_word(i, "kernel"));
    // `[[kernel]]`, or `[[kernel, max_total_threads_per_threadgroup(64)]]`.
    let attribute = attributes(t, s.first, body)
        .into_iter()
        .any(|(a, b)| t.split(a + 2, b - 2).iter().any(|&(p, q)| q == p + 1 && t.is_word(p, "kernel")));
    if bare.is_none() && !attribute {
        return Ok(None);
    }
    let bad = |what: &str| t.diagnostic(s.first, format!("cannot read this kernel: {what}"));
    let (open, close) = parameter_list(t, s).ok_or_else(|| bad("no parameter list"))?;
    let name = t.str(open - 1).to_string();
    let mut arguments = Vec::new();
    for (a, b) in t.split(open + 1, close) {
        arguments.push(argument(t, a, b).map_err(|what| t.diagnostic(a, format!("kernel {name}: {what}")))?);
    }
    number(&mut arguments).map_err(|what| bad(&what))?;
    let function = format!("{}{name}", s.namespace);
    Ok(Some((Kernel { name, arguments, function }, t.is_word(s.first, "template"))))
}

/// The parameters of a kernel without an index, which Metal numbers.
fn unnumbered(t: &Tokens<'_>, s: &Statement) -> Vec<Diagnostic> {
    let Some((open, close)) = parameter_list(t, s) else { return Vec::new() };
    let without = t.split(open + 1, close).into_iter().filter(|&(a, b)| attributes(t, a, b).is_empty());
    without.map(|(a, b)| t.diagnostic(a, format!("`{}` has no attribute that binds it", t.range(a, b)))).collect()
}

/// The parentheses of a kernel's parameters: after a word, outside of attributes and of the template's head.
fn parameter_list(t: &Tokens<'_>, s: &Statement) -> Option<(usize, usize)> {
    let body = s.body?.0;
    let start =
        if t.is_word(s.first, "template") { t.close_angle(s.first + 1).map_or(s.first, |i| i + 1) } else { s.first };
    let open = outside(t, start, body, |i| t.is(i, b'(') && i > start && t.word(i - 1).is_some())?;
    Some((open, t.close(open)?))
}

fn argument(t: &Tokens<'_>, a: usize, b: usize) -> Result<Argument, String> {
    let attributes = attributes(t, a, b);
    let end = attributes.first().map_or(b, |x| x.0);
    let name = (a..end).rev().find_map(|i| t.word(i)).unwrap_or("").to_string();
    let (mut kind, mut only_if) = (None, None);
    for (x, y) in attributes {
        for (p, q) in t.split(x + 2, y - 2) {
            let word = t.word(p).unwrap_or("");
            let inner = if t.is(p + 1, b'(') { t.range(p + 2, q - 1) } else { "" };
            let index = || {
                inner
                    .parse::<u32>()
                    .ok()
                    .filter(|&n| n < 31)
                    .ok_or(format!("`{word}({inner})` needs an index below 31"))
            };
            match word {
                "buffer" => kind = Some(ArgumentKind::Buffer(index()?)),
                "threadgroup" => kind = Some(ArgumentKind::Threadgroup(index()?)),
                "function_constant" => only_if = Some(inner.to_string()),
                _ if BUILTINS.contains(&word) => kind = Some(ArgumentKind::Builtin(word.into())),
                _ => return Err(format!("parameter `{name}` has an unknown attribute: {word}")),
            }
        }
    }
    let spaced = |space: &str| (a..end).any(|i| t.is_word(i, space));
    let kind = match kind {
        Some(kind) => kind,
        // Without an attribute, a pointer or a reference gets an index; see `number`.
        None if spaced("threadgroup") => ArgumentKind::Threadgroup(UNNUMBERED),
        None if spaced("device") || spaced("constant") => ArgumentKind::Buffer(UNNUMBERED),
        None => return Err(format!("parameter `{name}` has no attribute that binds it")),
    };
    Ok(Argument { name, kind, only_if, constant: spaced("constant") })
}

/// The index of a parameter that has no attribute, until `number` sees all parameters.
const UNNUMBERED: u32 = u32::MAX;

/// Gives parameters without an index, in order, the lowest unused indices, as Metal does.
fn number(arguments: &mut [Argument]) -> Result<(), String> {
    fn index(kind: &mut ArgumentKind) -> Option<(usize, &mut u32)> {
        match kind {
            ArgumentKind::Buffer(index) => Some((0, index)),
            ArgumentKind::Threadgroup(index) => Some((1, index)),
            ArgumentKind::Builtin(_) => None,
        }
    }
    // One bit per index, for buffers and for threadgroup memory.
    let mut taken = [0u32; 2];
    for (space, index) in arguments.iter_mut().filter_map(|a| index(&mut a.kind)) {
        taken[space] |= 1u32.checked_shl(*index).unwrap_or(0);
    }
    for (space, index) in arguments.iter_mut().filter_map(|a| index(&mut a.kind)) {
        if *index == UNNUMBERED {
            *index = taken[space].trailing_ones();
            if *index > 30 {
                return Err("more than 31 buffers".into());
            }
            taken[space] |= 1 << *index;
        }
    }
    Ok(())
}

/// `constant T name [[function_constant(n)]];`
fn function_constant(t: &Tokens<'_>, s: &Statement) -> Result<Option<FunctionConstant>, Diagnostic> {
    if !t.is_word(s.first, "constant") {
        return Ok(None);
    }
    let Some(&(a, b)) = attributes(t, s.first, s.last).iter().find(|x| t.is_word(x.0 + 2, "function_constant")) else {
        return Ok(None);
    };
    let bad = |what: &str| t.diagnostic(s.first, format!("function constant: {what}"));
    if !s.namespace.is_empty() {
        return Err(bad("declare it outside of namespaces"));
    }
    let index = sum(t, a + 4, b - 3).ok_or_else(|| bad("its index must be a number or a sum of numbers"))?;
    let name = t.word(a - 1).ok_or_else(|| bad("no name"))?.to_string();
    let kind = (s.first + 1..a - 1).filter(|&i| !t.is_word(i, "const")).map(|i| t.str(i)).collect::<Vec<_>>().join(" ");
    Ok(Some(FunctionConstant { index, name, kind }))
}

/// The value of `100 + 20 + 3`, without parentheses.
fn sum(t: &Tokens<'_>, a: usize, b: usize) -> Option<u32> {
    let mut total = 0u32;
    for i in a..b {
        if (i - a).is_multiple_of(2) {
            total = total.checked_add(t.str(i).parse().ok()?)?;
        } else if !t.is(i, b'+') {
            return None;
        }
    }
    ((b - a) % 2 == 1).then_some(total)
}

/// `constant T name = ...;` that depends on a function constant, directly or through another such constant.
fn derived_constant(t: &Tokens<'_>, s: &Statement, unit: &Unit) -> Result<Option<String>, Diagnostic> {
    if !t.is_word(s.first, "constant") || unit.constants.is_empty() {
        return Ok(None);
    }
    let Some(equals) = outside(t, s.first, s.last, |i| t.is(i, b'=')) else { return Ok(None) };
    let known = |w: &str| {
        w == "is_function_constant_defined"
            || unit.constants.iter().any(|c| c.name == w)
            || unit.derived.iter().any(|d| d == w)
    };
    if !(equals..s.last).any(|i| t.word(i).is_some_and(known)) {
        return Ok(None);
    }
    match t.word(equals - 1) {
        Some(name) if s.namespace.is_empty() && s.body.is_none() => Ok(Some(name.into())),
        _ => Err(t.diagnostic(
            s.first,
            "a constant computed from function constants must be a plain variable outside of namespaces",
        )),
    }
}
