use crate::{assert_keys, kvant};

#[test]
fn every_kind_is_listed_with_a_name_or_a_reason() {
    let lines = kvant(&["devices", "--json"]).json();
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["metal", "cuda", "cpu", "reference"]);
    for line in &lines {
        assert_keys(line, "kind index available default name reason memory_bytes free_bytes");
        let text = if line["available"].as_bool().unwrap() { &line["name"] } else { &line["reason"] };
        assert!(!text.as_str().unwrap().is_empty());
    }
    assert!(lines[2]["available"].as_bool().unwrap() && lines[3]["available"].as_bool().unwrap());
    assert_eq!(lines.iter().filter(|line| line["default"] == true).count(), 1);
}

#[test]
fn each_kind_prints_one_line() {
    let text = kvant(&["devices"]).ok();
    assert_eq!(text.lines().count(), 4);
    assert!(text.lines().any(|line| line.contains("cpu") && line.contains("threads")), "{text}");
}
