//! A model that is divided among several devices.

use crate::{kvant, scratch, shipped, str};

/// The text that the most probable tokens make.
fn text(rest: &str) -> String {
    let args = "generate --temperature 0 --max-tokens 12 --json --kv f32 --device cpu".split(' ');
    let lines = kvant(&args.chain(rest.split_whitespace()).collect::<Vec<_>>()).json();
    lines[0]["text"].as_str().unwrap().to_string()
}

#[test]
fn groups_give_the_text_of_one_device() {
    let one = text("");
    for division in ["", " --cache-division heads", " --cache-division positions"] {
        assert_eq!(text(&format!("--tensor-parallel 2{division}")), one, "{division}");
    }
    let args = "generate --temperature 0 --max-tokens 4 --json --devices cpu,cpu --threads 2".split(' ');
    let lines = kvant(&args.collect::<Vec<_>>()).json();
    let device = lines[0]["device"].as_str().unwrap();
    assert!(device.contains("2 ranks") && device.contains("1 threads"), "{device}");
}

#[test]
fn logits_of_a_group() {
    let rows = |name: &str, rest: &[&str]| -> Vec<f32> {
        let (model, out) = (shipped(), scratch(name).join("logits.safetensors"));
        let args = ["logits", "--tokens", "2 17 301 44 9", "--device", "cpu", "--model"];
        let args: Vec<&str> = args.into_iter().chain([str(&model), "--out", str(&out)]).chain(rest.to_vec()).collect();
        kvant(&args).ok();
        let bytes = std::fs::read(out).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = file.tensor("logits").unwrap().data().to_vec();
        data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let (one, four) = (rows("logits_of_one", &[]), rows("logits_of_four", &["--tensor-parallel", "4"]));
    let differences = one.iter().zip(&four).map(|(a, b)| (a - b).abs());
    assert!(one.len() == four.len() && differences.fold(0.0, f32::max) < 2e-3);
}

#[test]
fn a_model_is_measured_on_a_group() {
    let args =
        "bench model --device cpu --tensor-parallel 2 --decode 4 --sequences 2 --context 8 --seconds 0.01 --json";
    let lines = kvant(&args.split(' ').collect::<Vec<_>>()).json();
    let one = "bench model --device cpu --decode 4 --seconds 0.01 --json";
    let one = kvant(&one.split(' ').collect::<Vec<_>>()).json();
    let bytes = |lines: &[serde_json::Value], op: &str| {
        lines.iter().find(|line| line["op"] == op).and_then(|line| line["bytes"].as_f64()).unwrap()
    };
    // The embedding and the norms are on both.
    let part = bytes(&lines, "decode") / bytes(&one, "decode");
    assert!((0.5..0.6).contains(&part), "{part}");
    assert!(bytes(&lines, "batch") > bytes(&lines, "decode"));
}

#[test]
fn groups_that_cannot_be() {
    let fails = |args: &str, message: &str| {
        let error = kvant(&args.split(' ').collect::<Vec<_>>()).error();
        assert!(error.contains(message), "{error}");
    };
    let message = "4 heads of layer 0 do not divide among 3 devices: the model divides among 2, 4";
    fails("generate --device cpu --tensor-parallel 3", message);
    fails("generate --devices cpu,cpu --tensor-parallel 3", "--devices names 2 devices, and --tensor-parallel is 3");
    fails("generate --tensor-parallel 0", "--tensor-parallel");
    fails("generate --device cpu --devices cpu,cpu", "cannot be used with");
    fails("generate --device reference --tensor-parallel 2", "group");
    fails("generate --devices reference --threads 2", "--threads is for CPU devices");
    fails("generate --devices cpu,reference", "group");
    fails("eval --tensor-parallel 2", "--tensor-parallel");
    fails("generate --device cpu --tensor-parallel 2 --cache-division pages", "positions");
}
