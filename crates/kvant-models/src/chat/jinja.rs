//! The Jinja environment of transformers for chat templates, implemented with minijinja.
//!
//! Templates are untrusted. Fuel limits instructions, minijinja limits recursion, and a budget limits the bytes that a
//! template prints or that filters and methods produce.

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value,
    machinery::{CompiledTemplate, Vm, make_string_output},
    value::{Kwargs, ValueKind},
};

use super::{
    budget::{made, spend, start_budget},
    json, methods, operators, python,
};

/// Maximum instructions of one rendering. The largest templates use some thousand per message.
const FUEL: u64 = 5_000_000;

/// Renders a template with a context.
pub fn render(env: &Environment, template: &CompiledTemplate, context: Value) -> Result<String, Error> {
    start_budget();
    let (mut text, escape) = (String::new(), template.initial_auto_escape);
    let mut out = make_string_output(&mut text);
    Vm::new(env).eval(&template.instructions, context, &template.blocks, &mut out, escape)?;
    Ok(text)
}

/// An environment without templates.
pub fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_formatter(print);
    env.set_unknown_method_callback(methods::call);
    env.remove_global("debug");
    env.add_function("raise_exception", raise_exception);

    env.add_filter("tojson", |value: &Value, ascii: Option<bool>, indent: Option<Value>, options: Kwargs| {
        json::tojson(value, ascii, indent, options)
    });
    env.add_filter("string", |value: &Value| made(python::str(value)));
    env.add_filter("trim", |value: &Value, chars: Option<Value>| methods::trim(&python::str(value), chars));
    env.add_filter("upper", |value: &Value| python::str(value).to_uppercase());
    env.add_filter("lower", |value: &Value| python::str(value).to_lowercase());
    env.add_filter("replace", |value: &Value, old: &str, new: &str, count: Option<i64>, options: Kwargs| {
        methods::replace(&python::str(value), old, new, count, options)
    });
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("int", int);
    env.add_filter("float", float);
    // These filters can pad to any width or number.
    for name in ["pprint", "format", "batch", "slice"] {
        env.remove_filter(name);
    }

    operators::add_to(&mut env);
    // In Python, strings and mappings have a length and items.
    env.add_test("sequence", |value: &Value| is_iterable(value));
    env.add_test("iterable", |value: &Value| is_iterable(value));
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env
}

fn is_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable)
}

/// `{{ value }}`.
fn print(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    let write = |out: &mut Output, text: &str| {
        spend(text.len())?;
        out.write_str(text).map_err(Error::from)
    };
    match value.as_str() {
        Some(text) => write(out, text),
        None => write(out, &python::str(value)),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `join(separator, attribute)`.
fn join(
    state: &State,
    values: Value,
    separator: Option<String>,
    attribute: Option<String>,
    options: Kwargs,
) -> Result<String, Error> {
    let separator = options.get::<Option<String>>("d")?.or(separator).unwrap_or_default();
    let attribute = options.get::<Option<String>>("attribute")?.or(attribute);
    options.assert_all_used()?;
    let values = match attribute {
        Some(name) => {
            let name = Value::from_iter([("attribute", name)]);
            let name: Kwargs = name.try_into()?;
            state.apply_filter("map", &[values, name.into()])?
        }
        None => values,
    };
    methods::join(&separator, &values)
}

/// `indent(width, first, blank)`.
fn indent(
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = options.get::<Option<Value>>("width")?.or(width).unwrap_or(Value::from(4));
    let first = options.get::<Option<bool>>("first")?.or(first).unwrap_or(false);
    let blank = options.get::<Option<bool>>("blank")?.or(blank).unwrap_or(false);
    options.assert_all_used()?;
    let indention = match (width.as_str(), width.as_i64()) {
        (Some(text), _) => text.to_string(),
        (None, Some(spaces @ ..=1024)) => " ".repeat(spaces.max(0) as usize),
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "`width` must be a text or at most 1024")),
    };
    let lines = text.lines().count() + 1;
    spend(lines.saturating_mul(indention.len()).saturating_add(text.len()))?;
    let mut out = String::new();
    // A line break at the end begins an empty line.
    for (index, line) in methods::lines(&format!("{text}\n")).into_iter().enumerate() {
        out.push_str(if index > 0 { "\n" } else { "" });
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `int(default)`: returns the default if the value is not a number.
fn int(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok().or_else(|| text.trim().parse::<f64>().ok().map(|x| x as i64)),
        None if value.kind() == ValueKind::Bool => Some(i64::from(value.is_true())),
        None => value.as_i64().or_else(|| f64::try_from(value.clone()).ok().map(|x| x as i64)),
    };
    number.map_or(default.unwrap_or(Value::from(0)), Value::from)
}

/// `float(default)`.
fn float(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    number.map_or(default.unwrap_or(Value::from(0.0)), Value::from)
}
