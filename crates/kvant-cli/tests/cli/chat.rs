use crate::{kvant, kvant_with_input, scratch, shipped, str};

#[test]
fn a_model_without_a_template_names_the_options() {
    let error = kvant(&["chat", str(&shipped())]).error();
    assert!(error.contains("no chat template") && error.contains("--template") && error.contains("--plain"), "{error}");
}

#[test]
fn lines_are_messages_and_commands() {
    let directory = scratch("chat");
    let saved = directory.join("saved.json");
    let input = format!("What is a Vec?\nAnd a slice?\n/save {}\n", saved.display());
    let model = shipped();
    let args = ["chat", str(&model), "--plain", "--max-tokens", "8", "--temperature", "0", "--system", "Be brief."];
    let text = kvant_with_input(&args, input.as_bytes()).ok();
    let messages: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    let answers: String = [2, 4].map(|i| format!("{}\n", messages[i]["content"].as_str().unwrap())).concat();
    assert_eq!(text, answers);

    // Reusing the kept prefix changes nothing: the second answer to the loaded first turn is equal.
    std::fs::write(&saved, serde_json::to_string(&messages[..3]).unwrap()).unwrap();
    let input = format!("/load {}\nAnd a slice?\n", saved.display());
    assert_eq!(
        format!("{}\n", messages[4]["content"].as_str().unwrap()),
        kvant_with_input(&args[..7], input.as_bytes()).ok()
    );
}

/// Commands that change sampling or show state. The answer to a message reports its speed.
#[test]
fn commands_of_a_chat() {
    let model = shipped();
    let args = ["chat", str(&model), "--plain", "--max-tokens", "6", "--seed", "1"];
    let directory = scratch("chat-commands");
    let saved = directory.join("saved.json");
    let path = saved.display();
    let input = format!(
        "/set temperature 0\n/set max_tokens 5\nWhat is a Vec?\n/retry\n/set\n/kv\n/save {path}\n/load {path}\n/quit\nnever\n"
    );
    let run = kvant_with_input(&args, input.as_bytes());
    assert_eq!(run.code, 0, "{}", run.stderr);
    // Greedy answers are equal, and lines after /quit are not read.
    let speeds =
        run.stderr.lines().filter(|line| line.starts_with("(5 tokens, ") && line.contains(" a second; prompt "));
    assert_eq!(speeds.count(), 2, "{}", run.stderr);
    for text in [
        "temperature 0,",
        "max_tokens 5",
        "f16: ",
        " of 4096 tokens, ",
        "(saved 2 messages to ",
        "(loaded 2 messages from ",
    ] {
        assert!(run.stderr.contains(text), "{text}: {}", run.stderr);
    }
    let half = run.stdout.len() / 2;
    assert_eq!(run.stdout[..half], run.stdout[half..], "{}", run.stdout);
    let wrong =
        kvant_with_input(&args, b"/retry\n/set top_p x\n/set top_p 7\n/set max_tokens 0\n/set color red\n/exit\n");
    for text in
        ["no message to answer again", "got \"x\"", "`top_p` must be", "got \"0\"", "got \"color\"", "5 of 5 lines"]
    {
        assert!(wrong.stderr.contains(text), "{text}: {}", wrong.stderr);
    }
}

#[test]
fn a_chat_without_a_model_says_which_to_get() {
    let error = kvant(&["chat"]).error();
    assert!(error.contains("kvant chat ") && error.contains(".gguf"), "{error}");
}

/// A context beyond the trained length warns.
#[test]
fn a_long_context_warns() {
    let model = shipped();
    let run = kvant_with_input(&["chat", str(&model), "--plain", "--context", "20000"], b"/exit\n");
    assert!(run.code == 0 && run.stderr.contains("was trained for"), "{}", run.stderr);
}

#[test]
fn invalid_lines_name_the_expected_values() {
    let model = shipped();
    let args = ["chat", str(&model), "--plain"];
    let run = kvant_with_input(&args, b"/save\n/load\n/think maybe\n/nope\n");
    for message in ["/save needs", "/load needs", "on, off or hidden, got \"maybe\"", "/nope: no such command"] {
        assert!(run.stderr.contains(message), "{}", run.stderr);
    }
    assert!(run.error().ends_with("error: 4 of 4 lines failed\n"));
    assert!(kvant_with_input(&args, b"\xff\n").error().contains("standard input: "));
}

/// For example a message that alone exceeds the context. The following lines are still answered.
#[test]
fn a_message_that_fails_is_in_the_exit_code() {
    let model = shipped();
    let args = ["chat", str(&model), "--plain", "--context", "64", "--max-tokens", "4", "--temperature", "0"];
    let input = format!("{}\nWhat is a Vec?\n", "long ".repeat(100));
    let run = kvant_with_input(&args, input.as_bytes());
    assert!(run.code == 1 && run.stdout.lines().count() > 0, "{}", run.stderr);
    for message in ["fewer tokens than --context 64", "error: 1 of 2 lines failed\n"] {
        assert!(run.stderr.contains(message), "{}", run.stderr);
    }
}

#[test]
fn completions_and_manual_pages() {
    assert!(kvant(&["completions", "bash"]).ok().contains("kvant"));
    let directory = scratch("man");
    kvant(&["man", str(&directory)]).ok();
    assert!(directory.join("kvant-chat.1").exists());
}

/// Drafts do not change a conversation.
#[test]
fn a_chat_with_drafts() {
    let model = shipped();
    let args = ["chat", str(&model), "--plain", "--max-tokens", "12", "--temperature", "0"];
    let input = b"What is a Vec?\nWhat is a Vec?\n/kv\n";
    let text = kvant_with_input(&args, input).ok();
    let drafting = kvant_with_input(&[&args[..], &["--drafts", "3"]].concat(), input);
    assert!(drafting.stderr.contains(" of 4096 tokens, "), "{}", drafting.stderr);
    assert_eq!(drafting.ok(), text);
}
