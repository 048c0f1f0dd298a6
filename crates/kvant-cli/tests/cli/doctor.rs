use crate::{assert_keys, kvant};

const KEYS: &str = "device case status error bound reason first_us us";

/// On the CPU every case is correct; together the cases cover every operation.
#[test]
fn all_cases_pass_on_the_cpu() {
    let lines = kvant(&["doctor", "--device", "cpu", "--json"]).json();
    for line in &lines {
        assert_keys(line, KEYS);
        assert_eq!(line["status"], "ok", "{line}");
        assert!(line["us"].as_f64().unwrap() > 0.0 && line["error"].as_f64() <= line["bound"].as_f64(), "{line}");
    }
    let cases: Vec<&str> = lines.iter().map(|line| line["case"].as_str().unwrap()).collect();
    for operation in
        "add add_bias argmax attend copy embed gate hadamard kv_read kv_write linear moe_combine moe_route \
                      norm_rope norm_rope_write rms_norm sample softcap"
            .split_whitespace()
    {
        let has = |case: &&str| case.split([',', ' ']).any(|word| word == operation);
        assert!(cases.iter().any(has), "{operation}");
    }
}

#[test]
fn each_case_prints_one_line() {
    let text = kvant(&["doctor", "--device", "reference", "--activations", "bf16"]).ok();
    assert!(text.starts_with("reference"), "{text}");
    let lines: Vec<&str> = text.lines().skip(1).collect();
    let (verdict, cases) = lines.split_last().unwrap();
    assert!(cases.iter().all(|line| line.starts_with("ok     ")), "{text}");
    let count = cases.len();
    assert!(verdict.starts_with("verdict: ") && verdict.contains(&format!("{count} of {count} cases")), "{verdict}");
}
