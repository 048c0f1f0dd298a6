//! How families of models write replies.

/// The reply format of a family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplyFormat {
    /// Everything is content.
    Plain,
    /// `<think>…</think>`, and calls in `<tool_call>…</tool_call>`, as JSON (Qwen 3, Hermes, DeepSeek's reasoning and
    /// others) or as [`ReplyFormat::QwenXml`].
    Hermes,
    /// As [`ReplyFormat::Hermes`], but calls are `<function=…>` with parameters if the model decides (Qwen3-Coder,
    /// Qwen 3.5).
    QwenXml,
    /// `<think>…</think>`, and calls in `<|tool_call_start|>…<|tool_call_end|>`, as a list of Python calls (LFM2) or as
    /// JSON.
    Lfm2,
    /// `[THINK]…[/THINK]`, and calls after `[TOOL_CALLS]`.
    Mistral,
    /// A reply that is JSON, or text after `<|python_tag|>`, is a call.
    Llama3,
    /// `<|channel>thought…<channel|>`, and calls in `<|tool_call>…<tool_call|>`.
    Gemma4,
    /// Channels of gpt-oss: `<|channel|>analysis<|message|>…<|end|>`.
    Harmony,
}

impl ReplyFormat {
    /// The format that a chat template implies.
    pub fn of_template(source: &str) -> ReplyFormat {
        let has = |text| source.contains(text);
        match () {
            () if has("<|channel|>") && has("<|message|>") => ReplyFormat::Harmony,
            () if has("<|channel>") || has("<|tool_call>") => ReplyFormat::Gemma4,
            () if has("[TOOL_CALLS]") || has("[THINK]") => ReplyFormat::Mistral,
            () if has("<|tool_list_start|>") || has("<|tool_call_start|>") || has("List of tools: [") => {
                ReplyFormat::Lfm2
            }
            () if has("<tool_call>") && has("<function=") => ReplyFormat::QwenXml,
            () if has("<tool_call>") || has("<think>") || has("</think>") => ReplyFormat::Hermes,
            () if has("<|start_header_id|>") && has("parameters") => ReplyFormat::Llama3,
            () => ReplyFormat::Plain,
        }
    }
}
