//! Windows of families that configure them by several keys: equal to transformers.

use kvant_models::{Config, Error};
use serde_json::{Value, json};

use crate::config_of;

fn windows(config: &Value) -> Result<Vec<Option<usize>>, Error> {
    Ok(Config::parse(config)?.decoder.blocks.iter().map(|block| block.attention().unwrap().window).collect())
}

#[test]
fn windows_of_qwen3() {
    let mut config = config_of("qwen3_window");
    assert_eq!(windows(&config).unwrap(), [Some(8), None, Some(8)]);
    // Layer types without a window.
    config["use_sliding_window"] = json!(false);
    assert!(matches!(windows(&config), Err(Error::Config { key, .. }) if key == "use_sliding_window"));
    config.as_object_mut().unwrap().remove("layer_types");
    assert_eq!(windows(&config).unwrap(), [None; 3]);
    config["use_sliding_window"] = json!(true);
    assert_eq!(windows(&config).unwrap(), [None, None, Some(8)]);
    config["sliding_window"] = json!(null);
    assert_eq!(windows(&config).unwrap(), [None; 3]);
    config.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(windows(&config).unwrap(), [None, None, Some(4096)]);
}

/// A mixture of experts has no `max_window_layers`.
#[test]
fn windows_of_qwen3_moe() {
    let mut config = config_of("qwen3_moe");
    config["sliding_window"] = json!(8);
    assert_eq!(windows(&config).unwrap(), [None; 3]);
    config["use_sliding_window"] = json!(true);
    config["max_window_layers"] = json!(2);
    assert_eq!(windows(&config).unwrap(), [Some(8); 3]);
}

/// The text model of a `mistral3` file without the key has the window of Mistral's first version.
#[test]
fn windows_of_mistral3() {
    let mut text = config_of("mistral");
    let layers = text["num_hidden_layers"].as_u64().unwrap() as usize;
    let whole = |text: &Value| json!({"model_type": "mistral3", "text_config": text});
    assert_eq!(windows(&whole(&text)).unwrap(), vec![Some(8); layers]);
    text["sliding_window"] = json!(null);
    assert_eq!(windows(&whole(&text)).unwrap(), vec![None; layers]);
    text.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(windows(&whole(&text)).unwrap(), vec![Some(4096); layers]);
}
