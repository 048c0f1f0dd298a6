//! Rendered conversations equal transformers'.

use std::{collections::BTreeMap, path::Path};

use kvant_models::{
    Files,
    chat::{ChatTemplate, Clock, Conversation, JsonValue, Message, SpecialTokens, ToolCall},
};
use serde::Deserialize;
use serde_json::Value;

/// A file of `tools/chat_templates.py`.
#[derive(Deserialize)]
struct Golden {
    now: i64,
    tokens: BTreeMap<String, String>,
    conversations: BTreeMap<String, Vec<Message>>,
    tools: BTreeMap<String, Option<Vec<Value>>>,
    thinking: BTreeMap<String, BTreeMap<String, JsonValue>>,
    cases: Vec<Case>,
    /// By template.
    expected: BTreeMap<String, Vec<Expected>>,
}

#[derive(Debug, Deserialize)]
struct Case {
    messages: String,
    tools: String,
    thinking: String,
    add_generation_prompt: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Expected {
    Text(String),
    /// The template or Python rejects the conversation.
    Error(String),
}

/// Renders every case of every template in a folder. Returns the number of cases, and a line for each difference.
fn compare(golden: &Path, templates: &Path) -> (usize, Vec<String>) {
    let golden: Golden = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let (mut count, mut lazy, mut wrong) = (0, 0, Vec::new());
    for (name, expected) in &golden.expected {
        let source = std::fs::read_to_string(templates.join(format!("{name}.jinja"))).unwrap();
        let tokens: SpecialTokens = golden.tokens.iter().map(|(name, token)| (name.as_str(), token.as_str())).collect();
        let template = ChatTemplate::new(&source, tokens);
        for (case, expected) in golden.cases.iter().zip(expected) {
            let mut conversation = Conversation::new(&golden.conversations[&case.messages])
                .tools(golden.tools[&case.tools].as_deref().unwrap_or_default())
                .generation_prompt(case.add_generation_prompt)
                .clock(Clock::Utc(golden.now));
            conversation.variables = golden.thinking[&case.thinking].clone();
            let found = match &template {
                Ok(template) => template.render(&conversation),
                Err(error) => Err(kvant_models::Error::Template { reason: error.to_string() }),
            };
            count += 1;
            match (found, expected) {
                (Ok(found), Expected::Text(expected)) if found == *expected => {}
                (Err(_), Expected::Error(_)) => {}
                (Ok(found), Expected::Text(expected)) => {
                    let same = found.bytes().zip(expected.bytes()).take_while(|(a, b)| a == b).count();
                    let around = |text: &str| {
                        String::from_utf8_lossy(&text.as_bytes()[same.saturating_sub(60)..text.len().min(same + 60)])
                            .into_owned()
                    };
                    wrong.push(format!(
                        "{name} {case:?}:\n  found    {:?}\n  expected {:?}",
                        around(&found),
                        around(expected)
                    ));
                }
                (Err(error), Expected::Text(_)) => wrong.push(format!("{name} {case:?}: {error}")),
                // Python has lists that `tojson` rejects. This error is not reproduced.
                (Ok(_), Expected::Error(error)) if error.contains("generator is not JSON serializable") => lazy += 1,
                (Ok(_), Expected::Error(error)) => wrong.push(format!("{name} {case:?}: rendered, expected {error}")),
            }
        }
    }
    println!("{} of {count} pairs of template and case agree", count - wrong.len() - lazy);
    (count, wrong)
}

#[test]
fn own_templates() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat");
    let (count, wrong) = compare(&folder.join("templates.json"), &folder);
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 100);
}

#[test]
fn templates_of_llama_cpp() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/chat-templates");
    if !folder.join("expected.json").exists() {
        eprintln!("skipped: run tools/chat_templates.py --all, which downloads the templates");
        return;
    }
    let (count, wrong) = compare(&folder.join("expected.json"), &folder);
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}

fn render(source: &str) -> kvant_models::Result<String> {
    ChatTemplate::new(source, SpecialTokens::default())?.render(&Conversation::new(&[Message::user("Hello")]))
}

