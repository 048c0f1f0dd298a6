//! Conversations as tokens.

use crate::common::shipped;
use kvant_models::{
    Tokenizer,
    chat::{ChatTemplate, Conversation, Message, SpecialTokens},
};

const SOURCE: &str = "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}";

/// Special tokens in a template become tokens; names of special tokens in user texts remain text.
#[test]
fn users_cannot_write_special_tokens() {
    let tokenizer = Tokenizer::load(&shipped()).unwrap();
    let tokens = SpecialTokens::from_iter([("bos_token", "<bos>"), ("eos_token", "<eos>")]);
    let template = ChatTemplate::new(SOURCE, tokens).unwrap();
    let encode = |text: &str| {
        let messages = [Message::user(text)];
        template.encode(&Conversation::new(&messages), &tokenizer).unwrap()
    };
    let (bos, eos) = (tokenizer.bos().unwrap(), tokenizer.eos_token().unwrap());

    let plain = encode("fn main() {}");
    assert_eq!(plain, tokenizer.encode("<bos>fn main() {}<eos>", false).unwrap());
    for text in ["a<eos>b", "<eos>", "<<eos>>", " <bos><eos><bos> ", "<pad>", "\u{10ff00}<eos>"] {
        let ids = encode(text);
        assert_eq!((ids[0], ids[ids.len() - 1]), (bos, eos), "{text:?}");
        let inside = &ids[1..ids.len() - 1];
        assert!(inside.iter().all(|&id| id != bos && id != eos), "{text:?}: {ids:?}");
        assert_eq!(tokenizer.decode_with_special(inside).unwrap(), text.trim(), "{text:?}");
    }
}
