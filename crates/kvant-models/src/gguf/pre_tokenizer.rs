//! Pre-tokenizers by their names in `tokenizer.ggml.pre`: they divide a text before byte pairs are merged.
//!
//! Each expression divides all parts that the previous one left: matches become separate parts. The expressions are the
//! ones in the families' `tokenizer.json`.

use crate::{Error, Result};

/// The pre-tokenizer of a name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PreTokenizer {
    pub expressions: &'static [&'static str],
    /// Whether text is first normalised to NFC.
    pub nfc: bool,
    /// Whether a part that is a token is kept whole, independent of the merges.
    pub whole_parts: bool,
    /// Whether BOS is added if the file does not specify it.
    pub adds_bos: bool,
}

/// The English contractions, in upper and lower case.
macro_rules! contraction {
    () => {
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}
/// Symbols with line ends, and white space. The last space belongs to the next word.
macro_rules! symbols_and_spaces {
    () => {
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}
macro_rules! upper {
    () => {
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    };
}
macro_rules! lower {
    () => {
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    };
}
/// Words, divided before an upper-case letter that follows a lower-case one. The parameter follows each word.
macro_rules! cased_words {
    ($suffix:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?",
            upper!(),
            "*",
            lower!(),
            "+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?",
            upper!(),
            "+",
            lower!(),
            "*",
            $suffix
        )
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|", symbols_and_spaces!());
const QWEN2: &str = concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", symbols_and_spaces!());
const QWEN35: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(cased_words!(""), r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+");
const GPT4O: &str = concat!(
    cased_words!("(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const SEED_CODER: &str =
    concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+");
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const DEEPSEEK3_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Han characters, most scripts with lower code points, and Hangul.
const DEEPSEEK_ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";

impl PreTokenizer {
    /// # Errors
    /// `Unsupported` for an unknown name.
    pub fn named(name: &str) -> Result<PreTokenizer> {
        let plain = |expressions| PreTokenizer { expressions, nfc: false, whole_parts: false, adds_bos: false };
        Ok(match name {
            "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "lfm2" => {
                PreTokenizer { whole_parts: true, adds_bos: true, ..plain(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => plain(&[LLAMA3]),
            "glm4" => PreTokenizer { whole_parts: true, ..plain(&[LLAMA3]) },
            "qwen2" | "deepseek-r1-qwen" | "megrez" => PreTokenizer { nfc: true, ..plain(&[QWEN2]) },
            "qwen35" => plain(&[QWEN35]),
            "stablelm2" | "hunyuan" | "grok-2" | "solar-open" => plain(&[QWEN2]),
            "tekken" => PreTokenizer { whole_parts: true, adds_bos: true, ..plain(&[TEKKEN]) },
            "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => plain(&[GPT4O]),
            "gpt-2" | "mpt" | "olmo" | "jais" | "phi-2" | "exaone4" | "mellum" | "trillion" | "granite-docling" => {
                plain(&[GPT2])
            }
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" => {
                plain(&[r"\p{N}", GPT2])
            }
            "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            "deepseek-llm" => plain(&[
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                DEEPSEEK_ASIAN,
                r"\p{N}+",
            ]),
            "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_ASIAN, r"\p{N}"]),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
                plain(&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3_WORDS])
            }
            "seed-coder" => plain(&[SEED_CODER]),
            "bailingmoe" | "bailingmoe2" => plain(&[BAILING]),
            _ => {
                return Err(Error::Unsupported {
                    what: format!("tokenizer.ggml.pre {:?}", name.chars().take(80).collect::<String>()),
                    reason: "the rule by which it divides text is unknown".to_string(),
                });
            }
        })
    }
}