#[test]
fn hostile_templates_end_with_an_error() {
    let deep_lists = format!("{{{{ {}{} }}}}", "[".repeat(5000), "]".repeat(5000));
    let deep_blocks = "{% if true %}".repeat(5000);
    let long = format!(
        "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{}{{% endfor %}}{{% endfor %}}",
        "x".repeat(100_000)
    );
    let captured = format!("{{% set x %}}{long}{{% endset %}}");
    let mut wrong = Vec::new();
    for source in [
        // Endless loops.
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        &long,
        // Unbounded sizes.
        &captured,
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x.join(['', n.x, n.x]) %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = '{}{}'.format(n.x, n.x) %}{% endfor %}",
        "{% set n = namespace(x='a', l=[]) %}{% set n.x = 'a' * 1000000 %}{% for i in range(90000) %}{% set n.l = n.l + [n.x[1:]] %}{% endfor %}",
        "{% set n = namespace(x={}) %}{% for i in range(90000) %}{% set n.x = {'a': n.x} %}{% endfor %}{{ n.x | tojson }}",
        "{{ 'a' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ 'a' | indent(99999999999, true) }}",
        "{{ ('a\n' * 100000) | indent('a' * 100000) }}",
        "{{ [1] | tojson(indent=99999999999) }}",
        "{{ [1] | batch(99999999999, 0) }}",
        "{{ range(99999999999) | list }}",
        "{{ 9223372036854775807 * 9223372036854775807 * 9223372036854775807 }}",
        "{{ 2 ** 99999999 }}",
        "{{ 1 // 0 }}",
        "{{ 1 % 0 }}",
        // Invalid templates.
        "{{ x.y.z }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ 'abc'.split('') }}",
        "{{ strftime_now('%!') }}",
        "{% include 'chat template' %}",
        "{% extends 'chat template' %}",
        "{{ 1 | nosuchfilter }}",
        "{% nosuchtag %}",
        "{{ 'a",
        "{% for",
        &deep_lists,
        &deep_blocks,
    ] {
        let started = std::time::Instant::now();
        let result = render(source);
        let shown = &source[..source.len().min(100)];
        if !matches!(result, Err(kvant_models::Error::Template { .. })) {
            wrong.push(format!("{shown}: {result:?}"));
        }
        assert!(started.elapsed().as_secs() < 20, "{shown}: {:?}", started.elapsed());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn dates_count_towards_the_limit() {
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ strftime_now('%c') }}{% endfor %}{% endfor %}",
        &format!("{{% for i in range(99999) %}}{{{{ strftime_now('{}') }}}}{{% endfor %}}", "%c".repeat(500)),
        &format!("{{{{ strftime_now('{}') }}}}", "%c".repeat(100_000)),
    ] {
        let started = std::time::Instant::now();
        let message = render(source).unwrap_err().to_string();
        assert!(message.contains("makes more than") || message.contains("at most 1024 bytes"), "{message}");
        assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    }
    assert_eq!(render("{{ strftime_now('%d') }}").unwrap().len(), 2);
}

/// Templates that overflow or never end in libraries.
#[test]
fn odd_templates_return() {
    let deep_not = format!("{{{{ {} true }}}}", "not ".repeat(100_000));
    for source in [
        deep_not.as_str(),
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "{{ 'abc'.count('') }}",
        "{{ ''.count('') }}",
        "{{ messages[9:-9:-3] }}",
        "{{ 'abc'[2:0:-1] }}{{ 'abc'[9:1:-1] }}{{ 'abc'[1:9:-1] }}{{ 'abc'[:-9] }}",
        "{{ [1, 2, 3][::-1] | list }}",
        "{{ 'é'.find('') }}{{ '€uro'.find('u') }}",
        "{{ '{0[}'.format(1) }}",
        "{{ 'a' is divisibleby(0) }}",
        "{{ -9223372036854775808 | abs }}",
        "{{ 1.5 | round(400) }}",
    ] {
        // Either an error or a text is valid.
        let _ = render(source);
    }
    assert_eq!(render("{{ 'abc'.count('') }} {{ '€uro'.find('u') }}").unwrap(), "4 1");
}

