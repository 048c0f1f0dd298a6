//! Suggests models if none is named, or if the shipped model does not support the request.

use kvant::Device;

use crate::output;

/// Chat models with their numbers of parameters, small ones first. Their checkpoints have two bytes per parameter.
const MODELS: [(&str, usize); 5] = [
    ("HuggingFaceTB/SmolLM2-360M-Instruct", 362_000_000),
    ("Qwen/Qwen3-0.6B", 596_000_000),
    ("Qwen/Qwen3-1.7B", 1_720_000_000),
    ("Qwen/Qwen3-4B-Instruct-2507", 4_020_000_000),
    ("Qwen/Qwen3-8B", 8_190_000_000),
];

/// Memory for each byte of weights, including caches and activations.
const ROOM: f64 = 1.25;

/// Advice for a command that requires a chat model.
pub fn text(command: &str) -> String {
    let free = Device::default().memory().ok().map(|memory| memory.free);
    of_memory(command, free)
}

fn of_memory(command: &str, free: Option<usize>) -> String {
    let fits = |parameters: usize| free.is_none_or(|free| parameters as f64 * 2.0 * ROOM <= free as f64);
    let names: Vec<&str> = MODELS.iter().filter(|(_, parameters)| fits(*parameters)).map(|(name, _)| *name).collect();
    let any = "The directory of a checkpoint or a .gguf file will do as well";
    let Some(first) = names.first() else {
        return format!("Small models in 4 bits are GGUF files: kvant {command} FILE.gguf. {any}");
    };
    let of_device = free.map_or(String::new(), |free| format!(" in the {} that are free", output::bytes(free)));
    let names = names.join(", ");
    format!("Models that fit{of_device}: {names}. `kvant {command} {first}` downloads it once and starts. {any}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_models_that_fit() {
        let text = of_memory("chat", Some(2 << 30));
        assert!(text.contains("Qwen3-0.6B") && !text.contains("Qwen3-4B") && text.contains("2.0 GiB"), "{text}");
        assert!(of_memory("chat", None).contains("Qwen3-8B"));
        assert!(of_memory("serve", Some(1 << 20)).contains("kvant serve FILE.gguf"));
    }
}
