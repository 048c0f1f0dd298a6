//! The tokens that `kvant eval` predicts.

/// The line between two documents of a text file.
const SEPARATOR: &str = "<|doc|>";

/// The documents of a text: the parts between lines that contain only `SEPARATOR`, trimmed. Empty documents are
/// omitted.
pub fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in text.split_inclusive('\n') {
        if line.trim_end() == SEPARATOR {
            documents.push(String::new());
        } else {
            documents.last_mut().expect("there is always one").push_str(line);
        }
    }
    documents.iter().map(|text| text.trim().to_string()).filter(|text| !text.is_empty()).collect()
}

/// Divides tokens into windows. A shorter last window counts if it has at least two tokens.
pub fn windows(tokens: &[u32], window: usize) -> Vec<&[u32]> {
    tokens.chunks(window).filter(|window| window.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_cut_and_trimmed() {
        assert_eq!(
            documents("\n one\ntwo \n<|doc|>\r\n\n<|doc|>\nthree <|doc|> four\n"),
            ["one\ntwo", "three <|doc|> four"]
        );
        assert_eq!(documents(" \n<|doc|>\n"), [""; 0]);
        assert_eq!(documents("a text without separators"), ["a text without separators"]);
    }

    #[test]
    fn a_window_predicts_at_least_one_token() {
        let lengths = |n: usize| windows(&vec![0; n], 4).iter().map(|w| w.len()).collect::<Vec<_>>();
        assert_eq!(lengths(8), [4, 4]);
        assert_eq!(lengths(9), [4, 4]);
        assert_eq!(lengths(10), [4, 4, 2]);
        assert_eq!(lengths(1), [0; 0]);
    }
}