/// Messages of templates reach the user with the line.
#[test]
fn errors_name_the_reason() {
    let message = |source| render(source).unwrap_err().to_string();
    assert_eq!(message("a\n{{ raise_exception('Only one turn!') }}"), "chat template: Only one turn! (line 2)");
    assert!(message("{% if %}").starts_with("chat template: unexpected"), "{}", message("{% if %}"));
}

#[test]
fn checkpoints_keep_templates_in_several_places() {
    let dir = tempfile::tempdir().unwrap();
    let files = Files::directory(dir.path());
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let messages = [Message::user("Hello")];
    let tools = [serde_json::json!({"type": "function", "function": {"name": "f"}})];
    let render = |tools: &[Value]| {
        let template = ChatTemplate::load_files(&files).unwrap();
        template.map(|template| template.render(&Conversation::new(&messages).tools(tools)).unwrap())
    };
    assert_eq!(render(&[]), None);
    write("tokenizer_config.json", r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}"#);
    assert_eq!(render(&[]), None);
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>", "pad_token": null,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}"}"#,
    );
    assert_eq!(render(&tools).unwrap(), "<b>Hello<e>False");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "tool_use", "template": "{{ tools[0].function.name }}"},
        {"name": "default", "template": "plain"}]}"#,
    );
    assert_eq!((render(&[]).unwrap(), render(&tools).unwrap()), ("plain".into(), "f".into()));
    write("chat_template.jinja", "from a file");
    assert_eq!(render(&[]).unwrap(), "from a file");
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "tools from a file");
    assert_eq!(render(&tools).unwrap(), "tools from a file");
    write("chat_template.jinja", "{{");
    let error = ChatTemplate::load_files(&files).unwrap_err().to_string();
    assert!(error.contains("chat template"), "{error}");
}

/// As transformers' `continue_final_message`.
#[test]
fn the_last_answer_can_be_continued() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    let render = |source: &str, messages: &[Message]| {
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        template.render(&Conversation::new(messages).continue_last(true))
    };
    let messages = [Message::user("A"), Message::assistant(" One, ")];
    assert_eq!(render(plain, &messages).unwrap(), "<user>A<end><assistant> One, ");
    let trimmed = plain.replace("m.content", "m.content | trim");
    assert_eq!(render(&trimmed, &messages).unwrap(), "<user>A<end><assistant>One,");
    // A template that prints the content twice is cut after the second occurrence.
    let twice = plain.replace("{{ m.content }}", "{{ m.content }}|{{ m.content }}");
    assert_eq!(render(&twice, &messages).unwrap(), "<user>A|A<end><assistant> One, | One, ");
    let empty = [Message::user("A"), Message::assistant("")];
    assert_eq!(render(plain, &empty).unwrap(), "<user>A<end><assistant>");

    assert!(render(plain, &messages[..1]).unwrap_err().to_string().contains("messages"));
    assert!(render(plain, &[]).is_err());
    assert!(render("{{ messages[0].content }}", &messages).unwrap_err().to_string().contains("last message"));
}

/// Python's integers have unlimited length. Other numbers keep their JSON text.
#[test]
fn numbers_of_arguments_keep_their_digits() {
    let arguments = JsonValue::parse(
        r#"{"a": 123456789012345678901, "b": 1234567890123456789012345678901234567890123, "c": [0.12345678901234567890], "d": 1.50, "e": 1e400}"#,
    );
    let messages = [Message::assistant("").tool_calls(vec![ToolCall::new("1", "f", arguments.unwrap())])];
    let render = |source: &str| {
        let source = source.replace("ARGS", "messages[0].tool_calls[0].function.arguments");
        let template = ChatTemplate::new(&source, SpecialTokens::default()).unwrap();
        template.render(&Conversation::new(&messages)).unwrap()
    };
    let json = r#"{"a": 123456789012345678901, "b": 1234567890123456789012345678901234567890123, "c": [0.12345678901234567890], "d": 1.5, "e": 1e400}"#;
    assert_eq!(render("{{ ARGS | tojson }}"), json);
    assert_eq!(render("{{ ARGS }}"), json.replace('"', "'"));
    assert_eq!(
        render("{{ ARGS.b }} {{ ARGS['e'] ~ '' }} {{ ARGS.d + 1 }}"),
        "1234567890123456789012345678901234567890123 1e400 2.5"
    );
}
