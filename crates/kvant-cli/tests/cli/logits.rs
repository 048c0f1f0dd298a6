use crate::{kvant, scratch, shipped, str};

/// (tokens, vocabulary, logits).
fn logits(name: &str, tokens: &str, rest: &[&str]) -> (usize, usize, Vec<f32>) {
    let out = scratch(name).join("logits.safetensors");
    let args = ["logits", "--model", str(&shipped()), "--tokens", tokens, "--out", str(&out)].map(String::from);
    let args: Vec<&str> = args.iter().map(String::as_str).chain(rest.iter().copied()).collect();
    assert_eq!(kvant(&args).ok(), "");
    let bytes = std::fs::read(out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.names(), ["logits"]);
    let tensor = file.tensor("logits").unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
    let values = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    (tensor.shape()[0], tensor.shape()[1], values)
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_row_for_every_token() {
    let (rows, columns, values) = logits("logits_rows", "2 17 301 44 9", &[]);
    assert_eq!((rows, columns), (5, 4096));
    assert!(values.iter().all(|x| x.abs() <= 30.0), "the model's softcap is 30");
    // Later tokens do not change earlier rows.
    let (_, _, first) = logits("logits_prefix", "2 17", &[]);
    assert!(largest_difference(&values[..2 * 4096], &first) < 2e-3);
}

/// A device is not replaced, and an output file is readable by others.
#[cfg(unix)]
#[test]
fn devices_are_not_replaced() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let directory = scratch("logits_device");
    let (device, file) = (directory.join("device"), directory.join("file"));
    symlink("/dev/null", &device).unwrap();
    std::fs::write(directory.join("other"), "").unwrap();
    let run = |out| kvant(&["logits", "--model", str(&shipped()), "--tokens", "2", "--out", str(out)]);
    run(&file).ok();
    assert_eq!(file.metadata().unwrap().mode(), directory.join("other").metadata().unwrap().mode());
    run(&device).ok();
    assert!(device.is_symlink());
}

#[test]
fn logits_do_not_depend_on_the_step() {
    // Longer than the sliding window of 128, so that its rings wrap.
    let tokens: Vec<String> = (0..150).map(|i| ((i * 37 + 11) % 4000 + 5).to_string()).collect();
    let tokens = tokens.join(" ");
    let (_, _, at_once) = logits("logits_at_once", &tokens, &[]);
    for step in ["1", "7", "64"] {
        let (_, _, stepped) = logits(&format!("logits_step_{step}"), &tokens, &["--step", step]);
        let difference = largest_difference(&at_once, &stepped);
        // Prompts may be rounded to 16 bits, single tokens to 24 (`ops::Linear`).
        assert!(difference < 5e-3, "--step {step}: {difference}");
    }
}

#[test]
fn activations_of_16_bits_change_a_little() {
    let tokens = "2 17 301 44 9 80 81 82 700 12";
    let (_, _, exact) = logits("logits_f32", tokens, &[]);
    for activations in ["f16", "bf16"] {
        let (_, _, rounded) = logits(&format!("logits_{activations}"), tokens, &["--activations", activations]);
        let difference = largest_difference(&exact, &rounded);
        assert!(difference > 0.0 && difference < 1.0, "{activations}: {difference}");
    }
}

#[test]
fn a_quantised_cache_changes_a_little() {
    let tokens = "2 17 301 44 9 80 81 82 700 12";
    let (_, _, exact) = logits("logits_exact", tokens, &[]);
    let (_, _, tq8) = logits("logits_tq8", tokens, &["--kv", "tq8"]);
    let difference = largest_difference(&exact, &tq8);
    assert!(difference > 0.0 && difference < 1.0, "{difference}");
}
